"""The Hopper kernels: what they refuse and that they lower (any machine), what they compute (marker gpu, on an sm_90 GPU)."""

from __future__ import annotations

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import mesh_of, ring_mesh
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import Program

from jax_ring_attention import Positions, SegmentIds, attention_chunk_stats, compat, merge_chunk_stats, ring_attention
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

HAS_KERNELS = compat.JAX_VERSION >= (0, 11)
hopper = functools.partial(ring_attention, implementation="mosaic_gpu")


def small(dtype=jnp.bfloat16, **sizes):
    return random_inputs(0, query_length=128, dtype=dtype, **({"head_dim": 64} | sizes))


@pytest.mark.fast
@pytest.mark.parametrize(
    ("inputs", "options", "reason"),
    [
        (small(jnp.float32), {}, "bfloat16 and float16, not float32"),
        (small(head_dim=320), {}, "at most 256"),
        (small(), {"mask": jnp.ones((1, 1, 128, 128), bool)}, "no dense mask or bias"),
        (small(), {"bias": jnp.zeros((1, 1, 128, 128))}, "no dense mask or bias"),
        (small(), {"block_sizes": 64}, "tiling is fixed"),
    ],
    ids=["float32", "wide heads", "mask", "bias", "block sizes"],
)
def test_refusals_give_the_reason_and_a_way_out(inputs, options, reason):
    if not HAS_KERNELS:
        reason = "needs jax 0.11 or newer"
    with pytest.raises(NotImplementedError, match=rf"implementation='mosaic_gpu' refuses: .*{reason}.*xla"):
        hopper(*inputs[:3], **options)


@pytest.mark.fast
@pytest.mark.parametrize("has_hopper", [True, False])
def test_the_automatic_choice_follows_the_device(monkeypatch, has_hopper):
    monkeypatch.setattr(compat, "has_hopper_gpu", lambda: has_hopper)
    text = str(jax.make_jaxpr(lambda q: ring_attention(q, q, q))(small().query))
    assert ("wgmma" in text) == (has_hopper and HAS_KERNELS)


@pytest.mark.fast
@pytest.mark.skipif(not HAS_KERNELS, reason="refused before jax 0.11")
@pytest.mark.parametrize("check_vma", [True, False])
def test_the_ring_lowers_for_cuda_forward_and_backward(check_vma):
    """Grouped heads, packed rows, zigzag: the whole gradient program, on a machine without a GPU."""
    mesh = ring_mesh(4)
    inputs = random_inputs(1, 2, 1024, heads=4, kv_heads=2, head_dim=128, dtype=jnp.bfloat16)
    segments = jnp.zeros((2, 1024), jnp.int32)

    def here(q, k, v, s):
        return hopper(q, k, v, segment_ids=s, is_causal=True, axis_name="seq", layout="zigzag")

    spec = P(None, "seq")
    attend = jax.shard_map(here, mesh=mesh, in_specs=(spec,) * 4, out_specs=spec, check_vma=check_vma)

    def loss(q, k, v):
        return attend(q, k, v, segments).astype(jnp.float32).sum()

    program = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*inputs[:3]).lower(lowering_platforms=("cuda",)).as_text()
    assert program.count("mosaic_gpu") > 5
    assert "collective_permute" in program


def gradient_program(head_dim=64, value_dim=None, **options):
    """StableHLO for CUDA of the whole gradient, and its jaxpr."""

    def loss(q, k, v):
        return hopper(q, k, v, **options).astype(jnp.float32).sum()

    query = jax.ShapeDtypeStruct((1, 256, 4, head_dim), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((1, 256, 2, head_dim), jnp.bfloat16)
    value = jax.ShapeDtypeStruct((1, 256, 2, value_dim or head_dim), jnp.bfloat16)
    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(query, key, value)
    return traced.lower(lowering_platforms=("cuda",)).as_text(), str(traced.jaxpr)


@pytest.mark.fast
@pytest.mark.skipif(not HAS_KERNELS, reason="refused before jax 0.11")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 128), (256, 256), (192, 192), (160, 40), (40, 224)])
def test_wide_heads_lower_for_cuda(is_causal, head_dim, value_dim):
    """One kernel forward; backward one for d_query, and one for d_key and d_value."""
    program, _ = gradient_program(head_dim, value_dim, is_causal=is_causal)
    assert program.count("@mosaic_gpu") == 3


@pytest.mark.fast
@pytest.mark.skipif(not HAS_KERNELS, reason="refused before jax 0.11")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_without_atomic_additions_when_asked(head_dim, deterministic):
    program, jaxpr = gradient_program(head_dim, is_causal=True, deterministic=deterministic)
    assert program.count("@mosaic_gpu") == (3 if deterministic else 2)
    assert ("reduction_op=add" in jaxpr) != deterministic


@pytest.mark.fast
@pytest.mark.skipif(not HAS_KERNELS, reason="refused before jax 0.11")
def test_vmap_of_the_gradient_lowers_for_cuda():
    def loss(q, k):
        return hopper(q, k, k).astype(jnp.float32).sum()

    arrays = jax.ShapeDtypeStruct((3, 1, 128, 2, 64), jnp.bfloat16)
    jax.jit(jax.vmap(jax.grad(loss))).trace(arrays, arrays).lower(lowering_platforms=("cuda",))


@pytest.mark.fast
@pytest.mark.skipif(not HAS_KERNELS, reason="refused before jax 0.11")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("first", "last"), [(None, None), (128, None), (None, "sinks")], ids=["alone", "chunks", "sinks"])
def test_every_start_and_end_of_a_fold_lowers_for_cuda(is_causal, first, last):
    """With and without a carry, finished in the kernel or not."""
    query = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
    sinks = jnp.zeros(2) if last else None

    def attend(q, k):
        chunks = k if first is None else jnp.split(k, [first], axis=1)
        return hopper(q, chunks, chunks, is_causal=is_causal, sinks=sinks, return_residual=True)

    text = jax.jit(attend).trace(query, query).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    # The output leaves the last kernel in bfloat16: nothing of its shape is float32 unless a carry goes in.
    assert ("1x256x2x64xf32" in text) == (first is not None or sinks is not None)


@pytest.mark.fast
@pytest.mark.skipif(not HAS_KERNELS, reason="refused before jax 0.11")
@pytest.mark.parametrize("given", [False, True])
def test_block_lists_are_constants_where_all_positions_are_known(given):
    def attend(q, k, positions):
        return hopper(q, k, k, is_causal=True, positions=positions if given else None)

    query, positions = jax.ShapeDtypeStruct((1, 250, 2, 64), jnp.bfloat16), jax.ShapeDtypeStruct((250,), jnp.int32)
    text = jax.jit(attend).trace(query, query, positions).lower(lowering_platforms=("cuda",)).as_text()
    assert ("stablehlo.sort" in text) == given


@pytest.mark.fast
@pytest.mark.skipif(not HAS_KERNELS, reason="refused before jax 0.11")
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_gradient_lowers_for_cuda_under_x64(is_causal):
    def loss(q, k):
        return hopper(q, k, k, is_causal=is_causal).astype(jnp.float32).sum()

    with jax.enable_x64(True):
        arrays = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
        jax.jit(jax.grad(loss)).trace(arrays, arrays).lower(lowering_platforms=("cuda",))


# On the GPU.

CASES = {
    "full": ({}, {}),
    "causal": ({}, {"is_causal": True}),
    "head dim 128": ({"head_dim": 128}, {"is_causal": True}),
    "grouped heads": ({"heads": 6, "kv_heads": 2, "head_dim": 128}, {"is_causal": True}),
    "one key head": ({"heads": 4, "kv_heads": 1}, {}),
    "head dim 80": ({"head_dim": 80}, {"is_causal": True}),
    "head dim 96, value 64": ({"head_dim": 96, "value_dim": 64}, {}),
    "prime length": ({"query_length": 509}, {"is_causal": True}),
    "shorter than a block": ({"query_length": 63}, {"is_causal": True}),
    "one token": ({"query_length": 1}, {}),
    "cross, more keys": ({"query_length": 130, "key_length": 700}, {}),
    "cross, more queries, causal": ({"query_length": 700, "key_length": 111}, {"is_causal": True}),
    "window": ({"query_length": 1000}, {"local_window_size": (100, 30)}),
    "causal window": ({"query_length": 1000, "head_dim": 128}, {"local_window_size": (200, None), "is_causal": True}),
    "soft cap": ({"head_dim": 128}, {"logits_soft_cap": 5.0, "is_causal": True}),
    "head dim 192, value 128": ({"head_dim": 192, "value_dim": 128, "query_length": 700}, {"is_causal": True}),
    "head dim 256": ({"head_dim": 256, "heads": 4, "kv_heads": 2}, {"is_causal": True}),
    "head dim 256, full, more keys": ({"head_dim": 256, "query_length": 130, "key_length": 700}, {}),
    "head dim 160, value 40": ({"head_dim": 160, "value_dim": 40}, {"local_window_size": (100, 30)}),
    "head dim 40, value 224": ({"head_dim": 40, "value_dim": 224}, {"logits_soft_cap": 5.0}),
    "deterministic": ({"query_length": 700, "heads": 4, "kv_heads": 2}, {"is_causal": True, "deterministic": True}),
    "deterministic, head dim 128": ({"query_length": 700, "head_dim": 128}, {"deterministic": True}),
    "lengths": ({"query_length": 384}, {"query_seq_lengths": [300, 17], "key_value_seq_lengths": [384, 130]}),
}


def compare(inputs, options, attend, d_lse=None, segment_ids=None, positions=None, sinks=None, chunks=None):
    """`attend` against dense float64, within what dense attention in the same dtype earns, outputs and gradients."""
    batch, length = inputs.query.shape[:2]
    masks = ("is_causal", "local_window_size", "query_seq_lengths", "key_value_seq_lengths")
    seen = visible_pairs(
        length,
        inputs.key.shape[1],
        batch=batch,
        segment_ids=segment_ids,
        positions=positions,
        **{name: options[name] for name in masks if name in options},
    )[:, None]
    dense = {"logits_soft_cap": options["logits_soft_cap"]} if "logits_soft_cap" in options else {}
    dense |= {"sinks": sinks, "d_lse": d_lse}
    want = dense_expected(inputs, seen, **dense)
    earned = earned_tolerances(inputs, want, seen, **dense)
    arrays = {name: jnp.asarray(x) for name, x in options.items() if name.endswith("lengths")}
    static = {name: x for name, x in options.items() if not name.endswith("lengths")}

    def function(query, key, value, sinks):
        return attend(query, key, value, sinks=sinks, return_residual=True, **arrays, **static)

    cotangents = (inputs.d_out, np.zeros_like(want.lse) if d_lse is None else d_lse)
    (out, lse), grads = value_and_grads(function, (*inputs[:3], sinks), cotangents)
    for name, have in zip(("out", "lse", "d_query", "d_key", "d_value", "d_sinks"), (out, lse, *grads), strict=True):
        if have is None:
            continue
        error, allowed = relative_error(have, getattr(want, name)), getattr(earned, name)
        assert error <= allowed, f"{name}: relative error {error:.2e}, earned {allowed:.2e}"


@pytest.mark.gpu
@pytest.mark.parametrize("spread", [1, 5])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("name", CASES)
def test_hopper_kernels_match_dense(name, dtype, spread):
    sizes, options = CASES[name]
    seed = int(np.random.default_rng().integers(2**31))
    inputs = random_inputs(seed, 2, **({"query_length": 512, "heads": 4, "head_dim": 64} | sizes), dtype=dtype, spread=spread)
    d_lse = jnp.asarray(np.random.default_rng(seed).normal(size=(2, inputs.query.shape[1], inputs.query.shape[2])), jnp.float32)
    compare(inputs, options, hopper, d_lse=d_lse)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed_rows_with_nan_in_the_padding(head_dim):
    rng = np.random.default_rng()
    inputs = random_inputs(3, 3, 600, heads=4, kv_heads=2, head_dim=head_dim, dtype=jnp.bfloat16)
    segments = np.sort(rng.integers(-1, 4, size=(3, 600)), axis=-1)
    segments[1] = 0
    segments[2, :300] = -1
    hidden = jnp.asarray(segments < 0)[:, :, None, None]
    clean = inputs._replace(d_out=jnp.where(hidden, 0, inputs.d_out))
    dirty = [jnp.where(hidden, jnp.nan, x) for x in inputs[:3]]
    attend = functools.partial(hopper, segment_ids=jnp.asarray(segments, jnp.int32))
    compare(clean, {"is_causal": True}, attend, segment_ids=segments, sinks=jnp.asarray(rng.normal(size=4), jnp.float32))
    grads = jax.grad(lambda *x: attend(*x, is_causal=True).astype(jnp.float32).sum(), (0, 1, 2))(*dirty)
    assert all(bool(jnp.isfinite(x).all()) for x in (attend(*dirty, is_causal=True), *grads))


@pytest.mark.gpu
def test_permuted_positions_and_different_sides():
    rng = np.random.default_rng()
    inputs = random_inputs(4, 2, 300, 520, heads=2, head_dim=128, dtype=jnp.bfloat16)
    positions = (rng.permutation(520)[:300], rng.permutation(520))
    segments = (rng.integers(0, 2, size=(2, 300)), rng.integers(-1, 2, size=(2, 520)))
    attend = functools.partial(
        hopper,
        positions=Positions(*(jnp.asarray(x, jnp.int32) for x in positions)),
        segment_ids=SegmentIds(*(jnp.asarray(x, jnp.int32) for x in segments)),
    )
    compare(inputs, {"is_causal": True}, attend, segment_ids=segments, positions=positions)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [(256, 256), (1, 200, 311)], ids=str)
def test_lists_of_chunks(splits):
    inputs = random_inputs(5, 1, 512, heads=4, kv_heads=2, head_dim=128, dtype=jnp.bfloat16)
    cuts = np.cumsum(splits)[:-1]

    def attend(query, key, value, **options):
        return hopper(query, jnp.split(key, cuts, axis=1), jnp.split(value, cuts, axis=1), **options)

    compare(inputs, {"is_causal": True}, attend)


@pytest.mark.gpu
def test_sinks_without_padding_and_rows_without_keys():
    inputs = random_inputs(9, 2, 256, heads=2, head_dim=64, dtype=jnp.bfloat16)
    sinks = jnp.asarray([0.5, 4.0], jnp.float32)
    segments = np.zeros((2, 256), np.int32)
    segments[1, :140] = -1
    attend = functools.partial(hopper, segment_ids=jnp.asarray(segments))
    compare(inputs, {}, attend, segment_ids=segments, sinks=sinks)
    compare(inputs, {}, attend, segment_ids=segments)


@pytest.mark.gpu
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_ring_of_one_gpu_under_shard_map_equals_no_ring(check_vma):
    inputs = random_inputs(6, 1, 512, heads=2, head_dim=128, dtype=jnp.bfloat16)
    spec = P(None, "seq")
    here = functools.partial(hopper, is_causal=True, axis_name="seq")
    ring = jax.shard_map(here, mesh=mesh_of(seq=1), in_specs=(spec,) * 3, out_specs=spec, check_vma=check_vma)
    have = value_and_grads(ring, inputs[:3], inputs.d_out)
    want = value_and_grads(functools.partial(hopper, is_causal=True), inputs[:3], inputs.d_out)
    assert_close(have, want, 1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "is_causal"), [(64, False), (128, True), (256, True)])
def test_deterministic_gradients_are_the_same_bit_by_bit(head_dim, is_causal):
    inputs = random_inputs(10, 2, 1024, heads=4, kv_heads=2, head_dim=head_dim, dtype=jnp.bfloat16)
    attend = functools.partial(hopper, is_causal=is_causal, deterministic=True)
    gradient = jax.jit(lambda: jax.vjp(attend, *inputs[:3])[1](jnp.asarray(inputs.d_out)))
    first = [np.asarray(x) for x in gradient()]
    for _ in range(30):
        for have, want in zip(gradient(), first, strict=True):
            np.testing.assert_array_equal(np.asarray(have).view(np.uint16), want.view(np.uint16))


@pytest.mark.gpu
def test_arrays_of_more_than_2_to_the_31_numbers():
    """With a window the last tokens, whose numbers lie beyond 32 bits, give what they give by themselves."""
    length, tail = 2**20 + 2**16, 4096
    if jax.local_devices()[0].memory_stats()["bytes_limit"] < 80 * 2**30:
        pytest.skip("needs 80 GiB of device memory")
    query, key, value, d_out = (jax.random.normal(jax.random.key(i), (1, length, 16, 128), jnp.bfloat16) for i in range(4))
    assert query.size > 2**31
    attend = functools.partial(hopper, local_window_size=(200, 0))

    def in_chunks(query, key, value):
        return attend(query, jnp.split(key, 2, axis=1), jnp.split(value, 2, axis=1))

    @functools.partial(jax.jit, static_argnums=0)
    def both(attention, *arrays):
        out, pull = jax.vjp(attention, *arrays[:3])
        return out, *pull(arrays[3])

    def end(x):  # the first of the tail's rows see keys before it, its first keys are seen from before it
        return np.asarray(x[:, -tail + 512 :].astype(jnp.float32))

    want = both(attend, *(x[:, -tail:] for x in (query, key, value, d_out)))
    np.testing.assert_array_equal(end(jax.jit(in_chunks)(query, key, value)), end(want[0]))
    for have, right in zip(both(attend, query, key, value, d_out), want, strict=True):
        np.testing.assert_allclose(end(have), end(right), rtol=1e-2, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("remat", [False, True])
def test_a_scan_over_layers_equals_a_loop(remat):
    """The backward kernel adds to d_query in place: every layer must start from zeros of its own."""
    inputs = random_inputs(11, 1, 512, heads=2, head_dim=64, dtype=jnp.bfloat16)
    scales = jnp.asarray(np.random.default_rng(11).normal(size=(4, 3)), jnp.bfloat16)

    def layer(x, scale):
        return hopper(x * scale[0], x * scale[1], x * scale[2], is_causal=True) + x

    layer = jax.checkpoint(layer) if remat else layer

    def scanned(x, scales):
        return jax.lax.scan(lambda x, scale: (layer(x, scale), None), x, scales)[0]

    def unrolled(x, scales):
        for scale in scales:
            x = layer(x, scale)
        return x

    have, want = (value_and_grads(f, (inputs.query, scales), inputs.d_out) for f in (scanned, unrolled))
    assert_close(jax.tree.leaves(have), jax.tree.leaves(want), 1e-2)


@pytest.mark.gpu
def test_vmap_and_x64_change_nothing():
    inputs = random_inputs(7, 3, 256, heads=2, head_dim=64, dtype=jnp.bfloat16)
    loss_grad = jax.grad(lambda q, k, v, d: (hopper(q, k, v) * d).astype(jnp.float32).sum(), (0, 1, 2))
    want = loss_grad(*inputs)
    each = jax.vmap(lambda *row: loss_grad(*(x[None] for x in row)))(*inputs)
    assert_close([x[:, 0] for x in each], want, 1e-3)
    with jax.enable_x64(True):
        assert_close(loss_grad(*inputs), want, 1e-3)


@pytest.mark.gpu
def test_merged_public_statistics_differentiate():
    inputs = random_inputs(8, 1, 256, heads=2, head_dim=64, dtype=jnp.bfloat16)
    stats = functools.partial(attention_chunk_stats, implementation="mosaic_gpu")

    def attend(query, key, value, *, sinks, return_residual):
        from jax_ring_attention import finalize_chunk_stats

        halves = [stats(query, k, v) for k, v in zip(jnp.split(key, 2, 1), jnp.split(value, 2, 1), strict=True)]
        out, lse = finalize_chunk_stats(merge_chunk_stats(*halves))
        return out.astype(query.dtype), lse

    compare(inputs, {}, attend)


@pytest.mark.gpu
def test_transfers_of_a_ring_of_eight_gpus_hide_behind_the_kernels():
    """Compiled ahead of time for GPUs that are not here: in every loop sends start before a kernel and end after it."""
    devices = topologies.get_topology_desc(platform="cuda", topology_name="h", topology="1x1x8").devices
    mesh = Mesh(np.asarray(devices), ("seq",))
    spec = P(None, "seq")
    struct = jax.ShapeDtypeStruct((1, 8 * 1024, 2, 128), jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    def loss(q, k, v):
        return hopper(q, k, v, is_causal=True, layout="zigzag", mesh=mesh, spec=spec).astype(jnp.float32).sum()

    program = Program(jax.jit(jax.grad(loss, (0, 1, 2))).lower(struct, struct, struct).compile().as_text())
    loops = 0
    for name, body in program.computations.items():
        sends = [i for i, one in enumerate(body) if one.opcode == "collective-permute-start"]
        kernels = [i for i, one in enumerate(body) if one.opcode == "custom-call" and "mosaic_gpu" in one.attributes]
        if name == program.entry or not sends:
            continue
        loops += 1
        for i in sends:
            waits = [one.opcode == "collective-permute-done" and body[i].name in one.operands for one in body]
            done = waits.index(True)
            assert any(i < kernel < done for kernel in kernels), [one.opcode for one in body[i:done]]
    assert loops == 2


@pytest.mark.gpu
def test_a_hopper_gpu_takes_its_kernels_by_itself_and_falls_back_for_float32():
    bf16, f32 = small(), small(jnp.float32)
    assert "mosaic_gpu" in jax.jit(ring_attention).lower(*bf16[:3]).as_text()
    assert "mosaic_gpu" not in jax.jit(ring_attention).lower(*f32[:3]).as_text()


def test_expected_and_earned_have_the_same_fields():
    """The comparison above looks both up by name."""
    inputs = small()
    want = dense_expected(inputs)
    assert isinstance(earned_tolerances(inputs, want), Expected)


@pytest.mark.fast
def test_importing_the_package_imports_no_kernel_language():
    """jax and numpy are the only dependencies, and Pallas Mosaic GPU needs more."""
    code = "import sys, jax_ring_attention; assert 'jax.experimental.mosaic.gpu' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
