"""Forward: one chunk folded into the statistics of resident queries.

Everything is transposed: logits are (keys, queries), the output is (Hv, queries), sum and max are rows. Reductions over keys then
run along sublanes, which costs no cross-lane unit, and the small side of the product with the weights streams through the
matrix unit, so that Hv below the unit's width wastes nothing.

Grid: batch row, key/value head, query head of its group, step. A step is one pair of blocks from the list of `common.Steps`:
pairs that nobody sees have no step. The output block is the accumulator: it stays in VMEM over the steps of one query block.

Inside a step the tiles are unrolled and software-pipelined in source order: the logits of tile i + ahead are issued before the
exponents of tile i, the product with the weights of tile i - lag after them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jax_ring_attention.kernels.contract import KeyValue
from jax_ring_attention.kernels.mosaic_tpu import common, launch
from jax_ring_attention.kernels.mosaic_tpu.common import Shape, Steps, Tiling
from jax_ring_attention.masks import Tokens
from jax_ring_attention.stats import ChunkStats

#: Rows of float32 in a vector register.
_SUBLANES = 8


def fold_chunk(
    shape: Shape,
    tiling: Tiling,
    query: jax.Array,
    chunk: KeyValue,
    steps: Steps,
    tokens: tuple[Tokens, Tokens],
    carry: ChunkStats | None,
) -> ChunkStats:
    """`merge(carry, statistics of chunk)`.

    Args:
      query: (B, K, G, H, T), or (B, K, G, 2 H, T) with `shape.split_scale`.
      chunk: key (B, K, S, H), value (B, K, Hv, S).
      steps: query blocks outside, key blocks inside.
      tokens: integers of both sides, (B | 1, 1, T) and (B | 1, S, LANES), or None.
      carry: output (B, K, G, Hv, T), sum and max (B, K, G, 1, T), max in units of log2; None has seen no key.
    """
    stats = tuple(
        jax.ShapeDtypeStruct((*query.shape[:3], rows, shape.query_length), jnp.float32) for rows in (shape.value_dim, 1, 1)
    )
    row, column = common.outer_of, common.inner_of
    blocks = launch.Blocks(steps)

    def of_query(rows: int) -> pl.BlockSpec:
        return blocks.spec((None, None, None, rows, tiling.block_q), lambda b, k, g, code: (b, k, g, 0, row(code)))

    key_spec = blocks.spec((None, None, tiling.block_kv, shape.head_dim), lambda b, k, g, code: (b, k, column(code), 0))
    value_spec = blocks.spec((None, None, shape.value_dim, tiling.block_kv), lambda b, k, g, code: (b, k, 0, column(code)))
    token_specs = launch.token_specs(blocks, tokens, tiling, row, column)
    stats_specs = (of_query(shape.value_dim), of_query(1), of_query(1))
    operands = (query, *chunk, tokens, carry)
    specs = (of_query(query.shape[3]), key_spec, value_spec, token_specs, None if carry is None else stats_specs)
    results = launch.call(
        functools.partial(_kernel, shape, tiling),
        name="ring_attention_forward",
        steps=steps,
        vmem_limit=shape.vmem_limit,
        grid=query.shape[:3],
        operands=operands,
        in_specs=specs,
        out_shape=stats,
        out_specs=stats_specs,
        aliased=(carry, stats),
    )
    return ChunkStats(*results)


def _kernel(shape: Shape, tiling: Tiling, codes: launch.Codes, operands: Any, results: Any) -> None:
    code = codes.here
    query, key, value, tokens, carry = operands
    stats = ChunkStats(*results)

    @pl.when(common.is_first(code))
    def _():
        for to, start, initial in zip(stats, carry or (None,) * 3, (0, 0, -jnp.inf), strict=True):
            to[...] = jnp.full(to.shape, initial, to.dtype) if start is None else start[...]

    fold = functools.partial(fold_pair, shape, tiling, query, key, value, tokens, stats)
    launch.branch_on_kind(code, tokens, tiling, fold)


def fold_pair(
    shape: Shape,
    tiling: Tiling,
    query: Any,
    key: Any,
    value: Any,
    tokens: tuple[Tokens, Tokens],
    stats: ChunkStats,
    kind: int,
) -> None:
    tiles = common.tiles_of(kind, tiling)

    def queries(a: int) -> tuple[slice, slice]:
        return slice(None), slice(a * tiling.tile_q, (a + 1) * tiling.tile_q)

    def keys(b: int) -> slice:
        return slice(b * tiling.tile_kv, (b + 1) * tiling.tile_kv)

    def logits(i: int) -> jax.Array:
        a, b, _ = tiles[i]
        rows = key[keys(b), :]
        rows = jnp.concatenate([rows, rows], axis=1) if shape.split_scale else rows
        return launch.matmul(rows, query[queries(a)], (1, 0), shape.precision)

    def weigh(i: int, raw: jax.Array, total: jax.Array, maximum: jax.Array) -> tuple[jax.Array, ...]:
        """Weights of tile i, the factor for what was summed before, and the new sum and maximum."""
        a, b, masked = tiles[i]
        scaled = raw if shape.split_scale else launch.log2_logits(shape, raw)[0]
        if masked:
            scaled = jnp.where(launch.tile_mask(tokens, queries(a), keys(b), shape.reach), scaled, -jnp.inf)
        highest = jnp.maximum(maximum, scaled.max(0, keepdims=True))
        reference = jnp.maximum(highest, common.LOWEST_MAX) if masked else highest
        weights = jnp.exp2(scaled - reference)
        rescale = jnp.exp2(maximum - reference)
        return weights, rescale, total * rescale + weights.reshape(-1, _SUBLANES, weights.shape[1]).sum(0), highest

    def add(i: int, weights: jax.Array, rescale: jax.Array, output: jax.Array) -> jax.Array:
        _, b, _ = tiles[i]
        return output * rescale + launch.matmul(value[:, keys(b)], weights.astype(shape.dtype), (1, 0), shape.precision)

    pipeline(tiles, tiling, logits, weigh, add, stats, queries)


def _spread(total: jax.Array) -> jax.Array:
    """A row as one of `_SUBLANES` rows that add up to it: inside a pair the sum over sublanes waits for the last tile."""
    return jnp.where(jax.lax.broadcasted_iota(jnp.int32, (_SUBLANES, total.shape[1]), 0) == 0, total, 0.0)


def pipeline(
    tiles: list[tuple[int, int, bool]],
    tiling: Tiling,
    logits: Callable[..., Any],
    weigh: Callable[..., Any],
    add: Callable[..., Any],
    stats: ChunkStats,
    queries: Callable[[int], tuple[slice, slice]],
) -> None:
    """Unrolled: logits of tile i + ahead, weights of tile i, output of tile i - lag."""
    raw: dict[int, Any] = {}
    weighed: dict[int, Any] = {}
    sums: dict[int, Any] = {}
    outputs: dict[int, Any] = {}
    count = len(tiles)
    last = {a: i for i, (a, _, _) in enumerate(tiles)}
    for i in range(-tiling.ahead, count + tiling.lag):
        if i + tiling.ahead < count:
            raw[i + tiling.ahead] = logits(i + tiling.ahead)
        if 0 <= i < count:
            a = tiles[i][0]
            if a not in sums:
                sums[a] = _spread(stats.sum[queries(a)]), stats.max[queries(a)]
            weights, rescale, *sums[a] = weigh(i, raw.pop(i), *sums[a])
            weighed[i] = weights, rescale
            if i == last[a]:
                total, stats.max[queries(a)] = sums.pop(a)
                stats.sum[queries(a)] = total.sum(0, keepdims=True)
        if (j := i - tiling.lag) >= 0:
            a = tiles[j][0]
            before = outputs.pop(a) if a in outputs else stats.output[queries(a)]
            outputs[a] = add(j, *weighed.pop(j), before)
            if j == last[a]:
                stats.output[queries(a)] = outputs.pop(a)
