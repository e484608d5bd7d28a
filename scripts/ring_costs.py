"""What a kernel takes with a chunk, from its static schedule: cycles of every kind of block pair, of a step, of a hop.

`measure` compiles the kernels; what it returns is JSON. Everything else is arithmetic on it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import profile_tpu_static
import tpu_schedule

from jax_ring_attention.cli.hardware import HARDWARE
from jax_ring_attention.kernels.contract import BlockSizes
from jax_ring_attention.kernels.mosaic_tpu import common
from jax_ring_attention.kernels.mosaic_tpu.tiling import backward_tiling, forward_tiling
from jax_ring_attention.layouts import shard_progressions

PASSES = ("forward", "backward")
#: Cores per chip: those of one JAX device share the heads of a plain kernel.
CORES = {"v5e": 1, "v5p": 2, "v6e": 1}


class Attention(NamedTuple):
    """One layer on one chip generation, in bfloat16; T/P and P come per question."""

    chip: str
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool

    @property
    def clock(self) -> float:
        """Cycles per second: the data sheet's peak over what the matrix units do in one."""
        return HARDWARE[self.chip].peak_tflops * 1e12 / (CORES[self.chip] * tpu_schedule.CHIPS[self.chip].flops_per_cycle)


def measure(compiler: profile_tpu_static.Compiler, attention: Attention) -> dict[str, Any]:
    """{"plain" or "fused": {pass: cycles}} of kernels compiled for the chip.

    Raises:
      RuntimeError: one does not compile.
    """
    job = {"chip": attention.chip, "head_dim": attention.head_dim, "causal": attention.causal}
    both = compiler.run(who="fused", **job, **profile_tpu_static.FUSED)
    plain = {direction: compiler.run(who="ours", direction=direction, **job) for direction in PASSES}
    if compiler.failed:
        raise RuntimeError(f"kernels do not compile: {compiler.failed}")
    return {
        "plain": {
            direction: cycles_of(one["tiling"], one["kinds"], one["schedules"][direction]) for direction, one in plain.items()
        },
        "fused": {
            direction: cycles_of(both["tilings"][direction], both["kinds"][direction], both["schedules"][direction])
            for direction in PASSES
        },
    }


def cycles_of(tiling: Sequence[int], kinds: Sequence[int], schedule: Mapping[str, Any]) -> dict[str, Any]:
    """Of the last loop over grid steps: the only one, or the one that the loop over hops goes round."""
    steps = schedule["passes"][-1]
    return {
        "tiling": list(tiling),
        "cycles": {str(kind): branch["cycles"] for kind, branch in zip(kinds, steps["branches"], strict=True)},
        "step_overhead": steps["most_step_overhead"],
        "hop_overhead": steps["hop_overhead"],
        "first_step": schedule["first_step"],
    }


def pair_cycles(measured: Mapping[str, Any], tiling: Any, kind: int) -> float:
    """Of one pair of blocks; of one that was not compiled, by its tiles."""
    if kind == common.NOTHING:
        return 0.0
    cycles, compiled = measured["cycles"], common.Tiling(*measured["tiling"])
    if tiling == compiled:
        return cycles[str(kind)]
    tiles = common.tiles_of(kind, tiling)
    masked = sum(compares for *_, compares in tiles)
    share = tiling.tile_q * tiling.tile_kv / (compiled.block_q * compiled.block_kv)
    return share * ((len(tiles) - masked) * cycles[str(common.UNMASKED)] + masked * cycles.get(str(common.MASKED), 0.0))


class Chunk(NamedTuple):
    """Steps of one kernel with a chunk or half of one, per head (forward) or per key/value head and group (backward).

    Attributes:
      steps: by kind of pair.
      results: blocks of results, each of which is begun once.
      nothing: whether it has no pair at all.
    """

    tiling: Any
    steps: Mapping[int, int]
    results: int
    nothing: bool


@functools.cache
def chunk_steps(attention: Attention, layout: str, direction: str, tokens: int, part: tuple[int, int], order: int) -> Chunk:
    """With tokens `part` = (start, size) of the chunk of a rank before (-1), at (0) or after (1) this one in the ring.

    Ranks stand for each other: whom a causal mask shows what depends on their order alone, in either layout.
    """
    start, size = part
    tiling = forward_tiling(attention.chip, attention.head_dim, tokens, size, BlockSizes())
    tiling = tiling if direction == "forward" else backward_tiling(attention.chip, tiling)
    if tokens % tiling.block_q or size % tiling.block_kv:
        raise ValueError(f"{tokens} queries and {size} keys are no whole blocks of {tiling.block_q} x {tiling.block_kv}")
    blocks = tokens // tiling.block_q, size // tiling.block_kv
    results = blocks[0] if direction == "forward" else blocks[1]
    if not attention.causal:
        return Chunk(tiling, {common.UNMASKED: blocks[0] * blocks[1]}, results, False)
    query = positions_of(layout, 1, tokens)
    key = positions_of(layout, 1 + order, tokens)[start : start + size]
    kinds = causal_kinds(query, key, tiling)
    wanted, counts = np.unique(kinds, return_counts=True)
    steps = {int(kind): int(n) for kind, n in zip(wanted, counts, strict=True) if kind != common.NOTHING}
    # A block of results without a pair keeps one step, which sets it.
    steps[common.NOTHING] = int((kinds == common.NOTHING).all(0 if direction == "backward" else 1).sum())
    return Chunk(tiling, steps, results, not (kinds != common.NOTHING).any())


def positions_of(layout: str, rank: int, tokens: int) -> np.ndarray:
    """Of one rank in a ring of 3."""
    starts, stride, count = shard_progressions(layout, 3, tokens)
    return np.concatenate([start[rank] + stride * np.arange(count) for start in starts])


def causal_kinds(query: np.ndarray, key: np.ndarray, tiling: Any) -> np.ndarray:
    """`common.kinds_within` under a causal mask, in numpy: [query block, key block] from ascending positions in every tile."""
    (tile_q, tiles_q), (tile_kv, tiles_kv) = (tiling.tile_q, tiling.tiles_q), (tiling.tile_kv, tiling.tiles_kv)
    query, key = query.reshape(-1, tile_q), key.reshape(-1, tile_kv)
    full, empty = key[:, -1] <= query[:, :1], key[:, 0] > query[:, -1:]

    def blocks(x: np.ndarray) -> np.ndarray:
        return x.reshape(len(query) // tiles_q, tiles_q, len(key) // tiles_kv, tiles_kv).swapaxes(1, 2)

    full, empty = blocks(full), blocks(empty)
    kinds = np.where(empty.all((2, 3)), common.NOTHING, np.where(full.all((2, 3)), common.UNMASKED, common.MASKED))
    for kind in (common.DIAGONAL + j for j in range(common.diagonals(tiling))):
        wants = np.full((tiles_q, tiles_kv), common.NOTHING)
        for a, b, masked in common.tiles_of(kind, tiling):
            wants[a, b] = common.MASKED if masked else common.UNMASKED
        fits = np.where(wants == common.UNMASKED, full, (wants == common.MASKED) | empty).all((2, 3))
        kinds = np.where((kinds == common.MASKED) & fits, kind, kinds)
    return kinds


def chunk_cycles(attention: Attention, measured: Mapping[str, Any], direction: str, chunk: Chunk, is_fused: bool) -> float:
    """All heads, on the busiest core."""
    if is_fused and chunk.nothing:
        return 0.0
    once = sum(n * (pair_cycles(measured, chunk.tiling, kind) + measured["step_overhead"]) for kind, n in chunk.steps.items())
    cores = 1 if is_fused else CORES[attention.chip]
    if direction == "forward":
        return -(-attention.heads // cores) * (once + chunk.results * measured["first_step"])
    groups = attention.heads // attention.kv_heads
    return -(-attention.kv_heads // cores) * (groups * once + chunk.results * measured["first_step"])


def unhidden(attention: Attention, direction: str, tiling: Any, keys: int) -> tuple[int, int]:
    """Bytes to and from memory that no step of a kernel hides, and how many copies wait for one another, for a chunk of `keys`.

    Blocks that a pipeline reads before its first step and writes after its last; the integers of the keys, which are spread over
    lanes before a kernel that compares them; in the backward pass the first block of d_query that comes and the last that leaves,
    of each key/value head.
    """
    dim, rows = attention.head_dim, 2 * 4 * tiling.block_q
    key_value = 2 * dim * 2 * tiling.block_kv
    size, copies = keys * common.LANES * 4 if attention.causal else 0, 4 if attention.causal else 2
    if direction == "forward":
        return size + dim * 2 * tiling.block_q + key_value + 2 * (dim * 4 * tiling.block_q + rows), copies
    size += 2 * dim * 2 * tiling.block_q + rows + key_value + 2 * dim * 4 * tiling.block_kv
    return size + 2 * attention.kv_heads * dim * 4 * tiling.block_q, copies + 2 * attention.kv_heads
