"""Faults that people met in other ring attention, context parallelism and attention libraries, each as a test of its kind.

What other files already show is not repeated here:
    test_ring.py        every option against dense float64 with random cotangents of out and lse; every ring size; lengths that do
                        not divide; scale before bias; gradients of broadcast biases; bfloat16 error that does not grow with the
                        ring or with the inputs; remote chunks reach gradients; linearity; bitwise repeatability; exact zeros
                        above the diagonal; balanced layouts without a causal mask; grouped heads
    test_sharding.py    gradients inside and outside shard_map; check_vma on and off; Explicit axis types; sharded segment ids
    test_layouts.py     orders and their inverses for every ring size
    test_memory.py      memory of the backward pass
    test_transforms.py  hop counts and what travels; float32 carries; x64; jit, vmap, remat, forward mode and second order; one
                        compile for changing lengths; gradients with every optional argument supplied
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import FLOAT32_TOLERANCE, LAYOUTS, SCHEDULES, check_ring, mesh_of, ring_mesh
from jax.sharding import PartitionSpec

from jax_ring_attention import (
    Positions,
    attention_chunk_stats,
    finalize_chunk_stats,
    from_layout,
    merge_chunk_stats,
    ring_attention,
    to_layout,
)
from jax_ring_attention.testing import (
    Expected,
    assert_close,
    dense_expected,
    earned_tolerances,
    random_inputs,
    relative_error,
    value_and_grads,
    visible_pairs,
)

SEQ = PartitionSpec(None, "seq")
INF = np.inf


def on_ring(ring_size: int, **options: Any):
    """`(query, key, value) -> (out, lse)` in natural order over a ring of `ring_size`."""
    mesh, layout = ring_mesh(ring_size), options.get("layout", "contiguous")

    def attend(query, key, value):
        stored = (to_layout(x, layout, ring_size) for x in (query, key, value))
        both = ring_attention(*stored, mesh=mesh, spec=SEQ, return_residual=True, **options)
        return tuple(from_layout(x, layout, ring_size) for x in both)

    return attend


def assert_equals_dense(have: Any, want: Expected, limits: Expected) -> None:
    for name, got, exact, limit in zip(Expected._fields, have, want, limits, strict=False):
        if exact is not None:
            error = relative_error(np.asarray(got, np.float64), exact)
            assert error <= limit, f"{name}: error {error:.2e}, allowed {limit:.2e}"


# Tokens and rows that see nothing.


@pytest.mark.parametrize("nan_check", [False, True], ids=["plain", "debug_nans"])
@pytest.mark.parametrize(
    ("ring_size", "schedule", "is_causal", "segment_ids"),
    [
        pytest.param(4, "ring", True, [1] * 4 + [-1] * 12, id="three_of_four_ranks"),
        pytest.param(4, "bidirectional", True, [-1] * 8 + [0] * 4 + [-1] * 4, id="all_but_the_third_rank"),
        pytest.param(2, "all_gather", False, [1, 1, 2, 2, -1, -1, -1, -1], id="second_of_two_ranks"),
        pytest.param(2, "ring", False, [-1] * 4 + [3] * 4, id="first_of_two_ranks"),
    ],
)
def test_ranks_that_hold_only_padding_give_zeros_and_finite_gradients(ring_size, schedule, is_causal, segment_ids, nan_check):
    segment_ids = np.array([segment_ids])
    inputs = random_inputs(1, query_length=segment_ids.size)
    d_lse = np.random.default_rng(2).normal(size=inputs.query.shape[:3])
    with jax.debug_nans(nan_check):
        have = check_ring(
            inputs,
            mesh=ring_mesh(ring_size),
            spec=SEQ,
            schedule=schedule,
            is_causal=is_causal,
            segment_ids=segment_ids,
            d_lse=d_lse,
        )
    padding = segment_ids[0] < 0
    for x in (have.out, have.d_query, have.d_key, have.d_value):
        assert np.isfinite(x).all()
        np.testing.assert_array_equal(np.asarray(x)[:, padding], 0)
    np.testing.assert_array_equal(np.asarray(have.lse)[:, padding], -INF)


@pytest.mark.parametrize("nan_check", [False, True], ids=["plain", "debug_nans"])
@pytest.mark.parametrize(("length", "rows", "columns", "ring_size"), [(3, 2, 3, 1), (8, 4, 4, 2)])
def test_rows_that_a_mask_empties_give_zero_and_pass_nothing_to_values(length, rows, columns, ring_size, nan_check):
    mask = np.zeros((1, 1, length, length), bool)
    mask[..., :rows, :columns] = True
    inputs = random_inputs(3, query_length=length)
    d_lse = np.random.default_rng(4).normal(size=inputs.query.shape[:3])
    with jax.debug_nans(nan_check):
        have = check_ring(inputs, mesh=ring_mesh(ring_size), spec=SEQ, mask=mask, d_lse=d_lse)
    np.testing.assert_array_equal(have.out[:, rows:], 0)
    np.testing.assert_array_equal(have.lse[:, rows:], -INF)
    np.testing.assert_array_equal(have.d_query[:, rows:], 0)
    np.testing.assert_array_equal(have.d_value[:, columns:], 0)


def test_bias_of_minus_infinity_equals_a_mask():
    inputs = random_inputs(5, query_length=8)
    rng = np.random.default_rng(6)
    bias = rng.normal(size=(1, 2, 8, 8)).astype(np.float32)
    hidden = np.zeros_like(bias, bool)
    hidden[..., 2, :] = True  # a whole row
    hidden[..., 5, 1:7] = True
    common = {"mesh": ring_mesh(2), "spec": SEQ, "d_lse": rng.normal(size=(1, 8, 2))}
    additive = check_ring(inputs, bias=np.where(hidden, -INF, bias).astype(np.float32), **common)
    masked = check_ring(inputs, bias=bias, mask=~hidden, **common)
    for name, a, b in zip(Expected._fields[:6], additive, masked, strict=False):
        assert relative_error(a, b) <= FLOAT32_TOLERANCE, name
    np.testing.assert_array_equal(np.asarray(additive.d_bias)[hidden], 0)


@pytest.mark.parametrize("lowest", [np.finfo(np.float32).min, -1e9], ids=["finfo_min", "minus_1e9"])
def test_a_row_whose_bias_is_hugely_negative_everywhere_is_finite_and_sees_all_keys_alike(lowest):
    """Not hidden, so unlike -inf: the scores vanish in rounding and every key gets the same weight.

    Its own gradients are finite only (float32 lse cannot hold log(8) beside it, docs/numerics.md); nobody else's suffer.
    """
    inputs = random_inputs(31, query_length=8)
    bias = np.random.default_rng(32).normal(size=(1, 2, 8, 8)).astype(np.float32)
    bias[..., 4, :] = lowest
    want = dense_expected(inputs, bias=bias)

    def attend(query, key, value, bias):
        return ring_attention(query, key, value, bias, mesh=ring_mesh(2), spec=SEQ)

    out, grads = value_and_grads(attend, (*inputs[:3], jnp.asarray(bias)), inputs.d_out)
    assert all(np.isfinite(x).all() for x in (out, *grads))
    np.testing.assert_allclose(out[:, 4], np.asarray(inputs.value).mean(1), rtol=1e-5, atol=1e-6)
    others = np.arange(8) != 4
    assert relative_error(out[:, others], want.out[:, others]) <= FLOAT32_TOLERANCE
    unused = inputs._replace(d_out=inputs.d_out.at[:, 4].set(0))  # as for padding rows, whose output no loss reads
    _, grads = value_and_grads(attend, (*inputs[:3], jnp.asarray(bias)), unused.d_out)
    assert_close(grads, dense_expected(unused, bias=bias)[2:6], FLOAT32_TOLERANCE)


@pytest.mark.parametrize("layout", ["contiguous", "striped"])
def test_a_window_that_empties_whole_chunks_and_blocks_makes_no_nan(layout):
    inputs = random_inputs(7, query_length=16)
    window = {"is_causal": True, "local_window_size": (1, 0)}
    with jax.debug_nans(True):
        check_ring(inputs, mesh=ring_mesh(4), spec=SEQ, layout=layout, block_sizes=4, **window)


def hidden_tokens(kind: str) -> tuple[dict[str, Any], np.ndarray]:
    """Options that hide some of 16 tokens from everybody, and which."""
    hidden = np.zeros(16, bool)
    if kind == "lengths":
        hidden[11:] = True
        return {"query_seq_lengths": np.array([11]), "key_value_seq_lengths": np.array([11])}, hidden
    hidden[[3, 4, 5, 6, 7, 15]] = True
    if kind == "segments":
        return {"is_causal": True, "segment_ids": np.where(hidden, -1, 0)[None]}, hidden
    return {"mask": ~(hidden[:, None] | hidden[None])[None, None]}, hidden


@pytest.mark.fast
@pytest.mark.parametrize("implementation", ["xla", "autodiff"])
@pytest.mark.parametrize(
    ("kind", "schedule"), [("segments", "ring"), ("segments", "all_gather"), ("lengths", "bidirectional"), ("mask", "ring")]
)
def test_nan_and_infinity_in_padding_reach_no_output_and_no_gradient(kind, schedule, implementation):
    options, hidden = hidden_tokens(kind)
    inputs = random_inputs(8, query_length=16)
    attend = on_ring(4, schedule=schedule, implementation=implementation, **options)

    @jax.jit
    def both(query, key, value, d_out, d_lse):
        out, pull = jax.vjp(attend, query, key, value)
        return *out, *pull((d_out, d_lse))

    def stored_in_padding(content):
        fill = jnp.asarray(np.where(hidden, np.asarray(content, np.float32), 0))[None, :, None, None]
        poisoned = [jnp.where(hidden[None, :, None, None], fill, x) for x in inputs[:3]]
        return [np.asarray(x) for x in both(*poisoned, inputs.d_out, jnp.ones((1, 16, 2)))]

    want = stored_in_padding(0)
    assert all(np.isfinite(x).all() for x in (want[0], *want[2:]))
    for content in (np.nan, INF, -INF, np.resize([np.nan, INF, -INF], 16)):
        for have, clean in zip(stored_in_padding(content), want, strict=True):
            np.testing.assert_array_equal(have, clean)


# Scores.


def test_soft_cap_far_below_the_logits_has_finite_exact_gradients():
    inputs = random_inputs(9, query_length=16, head_dim=16)
    inputs = inputs._replace(query=inputs.query * 46)
    segment_ids = np.repeat([0, 1], [9, 7])[None]
    logits = np.einsum("btnh,bsnh->bnts", *(np.asarray(x) for x in inputs[:2])) / 4
    assert np.abs(logits).max() > 100
    seen = visible_pairs(16, 16, is_causal=True, segment_ids=segment_ids)[:, None]
    want = dense_expected(inputs, seen, logits_soft_cap=30.0)
    limits = earned_tolerances(inputs, want, seen, logits_soft_cap=30.0)
    attend = on_ring(4, is_causal=True, segment_ids=segment_ids, logits_soft_cap=30.0)
    (out, lse), grads = value_and_grads(attend, inputs[:3], (inputs.d_out, np.zeros((1, 16, 2))))
    assert_equals_dense((out, lse, *grads), want, limits)


def test_float32_bias_beside_bfloat16_inputs_gets_a_finite_float32_gradient():
    inputs = random_inputs(10, query_length=16, dtype=jnp.bfloat16)
    bias = np.random.default_rng(11).normal(size=(1, 2, 16, 16)).astype(np.float32)
    want = dense_expected(inputs, bias=bias)
    limits = earned_tolerances(inputs, want, bias=bias)

    def attend(query, key, value, bias):
        return ring_attention(query, key, value, bias, mesh=ring_mesh(4), spec=SEQ, return_residual=True)

    cotangents = (inputs.d_out, np.zeros((1, 16, 2)))
    (out, lse), grads = value_and_grads(attend, (*inputs[:3], jnp.asarray(bias)), cotangents)
    assert grads[3].dtype == jnp.float32
    assert_equals_dense((out, lse, *grads), want, limits)


@pytest.mark.parametrize("batch", [1, 2], ids=["bias_1NTS", "bias_BNTS"])
def test_gradient_of_the_bias_alone(batch):
    inputs = random_inputs(12, batch=2, query_length=8)
    bias = np.random.default_rng(13).normal(size=(batch, 2, 8, 8)).astype(np.float32)

    @jax.jit
    def d_bias(bias):
        def loss(bias):
            out = ring_attention(*inputs[:3], bias, mesh=ring_mesh(2), spec=SEQ, is_causal=True)
            return (out * inputs.d_out).sum()

        return jax.grad(loss)(bias)

    want = dense_expected(inputs, visible_pairs(8, 8, is_causal=True)[:, None], bias=bias)
    assert relative_error(d_bias(bias), want.d_bias) <= FLOAT32_TOLERANCE


@pytest.mark.parametrize("mask_shape", ["11TS", "B11S", "BNTS", "1N1S"])
def test_masks_broadcast_along_every_axis(mask_shape):
    sizes = {"1": 1, "B": 2, "N": 3, "T": 9, "S": 7}
    mask = np.random.default_rng(14).random([sizes[letter] for letter in mask_shape]) < 0.6
    inputs = random_inputs(15, batch=2, query_length=9, key_length=7, heads=3)
    check_ring(inputs, mesh=ring_mesh(2), spec=SEQ, mask=mask, layout="zigzag")


@pytest.mark.fast
def test_a_sink_counts_once_however_long_the_ring_and_its_gradient_is_summed_once():
    inputs = random_inputs(16, query_length=16)
    inputs = inputs._replace(query=jnp.zeros_like(inputs.query))
    sinks = np.array([0.3, -1.0], np.float32)
    d_lse = np.random.default_rng(17).normal(size=(1, 16, 2))
    for ring_size in (1, 4):
        have = check_ring(inputs, mesh=ring_mesh(ring_size), spec=SEQ, sinks=sinks, is_causal=True, d_lse=d_lse)
        visible_keys = 1.0 + np.arange(16)
        np.testing.assert_allclose(have.lse[0], np.log(visible_keys[:, None] + np.exp(sinks)), rtol=1e-6)


@pytest.mark.fast
def test_two_chunks_merged_by_hand_differentiate_exactly():
    inputs = random_inputs(18, query_length=8)
    d_lse = np.random.default_rng(19).normal(size=(1, 8, 2))

    def merged(query, key, value):
        halves = [attention_chunk_stats(query, key[:, part], value[:, part]) for part in (slice(0, 5), slice(5, 8))]
        return finalize_chunk_stats(merge_chunk_stats(*halves))

    (out, lse), grads = value_and_grads(merged, inputs[:3], (inputs.d_out, d_lse))
    want = dense_expected(inputs, d_lse=d_lse)
    assert_close((out, lse, *grads), want[:5], FLOAT32_TOLERANCE, Expected._fields)
    narrow = jax.eval_shape(merged, *(x.astype(jnp.bfloat16) for x in inputs[:3]))
    assert [x.dtype for x in narrow] == [jnp.float32] * 2


def test_implementations_agree_to_a_unit_in_the_last_place_of_bfloat16():
    inputs = random_inputs(20, query_length=16, head_dim=16, dtype=jnp.bfloat16)
    cotangents = (inputs.d_out, np.zeros((1, 16, 2)))
    results = []
    for name in ("xla", "autodiff"):
        out, grads = value_and_grads(on_ring(2, is_causal=True, implementation=name), inputs[:3], cotangents)
        assert [x.dtype for x in (out[0], *grads)] == [jnp.bfloat16] * 4
        results.append([np.asarray(x, np.float64) for x in (*out, *grads)])
    unit = float(jnp.finfo(jnp.bfloat16).eps)
    assert_close(*results, unit, Expected._fields)


# What may be seen: alignment, windows, lengths.


@pytest.mark.parametrize("ring_size", [1, 2])
@pytest.mark.parametrize(
    ("length", "key_length", "top_left", "bottom_right"),
    [(2, 4, [1, 2], [3, 4]), (4, 2, [1, 2, 2, 2], [0, 0, 1, 2])],
    ids=["more_keys", "fewer_keys"],
)
def test_causal_is_top_left_aligned_and_positions_make_it_bottom_right(length, key_length, top_left, bottom_right, ring_size):
    inputs = random_inputs(21, query_length=length, key_length=key_length)
    inputs = inputs._replace(query=jnp.zeros_like(inputs.query))
    late = Positions(np.arange(length) + key_length - length, np.arange(key_length))

    @jax.jit
    def both(query, key, value):
        return [on_ring(ring_size, is_causal=True, positions=where)(query, key, value) for where in (None, late)]

    with np.errstate(divide="ignore"):
        for (out, lse), count in zip(both(*inputs[:3]), (top_left, bottom_right), strict=True):
            np.testing.assert_allclose(lse[0], np.log(np.array(count, float))[:, None].repeat(2, 1), rtol=1e-6)
            for row, n in enumerate(count):
                mean = np.asarray(inputs.value)[0, :n].mean(0) if n else np.zeros((2, 8))
                np.testing.assert_allclose(out[0, row], mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_windows_include_both_ends(layout):
    inputs = random_inputs(22, query_length=8)
    still = jnp.zeros_like(inputs.query)

    @jax.jit
    def all_windows(query, key, value):
        left = on_ring(2, is_causal=True, local_window_size=(2, 0), layout=layout)(still, key, value)
        around = on_ring(2, local_window_size=1, layout=layout)(still, key, value)
        itself = on_ring(2, local_window_size=(0, 0), layout=layout)(query, key, value)
        return left, around, itself

    left, around, itself = all_windows(*inputs[:3])
    for (_, lse), count in ((left, [1, 2, 3, 3, 3, 3, 3, 3]), (around, [2, 3, 3, 3, 3, 3, 3, 2])):
        np.testing.assert_allclose(lse[0], np.log(np.array(count, float))[:, None].repeat(2, 1), rtol=1e-6)
    np.testing.assert_array_equal(itself[0], inputs.value)
    self_logit = (np.asarray(inputs.query, float) * np.asarray(inputs.key, float)).sum(-1) / np.sqrt(8)
    assert relative_error(itself[1], self_logit) <= FLOAT32_TOLERANCE


@pytest.mark.parametrize(
    "lengths",
    [{"key_value_seq_lengths": np.array([3, 8])}, {"query_seq_lengths": np.array([3, 8])}],
    ids=["only_keys", "only_queries"],
)
def test_lengths_of_one_side_alone_are_honoured(lengths):
    inputs = random_inputs(23, batch=2, query_length=8)
    have = check_ring(inputs, mesh=ring_mesh(4), spec=SEQ, **lengths)
    if "key_value_seq_lengths" in lengths:
        np.testing.assert_array_equal(have.d_value[0, 3:], 0)
        assert np.all(np.isfinite(have.lse))
    else:
        np.testing.assert_array_equal(have.out[0, 3:], 0)
        assert np.all(np.asarray(have.d_value)[0] != 0)


# Sizes.


@pytest.mark.parametrize("block_sizes", [4, 100, 1, (1, 4), (3, 100)], ids=str)
def test_blocks_of_the_shard_length_larger_and_of_one_token(block_sizes):
    inputs = random_inputs(24, query_length=8)
    check_ring(inputs, mesh=ring_mesh(2), spec=SEQ, is_causal=True, block_sizes=block_sizes)


def test_causal_gradients_where_the_length_is_a_multiple_of_neither_block():
    inputs = random_inputs(25, query_length=128, heads=1)
    check_ring(inputs, mesh=ring_mesh(2), spec=SEQ, is_causal=True, block_sizes=(48, 40))


@pytest.mark.parametrize(("head_dim", "value_dim"), [(80, 80), (96, 64), (192, 128)])
def test_head_dims_of_models_need_no_multiple_of_128_and_values_may_differ(head_dim, value_dim):
    inputs = random_inputs(26, query_length=8, heads=1, head_dim=head_dim, value_dim=value_dim)
    check_ring(inputs, mesh=ring_mesh(2), spec=SEQ, is_causal=True)


def test_a_long_length_that_does_not_divide_keeps_exactly_its_rows():
    """Shapes only: 57826 tokens over eight devices."""
    query = jax.ShapeDtypeStruct((1, 57826, 1, 8), jnp.bfloat16)
    for layout in LAYOUTS:

        def attend(x, layout=layout):
            return ring_attention(x, x, x, is_causal=True, layout=layout, mesh=ring_mesh(8), spec=SEQ, return_residual=True)

        out, lse = jax.eval_shape(attend, query)
        assert (out.shape, lse.shape) == (query.shape, query.shape[:3])


# What the caller sees.


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=lambda x: x.__name__)
@pytest.mark.parametrize("ring_size", [1, 4])
def test_lse_is_batch_length_heads_in_float32(dtype, ring_size):
    query = jax.ShapeDtypeStruct((2, 8, 6, 4), dtype)
    key = jax.ShapeDtypeStruct((2, 8, 3, 4), dtype)
    out, lse = jax.eval_shape(on_ring(ring_size), query, key, key)
    assert (out.shape, out.dtype) == (query.shape, dtype)
    assert (lse.shape, lse.dtype) == ((2, 8, 6), jnp.float32)


@pytest.mark.parametrize(("heads", "kv_heads"), [(28, 7), (4, 1)])
def test_heads_that_the_head_axis_does_not_divide_are_refused_by_name(heads, kv_heads):
    inputs = random_inputs(27, query_length=4, heads=heads, kv_heads=kv_heads)
    mesh = mesh_of(seq=2, tensor=2)
    with pytest.raises(ValueError, match=f"{heads} query heads and {kv_heads} key/value heads.*tensor"):
        ring_attention(*inputs[:3], mesh=mesh, spec=PartitionSpec(None, "seq", "tensor"))


@pytest.mark.fast
def test_heads_before_tokens_are_recognised():
    by_heads = [jnp.zeros((1, 4, length, 8)) for length in (32, 48, 48)]
    with pytest.raises(ValueError, match=r"look like \(B, heads, T, H\); this function takes \(B, T, heads, H\)"):
        ring_attention(*by_heads)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_implementation_that_cannot_do_it_raises_and_never_falls_back(schedule):
    inputs = random_inputs(28, query_length=8)
    common = {"mesh": ring_mesh(2), "spec": SEQ, "schedule": schedule}
    with pytest.raises(NotImplementedError, match=r"'autodiff' refuses.*implementation='xla'"):
        ring_attention(*inputs[:3], implementation="autodiff", block_sizes=4, **common)
    with pytest.raises(ValueError, match=r"'flash' is unknown.*'xla'"):
        ring_attention(*inputs[:3], implementation="flash", **common)
    with pytest.raises(TypeError, match=r"(?s)no argument 'attn_mask'.*Use mask"):
        ring_attention(*inputs[:3], attn_mask=np.ones((8, 8), bool), **common)
    with pytest.raises(TypeError, match="dropout is not supported"):
        ring_attention(*inputs[:3], dropout_rate=0.1, **common)


# Training.


def language_model(tokens: Any, labels: Any, weights: Any, layout: str, ring_size: int):
    """`params -> mean next-token loss` of one attention layer; tokens and labels as stored. One device needs no mesh."""
    options = {} if ring_size == 1 else {"mesh": ring_mesh(ring_size), "spec": SEQ}
    place = to_layout(jnp.arange(tokens.shape[1])[None], layout, ring_size)

    def loss(params):
        x = params["embed"][tokens] + params["place"][place]
        query, key, value = (jnp.einsum("btd,dnh->btnh", x, w) for w in params["qkv"])
        heads = ring_attention(query, key, value, is_causal=True, layout=layout, **options)
        logits = (x + jnp.einsum("btnh,nhd->btd", heads, params["out"])) @ params["embed"].T
        losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)[..., 0]
        return (losses * weights).sum() / weights.sum()

    return loss


@pytest.mark.parametrize(
    ("length", "ring_size", "layout"),
    [
        pytest.param(2, 2, "contiguous", id="one_token_a_device"),
        pytest.param(16, 4, "zigzag", id="zigzag"),
        pytest.param(16, 2, "striped", id="striped"),
    ],
)
def test_labels_shifted_before_the_layout_give_the_loss_and_gradients_of_one_device(length, ring_size, layout):
    rng = np.random.default_rng(29)
    vocabulary, width = 11, 6
    params = {
        "embed": rng.normal(size=(vocabulary, width)),
        "place": rng.normal(size=(length, width)),
        "qkv": 0.5 * rng.normal(size=(3, width, 2, 4)),
        "out": 0.5 * rng.normal(size=(2, 4, width)),
    }
    tokens = rng.integers(0, vocabulary, (2, length)).astype(np.int32)
    labels = np.roll(tokens, -1, axis=1)
    weights = np.ones((2, length), np.float32)
    weights[:, -1] = 0  # the last token has no next one
    with jax.enable_x64(True):
        exact = jax.tree.map(jnp.asarray, params)
        loss, grads = jax.jit(jax.value_and_grad(language_model(tokens, labels, weights, "contiguous", 1)))(exact)
        want = jax.tree.map(np.asarray, (loss, grads))

    @jax.jit
    def both(params):
        stored = [to_layout(jnp.asarray(x), layout, ring_size) for x in (tokens, labels, weights)]
        late = [stored[0], jnp.roll(stored[0], -1, axis=1), stored[2]]
        have = jax.value_and_grad(language_model(*stored, layout, ring_size))(params)
        return have, language_model(*late, layout, ring_size)(params)

    have, late_loss = both(jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params))
    assert_close(have, want, FLOAT32_TOLERANCE)
    if layout != "contiguous":  # what happens to those who store first and shift afterwards
        assert abs(late_loss - want[0]) > 1e-2


def test_debug_nans_finds_nothing_in_an_eager_call_with_everything_hidden_somewhere():
    inputs = random_inputs(30, query_length=8)
    mask = np.tril(np.ones((8, 8), bool), -1)[None, None]  # row 0 sees nothing
    options = {"segment_ids": np.array([[0, 0, 0, 1, 1, 1, -1, -1]]), "mask": mask, "is_causal": True}
    with jax.debug_nans(True):
        out, pull = jax.vjp(lambda *x: ring_attention(*x, **options), *inputs[:3])
        grads = pull(inputs.d_out)
    seen = visible_pairs(8, 8, is_causal=True, segment_ids=options["segment_ids"])[:, None] & mask
    want = dense_expected(inputs, seen)
    assert_close((out, *grads), (want.out, *want[2:5]), FLOAT32_TOLERANCE)
