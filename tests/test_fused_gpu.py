"""The fused ring on GPUs: refusals and lowering (any machine), a ring of one device (marker gpu, on an sm_90 GPU).

A ring of one device is its own neighbour. For any number of hops it runs the whole protocol: buffers, counters, credits, copying
CTAs; only the addresses are local. Its chunk is folded hops + 1 times.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import mesh_of, ring_mesh
from gpu_machine import Simulation
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import Program

from jax_ring_attention import Positions, compat, ring_attention
from jax_ring_attention.kernels.contract import Dense, Problem, Scope
from jax_ring_attention.kernels.mosaic_gpu import MosaicGpuKernel
from jax_ring_attention.kernels.mosaic_gpu.common import FORWARD_BLOCK_Q, forward_block_kv
from jax_ring_attention.masks import Tokens
from jax_ring_attention.testing import (
    assert_close,
    dense_expected,
    earned_tolerances,
    random_inputs,
    relative_error,
    visible_pairs,
)

needs_kernel = pytest.mark.skipif(compat.JAX_VERSION < (0, 11, 2), reason="refused before jax 0.11.2")
hopper = functools.partial(ring_attention, schedule="fused", implementation="mosaic_gpu")
SPEC = P(None, "seq")


def arrays(batch=1, length=1024, heads=4, kv_heads=2, head_dim=64, value_dim=None, dtype=jnp.bfloat16):
    shapes = ((heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim or head_dim))
    return [jax.ShapeDtypeStruct((batch, length, *shape), dtype) for shape in shapes]


def lowered(function, *arguments):
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


# On any machine.


@pytest.mark.fast
@pytest.mark.parametrize(
    ("dtype", "options", "reason"),
    [
        (jnp.float32, {}, "bfloat16 and float16, not float32"),
        (jnp.bfloat16, {"mask": jnp.ones((1, 1, 256, 256), bool)}, "no dense mask or bias"),
        (jnp.bfloat16, {"block_sizes": 64}, "tiling is fixed"),
    ],
    ids=["float32", "mask", "block sizes"],
)
def test_refusals_give_the_reason_and_a_way_out(dtype, options, reason):
    if compat.JAX_VERSION < (0, 11, 2):
        reason = "needs jax 0.11.2 or newer"
    inputs = random_inputs(0, query_length=256, head_dim=64, dtype=dtype)
    with pytest.raises(NotImplementedError, match=rf"schedule='fused' runs implementation='mosaic_gpu', .*{reason}.*'ring'"):
        hopper(*inputs[:3], mesh=ring_mesh(2), spec=SPEC, **options)


@pytest.mark.fast
def test_both_ways_is_for_tpus():
    with pytest.raises(NotImplementedError, match=r"'fused_bidirectional' is a TPU kernel; on GPUs use .*'fused'.* or 'bidirect"):
        jax.eval_shape(functools.partial(hopper, mesh=ring_mesh(2), spec=SPEC, schedule="fused_bidirectional"), *arrays())


@pytest.mark.fast
@needs_kernel
def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(NotImplementedError, match="one process that drives all GPUs, and there are 2"):
        jax.eval_shape(functools.partial(hopper, mesh=ring_mesh(2), spec=SPEC), *arrays())


@pytest.mark.fast
@needs_kernel
def test_a_hopper_gpu_takes_it_by_itself(monkeypatch):
    monkeypatch.setattr(compat, "has_hopper_gpu", lambda: True)
    attend = functools.partial(ring_attention, schedule="fused", mesh=ring_mesh(2), spec=SPEC)
    assert "@mosaic_gpu" in lowered(attend, *arrays())


@pytest.mark.fast
@needs_kernel
def test_vmap_is_refused():
    with pytest.raises(NotImplementedError, match="make the mapped axis part of the batch B"):
        jax.eval_shape(
            jax.vmap(functools.partial(hopper, mesh=ring_mesh(2), spec=SPEC), in_axes=(0, None, None)),
            jax.ShapeDtypeStruct((3, 1, 256, 4, 64), jnp.bfloat16),
            *arrays(length=256)[1:],
        )


@needs_kernel
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_ring_lowers_for_cuda_to_one_kernel_without_a_collective(size, check_vma):
    here = functools.partial(hopper, is_causal=True, axis_name="seq", layout="zigzag")
    attend = jax.shard_map(here, mesh=ring_mesh(size), in_specs=(SPEC,) * 3, out_specs=SPEC, check_vma=check_vma)
    program = lowered(attend, *arrays())
    assert program.count("@mosaic_gpu") == 1
    assert "stablehlo.collective" not in program
    assert "stablehlo.all_gather" not in program
    # Calls are held back until all devices have reached theirs.
    assert "uses_xla_collective_metadata = true" in program
    assert "skip_device_barrier = false" in program


@needs_kernel
@pytest.mark.parametrize(
    ("sizes", "options", "kernels"),
    [
        ({}, {}, 1),
        ({"head_dim": 128}, {"logits_soft_cap": 5.0, "is_causal": True}, 1),
        ({"head_dim": 192, "value_dim": 128}, {"is_causal": True}, 1),
        ({"head_dim": 256}, {}, 1),
        ({"head_dim": 80, "length": 1000}, {"local_window_size": (100, 30)}, 2),
        ({"batch": 2, "dtype": jnp.float16}, {"key_value_seq_lengths": jnp.asarray([700, 1000])}, 1),
        ({}, {"sinks": jnp.zeros(4), "layout": "striped", "is_causal": True}, 1),
        ({}, {"segment_ids": jnp.zeros((1, 1024), jnp.int32), "positions": jnp.arange(1024), "is_causal": True}, 1),
    ],
    ids=["full", "soft cap", "wide heads", "256", "window, two legs", "lengths", "sinks, striped", "given integers"],
)
def test_every_kind_of_ring_lowers_for_cuda(sizes, options, kernels):
    attend = functools.partial(hopper, mesh=ring_mesh(4), spec=SPEC, return_residual=True, **options)
    assert lowered(attend, *arrays(**sizes)).count("@mosaic_gpu") == kernels


@needs_kernel
@pytest.mark.parametrize(
    ("mesh", "spec"),
    [
        ({"data": 2, "seq": 2, "tensor": 2}, P("data", "seq", "tensor")),
        ({"a": 2, "b": 2, "c": 2}, P("b", ("a", "c"))),
        ({"seq": 4, "one": 1}, P(None, "seq")),
    ],
    ids=["beside data and tensor axes", "two axes apart", "an axis of one"],
)
def test_rings_on_any_axes_lower_for_cuda(mesh, spec):
    assert lowered(functools.partial(hopper, mesh=mesh_of(**mesh), spec=spec), *arrays(batch=2)).count("@mosaic_gpu") == 1


@needs_kernel
def test_the_gradient_is_that_of_the_plain_ring():
    """In a loop over layers, with rematerialisation."""

    def loss(x, scales):
        @jax.checkpoint
        def layer(x, scale):
            return hopper(x * scale, x, x, is_causal=True, layout="zigzag", mesh=ring_mesh(4), spec=SPEC) + x

        return jax.lax.scan(lambda x, scale: (layer(x, scale), None), x, scales)[0].astype(jnp.float32).sum()

    program = lowered(jax.grad(loss), arrays()[0], jax.ShapeDtypeStruct((3,), jnp.bfloat16))
    assert program.count("@mosaic_gpu") == 5  # one in the forward pass, again in the backward pass, and the three of its ring
    assert "stablehlo.collective_permute" in program


@needs_kernel
def test_it_lowers_under_x64():
    with jax.enable_x64(True):
        lowered(functools.partial(hopper, is_causal=True, mesh=ring_mesh(4), spec=SPEC), *arrays())


@pytest.mark.fast
@needs_kernel
def test_more_devices_send_where_queries_are_few():
    from jax_ring_attention.fused.mosaic_gpu.forward import copying_ctas

    def ctas(length, heads=16, kv_heads=16):
        problem = Problem((1, length, heads, 128), (1, length, kv_heads, 128), 128, jnp.dtype(jnp.bfloat16), 1.0)
        return copying_ctas(MosaicGpuKernel(problem).shape)

    assert [ctas(length) for length in (1024, 4096, 8192, 65536)] == [12, 8, 4, 2]
    assert ctas(8192, kv_heads=4) == 2


# A ring of one device.


def fold_own_chunk(query, key, value, hops: int, rank: int | None = None, soft_cap=None, carry=None, finish=True) -> Any:
    """`(out, lse)` of a ring of one device, or a packed carry.

    With `rank`, the mask is what that device of a causal ring of hops + 1 sees, though every chunk has the same numbers.
    """
    from jax_ring_attention.fused.mosaic_gpu.forward import fold_hops
    from jax_ring_attention.fused.mosaic_gpu.route import HopLists, Route

    reach, length = (None, None) if rank is None else (None, 0), key.shape[1]
    scale = query.shape[3] ** -0.5
    kernel = MosaicGpuKernel(Problem(query.shape, key.shape, value.shape[3], query.dtype, scale, reach, soft_cap))

    def of_hop(hop: Any) -> Any:
        tokens = Tokens(), Tokens()
        if rank is not None:
            queries = rank * length + jnp.arange(query.shape[1])
            tokens = Tokens(queries[None]), Tokens((rank - hop) % (hops + 1) * length + jnp.arange(length)[None])
        scope = Scope(*tokens, Dense(), 0)
        return kernel.blocks(scope, FORWARD_BLOCK_Q, forward_block_kv(kernel.shape), by_query=True), *kernel.tokens(scope)

    lists = HopLists(*jax.vmap(of_hop, out_axes=(0, None, 0))(jnp.arange(hops + 1, dtype=jnp.int32)))
    chunk = kernel.pack_chunk(key, value)
    stats = fold_hops(kernel.shape, Route(hops), kernel.pack_query(query), chunk, lists, carry, finish)
    return kernel.unpack_finished(stats) if finish else stats


def repeated(inputs, hops):
    """The chunk hops + 1 times."""
    return inputs._replace(**{name: jnp.concatenate([getattr(inputs, name)] * (hops + 1), axis=1) for name in ("key", "value")})


def positions_of(inputs, hops, rank):
    """Of the queries, and of all folded keys."""
    length = inputs.key.shape[1]
    keys = [(rank - hop) % (hops + 1) * length + np.arange(length) for hop in range(hops + 1)]
    return rank * length + np.arange(inputs.query.shape[1]), np.concatenate(keys)


def check_own_chunk(fold, inputs, hops, rank=None, soft_cap=None):
    """`fold(query, key, value)` against dense float64, within what dense attention in the same dtype earns."""
    whole = repeated(inputs, hops)
    masks = {} if rank is None else {"is_causal": True, "positions": positions_of(inputs, hops, rank)}
    seen = visible_pairs(whole.query.shape[1], whole.key.shape[1], batch=whole.query.shape[0], **masks)[:, None]
    dense = {} if soft_cap is None else {"logits_soft_cap": soft_cap}
    want = dense_expected(whole, seen, **dense)
    earned = earned_tolerances(whole, want, seen, **dense)
    out, lse = fold(*inputs[:3])
    for name, have in (("out", out), ("lse", lse)):
        error, allowed = relative_error(have, getattr(want, name)), getattr(earned, name)
        assert error <= allowed, f"{name}: relative error {error:.2e}, earned {allowed:.2e}"


@needs_kernel
@pytest.mark.parametrize("rank", [None, 2])
def test_a_simulated_ring_of_one_device_folds_its_chunk_again_and_again(rank, monkeypatch):
    """What the tests on the GPU rest on, without one."""
    inputs = random_inputs(0, 1, 256, heads=2, kv_heads=1, head_dim=64, dtype=jnp.bfloat16)
    simulation = Simulation(monkeypatch, 1, 0)

    def fold(query, key, value):
        (result,) = simulation.run(lambda _: fold_own_chunk(query, key, value, 3, rank))
        return result

    check_own_chunk(fold, inputs, 3, rank)


CASES: dict[str, tuple[Any, Any]] = {
    "full": ({}, {"hops": 3}),
    "one hop": ({}, {"hops": 1}),
    "seven hops": ({"query_length": 256}, {"hops": 7}),
    "causal, first rank": ({}, {"hops": 3, "rank": 0}),
    "causal, last rank": ({}, {"hops": 3, "rank": 3}),
    "causal, between": ({"query_length": 1024, "head_dim": 128}, {"hops": 3, "rank": 1}),
    "fewer items than CTAs": ({"query_length": 128, "heads": 1}, {"hops": 3}),
    "more items than CTAs": ({"query_length": 1024, "heads": 32, "kv_heads": 8}, {"hops": 2}),
    "more items than CTAs, causal": ({"query_length": 1024, "heads": 32, "kv_heads": 8}, {"hops": 2, "rank": 1}),
    "two rows": ({"batch": 2, "heads": 6, "kv_heads": 2}, {"hops": 3, "rank": 2}),
    "head dim 128": ({"head_dim": 128, "query_length": 2048}, {"hops": 3}),
    "head dim 256": ({"head_dim": 256}, {"hops": 3, "rank": 2}),
    "head dim 192, value 128": ({"head_dim": 192, "value_dim": 128}, {"hops": 2}),
    "head dim 80, odd length": ({"head_dim": 80, "query_length": 301}, {"hops": 3}),
    "odd length, causal": ({"query_length": 509}, {"hops": 3, "rank": 2}),
    "more keys": ({"query_length": 130, "key_length": 700}, {"hops": 2}),
    "more queries": ({"query_length": 700, "key_length": 111}, {"hops": 2}),
    "soft cap": ({"head_dim": 128}, {"hops": 3, "rank": 2, "soft_cap": 5.0}),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("name", CASES)
def test_a_ring_of_one_gpu_matches_dense(name, dtype):
    sizes, options = CASES[name]
    inputs = random_inputs(
        int(np.random.default_rng().integers(2**31)), **({"query_length": 512, "head_dim": 64} | sizes), dtype=dtype
    )
    check_own_chunk(jax.jit(functools.partial(fold_own_chunk, **options)), inputs, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize(("heads", "head_dim", "length"), [(16, 128, 8192), (16, 64, 8192), (8, 256, 4096)])
def test_a_long_ring_of_one_gpu_equals_a_list_of_chunks(heads, head_dim, length, rank):
    inputs = random_inputs(1, 1, length, heads=heads, kv_heads=heads // 4, head_dim=head_dim, dtype=jnp.bfloat16)
    hops = 3
    masks = {}
    if rank is not None:
        positions = (jnp.asarray(x, jnp.int32) for x in positions_of(inputs, hops, rank))
        masks = {"is_causal": True, "positions": Positions(*positions)}
    have = jax.jit(functools.partial(fold_own_chunk, hops=hops, rank=rank))(*inputs[:3])
    chunks = ([x] * (hops + 1) for x in inputs[1:3])
    want = ring_attention(inputs.query, *chunks, implementation="mosaic_gpu", return_residual=True, **masks)
    assert_close(have, want, 2e-3)
    assert_close(have[1], want[1], 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [None, 2])
def test_repeated_calls_give_the_same_bits(rank):
    """Also calls of unlike rings in turn: every call finds its counters at zero."""
    inputs = random_inputs(2, 1, 1024, heads=16, head_dim=128, dtype=jnp.bfloat16)
    folds = [jax.jit(functools.partial(fold_own_chunk, hops=hops, rank=rank)) for hops in (3, 5)]
    first = [fold(*inputs[:3])[0] for fold in folds]
    for _ in range(100):
        for fold, want in zip(folds, first, strict=True):
            np.testing.assert_array_equal(np.asarray(fold(*inputs[:3])[0]).view(np.uint16), np.asarray(want).view(np.uint16))


@pytest.mark.gpu
def test_a_scan_over_layers_equals_a_loop():
    inputs = random_inputs(3, 1, 1024, heads=4, head_dim=128, dtype=jnp.bfloat16)
    scales = jnp.asarray(np.random.default_rng(3).normal(size=6), jnp.bfloat16)

    def layer(x, scale):
        return fold_own_chunk(x * scale, x, x, hops=3, rank=2)[0] + x

    scanned = jax.jit(lambda x: jax.lax.scan(lambda x, scale: (layer(x, scale), None), x, scales)[0])(inputs.query)
    unrolled = inputs.query
    for scale in scales:
        unrolled = jax.jit(layer)(unrolled, scale)
    assert_close(scanned, unrolled, 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [None, 3])
def test_a_carry_goes_from_leg_to_leg(rank):
    inputs = random_inputs(4, 1, 512, heads=4, head_dim=64, dtype=jnp.bfloat16)

    def fold(query, key, value):
        carry = fold_own_chunk(query, key, value, hops=1, rank=rank and 1, finish=False)
        return fold_own_chunk(query, key, value, hops=1, rank=rank and 1, carry=carry)

    # Every key is folded twice as often: the output stays, the sum doubles.
    once = functools.partial(fold_own_chunk, hops=1, rank=rank and 1)
    (out, lse), (want, want_lse) = jax.jit(fold)(*inputs[:3]), jax.jit(once)(*inputs[:3])
    assert_close((out, lse), (want, want_lse + np.log(2)), 4e-3)


@pytest.mark.gpu
def test_the_ring_of_eight_gpus_compiles():
    """Ahead of time, for GPUs that are not here: the forward pass is one kernel, and no collective."""
    devices = topologies.get_topology_desc(platform="cuda", topology_name="h", topology="1x1x8").devices
    mesh = Mesh(np.asarray(devices), ("seq",))
    structs = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, SPEC)) for x in arrays(length=8192, head_dim=128)
    ]
    attend = functools.partial(hopper, is_causal=True, layout="zigzag", mesh=mesh, spec=SPEC)
    program = Program(jax.jit(attend).lower(*structs).compile().as_text())
    assert program.collectives == []


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_ring_of_all_gpus_matches_the_plain_ring(layout):
    """With one GPU there is nothing to fuse. With several it has never been run."""
    size = jax.device_count()
    inputs = random_inputs(5, 1, 1024 * size, heads=8, kv_heads=4, head_dim=128, dtype=jnp.bfloat16)
    call = functools.partial(
        ring_attention, is_causal=True, layout=layout, mesh=mesh_of(seq=size), spec=SPEC, implementation="mosaic_gpu"
    )
    have, want = (
        jax.jit(functools.partial(call, schedule=schedule, return_residual=True))(*inputs[:3]) for schedule in ("fused", "ring")
    )
    assert_close(have, want, 2e-3)
