"""The plan of hops against brute force over positions, and a simulation of who holds and folds what."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from cases import LAYOUTS

from jax_ring_attention.layouts import storage_order
from jax_ring_attention.schedule import UNFUSED, check_schedule, needed_offsets, permutation, plan_chunks, plan_hops

WINDOWS = [
    (None, None),
    (None, 0),
    (0, 0),
    (1, 0),
    (5, 0),
    (9, 0),
    (0, 3),
    (3, 2),
    (7, 7),
    (None, 4),
    (6, None),
    (0, None),
    (1000, 1000),
]
SIZES = range(1, 9)


def brute_force_pairs(layout: str, ring_size: int, query_length: int, key_length: int, reach) -> np.ndarray:
    """[rank, source]: may any query of `rank` see any key of `source`?"""
    left, right = reach
    query = storage_order(layout, ring_size, query_length * ring_size).reshape(ring_size, 1, query_length, 1)
    key = storage_order(layout, ring_size, key_length * ring_size).reshape(1, ring_size, 1, key_length)
    distance = key - query
    seen = np.ones(distance.shape, bool)
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    return seen.any((2, 3))


def brute_force_needed(layout: str, ring_size: int, query_length: int, key_length: int, reach) -> np.ndarray:
    pairs = brute_force_pairs(layout, ring_size, query_length, key_length, reach)
    ranks = np.arange(ring_size)
    return np.array([pairs[ranks, (ranks - offset) % ring_size].any() for offset in range(ring_size)])


def permutes(legs) -> int:
    """Collective permutes of the chunk in the forward pass: one per hop, the two halves of a chunk counting once."""
    return sum(leg.streams[0].hops for leg in legs)


def simulate(legs, ring_size: int) -> list[list[tuple[int, int, int]]]:
    """What each device folds, in order, as (source, start, size), by moving parts along the actual permutations."""
    folded: list[list[tuple[int, int, int]]] = [[] for _ in range(ring_size)]
    for leg in legs:
        assert len({stream.hops for stream in leg.streams}) == 1
        for stream in leg.streams:
            held = list(range(ring_size))
            for hop in range(stream.hops + 1):
                if hop:
                    moved = [-1] * ring_size
                    for sender, receiver in permutation(stream.direction, ring_size):
                        moved[receiver] = held[sender]
                    held = moved
                for rank in range(ring_size):
                    assert stream.source(rank, hop, ring_size) == held[rank]
                    if hop or leg.home:
                        folded[rank].append((held[rank], stream.start, stream.size))
    return folded


@pytest.mark.fast
@pytest.mark.parametrize("lengths", [(4, 4), (6, 2), (2, 8)], ids=lambda x: f"T{x[0]}-S{x[1]}")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_needed_offsets_equal_brute_force_over_positions(layout, lengths):
    for ring_size, reach in itertools.product(SIZES, WINDOWS):
        want = brute_force_needed(layout, ring_size, *lengths, reach)
        np.testing.assert_array_equal(needed_offsets(layout, ring_size, *lengths, reach), want, err_msg=f"{ring_size} {reach}")


@pytest.mark.parametrize("layout", ["contiguous", "striped"])
def test_needed_offsets_of_odd_shards_equal_brute_force(layout):
    for ring_size, reach, (query_length, key_length) in itertools.product(SIZES, WINDOWS, [(1, 1), (3, 5), (5, 1)]):
        want = brute_force_needed(layout, ring_size, query_length, key_length, reach)
        have = needed_offsets(layout, ring_size, query_length, key_length, reach)
        np.testing.assert_array_equal(have, want, err_msg=f"{ring_size} {reach} {query_length} {key_length}")


@pytest.mark.fast
@pytest.mark.parametrize("schedule", ["ring", "bidirectional"])
def test_every_needed_chunk_is_folded_exactly_once(schedule):
    key_length = 5
    for ring_size in SIZES:
        for wanted in itertools.product([False, True], repeat=ring_size - 1):
            legs = plan_hops(schedule, ring_size, key_length, np.array([True, *wanted]))
            offsets = [0, *(i for i, need in enumerate(wanted, 1) if need)]
            for rank, folds in enumerate(simulate(legs, ring_size)):
                count = np.zeros((ring_size, key_length), int)
                for source, start, size in folds:
                    count[source, start : start + size] += 1
                assert count.max() == 1
                assert (count[[(rank - offset) % ring_size for offset in offsets]] == 1).all()


@pytest.mark.fast
@pytest.mark.parametrize("schedule", ["ring", "bidirectional"])
def test_no_plan_with_fewer_hops_reaches_every_needed_chunk(schedule):
    for ring_size in SIZES:
        for wanted in itertools.product([False, True], repeat=ring_size - 1):
            offsets = {i for i, need in enumerate(wanted, 1) if need}
            fewest = min(
                forward + backward
                for forward in range(ring_size)
                for backward in range(ring_size - forward)
                if all(i <= forward or i >= ring_size - backward for i in offsets)
            )
            legs = plan_hops(schedule, ring_size, 4, np.array([True, *wanted]))
            assert permutes(legs) == fewest


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("schedule", ["ring", "bidirectional"])
def test_planned_from_a_window_each_device_folds_all_it_may_see(schedule, layout):
    for ring_size, reach in itertools.product(SIZES, WINDOWS):
        pairs = brute_force_pairs(layout, ring_size, 4, 4, reach)
        legs = plan_hops(schedule, ring_size, 4, needed_offsets(layout, ring_size, 4, 4, reach))
        for rank, folds in enumerate(simulate(legs, ring_size)):
            tokens = [(source, start + i) for source, start, size in folds for i in range(size)]
            assert len(tokens) == len(set(tokens))
            must = {(source, i) for source in range(ring_size) if pairs[rank, source] for i in range(4)}
            assert must <= set(tokens)


def test_a_full_ring_makes_one_hop_less_than_it_has_devices():
    for schedule, ring_size in itertools.product(["ring", "bidirectional"], SIZES):
        for needed in (None, np.ones(ring_size, bool)):
            legs = plan_hops(schedule, ring_size, 6, needed)
            assert permutes(legs) == ring_size - 1
            assert [leg.home for leg in legs] == [True]


def test_a_causal_window_within_one_shard_makes_one_hop():
    for ring_size in range(3, 9):
        needed = needed_offsets("contiguous", ring_size, 8, 8, (7, 0))
        assert permutes(plan_hops("ring", ring_size, 8, needed)) == 1
        two_sided = needed_offsets("contiguous", ring_size, 8, 8, (7, 7))
        directions = [leg.streams[0].direction for leg in plan_hops("ring", ring_size, 8, two_sided)]
        # A ring of three is needed whole, so it goes round one way; larger rings fetch each neighbour from its own side.
        assert directions == ([1] if ring_size == 3 else [1, -1])
        assert permutes(plan_hops("ring", ring_size, 8, two_sided)) == 2


@pytest.mark.fast
def test_bidirectional_halves_partition_the_chunk_and_move_opposite_ways():
    for ring_size, key_length in itertools.product(range(2, 9), range(2, 9)):
        (leg,) = plan_hops("bidirectional", ring_size, key_length)
        first, second = leg.streams
        assert {first.direction, second.direction} == {1, -1}
        assert (first.start, first.start + first.size) == (0, second.start)
        assert second.start + second.size == key_length
        assert 0 <= first.size - second.size <= 1


def test_a_chunk_of_one_token_is_not_halved():
    (leg,) = plan_hops("bidirectional", 4, 1)
    assert [(stream.start, stream.size) for stream in leg.streams] == [(0, 1)]


@pytest.mark.fast
@pytest.mark.parametrize("schedule", UNFUSED)
def test_a_fused_schedule_moves_what_its_unfused_one_does(schedule):
    for ring_size, key_length in itertools.product(SIZES, (1, 2, 5)):
        for wanted in itertools.product([False, True], repeat=ring_size - 1):
            needed = np.array([True, *wanted])
            legs = plan_hops(schedule, ring_size, key_length, needed)
            assert legs == plan_hops(UNFUSED[schedule], ring_size, key_length, needed)
            # Both ways, or one way where hops are left out or there is nothing to halve.
            halved = schedule == "fused_bidirectional" and all(wanted) and key_length > 1
            assert [len(leg.streams) for leg in legs] == [2] if halved else {len(leg.streams) for leg in legs} == {1}


def test_permutation_is_one_full_cycle():
    for direction, ring_size in itertools.product((1, -1), SIZES):
        step = dict(permutation(direction, ring_size))
        seen, rank = [], 0
        for _ in range(ring_size):
            seen.append(rank)
            rank = step[rank]
        assert rank == 0
        assert sorted(seen) == list(range(ring_size))


def test_plan_of_chunks_visits_consecutive_parts_that_never_move():
    legs = plan_chunks((3, 1, 4))
    assert [(s.start, s.size, s.hops) for leg in legs for s in leg.streams] == [(0, 3, 0), (3, 1, 0), (4, 4, 0)]
    assert all(leg.home for leg in legs)
    assert simulate(legs, 1) == [[(0, 0, 3), (0, 3, 1), (0, 4, 4)]]


def test_unknown_schedule_is_named_with_the_choices():
    for refused in (lambda: check_schedule("spiral"), lambda: plan_hops("spiral", 4, 4)):
        with pytest.raises(
            ValueError, match=r"schedule='spiral' is unknown; choose one of 'ring', 'bidirectional', 'all_gather'"
        ):
            refused()
