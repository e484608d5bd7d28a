"""Differentiable to any order and in any mode: one chunk's scores at once, in plain JAX, without a custom VJP.

The way out when forward mode, `jax.jacfwd`, or a derivative of a derivative is needed, which `jax.custom_vjp` rules out. It
keeps every chunk's T x S scores for the backward pass, so it is for short sequences and for checking.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jax_ring_attention.kernels.contract import Kernel, KeyValue, Problem, Scope
from jax_ring_attention.masks import visible
from jax_ring_attention.stats import ChunkStats, accumulator_dtype, finite_or_zero, merge_chunk_stats


class AutodiffKernel(Kernel):
    """See the module docstring; the methods are those of `contract.Kernel` that a forward pass needs."""

    name = "autodiff"
    has_grads = False

    @staticmethod
    def refusal(problem: Problem) -> str | None:
        if problem.block_sizes != (None, None):
            return "it has no blocks, so block_sizes cannot be honoured; leave block_sizes out or use implementation='xla'"
        return None

    def pack_query(self, query: jax.Array) -> jax.Array:
        return query

    def pack_chunk(self, key: jax.Array, value: jax.Array) -> KeyValue:
        return KeyValue(key, value)

    def fold(self, query: jax.Array, chunk: KeyValue, scope: Scope, carry: ChunkStats | None) -> ChunkStats:
        problem = self.problem
        query_tokens, key_tokens, dense, key_offset, _ = scope
        kv_heads = problem.key_shape[2]
        batch, length, heads, _ = query.shape
        key_length = chunk.key.shape[1]
        accumulator = accumulator_dtype(query.dtype)

        def by_kv_head(x):
            """(B, N, T, S) or with ones, to (B, K, N/K, T, S)."""
            x = x if x.shape[3] == 1 else lax.dynamic_slice_in_dim(x, key_offset, key_length, axis=3)
            heads = (1, 1) if x.shape[1] == 1 else (kv_heads, -1)
            return x.reshape(x.shape[0], *heads, *x.shape[2:])

        mask = visible(query_tokens, key_tokens, problem.reach)
        mask = None if mask is None else mask[:, None, None]
        if dense.mask is not None:
            mask = by_kv_head(dense.mask) if mask is None else mask & by_kv_head(dense.mask)
        bias = None if dense.bias is None else by_kv_head(dense.bias)
        if bias is not None:  # a bias of -inf hides like a mask
            mask = bias != -jnp.inf if mask is None else mask & (bias != -jnp.inf)
        grouped = query.reshape(batch, length, kv_heads, -1, query.shape[-1])
        if mask is not None:  # as in the xla kernel: what nobody sees must not meet 0 * NaN
            full = jnp.broadcast_to(mask, (batch, kv_heads, heads // kv_heads, length, key_length))
            seen = jnp.moveaxis(full.any((2, 3)), 1, 2)[..., None]
            chunk = KeyValue(*(jnp.where(seen, x, jnp.zeros_like(x)) for x in chunk))
            sees = jnp.moveaxis(full.any(-1), 3, 1)[..., None]  # (B, T, K, N/K, 1)
            grouped = jnp.where(sees, grouped, jnp.zeros_like(grouped))
        einsum = functools.partial(jnp.einsum, precision=problem.precision, preferred_element_type=accumulator)
        logits = einsum("btkgh,bskh->bkgts", grouped, chunk.key) * problem.scale
        if bias is not None:
            logits += bias.astype(accumulator)
        if problem.logits_soft_cap is not None:
            logits = problem.logits_soft_cap * jnp.tanh(logits / problem.logits_soft_cap)
        if mask is not None:
            logits = jnp.where(mask, logits, -jnp.inf)
        maximum = lax.stop_gradient(logits.max(-1))
        weights = jnp.exp(logits - finite_or_zero(maximum)[..., None])
        output = einsum("bkgts,bskv->btkgv", weights.astype(chunk.value.dtype), chunk.value)

        def rows(x):
            return jnp.moveaxis(x, 3, 1).reshape(batch, length, heads)

        stats = ChunkStats(output.reshape(batch, length, heads, -1), rows(weights.sum(-1)), rows(maximum))
        return stats if carry is None else merge_chunk_stats(carry, stats)
