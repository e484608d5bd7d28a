"""Child program of test_multiprocess: one of two processes that hold a ring of eight CPU devices together.

python worker_ring.py once PORT PROCESS FILE       runs attention forward and backward, saves this process's shards in FILE
python worker_ring.py forever PORT PROCESS FILE    goes on running it after that
"""

from __future__ import annotations

import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_ring_attention import ring_attention, to_layout
from jax_ring_attention.testing import random_inputs

NAMES = ("out", "lse", "d_query", "d_key", "d_value")
SPEC = PartitionSpec(None, "seq")
LENGTH = 48


def attention_arguments(mesh: Mesh) -> tuple[jax.Array, ...]:
    """Query, key, value, d_out and segment ids in zigzag order, with padding at the end; the same in every process."""
    inputs = random_inputs(0, batch=2, query_length=LENGTH, heads=4, kv_heads=2, head_dim=8, value_dim=12)
    rng = np.random.default_rng(1)
    segments = np.sort(rng.integers(0, 3, size=(2, LENGTH)), axis=1).astype(np.int32)
    segments[0, -7:] = -1
    sharding = NamedSharding(mesh, SPEC)
    stored = [np.asarray(to_layout(x, "zigzag", 8)) for x in (*inputs, segments)]
    return tuple(jax.make_array_from_callback(x.shape, sharding, lambda where, x=x: x[where]) for x in stored)


def attention_and_grads(mesh: Mesh) -> Any:
    """The compiled computation of `NAMES` from `attention_arguments`."""

    @jax.jit
    def both(query, key, value, d_out, segment_ids):
        def attend(query, key, value):
            options = {"is_causal": True, "layout": "zigzag", "segment_ids": segment_ids, "return_residual": True}
            return ring_attention(query, key, value, mesh=mesh, spec=SPEC, **options)

        (out, lse), pull = jax.vjp(attend, query, key, value)
        return out, lse, *pull((d_out, jnp.zeros_like(lse)))

    return both


def local_part(x: jax.Array) -> np.ndarray:
    """This process's tokens, in order."""
    shards = sorted(x.addressable_shards, key=lambda shard: shard.index[1].start)
    return np.concatenate([shard.data for shard in shards], axis=1)


def main(mode: str, port: str, process: str, file: str) -> None:
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(process), initialization_timeout=60, heartbeat_timeout_seconds=10)
    assert (len(jax.local_devices()), len(jax.devices())) == (4, 8)
    mesh = Mesh(np.array(jax.devices()), ("seq",))
    compute, arguments = attention_and_grads(mesh), attention_arguments(mesh)
    results = compute(*arguments)
    unfinished = file + ".unfinished.npz"
    np.savez(unfinished, **{name: local_part(x) for name, x in zip(NAMES, results, strict=True)})
    os.replace(unfinished, file)  # whoever sees the file sees all of it
    while mode == "forever":
        jax.block_until_ready(compute(*arguments))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
