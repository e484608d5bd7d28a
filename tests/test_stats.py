"""The monoid of chunk statistics: any split, order and grouping of the keys gives the attention over their union."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import FLOAT32_TOLERANCE
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_ring_attention import (
    ChunkStats,
    SegmentIds,
    attention_chunk_stats,
    finalize_chunk_stats,
    identity_chunk_stats,
    merge_chunk_stats,
)
from jax_ring_attention.testing import assert_close, dense_expected, random_inputs, value_and_grads

T, N, S, V, CHUNKS = 3, 2, 12, 4, 4
PROPERTY = settings(max_examples=60, deadline=None, derandomize=True, database=None)

merge = jax.jit(merge_chunk_stats)
finalize = jax.jit(finalize_chunk_stats)


def stats_of(logits: np.ndarray, values: np.ndarray, chosen: np.ndarray) -> ChunkStats:
    """Statistics in float64 numpy of the `chosen` (T, N, S) keys, rounded to float32 at the end."""
    logits = np.where(chosen, logits, -np.inf)
    top = logits.max(-1)
    weights = np.exp(logits - np.where(top == -np.inf, 0, top)[..., None])
    output = np.einsum("tns,sv->tnv", weights, values)
    return ChunkStats(*(jnp.asarray(x, jnp.float32) for x in (output, weights.sum(-1), top)))


def dense(logits: np.ndarray, values: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) in float64 numpy over all chosen keys, 0 and -inf for rows without any."""
    logits = np.where(chosen, logits, -np.inf)
    top = logits.max(-1, keepdims=True)
    weights = np.exp(logits - np.where(top == -np.inf, 0, top))
    total = weights.sum(-1)
    safe = np.where(total == 0, 1, total)
    lse = np.where(total == 0, -np.inf, top[..., 0] + np.log(safe))
    return np.einsum("tns,sv->tnv", weights, values) / safe[..., None], lse


@st.composite
def split_keys(draw):
    """Random logits of some spread, and for each (row, key) the chunk it belongs to, or -1 for hidden."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    spread = draw(st.sampled_from([0.0, 1.0, 30.0, 1e4]))
    logits = np.float32(rng.uniform(-1, 1, size=(T, N, S)) * spread).astype(np.float64)
    values = rng.normal(size=(S, V))
    if draw(st.booleans()):  # consecutive chunks of keys, as in a ring; some may be empty
        cuts = np.sort(rng.integers(0, S + 1, size=CHUNKS - 1))
        owner = np.broadcast_to(np.searchsorted(cuts, np.arange(S), side="right"), (T, N, S)).copy()
    else:
        owner = rng.integers(0, CHUNKS, size=(T, N, S))
    owner[rng.random((T, N, S)) < draw(st.sampled_from([0.0, 0.5, 0.9]))] = -1
    if draw(st.booleans()):
        owner[0] = -1  # rows that see no key at all
    return logits, values, owner


def merged(chunks: list[ChunkStats], order: list[int], grouping: str) -> ChunkStats:
    parts = [chunks[i] for i in order]
    if grouping == "left":
        return functools.reduce(merge, parts)
    if grouping == "right":
        return functools.reduce(lambda later, earlier: merge(earlier, later), reversed(parts))
    return merge(merge(parts[0], parts[1]), merge(parts[2], parts[3]))


@pytest.mark.fast
@PROPERTY
@given(
    keys=split_keys(),
    order=st.permutations(range(CHUNKS)),
    grouping=st.sampled_from(["left", "right", "pairs"]),
)
def test_any_split_order_and_grouping_gives_the_whole(keys, order, grouping):
    logits, values, owner = keys
    chunks = [stats_of(logits, values, owner == i) for i in range(CHUNKS)]
    have = finalize(merged(chunks, order, grouping))
    want = dense(logits, values, owner >= 0)
    assert_close(have, want, FLOAT32_TOLERANCE, ["out", "lse"])
    empty = ~(owner >= 0).any(-1)
    assert (np.asarray(have[0])[empty] == 0).all()
    assert (np.asarray(have[1])[empty] == -np.inf).all()


@PROPERTY
@given(keys=split_keys())
def test_identity_changes_nothing_bit_for_bit(keys):
    logits, values, owner = keys
    stats = stats_of(logits, values, owner == 0)
    nothing = identity_chunk_stats((T, N), V)
    for have in (merge(nothing, stats), merge(stats, nothing)):
        for a, b in zip(have, stats, strict=True):
            np.testing.assert_array_equal(a, b)


@PROPERTY
@given(keys=split_keys())
def test_merging_commutes_up_to_one_rounding(keys):
    logits, values, owner = keys
    a, b = (stats_of(logits, values, owner == i) for i in range(2))
    have, want = merge(a, b), merge(b, a)
    np.testing.assert_array_equal(have.max, want.max)
    assert_close(have[:2], want[:2], float(jnp.finfo(jnp.float32).eps))  # a fused multiply-add rounds one side only


@pytest.mark.fast
def test_identity_finalizes_to_zero_and_minus_infinity():
    nothing = identity_chunk_stats((T, N), V)
    assert nothing.output.dtype == nothing.sum.dtype == nothing.max.dtype == jnp.float32
    for stats in (nothing, merge(nothing, nothing)):
        out, lse = finalize(stats)
        np.testing.assert_array_equal(out, np.zeros((T, N, V)))
        np.testing.assert_array_equal(lse, np.full((T, N), -np.inf))


@pytest.mark.fast
def test_far_apart_chunks_neither_overflow_nor_vanish():
    def level(x):
        return ChunkStats(jnp.full((1, 1, 1), 3.0), jnp.ones((1, 1)), jnp.full((1, 1), x, jnp.float32))

    with jax.debug_nans(True):
        for low, high in [(-1e4, 1e4), (-3e38, 3e38), (-1e4, -1e4)]:
            for pair in ((level(low), level(high)), (level(high), level(low))):
                out, lse = finalize(merge(*pair))
                np.testing.assert_array_equal(out, [[[3.0]]])
                np.testing.assert_array_equal(lse, np.float32([[high + (np.log(2) if low == high else 0)]]))


@pytest.mark.fast
def test_plain_tuples_are_accepted_and_stats_unpack():
    a = (jnp.ones((T, V)), jnp.ones(T), jnp.zeros(T))
    result = merge_chunk_stats(a, a)
    assert isinstance(result, ChunkStats)
    output, total, maximum = result
    np.testing.assert_array_equal(output, np.full((T, V), 2.0))
    np.testing.assert_array_equal(total, np.full(T, 2.0))
    np.testing.assert_array_equal(maximum, np.zeros(T))
    out, lse = finalize_chunk_stats(tuple(result))
    np.testing.assert_array_equal(out, np.ones((T, V)))
    np.testing.assert_allclose(lse, np.full(T, np.log(2)), rtol=1e-6)


@pytest.mark.fast
@pytest.mark.parametrize("field", ChunkStats._fields)
def test_shapes_that_differ_are_refused_by_name(field):
    stats = identity_chunk_stats((T, N), V)
    shapes = {"output": (T, N, V + 1), "sum": (T, 1), "max": (1, N)}
    other = stats._replace(**{field: jnp.zeros(shapes[field])})
    have, want = (str(x).replace("(", r"\(").replace(")", r"\)") for x in (shapes[field], getattr(stats, field).shape))
    with pytest.raises(
        ValueError, match=rf"{field} has shape {want} on one side and {have} on the other.*same queries and heads"
    ):
        merge_chunk_stats(stats, other)


def split_attention(query, key, value, *, hidden: int = 0):
    """Attention by hand from two public chunks; the first `hidden` chunk(s) are seen by nobody."""
    half = key.shape[1] // 2
    segments = [jnp.full((1, half), -1 if i < hidden else 0, jnp.int32) for i in range(2)]
    parts = [
        attention_chunk_stats(
            query,
            key[:, i * half : (i + 1) * half],
            value[:, i * half : (i + 1) * half],
            segment_ids=(None if not hidden else _segments(query, segments[i])),
        )
        for i in range(2)
    ]
    return finalize_chunk_stats(merge_chunk_stats(*parts))


def _segments(query, key_segment):
    return SegmentIds(jnp.zeros((1, query.shape[1]), jnp.int32), key_segment)


@pytest.mark.fast
def test_two_merged_chunks_differentiate_exactly_including_lse():
    inputs = random_inputs(0, batch=2, query_length=6, key_length=8, heads=4, kv_heads=2, value_dim=5)
    d_lse = np.random.default_rng(1).normal(size=(2, 6, 4)).astype(np.float32)
    want = dense_expected(inputs, d_lse=d_lse)
    have = value_and_grads(split_attention, inputs[:3], (inputs.d_out, d_lse))
    assert_close(have, ((want.out, want.lse), want[2:5]), FLOAT32_TOLERANCE)


@pytest.mark.fast
def test_gradients_are_finite_through_chunks_that_nobody_sees():
    inputs = random_inputs(2, query_length=4, key_length=6)
    d_lse = np.random.default_rng(3).normal(size=(1, 4, 2)).astype(np.float32)
    first_hidden = np.arange(6) >= 3
    want = dense_expected(inputs, first_hidden, d_lse=d_lse)
    with jax.debug_nans(True):
        have = value_and_grads(functools.partial(split_attention, hidden=1), inputs[:3], (inputs.d_out, d_lse))
        nothing = value_and_grads(functools.partial(split_attention, hidden=2), inputs[:3], (inputs.d_out, d_lse))
    assert_close(have, ((want.out, want.lse), want[2:5]), FLOAT32_TOLERANCE)
    (out, lse), grads = nothing
    np.testing.assert_array_equal(out, np.zeros(out.shape))
    np.testing.assert_array_equal(lse, np.full(lse.shape, -np.inf))
    for grad in grads:
        np.testing.assert_array_equal(grad, np.zeros(grad.shape))


def test_merge_itself_has_finite_gradients_at_the_identity():
    nothing = identity_chunk_stats((T, N), V)
    some = ChunkStats(jnp.ones((T, N, V)), jnp.ones((T, N)), jnp.zeros((T, N)))

    def loss(a, b):
        out, lse = finalize_chunk_stats(merge_chunk_stats(a, b))
        return out.sum() + jnp.where(lse == -jnp.inf, 0, lse).sum()

    both = jax.jit(jax.grad(loss, argnums=(0, 1)))
    for a, b in [(nothing, some), (some, nothing), (nothing, nothing)]:
        for grad in jax.tree.leaves(both(a, b)):
            assert np.isfinite(grad).all()


@pytest.mark.fast
@pytest.mark.parametrize("where", ["carry", "merged after", "merged before"])
def test_a_chunk_of_one_valueless_key_is_an_attention_sink(where):
    inputs = random_inputs(4, query_length=5, key_length=7, heads=2)
    sinks = np.float32([0.3, -1.0])
    d_lse = np.random.default_rng(5).normal(size=(1, 5, 2)).astype(np.float32)
    want = dense_expected(inputs, sinks=sinks, d_lse=d_lse)

    def attend(query, key, value, sinks):
        shape = query.shape[:-1]
        sink = (jnp.zeros((*shape, value.shape[-1])), jnp.ones(shape), jnp.broadcast_to(sinks, shape))
        if where == "carry":
            stats = attention_chunk_stats(query, key, value, carry=sink)
        else:
            chunk = attention_chunk_stats(query, key, value)
            stats = merge_chunk_stats(chunk, sink) if where == "merged after" else merge_chunk_stats(sink, chunk)
        return finalize_chunk_stats(stats)

    have = value_and_grads(attend, (*inputs[:3], jnp.asarray(sinks)), (inputs.d_out, d_lse))
    assert_close(have, ((want.out, want.lse), (*want[2:5], want.d_sinks)), FLOAT32_TOLERANCE)


def test_float64_inputs_keep_float64_statistics():
    with jax.enable_x64(True):
        inputs = random_inputs(6, query_length=4, key_length=6, dtype=jnp.float64)
        d_lse = np.random.default_rng(7).normal(size=(1, 4, 2))
        want = dense_expected(inputs, d_lse=d_lse)
        stats = attention_chunk_stats(*inputs[:3])
        assert {x.dtype for x in stats} == {jnp.dtype(jnp.float64)}
        have = value_and_grads(split_attention, inputs[:3], (inputs.d_out, d_lse))
        assert {x.dtype for x in jax.tree.leaves(have)} == {jnp.dtype(jnp.float64)}
        assert_close(have, ((want.out, want.lse), want[2:5]), 1e-14)
