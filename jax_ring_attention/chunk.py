"""The chunk contract and the choice of implementation.

`attention_chunk_stats` is attention over one key/value chunk as mergeable statistics, `attention_chunk_grads` its backward
pass. Implementations are listed in `KERNELS`, first choice first; the ring uses them through the same `select_kernel`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_ring_attention import arguments as args
from jax_ring_attention import compat
from jax_ring_attention.kernels.autodiff import AutodiffKernel
from jax_ring_attention.kernels.contract import Dense, Kernel, Problem, Scope
from jax_ring_attention.kernels.mosaic_gpu import MosaicGpuKernel
from jax_ring_attention.kernels.mosaic_tpu import MosaicTpuKernel
from jax_ring_attention.kernels.xla import XlaKernel
from jax_ring_attention.masks import token_integers, zero_padding
from jax_ring_attention.stats import ChunkStats, accumulator_dtype, finite_or_zero

KERNELS: dict[str, type[Kernel]] = {
    "mosaic_gpu": MosaicGpuKernel,
    "mosaic_tpu": MosaicTpuKernel,
    "xla": XlaKernel,
    "autodiff": AutodiffKernel,
}

#: What `implementation=None` may take, first choice first. `autodiff` trades memory for derivatives and is taken only by name.
AUTOMATIC = ("mosaic_gpu", "mosaic_tpu", "xla")


def select_kernel(problems: tuple[Problem, ...], implementation: str | None) -> type[Kernel]:
    """The named kernel, or the first of `AUTOMATIC` that accepts every problem.

    Raises:
      ValueError: no such implementation.
      NotImplementedError: the implementation (or every automatic one) refuses; says why and what to use.
    """
    if implementation is not None and implementation not in KERNELS:
        raise ValueError(
            f"implementation={implementation!r} is unknown; choose one of {', '.join(map(repr, KERNELS))}, or None to "
            "take the first that accepts the inputs."
        )
    preferred = [name for name in AUTOMATIC if KERNELS[name].is_preferred()]
    candidates = preferred if implementation is None else [implementation]
    reasons = []
    for name in candidates:
        refusals = [reason for problem in problems if (reason := KERNELS[name].refusal(problem)) is not None]
        if not refusals:
            return KERNELS[name]
        reasons.append(f"implementation={name!r} refuses: {refusals[0]}.")
    raise NotImplementedError(" ".join(reasons))


def attention_chunk_stats(
    query: jax.Array,
    key_chunk: jax.Array,
    value_chunk: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    segment_ids: Any = None,
    positions: Any = None,
    logits_soft_cap: float | None = None,
    carry: ChunkStats | None = None,
    implementation: str | None = None,
    block_sizes: Any = None,
    deterministic: bool = False,
    **unsupported: Any,
) -> ChunkStats:
    """Online-softmax statistics of queries over one key/value chunk.

        s_j = scale * query . key_j + bias_j   (then soft cap, then mask)
        max = max_j s_j,   sum = sum_j exp(s_j - max),   output = sum_j exp(s_j - max) value_j

    With `carry` the result is `merge_chunk_stats(carry, statistics of the chunk)`. Differentiable: exact for everything that is
    computed from the statistics through `merge_chunk_stats` and `finalize_chunk_stats`, where `max` counts as a constant.

    Args:
      query: (B, T, N, H), (T, N, H) or (T, H).
      key_chunk: (B, S, K, H) with N % K == 0, or of query's lower rank.
      value_chunk: (B, S, K, Hv), likewise.
      bias, mask: broadcast to (B, N, T, S); float added to the scaled logits, bool True where visible.
      scale: factor on the logits; default 1 / sqrt(H).
      is_causal: query at position q sees keys at positions <= q. Positions count from 0 on both sides unless given.
      local_window_size: (left, right) or one int for both, inclusive; None on a side is unbounded.
      segment_ids: int (B, T) for both sides or `SegmentIds`; equal ids see each other, negative ids see and are seen by nobody.
      positions: int (T,) or (B, T) for both sides or `Positions`.
      logits_soft_cap: c in c * tanh(logits / c).
      carry: statistics of other keys for the same queries, same ranks.
      implementation: a name in `KERNELS`; None takes the first that accepts.
      block_sizes: `BlockSizes`, a pair or an int.
      deterministic: gradients are the same bit by bit from run to run, see `ring_attention`.

    Returns:
      `ChunkStats`: output (B, T, N, Hv), sum (B, T, N), max (B, T, N), float32 (float64 for float64 inputs), with query's rank.

    Raises:
      ValueError: shapes, dtypes or values that do not fit. NotImplementedError: the implementation refuses.

    Source: Dao 2023, "FlashAttention-2", section 3.1; Rabe and Staats 2021, section 2.
    """
    args.refuse_keywords("attention_chunk_stats", unsupported)
    rank = args.query_rank(query)
    query, key, value = (
        args.as_btnh(name, x, rank) for name, x in (("query", query), ("key_chunk", key_chunk), ("value_chunk", value_chunk))
    )
    args.check_query_key_value(query, key, value)
    problem, tokens, dense = _chunk_problem(
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        local_window_size=local_window_size,
        segment_ids=segment_ids,
        positions=positions,
        logits_soft_cap=logits_soft_cap,
        block_sizes=block_sizes,
        deterministic=deterministic,
    )
    kernel = select_kernel((problem,), implementation)
    shape, accumulator = query.shape[:-1], accumulator_dtype(query.dtype)
    start = None if carry is None else _checked_carry(ChunkStats(*carry), shape, value.shape[-1], accumulator, rank)
    arrays = (query, key, value, dense.bias, start, tokens, dense.mask)
    query, key, value, dense_bias, start, tokens, dense_mask = compat.vary_together(arrays)
    function = _chunk_stats if kernel.has_grads else _chunk_stats_plain
    stats = function((kernel, problem), query, key, value, dense_bias, start, tokens, dense_mask)
    return ChunkStats(*(args.drop_leading(x, rank) for x in stats))


def attention_chunk_grads(
    query: jax.Array,
    key_chunk: jax.Array,
    value_chunk: jax.Array,
    d_output: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    segment_ids: Any = None,
    positions: Any = None,
    logits_soft_cap: float | None = None,
    carry: tuple[jax.Array, ...] | None = None,
    implementation: str | None = None,
    block_sizes: Any = None,
    deterministic: bool = False,
    **unsupported: Any,
) -> tuple[jax.Array, ...]:
    """One chunk's share of the gradients of attention over all chunks.

        p_j = exp(s_j - lse),   ds_j = p_j (d_output . value_j - delta)
        d_value_j = sum_i p_ij d_output_i,   d_key_j = scale sum_i ds_ij query_i,   d_query_i = scale sum_j ds_ij key_j

    Arguments that are not listed are as in `attention_chunk_stats`.

    Args:
      d_output: (B, T, N, Hv) cotangent of the finished output.
      lse: (B, T, N) log-sum-exp over ALL keys, from `finalize_chunk_stats`.
      delta: (B, T, N) rowsum(out * d_output) - d_lse.
      carry: gradients so far, in the structure returned; they are added.

    Returns:
      `(d_query, d_key, d_value)`, and `d_bias` fourth when `bias` is given, in float32 (float64 for float64 inputs), shaped like
      query, key, value and bias.

    Raises:
      ValueError, NotImplementedError: as `attention_chunk_stats`.

    Source: Dao 2023, "FlashAttention-2", algorithm 2.
    """
    args.refuse_keywords("attention_chunk_grads", unsupported)
    rank = args.query_rank(query)
    query, key, value, d_output = (
        args.as_btnh(name, x, rank)
        for name, x in (("query", query), ("key_chunk", key_chunk), ("value_chunk", value_chunk), ("d_output", d_output))
    )
    args.check_query_key_value(query, key, value)
    row_shape = query.shape[:-1]
    _check_shape("d_output", d_output, (*row_shape, value.shape[-1]))
    accumulator = accumulator_dtype(query.dtype)
    lse, delta = (_lift_rows(name, x, rank, row_shape).astype(accumulator) for name, x in (("lse", lse), ("delta", delta)))
    problem, tokens, dense = _chunk_problem(
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        local_window_size=local_window_size,
        segment_ids=segment_ids,
        positions=positions,
        logits_soft_cap=logits_soft_cap,
        block_sizes=block_sizes,
        deterministic=deterministic,
    )
    kernel = select_kernel((problem,), implementation)
    if not kernel.has_grads:
        raise NotImplementedError(
            f"implementation={kernel.name!r} has no backward kernel: differentiate attention_chunk_stats with JAX, or use "
            "implementation='xla' here."
        )
    arrays = (query, key, value, d_output.astype(query.dtype), lse, delta, dense, tokens)
    query, key, value, d_output, lse, delta, dense, tokens = compat.vary_together(arrays)
    grads = _chunk_grads((kernel, problem), query, key, value, d_output, lse, delta, dense, tokens)
    shaped = [args.drop_leading(x, rank) for x in grads[:3]]
    if bias is not None:
        shaped.append(grads[3].reshape(jnp.shape(bias)))
    if carry is not None:
        if len(carry) != len(shaped):
            raise ValueError(f"carry has {len(carry)} gradients but this call returns {len(shaped)}.")
        for name, have, new in zip(("d_query", "d_key", "d_value", "d_bias"), carry, shaped, strict=False):
            _check_shape(f"carry {name}", have, new.shape)
        shaped = [have + new for have, new in zip(carry, shaped, strict=True)]
    return tuple(shaped)


def _chunk_problem(query, key, value, bias, mask, *, positions, segment_ids, **options):
    """`Problem`, the tokens of both sides, and the dense arrays of one chunk on its own."""
    batch, length, heads, dim = query.shape
    key_length = key.shape[1]
    reach = args.attention_reach(options["is_causal"], options["local_window_size"])
    segments = args.token_sides("segment_ids", segment_ids, batch, length, key_length)
    placed = args.token_sides("positions", positions, batch, length, key_length)
    tokens = tuple(
        token_integers(jnp.arange(n, dtype=jnp.int32), reach, position=position, segment=segment, lengths=None)
        for n, position, segment in zip((length, key_length), placed, segments, strict=True)
    )
    shape = (batch, heads, length, key_length)
    dense = Dense(args.dense_array("mask", mask, shape), args.dense_array("bias", bias, shape))
    problem = Problem(
        query_shape=query.shape,
        key_shape=key.shape,
        value_dim=value.shape[-1],
        dtype=query.dtype,
        scale=args.attention_scale(options["scale"], dim),
        reach=reach,
        logits_soft_cap=args.attention_soft_cap(options["logits_soft_cap"]),
        row_wise=any(side.row_wise for side in tokens),
        has_mask=mask is not None,
        has_bias=bias is not None,
        deterministic=args.attention_deterministic(options["deterministic"]),
        block_sizes=args.attention_block_sizes(options["block_sizes"]),
        precision=compat.default_matmul_precision(),
    )
    return problem, tokens, dense


def _lift_rows(name: str, x: Any, rank: int, shape: tuple[int, ...]) -> jax.Array:
    """(T,), (T, N) or (B, T, N) to (B, T, N)."""
    x = jnp.asarray(x)
    _check_shape(name, x, {2: shape[1:2], 3: shape[1:], 4: shape}[rank])
    return x.reshape(shape)


def _check_shape(name: str, x: Any, shape: tuple[int, ...]) -> None:
    if jnp.shape(x) != tuple(shape):
        raise ValueError(f"{name} has shape {jnp.shape(x)}; it must be {tuple(shape)} here.")


def _checked_carry(carry: ChunkStats, shape, value_dim, dtype, rank) -> ChunkStats:
    output = args.as_btnh("carry.output", carry.output, rank)
    _check_shape("carry.output", output, (*shape, value_dim))
    rows = (_lift_rows(f"carry.{name}", x, rank, shape) for name, x in (("sum", carry.sum), ("max", carry.max)))
    return ChunkStats(*(x.astype(dtype) for x in (output, *rows)))


def _kernel(task: tuple[type[Kernel], Problem]) -> Kernel:
    kernel, problem = task
    return kernel(problem)


def _chunk_stats_plain(task, query, key, value, bias, carry, tokens, mask):
    kernel = _kernel(task)
    dense = kernel.pack_dense(Dense(mask, bias), kernel.overhang)
    start = None if carry is None else kernel.pack_stats(carry)
    packed = kernel.pack_query(query), kernel.pack_chunk(*zero_padding(tokens[1], key, value))
    return kernel.unpack_stats(kernel.fold(*packed, Scope(tokens[0], tokens[1], dense, 0), start))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunk_stats(task, query, key, value, bias, carry, tokens, mask):
    return _chunk_stats_plain(task, query, key, value, bias, carry, tokens, mask)


def _chunk_stats_fwd(task, query, key, value, bias, carry, tokens, mask):
    stats = _chunk_stats_plain(task, query, key, value, bias, carry, tokens, mask)
    return stats, (query, key, value, bias, carry, tokens, mask, stats.max)


def _chunk_stats_bwd(task, residuals, cotangents):
    """The maximum is a constant unit, so `sum` and `output` are a softmax whose lse is `max` and whose delta is -d_sum."""
    query, key, value, bias, carry, tokens, mask, maximum = residuals
    d_output, d_sum, _ = cotangents
    dense = Dense(mask, bias)
    grads = _chunk_grads(task, query, key, value, d_output.astype(query.dtype), maximum, -d_sum, dense, tokens)
    d_carry = None
    if carry is not None:
        rescale = jnp.exp(carry.max - finite_or_zero(maximum))
        through = (d_output * carry.output).sum(-1) + d_sum * carry.sum
        d_carry = ChunkStats(d_output * rescale[..., None], d_sum * rescale, through * rescale)
    d_bias = None if bias is None else grads[3].astype(bias.dtype)
    d_query, d_key, d_value = (x.astype(query.dtype) for x in grads[:3])
    return d_query, d_key, d_value, d_bias, d_carry, None, None


_chunk_stats.defvjp(_chunk_stats_fwd, _chunk_stats_bwd)


def _chunk_grads(task, query, key, value, d_output, lse, delta, dense, tokens):
    kernel = _kernel(task)
    packed_dense = kernel.pack_dense(dense, kernel.overhang)
    rows = kernel.pack_rows(query, d_output, lse, delta)
    chunk = kernel.pack_chunk(*zero_padding(tokens[1], key, value))
    d_bias = kernel.initial_d_bias(packed_dense)
    scope = Scope(tokens[0], tokens[1], packed_dense, 0)
    d_query, d_bias, d_chunk = kernel.fold_grads(rows, chunk, scope, kernel.initial_d_query(rows), d_bias, rounded=False)
    if d_bias is not None:
        d_bias = jax.lax.slice(d_bias, (0,) * 4, dense.bias.shape)
    return kernel.unpack_d_query(d_query), *kernel.unpack_d_chunk(d_chunk), d_bias
