"""Compiles the whole ring for TPUs that are not here, with the TPU compiler that comes with JAX."""

from __future__ import annotations

import functools
import os
import time
from typing import NamedTuple

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no TPU machine to ask about itself
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # nothing here occupies a TPU, so other processes may compile too

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from programs import Program

from jax_ring_attention import make_ring_mesh, ring_attention

HEADS, KV_HEADS, DIM, TOKENS = 4, 2, 128, 256
NAMES = ("data", "seq", "tensor")
SPEC = PartitionSpec(*NAMES)
CHUNK = TOKENS * KV_HEADS * DIM


class Compiled(NamedTuple):
    program: Program
    temporary_bytes: int
    seconds: float


def devices_of(topology: str, **options) -> list[jax.Device]:
    return topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices


def ring_mesh(topology: str, data: int = 1, tensor: int = 1, **options) -> Mesh:
    devices = devices_of(topology, **options)
    return make_ring_mesh((data, len(devices) // data // tensor, tensor), NAMES, ring_axis="seq", devices=devices)


def compile_for(mesh: Mesh, name: str, implementation: str = "xla", tokens: int = TOKENS, **options) -> Compiled:
    """Causal zigzag attention with grouped queries in bfloat16, as much per device on any mesh: "forward", or "grad" for both."""
    data, ring_size, tensor = mesh.devices.shape

    def forward(query, key, value):
        return ring_attention(
            query, key, value, is_causal=True, layout="zigzag", mesh=mesh, spec=SPEC, implementation=implementation, **options
        )

    def grad(query, key, value, d_out):
        out, pull = jax.vjp(forward, query, key, value)
        return out, pull(d_out)

    def struct(heads):
        shape = (data, tokens * ring_size, heads * tensor, DIM)
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, SPEC))

    arguments = [struct(heads) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    function, arguments = (forward, arguments[:3]) if name == "forward" else (grad, arguments)
    begin = time.perf_counter()
    compiled = jax.jit(function).lower(*arguments).compile()
    seconds = time.perf_counter() - begin
    return Compiled(Program(compiled.as_text()), compiled.memory_analysis().temp_size_in_bytes, seconds)


@functools.cache
def compiled_for(topology: str, name: str, implementation: str = "xla", tokens: int = TOKENS) -> Compiled:
    return compile_for(ring_mesh(topology), name, implementation, tokens)
