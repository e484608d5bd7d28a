"""The ring against dense float64 attention: output, lse and every gradient, over a pairwise covering of all options."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import FLOAT32_TOLERANCE, LAYOUTS, RING_SIZES, SCHEDULES, check_ring, ring_mesh
from jax.sharding import PartitionSpec

from jax_ring_attention import Positions, SegmentIds, from_layout, ring_attention, to_layout
from jax_ring_attention.testing import (
    AttentionInputs,
    Expected,
    assert_close,
    assert_matches_dense,
    dense_expected,
    random_inputs,
    relative_error,
    value_and_grads,
    visible_pairs,
)

SEQ = PartitionSpec(None, "seq")
BATCH = 2

# Every value of every factor meets every value of every other factor in at least one case.
FACTORS: dict[str, tuple[Any, ...]] = {
    "visible": ("full", "causal", "window", "causal_window", "segments", "permuted", "lengths_and_mask"),
    "shape": ("mha", "gqa", "mqa_odd_dims", "fewer_keys", "more_keys_wide_value"),
    "bias": ("no_bias", "bias_11TS", "bias_B11S", "bias_BNTS", "bias_1N1S", "bias_1NTS"),
    "ring_size": RING_SIZES,
    "score": ("plain", "scale", "soft_cap", "sinks"),
    "layout": LAYOUTS,
    "schedule": SCHEDULES,
    "tail": ("even", "ragged"),
}


def covering_cases(factors: dict[str, tuple[Any, ...]], seed: int = 0) -> list[dict[str, Any]]:
    """A small set of cases in which every pair of values of two factors occurs; greedy, and the same on every run."""
    rng = np.random.default_rng(seed)
    names = list(factors)
    missing = {((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in factors[a] for y in factors[b]}
    cases = []
    while missing:
        best: dict[str, Any] = {}
        best_gain: set = set()
        first = min(missing, key=str)
        for _ in range(200):
            case = {name: values[rng.integers(len(values))] for name, values in factors.items()}
            case.update(dict(first))
            gain = set(itertools.combinations(case.items(), 2)) & missing
            if len(gain) > len(best_gain):
                best, best_gain = case, gain
        cases.append(best)
        missing -= best_gain
    return cases


def case_id(case: dict[str, Any]) -> str:
    return "-".join(f"P{x}" if name == "ring_size" else str(x) for name, x in case.items())


CASES = covering_cases(FACTORS)


def inputs_of(shape: str, length: int, seed: int) -> AttentionInputs:
    sizes: dict[str, dict[str, int]] = {
        "mha": {"heads": 2},
        "gqa": {"heads": 4, "kv_heads": 2},
        "mqa_odd_dims": {"heads": 3, "kv_heads": 1, "head_dim": 7, "value_dim": 5},
        "fewer_keys": {"heads": 4, "kv_heads": 2, "key_length": length - 5},
        "more_keys_wide_value": {"heads": 2, "key_length": length + 6, "value_dim": 13},
    }
    return random_inputs(seed, batch=BATCH, query_length=length, **sizes[shape])


def packed_documents(rng: np.random.Generator, length: int) -> np.ndarray:
    """Sorted document ids with a padded tail, different in every row."""
    ids = np.sort(rng.integers(0, 3, (BATCH, length)), axis=1)
    ids[0, length - 3 :] = -1
    return ids


def visibility(visible: str, rng: np.random.Generator, length: int, key_length: int) -> dict[str, Any]:
    both = (length, key_length)
    if visible == "segments":
        query, key = (packed_documents(rng, n) for n in both)
        return {"is_causal": True, "segment_ids": query if length == key_length else SegmentIds(query, key)}
    if visible == "permuted":
        query, key = (np.stack([rng.permutation(n) for _ in range(BATCH)]) for n in both)
        return {"local_window_size": (4, None), "positions": query if length == key_length else Positions(query, key)}
    return {
        "full": {},
        "causal": {"is_causal": True},
        "window": {"local_window_size": (3, 2)},
        "causal_window": {"is_causal": True, "local_window_size": 5},
        "lengths_and_mask": {
            "local_window_size": (None, 9),
            "query_seq_lengths": np.array([length - 2, 3]),
            "key_value_seq_lengths": np.array([2, key_length - 1]),
            "mask": rng.random((BATCH, 1, length, key_length)) < 0.6,
        },
    }[visible]


def bias_of(bias: str, rng: np.random.Generator, heads: int, length: int, key_length: int) -> np.ndarray | None:
    if bias == "no_bias":
        return None
    sizes = {"B": BATCH, "N": heads, "T": length, "S": key_length, "1": 1}
    return rng.normal(size=[sizes[letter] for letter in bias.removeprefix("bias_")]).astype(np.float32)


def check_two_sided(
    inputs: AttentionInputs, mesh, layout: str, d_lse: Any, sides: dict[str, Any], dense_options: dict, **options: Any
) -> None:
    """As `cases.check_ring`, where query and key have segment ids or positions of different lengths."""
    shards = mesh.shape["seq"]
    length, key_length = inputs.query.shape[1], inputs.key.shape[1]
    reach = {name: options[name] for name in ("is_causal", "local_window_size") if name in options}
    seen = visible_pairs(length, key_length, batch=BATCH, **sides, **reach)[:, None]
    extra = {name: options.pop(name) for name in ("bias", "sinks") if options.get(name) is not None}
    want = dense_expected(inputs, seen, d_lse=d_lse, **extra, **dense_options)
    stored = {name: type(pair)(*(to_layout(x, layout, shards, -1) for x in pair)) for name, pair in sides.items()}

    def attend(query, key, value, extra):
        if (bias := extra.get("bias")) is not None:
            for axis in (2, 3):
                bias = bias if bias.shape[axis] == 1 else to_layout(bias, layout, shards, axis)
        query, key, value = (to_layout(x, layout, shards) for x in (query, key, value))
        more = {"bias": bias, "sinks": extra.get("sinks"), "layout": layout, "mesh": mesh, "spec": SEQ, **stored}
        out, lse = ring_attention(query, key, value, return_residual=True, **more, **options)
        return from_layout(out, layout, shards), from_layout(lse, layout, shards)

    (out, lse), grads = value_and_grads(attend, (*inputs[:3], extra), (inputs.d_out, d_lse))
    have = Expected(out, lse, *grads[:3], grads[3].get("bias"), grads[3].get("sinks"))
    names = [name for name, x in zip(Expected._fields, want, strict=True) if x is not None]
    assert_close(have, want, FLOAT32_TOLERANCE, names)


def test_covering_cases_contain_every_pair_of_options():
    names = list(FACTORS)
    for a, b in itertools.combinations(names, 2):
        assert {(case[a], case[b]) for case in CASES} == set(itertools.product(FACTORS[a], FACTORS[b]))


FAST = {0, 7, 14, 21, 28, 35}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case_id(case), marks=[pytest.mark.fast] * (i in FAST)) for i, case in enumerate(CASES)],
)
def test_output_lse_and_all_gradients_equal_dense(case):
    ring_size, score = case["ring_size"], case["score"]
    seed = 1 + CASES.index(case)
    rng = np.random.default_rng(seed)
    length = 19 if case["tail"] == "ragged" else 30 if ring_size in (3, 5) else 16
    inputs = inputs_of(case["shape"], length, seed)
    key_length, heads = inputs.key.shape[1], inputs.query.shape[2]
    options = visibility(case["visible"], rng, length, key_length)
    if (bias := bias_of(case["bias"], rng, heads, length, key_length)) is not None:
        options["bias"] = bias
    dense_options: dict[str, Any] = {}
    if score == "scale":
        options["scale"] = dense_options["scale"] = 0.3
    if score == "soft_cap":
        options["logits_soft_cap"] = dense_options["logits_soft_cap"] = 1.5
    if score == "sinks":
        options["sinks"] = rng.normal(size=heads).astype(np.float32)
    options.update(schedule=case["schedule"], layout=case["layout"], mesh=ring_mesh(ring_size), block_sizes=(2, 3))
    options.update(d_lse=rng.normal(size=inputs.query.shape[:3]), dense_options=dense_options)
    pairs = {name: options.pop(name) for name in ("segment_ids", "positions") if isinstance(options.get(name), tuple)}
    if pairs:
        check_two_sided(inputs, sides=pairs, **options)
    else:
        check_ring(inputs, spec=SEQ, **options)


@pytest.mark.parametrize(
    ("length", "ring_size", "layout"),
    [(10, 4, "contiguous"), (2, 3, "contiguous"), (7, 2, "zigzag"), (11, 3, "zigzag"), (1, 4, "zigzag"), (9, 8, "striped")],
)
def test_lengths_that_the_ring_does_not_divide_give_exactly_their_own_rows(length, ring_size, layout):
    inputs = random_inputs(length, query_length=length)
    have = check_ring(inputs, mesh=ring_mesh(ring_size), spec=SEQ, layout=layout, is_causal=True)
    assert have.out.shape == inputs.query.shape
    assert have.lse.shape == (1, length, 2)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ring_sizes_that_are_no_power_of_two_or_prime(schedule):
    """Six: neither; the matrix above has 1, 2, 3, 4, 5 and 8."""
    inputs = random_inputs(6, query_length=24)
    check_ring(inputs, mesh=ring_mesh(6), spec=SEQ, schedule=schedule, layout="zigzag", is_causal=True)


@pytest.mark.parametrize("spread", [1, 5], ids=["x1", "x5"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_narrow_dtypes_err_no_more_than_earned(dtype, spread):
    inputs = random_inputs(3, 2, 24, heads=4, kv_heads=2, head_dim=16, dtype=dtype, spread=spread)

    def attend(query, key, value):
        options = {"is_causal": True, "layout": "zigzag", "return_residual": True, "block_sizes": 2}
        out, lse = ring_attention(query, key, value, mesh=ring_mesh(4), spec=SEQ, **options)
        assert (out.dtype, lse.dtype) == (dtype, jnp.float32)
        return out, lse

    seen = visible_pairs(24, 24, batch=2, is_causal=True)[:, None]
    assert_matches_dense(attend, inputs, seen, layout="zigzag", num_shards=4)


def test_bfloat16_error_does_not_grow_with_the_ring():
    cases = [random_inputs(5, 1, 256, heads=4, head_dim=64, dtype=jnp.bfloat16, spread=spread) for spread in (1, 5)]
    wants = [dense_expected(inputs) for inputs in cases]
    errors = {}
    for ring_size in (1, 8):
        mesh = ring_mesh(ring_size)

        @jax.jit
        def both(query, key, value, d_out, mesh=mesh):
            out, pull = jax.vjp(functools.partial(ring_attention, mesh=mesh, spec=SEQ), query, key, value)
            return out, pull(d_out)[0]

        for spread, inputs, want in zip((1, 5), cases, wants, strict=True):
            out, d_query = (np.asarray(x, np.float64) for x in both(*inputs))
            for name, have, exact in (("out", out, want.out), ("d_query", d_query, want.d_query)):
                errors[ring_size, spread, name, "norm"] = relative_error(have, exact)
                errors[ring_size, spread, name, "largest"] = float(np.abs(have - exact).max())
    for (ring_size, *what), error in errors.items():
        assert error <= 1.5 * errors[1, *what], (ring_size, *what, error, errors[1, *what])


@pytest.mark.fast
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_hot_values_read_out_probabilities_that_are_exactly_zero_above_the_diagonal(layout):
    length, ring_size = 16, 4
    inputs = random_inputs(7, query_length=length)
    one_hot = jnp.broadcast_to(jnp.eye(length)[None, :, None], (1, length, 2, length))

    @jax.jit
    def probabilities(query, key, value):
        query, key, value = (to_layout(x, layout, ring_size) for x in (query, key, value))
        out = ring_attention(
            query, key, value, is_causal=True, layout=layout, mesh=ring_mesh(ring_size), spec=SEQ, block_sizes=(1, 3)
        )
        return from_layout(out, layout, ring_size)

    have = np.moveaxis(np.asarray(probabilities(inputs.query, inputs.key, one_hot)), 1, 2)  # (B, N, T, S)
    above = np.triu(np.ones((length, length), bool), 1)
    assert np.all(have[:, :, above] == 0)
    assert np.all(have[:, :, ~above] > 0)
    want = dense_expected(inputs._replace(value=one_hot, d_out=jnp.zeros_like(one_hot)), ~above).out
    assert relative_error(have, np.moveaxis(want, 1, 2)) <= FLOAT32_TOLERANCE


def make_gradients(ring_size: int, **options: Any):
    """(query, key, value, d_out, d_lse) to output, lse and the three gradients, compiled once for many values."""
    mesh = ring_mesh(ring_size)

    def attend(*arrays):
        return ring_attention(*arrays, mesh=mesh, spec=SEQ, return_residual=True, **options)

    @jax.jit
    def gradients(query, key, value, d_out, d_lse):
        both, pull = jax.vjp(attend, query, key, value)
        return *both, *pull((d_out, d_lse))

    return gradients


@pytest.mark.fast
def test_every_remote_value_chunk_reaches_the_gradient_of_the_query():
    """A backward pass that keeps using the chunk of its first hop would not notice the others."""
    inputs = random_inputs(8, query_length=12)
    gradients = make_gradients(3)
    d_lse = jnp.zeros((1, 12, 2))
    base = gradients(*inputs, d_lse)
    for chunk in range(3):
        moved = inputs._replace(value=inputs.value.at[:, 4 * chunk : 4 * chunk + 4].add(1.0 + jnp.arange(8.0)))
        have = gradients(*moved, d_lse)
        want = dense_expected(moved)
        for rank in range(3):
            rows = slice(4 * rank, 4 * rank + 4)
            assert relative_error(have[2][:, rows], base[2][:, rows]) > 1e-2
            for got, exact in zip(have[2:], want[2:5], strict=True):
                assert relative_error(got[:, rows], exact[:, rows]) <= FLOAT32_TOLERANCE


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_are_linear_in_the_cotangents(schedule):
    inputs = random_inputs(9, query_length=16)
    gradients = make_gradients(4, is_causal=True, schedule=schedule)
    rng = np.random.default_rng(10)
    d_out, d_lse = inputs.d_out, jnp.asarray(rng.normal(size=(1, 16, 2)), jnp.float32)
    other = jnp.asarray(rng.normal(size=d_out.shape), jnp.float32)
    nothing = jnp.zeros_like(d_out), jnp.zeros_like(d_lse)

    def grads(d_out, d_lse):
        return [np.asarray(x) for x in gradients(*inputs[:3], d_out, d_lse)[2:]]

    once = grads(d_out, d_lse)
    for zero in grads(*nothing):
        np.testing.assert_array_equal(zero, 0)
    for fourfold, single in zip(grads(4 * d_out, 4 * d_lse), once, strict=True):
        np.testing.assert_array_equal(fourfold, 4 * single)  # a power of two scales every float exactly
    apart = [grads(d_out, nothing[1]), grads(nothing[0], d_lse), grads(other, nothing[1])]
    together = grads(d_out - 3 * other, d_lse)
    for sum_of_parts, a, b, c in zip(together, *apart, strict=True):
        assert relative_error(sum_of_parts, a + b - 3.0 * c) <= FLOAT32_TOLERANCE


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_thirty_runs_are_bitwise_equal(schedule):
    inputs = random_inputs(11, query_length=16, dtype=jnp.bfloat16)
    gradients = make_gradients(4, is_causal=True, schedule=schedule)
    d_lse = jnp.ones((1, 16, 2))
    first = [np.asarray(x, np.float32) for x in gradients(*inputs, d_lse)]
    for _ in range(29):
        for a, b in zip(first, gradients(*inputs, d_lse), strict=True):
            np.testing.assert_array_equal(a, np.asarray(b, np.float32))
