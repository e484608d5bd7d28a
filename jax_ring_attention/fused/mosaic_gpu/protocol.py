"""How chunks move round a ring of GPUs inside one kernel: buffers, counters, credits.

Every device runs the same grid of CTAs, all of them resident from start to end: `copying` ones, which do nothing but send, and
`computing` ones. There are SLOTS buffers per tensor on every device. Transfer t, 0 <= t < hops, moves what a device holds at hop
t (its own chunk when t is 0, else buffer (t - 1) % SLOTS) to buffer t % SLOTS of its receiver; that one reads it at hop t + 1.
Each copying CTA moves its own share of every transfer. The invariants:

1. *Landed.* `arrived[t]` lives at the receiver and counts the copying CTAs of the sender whose share of transfer t is written.
   Nobody reads the buffer of transfer t before it counts all of them. One counter per transfer: a fast CTA's later share is never
   taken for a slow one's.
2. *Free.* `credit[t]`, for t >= SLOTS, lives at the sender and counts the CTAs of the receiver, copying and computing, that are
   done with buffer t % SLOTS, that is with hop t - SLOTS + 1. A copying CTA starts on transfer t only after all have. The first
   SLOTS transfers need none: nobody reads those buffers before they have landed.
3. *Started.* The runtime holds every call of a kernel with remote references until all devices of the mesh have reached it, with
   their counters at zero (`CompilerParams.skip_device_barrier`, left False). No barrier inside could do this: counters are
   zeroed before a call, so a signal that came too early would be lost. It also keeps calls apart.
4. *Ordered.* A share's stores are TMA's; they are waited for to the end, not only to their last read, before the signal, a
   release at system scope. A waiter acquires at system scope and then fences generic against asynchronous accesses, because TMA
   reads what TMA wrote, and overwrites what TMA read. A computing CTA signals `credit` when its warpgroup 0 has waited for every
   load of the hop; the other warpgroup reads only what these loads brought.
5. *No deadlock.* What concerns transfer or hop t waits only for what concerns smaller ones, on any device, and every CTA is
   resident, since there is at most one per multiprocessor. What is sent never depends on a mask: the hop alone decides.
6. *Drained.* Everything signalled to a device is waited for by it: `arrived[t]` before hop t + 1, `credit[t]` before transfer t.
   So nobody signals into memory that a finished call has given back. CTA 0 outlasts the others' last wait (`left`), and takes
   from every counter what it counted: all are 0 again.

A ring of one device is its own sender and receiver. It follows the same rules, with local addresses, for as many hops as asked.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_ring_attention.fused.mosaic_gpu.route import Route

#: Buffers per tensor: one is computed with and sent on while the other fills.
SLOTS = 2


class Neighbours(NamedTuple):
    """Mesh coordinates of the device to send to and of the one to receive from; None is this device itself.

    They are computed inside the kernel, from its own coordinates by plain arithmetic: the host makes the descriptors of remote
    TMA copies, and repeats that arithmetic. jax 0.11 cannot use numbers that were read from memory here.
    """

    receiver: Any
    sender: Any

    @staticmethod
    def of(route: Route) -> Neighbours:
        if route.size == 1:
            return Neighbours(None, None)
        sizes = dict(route.mesh)
        here = {name: lax.axis_index(name) if size > 1 else jnp.int32(0) for name, size in route.mesh}
        rank = jnp.int32(0)
        for name in route.axes:
            rank = rank * sizes[name] + here[name]

        def at(steps: int) -> tuple[Any, ...]:
            left, along = lax.rem(rank + jnp.int32(route.size + steps), jnp.int32(route.size)), {}
            for name in reversed(route.axes):
                along[name] = lax.rem(left, jnp.int32(sizes[name]))
                left = lax.div(left, jnp.int32(sizes[name]))
            return tuple(along.get(name, here[name]) for name, _ in route.mesh)

        return Neighbours(at(route.direction), at(-route.direction))


class Counters(NamedTuple):
    """Semaphores of a device; see the module docstring."""

    arrived: Any
    credit: Any
    left: Any

    @staticmethod
    def of(route: Route) -> Counters:
        each = plgpu.SemaphoreType.REGULAR((route.hops,))
        return Counters(*(pl.get_global(kind) for kind in (each, each, plgpu.SemaphoreType.REGULAR)))


class Channel(NamedTuple):
    """The rules above; every method is called by one whole warpgroup."""

    route: Route
    copying: int
    computing: int
    neighbours: Neighbours
    counters: Counters

    def wait_arrived(self, transfer: Any) -> None:
        pl.semaphore_wait(self.counters.arrived.at[transfer], self.copying, decrement=False)
        fence()

    def wait_free(self, transfer: Any) -> None:
        """`transfer` >= SLOTS."""
        pl.semaphore_wait(self.counters.credit.at[transfer], self.copying + self.computing, decrement=False)
        fence()

    def announce(self, transfer: Any) -> None:
        """This copying CTA's share has been written."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=False)
        pl.semaphore_signal(self.counters.arrived.at[transfer], 1, device_id=self.neighbours.receiver)

    def release(self, hop: Any) -> None:
        """This CTA has read what it reads at `hop` >= 1; if a transfer will come into that buffer, its sender is told."""
        transfer = hop - 1 + SLOTS

        @pl.when(transfer < self.route.hops)
        def _():
            pl.semaphore_signal(self.counters.credit.at[transfer], 1, device_id=self.neighbours.sender)

    def leave(self, cta: Any) -> None:
        """After the CTA's last wait, by the warpgroup that waited."""
        arrived, credit, left = self.counters
        pl.semaphore_signal(left, 1)

        @pl.when(cta == 0)
        def _():
            everybody = self.copying + self.computing
            pl.semaphore_wait(left, everybody)
            for transfer in range(self.route.hops):
                pl.semaphore_wait(arrived.at[transfer], self.copying)
                if transfer >= SLOTS:
                    pl.semaphore_wait(credit.at[transfer], everybody)


def fence() -> None:
    """What this warpgroup has seen and done so far comes before what it will have TMA do."""

    @plgpu.inline_mgpu()
    def barrier_and_fence(ctx):
        del ctx
        mgpu.utils.warpgroup_barrier()
        mgpu.utils.inline_ptx("fence.proxy.async;", has_side_effects=True)  # type: ignore[attr-defined]  # new in 0.11

    barrier_and_fence()
