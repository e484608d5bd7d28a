"""What the two Hopper kernels share: sizes, masks of partial blocks, arithmetic. Importable without Pallas."""

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


def load_tokens(refs: Tokens, batch: Any, where: Any, layout: Any) -> Tokens:
    """The integers of tokens `where` of a batch row, in registers of `layout`."""

    def load(ref):
        if ref is None:
            return None
        return compat.load_whole(ref.at[0 if ref.shape[0] == 1 else batch, where], layout, optimized=False)

    return Tokens(*(load(ref) for ref in refs))
