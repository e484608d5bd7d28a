"""Backward: every hop of one leg in one kernel.

Key and value travel as in the forward kernel; their gradients, float32, follow one hop behind, so that their transfer hides
behind the next hop's compute. d_query stays at home. Transfer u of the gradients moves what hop u has summed; it lands in buffer
u % 2 of the receiver, which adds its own share and sends it on from there. At hop h:

    key, value   as in `forward`
    compute      this device's share of d_key and d_value, into `share`; d_query is added to
    d_chunk      wait until transfer h - 1 has landed; add the share to it
                 wait until transfer h - 1 has left (it was sent all through this hop), grant a credit
                 take a credit, start transfer h                          (not after the last hop)

At its first hop a device writes its share where the transfer before would have landed; so one buffer is free at the start, not
two. After the last hop the sums go straight home, into a result that nobody else writes. Their owner runs this kernel: the chunk
came from there.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jax_ring_attention.fused import launch
from jax_ring_attention.fused.forward import buffers_of
from jax_ring_attention.fused.hops import HopSteps, Route, Travels
from jax_ring_attention.fused.protocol import SLOTS, Channel, Neighbours, deliver
from jax_ring_attention.kernels.contract import KeyValue, Rows
from jax_ring_attention.kernels.mosaic_tpu import common
from jax_ring_attention.kernels.mosaic_tpu import launch as pair_launch
from jax_ring_attention.kernels.mosaic_tpu.backward import Keys, block_specs, pair_grads
from jax_ring_attention.kernels.mosaic_tpu.common import Shape, Tiling
from jax_ring_attention.masks import Tokens

Part = tuple[int, int]


def grads_hops(
    shape: Shape,
    tiling: Tiling,
    route: Route,
    coordinates: jax.Array,
    parts: tuple[tuple[Part, HopSteps], ...],
    rows: Rows,
    query_tokens: Tokens,
    own: Travels,
    d_query: jax.Array,
) -> tuple[jax.Array, KeyValue]:
    """`d_query` with the share of the chunks of all hops added, and the gradients of this device's own chunk.

    Args:
      parts: the units of d_query that are in VMEM at once, and the steps of every computed hop for them, key blocks outside.
      rows: query and d_output (B, K, G, H or Hv, T), lse and delta (B, K, G, 1, T), lse in units of log2.
      d_query: (B, K, G * T / block_q, H, block_q) float32.
      The rest is as in `forward.fold_hops`.

    Returns:
      d_query, and d_key (B, K, H, S) and d_value (B, K, Hv, S), float32.
    """
    batch, kv_heads = d_query.shape[:2]
    one = tuple(
        jax.ShapeDtypeStruct((batch, kv_heads, n, shape.key_length), jnp.float32) for n in (shape.head_dim, shape.value_dim)
    )
    d_slots = jax.tree.map(lambda x: jax.ShapeDtypeStruct((SLOTS, *x.shape), x.dtype), one)
    results = (jax.ShapeDtypeStruct(d_query.shape, d_query.dtype), one, one, d_slots, buffers_of(own))
    units = max(stop - start for (start, stop), _ in parts)
    d_query, d_chunk, *_ = launch.call(
        functools.partial(_kernel, shape, tiling, route, parts),
        name="ring_attention_fused_backward",
        route=route,
        coordinates=coordinates,
        scalars=tuple((steps.code, steps.compared, steps.total) for _, steps in parts),
        operands=(rows, query_tokens, own, d_query),
        out_shape=results,
        scratch=(
            Channel.semaphores(len(jax.tree.leaves(own))),
            Channel.semaphores(2),
            (pltpu.SemaphoreType.DMA((2,)), pltpu.SemaphoreType.DMA((2,))),
            (
                pltpu.VMEM((units, shape.head_dim, tiling.block_q), jnp.float32),
                pltpu.VMEM((shape.head_dim, tiling.block_kv), shape.dtype),
                pltpu.VMEM((tiling.block_kv, shape.value_dim), shape.dtype),
            ),
        ),
        vmem_limit=shape.vmem_limit,
    )
    return d_query, KeyValue(*d_chunk)


def _kernel(
    shape: Shape,
    tiling: Tiling,
    route: Route,
    parts: tuple[tuple[Part, HopSteps], ...],
    scalars: Any,
    operands: Any,
    results: Any,
    scratch: Any,
) -> None:
    coordinates, listed = scalars
    rows, query_tokens, own, d_start = operands
    d_query, d_home, share, d_slots, buffers = results
    chunk_semaphores, d_semaphores, home_semaphores, scratch = scratch
    lists = [(part, steps.in_memory(refs)) for (part, steps), refs in zip(parts, listed, strict=True)]
    total, structure = lists[0][1].total, jax.tree.structure(own)
    neighbours = Neighbours(route.mesh_axes, coordinates)
    chunks = Channel(neighbours, jax.tree.leaves(buffers.slots), chunk_semaphores)
    grads = Channel(neighbours, d_slots, d_semaphores)
    first, last = route.first, route.hops

    def compute(hop: Any, chunk: Travels, d_start: Any, share: Any) -> None:
        launch.unpack_tokens(chunk.tokens, buffers.columns, tiling.block_kv)
        tokens = (query_tokens, buffers.columns)
        for part, steps in lists:
            _grads_hop(shape, tiling, steps, hop - first, part, rows, chunk.chunk, tokens, d_start, d_query, share, scratch)

    def turn(hop: Any, source: Any, is_first: bool = False) -> None:
        """One hop with the chunk in `source`, which landed."""
        pl.when(hop < last)(lambda: chunks.send(hop, source))
        chunk, sums = jax.tree.unflatten(structure, source), grads.at(hop - 1)
        busy = total[hop - first] > 0
        if is_first:
            compute(hop, chunk, d_start, sums)
        else:
            pl.when(busy)(lambda: compute(hop, chunk, d_query, share))
        pl.when(hop < last)(lambda: chunks.wait_sent(hop, source))
        pl.when((hop > 0) & (hop + SLOTS - 1 < last))(chunks.grant)
        if not is_first:
            grads.wait_arrived(hop - 1)
            pl.when(busy)(lambda: _add(sums, share, tiling.block_kv))
            grads.wait_sent(hop - 1, grads.at(hop - 2))
            pl.when(hop < last)(grads.grant)
        pl.when(hop < last)(lambda: grads.send(hop, sums))

    def turn_arrived(hop: Any, is_first: bool = False) -> None:
        chunks.wait_arrived(hop - 1)
        turn(hop, chunks.at(hop - 1), is_first)

    neighbours.enter()
    for _ in range(min(SLOTS, last)):
        chunks.grant()
    if last > first:
        grads.grant()
    home = tuple(jax.tree.leaves(own))
    if first == 0:
        turn(0, home, is_first=True)
    else:
        chunks.send(0, home)
        chunks.wait_sent(0, home)
        turn_arrived(1, is_first=True)
    launch.for_hops(first + 1, last, turn_arrived)
    deliver(grads.at(last - 1), tuple(d_home), neighbours.home, home_semaphores)


def _add(sums: Any, share: Any, block: int) -> None:
    """`sums += share`, both (B, K, H or Hv, S) in HBM."""
    for to, x in zip(sums, share, strict=True):
        spec = pl.BlockSpec((None, None, x.shape[2], block), lambda b, k, j: (b, k, 0, j))

        def step(at: Any, operands: Any, result: Any) -> None:
            del at
            result[...] = operands[0][...] + operands[1][...]

        launch.pipeline(step, (*x.shape[:2], x.shape[3] // block), (to, x), (spec, spec), to, spec)


def _grads_hop(
    shape: Shape,
    tiling: Tiling,
    steps: HopSteps,
    index: Any,
    part: Part,
    rows: Rows,
    chunk: KeyValue,
    tokens: tuple[Tokens, Tokens],
    d_start: Any,
    d_query: Any,
    d_chunk: Any,
    scratch: Any,
) -> None:
    """`d_query = d_start + the share of the chunk in hand`, and its `d_chunk`, for the units of `part`, as in the chunk kernel.

    All are in HBM; d_start may be d_query. Parts after the first add to `d_chunk`.
    """
    start, stop = part
    blocks = launch.HopBlocks(steps, index)
    d_units, key_transposed, value_rows = scratch

    def step(at: Any, operands: Any, results: Any) -> None:
        rows, chunk, tokens, carry = operands
        code = blocks.step(steps.code, at)
        batch, head, number = at
        units = d_units.at[pl.ds(0, stop - start)]
        here = batch, head, pl.ds(start, stop - start)
        pl.when(number == 0)(lambda: pltpu.sync_copy(d_start.at[here], units))

        @pl.when(common.is_first(code))
        def _():
            for to, before in zip(results, carry or (None, None), strict=True):
                to[...] = jnp.zeros(to.shape, to.dtype) if before is None else before[...]
            key_transposed[...] = chunk.key[...].T
            value_rows[...] = chunk.value[...].T

        keys = Keys(chunk.key, key_transposed, value_rows)
        pair = functools.partial(pair_grads, shape, tiling, rows, keys, tokens, d_units.at[common.inner_of(code)], tuple(results))
        pair_launch.branch_on_kind(code, tokens, tiling, pair)
        pl.when(number == steps.total[index] - 1)(lambda: pltpu.sync_copy(units, d_query.at[here]))

    row_specs, chunk_specs, token_specs, d_chunk_specs = block_specs(blocks, shape, tiling, tokens, start)
    launch.pipeline(
        step,
        (*d_query.shape[:2], steps.total[index]),
        (rows, chunk, tokens, tuple(d_chunk) if start else None),
        (row_specs, chunk_specs, token_specs, d_chunk_specs if start else None),
        tuple(d_chunk),
        d_chunk_specs,
    )
