"""The measuring instruments themselves: the dense reference and the comparisons, which must be able to fail."""

from __future__ import annotations

import doctest
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import FLOAT32_TOLERANCE, ring_mesh
from jax.sharding import AxisType, PartitionSpec

import jax_ring_attention.testing
from jax_ring_attention import from_layout, ring_attention, to_layout
from jax_ring_attention.testing import (
    AttentionInputs,
    Expected,
    assert_close,
    assert_matches_dense,
    cpu_mesh,
    dense_attention,
    dense_expected,
    earned_tolerances,
    emulated_devices,
    random_inputs,
    relative_error,
    value_and_grads,
    visible_pairs,
)


@pytest.mark.fast
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"is_causal": True, "local_window_size": (2, 0)},
        {"local_window_size": 1},
        {"scale": 0.3, "bias": True},
        {"key_value_seq_lengths": [3, 8]},
        {"mask": True},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_dense_reference_equals_jax_nn_for_ordinary_inputs(options):
    inputs = random_inputs(0, batch=2, query_length=8, heads=4, kv_heads=2, value_dim=8)
    rng = np.random.default_rng(1)
    bias = jnp.asarray(rng.normal(size=(2, 4, 8, 8)), jnp.float32) if options.get("bias") else None
    mask = (rng.random((2, 4, 8, 8)) < 0.5) | np.eye(8, dtype=bool) if options.get("mask") else None
    theirs = {k: v for k, v in options.items() if k not in ("bias", "mask")}
    if lengths := theirs.pop("key_value_seq_lengths", None):
        theirs |= {"key_value_seq_lengths": jnp.asarray(lengths), "query_seq_lengths": jnp.asarray([8, 8])}
    ours = {k: v for k, v in options.items() if k in ("is_causal", "local_window_size", "key_value_seq_lengths")}
    seen = visible_pairs(8, 8, batch=2, **ours)[:, None]
    seen = seen if mask is None else seen & mask
    want = dense_expected(inputs, seen, bias=bias, scale=options.get("scale"))

    def attend(query, key, value):
        return jax.nn.dot_product_attention(query, key, value, bias=bias, mask=mask, **theirs)

    out, grads = value_and_grads(attend, inputs[:3], inputs.d_out)
    assert_close((out, *grads), (want.out, *want[2:5]), FLOAT32_TOLERANCE)


@pytest.mark.fast
def test_dense_reference_by_hand():
    query = jnp.zeros((1, 2, 1, 4))
    value = jnp.asarray([1.0, 2.0, 6.0]).reshape(1, 3, 1, 1)
    seen = np.array([[True, True, False], [False, False, False]])
    out, lse = dense_attention(query, jnp.ones((1, 3, 1, 4)), value, seen)
    np.testing.assert_allclose(out.ravel(), [1.5, 0], rtol=1e-6)
    np.testing.assert_allclose(lse.ravel(), [np.log(2), -np.inf], rtol=1e-6)
    out, lse = dense_attention(query, jnp.ones((1, 3, 1, 4)), value, seen, sinks=jnp.asarray([np.log(4.0)]))
    np.testing.assert_allclose(out.ravel(), [0.5, 0], rtol=1e-6)
    np.testing.assert_allclose(lse.ravel(), np.log([6, 4]), rtol=1e-6)


def test_dense_reference_ignores_what_nobody_sees():
    inputs = random_inputs(2, query_length=4, key_length=6)
    seen = np.arange(6) < 4
    poisoned = inputs._replace(
        key=inputs.key.at[:, 4].set(jnp.nan), value=inputs.value.at[:, 5].set(jnp.inf).at[:, 4].set(jnp.nan)
    )
    clean = dense_expected(inputs, seen)
    for have, want in zip(dense_expected(poisoned, seen)[:5], clean[:5], strict=True):
        np.testing.assert_array_equal(have, want)


def test_dense_reference_in_double_precision_whatever_the_setting():
    inputs = random_inputs(3, query_length=4)
    expected = dense_expected(inputs)
    assert {x.dtype for x in expected if x is not None} == {np.dtype(np.float64)}
    assert dense_expected(inputs, dtype=np.float32).out.dtype == np.float32
    assert expected.d_bias is None
    assert expected.d_sinks is None


def test_dense_gradients_equal_finite_differences():
    inputs = random_inputs(4, query_length=3, key_length=4, heads=2, kv_heads=1, head_dim=2)
    seen = visible_pairs(3, 4, is_causal=True)[:, None]
    rng = np.random.default_rng(5)
    bias, sinks, d_lse = rng.normal(size=(1, 2, 3, 4)), rng.normal(size=2), rng.normal(size=(1, 3, 2))
    options = {"logits_soft_cap": 2.0, "scale": 0.7}
    expected = dense_expected(inputs, seen, bias=bias, sinks=sinks, d_lse=d_lse, **options)
    with jax.enable_x64(True):
        arrays = [np.asarray(x, np.float64) for x in (*inputs[:3], bias, sinks)]

        @jax.jit
        def loss(arrays):
            out, lse = dense_attention(*arrays[:3], seen, bias=arrays[3], sinks=arrays[4], **options)
            return (out * np.asarray(inputs.d_out, np.float64)).sum() + (lse * d_lse).sum()

        for i, grad in enumerate(expected[2:]):
            step = [np.zeros_like(x) for x in arrays]
            step[i] = rng.normal(size=arrays[i].shape)
            ahead, behind = (loss([x + sign * 1e-6 * s for x, s in zip(arrays, step, strict=True)]) for sign in (1, -1))
            np.testing.assert_allclose((grad * step[i]).sum(), (ahead - behind) / 2e-6, rtol=1e-7)


@pytest.mark.fast
def test_visible_pairs_by_hand():
    def rows(**options):
        return visible_pairs(3, 3, **options)[0].astype(int).tolist()

    assert rows() == [[1, 1, 1]] * 3
    assert rows(is_causal=True) == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert rows(local_window_size=(1, 0)) == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    assert rows(local_window_size=(None, 1)) == [[1, 1, 0], [1, 1, 1], [1, 1, 1]]
    assert rows(local_window_size=0) == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert rows(segment_ids=[2, 2, -1]) == [[1, 1, 0], [1, 1, 0], [0, 0, 0]]
    assert rows(positions=[2, 0, 1], is_causal=True) == [[1, 1, 1], [0, 1, 0], [0, 1, 1]]
    assert rows(key_value_seq_lengths=[1]) == [[1, 0, 0]] * 3
    assert rows(query_seq_lengths=[1]) == [[1, 1, 1], [0, 0, 0], [0, 0, 0]]
    assert rows(natural=([2, 0, 1], [2, 0, 1]), key_value_seq_lengths=[1]) == [[0, 1, 0]] * 3


@pytest.mark.fast
def test_relative_error_detects_nan_and_misplaced_infinities():
    want = np.array([1.0, 2.0, -np.inf])
    assert relative_error(want, want) == 0
    assert relative_error(np.array([1.0, np.nan, -np.inf]), want) == np.inf
    assert relative_error(np.array([1.0, 2.0, np.nan]), want) == np.inf
    assert relative_error(np.array([1.0, 2.0, np.inf]), want) == np.inf
    assert relative_error(np.array([1.0, -np.inf, -np.inf]), want) == np.inf
    assert relative_error(np.array([-np.inf, 2.0, 1.0]), want) == np.inf
    assert relative_error(np.array([1.0, 2.0, -3e38]), want) == np.inf
    assert relative_error(np.array([np.nan]), np.array([np.nan])) == np.inf


@pytest.mark.fast
def test_relative_error_is_relative_to_the_norm_of_what_is_wanted():
    assert relative_error([3.0, 4.5], [3.0, 4.0]) == pytest.approx(0.1)
    assert relative_error([300.0, 450.0], [300.0, 400.0]) == pytest.approx(0.1)
    assert relative_error([0.0, 1e-3], [0.0, 0.0]) == pytest.approx(1e-3)  # nothing to be relative to
    assert relative_error(jnp.asarray([1.0], jnp.bfloat16), [1.0]) == 0
    with pytest.raises(AssertionError, match=r"shapes differ: have \(1, 2\), want \(2,\)"):
        relative_error(np.ones((1, 2)), np.ones(2))


@pytest.mark.fast
def test_assert_close_fails_when_it_must():
    want = (np.ones(4), {"deep": np.array([2.0, -np.inf])})
    assert_close(want, want, 0.0)
    assert_close((np.full(4, 1.009), want[1]), want, 0.01)
    for wrong in (
        (np.full(4, 1.011), want[1]),
        (np.ones(4), {"deep": np.array([2.1, -np.inf])}),
        (np.ones(4), {"deep": np.array([2.0, 5.0])}),
        (np.full(4, np.nan), want[1]),
        (np.ones(3), want[1]),
        (np.ones(4),),
        (),
    ):
        with pytest.raises(AssertionError):
            assert_close(wrong, want, 0.01)
    with pytest.raises(AssertionError, match=r"out 0.00e\+00, lse 1.00e\+00\] exceed 1.0e-02"):
        assert_close((np.ones(2), np.full(2, 2.0)), (np.ones(2), np.ones(2)), 0.01, ["out", "lse"])


def test_a_tolerance_of_nan_or_negative_passes_nothing():
    for tolerance in (float("nan"), -1.0):
        with pytest.raises(AssertionError, match="exceed"):
            assert_close(np.ones(2), np.ones(2), tolerance)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_earned_tolerances_allow_the_dtype_and_no_more(dtype):
    inputs = random_inputs(6, query_length=16, dtype=dtype)
    seen = visible_pairs(16, 16, is_causal=True)[:, None]
    expected = dense_expected(inputs, seen)
    allowed = earned_tolerances(inputs, expected, seen)
    unit = float(jnp.finfo(dtype).eps)
    for name in ("out", "lse", "d_query", "d_key", "d_value"):
        assert unit / 2 <= getattr(allowed, name) < 10 * unit
    assert allowed.d_bias is None
    # Had the reference forgotten the mask, nothing would pass.
    unmasked = dense_expected(inputs)
    assert relative_error(unmasked.out, expected.out) > 10 * allowed.out


def test_random_inputs_fill_in_sizes_and_repeat():
    a = random_inputs(7, batch=2, query_length=5, key_length=3, heads=4, kv_heads=2, head_dim=6, value_dim=7)
    assert [x.shape for x in a] == [(2, 5, 4, 6), (2, 3, 2, 6), (2, 3, 2, 7), (2, 5, 4, 7)]
    b = random_inputs(7, batch=2, query_length=5, key_length=3, heads=4, kv_heads=2, head_dim=6, value_dim=7)
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)
    wide = random_inputs(8, query_length=512, spread=5.0)
    assert isinstance(wide, AttentionInputs)
    assert float(jnp.std(wide.query)) == pytest.approx(5, rel=0.05)
    assert float(jnp.std(wide.d_out)) == pytest.approx(1, rel=0.05)


def test_value_and_grads_pulls_the_given_cotangents_back():
    def double(x, y):
        return 2 * x, x * y

    (a, b), (dx, dy) = value_and_grads(double, (jnp.ones(3), jnp.full(3, 5.0)), (np.arange(3.0), np.ones(3)))
    np.testing.assert_array_equal(a, [2, 2, 2])
    np.testing.assert_array_equal(b, [5, 5, 5])
    np.testing.assert_array_equal(dx, 2 * np.arange(3) + 5)
    np.testing.assert_array_equal(dy, [1, 1, 1])
    assert Expected._fields[:2] == ("out", "lse")


# Emulated devices.


@pytest.mark.fast
def test_the_example_of_the_testing_module_runs():
    failed, tried = doctest.testmod(jax_ring_attention.testing)
    assert (failed, tried) == (0, 9)


@pytest.mark.fast
def test_meshes_of_emulated_devices():
    assert emulated_devices(3) == jax.devices()[:3]
    mesh = cpu_mesh(data=2, seq=4)
    assert dict(mesh.shape) == {"data": 2, "seq": 4}
    assert mesh.axis_types == (AxisType.Auto,) * 2
    assert mesh.devices.ravel().tolist() == jax.devices()
    assert cpu_mesh(AxisType.Explicit, seq=3).axis_types == (AxisType.Explicit,)


@pytest.mark.fast
def test_emulated_devices_refuse_what_they_cannot_give():
    with pytest.raises(ValueError, match=r"9 emulated CPU devices are wanted but JAX is already up with 8.*conftest\.py"):
        cpu_mesh(data=3, seq=3)
    with pytest.raises(ValueError, match="count=0 must be at least 1"):
        emulated_devices(0)
    for sizes in ({}, {"seq": 0}, {"data": -2, "seq": -2}):
        with pytest.raises(ValueError, match="axis sizes"):
            cpu_mesh(**sizes)


FRESH = """
from jax_ring_attention.testing import cpu_mesh, emulated_devices
import jax
assert jax.config.jax_num_cpu_devices < 1
print(cpu_mesh(seq=5).size, len(emulated_devices(2)), len(jax.devices("cpu")))
"""


def test_a_fresh_process_gets_the_devices_that_the_first_call_wants():
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["5", "2", "5"], done.stderr


# The whole comparison.


CAUSAL = visible_pairs(16, 16, is_causal=True)[:, None]
STRIPED = {"layout": "striped", "num_shards": 4}


def causal_ring(query, key, value, **options):
    mesh, spec = ring_mesh(4), PartitionSpec(None, "seq")
    return ring_attention(query, key, value, is_causal=True, layout="striped", mesh=mesh, spec=spec, **options)


def causal_striped(query, key, value):
    """`(out, lse)` of the striped order, without a ring: it compiles faster."""
    natural = (from_layout(x, "striped", 4) for x in (query, key, value))
    return tuple(to_layout(x, "striped", 4) for x in dense_attention(*natural, CAUSAL, dtype=jnp.float32))


def causal_out(*arrays):
    return causal_striped(*arrays)[0]


def scaled_gradient(x, factor):
    """x, but its gradient comes back multiplied by `factor`."""
    return jax.lax.stop_gradient(x) * (1 - factor) + x * factor


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_ring_attention_matches_dense_with_all_that_is_differentiable(dtype):
    inputs = random_inputs(9, 2, 16, heads=4, kv_heads=2, value_dim=6, dtype=dtype)
    rng = np.random.default_rng(10)
    bias, sinks = rng.normal(size=(1, 4, 1, 16)).astype(np.float32), rng.normal(size=4).astype(np.float32)

    def with_lse(query, key, value, bias, sinks):
        return causal_ring(query, key, value, bias=bias, sinks=sinks, scale=0.3, return_residual=True)

    errors = assert_matches_dense(with_lse, inputs, CAUSAL, bias=bias, sinks=sinks, scale=0.3, **STRIPED)
    assert all(0 < x < (1e-6 if dtype == jnp.float32 else 0.1) for x in errors)


@pytest.mark.fast
def test_matching_dense_fails_for_each_thing_that_is_wrong():
    inputs = random_inputs(11, query_length=16)
    wrong = {
        "out": lambda *x: causal_out(*x) * (1 + 1e-5),
        "lse": lambda *x: (lambda out, lse: (out, lse + 1e-4))(*causal_striped(*x)),
        "d_query": lambda query, *x: causal_out(scaled_gradient(query, 1.001), *x),
        "d_key": lambda query, key, value: causal_out(query, scaled_gradient(key, 1.001), value),
        "d_value": lambda query, key, value: causal_out(query, key, scaled_gradient(value, 1.001)),
        "d_query ": lambda *x: (lambda out, lse: (out, scaled_gradient(lse, 1.01)))(*causal_striped(*x)),
    }
    assert None not in assert_matches_dense(causal_striped, inputs, CAUSAL, **STRIPED)[:5]
    errors = assert_matches_dense(causal_out, inputs, CAUSAL, **STRIPED)
    assert [name for name, x in zip(Expected._fields, errors, strict=True) if x is None] == ["lse", "d_bias", "d_sinks"]
    for name, attention in wrong.items():
        with pytest.raises(AssertionError, match=rf"{name.strip()} \d\.\d+e-0[1-5] \(allowed"):
            assert_matches_dense(attention, inputs, CAUSAL, **STRIPED)
    with pytest.raises(AssertionError):  # the mask
        assert_matches_dense(causal_out, inputs, **STRIPED)
    with pytest.raises(AssertionError):  # the order
        assert_matches_dense(causal_out, inputs, CAUSAL)


@pytest.mark.fast
def test_matching_dense_uses_the_cotangent_and_the_tolerance_that_are_given():
    inputs = random_inputs(12, query_length=16)
    attention = lambda *x: causal_out(*x) * 1.001  # noqa: E731
    errors = assert_matches_dense(attention, inputs, CAUSAL, tolerance=2e-3, **STRIPED)
    assert errors.out == pytest.approx(1e-3, rel=1e-2)
    with pytest.raises(AssertionError, match=r"allowed 5.0e-04"):
        assert_matches_dense(attention, inputs, CAUSAL, tolerance=5e-4, **STRIPED)
    with pytest.raises(AssertionError):
        assert_matches_dense(attention, inputs, CAUSAL, tolerance=float("nan"), **STRIPED)
    with pytest.raises(ValueError, match="attention returns out alone"):
        assert_matches_dense(causal_out, inputs, CAUSAL, d_lse=np.ones((1, 16, 2)), **STRIPED)

    def forgets_lse(*arrays):
        out, lse = causal_striped(*arrays)
        return out, jax.lax.stop_gradient(lse)

    assert_matches_dense(forgets_lse, inputs, CAUSAL, d_lse=np.zeros((1, 16, 2)), **STRIPED)
    with pytest.raises(AssertionError):
        assert_matches_dense(forgets_lse, inputs, CAUSAL, **STRIPED)
