"""`ring_attention`, the one public function: three ways to call it, one computation.

lists of chunks      one device folds the chunks one at a time
inside `shard_map`   the arrays are this device's shards of a ring over `axis_name`
global arrays        the function wraps itself in `shard_map` (`sharded.py`)
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jax_ring_attention import arguments as args
from jax_ring_attention import compat, fused
from jax_ring_attention.chunk import select_kernel
from jax_ring_attention.kernels.contract import Problem
from jax_ring_attention.layouts import Layout, check_layout, shard_multiple
from jax_ring_attention.masks import Positions, SegmentIds
from jax_ring_attention.schedule import UNFUSED, Leg, Schedule, check_schedule, needed_offsets, plan_chunks, plan_hops
from jax_ring_attention.shard import Inputs, Integers, Ring, chunk_problems
from jax_ring_attention.sharded import LOCAL, attend_sharded, resolve_mesh
from jax_ring_attention.vjp import DERIVATIVES_MESSAGE, attend

AxisName = str | tuple[str, ...]


def ring_attention(
    query: jax.Array,
    key: Any,
    value: Any,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
    segment_ids: jax.Array | SegmentIds | None = None,
    positions: jax.Array | Positions | None = None,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    axis_name: AxisName | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    spec: PartitionSpec | None = None,
    layout: Layout = "contiguous",
    schedule: Schedule = "ring",
    block_sizes: Any = None,
    deterministic: bool = False,
    **unsupported: Any,
) -> Any:
    """Exact attention over a sequence that is sharded over a ring of devices.

        out = softmax(scale * query key^T + bias, over the keys that a query may see) value

    Three forms, same result:

    * `key` and `value` are lists of chunks: this device folds them one at a time. Chunks may differ in length, down to 1.
    * arrays, where `axis_name` is a manual axis (inside your `shard_map`): the arrays are this device's shards.
    * arrays elsewhere: global arrays, sharded over `mesh` or the mesh set by `jax.set_mesh` as `spec` says. Without a mesh,
      one device.

    Args:
      query: (B, T, N, H), or (T, N, H), or (T, H). bfloat16, float16, float32 or float64.
      key: (B, S, K, H) with N % K == 0 (grouped-query attention; heads are never repeated in memory or on the wire).
      value: (B, S, K, Hv).
      bias: broadcasts to (B, N, T, S); added to the scaled logits; differentiable. -inf hides a key. Inside `shard_map`: this
        device's rows T, and the keys S of the whole ring.
      mask: bool, broadcasts likewise; True where visible.
      scale: factor on the logits; default 1 / sqrt(H).
      is_causal: a query at position q sees keys at positions <= q. Positions of query and key both start at 0 (top-left).
      query_seq_lengths, key_value_seq_lengths: int (B,); tokens from that natural index on are padding.
      local_window_size: (left, right), or an int W for (W, W), inclusive on both ends; None on a side is unbounded. With
        (2, 0), position 5 sees positions 3, 4 and 5.
      implementation: "mosaic_gpu" (Hopper GPUs, bfloat16 and float16), "mosaic_tpu" (TPUs), "xla" (any platform), "autodiff"
        (any order and mode of differentiation, for short sequences), or None for the first that suits devices and inputs. A named
        one that cannot do it raises.
      return_residual: also return the log-sum-exp.
      segment_ids: int (B, T) for query and key alike, or `SegmentIds(query, key_value)`. Tokens see their own segment only; a
        negative id is padding: sees nothing, is seen by nobody.
      positions: int (T,) or (B, T) for both, or `Positions(query, key_value)`, below 2**30: replaces the positions that the
        layout implies, for causal and window.
      logits_soft_cap: c in c * tanh(logits / c), after the bias and before the mask.
      sinks: (N,) logits of one extra key per head with value 0; differentiable.
      axis_name: mesh axis, or tuple of axes, that the ring runs over; () for attention over the local arrays alone.
      mesh, spec: for global arrays: the mesh and the PartitionSpec of BTNH, for example P("data", "seq", "tensor", None); its T
        entry is the ring. With Explicit axis types both are read off the arrays. On TPUs take `make_ring_mesh`'s device order.
      layout: order in which tokens are STORED along T and S: "contiguous", "zigzag" or "striped" (`to_layout`). Per-token
        arguments follow the stored order. The causal work is balanced over devices in the last two.
      schedule: "ring"; "bidirectional", which sends the halves of each chunk opposite ways, and equals "ring" where a window
        leaves hops out; "all_gather", which holds all keys at once; "fused" and "fused_bidirectional", which equal "ring" and
        "bidirectional" but run every hop in one kernel: on TPUs ("mosaic_tpu", which they take by themselves) and, "fused" and
        forward only, on Hopper GPUs of one host ("mosaic_gpu").
      block_sizes: `BlockSizes(block_q, block_kv)`, a pair or an int: the kernel's tiling.
      deterministic: gradients are the same bit by bit from run to run. It costs "mosaic_gpu" 7 matmuls per pair of blocks
        instead of 5 in the backward pass, up to head dim 128; all else is deterministic as it is. (Flax's argument of this name
        turns dropout off; there is none here.)

    Returns:
      `out` with query's shape but Hv for H, in query's dtype. With `return_residual`, `(out, lse)`: lse (B, T, N) float32
      (float64 for float64 inputs), natural log, differentiable.

    Raises:
      ValueError: shapes, dtypes, names or combinations that do not fit. TypeError: unknown keywords. NotImplementedError: what an
      implementation cannot do; forward mode alone and reverse mode twice, for which implementation="autodiff" is the way out
      (forward mode over reverse works). Under an outer `jax.jit`, forward mode alone meets JAX's own TypeError about custom_vjp.

    Differs from `jax.nn.dot_product_attention`: a row that sees no key gives 0 and lse -inf (there: mean of the values); lse is
    float32 and differentiable (there: the key's dtype, gradient stopped); an int window is the same, (W, W).
    T or S that the ring does not divide is padded and masked for global arrays, and a ValueError inside `shard_map`.

    Source: Liu, Zaharia and Abbeel 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context", section 3.
    """
    args.refuse_keywords("ring_attention", unsupported)
    check_layout(layout)
    check_schedule(schedule)
    rank = args.query_rank(query)
    query = args.as_btnh("query", query, rank)
    chunk_lengths: tuple[int, ...] = ()
    if isinstance(key, list | tuple) or isinstance(value, list | tuple):
        _refuse_ring_arguments(axis_name=axis_name, mesh=mesh, spec=spec)
        _refuse_ring_arguments(
            layout=None if layout == "contiguous" else layout, schedule=None if schedule == "ring" else schedule
        )
        key, value, chunk_lengths = _join_chunks(key, value, rank)
    else:
        key, value = (args.as_btnh(name, x, rank) for name, x in (("key", key), ("value", value)))
    args.check_query_key_value(query, key, value)

    axes, ring_size, place = LOCAL if chunk_lengths else resolve_mesh(query, axis_name, mesh, spec)

    batch, length, heads, dim = query.shape
    key_length = key.shape[1]
    reach = args.attention_reach(is_causal, local_window_size)
    query_segment, key_segment = args.token_sides("segment_ids", segment_ids, batch, length, key_length)
    query_position, key_position = args.token_sides("positions", positions, batch, length, key_length)
    placed = query_position is not None or key_position is not None
    if reach == (None, None):  # nobody compares them, so they need not travel
        query_position = key_position = None
    all_keys = key_length * ring_size if place is None else key_length
    dense_shape = (batch, heads, length, all_keys)
    inputs = Inputs(
        query,
        key,
        value,
        args.dense_array("bias", bias, dense_shape),
        args.sink_logits(sinks, heads),
    )
    integers = Integers(
        query_position,
        key_position,
        query_segment,
        key_segment,
        args.row_lengths("query_seq_lengths", query_seq_lengths, batch),
        args.row_lengths("key_value_seq_lengths", key_value_seq_lengths, batch),
        args.dense_array("mask", mask, dense_shape),
    )
    static = Problem(
        query_shape=query.shape,
        key_shape=key.shape,
        value_dim=value.shape[-1],
        dtype=query.dtype,
        scale=args.attention_scale(scale, dim),
        reach=reach,
        logits_soft_cap=args.attention_soft_cap(logits_soft_cap),
        has_mask=mask is not None,
        has_bias=bias is not None,
        deterministic=args.attention_deterministic(deterministic),
        block_sizes=args.attention_block_sizes(block_sizes),
        precision=compat.default_matmul_precision(),
    )

    attend_here = _Shard(static, axes, ring_size, layout, schedule, chunk_lengths, placed, implementation)
    try:
        if place is None:
            _check_shard_lengths(layout, ring_size, length, key_length)
            out, lse = attend_here(inputs, integers)
        else:
            out, lse = attend_sharded(attend_here, place, layout, ring_size, inputs, integers)
    except TypeError as error:
        if compat.FORWARD_MODE_MESSAGE not in str(error):
            raise
        raise NotImplementedError(DERIVATIVES_MESSAGE) from error
    out, lse = args.drop_leading(out, rank), args.drop_leading(lse, rank)
    return (out, lse) if return_residual else out


@dataclasses.dataclass(frozen=True)
class _Shard:
    """What one device does with its shards; everything static, so that it can be compared and hashed."""

    problem: Problem
    axes: tuple[str, ...]
    ring_size: int
    layout: str
    schedule: str
    chunk_lengths: tuple[int, ...]
    placed: bool
    implementation: str | None

    def __call__(self, inputs: Inputs, integers: Integers) -> tuple[jax.Array, jax.Array]:
        ring = self.ring(inputs, integers)
        rank = jax.lax.axis_index(self.axes) if self.axes else None  # what a hop brings varies over the ring
        inputs, integers, _ = compat.vary_together((inputs, integers, rank))
        return attend(ring, inputs, integers)

    def ring(self, inputs: Inputs, integers: Integers) -> Ring:
        """Decide what is left to decide: the hops and the kernel."""
        row_wise = any(x is not None and x.shape[0] > 1 for x in integers[:-1])
        shape, key_shape = inputs.query.shape, inputs.key.shape
        # By position alone, with nothing to the left cut off, every query sees the first key.
        sees_first = not any(x is not None for x in integers) and self.problem.reach[0] is None
        problem = dataclasses.replace(
            self.problem, query_shape=shape, key_shape=key_shape, row_wise=row_wise, empty_rows=not sees_first
        )
        length, key_length = shape[1], key_shape[1]
        legs: tuple[Leg, ...] | None
        if self.chunk_lengths:
            legs = plan_chunks(self.chunk_lengths)
        elif self.schedule == "all_gather":
            legs = None
        else:
            needed = None if self.placed else needed_offsets(self.layout, self.ring_size, length, key_length, problem.reach)
            legs = plan_hops(self.schedule, self.ring_size, key_length, needed)
        problems = chunk_problems(problem, self.ring_size, legs)
        if self.schedule in UNFUSED and legs is not None:
            kernel = fused.select_kernel(self.schedule, problems, self.implementation, legs)
            return Ring(self.axes, self.ring_size, self.layout, legs, problem, kernel, fused=self.schedule)
        kernel = select_kernel(problems, self.implementation)
        return Ring(self.axes, self.ring_size, self.layout, legs, problem, kernel)


def _join_chunks(key: Any, value: Any, rank: int) -> tuple[jax.Array, jax.Array, tuple[int, ...]]:
    if not (isinstance(key, list | tuple) and isinstance(value, list | tuple)):
        raise ValueError(
            f"key is a {type(key).__name__} and value a {type(value).__name__}: pass both as lists of chunks or both as arrays."
        )
    if len(key) != len(value) or not key:
        raise ValueError(f"got {len(key)} key chunks and {len(value)} value chunks; give at least one, and as many of each.")
    keys = [args.as_btnh(f"key[{i}]", x, rank) for i, x in enumerate(key)]
    values = [args.as_btnh(f"value[{i}]", x, rank) for i, x in enumerate(value)]
    for i, (k, v) in enumerate(zip(keys, values, strict=True)):
        for name, x in (("key", k), ("value", v)):
            if 0 in x.shape:
                raise ValueError(f"{name}[{i}] has shape {x.shape}, which holds nothing; leave empty chunks out.")
        if k.shape[1] != v.shape[1]:
            raise ValueError(f"key[{i}] has {k.shape[1]} tokens and value[{i}] {v.shape[1]}; they must be equal.")
        for name, x, first in (("key", k, keys[0]), ("value", v, values[0])):
            if (x.shape[0], *x.shape[2:], x.dtype) != (first.shape[0], *first.shape[2:], first.dtype):
                raise ValueError(
                    f"{name}[{i}] is {x.dtype}{x.shape} but {name}[0] {first.dtype}{first.shape}; "
                    "chunks may differ in length (axis 1) only."
                )
    return jnp.concatenate(keys, axis=1), jnp.concatenate(values, axis=1), tuple(k.shape[1] for k in keys)


def _refuse_ring_arguments(**given: Any) -> None:
    for name, x in given.items():
        if x is not None:
            raise ValueError(
                f"{name}={x!r} has no meaning with lists of chunks, which one device folds in order; "
                "pass arrays to run on a ring, or leave it out."
            )


def _check_shard_lengths(layout: str, ring_size: int, length: int, key_length: int) -> None:
    """Inside `shard_map` shards are equal by construction; zigzag also wants two pieces in each."""
    pieces = shard_multiple(layout, ring_size) // ring_size
    for name, n in (("query", length), ("key", key_length)):
        if n % pieces:
            raise ValueError(
                f"layout={layout!r} stores {pieces} pieces per shard, but this device's {name} has {n} tokens on a ring of "
                f"{ring_size}: the global length {n * ring_size} is no multiple of {pieces * ring_size}. Pad the sequence, or "
                "call ring_attention on global arrays, which pads by itself."
            )
