"""`ring_attention` under JAX's transformations: jit, grad, vmap, remat, scan, donation, x64, forward mode and second order."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import FLOAT32_TOLERANCE, SCHEDULES, check_ring, ring_mesh
from jax.sharding import NamedSharding, PartitionSpec

from jax_ring_attention import RESIDUAL_NAMES, ring_attention
from jax_ring_attention.testing import (
    Expected,
    assert_close,
    dense_attention,
    dense_expected,
    random_inputs,
    relative_error,
    value_and_grads,
    visible_pairs,
)

SEQ = PartitionSpec(None, "seq")


def equations(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """Every equation of a jaxpr and of those inside it, with how often the enclosing scans run it."""
    for equation in jaxpr.eqns:
        yield equation, times
        inner_times = times * equation.params["length"] if equation.primitive.name == "scan" else times
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner, inner_times)


def count(function: Any, *arguments: Any) -> dict[str, int]:
    """How often hops and kernel loops run, by primitive name."""
    counts = dict.fromkeys(("ppermute", "while"), 0)
    for equation, times in equations(jax.make_jaxpr(function)(*arguments).jaxpr):
        if equation.primitive.name in counts:
            counts[equation.primitive.name] += times
    return counts


def on_ring(ring_size: int, **options: Any) -> Any:
    return functools.partial(ring_attention, mesh=ring_mesh(ring_size), spec=SEQ, **options)


# jit, grad and vmap.


def test_eager_equals_jit_equals_gradient_of_jit_equals_jit_of_gradient():
    inputs = random_inputs(1, query_length=16)
    attend = on_ring(4, is_causal=True)

    def loss(attend, query, key, value):
        return (attend(query, key, value) * inputs.d_out).sum()

    eager, compiled = functools.partial(loss, attend), functools.partial(loss, jax.jit(attend))
    want = dense_expected(inputs, visible_pairs(16, 16, is_causal=True)[:, None])
    assert_close((attend(*inputs[:3]), jax.jit(attend)(*inputs[:3])), (want.out, want.out), FLOAT32_TOLERANCE)
    for function in (eager, compiled):
        for gradient in (jax.grad(function, (0, 1, 2)), jax.jit(jax.grad(function, (0, 1, 2)))):
            assert_close(gradient(*inputs[:3]), want[2:5], FLOAT32_TOLERANCE)


VMAPPED = 3


@pytest.mark.parametrize("form", ["one_device", "global", "inside_shard_map", "around_shard_map"])
def test_vmap_of_attention_and_of_its_gradient(form):
    inputs = random_inputs(2, batch=VMAPPED, query_length=16, heads=4, kv_heads=2)
    segment_ids = np.sort(np.random.default_rng(3).integers(-1, 2, (VMAPPED, 16)), axis=1)
    want = dense_expected(inputs, visible_pairs(16, 16, batch=VMAPPED, is_causal=True, segment_ids=segment_ids)[:, None])

    def one(options, query, key, value, d_out, ids):
        """Rank 3 in, so that vmap's axis is the only batch."""
        query, key, value, d_out, ids = (x[None] for x in (query, key, value, d_out, ids))

        def loss(query, key, value):
            out, lse = ring_attention(
                query, key, value, is_causal=True, segment_ids=ids, return_residual=True, block_sizes=3, **options
            )
            return (out * d_out).sum(), (out, lse)

        grads, both = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(query, key, value)
        return tuple(x[0] for x in (*both, *grads))

    shards = {"mesh": ring_mesh(4), "out_specs": SEQ}
    if form == "one_device":
        function = jax.vmap(functools.partial(one, {}))
    elif form == "global":
        function = jax.vmap(functools.partial(one, {"mesh": ring_mesh(4), "spec": SEQ}))
    elif form == "inside_shard_map":
        inner = jax.vmap(functools.partial(one, {"axis_name": "seq"}))
        function = jax.shard_map(inner, in_specs=(SEQ,) * 5, **shards)
    else:
        inner = functools.partial(one, {"axis_name": "seq"})
        whole = PartitionSpec("seq")
        function = jax.vmap(jax.shard_map(inner, mesh=ring_mesh(4), in_specs=(whole,) * 5, out_specs=whole))
    have = jax.jit(function)(*inputs, segment_ids)
    assert_close(have, want[:5], FLOAT32_TOLERANCE, Expected._fields)


# Memory: remat, scan over layers, donation.


@pytest.mark.parametrize("inside", [False, True], ids=["around_the_call", "inside_shard_map"])
def test_saving_the_named_residuals_spares_the_ring_in_the_backward_pass(inside):
    query = random_inputs(4, query_length=16).query
    ring_size = 4
    keep = jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)

    def gradient(remat):
        if inside:
            body = remat(lambda x: ring_attention(x, x, x, axis_name="seq", is_causal=True))
            attend = jax.shard_map(body, mesh=ring_mesh(ring_size), in_specs=SEQ, out_specs=SEQ)
        else:
            attend = remat(lambda x: on_ring(ring_size, is_causal=True)(x, x, x))
        return jax.grad(lambda x: (attend(x) ** 2).sum())

    forward = count(lambda x: on_ring(ring_size, is_causal=True)(x, x, x), query)
    plain = count(gradient(lambda f: f), query)
    rerun = count(gradient(jax.checkpoint), query)
    kept = count(gradient(functools.partial(jax.checkpoint, policy=keep)), query)
    assert forward["ppermute"] == 2 * (ring_size - 1)  # key and value, never a hop too many
    assert plain["ppermute"] == forward["ppermute"] + 2 * (ring_size - 1) + 2 * ring_size  # their gradients also come home
    assert forward["while"] > 0
    assert kept == plain
    assert rerun == {name: plain[name] + forward[name] for name in plain}


@pytest.mark.parametrize("remat", [False, True], ids=["plain", "remat"])
def test_scan_over_layers_differentiates_with_respect_to_stacked_weights(remat):
    rng = np.random.default_rng(5)
    layers, length, heads, dim = 3, 12, 2, 4
    x, d_out = rng.normal(size=(1, length, heads * dim)), rng.normal(size=(1, length, heads * dim))
    weights = {"qkv": 0.4 * rng.normal(size=(layers, 3, heads * dim, heads, dim))}
    weights["out"] = 0.4 * rng.normal(size=(layers, heads, dim, heads * dim))

    def layer(attend, x, weights):
        query, key, value = (jnp.einsum("btd,dnh->btnh", x, w) for w in weights["qkv"])
        return x + jnp.einsum("btnh,nhd->btd", attend(query, key, value), weights["out"])

    def ring_model(x, weights):
        step = functools.partial(layer, on_ring(4, is_causal=True))
        if remat:
            step = jax.checkpoint(step, policy=jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES))
        return jax.lax.scan(lambda x, w: (step(x, w), None), x, weights)[0]

    def dense_model(x, weights):
        seen = visible_pairs(length, length, is_causal=True)[:, None]
        for i in range(layers):
            x = layer(lambda *a: dense_attention(*a, seen)[0], x, jax.tree.map(lambda w, i=i: w[i], weights))
        return x

    with jax.enable_x64(True):
        want = value_and_grads(dense_model, (jnp.asarray(x), jax.tree.map(jnp.asarray, weights)), jnp.asarray(d_out))
        want = jax.tree.map(np.asarray, want)
    single = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), (x, weights, d_out))
    assert_close(value_and_grads(ring_model, single[:2], single[2]), want, FLOAT32_TOLERANCE)


def test_inputs_may_be_donated_to_their_gradients():
    inputs = random_inputs(6, query_length=16)
    sharding = NamedSharding(ring_mesh(4), SEQ)

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2), in_shardings=sharding, out_shardings=sharding)
    def step(query, key, value, d_out):
        def attend(query, key, value):
            return ring_attention(query, key, value, is_causal=True, mesh=ring_mesh(4), spec=SEQ)

        return jax.vjp(attend, query, key, value)[1](d_out)

    arrays = [jax.device_put(jnp.array(x, copy=True), sharding) for x in inputs]
    want = dense_expected(inputs, visible_pairs(16, 16, is_causal=True)[:, None])
    assert_close(step(*arrays), want[2:5], FLOAT32_TOLERANCE)
    assert [x.is_deleted() for x in arrays] == [True, True, True, False]


@pytest.mark.fast
def test_new_segment_ids_positions_and_lengths_do_not_compile_again():
    inputs = random_inputs(7, batch=2, query_length=16)
    traces = []

    @jax.jit
    def attend(query, key, value, segment_ids, positions, lengths):
        traces.append(1)
        out, lse = on_ring(4, is_causal=True, return_residual=True, block_sizes=2)(
            query, key, value, segment_ids=segment_ids, positions=positions, key_value_seq_lengths=lengths
        )
        return out, lse

    rng = np.random.default_rng(8)
    for lengths in ([16, 16], [1, 9], [0, 16]):
        segment_ids = np.sort(rng.integers(-1, 3, (2, 16)), axis=1).astype(np.int32)
        positions = np.stack([rng.permutation(16) for _ in range(2)]).astype(np.int32)
        lengths = np.array(lengths, np.int32)
        masks = {"segment_ids": segment_ids, "positions": positions, "key_value_seq_lengths": lengths}
        want = dense_expected(inputs, visible_pairs(16, 16, batch=2, is_causal=True, **masks)[:, None])
        have = attend(*inputs[:3], segment_ids, positions, lengths)
        assert_close(have, want[:2], FLOAT32_TOLERANCE)
    assert len(traces) == 1
    assert attend._cache_size() == 1


def test_nothing_leaks_from_traces():
    inputs = random_inputs(9, query_length=8)
    with jax.checking_leaks():
        value_and_grads(on_ring(2, is_causal=True, block_sizes=2), inputs[:3], inputs.d_out)


# Precision.


@pytest.mark.fast
def test_64_bit_mode_changes_no_bit_of_bfloat16_results():
    inputs = random_inputs(10, batch=2, query_length=49, heads=8, head_dim=64, dtype=jnp.bfloat16)
    results = []
    for enabled in (False, True):
        with jax.enable_x64(enabled):
            attend = on_ring(2, is_causal=True, layout="zigzag", return_residual=True)
            (out, lse), grads = value_and_grads(attend, inputs[:3], (inputs.d_out, np.ones((2, 49, 8), np.float32)))
            assert [x.dtype for x in (out, lse, *grads)] == [jnp.bfloat16, jnp.float32] + [jnp.bfloat16] * 3
            results.append([np.asarray(x, np.float32) for x in (out, lse, *grads)])
    for name, a, b in zip(Expected._fields, *results, strict=False):
        np.testing.assert_array_equal(a, b, err_msg=name)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_float64_inputs_are_computed_in_float64(schedule):
    rng = np.random.default_rng(11)
    with jax.enable_x64(True):
        inputs = random_inputs(12, query_length=10, heads=4, kv_heads=2, dtype=jnp.float64)
        extra = {"bias": rng.normal(size=(1, 4, 10, 10)), "sinks": rng.normal(size=4)}
        have = check_ring(
            inputs,
            mesh=ring_mesh(3),
            spec=SEQ,
            schedule=schedule,
            is_causal=True,
            d_lse=rng.normal(size=(1, 10, 4)),
            tolerance=1e-12,
            **extra,
        )
    assert {x.dtype for x in have} == {np.dtype(np.float64)}


@pytest.mark.parametrize("implementation", ["xla", "autodiff"])
@pytest.mark.parametrize("name", ["highest", "high", None])
def test_default_matmul_precision_reaches_every_matmul_of_both_passes(name, implementation):
    query = random_inputs(13, query_length=8).query
    want = None if name is None else jax.lax.Precision(name)

    def attend(x):
        with jax.default_matmul_precision(name):  # the backward pass is traced after this has ended
            return on_ring(2, is_causal=True, implementation=implementation)(x, x, x)

    for function in (attend, jax.grad(lambda x: (attend(x) ** 2).sum())):
        found = [
            equation.params["precision"]
            for equation, _ in equations(jax.make_jaxpr(function)(query).jaxpr)
            if equation.primitive.name == "dot_general"
        ]
        assert len(found) >= 2
        for precision in found:
            assert precision in (want, (want, want)), found


def floats(variables: Any) -> list[Any]:
    return [v.aval for v in variables if jnp.issubdtype(v.aval.dtype, jnp.floating)]


@pytest.mark.fast
@pytest.mark.parametrize("schedule", ["ring", "bidirectional"])
def test_what_is_carried_from_hop_to_hop_is_float32_but_for_the_chunks(schedule):
    inputs = random_inputs(14, query_length=24, dtype=jnp.bfloat16)

    def attend(query, key, value):
        return on_ring(6, schedule=schedule)(query, key, value)

    def gradients(query, key, value, d_out):
        return jax.vjp(attend, query, key, value)[1](d_out)

    streams = 2 if schedule == "bidirectional" else 1
    rings = []
    for equation, _ in equations(jax.make_jaxpr(gradients)(*inputs).jaxpr):
        params = equation.params
        if equation.primitive.name == "scan" and any(e.primitive.name == "ppermute" for e, _ in equations(params["jaxpr"].jaxpr)):
            rings.append(sorted(str(x.dtype) for x in floats(equation.outvars)))  # the ring stacks nothing: all is carry
        elif equation.primitive.name == "while":
            assert {x.dtype for x in floats(equation.outvars)} == {np.dtype(np.float32)}
    forward = ["bfloat16"] * 2 * streams + ["float32"] * 3  # key and value; output, sum and max
    backward = ["bfloat16"] * 2 * streams + ["float32"] * (2 * streams + 1)  # key and value; their gradients; d_query
    assert rings == [forward, backward]


# Everything at once.


EVERYTHING: dict[str, Any] = {
    "is_causal": True,
    "query_seq_lengths": np.array([16, 14]),
    "key_value_seq_lengths": np.array([15, 16]),
    "local_window_size": (9, 3),
    "logits_soft_cap": 2.0,
    "scale": 0.4,
}


def test_gradients_with_every_optional_argument_at_once():
    inputs = random_inputs(15, 2, 16, heads=4, kv_heads=2, value_dim=5)
    rng = np.random.default_rng(16)
    check_ring(
        inputs,
        mesh=ring_mesh(4),
        spec=SEQ,
        axis_name="seq",
        layout="striped",
        schedule="bidirectional",
        block_sizes=(2, 1),
        implementation="xla",
        segment_ids=np.sort(rng.integers(-1, 2, (2, 16)), axis=1),
        positions=np.stack([rng.permutation(16) for _ in range(2)]),
        bias=rng.normal(size=(2, 4, 16, 16)).astype(np.float32),
        mask=rng.random((2, 4, 16, 16)) < 0.8,
        sinks=rng.normal(size=4).astype(np.float32),
        d_lse=rng.normal(size=(2, 16, 4)),
        dense_options={"scale": 0.4, "logits_soft_cap": 2.0},
        **EVERYTHING,
    )


def test_integers_have_gradients_of_type_float0():
    query = random_inputs(17, batch=2, query_length=8).query
    segment_ids, positions = jnp.zeros((2, 8), jnp.int32), jnp.arange(8)
    lengths, mask = jnp.array([8, 5]), jnp.ones((1, 1, 8, 8), bool)

    def loss(query, segment_ids, positions, lengths, mask):
        attend = on_ring(2, is_causal=True, segment_ids=segment_ids, positions=positions, key_value_seq_lengths=lengths)
        return attend(query, query, query, mask=mask).sum()

    gradient = jax.grad(loss, argnums=range(5), allow_int=True)
    _, *grads = jax.eval_shape(gradient, query, segment_ids, positions, lengths, mask)
    assert [g.dtype for g in grads] == [jax.dtypes.float0] * 4


# Forward mode and second order.


@pytest.mark.fast
@pytest.mark.parametrize("ring_size", [None, 2], ids=["one_device", "ring"])
@pytest.mark.parametrize("transform", ["jvp", "jacfwd", "gradient_of_gradient"])
def test_what_a_custom_vjp_cannot_do_names_the_implementation_that_can(transform, ring_size):
    query = random_inputs(18, query_length=8).query
    attend = ring_attention if ring_size is None else on_ring(ring_size)

    def loss(x):
        return (attend(x, x, x, is_causal=True) ** 2).sum()

    # Forward mode is refused when it runs, so eagerly; the gradient of a gradient already when it is traced.
    call = {
        "jvp": lambda x: jax.jvp(loss, (x,), (x,)),
        "jacfwd": jax.jacfwd(loss),
        "gradient_of_gradient": functools.partial(jax.eval_shape, jax.grad(lambda x: jax.grad(loss)(x).sum())),
    }[transform]
    with pytest.raises(NotImplementedError, match="implementation='autodiff'"):
        call(query)


@pytest.mark.fast
@pytest.mark.parametrize("ring_size", [None, 2], ids=["one_device", "ring"])
def test_autodiff_implementation_has_every_mode_and_order(ring_size):
    inputs = random_inputs(19, query_length=8, heads=2, head_dim=2)
    direction = random_inputs(20, query_length=8, heads=2, head_dim=2)
    sinks = np.array([0.2, -0.4])

    def derivatives(attend, arrays, tangents, d_out):
        def loss(*arrays):
            out, lse = attend(*arrays)
            return (out * d_out).sum() + (lse**2).sum()

        def hvp_forward_over_reverse(arrays):
            return jax.jvp(jax.grad(loss, (0, 1, 2)), arrays, tangents)[1]

        def hvp_reverse_over_forward(arrays):
            return jax.grad(lambda a: jax.jvp(loss, a, tangents)[1])(arrays)

        def hvp_reverse_over_reverse(arrays):
            def slope(arrays):
                grads = jax.grad(loss, (0, 1, 2))(*arrays)
                return sum((g * t).sum() for g, t in zip(grads, tangents, strict=True))

            return jax.grad(slope)(arrays)

        return {
            "jvp": jax.jvp(attend, arrays, tangents),
            "forward over reverse": hvp_forward_over_reverse(arrays),
            "reverse over forward": hvp_reverse_over_forward(arrays),
            "reverse over reverse": hvp_reverse_over_reverse(arrays),
            "jacfwd": jax.jacfwd(lambda q: attend(q, *arrays[1:]))(arrays[0]),
            "hessian": jax.hessian(lambda q: loss(q, *arrays[1:]))(arrays[0]),
        }

    ring_options = {} if ring_size is None else {"mesh": ring_mesh(ring_size), "spec": SEQ}

    def ring(*arrays):
        options = {"implementation": "autodiff", "is_causal": True, "sinks": jnp.asarray(sinks, jnp.float32)}
        return ring_attention(*arrays, return_residual=True, **options, **ring_options)

    def dense(*arrays):
        return dense_attention(*arrays, visible_pairs(8, 8, is_causal=True)[:, None], sinks=sinks)

    with jax.enable_x64(True):
        wide = [tuple(jnp.asarray(np.asarray(x), jnp.float64) for x in inputs[:3]) for inputs in (inputs, direction)]
        want = jax.jit(functools.partial(derivatives, dense))(*wide, jnp.asarray(np.asarray(inputs.d_out)))
        want = jax.tree.map(np.asarray, want)
    have = jax.jit(functools.partial(derivatives, ring))(inputs[:3], direction[:3], inputs.d_out)
    for name, exact in want.items():
        for a, b in zip(jax.tree.leaves(have[name]), jax.tree.leaves(exact), strict=True):
            assert relative_error(a, b) <= FLOAT32_TOLERANCE, name


@pytest.mark.parametrize("ring_size", [None, 2], ids=["one_device", "ring"])
def test_forward_over_reverse_through_the_custom_vjp_is_right(ring_size):
    """JAX differentiates the backward pass itself here, which needs no rule of ours."""
    inputs, direction = (random_inputs(seed, query_length=8) for seed in (21, 22))
    seen = visible_pairs(8, 8, is_causal=True)[:, None]

    def hvp(attend, arrays, tangents, d_out):
        def loss(*arrays):
            out, lse = attend(*arrays)
            return (out**2 * d_out).sum() + (lse**2).sum()

        return jax.jvp(jax.grad(loss, (0, 1, 2)), tuple(arrays), tuple(tangents))[1]

    with jax.enable_x64(True):
        wide = [[jnp.asarray(np.asarray(x), jnp.float64) for x in one] for one in (inputs, direction)]
        want = hvp(lambda *a: dense_attention(*a, seen), wide[0][:3], wide[1][:3], wide[0][3])
        want = jax.tree.map(np.asarray, want)
    attend = ring_attention if ring_size is None else on_ring(ring_size)
    options = {"is_causal": True, "return_residual": True, "block_sizes": 3}
    have = jax.jit(functools.partial(hvp, functools.partial(attend, **options)))(inputs[:3], direction[:3], inputs.d_out)
    assert_close(have, want, FLOAT32_TOLERANCE)
