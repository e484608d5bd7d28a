"""Rings in boxes of a grid or torus: coordinates only, no devices.

A box is given by its sides. `ring_order` walks one; `place_axes` tiles a grid with one box per ring.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np


def has_cycle(shape: Sequence[int], wraps: Sequence[bool]) -> bool:
    """Whether `ring_order` closes a ring in which every hop is one link.

    Each link of a grid joins an even and an odd point, so a cycle needs as many of each, unless it goes round a side that wraps.
    """
    long = [d for d, n in enumerate(shape) if n > 1]
    return math.prod(shape) <= 2 or any(wraps[d] for d in long) or (len(long) > 1 and math.prod(shape) % 2 == 0)


def ring_order(shape: Sequence[int], wraps: Sequence[bool] | None = None, *, closed: bool = True) -> np.ndarray:
    """The points of a box, (number of points, dimensions), in the order of a ring.

    Args:
      shape: sides of the box.
      wraps: per side, whether its two ends are neighbours; default no.
      closed: whether the hop from the last point to the first counts. If not, a snake is enough, which every box has.

    Returns:
      With `closed`, a Hamiltonian cycle where `has_cycle`. Otherwise at most two links per hop: a line is folded (out over even
      points, home over odd ones), and an odd box has one hop across a corner.
    """
    wraps = (False,) * len(shape) if wraps is None else tuple(wraps)
    long = [d for d, n in enumerate(shape) if n > 1]
    if not closed or not long:
        return snake(shape)
    if len(long) == 1:
        (side,) = long
        line = snake(shape)
        return line if wraps[side] else np.concatenate([line[::2], line[1::2][::-1]])
    # A cycle of a rows x columns grid is enough: a snake through the other sides makes one side of them.
    even = [d for d in long if shape[d] % 2 == 0]
    wrapped = [d for d in long if wraps[d]]
    across = (even or wrapped or long)[-1]
    others = [d for d in range(len(shape)) if d != across]
    path = snake([shape[d] for d in others])
    if even:
        grid = [(column, row) for row, column in _comb(shape[across], len(path), False)]
    else:
        grid = _comb(len(path), shape[across], bool(wrapped))
    order = np.empty((len(grid), len(shape)), int)
    order[:, others] = path[[point for point, _ in grid]]
    order[:, across] = [along for _, along in grid]
    return order


def snake(shape: Sequence[int]) -> np.ndarray:
    """Back and forth through a box: consecutive points are neighbours."""
    path = np.zeros((1, 0), int)
    for n in reversed(shape):
        turns = [np.insert(path[:: 1 if i % 2 == 0 else -1], 0, i, axis=1) for i in range(n)]
        path = np.concatenate(turns)
    return path


def _comb(rows: int, columns: int, columns_wrap: bool) -> list[tuple[int, int]]:
    """A cycle of (row, column): a snake over columns 1 and up, row after row, and home along column 0.

    An even number of rows ends the snake beside column 0; so does an odd one when the columns wrap. Else the last two rows are
    taken column by column, down and up, which ends one row above the way home: the one hop of two links.
    """
    zigzag = rows % 2 == 1 and not columns_wrap
    cycle = []
    for row in range(rows - 2 if zigzag else rows):
        cycle += [(row, column) for column in range(1, columns)][:: 1 if row % 2 == 0 else -1]
    if zigzag:
        for column in range(columns - 1, 0, -1):
            cycle += [(rows - 2, column), (rows - 1, column)][:: 1 if (columns - 1 - column) % 2 == 0 else -1]
    return cycle + [(row, 0) for row in range(rows - 1, -1, -1)]


def place_axes(
    sides: Sequence[int],
    wraps: Sequence[bool],
    sizes: Sequence[int],
    ring: int,
    *,
    closed: bool = True,
    costs: Sequence[int] | None = None,
) -> tuple[np.ndarray, tuple[int, ...]]:
    """Coordinates of the box `sides` for every index of a mesh of `sizes`, (*sizes, dimensions), and the box of one ring.

    Every axis gets a box, and the boxes multiply up to `sides`. Along a side that several axes share, the ring has the adjacent
    points, so that its hops are links wherever its box has a cycle; then come the other axes, the last one first.

    Args:
      sides, wraps: the grid, as in `ring_order`.
      sizes, ring: axis sizes, with product prod(sides), and the index of the ring's axis.
      closed: as in `ring_order`, for the ring.
      costs: per side, what a link along it costs the other axes; default 1.
    """
    costs = (1,) * len(sides) if costs is None else costs
    inner_first = [ring, *(a for a in reversed(range(len(sizes))) if a != ring)]

    def order(axis: int, box: Sequence[int]) -> np.ndarray:
        return ring_order(box, spanning_sides(sides, wraps, box), closed=closed or axis != ring)

    def strides(boxes: list[tuple[int, ...]]) -> dict[int, np.ndarray]:
        steps, result = np.ones(len(sides), int), {}
        for axis in inner_first:
            result[axis] = steps
            steps = steps * boxes[axis]
        return result

    def score(boxes: list[tuple[int, ...]]) -> tuple:
        """First how the ring closes, then the longest step of the other axes, inner ones first, then the ring's extent."""
        steps = strides(boxes)
        longest = []
        for axis in inner_first[1:]:
            step = max((s * c for s, c, n in zip(steps[axis], costs, boxes[axis], strict=True) if n > 1), default=0)
            longest.append(int(step) * (1 if has_cycle(boxes[axis], spanning_sides(sides, wraps, boxes[axis])) else 2))
        box, spanning = boxes[ring], spanning_sides(sides, wraps, boxes[ring])
        needs_wrap = closed and not has_cycle(box, (False,) * len(box))
        return needs_wrap, closed and not has_cycle(box, spanning), *longest, sum(box), boxes

    boxes = min(([*zip(*split, strict=True)] for split in _splits(tuple(sides), tuple(sizes))), key=score)
    steps = strides(boxes)
    coordinates = np.zeros((*sizes, len(sides)), int)
    for axis, box in enumerate(boxes):
        along = [1] * len(sizes) + [len(sides)]
        along[axis] = sizes[axis]
        coordinates += (order(axis, box) * steps[axis]).reshape(along)
    return coordinates, boxes[ring]


def spanning_sides(sides: Sequence[int], wraps: Sequence[bool], box: Sequence[int]) -> tuple[bool, ...]:
    """Sides of a box that wrap: those that span the side of the grid."""
    return tuple(bool(w) and n == m for w, n, m in zip(wraps, box, sides, strict=True))


def factorings(n: int, limits: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All (f_0, f_1, ...) with product n in which f_i divides limits[i]."""
    if not limits:
        if n == 1:
            yield ()
        return
    common = math.gcd(n, limits[0])
    for first in range(1, common + 1):
        if common % first == 0:
            for rest in factorings(n // first, limits[1:]):
                yield (first, *rest)


def _splits(sides: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """All ways to split every side over the axes, so that the parts of each axis multiply up to its size."""
    if not sides:
        if all(n == 1 for n in sizes):
            yield ()
        return
    for parts in factorings(sides[0], sizes):
        for rest in _splits(sides[1:], tuple(n // p for n, p in zip(sizes, parts, strict=True))):
            yield (parts, *rest)
