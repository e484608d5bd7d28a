"""Backward chunk kernels for Hopper (sm_90) without atomic additions: d_key and d_value in one pass, d_query in another.

For head dims above 128, whose accumulators the one kernel of `backward.py` cannot hold, and for gradients that are the same
bit by bit from run to run: here every number is summed by one warpgroup in a fixed order. Scores are computed once per pass:
7 matmuls per pair of blocks instead of 5. Where d_key and d_value are too wide for one warpgroup, `backward_wide` makes them.

One CTA holds 128 rows of one side, 64 for each of its two compute warpgroups; its memory warpgroup feeds them the listed blocks
of the other side, the columns. Each side has a first array, which the scores are made of, and a second one.

                        first    second      gradients
    rows are keys       key      value       d_key, d_value
    rows are queries    query    d_output    d_query

    S = first first'^T      dP = second second'^T - delta      P = exp2(S - lse)      dS = P * dP          (' marks columns)
    d_first += dS first'    d_second += P second'  (not for d_output, which has none)

Invariants
- `rows_filled` counts one arrival per array, once; `first_filled[slot]` and `second_filled[slot]` one for the block and, where
  columns are queries, one for their lse or delta. A slot is refilled after both compute warpgroups arrived at its `free` barrier,
  once a step. The second columns have one slot where two do not fit.
- A warpgroup alone reads its half of the rows; after its last step rounded gradients as wide as the rows leave by TMA through it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_ring_attention import compat
from jax_ring_attention.kernels.contract import Rows
from jax_ring_attention.kernels.mosaic_gpu import backward_wide
from jax_ring_attention.kernels.mosaic_gpu.common import (
    BLOCK_KV,
    ROWS,
    SHARED_BYTES,
    WARPGROUPS,
    Shape,
    Walk,
    backward_block_q,
    load_tokens,
    splits_gradients,
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
    rows: Rows,
    key: jax.Array,
    value: jax.Array,
    by_key: ActiveBlocks | None,
    by_query: ActiveBlocks | None,
    query_tokens: Tokens,
    key_tokens: Tokens,
    d_query: jax.Array | None,
    rounded: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `backward.grads_chunk`, for key (B, S, K, D) and value (B, S, K, Dv), Dv <= D multiples of 64 up to 256.

    `by_key` lists blocks of `backward_block_q(D)` queries for every `backward_block_kv(shape)` keys, `by_query` as many keys for
    every 128 queries.
    """
    arrays = (*rows, key, value)
    if splits_gradients(shape):
        d_key, d_value = backward_wide.grads_chunk(shape, arrays, by_key, query_tokens, key_tokens, rounded)
    else:
        d_key, d_value = _sweep(shape, True, arrays, by_key, query_tokens, key_tokens, None, rounded)
    (d_query,) = _sweep(shape, False, arrays, by_query, query_tokens, key_tokens, d_query, False)
    return d_query, d_key, d_value


def _sweep(
    shape: Shape,
    rows_are_keys: bool,
    arrays: tuple[jax.Array, ...],
    blocks: ActiveBlocks | None,
    query_tokens: Tokens,
    key_tokens: Tokens,
    d_query: jax.Array | None,
    rounded: bool,
) -> list[jax.Array]:
    """`[d_key, d_value]`, or `[d_query]` with `d_query`, None being 0, added."""
    dtype, first_dim, second_dim = shape.dtype, shape.head_dim, shape.value_dim
    d_dtype = dtype if rounded else jnp.dtype(jnp.float32)
    step_columns = backward_block_q(first_dim)
    masked = blocks is not None
    group = shape.heads // shape.kv_heads
    length, columns_length = (shape.key_length, shape.query_length)[:: 1 if rows_are_keys else -1]
    heads = shape.kv_heads if rows_are_keys else shape.heads
    tiles = length // BLOCK_KV
    # Axes of a tile along which the query's and the key's integers run, and along which lse and delta do.
    axes, queries_axis = ((1, 0), 1) if rows_are_keys else ((0, 1), 0)

    def bytes_with(stages: int) -> int:
        rows = BLOCK_KV * (first_dim + second_dim)
        return (rows + step_columns * (STAGES * first_dim + stages * second_dim)) * dtype.itemsize

    second_stages = STAGES if bytes_with(STAGES) <= SHARED_BYTES else 1

    def kernel(*all_refs):
        refs = list(all_refs)
        query_ref, d_output_ref, lse_ref, delta_ref, key_ref, value_ref = take(refs, 6)
        d_query_ref: Any = None if d_query is None else take(refs, 1)[0]
        visits = take_visits(refs, blocks, query_tokens, key_tokens)
        out_refs = take(refs, 1 + rows_are_keys)
        rows_smem, first_smem, second_smem, second_rows_smem = take(refs, 4)
        lse_smem: Any
        delta_smem: Any
        lse_smem, delta_smem = take(refs, 2) if rows_are_keys else (None, None)
        rows_filled, first_filled, second_filled, first_free, second_free = refs
        batch, row_head, tile = lax.axis_index("batch"), lax.axis_index("heads"), lax.axis_index("tile")
        sides = (key_ref, value_ref, visits.key_tokens), (query_ref, d_output_ref, visits.query_tokens)
        (rows_ref, second_rows_ref, row_tokens), (first_ref, second_ref, column_tokens) = sides[:: 1 if rows_are_keys else -1]
        if masked and not rows_are_keys:
            tile = tiles - 1 - tile  # the longest under a causal mask goes first
        warpgroup = lax.axis_index("warpgroup")
        walk = Walk.of(visits, batch, tile, columns_length // step_columns, repeats=group if rows_are_keys else 1)
        full_steps, steps = walk.full_steps, walk.steps

        def place(n):
            """Head and first column of step n."""
            if not rows_are_keys:
                return lax.div(row_head, jnp.int32(group)), walk.block(n) * step_columns
            head, block = walk.place(n)
            return row_head * group + head, block * step_columns

        def along_queries(x):
            return lax.broadcast_in_dim(x, (ROWS, step_columns), [queries_axis])

        def compute(w):
            plgpu.set_max_registers(232 if masked else 240, action="increase")
            mine, here = pl.ds(w * ROWS, ROWS), pl.ds(tile * BLOCK_KV + w * ROWS, ROWS)
            row_ints = Tokens()
            row_lse: Any = None
            row_delta: Any = None
            if masked:
                row_ints = load_tokens(row_tokens, batch, here, ROW)
            if rows_are_keys:
                sums: tuple[Any, ...] = (zeros(first_dim), zeros(second_dim))
            else:
                if d_query is None:
                    sums = (zeros(first_dim),)
                else:
                    sums = (compat.load_whole(d_query_ref.at[batch, here, row_head], plgpu.Layout.WGMMA, optimized=False),)
                row_lse = compat.load_whole(lse_ref.at[batch, row_head, here], ROW, optimized=False)
                row_delta = compat.load_whole(delta_ref.at[batch, row_head, here], ROW, optimized=False)
            plgpu.barrier_wait(rows_filled)

            def step(n, sums, partial):
                slot, second_slot = lax.rem(n, jnp.int32(STAGES)), lax.rem(n, jnp.int32(second_stages))
                first_here, second_here = first_smem.at[slot], second_smem.at[second_slot]
                plgpu.barrier_wait(first_filled.at[slot])

                # Accumulators are allocated just before their matmul, hence the nesting.
                def step_with(accs):
                    pl.run_scoped(functools.partial(score, accs), plgpu.ACC((ROWS, step_columns), jnp.float32))

                def score(accs, logits_acc):
                    plgpu.wgmma(logits_acc, rows_smem.at[mine], first_here.transpose((1, 0)))
                    plgpu.barrier_wait(second_filled.at[second_slot])
                    delta = compat.load_whole(delta_smem.at[second_slot], COLUMN) if rows_are_keys else row_delta
                    # Starting at -delta makes dS = P * dP, and delta's registers die early.
                    pl.run_state(functools.partial(weigh, accs, logits_acc))(plgpu.ACC.init(along_queries(-delta)))

                def weigh(accs, logits_acc, d_weights_acc):
                    plgpu.wgmma(d_weights_acc, second_rows_smem.at[mine], second_here.transpose((1, 0)))
                    logits = plgpu.wgmma_accumulator_load(logits_acc, wait_n=1)
                    lse = compat.load_whole(lse_smem.at[slot], COLUMN) if rows_are_keys else row_lse
                    seen = None
                    if partial:
                        columns = pl.ds(place(n)[1], step_columns)
                        ints = row_ints, load_tokens(column_tokens, batch, columns, COLUMN)
                        query_ints, key_ints = ints[:: -1 if rows_are_keys else 1]
                        seen = visible_block(query_ints, key_ints, shape.reach, (ROWS, step_columns), axes)
                    weights, slope = weights_of(shape, logits, along_queries(lse), seen)
                    if rows_are_keys:
                        plgpu.wgmma(accs[1], weights.astype(dtype), second_here)
                    d_logits = weights * plgpu.wgmma_accumulator_load(d_weights_acc, wait_n=int(rows_are_keys))
                    if slope is not None:
                        d_logits *= slope
                    if not rows_are_keys:
                        plgpu.barrier_arrive(second_free.at[second_slot])
                    plgpu.wgmma(accs[0], d_logits.astype(dtype), first_here)
                    if rows_are_keys:
                        plgpu.wgmma_wait(1)
                        plgpu.barrier_arrive(second_free.at[second_slot])
                    plgpu.wgmma_wait(0)

                sums = pl.run_state(step_with)(tuple(plgpu.ACC.init(x) for x in sums))
                plgpu.barrier_arrive(first_free.at[slot])
                return sums

            sums = lax.fori_loop(jnp.int32(0), jnp.int32(full_steps), functools.partial(step, partial=False), sums)
            if masked:
                sums = lax.fori_loop(full_steps, steps, functools.partial(step, partial=True), sums)
            if rows_are_keys:
                sums = (sums[0] * shape.scale, sums[1])
            for d, target in zip(sums, out_refs, strict=True):
                d = d.astype(target.dtype)
                if rounded and d.shape[1] == first_dim:
                    rows_smem[mine] = d
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(rows_smem.at[mine], target.at[batch, here, row_head])
                    plgpu.wait_smem_to_gmem(0)
                else:  # TMA reads whole rows of shared memory
                    compat.store_whole(target.at[batch, here, row_head], d)

        for w in range(WARPGROUPS):  # a static index: with a traced one the matrix descriptors spill
            pl.when(warpgroup == w)(functools.partial(compute, w))

        @pl.when(warpgroup == WARPGROUPS)
        def _memory():
            plgpu.set_max_registers(40 if masked else 24, action="decrease")
            here = (batch, pl.ds(tile * BLOCK_KV, BLOCK_KV), row_head)
            plgpu.copy_gmem_to_smem(rows_ref.at[here], rows_smem, rows_filled)
            plgpu.copy_gmem_to_smem(second_rows_ref.at[here], second_rows_smem, rows_filled)

            def fetch(n, wait, stages, free, filled, block, block_smem, vector, vector_smem):
                head, start = place(n)
                slot, columns = lax.rem(jnp.int32(n), jnp.int32(stages)), pl.ds(start, step_columns)
                if wait:
                    plgpu.barrier_wait(free.at[slot])
                plgpu.copy_gmem_to_smem(block.at[batch, columns, head], block_smem.at[slot], filled.at[slot])
                if vector_smem is not None:
                    plgpu.copy_gmem_to_smem(vector.at[batch, head, columns], vector_smem.at[slot], filled.at[slot])

            def fetch_first(n, wait):
                fetch(n, wait, STAGES, first_free, first_filled, first_ref, first_smem, lse_ref, lse_smem)

            def fetch_second(n, wait):
                fetch(n, wait, second_stages, second_free, second_filled, second_ref, second_smem, delta_ref, delta_smem)

            both = (second_stages, fetch_second), (STAGES, fetch_first)
            for stages, fetch_one in both[::-1]:
                for n in range(stages):
                    pl.when(n < steps)(functools.partial(fetch_one, jnp.int32(n), False))

            @pl.loop(jnp.int32(0), jnp.int32(steps))
            def _(n):
                for stages, fetch_one in both:
                    pl.when(n + stages < steps)(functools.partial(fetch_one, n + stages, True))

    vectors = [plgpu.SMEM((stages, step_columns), jnp.float32) for stages in (STAGES, second_stages)]
    scratch = (
        tiled(BLOCK_KV, first_dim, dtype=dtype),
        tiled(STAGES, step_columns, first_dim, dtype=dtype),
        tiled(second_stages, step_columns, second_dim, dtype=dtype),
        tiled(BLOCK_KV, second_dim, dtype=dtype),
        *(vectors if rows_are_keys else []),
        plgpu.Barrier(num_arrivals=2),
        plgpu.Barrier(num_arrivals=1 + rows_are_keys, num_barriers=STAGES),
        plgpu.Barrier(num_arrivals=1 + rows_are_keys, num_barriers=second_stages),
        plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=STAGES),
        plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=second_stages),
    )
    carry = [] if d_query is None else [d_query]
    operands: list[Any] = [*arrays, *carry, *visit_operands(blocks, query_tokens, key_tokens)]
    dims = [first_dim, second_dim] if rows_are_keys else [first_dim]
    out = tuple(jax.ShapeDtypeStruct((shape.batch, length, heads, n), d_dtype) for n in dims)
    run = build(kernel, out, scratch, {"batch": shape.batch, "heads": heads, "tile": tiles})
    return list(compat.call_without_varying(run, *operands))
