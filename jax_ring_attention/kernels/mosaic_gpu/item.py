"""One work item of the forward pass, as its compute warpgroups see it: 128 queries of one head and the key blocks they visit.

The chunk kernel (`forward`, whose invariants hold here) and the fused ring differ in who feeds these blocks and in what precedes
and follows an item; what happens in registers between is the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_ring_attention import compat
from jax_ring_attention.kernels.mosaic_gpu.common import LOG2E, ROWS, Shape, Visits, load_tokens, tanh, visible_block
from jax_ring_attention.kernels.mosaic_gpu.launch import COLUMN, ROW, STAGES
from jax_ring_attention.masks import Tokens

#: The maximum is floored here inside exponents, so that a row without keys gives exp2(-inf) = 0.
_FLOOR = -1e29

#: Output (64, Dv), sum and max (64,) of one warpgroup's rows, in registers.
State = tuple[Any, Any, Any]


class Shared(NamedTuple):
    """Shared memory and barriers of a CTA; `forward` says what they hold and count."""

    query: Any
    key: Any
    value: Any
    out: Any
    query_filled: Any
    key_filled: Any
    value_filled: Any
    query_free: Any
    key_free: Any
    value_free: Any
    turn: Any


class Place(NamedTuple):
    """Where an item's results lie: a batch row, a query head, and `rows` of the warpgroup at hand."""

    batch: Any
    head: Any
    rows: Any


def take_turns(turn: Any) -> None:
    plgpu.barrier_arrive(turn)
    plgpu.barrier_wait(turn)


def start(value_dim: int, carry: Any, place: Place) -> State:
    """From the carry in memory, or, without one, from constants."""
    batch, head, rows = place
    if carry is None:
        output = plgpu.layout_cast(jnp.zeros((ROWS, value_dim), jnp.float32), plgpu.Layout.WGMMA)
        total = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), ROW)
        maximum = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), ROW)
    else:
        output = compat.load_whole(carry[0].at[batch, rows, head], plgpu.Layout.WGMMA, optimized=False)
        total = compat.load_whole(carry[1].at[batch, head, rows], ROW, optimized=False)
        maximum = compat.load_whole(carry[2].at[batch, head, rows], ROW, optimized=False)
    return output, total, maximum


def fold_blocks(
    shape: Shape,
    shared: Shared,
    warpgroup: Any,
    state: State,
    key_start: Callable[[Any], Any],
    visits: Visits,
    query_ints: Tokens,
    batch: Any,
    *,
    first: Any,
    full: Any,
    active: Any,
    steps: Any,
    reuses_query: bool,
) -> State:
    """`state` with the blocks of one item added.

    Args:
      key_start: the first key of the item's n-th block.
      first: how many blocks the CTA has visited before.
      full, active: `full` blocks run without a mask, and those up to `active` with one.
      steps: how many blocks the CTA has visited when the next key block is none of the caller's concern: before that one, it is
        waited for here, behind the last product.
      reuses_query: whether the memory warpgroup waits for the queries' shared memory.
    """
    query_here = shared.query.at[warpgroup]
    block_kv, masked = shared.key.shape[1], visits.order is not None

    def step(n, state, partial):
        output, total, maximum = state
        slot = lax.rem(first + n, jnp.int32(STAGES))

        def scores(acc):
            plgpu.wgmma(acc, query_here, shared.key.at[slot].transpose((1, 0)))
            take_turns(shared.turn)
            return acc[...]

        logits = pl.run_scoped(scores, plgpu.ACC((ROWS, block_kv), jnp.float32))
        plgpu.barrier_arrive(shared.key_free.at[slot])
        if reuses_query:

            @pl.when(n == active - 1)
            def _():
                plgpu.barrier_arrive(shared.query_free.at[warpgroup])

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
        narrow = weights.astype(shape.dtype)
        total += weights.sum(axis=1)
        output, total, new_maximum, narrow = lax.optimization_barrier((output, total, new_maximum, narrow))
        plgpu.barrier_arrive(shared.turn)
        plgpu.barrier_wait(shared.value_filled.at[slot])
        plgpu.barrier_wait(shared.turn)

        def weighted_values(acc):
            plgpu.wgmma(acc, narrow, shared.value.at[slot])
            following = first + n + 1

            @pl.when(following < steps)
            def _():
                plgpu.barrier_wait(shared.key_filled.at[lax.rem(following, jnp.int32(STAGES))])

        output = pl.run_state(weighted_values)(plgpu.ACC.init(output))
        plgpu.barrier_arrive(shared.value_free.at[slot])
        return output, total, new_maximum

    state = lax.fori_loop(jnp.int32(0), jnp.int32(full), functools.partial(step, partial=False), state)
    if masked:
        state = lax.fori_loop(full, active, functools.partial(step, partial=True), state)
    return state


def store(results: Any, state: State, place: Place, dtype: Any, finish: bool, staging: Any, reused: bool) -> None:
    """Output, sum and max to memory; with `finish`, output is divided by sum and in `dtype`.

    Args:
      staging: the warpgroup's shared memory for a finished output, which then leaves by TMA; None stores from registers.
      reused: whether an item before this one may still be leaving through it.
    """
    batch, head, rows = place
    output, total, maximum = state
    results[1][batch, head, rows] = total
    results[2][batch, head, rows] = maximum
    if finish:
        inverse = jnp.where(total == 0, 0.0, 1 / total)
        output *= lax.broadcast_in_dim(inverse, output.shape, [0])
    if finish and staging is not None:
        if reused:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the item before
        staging[...] = output.astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staging, results[0].at[batch, rows, head])
    else:
        compat.store_whole(results[0].at[batch, rows, head], output.astype(dtype if finish else jnp.float32))
