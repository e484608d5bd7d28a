"""The chunk contract: statistics and gradients of one chunk, and lists of chunks folded on one device."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import FLOAT32_TOLERANCE, ring_mesh
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import PartitionSpec as P

from jax_ring_attention import (
    Positions,
    SegmentIds,
    attention_chunk_grads,
    attention_chunk_stats,
    compat,
    finalize_chunk_stats,
    merge_chunk_stats,
    ring_attention,
)
from jax_ring_attention.kernels.xla import XlaKernel
from jax_ring_attention.testing import (
    AttentionInputs,
    Expected,
    assert_close,
    dense_expected,
    earned_tolerances,
    random_inputs,
    relative_error,
    value_and_grads,
    visible_pairs,
)

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["xla", "autodiff"])
WITHOUT_DENSE_ARRAYS = pytest.mark.parametrize("implementation", ["xla", "autodiff", "mosaic_tpu"])
B, T, S, N, K = 2, 9, 11, 4, 2


def attend(query, key, value, bias=None, **options):
    return finalize_chunk_stats(attention_chunk_stats(query, key, value, bias, **options))


def check_chunk(
    inputs: AttentionInputs,
    seen: Any = None,
    *,
    bias: Any = None,
    dense_options: dict | None = None,
    tolerance: float = FLOAT32_TOLERANCE,
    **options: Any,
) -> None:
    """Output, lse and gradients of one chunk equal dense float64 attention, by JAX's autodiff and by `attention_chunk_grads`."""
    d_lse = np.random.default_rng(99).normal(size=inputs.query.shape[:-1]).astype(np.float32)
    want = dense_expected(inputs, seen, bias=bias, d_lse=d_lse, **(dense_options or {}))
    has_kernel = options.get("implementation") != "autodiff"

    @jax.jit
    def both(inputs, bias):
        arguments = inputs[:3] if bias is None else (*inputs[:3], bias)
        (out, lse), pull = jax.vjp(lambda *args: attend(*args, **options), *arguments)
        grads = pull((inputs.d_out, jnp.asarray(d_lse)))
        delta = (out * inputs.d_out).sum(-1) - d_lse
        by_hand = attention_chunk_grads(*inputs, lse, delta, bias, **options) if has_kernel else grads
        return (out, lse), grads, by_hand

    (out, lse), grads, by_hand = both(inputs, bias)
    names = [name for name, x in zip(Expected._fields, want, strict=True) if x is not None]
    wanted = [x for x in want if x is not None]
    assert_close((out, lse, *grads), wanted, tolerance, names)
    assert_close((out, lse, *by_hand), wanted, tolerance, names)


SEGMENTS = SegmentIds(
    np.array([[0] * 4 + [2] * 3 + [-1] * 2, [7] * 9], np.int32),
    np.array([[0] * 3 + [2] * 5 + [-1] * 3, [5] * 4 + [7] * 7], np.int32),
)
PLACES = Positions(
    np.array([3, 1, 4, 1, 5, 9, 2, 6, 8], np.int32), np.random.default_rng(8).integers(0, 10, (B, S)).astype(np.int32)
)


def random_mask(*shape: int) -> np.ndarray:
    mask = np.random.default_rng(5).random(shape) < 0.6
    mask[..., 0, :] = False  # one query sees nobody
    return mask


CASES: dict[str, dict] = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (2, 3)},
    "causal window": {"is_causal": True, "local_window_size": 3},
    "segments": {"segment_ids": SEGMENTS},
    "causal segments": {"is_causal": True, "segment_ids": SEGMENTS},
    "positions": {"is_causal": True, "positions": PLACES},
    "window of positions": {"local_window_size": (None, 1), "positions": PLACES, "segment_ids": SEGMENTS},
    "scale": {"scale": -0.7},
}


@pytest.mark.fast
@WITHOUT_DENSE_ARRAYS
@pytest.mark.parametrize("case", CASES)
def test_a_chunk_equals_dense_attention(case, implementation):
    options = CASES[case]
    inputs = random_inputs(1, B, T, S, N, K, value_dim=5)
    masks = {
        name: tuple(options[name]) if name in ("segment_ids", "positions") else options[name]
        for name in ("is_causal", "local_window_size", "segment_ids", "positions")
        if name in options
    }
    seen = visible_pairs(T, S, batch=B, **masks)[:, None]
    blocks = {"block_sizes": (4, 3)} if implementation == "xla" else {}
    check_chunk(inputs, seen, dense_options={"scale": options.get("scale")}, implementation=implementation, **blocks, **options)


@IMPLEMENTATIONS
@pytest.mark.parametrize("shape", [(B, N, T, S), (1, 1, T, S), (B, 1, 1, S), (1, N, T, 1)], ids=str)
def test_mask_and_bias_of_every_broadcast_shape(shape, implementation):
    inputs = random_inputs(2, B, T, S, N, K)
    mask = random_mask(*shape) if shape[2] > 1 else np.random.default_rng(5).random(shape) < 0.6
    bias = jnp.asarray(np.random.default_rng(6).normal(size=shape), jnp.float32)
    seen = visible_pairs(T, S, is_causal=True)[:, None] & mask
    blocks = {"block_sizes": (4, 3)} if implementation == "xla" else {}
    check_chunk(inputs, seen, bias=bias, mask=mask, is_causal=True, implementation=implementation, **blocks)


@pytest.mark.fast
@IMPLEMENTATIONS
def test_soft_cap_with_large_logits(implementation):
    inputs = random_inputs(3, B, T, S, N, K, spread=4.0)
    bias = jnp.asarray(np.random.default_rng(6).normal(size=(N, T, S)) * 20, jnp.float32).at[:, :, 2].set(-jnp.inf)
    seen = visible_pairs(T, S, batch=B, is_causal=True, segment_ids=tuple(SEGMENTS))[:, None]
    check_chunk(
        inputs,
        seen,
        bias=bias,
        dense_options={"logits_soft_cap": 30.0},
        logits_soft_cap=30.0,
        is_causal=True,
        segment_ids=SEGMENTS,
        implementation=implementation,
    )


@pytest.mark.fast
@IMPLEMENTATIONS
def test_rows_hidden_by_bias(implementation):
    inputs = random_inputs(4, 1, 4, 6)
    lowest = float(np.finfo(np.float32).min)
    bias = jnp.zeros((1, 1, 4, 6)).at[..., 1, :].set(-jnp.inf).at[..., 2, :].set(lowest).at[..., 3, :3].set(lowest)
    want = dense_expected(inputs, bias=bias)
    with jax.debug_nans(True):
        (out, lse), grads = value_and_grads(
            functools.partial(attend, implementation=implementation), (*inputs[:3], bias), (inputs.d_out, np.zeros((1, 4, 2)))
        )
    np.testing.assert_array_equal(out[0, 1], np.zeros((2, 8)))
    np.testing.assert_array_equal(lse[0, 1], np.full(2, -np.inf))
    np.testing.assert_allclose(out[0, 2], inputs.value[0].mean(0), rtol=1e-5, atol=1e-6)  # all keys equally low
    assert_close((out, lse, *grads), (want.out, want.lse, *want[2:6]), FLOAT32_TOLERANCE)


@pytest.mark.fast
@pytest.mark.parametrize("rank", [2, 3, 4], ids=["TH", "TNH", "BTNH"])
def test_every_rank_keeps_its_rank(rank):
    inputs = random_inputs(5, 1, 7, 5, 1 if rank == 2 else N, 1 if rank == 2 else K, value_dim=3)
    want = dense_expected(inputs, visible_pairs(7, 5, is_causal=True)[:, None], d_lse=np.ones(inputs.query.shape[:-1]))

    def lower(x):
        x = jnp.asarray(x)
        return {2: lambda x: x[0, :, 0], 3: lambda x: x[0], 4: lambda x: x}[rank](x)

    query, key, value, d_out = (lower(x) for x in inputs)

    @jax.jit
    def everything(query, key, value):
        half = functools.partial(attention_chunk_stats, query, positions=Positions(None, jnp.arange(3)), is_causal=True)
        stats = half(
            key[..., :3, :] if rank == 2 else key[..., :3, :, :], value[..., :3, :] if rank == 2 else value[..., :3, :, :]
        )
        rest = {2: (key[3:], value[3:]), 3: (key[3:], value[3:]), 4: (key[:, 3:], value[:, 3:])}[rank]
        stats = attention_chunk_stats(query, *rest, positions=Positions(None, jnp.arange(3, 5)), is_causal=True, carry=stats)
        out, lse = finalize_chunk_stats(stats)
        delta = (out * d_out).sum(-1) - 1
        return stats, out, lse, attention_chunk_grads(query, key, value, d_out, lse, delta, is_causal=True)

    stats, out, lse, grads = everything(query, key, value)
    assert [x.shape for x in stats] == [(*query.shape[:-1], 3), query.shape[:-1], query.shape[:-1]]
    assert [x.shape for x in grads] == [query.shape, key.shape, value.shape]
    assert_close((out, lse, *grads), [lower(x) for x in want[:5]], FLOAT32_TOLERANCE)


@pytest.mark.fast
@WITHOUT_DENSE_ARRAYS
def test_a_carry_is_merged(implementation):
    inputs = random_inputs(6, B, T, S, N, K)
    want = dense_expected(inputs, visible_pairs(T, S, is_causal=True)[:, None])

    @jax.jit
    def both(query, key, value):
        def part(where, **options):
            return attention_chunk_stats(
                query,
                key[:, where],
                value[:, where],
                is_causal=True,
                positions=Positions(None, jnp.arange(S)[where]),
                implementation=implementation,
                **options,
            )

        first, second = slice(0, 4), slice(4, S)
        late, early = part(second), part(first)
        # Query 0 to 3 see nothing of the second chunk, so the carry there is what comes out.
        return part(second, carry=tuple(early)), merge_chunk_stats(early, late), part(first, carry=late)

    carried, merged, backwards = both(*inputs[:3])
    if implementation != "mosaic_tpu":  # it holds the carry's maximum in units of log2, which rounds it once more
        np.testing.assert_array_equal(carried.max, merged.max)
    assert_close(carried, merged, FLOAT32_TOLERANCE)
    for stats in (carried, backwards):
        assert_close(finalize_chunk_stats(stats), (want.out, want.lse), FLOAT32_TOLERANCE)


@pytest.mark.parametrize("block_sizes", [1, 3, (5, 2), (2, None), (100, 100)], ids=str)
def test_any_block_size_gives_the_same(block_sizes):
    inputs = random_inputs(7, B, T, S, N, K, value_dim=3)
    bias = jnp.asarray(np.random.default_rng(6).normal(size=(N, T, S)), jnp.float32)
    seen = visible_pairs(T, S, batch=B, is_causal=True, segment_ids=tuple(SEGMENTS))[:, None]
    check_chunk(inputs, seen, bias=bias, is_causal=True, segment_ids=SEGMENTS, block_sizes=block_sizes)


@pytest.mark.fast
@WITHOUT_DENSE_ARRAYS
def test_zero_queries_count_and_average_what_they_see(implementation):
    inputs = random_inputs(8, B, T, S, N, K, value_dim=6)
    seen = visible_pairs(T, S, batch=B, local_window_size=(4, 1), segment_ids=tuple(SEGMENTS))
    options = {"local_window_size": (4, 1), "segment_ids": SEGMENTS, "implementation": implementation}
    if implementation == "xla":
        options["block_sizes"] = (2, 4)
    call = jax.jit(lambda q, k, v: (attention_chunk_stats(q, k, v, **options), attend(q, k, v, **options)))
    stats, (out, lse) = call(jnp.zeros_like(inputs.query), inputs.key, inputs.value)
    count = np.broadcast_to(seen.sum(-1)[..., None], lse.shape)
    np.testing.assert_array_equal(stats.sum, count)
    np.testing.assert_array_equal(stats.max, np.where(count == 0, -np.inf, 0))
    # One rounding each: the exact count, then its logarithm.
    safe = np.where(count == 0, 1, count)
    np.testing.assert_allclose(lse, np.where(count == 0, -np.inf, np.log(safe)), rtol=2.5e-7, atol=0)
    value = np.repeat(np.asarray(inputs.value, np.float64), N // K, axis=2)
    assert_close(out, np.einsum("bts,bsnv->btnv", seen, value) / safe[..., None], FLOAT32_TOLERANCE)


@pytest.mark.fast
@WITHOUT_DENSE_ARRAYS
def test_one_hot_values_read_out_the_probabilities(implementation):
    inputs = random_inputs(9, 1, T, T, N, K, head_dim=8)
    one_hot = jnp.broadcast_to(jnp.eye(T)[None, :, None], (1, T, K, T))
    blocks = {"block_sizes": (4, 2)} if implementation == "xla" else {}
    call = jax.jit(functools.partial(attend, is_causal=True, implementation=implementation, **blocks))
    probabilities, _ = call(inputs.query, inputs.key, one_hot)
    query, key = np.asarray(inputs.query[0], np.float64), np.repeat(np.asarray(inputs.key[0], np.float64), N // K, axis=1)
    weights = np.exp(np.einsum("tnh,snh->tns", query, key) * 8**-0.5) * np.tri(T)[:, None]
    assert_close(probabilities[0], weights / weights.sum(-1, keepdims=True), FLOAT32_TOLERANCE)
    later = np.broadcast_to(~np.tri(T, dtype=bool)[:, None], (T, N, T))
    assert (np.asarray(probabilities[0])[later] == 0).all()


@pytest.mark.fast
def test_gradients_of_two_chunks_sum_to_those_of_all_keys():
    inputs = random_inputs(10, B, T, S, N, K, value_dim=3)
    bias = jnp.asarray(np.random.default_rng(6).normal(size=(1, N, T, S)), jnp.float32)
    d_lse = np.random.default_rng(7).normal(size=(B, T, N)).astype(np.float32)
    want = dense_expected(inputs, visible_pairs(T, S, is_causal=True)[:, None], bias=bias, d_lse=d_lse)
    out, lse = (jnp.asarray(x, jnp.float32) for x in want[:2])

    @jax.jit
    def both(query, key, value, bias):
        delta = (out * inputs.d_out).sum(-1) - d_lse

        def part(where, **options):
            return attention_chunk_grads(
                query,
                key[:, where],
                value[:, where],
                inputs.d_out,
                lse,
                delta,
                bias[..., where],
                is_causal=True,
                positions=Positions(None, jnp.arange(S)[where]),
                block_sizes=4,
                **options,
            )

        first, second = part(slice(0, 4)), part(slice(4, S))
        ones = jax.tree.map(jnp.ones_like, second)
        return first, second, part(slice(4, S), carry=(first[0], *ones[1:]))

    first, second, carried = both(*inputs[:3], bias)
    assert {x.dtype for x in first} == {jnp.dtype(jnp.float32)}
    joined = [np.concatenate([a, b], axis=axis) for a, b, axis in zip(first[1:], second[1:], (1, 1, 3), strict=True)]
    assert_close((first[0] + second[0], *joined), want[2:6], FLOAT32_TOLERANCE)
    assert_close(carried[0], want.d_query, FLOAT32_TOLERANCE)
    assert_close(carried[1:], [x + 1 for x in second[1:]], FLOAT32_TOLERANCE)


# Numbers stored where nobody looks.


POISON: dict[str, tuple[dict, Any, Any]] = {
    # options, which of 8 queries see nobody, which of 8 keys nobody sees
    "padding": ({"segment_ids": np.array([[0, 0, 0, 0, 1, 1, -1, -1]], np.int32)}, [6, 7], [6, 7]),
    "other document": (
        {"segment_ids": SegmentIds(np.zeros((1, 8), np.int32), np.array([[0, 0, 5, 0, 0, 0, 5, 5]], np.int32))},
        [],
        [2, 6, 7],
    ),
    "mask": ({"mask": (np.arange(8) != 3) & (np.arange(8)[:, None] != 5)}, [5], [3]),
    "window": ({"local_window_size": (1, 0), "positions": Positions(np.arange(8) + 3, np.arange(8))}, [6, 7], [0, 1]),
    "future": ({"is_causal": True, "positions": Positions(np.arange(8) - 2, np.arange(8))}, [0, 1], [6, 7]),
    "bias": ({"bias": np.float32([0, 0, -np.inf, 0, 0, 0, -np.inf, -np.inf])}, [], [2, 6, 7]),
}


@functools.cache
def poisonable(why: str, implementation: str) -> tuple[AttentionInputs, Any, Any]:
    """Inputs, a compiled function to outputs and gradients, and what it gives without poison."""
    options, blind_queries, _ = POISON[why]
    inputs = random_inputs(11, 1, 8, 8, N, K)
    block = {"block_sizes": 4} if implementation == "xla" else {}
    attention = functools.partial(attend, implementation=implementation, **options, **block)
    d_lse = jnp.where(jnp.isin(jnp.arange(8), jnp.array(blind_queries, int)), 0.0, jnp.ones((1, N, 8))).swapaxes(1, 2)
    both = jax.jit(lambda *args: _outputs_and_grads(attention, args, (inputs.d_out, d_lse)))
    return inputs, both, both(*inputs[:3])


def check_poisoned(why: str, implementation: str, sides: tuple[int, ...]) -> None:
    inputs, both, clean = poisonable(why, implementation)
    assert all(np.isfinite(x).all() for x in (clean[0][0], *clean[1]))
    _, blind_queries, hidden_keys = POISON[why]
    unseen = [np.array(x, int) for x in (blind_queries, hidden_keys, hidden_keys)]
    for bad in (np.nan, np.inf, -np.inf):
        stored = [x.at[:, unseen[i]].set(bad) if i in sides else x for i, x in enumerate(inputs[:3])]
        for have, want in zip(jax.tree.leaves(both(*stored)), jax.tree.leaves(clean), strict=True):
            np.testing.assert_array_equal(have, want)
    for where, grad in zip(unseen, clean[1], strict=True):
        assert (np.asarray(grad)[:, where] == 0).all()


@pytest.mark.fast
@IMPLEMENTATIONS
@pytest.mark.parametrize("why", POISON)
def test_nan_and_inf_in_keys_and_values_that_nobody_sees_reach_nothing(why, implementation):
    check_poisoned(why, implementation, sides=(1, 2))


@pytest.mark.fast
@IMPLEMENTATIONS
@pytest.mark.parametrize("why", [why for why, (_, blind_queries, _) in POISON.items() if blind_queries])
def test_nan_and_inf_in_queries_that_see_nobody_reach_nothing(why, implementation):
    check_poisoned(why, implementation, sides=(0,))


@pytest.mark.fast
@pytest.mark.parametrize("sides", [(0,), (1, 2)], ids=["queries", "keys and values"])
def test_nan_and_inf_in_padding_reach_nothing_in_the_emulated_tpu_kernel(sides):
    with compat.tpu_interpret_mode(uninitialized_memory="nan"):
        check_poisoned("padding", "mosaic_tpu", sides)


def _outputs_and_grads(attention, arguments, cotangents):
    out, pull = jax.vjp(attention, *arguments)
    return out, pull(cotangents)


# Narrow dtypes.


@WITHOUT_DENSE_ARRAYS
@pytest.mark.parametrize("spread", [1.0, 5.0])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_dtypes_earn_their_tolerance(dtype, spread, implementation):
    inputs = random_inputs(12, 1, 24, 24, N, K, dtype=dtype, spread=spread)
    seen = visible_pairs(24, 24, is_causal=True)[:, None]
    want = dense_expected(inputs, seen)
    allowed = earned_tolerances(inputs, want, seen)
    block = {"block_sizes": 8} if implementation == "xla" else {}
    (out, lse), grads = value_and_grads(
        functools.partial(attend, is_causal=True, implementation=implementation, **block),
        inputs[:3],
        (inputs.d_out, np.zeros((1, 24, N))),
    )
    assert out.dtype == lse.dtype == jnp.float32  # statistics stay wide; who calls decides when to round
    assert {x.dtype for x in grads} == {jnp.dtype(dtype)}
    for name, have in zip(Expected._fields, (out, lse, *grads), strict=False):
        assert relative_error(have, getattr(want, name)) <= getattr(allowed, name), name


@pytest.mark.fast
def test_enabling_x64_changes_nothing_for_narrow_inputs():
    inputs = random_inputs(13, B, T, S, N, K, dtype=jnp.bfloat16)

    def run():
        call = functools.partial(attend, is_causal=True, segment_ids=SEGMENTS, block_sizes=4)
        d_lse = np.ones((B, T, N), np.float32) * (SEGMENTS.query >= 0)[..., None]
        return value_and_grads(call, inputs[:3], (inputs.d_out, d_lse))

    want = run()
    with jax.enable_x64(True):
        have = run()
    for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


# Properties of the traced program.


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations, including those of inner jaxprs."""
    for equation in jaxpr.eqns:
        yield equation
        for parameter in equation.params.values():
            for inner in parameter if isinstance(parameter, list | tuple) else (parameter,):
                if isinstance(inner, ClosedJaxpr):
                    yield from equations(inner.jaxpr)
                elif isinstance(inner, Jaxpr):
                    yield from equations(inner)


def number_carried(scan: Any) -> int:
    """How many values a scan carries, by shape: what it writes out step by step gains an axis, what it carries does not."""
    inside = scan.params["jaxpr"].jaxpr.outvars
    return sum(x.aval.shape == y.aval.shape for x, y in zip(scan.outvars, inside, strict=True))


def loop_state(equation: Any) -> list[Any]:
    """Types of what a loop carries from step to step, and of what a scan writes out step by step."""
    if equation.primitive.name == "while":
        return [x.aval for x in equation.outvars]
    if equation.primitive.name == "scan":
        return [x.aval for x in equation.params["jaxpr"].jaxpr.outvars]
    return []


def is_float(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.floating)


LONG, LONG_BLOCK = 64, 16


def traced(implementation: str, backward: bool) -> Any:
    inputs = random_inputs(14, 1, LONG, LONG, 2, 1, dtype=jnp.bfloat16)
    block = {"block_sizes": LONG_BLOCK} if implementation == "xla" else {}
    call = functools.partial(attend, is_causal=True, implementation=implementation, **block)

    def forward(query, key, value):
        return call(query, key, value)

    def grads(query, key, value):
        _, pull = jax.vjp(call, query, key, value)
        return pull((inputs.d_out.astype(jnp.float32), jnp.ones((1, LONG, 2))))

    return jax.make_jaxpr(grads if backward else forward)(*inputs[:3]).jaxpr


@pytest.mark.fast
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_loops_accumulate_in_float32_for_narrow_inputs(backward):
    carried = [aval for equation in equations(traced("xla", backward)) for aval in loop_state(equation) if is_float(aval)]
    assert {aval.dtype for aval in carried} == {jnp.dtype(jnp.float32)}
    # output, sum and max of one block of queries; then d_query of all blocks, d_key and d_value of one block of keys.
    shapes = {aval.shape for aval in carried}
    assert {(1, 1, 2 * LONG_BLOCK, 8), (1, 1, 2 * LONG_BLOCK)} <= shapes
    if backward:
        assert {(LONG // LONG_BLOCK, 1, 1, 2 * LONG_BLOCK, 8), (1, 1, LONG_BLOCK, 8)} <= shapes


@pytest.mark.fast
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_no_array_of_all_scores_is_built(backward):
    def largest(implementation):
        return max(x.aval.size for equation in equations(traced(implementation, backward)) for x in equation.outvars)

    assert largest("xla") < LONG * LONG
    assert largest("autodiff") >= LONG * LONG  # the probe sees such an array where there is one


@pytest.mark.fast
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_hops_carry_float32_and_only_the_travelling_chunk_is_narrow(backward):
    spec = P(None, "seq")
    attention = functools.partial(ring_attention, axis_name="seq", is_causal=True)
    mapped = jax.shard_map(attention, mesh=ring_mesh(5), in_specs=(spec,) * 3, out_specs=spec)
    query, key, value, d_out = random_inputs(15, 1, 20, 20, 2, 1, dtype=jnp.bfloat16)

    def run(*arguments):
        return jax.vjp(mapped, *arguments)[1](d_out) if backward else mapped(*arguments)

    hops = [
        equation
        for equation in equations(jax.make_jaxpr(run)(query, key, value).jaxpr)
        if equation.primitive.name == "scan" and any(e.primitive.name == "ppermute" for e in equation.params["jaxpr"].jaxpr.eqns)
    ]
    assert len(hops) == 1 + backward
    for equation in hops:
        body = equation.params["jaxpr"].jaxpr
        arrived = {x for e in body.eqns if e.primitive.name == "ppermute" for x in e.outvars}
        carried = [x for x in body.outvars[: number_carried(equation)] if is_float(x.aval)]
        narrow = [x for x in carried if x.aval.dtype != jnp.float32]
        assert len(narrow) == 2  # key and value
        assert set(narrow) <= arrived
        assert len(carried) - len(narrow) == 3  # output, sum, max; in the backward pass d_query, d_key, d_value


# Pairs of blocks that are really computed.


BLOCKS = 8

PAIRS: dict[str, tuple[dict, tuple[int, int]]] = {
    # options, (pairs without a mask, pairs with one) of an 8 x 8 table
    "plain": ({}, (64, 0)),
    "causal": ({"is_causal": True}, (28, 8)),
    "window of one block": ({"local_window_size": (8, 0)}, (0, 15)),
    "packed documents": ({"segment_ids": np.repeat(np.arange(4, dtype=np.int32), 16)}, (16, 0)),
    "packed causal": ({"is_causal": True, "segment_ids": np.repeat(np.arange(4, dtype=np.int32), 16)}, (4, 8)),
    "padded tail": ({"segment_ids": np.where(np.arange(64) < 24, 0, -1).astype(np.int32)}, (9, 0)),
    "one row of padding": ({"segment_ids": np.array([[0] * 64, [-1] * 64], np.int32)}, (64, 0)),
    "nothing visible": ({"positions": Positions(np.arange(64), np.arange(64) + 64), "is_causal": True}, (0, 0)),
    "all earlier": ({"positions": Positions(np.arange(64) + 64, np.arange(64)), "is_causal": True}, (64, 0)),
}


@pytest.mark.parametrize("case", PAIRS)
def test_only_blocks_with_visible_keys_are_computed(case, monkeypatch):
    options, (full, partial) = PAIRS[case]
    rows = 2 if case == "one row of padding" else 1
    inputs = random_inputs(16, rows, BLOCKS * 8, BLOCKS * 8, 2, 1)
    counts: Counter = Counter()

    def counted(method):
        original = getattr(XlaKernel, method)

        def counting(self, *args):
            jax.debug.callback(lambda: counts.update([(method, bool(args[-1]))]))
            return original(self, *args)

        return counting

    for method in ("_fold_pair", "_pair_grads"):
        monkeypatch.setattr(XlaKernel, method, counted(method))
    call = functools.partial(attend, block_sizes=8, **options)
    result = value_and_grads(call, inputs[:3], (inputs.d_out, np.zeros(inputs.query.shape[:-1])))
    jax.block_until_ready(result)
    jax.effects_barrier()
    have = {(method, masked): counts[method, masked] for method in ("_fold_pair", "_pair_grads") for masked in (False, True)}
    want = {False: full, True: partial}
    assert have == {(method, masked): want[masked] for method, masked in have}


# Lists of chunks.


def chunks_of(x: jax.Array, lengths: list[int], rank: int) -> list[jax.Array]:
    cuts = list(np.cumsum(lengths)[:-1])
    return jnp.split(x, cuts, axis=1 if rank == 4 else 0)


def check_list(inputs: AttentionInputs, lengths: list[int], rank: int, seen: Any, dense_options: dict | None = None, **options):
    """`ring_attention` over a list of chunks, and its gradients, equal dense attention over their concatenation."""
    d_lse = np.random.default_rng(3).normal(size=inputs.query.shape[:-1]).astype(np.float32)
    want = dense_expected(inputs, seen, d_lse=d_lse, **(dense_options or {}))

    def lower(x):
        return {2: lambda x: x[0, :, 0], 3: lambda x: x[0], 4: lambda x: x}[rank](x)

    query, key, value, d_out = (lower(x) for x in inputs)
    (out, lse), (d_query, d_keys, d_values) = value_and_grads(
        functools.partial(ring_attention, return_residual=True, **options),
        (query, chunks_of(key, lengths, rank), chunks_of(value, lengths, rank)),
        (d_out, lower(d_lse)),
    )
    axis = 1 if rank == 4 else 0
    assert [x.shape[axis] for x in d_keys] == [x.shape[axis] for x in d_values] == list(lengths)
    have = (out, lse, d_query, jnp.concatenate(d_keys, axis), jnp.concatenate(d_values, axis))
    assert_close(have, [lower(x) for x in want[:5]], FLOAT32_TOLERANCE, Expected._fields)


@st.composite
def splits(draw, total: int = 7):
    """An ordered way to write `total` as a sum."""
    cuts = draw(st.sets(st.integers(1, total - 1)))
    return np.diff([0, *sorted(cuts), total]).tolist()


@settings(max_examples=5, deadline=None, derandomize=True, database=None)
@example(lengths=[1] * 7, rank=4, is_causal=True)
@example(lengths=[7], rank=2, is_causal=False)
@given(lengths=splits(), rank=st.sampled_from([2, 3, 4]), is_causal=st.booleans())
def test_any_split_into_chunks_equals_the_concatenation(lengths, rank, is_causal):
    heads, kv_heads, batch = {2: (1, 1, 1), 3: (2, 1, 1), 4: (2, 1, 2)}[rank]
    inputs = random_inputs(17, batch, 5, 7, heads, kv_heads, value_dim=3)
    check_list(inputs, lengths, rank, visible_pairs(5, 7, is_causal=is_causal)[:, None], is_causal=is_causal)


@pytest.mark.fast
def test_chunks_of_uneven_length_with_every_attention_argument():
    inputs = random_inputs(18, B, T, S, N, K, value_dim=5)
    bias = jnp.asarray(np.random.default_rng(6).normal(size=(1, N, T, S)), jnp.float32)
    mask, sinks = random_mask(B, 1, T, S), np.float32([0.3, -1.0, 2.0, 0.0])
    lengths = {"query_seq_lengths": np.array([9, 8]), "key_value_seq_lengths": np.array([10, 11])}
    integers = {"is_causal": True, "local_window_size": (6, 0), **lengths}
    seen = visible_pairs(T, S, batch=B, segment_ids=tuple(SEGMENTS), positions=tuple(PLACES), **integers)[:, None] & mask
    check_list(
        inputs,
        [5, 1, 3, 2],
        4,
        seen,
        {"bias": bias, "sinks": sinks, "logits_soft_cap": 3.0, "scale": 0.5},
        bias=bias,
        mask=mask,
        sinks=sinks,
        segment_ids=SEGMENTS,
        positions=PLACES,
        logits_soft_cap=3.0,
        scale=0.5,
        block_sizes=(4, 2),
        **integers,
    )


@IMPLEMENTATIONS
def test_tuples_of_chunks_fold_like_lists(implementation):
    inputs = random_inputs(19, 1, 5, 6)
    want = dense_expected(inputs)
    key, value = (tuple(jnp.split(x, [1, 4], axis=1)) for x in inputs[1:3])
    out = jax.jit(functools.partial(ring_attention, implementation=implementation))(inputs.query, key, value)
    assert_close(out, want.out, FLOAT32_TOLERANCE)
