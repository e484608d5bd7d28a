"""The TPU kernels: their lists of steps, what they refuse, and what they compute, in the emulator of TPUs that comes with Pallas.

tests/test_chunk.py runs its own cases over them too; tests/test_aot_tpu.py compiles them for real TPUs.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import FLOAT32_TOLERANCE, check_ring, ring_mesh
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jax_ring_attention import attention_chunk_stats, compat, ring_attention
from jax_ring_attention.kernels.contract import BlockSizes, Problem
from jax_ring_attention.kernels.mosaic_tpu import MosaicTpuKernel, common, tiling
from jax_ring_attention.kernels.mosaic_tpu.common import LANES, Shape, Tiling
from jax_ring_attention.masks import Tokens, visible
from jax_ring_attention.testing import (
    AttentionInputs,
    assert_close,
    dense_expected,
    earned_tolerances,
    random_inputs,
    relative_error,
    value_and_grads,
    visible_pairs,
)

tpu = functools.partial(ring_attention, implementation="mosaic_tpu")
emulated = functools.partial(compat.tpu_interpret_mode, uninitialized_memory="nan")


# Refusals.


def small(dtype=jnp.float32, **sizes) -> AttentionInputs:
    return random_inputs(0, query_length=128, dtype=dtype, **sizes)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mask": jnp.ones((1, 1, 128, 128), bool)}, "no dense mask or bias"),
        ({"bias": jnp.zeros((1, 1, 128, 128))}, "no dense mask or bias"),
        ({"block_sizes": (64, 256)}, "multiples of 128 tokens, not block_q=64"),
    ],
    ids=["mask", "bias", "block sizes"],
)
def test_refusals_give_the_reason_and_a_way_out(options, reason):
    with pytest.raises(NotImplementedError, match=rf"implementation='mosaic_tpu' refuses: .*{reason}.*xla"):
        tpu(*small()[:3], **options)


@pytest.mark.fast
def test_float64_is_refused():
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match=r"float32, not float64.*xla"):
        tpu(*(jnp.asarray(x, jnp.float64) for x in small()[:3]))


@pytest.mark.fast
def test_a_list_of_pairs_beyond_scalar_memory_is_refused():
    shape = jax.ShapeDtypeStruct((1, 2**16, 1, 64), jnp.bfloat16)
    call = functools.partial(attention_chunk_stats, implementation="mosaic_tpu", block_sizes=128)
    with pytest.raises(NotImplementedError, match=r"262144 entries .*larger block_sizes"):
        jax.eval_shape(call, shape, shape, shape)


@pytest.mark.fast
def test_the_automatic_choice_needs_a_tpu():
    assert not MosaicTpuKernel.is_preferred()
    assert "tpu_custom_call" not in jax.jit(ring_attention).lower(*small()[:3]).as_text()


# Which pairs are listed.

TILING = Tiling(block_q=256, block_kv=512, tile_q=128, tile_kv=128, ahead=1, lag=1)
TILINGS = [TILING, TILING._replace(tile_kv=256), TILING._replace(tile_q=256), TILING._replace(side_by_side=2)]


def shape_of(query_length: int, key_length: int, reach) -> Shape:
    problem = Problem((1, query_length, 1, 16), (1, key_length, 1, 16), 16, jnp.dtype(jnp.float32), 1.0, reach)
    return MosaicTpuKernel(dataclasses.replace(problem, block_sizes=BlockSizes(128, 128))).shape


@st.composite
def scopes(draw):
    """Tokens of 512 queries and 1024 keys: runs of positions and of segments."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = draw(st.sampled_from([1, 2]))
    reach = draw(st.sampled_from([(None, None), (None, 0), (300, 0), (0, 0), (128, 128), (None, 700)]))
    origin = draw(st.sampled_from([0, 128, 256, 512, -256, 77]))
    strides = draw(st.sampled_from([1, 2]))

    def side(length, shift):
        position = np.arange(length) * strides + shift
        segment = np.sort(rng.integers(-1, draw(st.integers(0, 3)) + 1, size=(rows, length)), axis=1)
        kind = draw(st.sampled_from(["none", "runs", "one"]))
        segment = {"none": None, "runs": segment, "one": np.zeros((1, length), np.int32)}[kind]
        return position[None], segment

    query, key = side(512, origin), side(1024, 0)
    if (query[1] is None) != (key[1] is None):
        query, key = (query[0], None), (key[0], None)
    if reach == (None, None):
        query, key = (None, query[1]), (None, key[1])

    def tokens(pair):
        return Tokens(*(None if x is None else jnp.asarray(x, jnp.int32) for x in pair))

    return tokens(query), tokens(key), reach


@pytest.mark.fast
@settings(max_examples=60, deadline=None)
@given(scopes(), st.sampled_from(TILINGS))
def test_every_visible_pair_of_tokens_is_computed_once_and_hidden_ones_are_masked(scope, tiling):
    query, key, reach = scope
    shape = shape_of(512, 1024, reach)
    kinds = np.asarray(common.pair_kinds(query, key, shape, tiling))
    seen = visible(query, key, reach)
    seen = np.ones((1, 512, 1024), bool) if seen is None else np.asarray(seen)
    rows = max(kinds.shape[0], seen.shape[0])
    kinds, seen = (np.broadcast_to(x, (rows, *x.shape[1:])) for x in (kinds, seen))
    for row, i, j in np.ndindex(kinds.shape):
        pair = seen[row, i * 256 : (i + 1) * 256, j * 512 : (j + 1) * 512]
        computed = np.zeros_like(pair)
        if kinds[row, i, j] != common.NOTHING:
            for a, b, compares in common.tiles_of(int(kinds[row, i, j]), tiling):
                rows_of, columns_of = (slice(n * size, (n + 1) * size) for n, size in ((a, tiling.tile_q), (b, tiling.tile_kv)))
                where = rows_of, columns_of
                assert not computed[where].any()
                computed[where] = pair[where] if compares else True
        np.testing.assert_array_equal(computed, pair)


@pytest.mark.fast
def test_a_causal_pair_on_the_diagonal_computes_the_lower_triangle_only():
    positions = jnp.arange(1024, dtype=jnp.int32)[None]
    kinds = common.pair_kinds(Tokens(positions[:, :512]), Tokens(positions), shape_of(512, 1024, (None, 0)), TILING)
    np.testing.assert_array_equal(kinds[0], [[common.DIAGONAL, common.NOTHING], [common.DIAGONAL + 1, common.NOTHING]])
    assert common.tiles_of(common.DIAGONAL, TILING) == [(0, 0, True), (1, 0, False), (1, 1, True)]
    # A tile of keys twice as long as one of queries: the first two query tiles cross it.
    assert common.tiles_of(common.DIAGONAL, TILING._replace(tile_kv=256)) == [(0, 0, True), (1, 0, True)]
    second = common.tiles_of(common.DIAGONAL + 1, TILING)
    assert len(second) == 7
    assert [tile for tile in second if tile[2]] == [(0, 2, True), (1, 3, True)]


@pytest.mark.fast
@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([(1, 1, 1), (1, 3, 4), (2, 5, 1), (3, 4, 5)]),
    st.sampled_from([0.0, 0.3, 0.9]),
    st.booleans(),
)
def test_the_list_of_steps_names_every_pair_that_needs_one(seed, shape, density, every_inner):
    rows, outer, inner = shape
    rng = np.random.default_rng(seed)
    kinds = np.where(rng.random((rows, outer, inner)) < density, rng.integers(1, 4, (rows, outer, inner)), common.NOTHING)
    steps = common.list_steps(jnp.asarray(kinds, jnp.int32), every_inner)
    total = int(steps.total)
    code = np.asarray(steps.code).reshape(rows, -1)[:, :total]
    compared = np.asarray(steps.compared).reshape(rows, -1)[:, :total]
    longest = 0
    for row in range(rows):
        have = [(int(common.outer_of(c)), int(common.inner_of(c)), int(common.kind_of(c))) for c in code[row]]
        first = [bool(common.is_first(c)) for c in code[row]]
        want = []
        for i in range(outer):
            wanted = [(i, j, int(kinds[row, i, j])) for j in range(inner) if kinds[row, i, j] != common.NOTHING]
            want += wanted or [(i, 0, common.NOTHING)]
        if every_inner:
            absent = set(range(inner)) - {j for _, j, _ in want}
            want = sorted([*want, *((0, j, common.NOTHING) for j in absent)])
        longest = max(longest, len(want))
        assert have[: len(want)] == want
        assert first[: len(want)] == [n == 0 or want[n - 1][0] != i for n, (i, _, _) in enumerate(want)]
        visits = [j for _, j, _ in want]
        assert [bool(common.enters(c)) for c in code[row]] == [
            n < len(want) and j not in visits[:n] for n, (_, j, _) in enumerate(have)
        ]
        assert [bool(common.leaves(c)) for c in code[row]] == [
            n < len(want) and j not in visits[n + 1 :] for n, (_, j, _) in enumerate(have)
        ]
        # Past its end a row does nothing, at the blocks that are in hand already.
        assert have[len(want) :] == [(*want[-1][:2], common.NOTHING)] * (total - len(want))
        assert not any(first[len(want) :])
        latest = 0, 0
        for (i, j, kind), c in zip(have, compared[row], strict=True):
            latest = (i, j) if kind >= common.MASKED else latest
            assert (int(common.outer_of(c)), int(common.inner_of(c))) == latest
    assert total == longest


# What is computed, in the emulator.

CASES: dict[str, tuple[dict, dict]] = {
    "full, several blocks": ({"query_length": 384, "key_length": 256}, {}),
    "causal": ({"query_length": 512}, {"is_causal": True}),
    "prime length": ({"query_length": 307}, {"is_causal": True}),
    "one token": ({"query_length": 1}, {}),
    "more keys, window": ({"query_length": 150, "key_length": 400}, {"local_window_size": (100, 30)}),
    "more queries, causal": ({"query_length": 400, "key_length": 111}, {"is_causal": True}),
    "soft cap": ({"query_length": 256}, {"logits_soft_cap": 2.0, "is_causal": True}),
    "three heads to one": ({"query_length": 256, "heads": 6, "kv_heads": 2}, {"is_causal": True}),
    "lengths": ({"query_length": 300}, {"query_seq_lengths": [300, 17], "key_value_seq_lengths": [300, 130]}),
}


def compare(inputs, options, attend=tpu, segment_ids=None, tolerances=None):
    """Outputs and gradients of `attend` in the emulator against dense float64."""
    batch, length = inputs.query.shape[:2]
    masks = ("is_causal", "local_window_size", "query_seq_lengths", "key_value_seq_lengths")
    given = {name: options[name] for name in masks if name in options}
    seen = visible_pairs(length, inputs.key.shape[1], batch=batch, segment_ids=segment_ids, **given)[:, None]
    d_lse = np.random.default_rng(5).normal(size=inputs.query.shape[:3]).astype(np.float32)
    dense = {name: options[name] for name in ("logits_soft_cap",) if name in options}
    want = dense_expected(inputs, seen, d_lse=d_lse, **dense)
    options = {name: jnp.asarray(x) if name.endswith("lengths") else x for name, x in options.items()}
    segments = {} if segment_ids is None else {"segment_ids": jnp.asarray(segment_ids, jnp.int32)}
    with emulated():
        call = functools.partial(attend, return_residual=True, **options, **segments)
        (out, lse), grads = value_and_grads(call, inputs[:3], (inputs.d_out, d_lse))
    for name, have in zip(("out", "lse", "d_query", "d_key", "d_value"), (out, lse, *grads), strict=True):
        allowed = FLOAT32_TOLERANCE if tolerances is None else getattr(tolerances(want, seen, d_lse), name)
        error = relative_error(have, getattr(want, name))
        assert error <= allowed, f"{name}: relative error {error:.2e}, allowed {allowed:.2e}"


@pytest.mark.parametrize("name", CASES)
def test_blocks_of_128_match_dense(name):
    sizes, options = CASES[name]
    inputs = random_inputs(1, 2 if "lengths" in name else 1, **({"heads": 2, "head_dim": 16} | sizes))
    compare(inputs, options | {"block_sizes": 128})


@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (96, 40), (192, 128), (256, 256), (5, 3)], ids=str)
def test_every_head_dim(dims):
    inputs = random_inputs(2, 1, 160, heads=2, head_dim=dims[0], value_dim=dims[1])
    compare(inputs, {"is_causal": True})


@pytest.mark.fast
@pytest.mark.parametrize("spread", [1.0, 5.0])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
def test_narrow_dtypes_earn_their_tolerance(dtype, spread):
    inputs = random_inputs(3, 1, 256, heads=2, kv_heads=1, head_dim=64, dtype=dtype, spread=spread)
    compare(
        inputs,
        {"is_causal": True},
        tolerances=lambda want, seen, d_lse: earned_tolerances(inputs, want, seen, d_lse=d_lse),
    )


@pytest.mark.parametrize("dim", [64, 128])
def test_wide_matrix_units_take_the_scale_in_two_parts(monkeypatch, dim):
    """What v6e and tpu7x compute: queries hold the scale as a sum of two bfloat16 numbers."""
    monkeypatch.setattr(compat, "tpu_chip", lambda: "v6e")
    inputs = random_inputs(4, 1, 256, heads=1, head_dim=dim, dtype=jnp.bfloat16, spread=5.0)
    problem = Problem((1, 256, 1, dim), (1, 256, 1, dim), dim, jnp.dtype(jnp.bfloat16), 1.0)
    assert MosaicTpuKernel(problem).shape.split_scale
    compare(
        inputs,
        {"is_causal": True, "block_sizes": 256},
        tolerances=lambda want, seen, d_lse: earned_tolerances(inputs, want, seen, d_lse=d_lse),
    )


def test_packed_rows_with_nan_in_the_padding():
    inputs = random_inputs(6, 2, 300, heads=2, kv_heads=1, head_dim=16)
    segments = np.sort(np.random.default_rng(0).integers(-1, 3, size=(2, 300)), axis=-1)
    segments[1, :200] = -1
    hidden = jnp.asarray(segments < 0)[:, :, None, None]
    clean = inputs._replace(d_out=jnp.where(hidden, 0, inputs.d_out))
    ids = jnp.asarray(segments, jnp.int32)

    def loss(query, key, value, ids):
        return (tpu(query, key, value, segment_ids=ids, is_causal=True, block_sizes=128) * inputs.d_out).sum()

    with emulated():
        both = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
        have = both(*(jnp.where(hidden, jnp.nan, x) for x in inputs[:3]), ids)
        want = both(*inputs[:3], ids)
    jax.tree.map(np.testing.assert_array_equal, have, want)
    compare_segments = functools.partial(tpu, block_sizes=128)
    # Rows that see nobody have lse -inf, whose cotangent means nothing.
    seen = visible_pairs(300, 300, batch=2, segment_ids=(segments, segments), is_causal=True)[:, None]
    expected = dense_expected(clean, seen)
    with emulated():
        out, grads = value_and_grads(functools.partial(compare_segments, is_causal=True, segment_ids=ids), clean[:3], clean.d_out)
    assert_close((out, *grads), (expected.out, *expected[2:5]), FLOAT32_TOLERANCE)


def test_d_query_in_parts_equals_d_query_at_once(monkeypatch):
    """Where d_query does not fit in VMEM: parts of the queries one after another."""
    inputs = random_inputs(7, 1, 384, heads=4, kv_heads=2, head_dim=16)
    call = functools.partial(tpu, is_causal=True, block_sizes=128)
    with emulated():
        want = value_and_grads(call, inputs[:3], inputs.d_out)[1]
        monkeypatch.setattr("jax_ring_attention.kernels.mosaic_tpu.resident_units", lambda shape, tiling: 4)
        jax.clear_caches()
        have = value_and_grads(call, inputs[:3], inputs.d_out)[1]
    assert_close(have, want, 1e-6)


@pytest.mark.parametrize(
    ("ring_size", "layout", "schedule"),
    [(2, "contiguous", "ring"), (4, "zigzag", "ring"), (3, "striped", "bidirectional"), (4, "contiguous", "all_gather")],
)
def test_rings_match_dense_without_races(ring_size, layout, schedule):
    inputs = random_inputs(8, 1, ring_size * 32, heads=2, kv_heads=1)
    with emulated(detect_races=True):
        check_ring(
            inputs,
            mesh=ring_mesh(ring_size),
            spec=P(None, "seq"),
            layout=layout,
            schedule=schedule,
            implementation="mosaic_tpu",
            is_causal=True,
        )
        assert not compat.tpu_interpret_found_races()


def test_vmap_and_x64_change_nothing():
    inputs = random_inputs(9, 2, 128, heads=2, kv_heads=1, dtype=jnp.bfloat16)
    segments = jnp.asarray(np.sort(np.random.default_rng(1).integers(0, 3, (2, 128)), axis=1), jnp.int32)

    def grads(query, key, value, d_out, ids):
        return jax.grad(lambda *x: (tpu(*x, segment_ids=ids) * d_out).astype(jnp.float32).sum(), (0, 1, 2))(query, key, value)

    with emulated():
        want = jax.jit(grads)(*inputs, segments)
        rows = [x[:, None] for x in (*inputs, segments)]
        each = jax.jit(jax.vmap(grads))(*rows)
        with jax.enable_x64(True):
            wide = jax.jit(grads)(*inputs, segments)
    assert_close([x[:, 0] for x in each], want, 1e-6)
    jax.tree.map(np.testing.assert_array_equal, wide, want)


@pytest.mark.fast
def test_blocks_are_even_and_tiles_divide_them():
    for query_length, key_length in ((1, 1), (127, 129), (1100, 5000), (4096, 8192)):
        for chip in (None, "v5e", "v5p", "v6e", "tpu7x"):
            forward = tiling.forward_tiling(chip, 128, query_length, key_length, BlockSizes())
            for each in (forward, tiling.backward_tiling(chip, forward)):
                assert each.block_q % each.tile_q == each.block_kv % each.tile_kv == each.block_q % LANES == 0
            assert forward.block_q <= 1024
            assert forward.block_kv % tiling.backward_tiling(chip, forward).block_kv == 0
            blocks = -(-query_length // forward.block_q)
            assert blocks * forward.block_q - query_length < blocks * LANES + LANES
