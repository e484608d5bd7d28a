"""A work item of the forward pass, as one of its compute warpgroups sees it: 64 queries of a head and the key blocks they visit.

`forward` says who feeds these blocks, and what the barriers count. Here is what happens in registers: scores S = Q K^T, weights
P = exp2(S - max), output O = O + P V. Exponents run on a unit of their own, and matmuls must run beside them:

- *Overlapped*, head dims above 64. The scores of block n + 1 are issued before O + P V of block n, and weights of block n + 1 are
  made while the latter runs. The two warpgroups know nothing of each other.
- *Alternating*, head dim 64. A product is too short to hide a block's exponents, so the two warpgroups take turns: one makes its
  weights while the other multiplies. The `turn` barrier is passed by both, twice a block. Warpgroup 1 starts one turn late and
  warpgroup 0 ends one turn late (`start_turns`, `end_turns`). Blocks are twice as long. A block's keys are waited for behind the
  product before; an item's first ones by the caller.

docs/log.md has what either does at the other's head dim.
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
from jax_ring_attention.kernels.mosaic_gpu.common import (
    FORWARD_BLOCK_Q,
    ROWS,
    WARPGROUPS,
    Shape,
    Visits,
    alternates,
    capped,
    forward_block_kv,
    load_tokens,
    take,
    visible_block,
)
from jax_ring_attention.kernels.mosaic_gpu.launch import COLUMN, ROW, STAGES, tiled, zeros
from jax_ring_attention.masks import Tokens

#: The maximum is floored here inside exponents, so that a row without keys gives exp2(-inf) = 0.
_FLOOR = -1e29


class State(NamedTuple):
    """Statistics of a warpgroup's rows, in registers: output (64, Dv), sum and max (64,), max in units of log2."""

    output: Any
    total: Any
    maximum: Any


class Shared(NamedTuple):
    """Shared memory and barriers of a CTA; `forward` says what they hold and count. `out` may be None."""

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

    @staticmethod
    def scratch(shape: Shape, with_out: bool) -> list[Any]:
        """What `take` takes, in order."""
        block_kv, dtype = forward_block_kv(shape), shape.dtype
        return [
            tiled(FORWARD_BLOCK_Q, shape.head_dim, dtype=dtype),
            tiled(STAGES, block_kv, shape.head_dim, dtype=dtype),
            tiled(STAGES, block_kv, shape.value_dim, dtype=dtype),
            *([tiled(FORWARD_BLOCK_Q, shape.value_dim, dtype=dtype)] if with_out else []),
            plgpu.Barrier(num_barriers=WARPGROUPS),
            plgpu.Barrier(num_barriers=STAGES),
            plgpu.Barrier(num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=1, num_barriers=WARPGROUPS),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=WARPGROUPS),
        ]

    @classmethod
    def take(cls, refs: list[Any], with_out: bool) -> Shared:
        """Remove the references to `scratch`."""
        tiles, (out,) = take(refs, 3), take(refs, 1) if with_out else [None]
        return cls(*[*tiles, out, *take(refs, 7)])


class Carried(NamedTuple):
    """The carry of an item on its way through shared memory, in and out: output (128, Dv), sum and max (2, 64).

    `filled` counts the arrival of all three, a warpgroup's rows apart; `free` says that its next ones may come.
    """

    output: Any
    total: Any
    maximum: Any
    filled: Any
    free: Any

    @staticmethod
    def scratch(shape: Shape) -> list[Any]:
        """What `take` takes, in order."""
        return [
            tiled(FORWARD_BLOCK_Q, shape.value_dim, dtype=jnp.float32, columns=32),
            *[plgpu.SMEM((WARPGROUPS, ROWS), jnp.float32)] * 2,
            plgpu.Barrier(num_arrivals=3, num_barriers=WARPGROUPS),
            plgpu.Barrier(num_barriers=WARPGROUPS),
        ]

    @classmethod
    def take(cls, refs: list[Any]) -> Carried:
        """Remove the references to `scratch`."""
        return cls(*take(refs, 5))


class Place(NamedTuple):
    """Where an item's results lie: a batch row, a query head, and `rows` of the warpgroup at hand."""

    batch: Any
    head: Any
    rows: Any


class Visited(NamedTuple):
    """The key blocks of an item.

    Attributes:
      key_start: the first key of the n-th one.
      full, active: the first `full` run without a mask, those up to `active` with one.
      before: how many blocks the CTA has visited before.
    """

    key_start: Callable[[Any], Any]
    full: Any
    active: Any
    before: Any

    def slot(self, n: Any) -> Any:
        """Where the n-th block is in shared memory."""
        return slot(self.before + n)


def slot(step: Any) -> Any:
    """Where the keys and values of a CTA's `step`-th block are in shared memory."""
    return lax.rem(jnp.int32(step), jnp.int32(STAGES))


def own_rows(warpgroup: int) -> Any:
    """The rows of a compute warpgroup among the item's."""
    return pl.ds(warpgroup * ROWS, ROWS)


def broadcast(row: Any, like: Any) -> Any:
    return lax.broadcast_in_dim(row, like.shape, [0])


def fold_blocks(
    shape: Shape, shared: Shared, warpgroup: int, visits: Visits, query_ints: Tokens, batch: Any, visited: Visited, reused: bool
) -> State:
    """Statistics of the visited blocks.

    Args:
      warpgroup: a Python number: with a traced one the matrix descriptors spill.
      query_ints: the integers of this warpgroup's rows, where `visits` has any.
      batch: the row that key integers are of.
      reused: whether the memory warpgroup waits for the queries' shared memory.
    """
    query = shared.query.at[own_rows(warpgroup)]
    block_kv, masked = shared.key.shape[1], visits.order is not None
    in_logits = (ROWS, block_kv)

    def release_query(n):
        if reused:

            @pl.when(n == visited.active - 1)
            def _():
                plgpu.barrier_arrive(shared.query_free.at[warpgroup])

    def weigh(n, logits, total, maximum, partial):
        """Weights of a block, sum and maximum with it, and what the output so far is to be multiplied with."""
        logits, factor = capped(shape, logits)
        if partial:
            columns = pl.ds(visited.key_start(n), block_kv)
            key_ints = load_tokens(visits.key_tokens, batch, columns, COLUMN)
            seen = visible_block(query_ints, key_ints, shape.reach, in_logits, (0, 1))
            logits = jnp.where(seen, logits, -jnp.inf)
        new_maximum = jnp.maximum(maximum, logits.max(axis=1) * factor)
        reference = jnp.maximum(new_maximum, _FLOOR)
        rescale = jnp.exp2(maximum - reference)
        weights = jnp.exp2(logits * factor - broadcast(reference, logits))
        return weights, total * rescale + weights.sum(axis=1), new_maximum, rescale

    def scores_of(n, after_issue=lambda: None):
        def scores(acc):
            plgpu.wgmma(acc, query, shared.key.at[visited.slot(n)].transpose((1, 0)))
            after_issue()
            return acc[...]

        logits = pl.run_scoped(scores, plgpu.ACC(in_logits, jnp.float32))
        plgpu.barrier_arrive(shared.key_free.at[visited.slot(n)])
        release_query(n)
        return logits

    def add_values(n, output, narrow, after_issue=lambda: None):
        def product(acc):
            plgpu.wgmma(acc, narrow, shared.value.at[visited.slot(n)])
            after_issue()

        output = pl.run_state(product)(plgpu.ACC.init(output))
        plgpu.barrier_arrive(shared.value_free.at[visited.slot(n)])
        return output

    # Overlapped.

    def first(n, pending, partial):
        (output, total, maximum), _ = pending
        plgpu.barrier_wait(shared.key_filled.at[visited.slot(n)])
        weights, total, maximum, _ = weigh(n, scores_of(n), total, maximum, partial)
        return State(output, total, maximum), weights.astype(shape.dtype)

    def following(n, pending, partial):
        """`pending` has the weights of block n - 1, whose values are to be added."""
        (output, total, maximum), narrow = pending
        here, before = visited.slot(n), visited.slot(n - 1)
        plgpu.barrier_wait(shared.key_filled.at[here])

        def both(refs):
            output_acc, narrow_ref, total_ref, maximum_ref, rescale_ref = refs

            def overlap(logits_acc):
                plgpu.wgmma(logits_acc, query, shared.key.at[here].transpose((1, 0)))
                plgpu.barrier_wait(shared.value_filled.at[before])
                plgpu.wgmma(output_acc, narrow, shared.value.at[before])
                logits = plgpu.wgmma_accumulator_load(logits_acc, wait_n=1)
                plgpu.barrier_arrive(shared.key_free.at[here])
                weights, total_ref[...], maximum_ref[...], rescale_ref[...] = weigh(n, logits, total, maximum, partial)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(shared.value_free.at[before])
                narrow_ref[...] = weights.astype(shape.dtype)  # not before: the product reads the last ones in registers

            pl.run_scoped(overlap, plgpu.ACC(in_logits, jnp.float32))

        output, narrow, total, maximum, rescale = pl.run_state(both)(
            (plgpu.ACC.init(output), narrow, total, maximum, maximum)  # the last is only a place for `rescale`
        )
        release_query(n)  # not inside: Pallas has no constant index into barriers in there
        return State(output * broadcast(rescale, output), total, maximum), narrow

    def last(n, pending):
        (output, total, maximum), narrow = pending
        plgpu.barrier_wait(shared.value_filled.at[visited.slot(n)])
        return State(add_values(n, output, narrow), total, maximum), narrow

    # Alternating.

    def in_turn(n, state, partial):
        output, total, maximum = state
        logits = scores_of(n, after_issue=lambda: _take_turns(shared))
        weights, total, maximum, rescale = weigh(n, logits, total, maximum, partial)
        output *= broadcast(rescale, output)
        narrow = weights.astype(shape.dtype)
        output, total, maximum, narrow = lax.optimization_barrier((output, total, maximum, narrow))
        plgpu.barrier_arrive(shared.turn)
        plgpu.barrier_wait(shared.value_filled.at[visited.slot(n)])
        plgpu.barrier_wait(shared.turn)

        def await_next_key():
            @pl.when(n + 1 < visited.active)
            def _():
                plgpu.barrier_wait(shared.key_filled.at[visited.slot(n + 1)])

        return State(add_values(n, output, narrow, after_issue=await_next_key), total, maximum)

    state = no_keys(shape)
    full, active = jnp.int32(visited.full), jnp.int32(visited.active)
    if alternates(shape):
        state = lax.fori_loop(jnp.int32(0), full, functools.partial(in_turn, partial=False), state)
        return lax.fori_loop(full, active, functools.partial(in_turn, partial=True), state) if masked else state
    one, narrow = jnp.int32(1), plgpu.layout_cast(jnp.zeros(in_logits, shape.dtype), plgpu.Layout.WGMMA)
    pending = (state, narrow)
    if not masked:
        pending = first(0, pending, False)
        pending = lax.fori_loop(one, full, functools.partial(following, partial=False), pending)
        return last(active - 1, pending)[0]
    # Loops of at most one step where there may be no block.
    pending = lax.fori_loop(jnp.int32(0), jnp.minimum(active, one), functools.partial(first, partial=True), pending)
    pending = lax.fori_loop(one, full, functools.partial(following, partial=False), pending)
    pending = lax.fori_loop(jnp.maximum(full, one), active, functools.partial(following, partial=True), pending)
    return lax.fori_loop(jnp.maximum(active - one, 0), active, last, pending)[0]


def _take_turns(shared: Shared) -> None:
    plgpu.barrier_arrive(shared.turn)
    plgpu.barrier_wait(shared.turn)


def start_turns(shape: Shape, shared: Shared, warpgroup: int) -> None:
    """Before a compute warpgroup's first item."""
    if alternates(shape) and warpgroup == 1:
        _take_turns(shared)


def end_turns(shape: Shape, shared: Shared, warpgroup: int) -> None:
    """After a compute warpgroup's last item."""
    if alternates(shape) and warpgroup == 0:
        _take_turns(shared)


def no_keys(shape: Shape) -> State:
    """The statistics of no keys."""
    return State(
        zeros(shape.value_dim),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), ROW),
        plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), ROW),
    )


def load_carry(carry: Any, place: Place) -> State:
    """The statistics in `carry`, three references to global memory."""
    batch, head, rows = place
    return State(
        compat.load_whole(carry[0].at[batch, rows, head], plgpu.Layout.WGMMA, optimized=False),
        *(compat.load_whole(ref.at[batch, head, rows], ROW, optimized=False) for ref in carry[1:]),
    )


def await_carry(carried: Carried, warpgroup: int) -> State:
    """The statistics that were fetched into shared memory, once they are there."""
    plgpu.barrier_wait(carried.filled.at[warpgroup])
    return State(
        compat.load_whole(carried.output.at[own_rows(warpgroup)], plgpu.Layout.WGMMA),
        *(compat.load_whole(ref.at[warpgroup], ROW) for ref in (carried.total, carried.maximum)),
    )


def merge(carry: State, state: State) -> State:
    maximum = jnp.maximum(carry.maximum, state.maximum)
    reference = jnp.maximum(maximum, _FLOOR)
    before, here = jnp.exp2(carry.maximum - reference), jnp.exp2(state.maximum - reference)
    output = carry.output * broadcast(before, carry.output) + state.output * broadcast(here, state.output)
    return State(output, carry.total * before + state.total * here, maximum)


def store(results: Any, state: State, place: Place, dtype: Any, finish: bool, staging: Any, reused: bool) -> None:
    """Output, sum and max to memory; with `finish`, output is divided by sum and in `dtype`.

    Args:
      staging: the warpgroup's shared memory for the output, which then leaves by TMA; None stores from registers.
      reused: whether an item before this one may still be leaving through it.
    """
    batch, head, rows = place
    output, total, maximum = state
    results[1][batch, head, rows] = total
    results[2][batch, head, rows] = maximum
    if finish:
        output = (output * broadcast(jnp.where(total == 0, 0.0, 1 / total), output)).astype(dtype)
    if staging is None:
        compat.store_whole(results[0].at[batch, rows, head], output)
        return
    if reused:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the item before
    staging[...] = output
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staging, results[0].at[batch, rows, head])
