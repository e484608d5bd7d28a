"""Forward chunk kernel for Hopper (sm_90), in Pallas Mosaic GPU.

A work item is one tile of 128 queries of one head: two compute warpgroups of 64 rows each (`item`), fed with key and value
blocks by a memory warpgroup, by TMA. The key blocks to visit are listed (`masks.ActiveBlocks`): full ones, then partial ones.

There is one CTA per item, and the hardware starts the next where one ends: for as many heads as have keys that stay in the cache
the tiles one after another, under a mask the last one first. Under a causal mask it is the longest, and no long one is left for
the end. Without a mask all items are equal; where they are also short (`is_persistent`) there is one CTA per multiprocessor
instead, which takes every so many-th item, its memory warpgroup running ahead into the next one.

Invariants
- Shared memory: queries (128, D), a half for each compute warpgroup; keys and values in rings of STAGES slots. The n-th block
  that a CTA visits, over all its items, is in slot n % STAGES. `filled` barriers count one arrival, the TMA's; `free` barriers
  count the compute warpgroups that read the buffer. The memory warpgroup overwrites a buffer only after they have left it; they
  arrive once per visited block, and at `query_free` after an item's last scores (only where another item follows in the CTA).
- Output, sum and max start as constants and live in registers to the end, in float32; max in units of log2. The carry is merged
  with them there, since a loop that starts from a carry is slower; its output is fetched early where shared memory has room. The
  last chunk's output is divided in registers and leaves by TMA, through the warpgroup's own half of the queries, which nobody
  reads any more; where another item follows, through `out`, written again after the TMA has read it.
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
    ROWS,
    WARPGROUPS,
    Shape,
    Walk,
    alternates,
    forward_block_kv,
    load_tokens,
    take,
    take_visits,
    visit_operands,
)
from jax_ring_attention.kernels.mosaic_gpu.item import (
    Place,
    Prefetched,
    Shared,
    Visited,
    end_turns,
    fold_blocks,
    merge_carry,
    own_rows,
    start_turns,
    store,
)
from jax_ring_attention.kernels.mosaic_gpu.launch import ROW, STAGES, build, tiled
from jax_ring_attention.masks import ActiveBlocks, Tokens
from jax_ring_attention.stats import ChunkStats

#: Keys and values of the heads that run at the same time should stay in the L2 cache (50 MB), beside what else passes through it.
_CACHED_BYTES = 2**25

#: One CTA per multiprocessor where warpgroups alternate over at most so many keys, without a mask: docs/log.md.
_PERSISTENT_KEYS = 8192


def is_persistent(shape: Shape, masked: bool, has_carry: bool) -> bool:
    return alternates(shape) and not (masked or has_carry) and shape.key_length <= _PERSISTENT_KEYS


def prefetches_carry(shape: Shape) -> bool:
    """Whether shared memory has room for an item's carry; otherwise it is loaded when it is wanted."""
    return shape.head_dim <= 128


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
    persistent, prefetches = is_persistent(shape, masked, carry is not None), carry is not None and prefetches_carry(shape)
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
        shared = Shared.take(refs, with_out=persistent)
        prefetched = Prefetched(*take(refs, 2)) if prefetches else None
        out_smem = shared.out if persistent else shared.query
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

        def rows_of(tile, w):
            return pl.ds(tile * FORWARD_BLOCK_Q + w * ROWS, ROWS)

        batch, _, tile = place(0) if masked else (None, None, None)
        walk = Walk.of(visits, batch, tile, shape.key_length // block_kv)
        active = walk.active
        steps = items * active if persistent else active

        def key_start(n):
            return walk.block(n) * block_kv

        def compute(w, item):
            batch, head, tile = place(item)
            here = Place(batch, head, rows_of(tile, w))
            query_ints = load_tokens(visits.query_tokens, batch, here.rows, ROW) if masked else Tokens()
            plgpu.barrier_wait(shared.query_filled.at[w])
            visited = Visited(key_start, walk.full, active, item * active if persistent else 0, steps)
            state = fold_blocks(shape, shared, w, visits, query_ints, batch, visited, reused=persistent)
            staging = out_smem.at[own_rows(w)] if dim == shape.head_dim else None
            if carry is not None:
                state = merge_carry(carry_refs, prefetched, state, here, w)
            store(out_refs, state, here, dtype, finish, staging, reused=persistent)

        def compute_all(w):
            plgpu.set_max_registers(compute_registers, action="increase")
            if alternates(shape):
                pl.when(steps > 0)(lambda: plgpu.barrier_wait(shared.key_filled.at[0]))
            start_turns(shape, shared, w)
            if persistent:
                pl.loop(jnp.int32(0), items)(functools.partial(compute, w))
            else:
                compute(w, 0)
            end_turns(shape, shared, w)
            if finish:
                plgpu.wait_smem_to_gmem(0)

        for w in range(WARPGROUPS):
            pl.when(warpgroup == w)(functools.partial(compute_all, w))

        @pl.when(warpgroup == WARPGROUPS)
        def _memory():
            plgpu.set_max_registers(memory_registers, action="decrease")

            def fetch_query(item, wait):
                batch, head, tile = place(item)
                for w in range(WARPGROUPS):
                    if wait:
                        plgpu.barrier_wait(shared.query_free.at[w])
                    source = query_ref.at[batch, rows_of(tile, w), head]
                    plgpu.copy_gmem_to_smem(source, shared.query.at[own_rows(w)], shared.query_filled.at[w])

            def fetch(step, wait):
                item, n = divide(step, active) if persistent else (0, step)
                batch, head, _ = place(item)
                slot = lax.rem(jnp.int32(step), jnp.int32(STAGES))
                kv_head = lax.div(head, jnp.int32(shape.heads // shape.kv_heads))
                columns = (batch, pl.ds(key_start(n), block_kv), kv_head)
                if wait:
                    plgpu.barrier_wait(shared.key_free.at[slot])
                plgpu.copy_gmem_to_smem(key_ref.at[columns], shared.key.at[slot], shared.key_filled.at[slot])
                if persistent:  # here, because the keys need not wait for the end of the item before
                    pl.when((n == 0) & (item > 0))(functools.partial(fetch_query, item, wait=True))
                if wait:
                    plgpu.barrier_wait(shared.value_free.at[slot])
                plgpu.copy_gmem_to_smem(value_ref.at[columns], shared.value.at[slot], shared.value_filled.at[slot])

            fetch_query(0, wait=False)
            for n in range(STAGES):
                pl.when(n < steps)(functools.partial(fetch, jnp.int32(n), wait=False))
            if prefetched is not None:
                batch, head, tile = place(0)
                rows = pl.ds(tile * FORWARD_BLOCK_Q, FORWARD_BLOCK_Q)
                plgpu.copy_gmem_to_smem(carry_refs[0].at[batch, rows, head], prefetched.output, prefetched.filled)

            @pl.loop(jnp.int32(STAGES), jnp.maximum(steps, STAGES))
            def _(step):
                fetch(step, wait=True)

    scratch = (
        *Shared.scratch(shape, with_out=persistent),
        *([tiled(FORWARD_BLOCK_Q, dim, dtype=jnp.float32, columns=32), plgpu.Barrier()] if prefetches else []),
    )
    operands = [query, key, value, *(carry or ()), *visit_operands(blocks, query_tokens, key_tokens)]
    rows = jax.ShapeDtypeStruct((shape.batch, shape.heads, shape.query_length), jnp.float32)
    output = jax.ShapeDtypeStruct((*query.shape[:3], dim), dtype if finish else jnp.float32)
    each = {"batch": shape.batch, "group": shape.heads // together, "tile": tiles, "head": together}
    run = build(kernel, (output, rows, rows), scratch, {"cta": ctas} if persistent else each)
    return ChunkStats(*compat.call_without_varying(run, *operands))
