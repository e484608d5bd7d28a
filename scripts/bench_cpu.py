"""Time ring attention against its peers on emulated CPU devices, in one process.

Claim under test: on 8 emulated devices, causal, float32, B1 N8 H64, ring attention is no slower than ringattention 0.1.2 at
its best chunk sizes, at least 2x faster than dense attention sharded over the same mesh at T = 16384, and needs less memory
than both. Prints a table, and one JSON object as the last line.

Peers: `jax.nn.dot_product_attention` on sequence-sharded arrays, and ringattention (`pip install '.[bench]'`). Correctness is
checked before anything is timed. Every figure is a median over rounds in which all candidates take turns. A peer whose
compiled program needs more memory than the machine has free is not run, and the table says so.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import statistics
import sys
import time
import types

import jax

DEVICES = 8
HEADS = 8
HEAD_DIM = 64


def load_ringattention():
    """ringattention 0.1.2 with its one broken import mended: it looks for a module that JAX has since removed."""
    import jax.extend.backend

    if not hasattr(jax.lib, "xla_bridge"):
        jax.lib.xla_bridge = types.SimpleNamespace(get_backend=jax.extend.backend.get_backend)
    import ringattention

    return ringattention.ringattention_jax


def candidates(mesh, chunk_sizes, length):
    """`{name: [(attention of global (B, T, N, H) arrays, heads at a time), one pair per setting to try]}`."""
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    from jax_ring_attention import ring_attention

    spec = P(None, "seq")
    peer = load_ringattention()

    def theirs(chunk):
        options = {
            "causal_block_size": 1,
            "query_chunk_size": chunk,
            "key_chunk_size": chunk,
            "deterministic": True,
            "dropout_rng": None,
            "attn_pdrop": 0.0,
            "dtype": jnp.float32,
            "policy": jax.checkpoint_policies.nothing_saveable,
            "precision": None,
            "prevent_cse": False,
        }
        inner = lambda q, k, v: peer(q, k, v, None, None, None, "seq", True, options)  # noqa: E731
        return jax.shard_map(inner, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)

    ours = functools.partial(ring_attention, is_causal=True, mesh=mesh, spec=spec)
    return {
        "ring_attention": [(ours, HEADS)],
        "ring_attention zigzag": [(functools.partial(ours, layout="zigzag"), HEADS)],
        # All heads at once does not fit in memory at the longer lengths; fewer at a time is the same work.
        "dense": [(functools.partial(jax.nn.dot_product_attention, is_causal=True), heads) for heads in (HEADS, 2)],
        "ringattention 0.1.2": [(theirs(chunk), HEADS) for chunk in chunk_sizes if chunk <= length // DEVICES],
    }


def over_heads(function, heads):
    """`function` of (B, T, N, H) arrays, called on `heads` heads at a time, one group after the other."""
    import jax.numpy as jnp

    def split(x):
        return jnp.moveaxis(x.reshape(*x.shape[:2], -1, heads, x.shape[-1]), 2, 0)

    def join(x):
        return jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1, x.shape[-1])

    def mapped(*arrays):
        groups = jax.lax.map(lambda group: function(*group), tuple(split(x) for x in arrays))
        return jax.tree.map(join, groups)

    return function if heads == HEADS else mapped


def compile_both(attention, heads, arguments):
    """Forward, and forward + backward, compiled ahead of time."""

    def gradients(q, k, v, d_out):
        out, pull = jax.vjp(attention, q, k, v)
        return out, pull(d_out)

    return {
        "forward": jax.jit(over_heads(attention, heads)).lower(*arguments[:3]).compile(),
        "forward+backward": jax.jit(over_heads(gradients, heads)).lower(*arguments).compile(),
    }


def seconds(function, arguments):
    start = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    return time.perf_counter() - start


def matmul_gflops(size=2048, rounds=5):
    """This machine's float32 matmul rate through JAX: the ceiling."""
    import jax.numpy as jnp

    a = jax.random.normal(jax.random.key(0), (size, size), jnp.float32)
    run = jax.jit(lambda a: a @ a)
    jax.block_until_ready(run(a))
    return 2 * size**3 / min(seconds(run, (a,)) for _ in range(rounds)) / 1e9


def free_bytes():
    """Memory this machine can still give, from the kernel."""
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) * 1024


def fits(function):
    return function.memory_analysis().temp_size_in_bytes * DEVICES < 0.8 * free_bytes()


def check(compiled, arguments, zigzag_of, tolerance=2e-5):
    """All candidates agree on outputs and gradients: relative error against the peer that can be trusted most."""
    import numpy as np

    trusted = "dense" if fits(compiled["dense"][0]["forward+backward"]) else "ringattention 0.1.2"
    want = [np.asarray(x) for x in jax.tree.leaves(compiled[trusted][0]["forward+backward"](*arguments))]
    for name, settings in compiled.items():
        for functions in settings:
            if not fits(functions["forward+backward"]):
                continue
            given = zigzag_of(arguments) if "zigzag" in name else arguments
            have = jax.tree.leaves(functions["forward+backward"](*given))
            have = zigzag_of(have, back=True) if "zigzag" in name else have
            worst = max(np.linalg.norm(np.asarray(a) - b) / np.linalg.norm(b) for a, b in zip(have, want, strict=True))
            if not worst < tolerance:
                raise SystemExit(f"{name} disagrees with {trusted}: relative error {worst:.2e}, allowed {tolerance:.0e}")


def measure(length, chunk_sizes, rounds):
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    from jax_ring_attention import from_layout, to_layout

    mesh = jax.make_mesh((DEVICES,), ("seq",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P(None, "seq"))
    keys = jax.random.split(jax.random.key(length), 4)
    arguments = [jax.device_put(jax.random.normal(key, (1, length, HEADS, HEAD_DIM)), sharding) for key in keys]

    def zigzag_of(arrays, back=False):
        convert = from_layout if back else to_layout
        return [jax.device_put(convert(x, "zigzag", DEVICES), sharding) for x in arrays]

    compiled = {
        name: [compile_both(attention, heads, arguments) for attention, heads in settings]
        for name, settings in candidates(mesh, chunk_sizes, length).items()
    }
    check(compiled, arguments, zigzag_of)

    rows = {}
    matmul_flops = {"forward": 2, "forward+backward": 7}  # matmuls per pair of blocks; half of the pairs are visible
    for direction, matmuls in matmul_flops.items():
        times = {name: [[] for _ in settings] for name, settings in compiled.items()}
        for _ in range(rounds):
            for name, settings in compiled.items():
                for functions, taken in zip(settings, times[name], strict=True):
                    if not fits(functions[direction]):
                        continue
                    given = arguments if direction == "forward+backward" else arguments[:3]
                    taken.append(seconds(functions[direction], given))
        for name, settings in compiled.items():
            medians = [statistics.median(taken) if taken else float("inf") for taken in times[name]]
            best = min(range(len(medians)), key=medians.__getitem__)
            flops = matmuls * 2 * HEADS * HEAD_DIM * length**2 / 2
            rows[direction, name] = {
                "seconds": medians[best] if times[name][best] else None,
                "gflops": flops / medians[best] / 1e9,
                "temp_mib": settings[best][direction].memory_analysis().temp_size_in_bytes / 2**20,
            }
    return rows


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-lens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--chunk-sizes", type=int, nargs="+", default=[256, 512, 1024, 2048], help="tried for ringattention")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)

    ceiling = matmul_gflops()
    print(f"{platform.processor() or platform.machine()}, {DEVICES} emulated devices; matmul {ceiling:.0f} GFLOP/s")
    results = []
    for length in options.seq_lens:
        rows = measure(length, options.chunk_sizes, options.rounds)
        for (direction, name), row in rows.items():
            ours = rows[direction, "ring_attention"]
            row |= {"seq_len": length, "direction": direction, "name": name, "matmul_share": row["gflops"] / ceiling}
            row["time_over_ours"] = row["seconds"] and row["seconds"] / ours["seconds"]
            row["memory_over_ours"] = row["temp_mib"] / ours["temp_mib"]
            results.append(row)
            timed = "not run: does not fit in this machine's memory"
            if row["seconds"]:
                timed = f"{row['seconds']:8.3f} s  x{row['time_over_ours']:5.2f} ours  {row['matmul_share']:4.0%} of matmul"
            print(
                f"T={length:6d} {direction:17s} {name:22s} {timed:47s}  temp {row['temp_mib']:8.1f} MiB/device  "
                f"x{row['memory_over_ours']:.1f}"
            )
    print(json.dumps({"script": "bench_cpu", "jax": jax.__version__, "matmul_gflops": ceiling, "results": results}))


if __name__ == "__main__":
    sys.exit(main())
