"""What the two TPU kernels share: static facts, tilings, the list of block pairs to visit, masks. Importable without Pallas."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_ring_attention.masks import EMPTY, FULL, Bounds, Tokens, block_bounds, classify
from jax_ring_attention.schedule import Reach

LOG2E = math.log2(math.e)
LANES = 128
"""Tokens run along lanes wherever they are the last axis, so blocks are multiples of this."""

#: The reference of a row's exponents is at least this, so that a row whose every logit is -inf gives weights 0, not NaN.
LOWEST_MAX = -1e29
#: lse of rows without keys: exp2(anything - this) is 0.
NO_KEYS = 1e30


class Shape(NamedTuple):
    """Static facts; lengths are padded to blocks, head dims to whole sublanes. `dtype` is that of the matmul operands.

    With `split_scale` the forward kernel's queries hold scale * log2(e) * query as the sum of two numbers of `dtype`, one under
    the other: a unit of 256 x 256 multiplies both in the time of one up to H = 128, and the kernel need not scale the logits.
    """

    batch: int
    kv_heads: int
    groups: int
    query_length: int
    key_length: int
    head_dim: int
    value_dim: int
    dtype: jnp.dtype
    scale: float
    logits_soft_cap: float | None
    reach: Reach
    precision: lax.Precision
    split_scale: bool
    vmem_limit: int


class Tiling(NamedTuple):
    """How a kernel cuts its work.

    Attributes:
      block_q, block_kv: tokens of one grid step.
      tile_q, tile_kv: tokens of one matrix product inside it.
      ahead: how many tiles the products of logits are issued before the tile whose exponents are taken.
      lag: how many tiles the products with the weights are issued behind it.
      side_by_side: query tiles whose key tiles take turns.
    """

    block_q: int
    block_kv: int
    tile_q: int
    tile_kv: int
    ahead: int
    lag: int
    side_by_side: int = 1

    @property
    def tiles_q(self) -> int:
        return self.block_q // self.tile_q

    @property
    def tiles_kv(self) -> int:
        return self.block_kv // self.tile_kv


# The list of steps.

#: What a step does: nothing (its row of pairs is empty, or the list is padded), a full pair, a pair that compares every token, or
#: (DIAGONAL + j) a pair crossed by a diagonal that starts j blocks of queries into its keys.
NOTHING, UNMASKED, MASKED, DIAGONAL = range(4)

_INDEX_BITS, _KIND_BITS = 13, 3
_FIRST, _ENTERS, _LEAVES = (1 << (2 * _INDEX_BITS + _KIND_BITS + i) for i in range(3))
_MOST_DIAGONALS = 4
LARGEST_COUNT = 2**_INDEX_BITS
"""Blocks of either side that a step can name."""


class Steps(NamedTuple):
    """The pairs of blocks to visit, for every batch row or once for all; each int32.

    Attributes:
      code: (rows * length,) packed: both block indices, kind, and what `is_first`, `enters` and `leaves` say.
      compared: (rows * length,) packed block indices of the last pair that compares tokens, whose integers are in hand.
      total: () number of grid steps.
      length: steps listed per row.
      rows: batch rows listed.
    """

    code: jax.Array
    compared: jax.Array
    total: jax.Array
    length: int
    rows: int


def _pack(outer: Any, inner: Any) -> Any:
    return (outer << _INDEX_BITS) | inner


def outer_of(code: Any) -> Any:
    return (code >> _INDEX_BITS) & (LARGEST_COUNT - 1)


def inner_of(code: Any) -> Any:
    return code & (LARGEST_COUNT - 1)


def kind_of(code: Any) -> Any:
    return (code >> (2 * _INDEX_BITS)) & (2**_KIND_BITS - 1)


def is_first(code: Any) -> Any:
    """Whether the step is the first of its outer block."""
    return (code & _FIRST) != 0


def enters(code: Any) -> Any:
    """Whether no step before it had its inner block."""
    return (code & _ENTERS) != 0


def leaves(code: Any) -> Any:
    """Whether no step after it has its inner block."""
    return (code & jnp.int32(_LEAVES - 2**32)) != 0


def list_steps(kinds: jax.Array, every_inner: jax.Array | bool = False) -> Steps:
    """Steps for a table (rows, outer blocks, inner blocks) of what each pair needs.

    Pairs that need nothing are left out, but every outer block keeps one step, which sets its result to the carry; and, if
    `every_inner`, so does every inner block.
    """
    rows, outer, inner = kinds.shape
    length = outer * inner
    wanted = kinds != NOTHING
    wanted = wanted.at[:, :, 0].set(wanted[:, :, 0] | ~wanted.any(-1))
    wanted = wanted.at[:, 0].set(wanted[:, 0] | (~wanted.any(1) & every_inner))
    first = wanted & (jnp.cumsum(wanted, -1) == 1)
    index = _pack(jnp.arange(outer, dtype=jnp.int32)[:, None], jnp.arange(inner, dtype=jnp.int32))
    seen = jnp.cumsum(wanted, 1)
    code = index | (kinds << (2 * _INDEX_BITS))
    flags = ((first, _FIRST), (wanted & (seen == 1), _ENTERS), (wanted & (seen == seen[:, -1:]), _LEAVES - 2**32))
    for where, bit in flags:
        code |= jnp.where(where, jnp.int32(bit), 0)
    order = jnp.argsort(~wanted.reshape(rows, length), axis=-1, stable=True)
    code = jnp.take_along_axis(code.reshape(rows, length), order, -1)
    count = wanted.sum((1, 2), dtype=jnp.int32)
    # Past a row's own count: nothing, at the blocks that are already in hand.
    step = jnp.arange(length, dtype=jnp.int32)
    last = jnp.take_along_axis(code, count[:, None] - 1, -1)
    code = jnp.where(step < count[:, None], code, last & (2 ** (2 * _INDEX_BITS) - 1))
    latest = lax.cummax(jnp.where(kind_of(code) >= MASKED, step, -1), axis=1)
    compared = jnp.where(latest < 0, 0, jnp.take_along_axis(code, jnp.maximum(latest, 0), -1) & (2 ** (2 * _INDEX_BITS) - 1))
    return Steps(code.reshape(-1), compared.reshape(-1), count.max(), length, rows)


def tile_bounds(tokens: Tokens, length: int, tile: int) -> Bounds:
    """Bounds of one side's tiles; `length` is padded to whole blocks."""
    return block_bounds(tokens, length, length // tile)


def pair_kinds(query: Tokens, key: Tokens, shape: Shape, tiling: Tiling) -> jax.Array:
    """(rows, query blocks, key blocks) int32: what every pair of blocks needs; `query` and `key` are padded to whole blocks."""
    return kinds_within(
        tile_bounds(query, shape.query_length, tiling.tile_q), tile_bounds(key, shape.key_length, tiling.tile_kv), shape, tiling
    )


def kinds_within(query: Bounds, key: Bounds, shape: Shape, tiling: Tiling) -> jax.Array:
    """`pair_kinds` from the bounds of the tiles of both sides.

    Diagonal pairs are found on tiles: those below the diagonal full, those above it empty.
    """
    blocks_q, blocks_kv = shape.query_length // tiling.block_q, shape.key_length // tiling.block_kv
    tiles_q, tiles_kv = tiling.tiles_q, tiling.tiles_kv
    tiles = classify(query, key, shape.reach)
    tiles = tiles.reshape(-1, blocks_q, tiles_q, blocks_kv, tiles_kv).swapaxes(2, 3)
    kinds = jnp.where((tiles == EMPTY).all((3, 4)), NOTHING, jnp.where((tiles == FULL).all((3, 4)), UNMASKED, MASKED))
    for j in range(diagonals(tiling)):
        below, above = (
            jnp.array([[side(tiling, j, a, b) for b in range(tiles_kv)] for a in range(tiles_q)])
            for side in (_is_below, _is_above)
        )
        fits = jnp.where(below, tiles == FULL, ~above | (tiles == EMPTY)).all((3, 4))
        kinds = jnp.where((kinds == MASKED) & fits, DIAGONAL + j, kinds)
    return kinds.astype(jnp.int32)


def diagonals(tiling: Tiling) -> int:
    """How many kinds of diagonal pairs there are, one for each block of queries in a block of keys.

    Each is a copy of the unrolled pair in the program, so there is a limit.
    """
    ratio, rest = divmod(tiling.block_kv, tiling.block_q)
    return ratio if not rest and ratio <= _MOST_DIAGONALS else 0


def _is_below(tiling: Tiling, diagonal: int, a: int, b: int) -> bool:
    """Whether all keys of tile b are before all queries of tile a, in a pair whose query 0 is at key diagonal * block_q."""
    return (b + 1) * tiling.tile_kv <= a * tiling.tile_q + diagonal * tiling.block_q


def _is_above(tiling: Tiling, diagonal: int, a: int, b: int) -> bool:
    """Whether all of them are after."""
    return b * tiling.tile_kv >= (a + 1) * tiling.tile_q + diagonal * tiling.block_q


def tiles_of(kind: int, tiling: Tiling) -> list[tuple[int, int, bool]]:
    """(query tile, key tile, whether it compares tokens) of a pair, in the order in which they are computed."""
    side_by_side = tiling.side_by_side
    bundles = [range(a, min(a + side_by_side, tiling.tiles_q)) for a in range(0, tiling.tiles_q, side_by_side)]
    pairs = [(a, b) for bundle in bundles for b in range(tiling.tiles_kv) for a in bundle]
    if kind in (UNMASKED, MASKED):
        return [(a, b, kind == MASKED) for a, b in pairs]
    j = kind - DIAGONAL
    return [(a, b, not _is_below(tiling, j, a, b)) for a, b in pairs if not _is_above(tiling, j, a, b)]


# Masks of tiles.


def visible_tile(query: Tokens, key: Tokens, reach: Reach) -> jax.Array:
    """(keys, queries) bool from the integers of queries, (1, queries), and of keys, (keys, LANES) with equal columns."""
    conditions = []
    left, right = reach

    def row(x):
        return jnp.broadcast_to(x, (side, x.shape[1]))

    def column(x):
        return jnp.concatenate([x] * (width // LANES), axis=1)

    some_query, some_key = (next(x for x in tokens if x is not None) for tokens in (query, key))
    side, width = some_key.shape[0], some_query.shape[1]
    if query.position is not None and key.position is not None:
        if left is not None:
            conditions.append(column(key.position) >= row(query.position - left))
        if right is not None:
            conditions.append(column(key.position) <= row(query.position + right))
    if query.segment is not None and key.segment is not None:
        segment = row(query.segment)
        conditions += [segment == column(key.segment), segment >= 0]
    return functools.reduce(jnp.logical_and, conditions)
