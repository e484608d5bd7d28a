"""Rings in boxes of a grid: every point once, one link per hop wherever a cycle exists, boxes that tile."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_ring_attention.grid import factorings, has_cycle, place_axes, ring_order, spanning_sides

SHAPES = [
    (1,),
    (2,),
    (3,),
    (5,),
    (2, 2),
    (2, 3),
    (3, 3),
    (3, 5),
    (5, 3),
    (8, 8),
    (16, 16),
    (1, 7, 1),
    (2, 2, 2),
    (3, 3, 3),
    (3, 4, 5),
]


def links(points: np.ndarray, axis: int, sides, wraps=None) -> np.ndarray:
    """Links of the hop from every point to the next along `axis`, last to first included."""
    apart = np.abs(points - np.roll(points, -1, axis))
    wraps = np.zeros(len(sides), bool) if wraps is None else np.array(wraps, bool)
    return np.where(wraps, np.minimum(apart, np.array(sides) - apart), apart).sum(-1)


def each_once(points: np.ndarray, sides) -> bool:
    flat = {tuple(point) for point in points.reshape(-1, len(sides))}
    return flat == set(np.ndindex(*sides)) and points.size == math.prod(sides) * len(sides)


def closes_by_search(shape, wraps) -> bool:
    """Whether a Hamiltonian cycle exists, by trying every path; a cycle of two goes there and back."""
    points = list(np.ndindex(*shape))
    if len(points) <= 2:
        return True
    near = {p: [q for q in points if links(np.array([p, q]), 0, shape, wraps)[0] == 1] for p in points}
    left = set(points[1:])

    def walk(here) -> bool:
        if not left:
            return points[0] in near[here]
        for there in near[here]:
            if there in left:
                left.remove(there)
                if walk(there):
                    return True
                left.add(there)
        return False

    return walk(points[0])


@pytest.mark.fast
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_ring_takes_every_point_once_and_single_links_where_a_cycle_exists(shape):
    for wraps in itertools.product((False, True), repeat=len(shape)):
        order = ring_order(shape, wraps)
        assert each_once(order, shape)
        hops = links(order, 0, shape, wraps)
        assert (hops.max() <= 1) == has_cycle(shape, wraps)
        if not has_cycle(shape, wraps):
            assert hops.max() == 2
            assert sum(n > 1 for n in shape) == 1 or (hops == 2).sum() == 1
    assert links(ring_order(shape, closed=False), 0, shape)[:-1].max(initial=0) <= 1


@pytest.mark.parametrize("shape", [(4,), (3, 3), (2, 4), (3, 4), (2, 2, 2), (2, 2, 3), (3, 1, 3), (3, 5)], ids=str)
def test_where_it_finds_no_cycle_there_is_none(shape):
    for wraps in itertools.product((False, True), repeat=len(shape)):
        assert has_cycle(shape, wraps) == closes_by_search(shape, wraps)


def test_a_wraparound_link_is_used_only_where_the_box_has_no_cycle_without():
    for shape in SHAPES:
        if has_cycle(shape, (False,) * len(shape)):
            np.testing.assert_array_equal(ring_order(shape, (True,) * len(shape)), ring_order(shape))
    assert (links(ring_order((5, 3), (True, False)), 0, (5, 3)) > 1).sum() == 1  # just once round


@st.composite
def meshes(draw):
    """(sides, wraps, sizes, ring): a grid split over up to four axes."""
    sides = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=3)))
    wraps = tuple(draw(st.booleans()) for _ in sides)
    count = draw(st.integers(1, 4))
    sizes = draw(st.sampled_from(list(factorings(math.prod(sides), (math.prod(sides),) * count))))
    return sides, wraps, sizes, draw(st.integers(0, count - 1))


@settings(max_examples=150, deadline=None)
@given(meshes(), st.booleans())
def test_any_mesh_takes_every_point_once_and_its_rings_are_as_good_as_their_box(mesh, closed):
    sides, wraps, sizes, ring = mesh
    points, box = place_axes(sides, wraps, sizes, ring, closed=closed)
    assert points.shape == (*sizes, len(sides))
    assert each_once(points, sides)
    assert math.prod(box) == sizes[ring]
    hops = links(points, ring, sides, wraps)
    if not closed:
        assert np.delete(hops, -1, ring).max(initial=0) <= 1
    elif has_cycle(box, spanning_sides(sides, wraps, box)):
        assert hops.max() <= 1
    else:
        assert hops.max() == 2
        # No other box would do: all ways to write the ring's size as a box that divides the sides.
        boxes = list(factorings(sizes[ring], sides))
        assert not [b for b in boxes if has_cycle(b, spanning_sides(sides, wraps, b))]
    # Rings fill boxes, so each one spans just as many points as it has.
    for one in np.moveaxis(points, ring, 0).reshape(sizes[ring], -1, len(sides)).swapaxes(0, 1):
        assert tuple(np.ptp(one, axis=0) + 1) == box


def test_the_boxes_of_a_ring_prefer_cycles_without_wraparound_then_near_neighbours_on_inner_axes():
    torus = (True, True)
    assert place_axes((8, 8), (False, False), (4, 16), 1)[1] == (4, 4)
    assert place_axes((16, 16), torus, (16, 16), 1)[1] == (4, 4)  # a row would need the link that wraps
    assert place_axes((3, 15), torus, (3, 15), 1)[1] in ((1, 15), (3, 5))  # odd: only wraparound links close it
    # The tensor axis shares no side with the ring if it can, and is then adjacent.
    points, _ = place_axes((4, 4, 2), (False,) * 3, (4, 4, 2), 1)
    assert links(points, 1, (4, 4, 2)).max() == links(points, 2, (4, 4, 2)).max() == 1
    # Free links along the last side (cores of a chip) draw the innermost axis.
    points, _ = place_axes((2, 2, 2, 2), (False,) * 4, (2, 4, 2), 1, costs=(1, 1, 1, 0))
    assert (np.abs(np.diff(points, axis=2)).reshape(-1, 4) == (0, 0, 0, 1)).all()


@pytest.mark.fast
def test_factorings_are_all_and_only_those_that_divide():
    assert list(factorings(4, (4, 2))) == [(2, 2), (4, 1)]
    assert list(factorings(1, ())) == [()]
    assert not list(factorings(3, (2, 4)))
    for parts in factorings(24, (4, 12, 6)):
        assert math.prod(parts) == 24
        assert all(n % part == 0 for n, part in zip((4, 12, 6), parts, strict=True))


def test_a_whole_pod_of_6144_chips_is_placed_at_once():
    sides = (16, 16, 24)
    points, box = place_axes(sides, (False,) * 3, (8, 48, 16), 1)
    assert each_once(points, sides)
    assert links(points, 1, sides).max() == 1
    assert math.prod(box) == 48
