"""How chunks move round the ring inside one kernel: buffers, semaphores, credits, barrier.

Every device runs the same program: it receives from `sender` and sends to `receiver`. One channel moves one group of tensors that
travel together; it has SLOTS buffers in HBM on every device. Transfer t goes from the sender's buffers, or from its own tensors
when t is its first, to buffer t % SLOTS of the receiver. The invariants:

1. *Landed.* The DMA semaphore `arriving[slot, tensor]` counts the bytes that landed. Nobody reads a buffer before waiting for it.
   It is per slot, so that bytes of the transfer after next are never taken for this one's.
2. *Free.* `credit` counts the receiver's free buffers, and lives at the sender. A sender takes one credit before it starts a
   transfer. The receiver grants one for every buffer that is free at the start, and one whenever both readers of a buffer are
   done: the compute of that hop, and the transfer onwards (`sending`). So a sender never writes a buffer that is being read, and
   there are never more transfers under way than buffers.
3. *Started.* `enter` is a barrier with both neighbours. Nothing is sent to a device, no data and no credit, before it has
   signalled that it runs this kernel. A credit is granted only after `enter`.
4. *Drained.* A device leaves after it has waited for everything that is sent to it and by it: arrivals, credits (as many are
   granted as are taken), its own sends. Every semaphore is 0 again.
5. *Next call.* A device leaves having received a chunk from one neighbour and a credit from the other, and either was sent after
   that neighbour had passed the barrier (3). So its signal for the next call's barrier cannot be taken for this call's. That
   holds between calls with the same neighbours; `hops.collective_id` gives rings with other neighbours another barrier.
6. *Never conditional on a mask.* What is sent depends on the hop alone, which is the same on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

#: Buffers per tensor: one is computed with and sent on while the other fills.
SLOTS = 2

Refs = tuple[Any, ...]


class Neighbours:
    """Mesh coordinates, from an array in scalar memory that `hops.coordinates_of` made.

    All of them are given, so that the kernel need not ask for its own.
    """

    def __init__(self, mesh_axes: int, coordinates: Any) -> None:
        self.receiver, self.sender, self.home = (
            tuple(coordinates[i * mesh_axes + axis] for axis in range(mesh_axes)) for i in range(3)
        )

    def enter(self) -> None:
        """Wait until both neighbours run this kernel. On a ring of two they are the same device, which signals twice."""
        barrier = pltpu.get_barrier_semaphore()
        for neighbour in (self.receiver, self.sender):
            pl.semaphore_signal(barrier, 1, device_id=neighbour)
        pl.semaphore_wait(barrier, 2)


class Channel:
    """One group of tensors that travel together; `buffers` are (SLOTS, ...) in HBM, the same on every device."""

    def __init__(self, neighbours: Neighbours, buffers: Sequence[Any], semaphores: Sequence[Any]) -> None:
        self.neighbours = neighbours
        self.buffers = tuple(buffers)
        self.sending, self.arriving, self.credit = semaphores

    @staticmethod
    def semaphores(tensors: int) -> tuple[Any, ...]:
        """Scratch of a channel."""
        dma = pltpu.SemaphoreType.DMA((SLOTS, tensors))
        return dma, dma, pltpu.SemaphoreType.REGULAR(())

    def at(self, transfer: Any) -> Refs:
        """The buffers that `transfer` lands in."""
        return tuple(buffer.at[transfer % SLOTS] for buffer in self.buffers)

    def grant(self) -> None:
        """One buffer of this device is free."""
        pl.semaphore_signal(self.credit, 1, device_id=self.neighbours.sender)

    def take(self) -> None:
        """Wait for a free buffer of the receiver."""
        pl.semaphore_wait(self.credit, 1)

    def send(self, transfer: Any, source: Refs) -> None:
        self.take()
        for copy in self._copies(transfer, source):
            copy.start()

    def wait_sent(self, transfer: Any, source: Refs) -> None:
        """Until `source` has been read."""
        for copy in self._copies(transfer, source):
            copy.wait_send()

    def wait_arrived(self, transfer: Any) -> None:
        for copy in self._copies(transfer, self.at(transfer)):
            copy.wait_recv()

    def _copies(self, transfer: Any, source: Refs) -> list[Any]:
        slot = transfer % SLOTS
        return [
            pltpu.make_async_remote_copy(
                src_ref=x,
                dst_ref=to,
                send_sem=self.sending.at[slot, i],
                recv_sem=self.arriving.at[slot, i],
                device_id=self.neighbours.receiver,
            )
            for i, (x, to) in enumerate(zip(source, self.at(transfer), strict=True))
        ]


def deliver(source: Refs, target: Refs, device: Any, semaphores: Sequence[Any]) -> None:
    """Send `source` to `target` on `device`, and wait for what another device delivers here. Every target has one writer."""
    sending, arriving = semaphores
    copies = [
        pltpu.make_async_remote_copy(x, to, send_sem=sending.at[i], recv_sem=arriving.at[i], device_id=device)
        for i, (x, to) in enumerate(zip(source, target, strict=True))
    ]
    for copy in copies:
        copy.start()
    for copy in copies:
        copy.wait()
