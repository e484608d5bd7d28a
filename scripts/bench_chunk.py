"""Time the Hopper kernels against cuDNN on one GPU, in one process.

Claim under test: `ring_attention` with implementation="mosaic_gpu" against `jax.nn.dot_product_attention(implementation="cudnn")`
on the same arrays, forward and backward, bfloat16, 16 heads. Also the cost of chunking: 8192 queries that fold 8 chunks of 8192
keys one at a time, against one call over 65536 keys.

Correctness is checked before anything is timed. A reference that runs out of memory is reported, not fatal. Times are medians of
repeated calls on the host clock with the device kept busy; backward is forward+backward minus forward. TFLOP/s count 4 B N T S H
forward and 2.5 times that backward, half when causal. Prints a table and one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time

import jax
import jax.numpy as jnp

from jax_ring_attention import ring_attention

HEADS = 16


def seconds(function, *arguments, rounds=5, calls=8):
    jax.block_until_ready(function(*arguments))
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            result = function(*arguments)
        jax.block_until_ready(result)
        taken.append((time.perf_counter() - start) / calls)
    return statistics.median(taken)


def gradient(attention):
    def both(query, key, value, d_out):
        out, pull = jax.vjp(attention, query, key, value)
        return out, pull(d_out)

    return jax.jit(both)


def check(ours, theirs, arguments, tolerance=1e-2):
    """Relative difference, in norm, of outputs and gradients of two bfloat16 computations."""
    for a, b in zip(jax.tree.leaves(gradient(ours)(*arguments)), jax.tree.leaves(gradient(theirs)(*arguments)), strict=True):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        error = float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))
        if not error < tolerance:
            raise SystemExit(f"outputs or gradients differ by {error:.1e}, allowed {tolerance:.0e}: nothing is timed")


def both_directions(attention, arguments):
    forward = seconds(jax.jit(attention), *arguments[:3])
    return {"forward": forward, "backward": seconds(gradient(attention), *arguments) - forward}


def against_cudnn(batch, length, head_dim, causal):
    keys = jax.random.split(jax.random.key(length + head_dim), 4)
    arguments = [jax.random.normal(key, (batch, length, HEADS, head_dim), jnp.bfloat16) for key in keys]
    ours = functools.partial(ring_attention, implementation="mosaic_gpu", is_causal=causal)
    cudnn = functools.partial(jax.nn.dot_product_attention, implementation="cudnn", is_causal=causal)
    check(ours, cudnn, arguments)
    mine, theirs = both_directions(ours, arguments), both_directions(cudnn, arguments)
    flops = 4 * batch * HEADS * length**2 * head_dim / (2 if causal else 1)
    return [
        {
            "work": f"{batch}x{length} D{head_dim} {'causal' if causal else 'full'}",
            "direction": direction,
            "tflops": flops * factor / mine[direction] / 1e12,
            "cudnn_tflops": flops * factor / theirs[direction] / 1e12,
            "over_cudnn": theirs[direction] / mine[direction],
        }
        for direction, factor in (("forward", 1.0), ("backward", 2.5))
    ]


def cost_of_chunking(head_dim, chunks=8, length=8192):
    keys = jax.random.split(jax.random.key(1), 4)
    query, d_out = (jax.random.normal(key, (1, length, HEADS, head_dim), jnp.bfloat16) for key in keys[:2])
    key, value = (jax.random.normal(key, (1, chunks * length, HEADS, head_dim), jnp.bfloat16) for key in keys[2:])
    whole = functools.partial(ring_attention, implementation="mosaic_gpu")

    def in_chunks(query, key, value):
        return whole(query, jnp.split(key, chunks, axis=1), jnp.split(value, chunks, axis=1))

    check(in_chunks, whole, (query, key, value, d_out))
    split, one = both_directions(in_chunks, (query, key, value, d_out)), both_directions(whole, (query, key, value, d_out))
    flops = 4 * HEADS * length * chunks * length * head_dim
    return [
        {
            "work": f"{chunks} chunks of {length} D{head_dim}",
            "direction": direction,
            "tflops": flops * factor / split[direction] / 1e12,
            "over_one_call": one[direction] / split[direction],
        }
        for direction, factor in (("forward", 1.0), ("backward", 2.5))
    ]


def matmul_tflops(size=8192):
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    return 2 * size**3 / seconds(jax.jit(lambda a: a @ a), a) / 1e12


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["1x16384", "4x4096"], help="BATCHxLENGTH")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[128, 64])
    options = parser.parse_args(arguments)
    if jax.default_backend() != "gpu":
        raise SystemExit(f"this needs a Hopper GPU; the backend here is {jax.default_backend()!r}")

    device, ceiling = jax.devices()[0].device_kind, matmul_tflops()
    print(f"{device}, jax {jax.__version__}; bfloat16 matmul {ceiling:.0f} TFLOP/s", flush=True)
    runs = [functools.partial(cost_of_chunking, head_dim) for head_dim in options.head_dims[:1]]
    for head_dim in options.head_dims:
        for shape in options.shapes:
            batch, length = map(int, shape.split("x"))
            runs += [functools.partial(against_cudnn, batch, length, head_dim, causal) for causal in (False, True)]
    results = []
    for run in runs:
        try:
            rows = run()
        except jax.errors.JaxRuntimeError as error:
            print(f"{run.func.__name__}{run.args} not measured: {str(error).splitlines()[0]}", flush=True)
            continue
        for row in rows:
            row["matmul_share"] = row["tflops"] / ceiling
            ratio = " ".join(f"{name} {row[name]:.3f}" for name in ("over_cudnn", "over_one_call") if name in row)
            speed = f"{row['tflops']:5.0f} TFLOP/s  {row['matmul_share']:4.0%} of matmul"
            print(f"{row['work']:26s} {row['direction']:9s} {speed}  {ratio}", flush=True)
        results += rows
    print(
        json.dumps(
            {"script": "bench_chunk", "device": device, "jax": jax.__version__, "matmul_tflops": ceiling, "results": results}
        )
    )


if __name__ == "__main__":
    sys.exit(main())
