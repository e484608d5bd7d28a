"""Attention over part of the keys, as a monoid.

For one query with logits s_1..s_n over some keys with values v_1..v_n the statistics are

    max = max_j s_j        sum = sum_j exp(s_j - max)        output = sum_j exp(s_j - max) v_j

Statistics over disjoint sets of keys merge into those of the union, in any order and grouping; the identity is
(0, 0, -inf). Ring hops, lists of chunks, attention sinks and sharded decode caches are all folds of this merge.

Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", section 3; the form with values is
Rabe and Staats 2021, "Self-attention does not need O(n^2) memory", section 2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class ChunkStats(NamedTuple):
    """Un-normalised attention over one set of keys. Unpacks as `output, sum, max`.

    Attributes:
      output: (..., T, N, Hv) value sum, weighted with exp(logit - max). float32 (float64 for float64 inputs).
      sum: (..., T, N) softmax denominator relative to `max`, same dtype.
      max: (..., T, N) largest logit, natural-log scale; -inf where no key was seen.
    """

    output: jax.Array
    sum: jax.Array
    max: jax.Array


def accumulator_dtype(dtype: Any) -> jnp.dtype:
    """float64 for float64, else float32: statistics and gradient accumulators never have the inputs' narrow dtype."""
    return jnp.dtype(jnp.float64) if jnp.dtype(dtype) == jnp.float64 else jnp.dtype(jnp.float32)


def identity_chunk_stats(shape: tuple[int, ...], value_dim: int, dtype: Any = jnp.float32) -> ChunkStats:
    """The statistics of no keys at all, for rows of `shape` (..., T, N): output 0, sum 0, max -inf."""
    return ChunkStats(jnp.zeros((*shape, value_dim), dtype), jnp.zeros(shape, dtype), jnp.full(shape, -jnp.inf, dtype))


def finite_or_zero(maximum: jax.Array) -> jax.Array:
    """`maximum` with -inf replaced by 0, so that exp(-inf - maximum) is 0 instead of NaN."""
    return jnp.where(maximum == -jnp.inf, jnp.zeros_like(maximum), maximum)


def merge_chunk_stats(accumulated: ChunkStats, chunk: ChunkStats) -> ChunkStats:
    """Statistics of the union of two disjoint sets of keys.

        max = max(a.max, b.max)
        sum = a.sum exp(a.max - max) + b.sum exp(b.max - max)            output likewise

    Associative and, up to rounding, commutative; `identity_chunk_stats` is the identity. The maximum is only the unit in
    which output and sum are given: it is treated as a constant under differentiation, which is exact for every function of
    the attention itself (`finalize_chunk_stats`), and keeps gradients finite for rows that saw no key.

    Args:
      accumulated, chunk: `ChunkStats` or plain `(output, sum, max)` tuples of equal shapes (..., T, N, Hv), (..., T, N) and
        (..., T, N).

    Returns:
      `ChunkStats` of the same shapes.

    Raises:
      ValueError: the shapes of the two sides differ.
    """
    accumulated, chunk = ChunkStats(*accumulated), ChunkStats(*chunk)
    for name, a, b in zip(ChunkStats._fields, accumulated, chunk, strict=True):
        if jnp.shape(a) != jnp.shape(b):
            raise ValueError(
                f"merge_chunk_stats: {name} has shape {jnp.shape(a)} on one side and {jnp.shape(b)} on the other; "
                "both sides must describe the same queries and heads."
            )
    maximum = lax.stop_gradient(jnp.maximum(accumulated.max, chunk.max))
    reference = finite_or_zero(maximum)
    scale_a = jnp.exp(accumulated.max - reference)
    scale_b = jnp.exp(chunk.max - reference)
    return ChunkStats(
        accumulated.output * scale_a[..., None] + chunk.output * scale_b[..., None],
        accumulated.sum * scale_a + chunk.sum * scale_b,
        maximum,
    )


def finalize_chunk_stats(stats: ChunkStats) -> tuple[jax.Array, jax.Array]:
    """Attention output and log-sum-exp: `(output / sum, max + log(sum))`.

    Args:
      stats: `ChunkStats` or a plain 3-tuple.

    Returns:
      `out` (..., T, N, Hv) and `lse` (..., T, N) in the statistics' dtype, natural log. A row that saw no key has out 0,
      lse -inf and passes no gradient.
    """
    stats = ChunkStats(*stats)
    empty = stats.sum == 0
    total = jnp.where(empty, jnp.ones_like(stats.sum), stats.sum)
    out = jnp.where(empty[..., None], jnp.zeros_like(stats.output), stats.output / total[..., None])
    lse = jnp.where(empty, jnp.full_like(stats.max, -jnp.inf), stats.max + jnp.log(total))
    return out, lse
