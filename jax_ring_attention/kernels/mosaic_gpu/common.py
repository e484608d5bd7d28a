"""What the Hopper kernels share: sizes, masks of partial blocks, arithmetic. Importable without Pallas."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_ring_attention import compat
from jax_ring_attention.masks import ActiveBlocks, Tokens
from jax_ring_attention.schedule import Reach

LOG2E = math.log2(math.e)
ROWS = 64
"""Queries of one compute warpgroup."""
WARPGROUPS = 2


FORWARD_BLOCK_Q = ROWS * WARPGROUPS
BLOCK_KV = 128

#: Shared memory of a CTA, less what barriers and row vectors take.
SHARED_BYTES = 232448 - 2048

#: The most numbers per row that a compute warpgroup holds of gradients.
LARGEST_GRADIENTS = 256

#: lse of rows without keys: exp2(anything - this) is 0.
NO_KEYS = 1e30


def backward_block_q(head_dim: int) -> int:
    """Queries per step of the backward pass; where warpgroups share dQ, it is cut by rows for 128 of them, by columns for 64."""
    return 128 if head_dim == 64 else 64


class Shape(NamedTuple):
    """Static facts; all lengths are padded to blocks and head dims to multiples of 64, with value_dim <= head_dim."""

    batch: int
    query_length: int
    key_length: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: jnp.dtype
    scale: float
    logits_soft_cap: float | None
    reach: Reach


def splits_gradients(shape: Shape) -> bool:
    """Whether d_key and d_value are too wide for one compute warpgroup to hold both: `backward_wide`."""
    return shape.head_dim + shape.value_dim > LARGEST_GRADIENTS


def backward_block_kv(shape: Shape) -> int:
    """Keys of a CTA that sums d_key and d_value."""
    return ROWS if splits_gradients(shape) else BLOCK_KV


def alternates(shape: Shape) -> bool:
    """Whether the compute warpgroups of the forward pass take turns: `item`."""
    return shape.head_dim == 64


def forward_block_kv(shape: Shape) -> int:
    """Keys per step of the forward pass: as many as fit, in shared memory in two stages beside the queries, and in registers."""
    if alternates(shape):
        return 2 * BLOCK_KV if shape.key_length % (2 * BLOCK_KV) == 0 else BLOCK_KV
    stages = 2 * (shape.head_dim + shape.value_dim)
    fits = (FORWARD_BLOCK_Q * shape.head_dim + BLOCK_KV * stages) * jnp.dtype(shape.dtype).itemsize <= SHARED_BYTES
    return BLOCK_KV if fits else BLOCK_KV // 2


def tanh(x: jax.Array) -> jax.Array:
    """From exp2: the hardware's tanh has 11 bits only."""
    return 1 - 2 / (jnp.exp2(x * (2 * LOG2E)) + 1)


class Visits(NamedTuple):
    """References to the blocks to visit and the integers that partial pairs compare; all None when every pair is full."""

    order: Any = None
    full: Any = None
    active: Any = None
    query_tokens: Tokens = Tokens()
    key_tokens: Tokens = Tokens()


def visit_operands(blocks: ActiveBlocks | None, query: Tokens, key: Tokens) -> list[jax.Array]:
    """The arrays behind `Visits`, in order."""
    return [] if blocks is None else [*blocks, *(x for x in (*query, *key) if x is not None)]


def take(refs: list[Any], count: int) -> list[Any]:
    """Remove the first `count` references."""
    taken = refs[:count]
    del refs[:count]
    return taken


def take_visits(refs: list[Any], blocks: ActiveBlocks | None, query: Tokens, key: Tokens) -> Visits:
    """Remove the references to `visit_operands`."""
    if blocks is None:
        return Visits()
    listed = take(refs, 3)
    sides = [Tokens(*(None if x is None else refs.pop(0) for x in side)) for side in (query, key)]
    return Visits(listed[0], listed[1], listed[2], sides[0], sides[1])


class Walk(NamedTuple):
    """The blocks that a tile visits, once for each of `repeats` heads: all heads' full blocks, then all heads' partial ones.

    Attributes:
      order: reference to their numbers, and `row`, the tile's place in it; None visits blocks 0, 1, ...
      full, active: how many are full, and how many there are.
      full_steps, steps: as many for all repeats.
    """

    order: Any
    row: tuple[Any, Any]
    full: Any
    active: Any
    full_steps: Any
    steps: Any

    @classmethod
    def of(cls, visits: Visits, batch: Any, tile: Any, blocks: int, repeats: int = 1) -> Walk:
        """`blocks` are visited where nothing is listed."""
        if visits.order is None:
            return cls(None, (batch, tile), blocks, blocks, blocks * repeats, blocks * repeats)
        row = (0 if visits.order.shape[0] == 1 else batch, tile)
        full, active = visits.full[row], visits.active[row]
        if repeats == 1:
            return cls(visits.order, row, full, active, full, active)
        return cls(visits.order, row, full, active, full * repeats, active * repeats)

    def block(self, n: Any) -> Any:
        """The n-th block of one repeat."""
        return n if self.order is None else self.order[(*self.row, n)]

    def place(self, n: Any) -> tuple[Any, Any]:
        """Repeat and block of step n."""
        if self.order is None:
            return n // self.active, n % self.active
        is_full = n < self.full_steps
        count = jnp.where(is_full, self.full, self.active - self.full)
        inner = jnp.where(is_full, n, n - self.full_steps)
        block = self.order[(*self.row, jnp.where(is_full, 0, self.full) + lax.rem(inner, count))]
        return lax.div(inner, count), block


def visible_block(query: Tokens, key: Tokens, reach: Reach, shape: tuple[int, int], axes: tuple[int, int]) -> jax.Array:
    """Mask of one partial pair; `axes` says which axis of `shape` the query's and the key's integers run along."""

    def along(x, axis):
        return lax.broadcast_in_dim(x, shape, [axis])

    conditions = []
    left, right = reach
    if query.position is not None:
        if left is not None:
            conditions.append(along(key.position, axes[1]) >= along(query.position - left, axes[0]))
        if right is not None:
            conditions.append(along(key.position, axes[1]) <= along(query.position + right, axes[0]))
    if query.segment is not None:
        segment = along(query.segment, axes[0])
        conditions += [segment == along(key.segment, axes[1]), segment >= 0]
    return functools.reduce(jnp.logical_and, conditions)


def capped(shape: Shape, products: jax.Array) -> tuple[jax.Array, float]:
    """Logits but for a factor, and that factor, which makes them units of log2."""
    if (cap := shape.logits_soft_cap) is None:
        return products, shape.scale * LOG2E
    return tanh(products * (shape.scale / cap)), cap * LOG2E


def weights_of(shape: Shape, logits: jax.Array, lse: jax.Array, seen: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """Weights of a pair of blocks, 0 where not `seen`, and the soft cap's slope, if any; lse in units of log2."""
    logits, factor = capped(shape, logits)
    slope = None if shape.logits_soft_cap is None else 1 - logits * logits
    if seen is not None:
        logits = jnp.where(seen, logits, -jnp.inf)
    return jnp.exp2(logits * factor - lse), slope


def load_tokens(refs: Tokens, batch: Any, where: Any, layout: Any) -> Tokens:
    """The integers of tokens `where` of a batch row, in registers of `layout`."""

    def load(ref):
        if ref is None:
            return None
        return compat.load_whole(ref.at[0 if ref.shape[0] == 1 else batch, where], layout, optimized=False)

    return Tokens(*(load(ref) for ref in refs))
