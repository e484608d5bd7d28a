"""Forward chunk kernel for Hopper (sm_90), in Pallas Mosaic GPU.

A work item is one tile of 128 queries of one head: two compute warpgroups of 64 rows each, fed with key and value blocks by a
memory warpgroup, by TMA. The key blocks to visit are listed (`masks.ActiveBlocks`): full ones first, then partial ones.

There is one CTA per item, and the hardware starts the next where one ends: for as many heads as have keys that stay in the cache
the tiles one after another, under a mask the last one first. Under a causal mask it is the longest, and no long one is left for
the end. Without a mask all items are equal; where they are also short (`_PERSISTENT_BLOCKS`) there is one CTA per multiprocessor
instead, which takes every so many-th item, its memory warpgroup running ahead into the next one.

Invariants
- Shared memory: queries (2, 64, D), a half for each compute warpgroup; keys and values in rings of STAGES slots. The n-th block
  that a CTA visits, over all its items, is in slot n % STAGES. `filled` barriers count one arrival, the TMA's; `free` barriers
  count the compute warpgroups that read the buffer. The memory warpgroup overwrites a buffer only after they have left it; they
  arrive once per visited block, and at `query_free` after an item's last scores (only where another item follows in the CTA).
- The two compute warpgroups take turns on the tensor cores: the `turn` barrier is passed by both, twice a block, so that one
  does its softmax while the other multiplies. Warpgroup 1 starts one turn late and warpgroup 0 ends one turn late.
- Output, sum and max live in registers from the carry's load to its store, in float32; max in units of log2. Without a carry they
  start as constants. The last chunk's output is divided in registers and leaves by TMA, through the warpgroup's own half of the
  queries, which nobody reads any more; where another item follows, through `out_smem`, written again after the TMA has read it.
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
from jax_ring_attention.kernels.mosaic_gpu.common import (
    FORWARD_BLOCK_Q,
    LOG2E,
    ROWS,
    WARPGROUPS,
    Shape,
    forward_block_kv,
    load_tokens,
    take,
    take_visits,
    tanh,
    visible_block,
    visit_operands,
)
from jax_ring_attention.kernels.mosaic_gpu.launch import COLUMN, ROW, STAGES, build, tiled
from jax_ring_attention.masks import ActiveBlocks, Tokens
from jax_ring_attention.stats import ChunkStats

#: Keys and values of the heads that run at the same time should stay in the L2 cache (50 MB), beside what else passes through it.
_CACHED_BYTES = 2**25

#: One CTA per multiprocessor without a mask, where an item visits at most so many key blocks. One H200, 16 heads of 128, speed
#: over cuDNN's: 4 x 4096 (32 blocks) 0.973 against 0.942 with one CTA per item, 1 x 16384 (128 blocks) 0.933 against 0.949.
_PERSISTENT_BLOCKS = 64

#: The maximum is floored here inside exponents, so that a row without keys gives exp2(-inf) = 0.
_FLOOR = -1e29


def heads_together(shape: Shape) -> int:
    """How many query heads run side by side: as many as divide them and have keys and values that fit in the L2 cache."""
    group = shape.heads // shape.kv_heads
    bytes_per_head = 2 * shape.key_length * shape.head_dim * jnp.dtype(shape.dtype).itemsize / group
    return max(n for n in range(1, shape.heads + 1) if shape.heads % n == 0 and (n == 1 or n * bytes_per_head <= _CACHED_BYTES))


def divide(a: jax.Array, b: int) -> tuple[Any, Any]:
    """Quotient and remainder of int32."""
    return (a, 0) if b == 1 else (lax.div(a, jnp.int32(b)), lax.rem(a, jnp.int32(b)))


def fold_chunk(
    shape: Shape,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    blocks: ActiveBlocks | None,
    query_tokens: Tokens,
    key_tokens: Tokens,
    carry: ChunkStats | None,
    finish: bool,
) -> ChunkStats:
    """`merge(carry, statistics of the chunk)`; with `finish`, output is divided by sum and in the query's dtype.

    Args:
      query: (B, T, N, D); key (B, S, K, D), value (B, S, K, Dv), bfloat16 or float16, Dv <= D multiples of 64 up to 256.
      blocks: per (batch or 1, query block): key blocks to visit; None visits all, unmasked.
      query_tokens, key_tokens: int32 (B | 1, T), (B | 1, S); both sides have a segment or neither has.
      carry: output (B, T, N, Dv), sum and max (B, N, T), float32, max in units of log2; None has seen no key.
    """
    dtype, dim, block_kv = shape.dtype, shape.value_dim, forward_block_kv(shape)
    masked = blocks is not None
    tiles, together = shape.query_length // FORWARD_BLOCK_Q, heads_together(shape)
    persistent = not masked and shape.head_dim <= 128 and shape.key_length // block_kv <= _PERSISTENT_BLOCKS
    total_items = shape.batch * shape.heads * tiles
    ctas = min(total_items, compat.multiprocessors()) if persistent else total_items
    # A memory warpgroup that reads the list or runs ahead wants more registers; the three together have 504.
    compute_registers, memory_registers = (232, 40) if masked or persistent else (240, 24)

    def kernel(*all_refs):
        refs = list(all_refs)
        query_ref, key_ref, value_ref = take(refs, 3)
        carry_refs = take(refs, 0 if carry is None else 3)
        visits = take_visits(refs, blocks, query_tokens, key_tokens)
        out_refs = take(refs, 3)
        query_smem, key_smem, value_smem = take(refs, 3)
        out_smem = take(refs, 1)[0] if persistent else query_smem
        query_filled, key_filled, value_filled, query_free, key_free, value_free, turn = refs
        warpgroup = lax.axis_index("warpgroup")
        items: Any = 1
        if persistent:
            cta = lax.axis_index("cta")
            items = lax.div(total_items - 1 - cta, jnp.int32(ctas)) + 1

        def place(item):
            """Batch row, query head and tile of this CTA's item."""
            if persistent:
                index, tile = divide(cta + item * ctas, tiles)
                return *divide(index, shape.heads), tile
            tile = lax.axis_index("tile")
            head = lax.axis_index("group") * together + lax.axis_index("head")
            return lax.axis_index("batch"), head, tiles - 1 - tile if masked else tile

        if masked:
            batch, _, tile = place(0)
            row = (0 if visits.order.shape[0] == 1 else batch, tile)
            full, active = visits.full[row], visits.active[row]
        else:
            full = active = shape.key_length // block_kv
        steps = items * active if persistent else active

        def key_start(n):
            return (visits.order[(*row, n)] if masked else n) * block_kv

        def take_turns():
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

        def compute(item):
            batch, head, tile = place(item)
            first = item * active if persistent else 0
            rows = pl.ds(tile * FORWARD_BLOCK_Q + warpgroup * ROWS, ROWS)
            query_here, out_here = query_smem.at[warpgroup], out_smem.at[warpgroup]
            if carry is None:
                output = plgpu.layout_cast(jnp.zeros((ROWS, dim), jnp.float32), plgpu.Layout.WGMMA)
                total = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), ROW)
                maximum = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), ROW)
            else:
                output = compat.load_whole(carry_refs[0].at[batch, rows, head], plgpu.Layout.WGMMA, optimized=False)
                total = compat.load_whole(carry_refs[1].at[batch, head, rows], ROW, optimized=False)
                maximum = compat.load_whole(carry_refs[2].at[batch, head, rows], ROW, optimized=False)
            query_ints = Tokens()
            if masked:
                query_ints = load_tokens(visits.query_tokens, batch, rows, ROW)
            plgpu.barrier_wait(query_filled.at[warpgroup])

            def step(n, state, partial):
                output, total, maximum = state
                slot = lax.rem(first + n, jnp.int32(STAGES))

                def scores(acc):
                    plgpu.wgmma(acc, query_here, key_smem.at[slot].transpose((1, 0)))
                    take_turns()
                    return acc[...]

                logits = pl.run_scoped(scores, plgpu.ACC((ROWS, block_kv), jnp.float32))
                plgpu.barrier_arrive(key_free.at[slot])
                if persistent:

                    @pl.when(n == active - 1)
                    def _():
                        plgpu.barrier_arrive(query_free.at[warpgroup])

                factor = shape.scale * LOG2E
                if (cap := shape.logits_soft_cap) is not None:
                    logits, factor = tanh(logits * (shape.scale / cap)), cap * LOG2E
                if partial:
                    columns = pl.ds(key_start(n), block_kv)
                    key_ints = load_tokens(visits.key_tokens, batch, columns, COLUMN)
                    seen = visible_block(query_ints, key_ints, shape.reach, (ROWS, block_kv), (0, 1))
                    logits = jnp.where(seen, logits, -jnp.inf)
                new_maximum = jnp.maximum(maximum, logits.max(axis=1) * factor)
                reference = jnp.maximum(new_maximum, _FLOOR)
                rescale = jnp.exp2(maximum - reference)
                weights = jnp.exp2(logits * factor - lax.broadcast_in_dim(reference, logits.shape, [0]))
                output *= lax.broadcast_in_dim(rescale, output.shape, [0])
                total *= rescale
                narrow = weights.astype(dtype)
                total += weights.sum(axis=1)
                output, total, new_maximum, narrow = lax.optimization_barrier((output, total, new_maximum, narrow))
                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(value_filled.at[slot])
                plgpu.barrier_wait(turn)

                def weighted_values(acc):
                    plgpu.wgmma(acc, narrow, value_smem.at[slot])
                    following = first + n + 1

                    @pl.when(following < steps)
                    def _():
                        plgpu.barrier_wait(key_filled.at[lax.rem(following, jnp.int32(STAGES))])

                output = pl.run_state(weighted_values)(plgpu.ACC.init(output))
                plgpu.barrier_arrive(value_free.at[slot])
                return output, total, new_maximum

            state = (output, total, maximum)
            state = lax.fori_loop(jnp.int32(0), jnp.int32(full), functools.partial(step, partial=False), state)
            if masked:
                state = lax.fori_loop(full, active, functools.partial(step, partial=True), state)
            if not persistent:
                pl.when(warpgroup == 0)(take_turns)
            output, total, maximum = state
            out_refs[1][batch, head, rows] = total
            out_refs[2][batch, head, rows] = maximum
            if finish:
                inverse = jnp.where(total == 0, 0.0, 1 / total)
                output *= lax.broadcast_in_dim(inverse, output.shape, [0])
            if finish and dim == shape.head_dim:
                if persistent:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the item before
                out_here[...] = output.astype(dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(out_here, out_refs[0].at[batch, rows, head])
            else:  # TMA reads whole rows of shared memory
                compat.store_whole(out_refs[0].at[batch, rows, head], output.astype(dtype if finish else jnp.float32))

        @pl.when(warpgroup < WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(compute_registers, action="increase")

            @pl.when(steps > 0)
            def _():
                plgpu.barrier_wait(key_filled.at[0])

            pl.when(warpgroup == 1)(take_turns)
            if persistent:
                pl.loop(jnp.int32(0), items)(compute)
                pl.when(warpgroup == 0)(take_turns)
            else:
                compute(0)
            if finish:
                plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == WARPGROUPS)
        def _memory():
            plgpu.set_max_registers(memory_registers, action="decrease")

            def fetch_query(item, wait):
                batch, head, tile = place(item)
                for w in range(WARPGROUPS):
                    rows = pl.ds(tile * FORWARD_BLOCK_Q + w * ROWS, ROWS)
                    if wait:
                        plgpu.barrier_wait(query_free.at[w])
                    plgpu.copy_gmem_to_smem(query_ref.at[batch, rows, head], query_smem.at[w], query_filled.at[w])

            def fetch(step, wait):
                item, n = divide(step, active) if persistent else (0, step)
                batch, head, _ = place(item)
                slot = lax.rem(jnp.int32(step), jnp.int32(STAGES))
                kv_head = lax.div(head, jnp.int32(shape.heads // shape.kv_heads))
                columns = (batch, pl.ds(key_start(n), block_kv), kv_head)
                if wait:
                    plgpu.barrier_wait(key_free.at[slot])
                plgpu.copy_gmem_to_smem(key_ref.at[columns], key_smem.at[slot], key_filled.at[slot])
                if persistent:  # here, because the keys need not wait for the end of the item before
                    pl.when((n == 0) & (item > 0))(functools.partial(fetch_query, item, wait=True))
                if wait:
                    plgpu.barrier_wait(value_free.at[slot])
                plgpu.copy_gmem_to_smem(value_ref.at[columns], value_smem.at[slot], value_filled.at[slot])

            fetch_query(0, wait=False)
            for n in range(STAGES):
                pl.when(n < steps)(functools.partial(fetch, jnp.int32(n), wait=False))

            @pl.loop(jnp.int32(STAGES), jnp.maximum(steps, STAGES))
            def _(step):
                fetch(step, wait=True)

    scratch = (
        tiled(WARPGROUPS, ROWS, shape.head_dim, dtype=dtype),
        tiled(STAGES, block_kv, shape.head_dim, dtype=dtype),
        tiled(STAGES, block_kv, dim, dtype=dtype),
        *([tiled(WARPGROUPS, ROWS, dim, dtype=dtype)] if persistent else []),
        plgpu.Barrier(num_barriers=WARPGROUPS),
        plgpu.Barrier(num_barriers=STAGES),
        plgpu.Barrier(num_barriers=STAGES),
        plgpu.Barrier(num_arrivals=1, num_barriers=WARPGROUPS),
        plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=STAGES),
        plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=STAGES),
        plgpu.Barrier(num_arrivals=WARPGROUPS),
    )
    operands = [query, key, value, *(carry or ()), *visit_operands(blocks, query_tokens, key_tokens)]
    rows = jax.ShapeDtypeStruct((shape.batch, shape.heads, shape.query_length), jnp.float32)
    output = jax.ShapeDtypeStruct((*query.shape[:3], dim), dtype if finish else jnp.float32)
    each = {"batch": shape.batch, "group": shape.heads // together, "tile": tiles, "head": together}
    run = build(kernel, (output, rows, rows), scratch, {"cta": ctas} if persistent else each)
    return ChunkStats(*compat.call_without_varying(run, *operands))
