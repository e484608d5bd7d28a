"""Differentiable to any order and in any mode: one chunk's scores at once, in plain JAX, without a custom VJP.

The way out when forward mode, `jax.jacfwd`, or a derivative of a derivative is needed, which `jax.custom_vjp` rules out. It
keeps every chunk's T x S scores for the backward pass, so it is for short sequences and for checking.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_ring_attention.kernels.contract import Dense, Problem
from jax_ring_attention.masks import Tokens, visible
from jax_ring_attention.stats import ChunkStats, accumulator_dtype, finite_or_zero, merge_chunk_stats


class Chunk(NamedTuple):
    key: jax.Array
    value: jax.Array


class AutodiffKernel:
    """See the module docstring; the methods are those of `contract.Kernel` that a forward pass needs."""

    name = "autodiff"
    has_grads = False
    overhang = 0

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.kv_heads = problem.key_shape[2]

    @staticmethod
    def refusal(problem: Problem) -> str | None:
        if problem.block_sizes != (None, None):
            return "it has no blocks, so block_sizes cannot be honoured; leave block_sizes out or use implementation='xla'"
        return None

    def pack_query(self, query: jax.Array) -> jax.Array:
        return query

    def pack_chunk(self, key: jax.Array, value: jax.Array) -> Chunk:
        return Chunk(key, value)

    def pack_dense(self, dense: Dense, overhang: int) -> Dense:
        return dense

    def pack_stats(self, stats: ChunkStats) -> ChunkStats:
        return stats

    def unpack_stats(self, carry: ChunkStats) -> ChunkStats:
        return carry

    def fold(
        self,
        query: jax.Array,
        chunk: Chunk,
        query_tokens: Tokens,
        key_tokens: Tokens,
        dense: Dense,
        key_offset: Any,
        carry: ChunkStats,
    ) -> ChunkStats:
        problem = self.problem
        batch, length, heads, _ = query.shape
        key_length = chunk.key.shape[1]
        accumulator = accumulator_dtype(query.dtype)

        def by_kv_head(x):
            """(B, N, T, S) or with ones, to (B, K, N/K, T, S)."""
            x = x if x.shape[3] == 1 else lax.dynamic_slice_in_dim(x, key_offset, key_length, axis=3)
            heads = (1, 1) if x.shape[1] == 1 else (self.kv_heads, -1)
            return x.reshape(x.shape[0], *heads, *x.shape[2:])

        mask = visible(query_tokens, key_tokens, problem.reach)
        mask = None if mask is None else mask[:, None, None]
        if dense.mask is not None:
            mask = by_kv_head(dense.mask) if mask is None else mask & by_kv_head(dense.mask)
        grouped = query.reshape(batch, length, self.kv_heads, -1, query.shape[-1])
        if mask is not None:  # as in the xla kernel: what nobody sees must not meet 0 * NaN
            full = jnp.broadcast_to(mask, (batch, self.kv_heads, heads // self.kv_heads, length, key_length))
            seen = jnp.moveaxis(full.any((2, 3)), 1, 2)[..., None]
            chunk = Chunk(*(jnp.where(seen, x, jnp.zeros_like(x)) for x in chunk))
        matmul = {"precision": problem.precision, "preferred_element_type": accumulator}
        logits = jnp.einsum("btkgh,bskh->bkgts", grouped, chunk.key, **matmul) * problem.scale
        bias = None
        if dense.bias is not None:
            bias = by_kv_head(dense.bias)
            logits += bias.astype(accumulator)
        if problem.logits_soft_cap is not None:
            logits = problem.logits_soft_cap * jnp.tanh(logits / problem.logits_soft_cap)
            if bias is not None:
                logits = jnp.where(bias == -jnp.inf, -jnp.inf, logits)
        if mask is not None:
            logits = jnp.where(mask, logits, -jnp.inf)
        maximum = lax.stop_gradient(logits.max(-1))
        weights = jnp.exp(logits - finite_or_zero(maximum)[..., None])
        output = jnp.einsum("bkgts,bskv->btkgv", weights.astype(chunk.value.dtype), chunk.value, **matmul)

        def rows(x):
            return jnp.moveaxis(x, 3, 1).reshape(batch, length, heads)

        stats = ChunkStats(output.reshape(batch, length, heads, -1), rows(weights.sum(-1)), rows(maximum))
        return merge_chunk_stats(carry, stats)
