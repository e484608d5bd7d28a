"""Every way to say where the arrays are: inside `shard_map`, global on a mesh, Auto and Explicit axis types, no mesh at all."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import FLOAT32_TOLERANCE, check_ring, mesh_of, ring_mesh
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jax_ring_attention import SegmentIds, from_layout, ring_attention, to_layout
from jax_ring_attention.testing import (
    AttentionInputs,
    Expected,
    assert_close,
    dense_expected,
    random_inputs,
    relative_error,
    value_and_grads,
    visible_pairs,
)

P = PartitionSpec
BATCH, LENGTH, HEADS, KV_HEADS, DIM = 2, 16, 4, 2, 8


def with_check_vma(test):
    return pytest.mark.parametrize("check_vma", [True, False], ids=["check_vma", "no_check_vma"])(test)


@functools.cache
def grouped_inputs(length: int = LENGTH) -> AttentionInputs:
    return random_inputs(1, BATCH, length, heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM)


@functools.cache
def d_lse(length: int = LENGTH) -> jax.Array:
    return jnp.asarray(np.random.default_rng(2).normal(size=(BATCH, length, HEADS)), jnp.float32)


@functools.cache
def causal_expected(length: int = LENGTH) -> Expected:
    return dense_expected(grouped_inputs(length), visible_pairs(length, length, is_causal=True)[:, None], d_lse=d_lse(length))


def assert_causal(out: Any, lse: Any, grads: Any, length: int = LENGTH) -> None:
    assert_close((out, lse, *grads), causal_expected(length)[:5], FLOAT32_TOLERANCE, Expected._fields)


def put(mesh: Any, spec: PartitionSpec, *arrays: Any) -> list[jax.Array]:
    """The arrays on the mesh, with as many entries of `spec` as they have axes."""
    return [jax.device_put(x, NamedSharding(mesh, P(*spec[: x.ndim]))) for x in arrays]


# Inside the user's shard_map.


@pytest.mark.fast
@with_check_vma
def test_shards_inside_shard_map_differentiate_from_outside(check_vma):
    inputs = grouped_inputs()
    spec = P(None, "seq")
    attend = jax.shard_map(
        lambda *x: ring_attention(*x, axis_name="seq", is_causal=True, return_residual=True),
        mesh=ring_mesh(4),
        in_specs=(spec,) * 3,
        out_specs=(spec, spec),
        check_vma=check_vma,
    )
    (out, lse), grads = value_and_grads(attend, inputs[:3], (inputs.d_out, d_lse()))
    assert_causal(out, lse, grads)


@with_check_vma
def test_shards_inside_an_eager_shard_map(check_vma):
    """Forward only: eagerly every operation is compiled by itself. test_transforms.py has an eager gradient."""
    inputs = grouped_inputs()
    spec = P(None, "seq")
    out, lse = jax.shard_map(
        lambda *x: ring_attention(*x, axis_name="seq", is_causal=True, return_residual=True),
        mesh=ring_mesh(4),
        in_specs=(spec,) * 3,
        out_specs=(spec, spec),
        check_vma=check_vma,
    )(*inputs[:3])
    assert_close((out, lse), causal_expected()[:2], FLOAT32_TOLERANCE)


@with_check_vma
def test_gradients_taken_inside_shard_map(check_vma):
    """Of sharded arrays: the whole gradient of the sum of all devices' losses. Of a replicated array: with check_vma the same,
    already summed by JAX; without it this device's contribution, which the user sums."""
    inputs = grouped_inputs()
    sinks, gain = jnp.asarray([0.5, -1.0, 0.0, 1.0]), jnp.asarray(np.linspace(0.5, 1.5, DIM), jnp.float32)
    spec = P(None, "seq")

    def body(query, key, value, d_out, sinks, gain):
        def loss(query, key, value, sinks, gain):
            out = ring_attention(query * gain, key, value, axis_name="seq", is_causal=True, sinks=sinks)
            return (out * d_out).sum()

        *d_shards, d_sinks, d_gain = jax.grad(loss, argnums=range(5))(query, key, value, sinks, gain)
        d_replicated = (d_sinks, d_gain) if check_vma else (d_sinks[None], d_gain[None])
        return tuple(d_shards), d_replicated

    replicated_out = P() if check_vma else P("seq")
    d_shards, (d_sinks, d_gain) = jax.jit(
        jax.shard_map(
            body,
            mesh=ring_mesh(4),
            in_specs=(spec,) * 4 + (P(), P()),
            out_specs=(spec, replicated_out),
            check_vma=check_vma,
        )
    )(*inputs, sinks, gain)

    scaled = inputs._replace(query=inputs.query * gain)
    want = dense_expected(scaled, visible_pairs(LENGTH, LENGTH, is_causal=True)[:, None], sinks=sinks)
    assert_close(d_shards, (want.d_query * np.asarray(gain), want.d_key, want.d_value), FLOAT32_TOLERANCE)
    by_token = (want.d_query * np.asarray(inputs.query, float)).sum((0, 2))  # (T, H)
    if check_vma:
        assert_close((d_sinks, d_gain), (want.d_sinks, by_token.sum(0)), FLOAT32_TOLERANCE)
    else:
        assert_close((d_sinks.sum(0), d_gain), (want.d_sinks, by_token.reshape(4, -1, DIM).sum(1)), FLOAT32_TOLERANCE)
        assert relative_error(d_sinks[3], want.d_sinks) > 0.1


@with_check_vma
def test_segment_ids_bias_and_mask_inside_shard_map_are_rows_of_this_device(check_vma):
    """Segment ids of the keys travel; bias and mask have this device's rows and the keys of the whole ring."""
    inputs = grouped_inputs()
    rng = np.random.default_rng(3)
    segment_ids = np.sort(rng.integers(-1, 2, (BATCH, LENGTH)), axis=1).astype(np.int32)
    mask = rng.random((BATCH, 1, LENGTH, LENGTH)) < 0.7
    bias = jnp.asarray(rng.normal(size=(1, HEADS, LENGTH, LENGTH)), jnp.float32)
    seen = visible_pairs(LENGTH, LENGTH, batch=BATCH, segment_ids=segment_ids)[:, None] & mask
    want = dense_expected(inputs, seen, bias=bias)
    tokens, dense = P(None, "seq"), P(None, None, "seq")

    def body(query, key, value, bias, query_ids, key_ids, mask):
        ids = SegmentIds(query_ids, key_ids)
        return ring_attention(query, key, value, bias, mask, segment_ids=ids, axis_name="seq", return_residual=True)

    sharded = jax.shard_map(
        body,
        mesh=ring_mesh(4),
        in_specs=(tokens,) * 3 + (dense, tokens, tokens, dense),
        out_specs=(tokens, tokens),
        check_vma=check_vma,
    )

    def attend(query, key, value, bias):
        return sharded(query, key, value, bias, segment_ids, segment_ids, mask)

    (out, lse), grads = value_and_grads(attend, (*inputs[:3], bias), (inputs.d_out, np.zeros(want.lse.shape)))
    assert_close((out, lse, *grads), want[:6], FLOAT32_TOLERANCE, Expected._fields)


def test_an_empty_axis_name_inside_shard_map_attends_over_the_local_arrays_alone():
    inputs = grouped_inputs()
    whole, spec = causal_expected(), P("data")
    attend = jax.shard_map(
        lambda *x: ring_attention(*x, axis_name=(), is_causal=True, return_residual=True),
        mesh=mesh_of(data=2),
        in_specs=(spec,) * 3,
        out_specs=(spec, spec),
    )
    (out, lse), grads = value_and_grads(attend, inputs[:3], (inputs.d_out, d_lse()))
    assert_close((out, lse, *grads), whole[:5], FLOAT32_TOLERANCE, Expected._fields)
    with pytest.raises(ValueError, match=r"name the ring, axis_name=.*axis_name=\(\) for attention over the local arrays"):
        jax.shard_map(ring_attention, mesh=mesh_of(data=2), in_specs=(spec,) * 3, out_specs=spec)(*inputs[:3])


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_the_ring_may_run_over_two_axes_inside_shard_map(layout):
    inputs = grouped_inputs()
    spec = P(None, ("outer", "inner"))
    sharded = jax.shard_map(
        lambda *x: ring_attention(*x, axis_name=("outer", "inner"), is_causal=True, layout=layout, return_residual=True),
        mesh=mesh_of(outer=2, inner=2),
        in_specs=(spec,) * 3,
        out_specs=(spec, spec),
    )

    def attend(*arrays):
        return tuple(from_layout(x, layout, 4) for x in sharded(*(to_layout(x, layout, 4) for x in arrays)))

    (out, lse), grads = value_and_grads(attend, inputs[:3], (inputs.d_out, d_lse()))
    assert_causal(out, lse, grads)


@pytest.mark.parametrize("mesh_given", [True, False], ids=["mesh_argument", "mesh_in_context"])
def test_inside_a_shard_map_over_data_alone_the_call_takes_arrays_global_over_the_ring(mesh_given):
    inputs = grouped_inputs()
    mesh = mesh_of(data=2, seq=4)

    def body(query, key, value):
        given = {"mesh": jax.sharding.get_abstract_mesh()} if mesh_given else {}
        return ring_attention(query, key, value, spec=P(None, "seq"), is_causal=True, return_residual=True, **given)

    attend = jax.shard_map(body, mesh=mesh, in_specs=(P("data"),) * 3, out_specs=(P("data"), P("data")), axis_names={"data"})
    (out, lse), grads = value_and_grads(attend, inputs[:3], (inputs.d_out, d_lse()))
    assert_causal(out, lse, grads)


# Global arrays.


@pytest.mark.fast
@pytest.mark.parametrize(
    ("axis_type", "in_context", "sharded", "spec_given"),
    [
        pytest.param(AxisType.Auto, False, False, True, id="auto_mesh_argument"),
        pytest.param(AxisType.Auto, True, False, True, id="auto_set_mesh"),
        pytest.param(AxisType.Auto, True, True, True, id="auto_set_mesh_sharded"),
        pytest.param(AxisType.Explicit, True, True, False, id="explicit_set_mesh_spec_read_off_the_arrays"),
        pytest.param(AxisType.Explicit, False, True, False, id="explicit_mesh_and_spec_read_off_the_arrays"),
        pytest.param(AxisType.Explicit, True, False, True, id="explicit_replicated_arrays_are_resharded"),
        pytest.param(AxisType.Explicit, False, True, True, id="explicit_mesh_argument"),
    ],
)
def test_global_arrays_on_a_data_seq_mesh(axis_type, in_context, sharded, spec_given):
    inputs = grouped_inputs()
    mesh, spec = mesh_of(axis_type, data=2, seq=4), P("data", "seq")
    options: dict[str, Any] = {"spec": spec} if spec_given else {}
    if not in_context and (axis_type == AxisType.Auto or spec_given):
        options["mesh"] = mesh
    *arrays, d_out = put(mesh, spec if sharded else P(None, None), *inputs)
    cotangents = put(mesh, spec if sharded or axis_type == AxisType.Explicit else P(None, None), d_out, d_lse())

    def attend(query, key, value):
        return ring_attention(query, key, value, is_causal=True, return_residual=True, **options)

    with jax.set_mesh(mesh) if in_context else contextlib.nullcontext():
        (out, lse), grads = value_and_grads(attend, arrays, tuple(cotangents))
    assert_causal(out, lse, grads)
    for x in (out, lse):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, P(*spec[: x.ndim])), x.ndim)
    if axis_type == AxisType.Explicit:  # a gradient has the type of what it is the gradient of
        for grad, array in zip(grads, arrays, strict=True):
            assert grad.sharding.is_equivalent_to(array.sharding, 4)


def test_explicit_arrays_whose_tokens_are_whole_get_advice():
    mesh = mesh_of(AxisType.Explicit, data=2, seq=4)
    arrays = put(mesh, P("data"), *grouped_inputs()[:3])
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"nothing says how the sequence is sharded.*pass spec.*reshard"):
        ring_attention(*arrays)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_batch_tokens_and_heads_sharded_with_every_argument(axis_type):
    inputs = grouped_inputs()
    rng = np.random.default_rng(4)
    mesh, spec = mesh_of(axis_type, data=2, seq=2, tensor=2), P("data", "seq", "tensor")
    segment_ids = np.sort(rng.integers(-1, 2, (BATCH, LENGTH)), axis=1)
    mask = rng.random((BATCH, HEADS, LENGTH, LENGTH)) < 0.7
    lengths = np.array([LENGTH, LENGTH - 3])
    bias, sinks = rng.normal(size=mask.shape).astype(np.float32), rng.normal(size=HEADS).astype(np.float32)
    common = {"is_causal": True, "key_value_seq_lengths": lengths}
    extra = {"bias": bias, "sinks": sinks}
    if axis_type == AxisType.Auto:
        check_ring(
            inputs, mesh=mesh, spec=spec, layout="zigzag", d_lse=d_lse(), mask=mask, segment_ids=segment_ids, **extra, **common
        )
        return
    seen = visible_pairs(LENGTH, LENGTH, batch=BATCH, segment_ids=segment_ids, **common)[:, None] & mask
    want = dense_expected(inputs, seen, d_lse=d_lse(), **extra)
    *arrays, d_out, lse_cotangent = put(mesh, spec, *inputs, d_lse())

    def attend(query, key, value, bias, sinks):
        more = {"mask": mask, "segment_ids": segment_ids, "sinks": sinks, **common}
        return ring_attention(query, key, value, bias, return_residual=True, **more)

    with jax.set_mesh(mesh):
        arguments = (*arrays, jnp.asarray(bias), jnp.asarray(sinks))
        (out, lse), grads = value_and_grads(attend, arguments, (d_out, lse_cotangent))
    assert_close((out, lse, *grads), want, FLOAT32_TOLERANCE, Expected._fields)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, spec), 4)


@pytest.mark.parametrize(
    ("axis_type", "in_context"), [(AxisType.Auto, False), (AxisType.Explicit, True)], ids=["auto", "explicit"]
)
def test_lengths_that_do_not_divide_are_padded_on_every_kind_of_mesh(axis_type, in_context):
    length = 13
    inputs = grouped_inputs(length)
    mesh, spec = mesh_of(axis_type, data=2, seq=4), P("data", "seq")
    options = {} if in_context else {"mesh": mesh}
    *arrays, d_out, lse_cotangent = put(mesh, P("data"), *inputs, d_lse(length))

    def attend(query, key, value):
        return ring_attention(query, key, value, spec=spec, is_causal=True, return_residual=True, **options)

    with jax.set_mesh(mesh) if in_context else contextlib.nullcontext():
        (out, lse), grads = value_and_grads(attend, arrays, (d_out, lse_cotangent))
    assert_causal(out, lse, grads, length)


def test_the_ring_may_run_over_two_axes_of_the_mesh():
    mesh = mesh_of(data=2, outer=2, inner=2)
    inputs = grouped_inputs()
    check_ring(inputs, mesh=mesh, spec=P("data", ("outer", "inner")), layout="zigzag", is_causal=True, d_lse=d_lse())


def test_a_ring_axis_of_size_one_and_a_mesh_of_one_device():
    inputs = grouped_inputs()
    for mesh, spec in ((mesh_of(data=2, seq=1), P("data", "seq")), (ring_mesh(1), P(None, "seq"))):
        check_ring(inputs, mesh=mesh, spec=spec, is_causal=True, d_lse=d_lse())


def test_axes_that_the_spec_does_not_name_hold_copies():
    inputs = grouped_inputs()
    mesh, spec = mesh_of(data=2, seq=2, unused=2), P(None, "seq")
    (out, lse), grads = value_and_grads(
        lambda *x: ring_attention(*x, axis_name="seq", mesh=mesh, is_causal=True, return_residual=True),
        inputs[:3],
        (inputs.d_out, d_lse()),
    )
    assert_causal(out, lse, grads)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, spec), 4)


@pytest.mark.fast
@pytest.mark.parametrize("with_mesh", [False, True], ids=["no_mesh", "mesh"])
def test_arrays_without_a_batch_or_without_heads(with_mesh):
    inputs = random_inputs(5, query_length=LENGTH, heads=1)
    options = {"mesh": ring_mesh(4), "spec": P(None, "seq")} if with_mesh else {}
    want = dense_expected(inputs, visible_pairs(LENGTH, LENGTH, is_causal=True)[:, None])

    def attend(query, key, value):
        batched = [x[0] for x in (query, key, value)]
        single = [x[0, :, 0] for x in (query, key, value)]
        return [ring_attention(*x, is_causal=True, return_residual=True, **options) for x in (batched, single)]

    cotangents = [(inputs.d_out[0], jnp.zeros((LENGTH, 1))), (jnp.zeros((LENGTH, DIM)), jnp.zeros(LENGTH))]
    (batched, single), grads = value_and_grads(attend, inputs[:3], cotangents)
    assert_close(batched, (want.out[0], want.lse[0]), FLOAT32_TOLERANCE)
    assert_close(single, (want.out[0, :, 0], want.lse[0, :, 0]), FLOAT32_TOLERANCE)
    assert_close(grads, want[2:5], FLOAT32_TOLERANCE)


@pytest.mark.fast
def test_no_mesh_at_all_is_one_device():
    inputs = grouped_inputs()
    (out, lse), grads = value_and_grads(
        lambda *x: ring_attention(*x, is_causal=True, return_residual=True), inputs[:3], (inputs.d_out, d_lse())
    )
    assert_causal(out, lse, grads)
    with pytest.raises(ValueError, match=r"need a mesh.*jax\.set_mesh"):
        ring_attention(*inputs[:3], axis_name="seq")


def test_an_abstract_mesh_says_the_shape_and_the_arrays_bring_the_devices():
    inputs = grouped_inputs()
    spec, mesh = P(None, "seq"), ring_mesh(4)
    abstract = AbstractMesh((4,), ("seq",), axis_types=(AxisType.Auto,))

    def attend(query, key, value):
        return ring_attention(query, key, value, mesh=abstract, spec=spec, is_causal=True, return_residual=True)

    shapes = jax.eval_shape(attend, *inputs[:3])
    assert [x.shape for x in shapes] == [inputs.query.shape, inputs.query.shape[:3]]
    *arrays, d_out, lse_cotangent = put(mesh, spec, *inputs, d_lse())
    (out, lse), grads = value_and_grads(attend, arrays, (d_out, lse_cotangent))
    assert_causal(out, lse, grads)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, spec), 4)


@pytest.mark.parametrize("in_chunks", [False, True], ids=["local_arrays", "chunks"])
def test_without_a_ring_inside_shard_map_keys_may_be_the_same_on_every_device(in_chunks):
    """Queries vary over the mesh and keys do not: the loops inside still carry one type."""
    inputs = random_inputs(90, 2, 8)
    mesh = mesh_of(data=2)

    def here(query, key, value):
        if in_chunks:
            return ring_attention(query, jnp.split(key, 2, axis=1), jnp.split(value, 2, axis=1), block_sizes=2)
        return ring_attention(query, key, value, axis_name=(), block_sizes=2)

    def attend(query, key, value):
        return jax.shard_map(here, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data"))(query, key, value)

    shared = inputs._replace(key=inputs.key[:1], value=inputs.value[:1])
    out, grads = value_and_grads(attend, shared[:3], shared.d_out)
    want = dense_expected(inputs._replace(key=jnp.repeat(shared.key, 2, 0), value=jnp.repeat(shared.value, 2, 0)))
    sums = (want.d_query, want.d_key.sum(0, keepdims=True), want.d_value.sum(0, keepdims=True))
    assert_close((out, grads), (want.out, sums), FLOAT32_TOLERANCE)
