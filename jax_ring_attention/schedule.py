"""Which chunk is where, hop by hop: plain Python, decided before anything is traced.

A plan is a tuple of legs that run one after another. A leg is a tuple of streams that move in lockstep. A stream is a part
of every device's chunk that travels `hops` times in one direction; at hop i a device holds the part that belongs to rank
`(rank - direction * i) % ring_size`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import numpy as np

from jax_ring_attention.layouts import shard_progressions

Schedule = Literal["ring", "bidirectional", "all_gather", "fused", "fused_bidirectional"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)
#: Schedules that run all hops of a leg inside one kernel of `mosaic_tpu` (the first also of `mosaic_gpu`), and those that move
#: the same by one collective a hop.
UNFUSED = {"fused": "ring", "fused_bidirectional": "bidirectional"}
#: Those that every implementation runs.
PORTABLE_SCHEDULES = tuple(schedule for schedule in SCHEDULES if schedule not in UNFUSED)

Reach = tuple[int | None, int | None]


class Stream(NamedTuple):
    """Tokens [start, start + size) of every chunk, moving `hops` times by `direction` (+1 or -1)."""

    direction: int
    hops: int
    start: int
    size: int

    def source(self, rank, hop, ring_size):
        """Rank whose tokens device `rank` holds at hop `hop`; either may be traced."""
        return (rank - self.direction * hop) % ring_size


class Leg(NamedTuple):
    """Streams of equal `hops` in lockstep; `home` says whether hop 0, the device's own chunk, is computed in this leg."""

    streams: tuple[Stream, ...]
    home: bool


def check_schedule(schedule: str) -> None:
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r} is unknown; choose one of {', '.join(map(repr, SCHEDULES))}.")


def permutation(direction: int, ring_size: int) -> list[tuple[int, int]]:
    """Source-target pairs of a full-ring permutation by `direction` steps."""
    return [(rank, (rank + direction) % ring_size) for rank in range(ring_size)]


def needed_offsets(layout: str, ring_size: int, query_length: int, key_length: int, reach: Reach) -> np.ndarray:
    """`needed[i]`: does any rank r have a query that may see a key of rank (r - i) % ring_size? Positions as the layout implies.

    Args:
      query_length, key_length: tokens per shard.
      reach: (left, right): a query at q sees keys in [q - left, q + right]; None is unbounded.
    """
    left, right = reach
    query_starts, query_stride, query_count = shard_progressions(layout, ring_size, query_length)
    key_starts, _, key_count = shard_progressions(layout, ring_size, key_length)
    ranks = np.arange(ring_size)
    sources = (ranks[:, None] - ranks[None, :]) % ring_size  # [rank, offset]
    visible = np.zeros((ring_size, ring_size), bool)
    for query_start in query_starts:
        for key_start in key_starts:
            # q - k = gap + stride * t with t in [-(key_count - 1), query_count - 1]; some t must give -right <= q - k <= left.
            gap = query_start[ranks][:, None] - key_start[sources]
            low = np.full_like(gap, -(key_count - 1))
            high = np.full_like(gap, query_count - 1)
            if right is not None:
                low = np.maximum(low, -((right + gap) // query_stride))
            if left is not None:
                high = np.minimum(high, (left - gap) // query_stride)
            visible |= low <= high
    return np.asarray(visible.any(axis=0))


def plan_hops(schedule: str, ring_size: int, key_length: int, needed: np.ndarray | None = None) -> tuple[Leg, ...]:
    """The legs of every schedule but `all_gather`.

    Args:
      schedule: "ring" moves whole chunks one way; "bidirectional" moves the two halves of every chunk opposite ways, so that
        both directions of each link carry half of the bytes. The others move what their `UNFUSED` one does.
      ring_size: number of devices P.
      key_length: tokens per chunk.
      needed: per offset, whether any device needs that chunk (`needed_offsets`); None means all. Unneeded hops are not
        made: the longest run of unneeded offsets is left out, and what lies on its two sides is fetched from that side.

    Returns:
      Legs; the first one includes the home chunk.
    """
    check_schedule(schedule)
    forward, backward = ring_size - 1, 0
    if needed is not None:
        wanted = [0, *(i for i in range(1, ring_size) if needed[i]), ring_size]
        gaps = np.diff(wanted) - 1
        widest = int(np.argmax(gaps))
        if gaps[widest] > 0:
            forward, backward = wanted[widest], ring_size - wanted[widest + 1]
    whole = (0, key_length)
    if UNFUSED.get(schedule, schedule) == "bidirectional" and forward == ring_size - 1 and key_length > 1:
        half = (key_length + 1) // 2
        return (Leg((Stream(1, forward, 0, half), Stream(-1, forward, half, key_length - half)), home=True),)
    legs = [Leg((Stream(1, forward, *whole),), home=True)]
    if backward:
        legs.append(Leg((Stream(-1, backward, *whole),), home=False))
    return tuple(legs)


def plan_chunks(lengths: tuple[int, ...]) -> tuple[Leg, ...]:
    """The legs that fold a list of chunks on one device, one at a time: consecutive parts that never move."""
    starts = np.cumsum((0, *lengths))
    return tuple(Leg((Stream(1, 0, int(start), length),), home=True) for start, length in zip(starts, lengths, strict=False))
