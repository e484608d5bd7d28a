"""d_key and d_value for head dims whose two gradients no warpgroup can hold: one compute warpgroup for each.

One CTA holds 64 keys of one head and visits the listed blocks of 64 queries. Each warpgroup makes two of a block's four products,

    `values`    S = K Q^T               P = exp2(S - lse)            d_value += P dO
    `keys`      dP = V dO^T - delta     dS = P * dP                  d_key += dS Q

and P goes from the first to the second through shared memory, in float32.

Invariants
- `rows_filled` counts one arrival per array, once; `query_filled[slot]` counts the block's and its lse's, `d_output_filled[slot]`
  the block's and its delta's. A slot is refilled after both compute warpgroups arrived at its `free` barrier, once a step.
- `weights` is one buffer. `values` writes it once `keys` arrived at `weights_free`, every step, and arrives at `weights_full`.
- Nothing is added by several CTAs: every number is summed in a fixed order.
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
    arrays: tuple[jax.Array, ...],
    blocks: ActiveBlocks | None,
    query_tokens: Tokens,
    key_tokens: Tokens,
    rounded: bool,
) -> list[jax.Array]:
    """`[d_key, d_value]`.

    Args:
      arrays: query, d_output, lse, delta, key, value as in `backward_split.grads_chunk`.
      blocks: for every 64 keys the blocks of `backward_block_q(D)` queries to visit; None visits all, unmasked.
    """
    dtype, key_dim, value_dim = shape.dtype, shape.head_dim, shape.value_dim
    d_dtype = dtype if rounded else jnp.dtype(jnp.float32)
    step_q = backward_block_q(key_dim)
    masked = blocks is not None
    group = shape.heads // shape.kv_heads
    tile_shape = (ROWS, step_q)

    def kernel(*all_refs):
        refs = list(all_refs)
        query_ref, d_output_ref, lse_ref, delta_ref, key_ref, value_ref = take(refs, 6)
        visits = take_visits(refs, blocks, query_tokens, key_tokens)
        d_key_ref, d_value_ref = take(refs, 2)
        key_smem, value_smem, query_smem, d_output_smem, lse_smem, delta_smem, weights_smem = take(refs, 7)
        rows_filled, query_filled, d_output_filled, query_free, d_output_free, weights_full, weights_free = refs
        batch, kv_head, tile = lax.axis_index("batch"), lax.axis_index("kv_heads"), lax.axis_index("tile")
        warpgroup = lax.axis_index("warpgroup")
        here = (batch, pl.ds(tile * ROWS, ROWS), kv_head)
        walk = Walk.of(visits, batch, tile, shape.query_length // step_q, repeats=group)
        full_steps, steps = walk.full_steps, walk.steps

        def place(n):
            """Head and first query of step n."""
            head, block = walk.place(n)
            return kv_head * group + head, block * step_q

        def sum_over_steps(step, dim):
            total = lax.fori_loop(jnp.int32(0), jnp.int32(full_steps), functools.partial(step, partial=False), zeros(dim))
            return lax.fori_loop(full_steps, steps, functools.partial(step, partial=True), total) if masked else total

        def finish(total, target, staging):
            total = total.astype(d_dtype)
            if not rounded:
                compat.store_whole(target.at[here], total)
                return
            staging[...] = total
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staging, target.at[here])
            plgpu.wait_smem_to_gmem(0)

        def values():
            key_ints = Tokens()
            if masked:
                key_ints = load_tokens(visits.key_tokens, batch, here[1], ROW)
            plgpu.barrier_wait(rows_filled)

            def step(n, d_value, partial):
                slot = lax.rem(n, jnp.int32(STAGES))
                plgpu.barrier_wait(query_filled.at[slot])

                def scores(acc):
                    plgpu.wgmma(acc, key_smem, query_smem.at[slot].transpose((1, 0)))
                    return acc[...]

                logits = pl.run_scoped(scores, plgpu.ACC(tile_shape, jnp.float32))
                lse = lax.broadcast_in_dim(compat.load_whole(lse_smem.at[slot], COLUMN), tile_shape, [1])
                plgpu.barrier_arrive(query_free.at[slot])
                seen = None
                if partial:
                    queries = pl.ds(place(n)[1], step_q)
                    query_ints = load_tokens(visits.query_tokens, batch, queries, COLUMN)
                    seen = visible_block(query_ints, key_ints, shape.reach, tile_shape, (1, 0))
                weights, slope = weights_of(shape, logits, lse, seen)
                narrow = weights.astype(dtype)
                if slope is not None:
                    weights *= slope

                @pl.when(n > 0)
                def _():
                    plgpu.barrier_wait(weights_free)

                weights_smem[...] = weights
                plgpu.barrier_arrive(weights_full)
                plgpu.barrier_wait(d_output_filled.at[slot])
                d_value = pl.run_state(lambda acc: plgpu.wgmma(acc, narrow, d_output_smem.at[slot]))(plgpu.ACC.init(d_value))
                plgpu.barrier_arrive(d_output_free.at[slot])
                return d_value

            finish(sum_over_steps(step, value_dim), d_value_ref, value_smem)

        def keys():
            plgpu.barrier_wait(rows_filled)

            def step(n, d_key, partial):
                del partial
                slot = lax.rem(n, jnp.int32(STAGES))
                plgpu.barrier_wait(d_output_filled.at[slot])
                delta = compat.load_whole(delta_smem.at[slot], COLUMN)
                minus_delta = lax.broadcast_in_dim(-delta, tile_shape, [1])
                d_weights = pl.run_state(lambda acc: plgpu.wgmma(acc, value_smem, d_output_smem.at[slot].transpose((1, 0))))(
                    plgpu.ACC.init(minus_delta)
                )
                plgpu.barrier_arrive(d_output_free.at[slot])
                plgpu.barrier_wait(weights_full)
                narrow = (compat.load_whole(weights_smem, plgpu.Layout.WGMMA) * d_weights).astype(dtype)
                plgpu.barrier_arrive(weights_free)
                plgpu.barrier_wait(query_filled.at[slot])
                d_key = pl.run_state(lambda acc: plgpu.wgmma(acc, narrow, query_smem.at[slot]))(plgpu.ACC.init(d_key))
                plgpu.barrier_arrive(query_free.at[slot])
                return d_key

            finish(sum_over_steps(step, key_dim) * shape.scale, d_key_ref, key_smem)

        for w, compute in enumerate((values, keys)):

            @pl.when(warpgroup == w)
            def _(compute=compute):
                plgpu.set_max_registers(232 if masked else 240, action="increase")
                compute()

        @pl.when(warpgroup == WARPGROUPS)
        def _memory():
            plgpu.set_max_registers(40 if masked else 24, action="decrease")
            plgpu.copy_gmem_to_smem(key_ref.at[here], key_smem, rows_filled)
            plgpu.copy_gmem_to_smem(value_ref.at[here], value_smem, rows_filled)

            def fetch(n, wait):
                head, start = place(n)
                slot, queries = lax.rem(jnp.int32(n), jnp.int32(STAGES)), pl.ds(start, step_q)
                if wait:
                    plgpu.barrier_wait(query_free.at[slot])
                plgpu.copy_gmem_to_smem(query_ref.at[batch, queries, head], query_smem.at[slot], query_filled.at[slot])
                plgpu.copy_gmem_to_smem(lse_ref.at[batch, head, queries], lse_smem.at[slot], query_filled.at[slot])
                if wait:
                    plgpu.barrier_wait(d_output_free.at[slot])
                plgpu.copy_gmem_to_smem(d_output_ref.at[batch, queries, head], d_output_smem.at[slot], d_output_filled.at[slot])
                plgpu.copy_gmem_to_smem(delta_ref.at[batch, head, queries], delta_smem.at[slot], d_output_filled.at[slot])

            for n in range(STAGES):
                pl.when(n < steps)(functools.partial(fetch, jnp.int32(n), False))

            @pl.loop(jnp.int32(STAGES), jnp.maximum(steps, STAGES))
            def _(n):
                fetch(n, True)

    vector = plgpu.SMEM((STAGES, step_q), jnp.float32)
    scratch = (
        tiled(ROWS, key_dim, dtype=dtype),
        tiled(ROWS, value_dim, dtype=dtype),
        tiled(STAGES, step_q, key_dim, dtype=dtype),
        tiled(STAGES, step_q, value_dim, dtype=dtype),
        vector,
        vector,
        tiled(ROWS, step_q, dtype=jnp.float32, columns=32),
        plgpu.Barrier(num_arrivals=2),
        plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=STAGES),
        plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=STAGES),
        plgpu.Barrier(num_arrivals=1),
        plgpu.Barrier(num_arrivals=1),
    )
    out = tuple(
        jax.ShapeDtypeStruct((shape.batch, shape.key_length, shape.kv_heads, dim), d_dtype) for dim in (key_dim, value_dim)
    )
    grid = {"batch": shape.batch, "kv_heads": shape.kv_heads, "tile": shape.key_length // ROWS}
    operands = [*arrays, *visit_operands(blocks, query_tokens, key_tokens)]
    return list(compat.call_without_varying(build(kernel, out, scratch, grid), *operands))
