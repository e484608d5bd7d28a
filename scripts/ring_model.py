"""A model of one ring step: when every device computes, sends and waits at every hop. Pure functions over numpy arrays.

Times are in seconds, arrays are [hop, rank]. The caller knows what a chunk costs to compute and to send; the model knows who
waits for whom.

`scanned`: `schedule="ring"` and `"bidirectional"`, a kernel and a pair of permutes per hop. A permute starts when its sender and
its receiver have both come to the hop; a hop ends when its compute, what it sends and what it receives are done, and costs
`boundary` on top: what is between two kernels of the program.

`fused`: the whole ring in one kernel, as in fused/README.md. Hop h waits for transfer h - 1, takes a credit and starts transfer
h, computes, waits until the transfer has left, and grants a credit. Gradients have a channel of their own, one hop behind, with
one buffer free at the start. A hop costs `hop` more than its parts, and `start` passes before the first one.

Links: each device has one to either neighbour, used by one transfer at a time, first come, first served. What arrives has left
`latency` before. Several streams of one leg (half chunks both ways) wait for each other at the start of a hop, are sent at the
same time and computed with one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray

#: As in fused/protocol.py.
SLOTS = 2


class Stream(NamedTuple):
    """A part of every chunk that goes round.

    Attributes:
      direction: +1 or -1.
      compute: [hop, rank] seconds.
      chunk: seconds that key and value take on a link.
      gradient: seconds that their gradients take; None in the forward pass.
      add: seconds to add a share of the gradients to what arrived, one number or [hop, rank].
    """

    direction: int
    compute: Array
    chunk: float
    gradient: float | None = None
    add: Array | float = 0.0

    def adding(self, hop: int) -> Array:
        return np.broadcast_to(self.add, self.compute.shape)[hop]


class Transfer(NamedTuple):
    """One transfer of every device: begin and end [rank], of the sender; `what` is "chunk" or "gradient"."""

    what: str
    direction: int
    begin: Array
    end: Array


class Timeline(NamedTuple):
    """What `scanned` and `fused` return.

    Attributes:
      begin, computed, end: [hop, rank] when a hop's compute begins, when it is over, and when the next hop may begin.
      transfers: in the order in which they were started.
      total: when the last device is done.
      home: how much of it is spent on bringing gradients home after the last hop, which nothing hides.
    """

    begin: Array
    computed: Array
    end: Array
    transfers: tuple[Transfer, ...]
    total: float
    home: float

    @property
    def busy(self) -> Array:
        """[rank] seconds of compute."""
        return (self.computed - self.begin).sum(0)


class _Links:
    """The links of all devices in both directions, and what they carried."""

    def __init__(self, ranks: int, latency: float) -> None:
        self.free = {1: np.zeros(ranks), -1: np.zeros(ranks)}
        self.latency = latency
        self.log: list[Transfer] = []

    def send(self, what: str, stream: Stream, ready: Array) -> tuple[Array, Array]:
        """When what every device sends from `ready` on has left it, and when what it is sent has arrived."""
        seconds = stream.chunk if what == "chunk" else stream.gradient
        assert seconds is not None
        begin = np.maximum(ready, self.free[stream.direction])
        self.free[stream.direction] = left = begin + seconds
        self.log.append(Transfer(what, stream.direction, begin, left))
        return left, np.roll(left + self.latency, stream.direction)


def _latest(*times: Array) -> Array:
    return np.max(times, axis=0)


def scanned(streams: Sequence[Stream], boundary: float = 0.0, latency: float = 0.0) -> Timeline:
    """A kernel and its permutes hop by hop; see the module docstring."""
    hops, ranks = len(streams[0].compute) - 1, streams[0].compute.shape[1]
    links, now, rows = _Links(ranks, latency), np.zeros(ranks), []
    backward = streams[0].gradient is not None

    def permute(what: str) -> list[Array]:
        """For every stream, when a device has sent and received; the receiver of r is at r + direction."""
        starts = [_latest(now, np.roll(now, -stream.direction)) for stream in streams]
        return [_latest(*links.send(what, stream, ready)) for stream, ready in zip(streams, starts, strict=True)]

    for hop in range(hops + 1):
        moved = permute("chunk") if hop < hops else []
        moved += permute("gradient") if hop > 0 and backward else []
        begin, computed = now, now + sum(stream.compute[hop] for stream in streams)
        adding = sum(stream.adding(hop) for stream in streams) if hop > 0 else 0.0
        now = _latest(computed, *moved) + adding + boundary
        rows.append((begin, computed, now))
    home = permute("gradient") if hops and backward else []
    return _timeline(rows, links, _latest(now, *home))


def fused(streams: Sequence[Stream], start: float = 0.0, hop: float = 0.0, latency: float = 0.0, slots: int = SLOTS) -> Timeline:
    """One kernel with credits; see the module docstring."""
    last, ranks = len(streams[0].compute) - 1, streams[0].compute.shape[1]
    links, now, rows = _Links(ranks, latency), np.full(ranks, start), []
    backward = streams[0].gradient is not None
    granted: dict[int, Array] = {}  # by the hop at whose end they are granted, of every device
    arrived: list[Array] = []
    left: list[Array] = []  # gradients
    landed: list[Array] = []

    def from_receiver(times: Array, stream: Stream) -> Array:
        return np.roll(times, -stream.direction) + latency

    def send_all(what: str, ready: Array) -> tuple[list[Array], list[Array]]:
        """For every stream, when it has left and when it has arrived."""
        done = [links.send(what, stream, ready) for stream in streams]
        return [left for left, _ in done], [arrived for _, arrived in done]

    for h in range(last + 1):
        now = _latest(now, *arrived)
        if h < last and h >= slots:
            now = _latest(now, *(from_receiver(granted[h - slots + 1], stream) for stream in streams))
        sent, arrived = send_all("chunk", now) if h < last else ([], [])
        begin, computed = now, now + sum(stream.compute[h] for stream in streams)
        granted[h] = now = _latest(computed, *sent)
        if backward:
            if h > 0:
                now = _latest(now, *landed) + sum(stream.adding(h) for stream in streams)
                now = _latest(now, *left)
            if 0 < h < last:
                now = _latest(now, *(from_receiver(now, stream) for stream in streams))
            if h < last:
                left, landed = send_all("gradient", now)
        now = now + hop
        rows.append((begin, computed, now))
    home = []
    if backward and last:
        left, landed = send_all("gradient", now)
        home = left + landed
    return _timeline(rows, links, _latest(now, *home))


def _timeline(rows: list[tuple[Array, Array, Array]], links: _Links, done: Array) -> Timeline:
    begin, computed, end = (np.stack(column) for column in zip(*rows, strict=True))
    return Timeline(begin, computed, end, tuple(links.log), float(done.max()), float(done.max() - end.max()))


# What follows from timelines.


def exposed(timeline: Timeline, unhindered: Timeline) -> float:
    """Share of the step that is spent waiting for transfers, the way home aside; `unhindered` has links that cost nothing."""
    return 1 - (unhindered.total - unhindered.home + timeline.home) / timeline.total


def settled(lengths: Sequence[int], holds: Sequence[bool]) -> int | None:
    """The first of `lengths` from which on it holds to the end."""
    failing = [i for i, yes in enumerate(holds) if not yes]
    first = failing[-1] + 1 if failing else 0
    return lengths[first] if first < len(lengths) else None


def intervals(lengths: Sequence[int], holds: Sequence[bool]) -> list[tuple[int, int | None]]:
    """Runs of `lengths` for which `holds`, as (first, last); last is None where it holds to the end."""
    found: list[list[Any]] = []
    for i, (length, yes) in enumerate(zip(lengths, holds, strict=True)):
        if yes and (i == 0 or not holds[i - 1]):
            found.append([length, None])
        if not yes and found and i > 0 and holds[i - 1]:
            found[-1][1] = lengths[i - 1]
    return [(first, last) for first, last in found]
