"""Memory per device: linear in its own tokens, the same for every ring size, and nothing of size T x S anywhere."""

from __future__ import annotations

import collections
import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from cases import ring_mesh
from jax.sharding import NamedSharding, PartitionSpec
from programs import compile_only, equations

from jax_ring_attention import ring_attention

SPEC = PartitionSpec(None, "seq")
HEADS, DIM = 2, 32
ROW_BYTES = HEADS * DIM * 4  # of one token of query, key, value or out


@functools.cache
def temporary_bytes(ring_size: int, length: int, layout: str = "zigzag", schedule: str = "ring") -> int:
    """Peak temporary memory of one device for output and gradients. Compiled, not run.

    Blocks are smaller than by default, so that the scores of one pair of blocks, which are constant, do not hide what grows.
    """
    mesh = ring_mesh(ring_size)

    def attend(query, key, value):
        options = {"is_causal": True, "layout": layout, "schedule": schedule, "block_sizes": 128}
        return ring_attention(query, key, value, mesh=mesh, spec=SPEC, **options)

    def both(query, key, value, d_out):
        out, pull = jax.vjp(attend, query, key, value)
        return out, pull(d_out)

    x = jax.ShapeDtypeStruct((1, length, HEADS, DIM), jnp.float32, sharding=NamedSharding(mesh, SPEC))
    return compile_only(both, x, x, x, x).memory_analysis().temp_size_in_bytes


def test_memory_is_linear_in_the_sequence(record_property):
    lengths = (2048, 4096, 8192, 16384)
    sizes = [temporary_bytes(8, length) for length in lengths]
    for small, large in itertools.pairwise(sizes):
        assert small < large <= 2.1 * small
    slopes = [
        (large - small) * 8 / (longer - shorter)
        for (shorter, small), (longer, large) in itertools.pairwise(zip(lengths, sizes, strict=True))
    ]
    record_property("temporary_bytes_per_token", slopes)
    print("temporary bytes per token of one device:", slopes)
    assert max(slopes) <= 1.25 * min(slopes)  # anything quadratic would double it each time
    # Query, key, value, d_out in tiles, out, d_query, rows, and what travels twice over: in hand and on the way.
    assert max(slopes) <= 16 * ROW_BYTES


def test_memory_does_not_grow_with_the_ring_size(record_property):
    sizes = {ring_size: temporary_bytes(ring_size, 1024 * ring_size) for ring_size in (2, 4, 5, 8)}
    record_property("temporary_bytes_by_ring_size", sizes)
    print("temporary bytes by ring size:", sizes)
    looped = [sizes[4], sizes[5], sizes[8]]
    assert max(looped) <= 1.05 * min(looped)
    assert sizes[2] <= 1.05 * min(looped)  # two devices need no loop over hops, hence fewer buffers


@pytest.mark.parametrize(("layout", "schedule"), [("contiguous", "ring"), ("striped", "bidirectional")])
def test_memory_of_other_layouts_and_schedules_is_linear_too(layout, schedule):
    small, large = (temporary_bytes(8, length, layout, schedule) for length in (4096, 8192))
    assert large <= 2.1 * small
    assert (large - small) * 8 / 4096 <= 18 * ROW_BYTES


def shards(function, *, tokens: int, ring_size: int = 4, **options):
    """Trace `function(attention, query, key, value, segment_ids)` on the shards of one device."""
    mesh = ring_mesh(ring_size)

    def attend(query, key, value, segment_ids):
        return ring_attention(query, key, value, segment_ids=segment_ids, axis_name="seq", is_causal=True, **options)

    def here(*arrays):
        return function(attend, *arrays)

    mapped = jax.shard_map(here, mesh=mesh, in_specs=SPEC, out_specs=SPEC)
    length = tokens * ring_size
    floats = [jax.ShapeDtypeStruct((1, length, *tail), jnp.float32) for tail in ((4, 8), (2, 8), (2, 12))]
    return jax.make_jaxpr(mapped)(*floats, jax.ShapeDtypeStruct((1, length), jnp.int32))


@pytest.mark.fast
@pytest.mark.parametrize("schedule", ["ring", "bidirectional", "all_gather"])
def test_residuals_are_query_key_value_out_and_lse(schedule):
    kept = []

    def function(attend, query, key, value, segment_ids):
        out, pull = jax.vjp(lambda *floats: attend(*floats, segment_ids), query, key, value)
        kept.extend(jax.tree.leaves(pull))
        return pull(out)[0]

    shards(function, tokens=16, schedule=schedule, layout="zigzag")
    have = collections.Counter((str(x.dtype), x.shape) for x in kept)
    query, key, value, out, lse = (1, 16, 4, 8), (1, 16, 2, 8), (1, 16, 2, 12), (1, 16, 4, 12), (1, 16, 4)
    want = collections.Counter(("float32", shape) for shape in (query, key, value, out, lse))
    want["int32", (1, 16)] = 1  # segment ids, once for both sides
    assert have == want


@pytest.mark.fast
def test_scores_never_exist_as_a_whole():
    def function(attend, query, key, value, segment_ids):
        out, pull = jax.vjp(lambda *floats: attend(*floats, segment_ids), query, key, value)
        return pull(out)[0]

    def largest(**options):
        (mapped,) = (one for one in equations(shards(function, tokens=256, **options)) if one.primitive.name == "shard_map")
        return max(x.aval.size for one in equations(mapped.params["jaxpr"]) for x in one.outvars)

    assert largest(implementation="autodiff") >= 4 * 256 * 256
    for layout in ("contiguous", "zigzag"):
        assert largest(layout=layout, block_sizes=32) == 256 * 4 * 12  # the output
