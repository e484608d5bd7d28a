"""Masks as integers per token.

Every query and key token carries its global position and its segment id. A query at position q in segment a sees a key at
position k in segment b when

    q - left <= k <= q + right   and   a == b   and   a >= 0

Causal is right = 0; a sliding window bounds left, right or both; a negative segment id is padding: sees nothing, is seen by
nobody. Packing, layouts, permutations, padded tails and per-row lengths are values of these integers, never new code.

Blocks of tokens are bounded by the min and max of their integers, and a pair of blocks is classified from the bounds alone:
empty pairs are skipped, full pairs run without a mask, only partial pairs compare tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_ring_attention.schedule import Reach

#: Bounds for positions; beyond them `position + window` could leave int32.
MAX_POSITION = 2**30
_INT_MAX = jnp.iinfo(jnp.int32).max
_INT_MIN = jnp.iinfo(jnp.int32).min

FULL, PARTIAL, EMPTY = 0, 1, 2


class Positions(NamedTuple):
    """Global positions for each side: int arrays (T,) or (B, T), and (S,) or (B, S), in stored order."""

    query: jax.Array | None = None
    key_value: jax.Array | None = None


class SegmentIds(NamedTuple):
    """Segment ids for each side: int arrays (B, T) and (B, S), in stored order; negative is padding."""

    query: jax.Array | None = None
    key_value: jax.Array | None = None


class Tokens(NamedTuple):
    """The integers of one side's tokens: int32 (B, L), or (1, L) when all rows agree; None when nobody compares them."""

    position: jax.Array | None = None
    segment: jax.Array | None = None

    @property
    def row_wise(self) -> bool:
        """Whether rows of the batch may differ."""
        return any(x is not None and x.shape[0] > 1 for x in self)


def token_integers(
    natural: jax.Array,
    reach: Reach,
    *,
    position: jax.Array | None,
    segment: jax.Array | None,
    lengths: jax.Array | None,
) -> Tokens:
    """`Tokens` from what the caller gave and what the layout implies.

    Args:
      natural: (L,) natural positions by the layout.
      reach: (left, right); positions are left out when both are None.
      position: (B | 1, L), replaces the natural ones for causal and window.
      segment: (B | 1, L).
      lengths: (B | 1,) number of real tokens per row, compared with the natural positions.
    """
    if lengths is not None:
        within = natural[None] < lengths[:, None]
        segment = jnp.where(within, jnp.zeros((), jnp.int32) if segment is None else segment, -1)
    if reach == (None, None):
        position = None
    elif position is None:
        position = natural[None]
    return Tokens(position, segment)


def _numpy_for(*arrays: Any) -> Any:
    """numpy where everything is known while JAX traces, so that what follows from it is known too; else jax.numpy."""
    return np if all(x is None or isinstance(x, np.ndarray) for x in arrays) else jnp


def pad_tokens(tokens: Tokens, length: int, padded: int) -> Tokens:
    """Tokens of `length` extended to `padded` with padding tokens."""
    if padded == length:
        return tokens
    numpy = _numpy_for(*tokens)
    extra = ((0, 0), (0, padded - length))
    segment = numpy.zeros((1, length), np.int32) if tokens.segment is None else tokens.segment
    position = None if tokens.position is None else numpy.pad(tokens.position, extra)
    return Tokens(position, numpy.pad(segment, extra, constant_values=-1))


def zero_padding(tokens: Tokens, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """(B, L, heads, dim) arrays with zeros for padding tokens: what is stored there may be NaN, and 0 * NaN is NaN."""
    if tokens.segment is None:
        return arrays
    real = (tokens.segment >= 0)[:, :, None, None]
    return tuple(jnp.where(real, x, jnp.zeros_like(x)) for x in arrays)


def visible(query: Tokens, key: Tokens, reach: Reach) -> jax.Array | None:
    """(B | 1, T, S) bool, which query token sees which key token; None when all do."""
    conditions = []
    left, right = reach
    if reach != (None, None):
        assert query.position is not None, "a bounded reach compares positions"
        assert key.position is not None, "a bounded reach compares positions"
        distance = key.position[:, None, :] - query.position[:, :, None]
    if left is not None:
        conditions.append(distance >= -left)
    if right is not None:
        conditions.append(distance <= right)
    if query.segment is not None and key.segment is not None:
        conditions.append(query.segment[:, :, None] == key.segment[:, None, :])
    if query.segment is not None:
        conditions.append(query.segment[:, :, None] >= 0)
    elif key.segment is not None:
        conditions.append(key.segment[:, None, :] >= 0)
    if not conditions:
        return None
    mask = conditions[0]
    for condition in conditions[1:]:
        mask = mask & condition
    return mask


class Bounds(NamedTuple):
    """Per block of tokens, over its real (non-padding) tokens; arrays (B | 1, number of blocks)."""

    position_min: jax.Array
    position_max: jax.Array
    segment_min: jax.Array
    segment_max: jax.Array
    all_real: jax.Array
    any_real: jax.Array


def block_bounds(tokens: Tokens, length: int, num_blocks: int) -> Bounds:
    """Bounds of `tokens`; `num_blocks` divides their `length`. numpy arrays give numpy arrays, here and below."""
    numpy = _numpy_for(*tokens)

    def blocks(x):
        x = numpy.zeros((1, length), np.int32) if x is None else x
        return x.reshape(x.shape[0], num_blocks, -1)

    position, segment = blocks(tokens.position), blocks(tokens.segment)
    real = segment >= 0
    return Bounds(
        numpy.where(real, position, _INT_MAX).min(-1),
        numpy.where(real, position, _INT_MIN).max(-1),
        numpy.where(real, segment, _INT_MAX).min(-1),
        segment.max(-1),
        real.all(-1),
        real.any(-1),
    )


def classify(query: Bounds, key: Bounds, reach: Reach) -> jax.Array:
    """(B | 1, query blocks, key blocks) int32: EMPTY, PARTIAL or FULL for every pair of blocks.

    Sound, not complete: a pair called EMPTY has no visible token pair and a pair called FULL has no hidden one.
    """
    numpy = _numpy_for(*query, *key)
    q = Bounds(*(x[:, :, None] for x in query))
    k = Bounds(*(x[:, None, :] for x in key))
    empty = ~q.any_real | ~k.any_real | (q.segment_max < k.segment_min) | (k.segment_max < q.segment_min)
    one_segment = (q.segment_min == q.segment_max) & (k.segment_min == k.segment_max) & (q.segment_min == k.segment_min)
    full = q.all_real & k.all_real & one_segment
    left, right = reach
    # Blocks without real tokens have min = INT_MAX, so sums are taken on the clipped side that cannot wrap.
    q_min = numpy.minimum(q.position_min, MAX_POSITION)
    q_max = numpy.maximum(q.position_max, -MAX_POSITION)
    if left is not None:
        empty |= k.position_max < q_min - left
        full &= k.position_min >= q_max - left
    if right is not None:
        empty |= k.position_min > q_max + right
        full &= k.position_max <= q_min + right
    return numpy.where(empty, EMPTY, numpy.where(full, FULL, PARTIAL)).astype(np.int32)


class ActiveBlocks(NamedTuple):
    """For every row of a table of block pairs, which blocks to visit: full ones first, then partial ones.

    Attributes:
      order: (..., rows, columns) int32 block indices.
      full: (..., rows) int32; order[:full] run without a mask.
      active: (..., rows) int32; order[full:active] run with one, the rest are not visited.
    """

    order: jax.Array
    full: jax.Array
    active: jax.Array


def active_blocks(kinds: jax.Array) -> ActiveBlocks:
    """`ActiveBlocks` of a table (..., rows, columns) of EMPTY / PARTIAL / FULL."""
    numpy, columns = _numpy_for(kinds), kinds.shape[-1]
    # One operand to sort, not a kind and its column: distinct numbers, so the order is that of a stable sort by kind.
    order = numpy.sort(kinds * columns + numpy.arange(columns, dtype=np.int32), axis=-1) % columns
    full = (kinds == FULL).sum(-1, dtype=np.int32)
    return ActiveBlocks(order.astype(np.int32), full, full + (kinds == PARTIAL).sum(-1, dtype=np.int32))
