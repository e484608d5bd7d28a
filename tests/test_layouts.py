"""Layouts: permutations that invert, agree with what a shard computes for itself, and balance causal work."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import LAYOUTS, ring_mesh
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ring_attention import from_layout, to_layout
from jax_ring_attention.layouts import padded_slots, shard_multiple, shard_positions, shard_progressions, storage_order
from jax_ring_attention.masks import EMPTY, Tokens, block_bounds, classify

SHARDS = range(1, 9)


def positions_of(layout: str, rank: int, num_shards: int, length: int) -> np.ndarray:
    return np.asarray(shard_positions(layout, rank, num_shards, length))


@pytest.mark.fast
@pytest.mark.parametrize("layout", LAYOUTS)
def test_storage_order_is_a_permutation_with_its_inverse(layout):
    for num_shards in SHARDS:
        for length in (1, 2, 3, 7, 16, 33, 48, 97):
            order = storage_order(layout, num_shards, length)
            inverse = np.argsort(order)
            np.testing.assert_array_equal(order[inverse], np.arange(length))
            np.testing.assert_array_equal(inverse[order], np.arange(length))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_round_trip_for_every_ring_size_and_length(layout):
    for num_shards in SHARDS:
        for length in (12, 13):
            x = jnp.arange(2 * length * 3).reshape(2, length, 3)
            stored = to_layout(x, layout, num_shards)
            np.testing.assert_array_equal(stored, np.asarray(x)[:, storage_order(layout, num_shards, length)])
            np.testing.assert_array_equal(from_layout(stored, layout, num_shards), x)
            np.testing.assert_array_equal(to_layout(from_layout(x, layout, num_shards), layout, num_shards), x)


@pytest.mark.fast
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_knows_the_positions_it_stores(layout):
    for num_shards in SHARDS:
        shard = 6
        slices = storage_order(layout, num_shards, shard * num_shards).reshape(num_shards, shard)
        every_rank = jax.vmap(lambda rank: shard_positions(layout, rank, num_shards, shard))  # noqa: B023
        np.testing.assert_array_equal(every_rank(jnp.arange(num_shards)), slices)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_progressions_describe_the_same_positions(layout):
    for num_shards in SHARDS:
        starts, stride, count = shard_progressions(layout, num_shards, 6)
        for rank in range(num_shards):
            pieces = [start[rank] + stride * np.arange(count) for start in starts]
            np.testing.assert_array_equal(np.concatenate(pieces), positions_of(layout, rank, num_shards, 6))


def test_layouts_store_what_their_definition_says():
    np.testing.assert_array_equal(storage_order("contiguous", 2, 8), np.arange(8))
    np.testing.assert_array_equal(storage_order("zigzag", 2, 8), [0, 1, 6, 7, 2, 3, 4, 5])
    np.testing.assert_array_equal(storage_order("striped", 2, 8), [0, 2, 4, 6, 1, 3, 5, 7])


def test_a_length_that_does_not_divide_is_the_padded_order_without_its_padding():
    np.testing.assert_array_equal(storage_order("zigzag", 2, 6), [0, 1, 2, 3, 4, 5])
    np.testing.assert_array_equal(storage_order("zigzag", 2, 7), [0, 1, 6, 2, 3, 4, 5])
    np.testing.assert_array_equal(storage_order("striped", 3, 7), [0, 3, 6, 1, 4, 2, 5])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_padded_slots_keep_every_token_on_the_shard_that_owns_its_position(layout):
    for num_shards in SHARDS:
        for length in (1, 5, 16, 19):
            slots, padded = padded_slots(layout, num_shards, length)
            assert padded % shard_multiple(layout, num_shards) == 0
            assert length <= padded < length + shard_multiple(layout, num_shards)
            natural = storage_order(layout, num_shards, length)
            shard = padded // num_shards
            for token, slot in enumerate(slots):
                held = positions_of(layout, slot // shard, num_shards, shard)
                assert held[slot % shard] == natural[token]


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
def test_axis_chooses_the_token_axis(axis):
    x = np.arange(6 * 6 * 6).reshape(6, 6, 6)
    stored = to_layout(x, "zigzag", 3, axis)
    np.testing.assert_array_equal(stored, np.take(x, storage_order("zigzag", 3, 6), axis=axis))
    np.testing.assert_array_equal(from_layout(stored, "zigzag", 3, axis), x)


@pytest.mark.fast
@pytest.mark.parametrize("convert", [to_layout, from_layout])
def test_wrong_arguments_are_named(convert):
    x = jnp.zeros((2, 8))
    with pytest.raises(ValueError, match=r"layout='zig-zag' is unknown.*'contiguous', 'zigzag', 'striped'"):
        convert(x, "zig-zag", 2)
    with pytest.raises(ValueError, match=r"num_shards=0 must be at least 1: the number of devices"):
        convert(x, "zigzag", 0)
    for axis in (2, -3):
        with pytest.raises(ValueError, match=rf"axis={axis} does not exist in an array of shape \(2, 8\); name its token axis"):
            convert(x, "zigzag", 2, axis)


@pytest.mark.fast
def test_jit_and_gradient_of_the_round_trip():
    x = jnp.arange(24.0).reshape(1, 12, 2)
    weights = jnp.arange(24.0).reshape(1, 12, 2) ** 2

    @jax.jit
    def everything(x):
        stored = to_layout(x, "zigzag", 3)
        return stored, from_layout(stored, "zigzag", 3), jax.grad(lambda x: (to_layout(x, "zigzag", 3) * weights).sum())(x)

    stored, back, grad = everything(x)
    np.testing.assert_array_equal(stored, to_layout(x, "zigzag", 3))
    np.testing.assert_array_equal(back, x)
    np.testing.assert_array_equal(grad, from_layout(weights, "zigzag", 3))


@pytest.mark.fast
@pytest.mark.parametrize("layout", LAYOUTS)
def test_explicitly_sharded_arrays_keep_their_sharding(layout):
    mesh = ring_mesh(4, AxisType.Explicit)
    x = np.arange(2 * 16 * 3, dtype=np.float32).reshape(2, 16, 3)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, NamedSharding(mesh, P(None, "seq", None)))
        stored = to_layout(sharded, layout, 4)
        back = jax.jit(lambda x: from_layout(x, layout, 4))(stored)
    assert jax.typeof(stored).sharding.spec == P(None, "seq", None)
    assert jax.typeof(back).sharding.spec == P(None, "seq", None)
    np.testing.assert_array_equal(stored, x[:, storage_order(layout, 4, 16)])
    np.testing.assert_array_equal(back, x)


def test_replicated_and_host_arrays_convert_under_an_explicit_mesh():
    x = np.arange(2 * 16).reshape(2, 16)
    with jax.set_mesh(ring_mesh(4, AxisType.Explicit)):
        stored = to_layout(x, "zigzag", 4)
        uneven = to_layout(x[:, :13], "zigzag", 4)  # a length that the ring does not divide
        np.testing.assert_array_equal(from_layout(stored, "zigzag", 4), x)
        np.testing.assert_array_equal(from_layout(uneven, "zigzag", 4), x[:, :13])


def causal_work(layout: str, num_shards: int, blocks: int = 16, block: int = 4) -> np.ndarray:
    """[device, hop]: pairs of blocks that causal attention computes, with `blocks` blocks a shard."""
    length = blocks * block
    bounds = [
        block_bounds(Tokens(shard_positions(layout, rank, num_shards, length)[None]), length, blocks)
        for rank in range(num_shards)
    ]
    return np.array(
        [
            [
                int((np.asarray(classify(bounds[rank], bounds[(rank - hop) % num_shards], (None, 0))) != EMPTY).sum())
                for hop in range(num_shards)
            ]
            for rank in range(num_shards)
        ]
    )


@pytest.mark.parametrize("num_shards", [2, 4, 8])
@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_causal_work_is_balanced_over_devices(layout, num_shards):
    work = causal_work(layout, num_shards)
    per_device = work.sum(1)
    assert per_device.max() / per_device.mean() <= 1.05
    # A ring waits for its slowest device at every hop, so balance has to hold hop by hop as well.
    assert work.max(0).sum() / per_device.mean() <= 1.05


def test_causal_work_of_contiguous_shards_is_not_balanced():
    per_device = causal_work("contiguous", 8).sum(1)
    assert per_device.max() / per_device.mean() > 1.5
