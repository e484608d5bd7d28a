"""Backward chunk kernel for Hopper (sm_90), in Pallas Mosaic GPU: one kernel, five matmuls per pair of blocks.

One CTA holds 128 keys of one key/value head: two compute warpgroups of 64 keys each and one memory warpgroup. It walks over
the listed query blocks of all query heads that share the key head, full ones first, so d_key and d_value never leave registers.

    S = K Q^T      dP = V dO^T - delta      P = exp2(S - lse)      dS = P * dP
    dV += P dO     dK += dS Q               dQ += dS^T K           (dK is scaled at the end, dQ outside)

Everything is keys x queries, so P and dS feed dV and dK from registers. dQ needs the keys of both warpgroups: dS goes through
shared memory and each warpgroup computes half of dQ, columns for head dim 128, rows for 64. The memory warpgroup adds dQ to its
float32 buffer in global memory by TMA (cp.reduce.async.bulk), so the order of additions varies from run to run.

Invariants
- `kv_filled` counts 2 arrivals (key, value), once; `query_filled[slot]` 2 (query, lse); `d_output_filled[slot]` 2 (d_output,
  delta). A slot is refilled only after both compute warpgroups arrived at `query_free[slot]` and `d_output_free[slot]`.
- `d_logits_ready` is passed by both compute warpgroups once a step, after their half of dS is in shared memory. dS has two slots:
  a warpgroup writes slot n % 2 again only after the barrier of step n + 1, which the other passes after it has read step n.
- A warpgroup alone reads its half of the values; after its last step rounded d_key and d_value leave by TMA through that half.
- `d_query_full`: both halves of dQ are in shared memory; `d_query_free`: the TMA has read them.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_ring_attention import compat
from jax_ring_attention.kernels.mosaic_gpu.common import (
    BLOCK_KV,
    ROWS,
    WARPGROUPS,
    Shape,
    Walk,
    backward_block_q,
    load_tokens,
    take,
    take_visits,
    visible_block,
    visit_operands,
    weights_of,
)
from jax_ring_attention.kernels.mosaic_gpu.launch import COLUMN, ROW, STAGES, build, tiled, zeros
from jax_ring_attention.masks import ActiveBlocks, Tokens


def grads_chunk(
    shape: Shape,
    query: jax.Array,
    d_output: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    key: jax.Array,
    value: jax.Array,
    blocks: ActiveBlocks | None,
    query_tokens: Tokens,
    key_tokens: Tokens,
    d_query: jax.Array,
    rounded: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`(d_query + this chunk's, d_key, d_value)`; d_query still wants the factor `scale`.

    Args:
      query, d_output: (B, T, N, D); key, value (B, S, K, D), bfloat16 or float16, D 64 or 128.
      lse: (B, N, T) float32 in units of log2, NO_KEYS where a row saw no key; delta (B, N, T).
      blocks: per (batch or 1, key block): query blocks to visit; None visits all, unmasked.
      query_tokens, key_tokens: int32 (B | 1, T), (B | 1, S); both sides have a segment or neither has.
      d_query: (B, T, N, D) float32.
      rounded: whether d_key and d_value have the inputs' dtype, else float32.
    """
    d_dtype = shape.dtype if rounded else jnp.dtype(jnp.float32)
    dtype, dim = shape.dtype, shape.head_dim
    step_q = backward_block_q(dim)
    masked = blocks is not None
    group = shape.heads // shape.kv_heads
    by_columns = dim == 128

    def kernel(*all_refs):
        refs = list(all_refs)
        query_ref, d_output_ref, lse_ref, delta_ref, key_ref, value_ref = take(refs, 6)
        visits = take_visits(refs, blocks, query_tokens, key_tokens)
        d_query_ref, d_key_ref, d_value_ref = take(refs, 3)
        key_smem, value_smem, query_smem, d_output_smem, lse_smem, delta_smem, d_logits_smem, d_query_smem = take(refs, 8)
        kv_filled, query_filled, d_output_filled, query_free, d_output_free = take(refs, 5)
        d_logits_ready, d_query_full, d_query_free = refs
        batch, kv_head, tile = lax.axis_index("batch"), lax.axis_index("kv_heads"), lax.axis_index("tile")
        warpgroup = lax.axis_index("warpgroup")
        walk = Walk.of(visits, batch, tile, shape.query_length // step_q, repeats=group)
        full_steps, steps = walk.full_steps, walk.steps

        def place(n):
            """Head and first query of step n."""
            head, block = walk.place(n)
            return kv_head * group + head, block * step_q

        def compute(w):
            plgpu.set_max_registers(232 if masked else 240, action="increase")
            mine = pl.ds(w * ROWS, ROWS)
            keys = pl.ds(tile * BLOCK_KV + w * ROWS, ROWS)
            key_ints = Tokens()
            if masked:
                key_ints = load_tokens(visits.key_tokens, batch, keys, ROW)
            plgpu.barrier_wait(kv_filled)

            def step(n, state, partial):
                slot, half = lax.rem(n, jnp.int32(STAGES)), lax.rem(n, jnp.int32(2))
                d_key, d_value = state
                query_here, d_output_here = query_smem.at[slot], d_output_smem.at[slot]
                plgpu.barrier_wait(query_filled.at[slot])

                # Accumulators are allocated just before their matmul, hence the nesting.
                def step_with(d_key_acc, d_value_acc):
                    pl.run_scoped(functools.partial(score, d_key_acc, d_value_acc), plgpu.ACC((ROWS, step_q), jnp.float32))

                def score(d_key_acc, d_value_acc, logits_acc):
                    plgpu.wgmma(logits_acc, key_smem.at[mine], query_here.transpose((1, 0)))
                    plgpu.barrier_wait(d_output_filled.at[slot])
                    delta = compat.load_whole(delta_smem.at[slot], COLUMN)
                    minus_delta = lax.broadcast_in_dim(-delta, (ROWS, step_q), [1])
                    # Starting at -delta makes dS = P * dP, and delta's registers die early.
                    weigh_here = functools.partial(weigh, d_key_acc, d_value_acc, logits_acc)
                    pl.run_state(weigh_here)(plgpu.ACC.init(minus_delta))

                def weigh(d_key_acc, d_value_acc, logits_acc, d_weights_acc):
                    plgpu.wgmma(d_weights_acc, value_smem.at[mine], d_output_here.transpose((1, 0)))
                    logits = plgpu.wgmma_accumulator_load(logits_acc, wait_n=1)
                    lse = lax.broadcast_in_dim(compat.load_whole(lse_smem.at[slot], COLUMN), logits.shape, [1])
                    seen = None
                    if partial:
                        queries = pl.ds(place(n)[1], step_q)
                        query_ints = load_tokens(visits.query_tokens, batch, queries, COLUMN)
                        seen = visible_block(query_ints, key_ints, shape.reach, (ROWS, step_q), (1, 0))
                    weights, slope = weights_of(shape, logits, lse, seen)
                    plgpu.wgmma(d_value_acc, weights.astype(dtype), d_output_here)
                    d_logits = weights * plgpu.wgmma_accumulator_load(d_weights_acc, wait_n=1)
                    if slope is not None:
                        d_logits *= slope
                    narrow = d_logits.astype(dtype)
                    d_logits_smem[half, mine] = narrow
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(d_logits_ready)
                    plgpu.wgmma(d_key_acc, narrow, query_here)  # runs while the other warpgroup is waited for
                    plgpu.wgmma_wait(1)
                    plgpu.barrier_arrive(d_output_free.at[slot])
                    plgpu.barrier_wait(d_logits_ready)
                    pl.run_scoped(pull, plgpu.ACC((ROWS, ROWS), jnp.float32))

                def pull(d_query_acc):
                    if by_columns:
                        left, right = d_logits_smem.at[half], key_smem.at[:, mine]
                    else:
                        left, right = d_logits_smem.at[half, :, mine], key_smem
                    plgpu.wgmma(d_query_acc, left.transpose((1, 0)), right)
                    d_query_here = plgpu.wgmma_accumulator_load(d_query_acc, wait_n=0)

                    @pl.when(n > 0)
                    def _():
                        plgpu.barrier_wait(d_query_free)

                    d_query_smem[w] = d_query_here
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(d_query_full)

                d_key, d_value = pl.run_state(lambda refs: step_with(*refs))((plgpu.ACC.init(d_key), plgpu.ACC.init(d_value)))
                plgpu.barrier_arrive(query_free.at[slot])
                return d_key, d_value

            zero = zeros(dim)
            state = lax.fori_loop(jnp.int32(0), jnp.int32(full_steps), functools.partial(step, partial=False), (zero, zero))
            if masked:
                state = lax.fori_loop(full_steps, steps, functools.partial(step, partial=True), state)
            d_key, d_value = state
            for d, target in ((d_value, d_value_ref), (d_key * shape.scale, d_key_ref)):
                if rounded:
                    value_smem[mine] = d.astype(dtype)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(value_smem.at[mine], target.at[batch, keys, kv_head])
                    plgpu.wait_smem_to_gmem(0)
                else:
                    target[batch, keys, kv_head] = d

        for w in range(WARPGROUPS):  # a static index: with a traced one the matrix descriptors spill
            pl.when(warpgroup == w)(functools.partial(compute, w))

        @pl.when(warpgroup == WARPGROUPS)
        def _memory():
            plgpu.set_max_registers(40 if masked else 24, action="decrease")
            columns = (batch, pl.ds(tile * BLOCK_KV, BLOCK_KV), kv_head)
            plgpu.copy_gmem_to_smem(key_ref.at[columns], key_smem, kv_filled)
            plgpu.copy_gmem_to_smem(value_ref.at[columns], value_smem, kv_filled)

            def fetch(n, slot, wait):
                head, start = place(n)
                rows = pl.ds(start, step_q)
                if wait:
                    plgpu.barrier_wait(query_free.at[slot])
                plgpu.copy_gmem_to_smem(query_ref.at[batch, rows, head], query_smem.at[slot], query_filled.at[slot])
                plgpu.copy_gmem_to_smem(lse_ref.at[batch, head, rows], lse_smem.at[slot], query_filled.at[slot])
                if wait:
                    plgpu.barrier_wait(d_output_free.at[slot])
                plgpu.copy_gmem_to_smem(d_output_ref.at[batch, rows, head], d_output_smem.at[slot], d_output_filled.at[slot])
                plgpu.copy_gmem_to_smem(delta_ref.at[batch, head, rows], delta_smem.at[slot], d_output_filled.at[slot])

            for n in range(STAGES):
                pl.when(n < steps)(functools.partial(fetch, jnp.int32(n), n, False))

            @pl.loop(jnp.int32(0), jnp.int32(steps))
            def _(n):
                head, start = place(n)
                plgpu.barrier_wait(d_query_full)
                for w in range(WARPGROUPS):
                    if by_columns:
                        target = d_query_ref.at[batch, pl.ds(start, ROWS), head, pl.ds(w * ROWS, ROWS)]
                    else:
                        target = d_query_ref.at[batch, pl.ds(start + w * ROWS, ROWS), head]
                    plgpu.copy_smem_to_gmem(d_query_smem.at[w], target, reduction_op="add")
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(d_query_free)

                @pl.when(n + STAGES < steps)
                def _():
                    fetch(n + STAGES, lax.rem(n, jnp.int32(STAGES)), True)

            plgpu.wait_smem_to_gmem(0)

    scratch = (
        tiled(BLOCK_KV, dim, dtype=dtype),
        tiled(BLOCK_KV, dim, dtype=dtype),
        tiled(STAGES, step_q, dim, dtype=dtype),
        tiled(STAGES, step_q, dim, dtype=dtype),
        plgpu.SMEM((STAGES, step_q), jnp.float32),
        plgpu.SMEM((STAGES, step_q), jnp.float32),
        tiled(2, BLOCK_KV, step_q, dtype=dtype),
        tiled(WARPGROUPS, ROWS, ROWS, dtype=jnp.float32, columns=32),
        plgpu.Barrier(num_arrivals=2),
        plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=STAGES),
        plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=STAGES),
        plgpu.Barrier(num_arrivals=WARPGROUPS),
        plgpu.Barrier(num_arrivals=WARPGROUPS),
        plgpu.Barrier(num_arrivals=1),
    )

    operands = [query, d_output, lse, delta, key, value, *visit_operands(blocks, query_tokens, key_tokens)]
    d_shape = (shape.batch, shape.key_length, shape.kv_heads, dim)
    run = build(
        kernel,
        (jax.ShapeDtypeStruct(d_shape, d_dtype),) * 2,
        scratch,
        {"batch": shape.batch, "kv_heads": shape.kv_heads, "tile": shape.key_length // BLOCK_KV},
    )

    @jax.custom_batching.custom_vmap  # run_state has no batching rule
    def run_in_place(d_query, *operands):
        """`run_state` and not `new_ref`: under shard_map with check_vma=True the latter's discharge traces all of it anew."""

        def add(refs):
            d_query_ref, d_key_ref, d_value_ref = refs
            d_key_ref[...], d_value_ref[...] = run(*operands, d_query_ref)

        fresh = jnp.zeros(d_shape, d_dtype)
        return tuple(pl.run_state(add)((d_query, fresh, fresh)))

    @run_in_place.def_vmap
    def one_after_another(axis_size, in_batched, *arrays):
        """A loop around kernels that start from zeros of their own, whose results are added.

        Between a slice that XLA takes out of a stack and one it puts into another, the sum went nowhere (docs/log.md).
        """
        del axis_size

        def one(batched):
            rest = iter(batched)
            d_query, *operands = (next(rest) if x is None else x for x in whole)
            zeros = jnp.zeros_like(d_query) + 0 * jnp.swapaxes(operands[2], 1, 2)[..., None]  # of this row: lse is finite
            d_query_here, *d_chunk = run_in_place(zeros, *operands)
            return d_query + d_query_here, *d_chunk

        whole = [None if batched else x for x, batched in zip(arrays, in_batched, strict=True)]
        results = jax.lax.map(one, tuple(x for x, batched in zip(arrays, in_batched, strict=True) if batched))
        return results, (True, True, True)

    return compat.call_without_varying(run_in_place, d_query, *operands)
