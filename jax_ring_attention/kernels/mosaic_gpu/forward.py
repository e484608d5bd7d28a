"""Forward chunk kernel for Hopper (sm_90), in Pallas Mosaic GPU.

A work item is one tile of 128 queries of one head: two compute warpgroups of 64 rows each (`item`), fed with key and value
blocks by a memory warpgroup, by TMA. The key blocks to visit are listed (`masks.ActiveBlocks`): full ones, then partial ones.

There is one CTA per item, and the hardware starts the next where one ends; or there is one per multiprocessor, which takes every
so many-th item (`items`, `is_persistent`), its memory warpgroup running ahead into the next one while a running output leaves.

Invariants
- Shared memory: queries (128, D), a half for each compute warpgroup; keys and values in rings of STAGES slots. The n-th block
  that a CTA visits, over all its items, is in slot n % STAGES. `filled` barriers count the TMA's arrivals; `free` barriers count
  the compute warpgroups that read the buffer. The memory warpgroup overwrites a buffer only after they have left it; they arrive
  once per visited block, and at `query_free` after an item's last scores (only where another item may follow in the CTA).
- An item without keys touches no barrier, on either side: what was carried in goes out again.
- Output, sum and max start as constants and live in registers to the end, in float32; max in units of log2. The carry is merged
  with them there, since a loop that starts from a carry is slower. Up to a head dim of 128 a carry comes through shared memory
  (`item.Carried`), fetched once the item's first blocks are under way, and what is to be carried on leaves through the same
  place: a warpgroup writes its rows over those it has read, and frees them for the next item's once TMA has read them.
- The last chunk's output is divided in registers and leaves by TMA, through the warpgroup's own half of the queries, which nobody
  reads any more; a persistent CTA's through `out`, written again after the TMA has read it, or from registers where there is no
  room for that beside the carry.
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
    Carried,
    Place,
    Shared,
    Visited,
    await_carry,
    end_turns,
    fold_blocks,
    load_carry,
    merge,
    no_keys,
    own_rows,
    slot,
    start_turns,
    store,
)
from jax_ring_attention.kernels.mosaic_gpu.items import Items, heads_together
from jax_ring_attention.kernels.mosaic_gpu.launch import ROW, STAGES, build, when
from jax_ring_attention.masks import ActiveBlocks, Tokens
from jax_ring_attention.stats import ChunkStats

#: One CTA per multiprocessor where warpgroups alternate over at most so many keys, without a mask: docs/log.md.
_PERSISTENT_KEYS = 8192


def is_persistent(shape: Shape, masked: bool, segmented: bool, carrying: bool) -> bool:
    """Whether one CTA takes several items: they pay where something is carried in or out, and where items are short.

    Items are dealt out beforehand. With segments their lengths follow no order, and the hardware shares them out better.
    """
    if carrying:
        return not segmented
    return alternates(shape) and not masked and shape.key_length <= _PERSISTENT_KEYS


def through_shared(shape: Shape) -> bool:
    """Whether shared memory has room for an item's carry; otherwise it is loaded when it is wanted."""
    return shape.head_dim <= 128


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
    masked, segmented = blocks is not None, query_tokens.segment is not None
    carries = through_shared(shape) and (carry is not None or not finish)
    persistent = is_persistent(shape, masked, segmented, carries)
    items = Items(shape, masked, compat.multiprocessors())
    # A memory warpgroup that reads the list or runs ahead wants more registers; the three together have 504.
    compute_registers, memory_registers = (232, 40) if masked or persistent else (240, 24)
    if not finish:
        out_through = "carried" if carries else None
    elif not persistent:
        out_through = "query" if dim == shape.head_dim else None  # TMA reads whole rows of shared memory
    else:
        out_through = None if carries else "out"

    def kernel(*all_refs):
        refs = list(all_refs)
        query_ref, key_ref, value_ref = take(refs, 3)
        carry_refs = take(refs, 0 if carry is None else 3)
        visits = take_visits(refs, blocks, query_tokens, key_tokens)
        out_refs = take(refs, 3)
        shared = Shared.take(refs, with_out=out_through == "out")
        carried = Carried.take(refs) if carries else None
        staging = {None: None, "query": shared.query, "out": shared.out, "carried": carried and carried.output}[out_through]
        warpgroup = lax.axis_index("warpgroup")

        def place(k):
            """Batch row, query head and tile of this CTA's k-th item."""
            if persistent:
                return items.place(lax.axis_index("cta"), k)
            head = lax.axis_index("group") * heads_together(shape) + lax.axis_index("head")
            return lax.axis_index("batch"), head, items.tile_of(lax.axis_index("tile"))

        def for_each_item(body):
            """`body(k, blocks visited before)` gives how many blocks it visits."""
            if persistent:
                mine = items.count(lax.axis_index("cta"))
                lax.fori_loop(jnp.int32(0), mine, lambda k, count: count + body(k, count), jnp.int32(0))
            else:
                body(0, 0)

        def rows_of(tile, w):
            return pl.ds(tile * FORWARD_BLOCK_Q + w * ROWS, ROWS)

        def walk_of(batch, tile):
            return Walk.of(visits, batch, tile, shape.key_length // block_kv)

        def compute(w, k, count):
            batch, head, tile = place(k)
            here, walk = Place(batch, head, rows_of(tile, w)), walk_of(batch, tile)

            @when(walk.active == 0)
            def _pass_on():
                state = no_keys(shape) if carry is None else load_carry(carry_refs, here)
                store(out_refs, state, here, dtype, finish, None, reused=False)

            @when(walk.active > 0)
            def _fold():
                query_ints = load_tokens(visits.query_tokens, batch, here.rows, ROW) if masked else Tokens()
                plgpu.barrier_wait(shared.query_filled.at[w])
                if alternates(shape):
                    plgpu.barrier_wait(shared.key_filled.at[slot(count)])
                visited = Visited(lambda n: walk.block(n) * block_kv, walk.full, walk.active, count)
                state = fold_blocks(shape, shared, w, visits, query_ints, batch, visited, reused=persistent)
                if carry is not None:
                    state = merge(load_carry(carry_refs, here) if carried is None else await_carry(carried, w), state)
                own = None if staging is None else staging.at[own_rows(w)]
                store(out_refs, state, here, dtype, finish, own, reused=persistent and out_through == "out")
                if carried is not None and persistent:
                    if not finish:
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    if carry is not None:
                        plgpu.barrier_arrive(carried.free.at[w])

            return walk.active

        def compute_all(w):
            plgpu.set_max_registers(compute_registers, action="increase")
            start_turns(shape, shared, w)
            for_each_item(functools.partial(compute, w))
            end_turns(shape, shared, w)
            if staging is not None:
                plgpu.wait_smem_to_gmem(0)

        for w in range(WARPGROUPS):
            pl.when(warpgroup == w)(functools.partial(compute_all, w))

        def fetch(k, count):
            batch, head, tile = place(k)
            walk = walk_of(batch, tile)
            kv_head = lax.div(jnp.int32(head), jnp.int32(shape.heads // shape.kv_heads))

            def fetch_query():
                for w in range(WARPGROUPS):
                    if persistent:
                        when(count > 0)(functools.partial(plgpu.barrier_wait, shared.query_free.at[w]))
                    source = query_ref.at[batch, rows_of(tile, w), head]
                    plgpu.copy_gmem_to_smem(source, shared.query.at[own_rows(w)], shared.query_filled.at[w])

            def fetch_carry(carried):
                for w in range(WARPGROUPS):
                    if persistent:
                        when(count > 0)(functools.partial(plgpu.barrier_wait, carried.free.at[w]))
                    rows, filled = rows_of(tile, w), carried.filled.at[w]
                    plgpu.copy_gmem_to_smem(carry_refs[0].at[batch, rows, head], carried.output.at[own_rows(w)], filled)
                    plgpu.copy_gmem_to_smem(carry_refs[1].at[batch, head, rows], carried.total.at[w], filled)
                    plgpu.copy_gmem_to_smem(carry_refs[2].at[batch, head, rows], carried.maximum.at[w], filled)

            @pl.loop(jnp.int32(0), jnp.int32(walk.active))
            def _(n):
                step = count + n
                at, columns = slot(step), (batch, pl.ds(walk.block(n) * block_kv, block_kv), kv_head)
                pl.when(step >= STAGES)(lambda: plgpu.barrier_wait(shared.key_free.at[at]))
                plgpu.copy_gmem_to_smem(key_ref.at[columns], shared.key.at[at], shared.key_filled.at[at])
                pl.when(n == 0)(fetch_query)  # here, because the keys need not wait for the end of the item before
                pl.when(step >= STAGES)(lambda: plgpu.barrier_wait(shared.value_free.at[at]))
                plgpu.copy_gmem_to_smem(value_ref.at[columns], shared.value.at[at], shared.value_filled.at[at])
                if carry is not None and carried is not None:  # once the item before has ended
                    pl.when(n == jnp.minimum(walk.active - 1, STAGES))(functools.partial(fetch_carry, carried))

            return walk.active

        @pl.when(warpgroup == WARPGROUPS)
        def _memory():
            plgpu.set_max_registers(memory_registers, action="decrease")
            for_each_item(fetch)

    scratch = (*Shared.scratch(shape, with_out=out_through == "out"), *(Carried.scratch(shape) if carries else []))
    operands = [query, key, value, *(carry or ()), *visit_operands(blocks, query_tokens, key_tokens)]
    rows = jax.ShapeDtypeStruct((shape.batch, shape.heads, shape.query_length), jnp.float32)
    output = jax.ShapeDtypeStruct((*query.shape[:3], dim), dtype if finish else jnp.float32)
    grid = {"cta": items.workers} if persistent else items.grid()
    run = build(kernel, (output, rows, rows), scratch, grid)
    return ChunkStats(*compat.call_without_varying(run, *operands))
