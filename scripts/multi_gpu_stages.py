"""What bench_ring_multi_gpu.py runs on the devices, stage by stage: each is a function of the settings and gives a JSON object.

Every stage is watched: without progress for `limit` seconds the process prints where every thread stands, and ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import itertools
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from bench_chunk import first_line, gradient, seconds
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from multi_gpu_peers import AXIS, PEERS, SPEC
from multi_gpu_trace import activity, cover, efficiency, read_trace

from jax_ring_attention import make_ring_mesh, ring_attention, to_layout
from jax_ring_attention.chunk import AUTOMATIC, KERNELS
from jax_ring_attention.cli import check
from jax_ring_attention.layouts import LAYOUTS, Layout
from jax_ring_attention.schedule import PORTABLE_SCHEDULES

DIRECTIONS = ("forward", "forward+backward")
TIMED = ("zigzag", "ring")
COMBINATIONS: dict[str, list[tuple[str, str]]] = {
    "all": list(itertools.product(LAYOUTS, PORTABLE_SCHEDULES)),
    "each once": [*zip(LAYOUTS, PORTABLE_SCHEDULES, strict=True), TIMED],
    "timed": [TIMED],
}
SAME = 1e-2
"""Relative difference, in norm, below which two bfloat16 computations of one thing are taken to agree, as in bench_chunk.py."""


class Setting(NamedTuple):
    """What all stages share; `devices` None means all, `implementation` None what `ring_attention` would take here."""

    devices: int | None
    cpu_devices: int | None
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    implementation: str | None
    repeats: int
    check_tokens: int
    limit: float
    memory_bytes: int | None


# Being watched.


def watch(setting: Setting) -> None:
    """Begin, or begin again, to wait for the next sign of progress."""
    faulthandler.dump_traceback_later(setting.limit, exit=True, file=sys.__stderr__ or sys.stderr)


@contextlib.contextmanager
def watched(setting: Setting) -> Iterator[None]:
    watch(setting)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def ring_mesh(setting: Setting, size: int | None = None) -> Mesh:
    found = jax.devices()
    size = size or setting.devices or len(found)
    if size > len(found):
        raise SystemExit(f"{size} devices are wanted, but JAX finds {len(found)} ({found[0].platform})")
    return make_ring_mesh((size,), (AXIS,), devices=found[:size])


def implementation_of(setting: Setting) -> str:
    return setting.implementation or next(name for name in AUTOMATIC if KERNELS[name].is_preferred())


def about(setting: Setting) -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "device": device.device_kind,
        "devices": ring_mesh(setting).size,
        "processes": jax.process_count(),
        "jax": jax.__version__,
        "implementation": implementation_of(setting),
        "memory_bytes": device_memory(setting),
    }


def device_memory(setting: Setting) -> int | None:
    """Bytes that JAX may use of one device; None where neither the device nor the settings say."""
    if setting.memory_bytes is not None:
        return setting.memory_bytes
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


# Attention, and what goes in.


@functools.cache  # stages in one process share what they compile
def ring(setting: Setting, mesh: Mesh, mask: str, deterministic: bool = False) -> tuple[Any, Any]:
    """Forward, and forward + backward, of global arrays in stored order: zigzag."""
    where: dict[str, Any] = {"mesh": mesh, "spec": SPEC, "layout": "zigzag"}
    how: dict[str, Any] = {"is_causal": mask == "causal", "deterministic": deterministic}
    attend = functools.partial(ring_attention, implementation=implementation_of(setting), **where, **how)
    return jax.jit(attend), gradient(attend)


def shapes(setting: Setting, length: int) -> list[tuple[int, ...]]:
    """Of query, key, value and d_out."""
    heads = (setting.heads, setting.kv_heads, setting.kv_heads, setting.heads)
    return [(1, length, n, setting.head_dim) for n in heads]


def arrays(setting: Setting, mesh: Mesh, length: int) -> list[jax.Array]:
    """Normal query, key, value and d_out, each made where it stays."""
    make = jax.jit(jax.random.normal, static_argnums=(1, 2), out_shardings=NamedSharding(mesh, SPEC))
    keys = jax.random.split(jax.random.key(0), 4)
    return [make(key, shape, jnp.dtype(setting.dtype)) for key, shape in zip(keys, shapes(setting, length), strict=True)]


def store(values: list[jax.Array], layout: Layout, mesh: Mesh) -> list[jax.Array]:
    """From natural order into the order of `layout`."""
    return [_stored(x, layout, mesh) for x in values]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _stored(x: jax.Array, layout: Layout, mesh: Mesh) -> jax.Array:
    return jax.lax.with_sharding_constraint(to_layout(x, layout, mesh.size), NamedSharding(mesh, SPEC))


def median_seconds(setting: Setting, function: Callable[..., Any], arguments: list[jax.Array]) -> float:
    """Median of `repeats` rounds of as many calls as fill a fifth of a second, at most 20."""
    once = seconds(function, *arguments, rounds=1, calls=1)
    watch(setting)
    calls = max(1, min(20, math.ceil(0.2 / once)))
    if jax.process_count() > 1:  # all must make the same number of calls, or some wait for ever
        calls = int(multihost_utils.broadcast_one_to_all(calls))
    taken = seconds(function, *arguments, rounds=setting.repeats, calls=calls)
    watch(setting)
    return taken


def both_times(
    setting: Setting, forward: Callable[..., Any], both: Callable[..., Any], given: list[jax.Array]
) -> dict[str, float]:
    taken = (median_seconds(setting, forward, given[:3]), median_seconds(setting, both, given))
    return dict(zip(DIRECTIONS, taken, strict=True))


# Correctness.


def correctness(setting: Setting, masks: list[str], which: str = "all") -> dict[str, Any]:
    """These `COMBINATIONS` against dense float64 attention, with the errors that dense attention earns in `dtype`."""
    mesh, rows = ring_mesh(setting), []
    sizes: Any = {"heads": setting.heads, "kv_heads": setting.kv_heads, "head_dim": setting.head_dim, "batch": 1}
    length = mesh.size * setting.check_tokens
    make = functools.partial(check.make_reference, setting.dtype, query_length=length, **sizes)
    reference = functools.cache(lambda is_causal: make(is_causal=is_causal))
    for case in check.cases((implementation_of(setting),), (setting.dtype,), is_fast=False):
        mask = "causal" if case.is_causal else "full"
        if mask not in masks or (case.layout, case.schedule) not in COMBINATIONS[which]:
            continue
        watch(setting)
        wanted = reference(case.is_causal)
        watch(setting)
        finding = check.check(case, mesh, wanted)
        row: dict[str, Any] = {
            "layout": case.layout,
            "schedule": case.schedule,
            "mask": mask,
            "result": finding.result,
            "reason": finding.reason,
        }
        if finding.errors:
            for name, parts in (("forward", check.NAMES[:2]), ("gradients", check.NAMES[2:])):
                row |= dict(zip((f"{name}_error", f"{name}_allowed"), finding.worst(*parts), strict=True))
        rows.append(row)
    wrong = [row for row in rows if row["result"] != "pass"]
    return {"rows": rows, "passed": len(rows) - len(wrong), "wrong": len(wrong)}


@jax.jit
def identical(ones: Any, others: Any) -> jax.Array:
    """Bit by bit, so that a NaN equals itself and 0 is not -0."""
    bits = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.uint8)
    pairs = zip(jax.tree.leaves(ones), jax.tree.leaves(others), strict=True)
    return jnp.stack([(bits(a) == bits(b)).all() for a, b in pairs]).all()


def repeatability(setting: Setting, tokens: int, runs: int) -> dict[str, Any]:
    """Output and gradients with deterministic=True, run after run, compared bit by bit with the first."""
    mesh = ring_mesh(setting)
    given = store(arrays(setting, mesh, mesh.size * tokens), "zigzag", mesh)
    _, both = ring(setting, mesh, "causal", deterministic=True)
    first, different = both(*given), 0
    for _ in range(runs - 1):
        different += not identical(both(*given), first)
        watch(setting)
    return {"tokens": tokens, "runs": runs, "different": different}


def steps(setting: Setting, count: int) -> dict[str, Any]:
    """Forward and backward `count` times, ten in flight at a time; the last results must be the first."""
    mesh = ring_mesh(setting)
    given = store(arrays(setting, mesh, mesh.size * setting.check_tokens), "zigzag", mesh)
    _, both = ring(setting, mesh, "causal")
    first = jax.block_until_ready(both(*given))
    begin = time.perf_counter()
    for step in range(count):
        last = both(*given)
        if step % 10 == 9:
            jax.block_until_ready(last)
            watch(setting)
    jax.block_until_ready(last)
    taken = time.perf_counter() - begin
    error = difference(last, first)
    return {"steps": count, "tokens": setting.check_tokens, "seconds": taken, "difference": error, "wrong": int(not error < SAME)}


def difference(have: Any, want: Any) -> float:
    """Largest relative difference, in norm, of outputs and gradients; NaN where there is one."""
    pairs = zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True)
    return float(np.max([_difference(a, b) for a, b in pairs]))


@jax.jit
def _difference(have: jax.Array, want: jax.Array) -> jax.Array:
    have, want = (x.astype(jnp.float32) for x in (have, want))
    return jnp.sqrt(jnp.square(have - want).sum() / jnp.square(want).sum())


# Time.


def speed(setting: Setting, tokens: int, masks: list[str], alone: bool, peers: list[str]) -> dict[str, Any]:
    """Seconds of the ring, of one device with all of the work (`alone`) and of these peers; results agree before times count.

    Returns:
      `rows`, one for each name, mask and direction; `refused`, who was not timed and why; `wrong`, where the ring and one device
      do not agree.
    """
    mesh = ring_mesh(setting)
    rows: list[dict[str, Any]] = []
    refused: list[dict[str, str]] = []
    wrong: list[dict[str, str]] = []
    natural = arrays(setting, mesh, mesh.size * tokens)
    given = store(natural, "zigzag", mesh)
    for mask in masks:
        forward, both = ring(setting, mesh, mask)
        have = jax.block_until_ready(both(*given))
        watch(setting)
        times = {"ring": both_times(setting, forward, both, given)}
        others = {name: functools.partial(peer_times, make=PEERS[name]) for name in peers}
        for name, measure in (({"one device": one_device} if alone else {}) | others).items():
            try:
                times[name] = measure(setting, mesh, mask, natural, have)
            except Disagreement as error:
                (wrong if name == "one device" else refused).append({"name": name, "mask": mask, "reason": str(error)})
            except Exception as error:  # out of memory, or whatever a peer raises
                if name == "one device" and "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                refused.append({"name": name, "mask": mask, "reason": first_line(error)})
            watch(setting)
        flops = 2 * setting.heads * setting.head_dim * (mesh.size * tokens) ** 2 / (2 if mask == "causal" else 1)
        for name, taken in times.items():
            devices = 1 if name == "one device" else mesh.size
            for direction, matmuls in zip(DIRECTIONS, (2, 7), strict=True):
                row = {"tokens": tokens, "mask": mask, "direction": direction, "name": name, "seconds": taken[direction]}
                row["tflops_per_device"] = matmuls * flops / taken[direction] / devices / 1e12
                row["over_ring"] = times["ring"][direction] / taken[direction]
                if "one device" in times:
                    row["efficiency"] = efficiency(times["one device"][direction], devices, taken[direction])
                rows.append(row)
    return {"rows": rows, "refused": refused, "wrong": wrong}


def one_device(setting: Setting, mesh: Mesh, mask: str, natural: list[jax.Array], have: Any) -> dict[str, float]:
    """The same kernel on the whole sequence on the first device; its results must be the ring's."""
    here = [jax.device_put(x, mesh.devices.flat[0]) for x in natural]
    alone = functools.partial(ring_attention, is_causal=mask == "causal", implementation=implementation_of(setting))
    both = gradient(alone)
    agree(setting, mesh, both(*here), have, "contiguous")
    return both_times(setting, jax.jit(alone), both, here)


def peer_times(setting: Setting, mesh: Mesh, mask: str, natural: Any, have: Any, make: Callable[..., Any]) -> dict[str, float]:
    peer = make(mesh, mask == "causal")
    with peer.context:
        given, both = store(natural, peer.layout, mesh), gradient(peer.attend)
        agree(setting, mesh, both(*given), have, peer.layout)
        return both_times(setting, jax.jit(peer.attend), both, given)


class Disagreement(ArithmeticError):
    """Two computations of one thing that give different things."""


def agree(setting: Setting, mesh: Mesh, results: Any, have: Any, layout: Layout) -> None:
    """`results`, stored by `layout`, are those of the ring, in zigzag order."""
    if layout != "zigzag":
        sharded = [jax.device_put(x, NamedSharding(mesh, SPEC)) for x in jax.tree.leaves(results)]
        results = store(sharded, "zigzag", mesh)
    error = difference(results, have)
    watch(setting)
    if not error < SAME:
        raise Disagreement(f"differs from the ring by {error:.1e}, allowed {SAME:.0e}: not timed")


def overlap(setting: Setting, tokens: int, calls: int = 3) -> dict[str, Any]:
    """What a profile says of transfers and kernels, causal; a process profiles its own devices."""
    mesh = ring_mesh(setting)
    given = store(arrays(setting, mesh, mesh.size * tokens), "zigzag", mesh)
    found = {}
    for direction, function, count in zip(DIRECTIONS, ring(setting, mesh, "causal"), (3, 4), strict=True):
        jax.block_until_ready(function(*given[:count]))
        watch(setting)
        with tempfile.TemporaryDirectory() as directory:
            profile = jax.profiler.ProfileOptions()
            profile.python_tracer_level = 0  # Python's calls would fill it
            with jax.profiler.trace(directory, profiler_options=profile):
                for _ in range(calls):
                    jax.block_until_ready(function(*given[:count]))
            found[direction] = {"tokens": tokens, "calls": calls, **cover(activity(read_trace(Path(directory))))}
        watch(setting)
    return found


def variant(setting: Setting, tokens: int, masks: list[str]) -> dict[str, Any]:
    """What depends on how transfers are made: results, which must be right, the ring's time, and what it hides."""
    checked = correctness(setting, masks, "timed")
    if checked["wrong"]:
        reasons = [row["reason"] for row in checked["rows"] if row["result"] != "pass"]
        raise SystemExit(f"wrong results, nothing is timed: {reasons[0]}")
    return {"rows": speed(setting, tokens, masks, alone=False, peers=[])["rows"], "overlap": overlap(setting, tokens)}


# Memory.


def memory_guess(setting: Setting, ring_size: int, base: int = 4096) -> dict[str, Any]:
    """From the compiler: bytes of a device per token of its shard, for one forward and backward, and tokens that would fit."""
    mesh, limit = ring_mesh(setting, ring_size), device_memory(setting)
    if limit is None:
        raise SystemExit("this device does not say how much memory it has: give --memory-gib")
    (_, both), needed = ring(setting, mesh, "causal"), []
    for tokens in (base, 2 * base):
        sharding, dtype = NamedSharding(mesh, SPEC), jnp.dtype(setting.dtype)
        given = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape in shapes(setting, ring_size * tokens)]
        used = both.lower(*given).compile().memory_analysis()
        needed.append(used.argument_size_in_bytes + used.output_size_in_bytes + used.temp_size_in_bytes)
        watch(setting)
    per_token = (needed[1] - needed[0]) / base
    fixed = needed[0] - per_token * base
    return {"bytes_per_token": per_token, "memory_bytes": limit, "tokens": max(0, int((limit - fixed) / per_token))}


def train_once(setting: Setting, ring_size: int, tokens: int) -> dict[str, Any]:
    """One forward and backward of causal attention over ring_size x tokens."""
    mesh = ring_mesh(setting, ring_size)
    try:
        given = arrays(setting, mesh, ring_size * tokens)
        begin = time.perf_counter()
        jax.block_until_ready(ring(setting, mesh, "causal")[1](*given))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"status": "out of memory", "reason": first_line(error)}
    return {"status": "finished", "seconds": time.perf_counter() - begin}


STAGES: dict[str, Callable[..., dict[str, Any]]] = {
    function.__name__: function
    for function in (about, correctness, repeatability, steps, speed, overlap, variant, memory_guess, train_once)
}


def run(stage: str, setting: Setting, **work: Any) -> dict[str, Any]:
    with watched(setting):
        return STAGES[stage](setting, **work)
