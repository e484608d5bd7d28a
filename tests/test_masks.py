"""Masks as integers: who sees whom, and what blocks of tokens are empty, full or partial."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_ring_attention.layouts import shard_positions
from jax_ring_attention.masks import (
    EMPTY,
    FULL,
    MAX_POSITION,
    PARTIAL,
    Tokens,
    active_blocks,
    block_bounds,
    classify,
    pad_tokens,
    token_integers,
    visible,
)
from jax_ring_attention.testing import visible_pairs

BLOCKS, BLOCK = 4, 3
LENGTH = BLOCKS * BLOCK
PROPERTY = settings(max_examples=150, deadline=None, derandomize=True, database=None)

REACHES = [(None, None), (None, 0), (0, 0), (2, 0), (None, 3), (3, None), (1, 4), (1000, 1000)]


def integers(values) -> jax.Array:
    return jnp.asarray(np.asarray(values), jnp.int32)


def kinds_of(query: Tokens, key: Tokens, reach, length: int = LENGTH, blocks: int = BLOCKS) -> np.ndarray:
    return np.asarray(classify(block_bounds(query, length, blocks), block_bounds(key, length, blocks), reach))


def by_block(seen: np.ndarray, blocks: int = BLOCKS) -> np.ndarray:
    """(B, T, S) to (B, query blocks, key blocks, pairs in the block pair)."""
    batch, length, key_length = seen.shape
    seen = seen.reshape(batch, blocks, length // blocks, blocks, key_length // blocks)
    return np.moveaxis(seen, 2, 3).reshape(batch, blocks, blocks, -1)


@pytest.mark.fast
@pytest.mark.parametrize("reach", REACHES, ids=str)
@pytest.mark.parametrize("segments", ["none", "query", "key", "both"])
def test_visible_equals_the_definition(segments, reach):
    rng = np.random.default_rng(3)
    batch, query_length, key_length = 2, 6, 9
    position = [rng.integers(-4, 9, size=(batch, n)) for n in (query_length, key_length)]
    segment = [rng.integers(-1, 3, size=(batch, n)) for n in (query_length, key_length)]
    # Segments of one side only come from lengths: 0 for real tokens, -1 for the rest.
    if segments in ("query", "key"):
        segment = [np.minimum(x, 0) for x in segment]
    given = {"none": (False, False), "query": (True, False), "key": (False, True), "both": (True, True)}[segments]
    have = visible(
        *(
            Tokens(integers(p) if reach != (None, None) else None, integers(s) if is_given else None)
            for p, s, is_given in zip(position, segment, given, strict=True)
        ),
        reach,
    )
    sides = tuple(s if is_given else np.zeros_like(s) for s, is_given in zip(segment, given, strict=True))
    want = visible_pairs(
        query_length, key_length, batch=batch, local_window_size=reach, positions=tuple(position), segment_ids=sides
    )
    if have is None:
        assert segments == "none"
        assert want.all()
    else:
        np.testing.assert_array_equal(np.broadcast_to(have, want.shape), want)


def test_visible_broadcasts_integers_that_all_rows_share():
    position = integers(np.arange(5))[None]
    segment = integers([[0, 0, 1, 1, -1], [0, 0, 0, 0, 0]])
    have = visible(Tokens(position, segment), Tokens(position, segment), (1, 0))
    np.testing.assert_array_equal(have, visible_pairs(5, 5, batch=2, local_window_size=(1, 0), segment_ids=np.asarray(segment)))


side = st.one_of(st.none(), st.integers(0, 6), st.just(10_000))
token_lists = st.lists(st.tuples(st.integers(-9, 9), st.integers(-2, 3)), min_size=LENGTH, max_size=LENGTH)


@pytest.mark.fast
@PROPERTY
@given(query=token_lists, key=token_lists, reach=st.tuples(side, side), is_sorted=st.booleans(), near=st.integers(0, 3))
def test_empty_pairs_hide_everything_and_full_pairs_nothing(query, key, reach, is_sorted, near):
    if is_sorted:  # otherwise random blocks overlap in everything and nearly all pairs are partial
        query, key = (sorted(tokens, key=lambda token: (token[1], token[0])) for tokens in (query, key))
    query, key = (np.array(tokens) // (1, 1 + near) for tokens in (query, key))
    tokens = [Tokens(integers(x[None, :, 0]), integers(x[None, :, 1])) for x in (query, key)]
    kinds = kinds_of(*tokens, reach)
    seen = by_block(
        visible_pairs(
            LENGTH,
            LENGTH,
            local_window_size=reach,
            positions=(query[:, 0], key[:, 0]),
            segment_ids=(query[:, 1], key[:, 1]),
        )
    )
    assert not seen[kinds == EMPTY].any()
    assert seen[kinds == FULL].all()


@PROPERTY
@given(
    offsets=st.tuples(
        st.integers(-MAX_POSITION + 1, MAX_POSITION - LENGTH), st.integers(-MAX_POSITION + 1, MAX_POSITION - LENGTH)
    ),
    reach=st.tuples(*[st.one_of(st.none(), st.integers(0, MAX_POSITION - 1))] * 2),
    padded=st.integers(0, LENGTH),
)
def test_bounds_do_not_overflow_at_the_largest_positions(offsets, reach, padded):
    places = [offset + np.arange(LENGTH) for offset in offsets]
    segment = np.where(np.arange(LENGTH) < LENGTH - padded, 0, -1)
    kinds = kinds_of(*(Tokens(integers(p[None]), integers(segment[None])) for p in places), reach)
    seen = by_block(visible_pairs(LENGTH, LENGTH, local_window_size=reach, positions=tuple(places), segment_ids=segment))
    assert not seen[kinds == EMPTY].any()
    assert seen[kinds == FULL].all()


@PROPERTY
@given(
    reach=st.sampled_from([(None, 0), (0, 0), (4, 0), (None, None), (3, 3), (7, None)]),
    offset=st.integers(-15, 15),
)
def test_contiguous_positions_are_classified_completely(reach, offset):
    query, key = np.arange(LENGTH), np.arange(LENGTH) + offset
    kinds = kinds_of(Tokens(integers(query[None])), Tokens(integers(key[None])), reach)
    seen = by_block(visible_pairs(LENGTH, LENGTH, local_window_size=reach, positions=(query, key)))
    want = np.where(seen.all(-1), FULL, np.where(seen.any(-1), PARTIAL, EMPTY))
    np.testing.assert_array_equal(kinds, want)


@pytest.mark.parametrize("num_shards", [2, 3, 5])
@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_balanced_layouts_call_no_pair_partial_that_is_empty_or_full(layout, num_shards):
    blocks, length = 4, 16  # blocks do not straddle the halves of zigzag
    places = [np.asarray(shard_positions(layout, rank, num_shards, length)) for rank in range(num_shards)]
    for query in places:
        for key in places:
            kinds = kinds_of(Tokens(integers(query[None])), Tokens(integers(key[None])), (None, 0), length, blocks)
            seen = by_block(visible_pairs(length, length, is_causal=True, positions=(query, key)), blocks)
            want = np.where(seen.all(-1), FULL, np.where(seen.any(-1), PARTIAL, EMPTY))
            np.testing.assert_array_equal(kinds, want)


@PROPERTY
@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=LENGTH),
    padding=st.integers(0, 5),
    is_causal=st.booleans(),
)
def test_packed_documents_call_no_empty_pair_partial(lengths, padding, is_causal):
    segment = np.repeat(np.arange(len(lengths)), lengths)
    segment = np.concatenate([segment, np.full(LENGTH, len(lengths))])[:LENGTH]
    segment[LENGTH - padding :] = -1
    position = np.arange(LENGTH)
    tokens = Tokens(integers(position[None]), integers(segment[None]))
    kinds = kinds_of(tokens, tokens, (None, 0) if is_causal else (None, None))
    seen = by_block(visible_pairs(LENGTH, LENGTH, is_causal=is_causal, segment_ids=segment))
    want = np.where(seen.all(-1), FULL, np.where(seen.any(-1), PARTIAL, EMPTY))
    np.testing.assert_array_equal(kinds, want)


def test_rows_of_a_batch_are_classified_one_by_one():
    segment = integers([[0] * LENGTH, [-1] * LENGTH])
    position = integers(np.arange(LENGTH)[None])
    kinds = kinds_of(Tokens(position, segment), Tokens(position), (None, 0))
    assert kinds.shape == (2, BLOCKS, BLOCKS)
    np.testing.assert_array_equal(kinds[1], np.full((BLOCKS, BLOCKS), EMPTY))
    np.testing.assert_array_equal(np.triu(kinds[0], 1) == EMPTY, np.triu(np.ones((BLOCKS, BLOCKS), bool), 1))


@pytest.mark.fast
@PROPERTY
@given(table=st.lists(st.lists(st.sampled_from([EMPTY, PARTIAL, FULL]), min_size=5, max_size=5), min_size=3, max_size=3))
def test_active_blocks_visit_full_then_partial_ones_once_each(table):
    listed = active_blocks(integers(table))
    for row, order, full, active in zip(table, *(np.asarray(x) for x in listed), strict=True):
        assert sorted(order) == list(range(5))
        assert list(order[:full]) == [i for i, kind in enumerate(row) if kind == FULL]
        assert list(order[full:active]) == [i for i, kind in enumerate(row) if kind == PARTIAL]


@pytest.mark.fast
def test_padding_tokens_are_seen_by_nobody():
    for segment in (None, integers([[0, 1, 1]])):
        for position in (None, integers([[5, 6, 7]])):
            padded = pad_tokens(Tokens(position, segment), 3, 5)
            np.testing.assert_array_equal(padded.segment, [[0, 0, 0, -1, -1] if segment is None else [0, 1, 1, -1, -1]])
            assert (padded.position is None) == (position is None)
            assert position is None or padded.position.shape == (1, 5)
            reach = (None, None) if position is None else (None, 0)
            seen = np.asarray(visible(padded, padded, reach))
            assert not seen[:, 3:].any()
            assert not seen[:, :, 3:].any()
            assert seen[0, 2, 2]


def test_padding_to_the_same_length_adds_no_comparison():
    assert pad_tokens(Tokens(), 4, 4) == Tokens(None, None)


def test_lengths_become_padding_by_natural_index():
    natural = integers([0, 3, 1, 2])  # stored order differs from natural order
    tokens = token_integers(natural, (None, 0), position=None, segment=integers([[7, 7, 8, 8]]), lengths=integers([2, 4]))
    np.testing.assert_array_equal(tokens.segment, [[7, -1, 8, -1], [7, 7, 8, 8]])
    np.testing.assert_array_equal(tokens.position, [[0, 3, 1, 2]])
    without = token_integers(natural, (None, None), position=integers([[9, 9, 9, 9]]), segment=None, lengths=integers([3]))
    np.testing.assert_array_equal(without.segment, [[0, -1, 0, 0]])
    assert without.position is None  # nobody compares positions, so they need not travel
    assert token_integers(natural, (None, None), position=None, segment=None, lengths=None) == Tokens(None, None)


@pytest.mark.parametrize("shape", [(1, 4), (3, 4)])
def test_only_integers_that_differ_between_rows_are_row_wise(shape):
    assert Tokens(jnp.zeros(shape, jnp.int32)).row_wise == (shape[0] > 1)
    assert Tokens(None, jnp.zeros(shape, jnp.int32)).row_wise == (shape[0] > 1)


@pytest.mark.fast
@pytest.mark.parametrize("reach", [(None, 0), (3, 1)])
def test_what_is_known_before_tracing_is_listed_before_tracing(reach):
    """numpy in, numpy out, and the same lists as under `jit`."""

    def lists(position):
        bounds = block_bounds(pad_tokens(Tokens(position), LENGTH - 3, LENGTH), LENGTH, BLOCKS)
        return active_blocks(classify(bounds, bounds, reach))

    position = np.arange(LENGTH - 3, dtype=np.int32)[None]
    known, traced = lists(position), jax.jit(lists)(position)
    assert all(isinstance(x, np.ndarray) and x.dtype == np.int32 for x in known)
    for have, want in zip(known, traced, strict=True):
        np.testing.assert_array_equal(have, want)
