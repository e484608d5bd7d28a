"""Forward, on GPUs of one host: every hop of one leg in one persistent kernel. Never run on more than one GPU: README.md.

One CTA per multiprocessor. The first few of them send (`copying_ctas`): each takes every so many-th block of the chunk in hand
through shared memory, by TMA in and by TMA out to the receiver. They are CTAs of their own, not the memory warpgroups of the
others, so that what is sent depends on no mask, no block is sent twice because two query tiles read it, and the pipeline of the
computing CTAs stays that of the chunk kernel.

The others compute. Each has a fixed set of items (128 queries of one head, `kernels.mosaic_gpu.item`), the same at every hop, and
goes through all of them hop by hop, without waiting for other CTAs: its memory warpgroup alone waits, for the hop's chunk to have
arrived. Output, sum and max go through memory between hops; the same warpgroup writes and reads them. The first hop starts from
the carry, or from constants; the last one of the last leg divides and casts. Under a mask the tiles with most keys come first,
and items are dealt out forwards and backwards in turn, so that every CTA gets long and short ones.

The invariants between devices stand in `protocol`, those within a CTA in `kernels.mosaic_gpu.forward`: they apply to a persistent
CTA whose items are those of all hops, one after another. An item that sees no key touches no barrier on either side.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_ring_attention import compat
from jax_ring_attention.fused.common import vmap_message
from jax_ring_attention.fused.mosaic_gpu.protocol import SLOTS, Channel, Counters, Neighbours, fence
from jax_ring_attention.fused.mosaic_gpu.route import HopLists, Route
from jax_ring_attention.kernels.contract import KeyValue
from jax_ring_attention.kernels.mosaic_gpu.common import (
    FORWARD_BLOCK_Q,
    ROWS,
    WARPGROUPS,
    Shape,
    alternates,
    forward_block_kv,
    load_tokens,
    take,
    take_visits,
    visit_operands,
)
from jax_ring_attention.kernels.mosaic_gpu.item import (
    Place,
    Shared,
    Visited,
    end_turns,
    fold_blocks,
    load_carry,
    merge,
    own_rows,
    start_turns,
    store,
)
from jax_ring_attention.kernels.mosaic_gpu.items import Items, divide
from jax_ring_attention.kernels.mosaic_gpu.launch import ROW, STAGES, build, when
from jax_ring_attention.masks import Tokens
from jax_ring_attention.stats import ChunkStats

#: What one copying CTA sends, in bytes a second: 128 KB are on the way, for some microseconds. And what a GPU computes, in
#: operations a second. Both are guesses until several GPUs have been measured.
_CTA_RATE, _COMPUTE_RATE = 40e9, 6e14


def copying_ctas(shape: Shape) -> int:
    """How many CTAs send: as many as need half of a hop's time for it if all blocks are visited, and no more than a link takes.

    A hop computes 2 B N T S (D + Dv) operations and moves B K S (D + Dv) numbers.
    """
    moved = jnp.dtype(shape.dtype).itemsize * shape.kv_heads / (2 * shape.heads * shape.query_length)  # bytes an operation
    return min(max(math.ceil(2 * moved * _COMPUTE_RATE / _CTA_RATE), 2), 12)


def fold_hops(
    shape: Shape, route: Route, query: jax.Array, own: KeyValue, lists: HopLists, carry: ChunkStats | None, finish: bool
) -> ChunkStats:
    """`carry` merged with the statistics of the chunks of all hops; with `finish`, output is divided and in the query's dtype.

    Args:
      query: (B, T, N, D).
      own: this device's chunk, key (B, S, K, D) and value (B, S, K, Dv).
      carry: as in the chunk kernel; None has seen no key.
    """
    copying = copying_ctas(shape)
    block_kv, masked = forward_block_kv(shape), lists.blocks is not None
    items = Items(shape, masked, compat.multiprocessors() - copying)
    blocks_kv = shape.key_length // block_kv
    staged = finish and shape.head_dim <= 128  # else there is no room for an output beside the queries
    between = finish and route.hops > route.first  # the running output cannot live in the result
    group = shape.heads // shape.kv_heads

    def kernel(*all_refs):
        refs = list(all_refs)
        query_ref, *own_refs = take(refs, 3)
        carry_refs = take(refs, 0 if carry is None else 3)
        visits = take_visits(refs, lists.blocks, lists.query_tokens, lists.key_tokens)
        result_refs = take(refs, 3)
        slot_refs = KeyValue(*take(refs, 2))
        running_refs = [take(refs, 1)[0] if between else result_refs[0], *result_refs[1:]]
        shared = Shared.take(refs, with_out=staged)
        warpgroup, cta = lax.axis_index("warpgroup"), lax.axis_index("cta")
        channel = Channel(route, copying, items.workers, Neighbours.of(route), Counters.of(route))
        worker = cta - copying
        mine = items.count(worker)

        def visited(index, batch, tile):
            """Full and active blocks of an item at the computed hop `index`."""
            if not masked:
                return blocks_kv, blocks_kv
            row = (index, 0 if visits.order.shape[1] == 1 else batch, tile)
            return visits.full[row], visits.active[row]

        def key_start(index, batch, tile, n):
            if not masked:
                return n * block_kv
            return visits.order[index, 0 if visits.order.shape[1] == 1 else batch, tile, n] * block_kv

        def source_of(hop):
            """The chunk in hand at `hop`, and where its batch rows begin."""
            if isinstance(hop, int) and hop == 0:
                return own_refs, 0
            return slot_refs, slot(hop - 1) * shape.batch

        def compute(hop, count, w, before, after, last):
            """One hop of compute warpgroup `w`; blocks visited so far in and out."""
            index = hop - route.first + 0 * cta  # `run_state` in `fold_blocks` cannot close over a constant
            fence()  # what this warpgroup stored at the last hop is loaded now

            def item(k, count):
                batch, head, tile = items.place(worker, k)
                where = Place(batch, head, pl.ds(tile * FORWARD_BLOCK_Q + w * ROWS, ROWS))
                full, active = visited(index, batch, tile)

                def work():
                    query_ints = load_tokens(visits.query_tokens, batch, where.rows, ROW) if masked else Tokens()

                    @when(active > 0)
                    def _():
                        plgpu.barrier_wait(shared.query_filled.at[w])
                        if alternates(shape):
                            plgpu.barrier_wait(shared.key_filled.at[lax.rem(count, jnp.int32(STAGES))])

                    here = visits._replace(key_tokens=jax.tree.map(lambda x: x.at[index], visits.key_tokens))
                    keys = functools.partial(key_start, index, batch, tile)
                    blocks = Visited(keys, full, active, before=count)
                    state = fold_blocks(shape, shared, w, here, query_ints, batch, blocks, reused=True)
                    if before is not None:
                        state = merge(load_carry(before, where), state)
                    staging = shared.out.at[own_rows(w)] if last and staged else None
                    store(after, state, where, shape.dtype, last and finish, staging, reused=True)

                # What is stored before the first hop and after the last one is not what lies between.
                when(active > 0 if before is after else True)(work)
                return count + active

            count = lax.fori_loop(jnp.int32(0), mine, item, count)

            if w == 0 and (not isinstance(hop, int) or hop > 0):
                channel.release(hop)
            return count

        def fetch(hop, count):
            """One hop of a computing CTA's memory warpgroup; blocks fetched so far in and out."""
            index = hop - route.first
            (key_ref, value_ref), row = source_of(hop)
            if not isinstance(hop, int) or hop > 0:
                channel.wait_arrived(hop - 1)

            def item(k, count):
                batch, head, tile = items.place(worker, k)
                _, active = visited(index, batch, tile)

                def fetch_query():
                    for w in range(WARPGROUPS):
                        rows = pl.ds(tile * FORWARD_BLOCK_Q + w * ROWS, ROWS)
                        pl.when(count > 0)(functools.partial(plgpu.barrier_wait, shared.query_free.at[w]))
                        plgpu.copy_gmem_to_smem(
                            query_ref.at[batch, rows, head], shared.query.at[own_rows(w)], shared.query_filled.at[w]
                        )

                def block(n, count):
                    at = lax.rem(count, jnp.int32(STAGES))
                    columns = (row + batch, pl.ds(key_start(index, batch, tile, n), block_kv), lax.div(head, jnp.int32(group)))
                    pl.when(count >= STAGES)(lambda: plgpu.barrier_wait(shared.key_free.at[at]))
                    plgpu.copy_gmem_to_smem(key_ref.at[columns], shared.key.at[at], shared.key_filled.at[at])
                    pl.when(n == 0)(fetch_query)
                    pl.when(count >= STAGES)(lambda: plgpu.barrier_wait(shared.value_free.at[at]))
                    plgpu.copy_gmem_to_smem(value_ref.at[columns], shared.value.at[at], shared.value_filled.at[at])
                    return count + 1

                return lax.fori_loop(jnp.int32(0), jnp.int32(active), block, count)

            return lax.fori_loop(jnp.int32(0), mine, item, count)

        def send(transfer):
            """This copying CTA's share of one transfer, by its memory warpgroup."""
            if not isinstance(transfer, int) or transfer > 0:
                channel.wait_arrived(transfer - 1)
                pl.when(transfer >= SLOTS)(lambda: channel.wait_free(transfer))
            source, row = source_of(transfer)
            target, landing = (away(x, channel.neighbours.receiver) for x in slot_refs), slot(transfer) * shape.batch
            copy_share(shape, shared, (cta, copying), (source, row), (tuple(target), landing))
            channel.announce(transfer)
            if not isinstance(transfer, int) or transfer > 0:
                channel.release(transfer)

        def compute_all(w):
            plgpu.set_max_registers(232, action="increase")

            @pl.when(cta >= copying)
            def _():
                start_turns(shape, shared, w)
                first, last = route.first, route.hops
                begin = carry_refs or None
                if first == last:
                    compute(last, jnp.int32(0), w, begin, result_refs, True)
                else:
                    count = compute(first, jnp.int32(0), w, begin, running_refs, False)
                    middle = functools.partial(compute, w=w, before=running_refs, after=running_refs, last=False)
                    count = lax.fori_loop(jnp.int32(first + 1), jnp.int32(last), middle, count)
                    compute(last, count, w, running_refs, result_refs if between else running_refs, True)
                end_turns(shape, shared, w)
                if staged:
                    plgpu.wait_smem_to_gmem(0)

        for w in range(WARPGROUPS):
            pl.when(warpgroup == w)(functools.partial(compute_all, w))

        @pl.when(warpgroup == WARPGROUPS)
        def _memory():
            plgpu.set_max_registers(40, action="decrease")

            @pl.when(cta < copying)
            def _():
                send(0)
                pl.loop(jnp.int32(1), jnp.int32(route.hops))(send)

            @pl.when(cta >= copying)
            def _():
                count = fetch(route.first, jnp.int32(0))
                lax.fori_loop(jnp.int32(route.first + 1), jnp.int32(route.hops + 1), fetch, count)

            channel.leave(cta)

    rows = jax.ShapeDtypeStruct((shape.batch, shape.heads, shape.query_length), jnp.float32)
    running = jax.ShapeDtypeStruct((*query.shape[:3], shape.value_dim), jnp.float32)
    output = jax.ShapeDtypeStruct(running.shape, shape.dtype) if finish else running
    # TMA takes five dimensions, two of which are tiles: the slots lie along the batch.
    slots = [jax.ShapeDtypeStruct((SLOTS * x.shape[0], *x.shape[1:]), x.dtype) for x in own]
    operands = [query, *own, *(carry or ()), *visit_operands(*lists)]
    out_type = (output, rows, rows, *slots, *([running] if between else []))
    run = build(kernel, out_type, tuple(Shared.scratch(shape, with_out=staged)), {"cta": copying + items.workers})
    return ChunkStats(*compat.call_without_varying(run, *compat.unbatchable(operands, vmap_message("fused")))[:3])


def slot(transfer: Any) -> Any:
    return transfer % SLOTS if isinstance(transfer, int) else lax.rem(transfer, jnp.int32(SLOTS))


def away(ref: Any, device: Any) -> Any:
    """The same buffer on another device."""
    return ref if device is None else plgpu.remote_ref(ref, device)


def copy_share(shape: Shape, shared: Shared, part: tuple[Any, int], source: tuple[Any, Any], target: tuple[Any, Any]) -> None:
    """Copy part `part[0]` of `part[1]` of a chunk; sides are ((key, value), first batch row). Stores may be under way after it.

    One block is stored while the next one is loaded.
    """
    assert STAGES == 2, "a slot is loaded again as soon as all stores but the last block's have read theirs"
    (cta, copying), block_kv = part, forward_block_kv(shape)
    blocks = shape.key_length // block_kv
    total = shape.batch * blocks * shape.kv_heads
    mine = lax.div(total - cta + (copying - 1), jnp.int32(copying))

    def place(i, row):
        rest, head = divide(cta + i * copying, shape.kv_heads)
        batch, block = divide(rest, blocks)
        return row + batch, pl.ds(block * block_kv, block_kv), head

    rings = ((shared.key, shared.key_filled), (shared.value, shared.value_filled))

    def load(i):
        at = lax.rem(i, jnp.int32(STAGES))
        for ref, (ring, filled) in zip(source[0], rings, strict=True):
            plgpu.copy_gmem_to_smem(ref.at[place(i, source[1])], ring.at[at], filled.at[at])

    pl.when(mine > 0)(lambda: load(jnp.int32(0)))

    @pl.loop(jnp.int32(0), mine)
    def _(i):
        at = lax.rem(i, jnp.int32(STAGES))
        for ref, (ring, filled) in zip(target[0], rings, strict=True):
            plgpu.barrier_wait(filled.at[at])
            plgpu.copy_smem_to_gmem(ring.at[at], ref.at[place(i, target[1])])

        @pl.when(i + 1 < mine)
        def _():
            plgpu.wait_smem_to_gmem(len(rings), wait_read_only=True)
            load(i + 1)
