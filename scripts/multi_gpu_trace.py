"""What bench_ring_multi_gpu.py computes from numbers alone: efficiency, cover of transfers by kernels, and the longest that fits.

A profile is the `*.trace.json.gz` that `jax.profiler.trace` writes. On GPUs every device is a process "/device:GPU:N" of it, and
its threads "Stream #..." hold what ran: kernels, NCCL's kernels, copies. Other threads repeat that, so they are not counted.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

Interval = tuple[float, float]

_COLLECTIVE = re.compile(r"permute|all.?gather|reduce.?scatter|all.?to.?all|all.?reduce|send|recv", re.IGNORECASE)
_NCCL = re.compile(r"nccl|nvshmem|sendrecv", re.IGNORECASE)
_COPY = re.compile(r"mem(cpy|set)", re.IGNORECASE)
_PEER_COPY = re.compile(r"memcpy ?(p2p|ptop|peer)", re.IGNORECASE)


def efficiency(single_seconds: float, ring_size: int, ring_seconds: float) -> float:
    """Share of the devices' time that the ring spends as one device alone would: single / (P x ring), for the same total work."""
    if min(single_seconds, ring_seconds) <= 0 or ring_size < 1:
        raise ValueError(
            f"single_seconds={single_seconds}, ring_size={ring_size} and ring_seconds={ring_seconds} must be positive."
        )
    return single_seconds / (ring_size * ring_seconds)


# Intervals.


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as disjoint intervals in order; empty ones are dropped."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def total(intervals: Iterable[Interval]) -> float:
    """Length of the union."""
    return sum(end - begin for begin, end in union(intervals))


def common(ones: Iterable[Interval], others: Iterable[Interval]) -> float:
    """Length of what two unions share."""
    left, right = union(ones), union(others)
    shared, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        shared += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return shared


# Profiles.


class Activity(NamedTuple):
    """What one device did: intervals in microseconds."""

    kernels: list[Interval]
    transfers: list[Interval]


def read_trace(directory: Path) -> list[dict[str, Any]]:
    """The events of the one profile under `directory`."""
    (path,) = directory.rglob("*.trace.json.gz")
    with gzip.open(path) as file:
        return json.load(file)["traceEvents"]


def kind_of(name: str, arguments: dict[str, Any], device: int) -> str:
    """ "transfer", "kernel", or "other" for what stays on a device and is no kernel, of an event on a stream of `device`."""
    if _COPY.match(name):
        target = re.search(r"dest:(\d+)", str(arguments.get("memcpy_details", "")))
        leaves = target is not None and int(target[1]) != device
        is_transfer = bool(_PEER_COPY.match(name)) or leaves or bool(_COLLECTIVE.search(str(arguments.get("hlo_op", ""))))
        return "transfer" if is_transfer and "memset" not in name.lower() else "other"
    return "transfer" if _NCCL.search(name) else "kernel"


def activity(events: list[dict[str, Any]]) -> dict[str, Activity]:
    """By the name of each GPU in the profile; empty where there is none, as on CPU."""
    devices: dict[int, str] = {}
    streams: set[tuple[int, int]] = set()
    for event in events:
        if event.get("ph") != "M":
            continue
        name = str(event.get("args", {}).get("name", ""))
        if event["name"] == "process_name" and name.startswith("/device:GPU"):
            devices[event["pid"]] = name
        elif event["name"] == "thread_name" and name.startswith("Stream #"):
            streams.add((event["pid"], event["tid"]))
    found = {name: Activity([], []) for name in devices.values()}
    for event in events:
        if event.get("ph") != "X" or event["pid"] not in devices or (event["pid"], event["tid"]) not in streams:
            continue
        name = devices[event["pid"]]
        kind = kind_of(event["name"], event.get("args", {}), int(re.findall(r"\d+", name)[0]))
        interval = (float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0)))
        if kind != "other":
            (found[name].transfers if kind == "transfer" else found[name].kernels).append(interval)
    return found


def cover(devices: dict[str, Activity]) -> dict[str, Any]:
    """How much of the time of transfers passes while kernels run, on each device and on the worst.

    Returns:
      `devices`: by name, seconds of kernels, of transfers, of transfers beside kernels, and their share of the transfers;
      `least`: the smallest share, None where nothing was transferred; `reason`: why there is none, or None.
    """
    rows = {}
    for name, (kernels, transfers) in devices.items():
        sent, beside = total(transfers), common(transfers, kernels)
        rows[name] = {
            "kernel_seconds": total(kernels) / 1e6,
            "transfer_seconds": sent / 1e6,
            "beside_kernels_seconds": beside / 1e6,
            "covered": beside / sent if sent else None,
        }
    shares = [row["covered"] for row in rows.values() if row["covered"] is not None]
    reason = None
    if not rows:
        reason = "the profile names no GPU"
    elif not shares:
        reason = "the profile holds no transfer between devices"
    return {"devices": rows, "least": min(shares, default=None), "reason": reason}


# The longest sequence.


def search_longest(fits: Callable[[int], bool], guess: int, step: int, attempts: int) -> tuple[int | None, int | None]:
    """The largest number tried that fits and the smallest that does not, None where there is none.

    Starts at `guess`, grows by a quarter while all fits, shrinks by an eighth while nothing does, then bisects; numbers are
    multiples of `step`, and `fits` is asked at most `attempts` times.
    """
    if step < 1 or attempts < 1:
        raise ValueError(f"step={step} and attempts={attempts} must be at least 1.")
    yes, no, tokens = 0, None, guess // step * step
    for _ in range(attempts):
        if tokens <= yes or tokens == no:
            break
        if fits(tokens):
            yes = tokens
        else:
            no = tokens
        tokens = max(yes + step, yes * 5 // 4) if no is None else (no * 7 // 8 if not yes else (yes + no) // 2)
        tokens = tokens // step * step
    return yes or None, no
