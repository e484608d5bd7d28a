"""How chunks move round the ring inside one kernel: buffers, semaphores, credits, barrier.

Every device runs the same program. One channel moves one group of tensors that travel together, one way round: a device receives
from the channel's `sender` and sends to its `receiver`. It has SLOTS buffers in HBM on every device. Transfer t goes from the
sender's buffers, or from its own tensors when t is its first, to buffer t % SLOTS of the receiver. A kernel has one channel or
several, and those of two streams go opposite ways: what is receiver to one is sender to the other. Channels share nothing but the
barrier; 1, 2, 4 and 6 are about each by itself. The invariants:

1. *Landed.* The DMA semaphore `arriving[slot, tensor]` counts the bytes that landed. Nobody reads a buffer before waiting for it.
   It is per slot, so that bytes of the transfer after next are never taken for this one's.
2. *Free.* `credit` counts the receiver's free buffers, and lives at the sender. A sender takes one credit before it starts a
   transfer. The receiver grants one for every buffer that is free at the start, and one whenever both readers of a buffer are
   done: the compute of that hop, and the transfer onwards (`sending`). So a sender never writes a buffer that is being read, and
   there are never more transfers under way than buffers.
3. *Started.* `enter` is a barrier with both neighbours, once for all channels: whichever way they go, it is the same two.
   Nothing is sent to a device, no data and no credit, before it has signalled that it runs this kernel. A credit is granted only
   after `enter`.
4. *Drained.* A device leaves after it has waited for everything that is sent to it and by it: arrivals, credits (as many are
   granted as are taken), its own sends. Every semaphore is 0 again.
5. *Next call.* A device leaves having received a chunk from one neighbour and a credit from the other, by any one of its channels
   that moves chunks, and either was sent after that neighbour had passed the barrier (3). So its signal for the next call's
   barrier cannot be taken for this call's. Which neighbour sent which does not matter, so calls of either direction and of both
   share one barrier. That holds between calls with the same neighbours; `hops.collective_id` gives rings with other neighbours
   another barrier.
6. *Never conditional on a mask.* What is sent depends on the hop alone, which is the same on every device.
7. *No circle.* All devices serve their channels in the same order, and every wait is for something that stands earlier in the
   program: a transfer is started before its arrival is waited for, a credit granted before the same credit is taken. So no
   devices wait for one another, whichever way their channels go.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

#: Buffers per tensor: one is computed with and sent on while the other fills.
SLOTS = 2

Refs = tuple[Any, ...]


class Neighbours:
    """Mesh coordinates for one track, from an array in scalar memory that `hops.coordinates_of` made.

    All of them are given, so that the kernel need not ask for its own.
    """

    def __init__(self, mesh_axes: int, coordinates: Any, track: int = 0) -> None:
        self.receiver, self.sender, self.home = (
            tuple(coordinates[i * mesh_axes + axis] for axis in range(mesh_axes)) for i in range(3 * track, 3 * track + 3)
        )

    def enter(self) -> None:
        """Wait until both neighbours run this kernel. On a ring of two they are the same device, which signals twice."""
        barrier = pltpu.get_barrier_semaphore()
        for neighbour in (self.receiver, self.sender):
            pl.semaphore_signal(barrier, 1, device_id=neighbour)
        pl.semaphore_wait(barrier, 2)


class Channel:
    """One group of tensors that travel together; `buffers` are (SLOTS, ...) in HBM, the same on every device.

    `own` is what transfer 0 sends, where that does not stand in a buffer.
    """

    def __init__(
        self, neighbours: Neighbours, buffers: Sequence[Any], semaphores: Sequence[Any], own: Sequence[Any] = ()
    ) -> None:
        self.neighbours = neighbours
        self.buffers, self.own = tuple(buffers), tuple(own)
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

    def receive(self, hop: Any) -> Refs:
        """What is in hand at `hop`, once it landed: `own` at hop 0, which is not traced, then what transfer hop - 1 brings."""
        if isinstance(hop, int) and hop == 0:
            return self.own
        self.wait_arrived(hop - 1)
        return self.at(hop - 1)

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


# The channels that move the chunks of all tracks, at work together: every step is taken for each before the next step.


def open_up(channels: Sequence[Channel], last: int) -> None:
    """Enter, and grant what is free at the start; `last` is the last hop, so as many transfers are made."""
    channels[0].neighbours.enter()
    for channel in channels:
        for _ in range(min(SLOTS, last)):
            channel.grant()


def send_ahead(channels: Sequence[Channel], first: int) -> None:
    """Make the transfers before the first hop that is computed: transfer 0, if another leg does the home chunk."""
    if first == 0:
        return
    for channel in channels:
        channel.send(0, channel.own)
    for channel in channels:
        channel.wait_sent(0, channel.own)


def pass_on(channels: Sequence[Channel], hop: Any, last: int) -> list[Refs]:
    """What is in hand at `hop`, and on its way to the receivers from now on, except at the last hop."""
    sources = []
    for channel in channels:
        source = channel.receive(hop)
        pl.when(hop < last)(functools.partial(channel.send, hop, source))
        sources.append(source)
    return sources


def let_go(channels: Sequence[Channel], sources: Sequence[Refs], hop: Any, last: int) -> None:
    """After the compute: wait until what is in hand has been sent, and grant its buffer for the transfer after next, if any."""
    for channel, source in zip(channels, sources, strict=True):
        pl.when(hop < last)(functools.partial(channel.wait_sent, hop, source))
        pl.when((hop > 0) & (hop + SLOTS - 1 < last))(channel.grant)


class Delivery(NamedTuple):
    """Send `source` to `target` on `device`, where nobody else writes it."""

    source: Refs
    target: Refs
    device: Any
    semaphores: Sequence[Any]


def deliver(deliveries: Sequence[Delivery]) -> None:
    """Make them all at once, and wait for what other devices deliver here."""
    copies = [
        pltpu.make_async_remote_copy(
            x, to, send_sem=one.semaphores[0].at[i], recv_sem=one.semaphores[1].at[i], device_id=one.device
        )
        for one in deliveries
        for i, (x, to) in enumerate(zip(one.source, one.target, strict=True))
    ]
    for copy in copies:
        copy.start()
    for copy in copies:
        copy.wait()
