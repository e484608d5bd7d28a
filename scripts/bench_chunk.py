"""Time the Hopper kernels against other attention on one GPU.

Claim under test: `ring_attention` with implementation="mosaic_gpu" against cuDNN (`jax.nn.dot_product_attention`), tokamax and
FlashAttention-4 where they are installed, and JAX's own `attention_mgpu` (in float16, the only dtype whose results it stores), on
the same arrays, forward and backward, 16 heads. Also what `deterministic=True` costs.

Every shape is measured in a process of its own with a time limit; `--jobs` of them compile at the same time, and one runs. Its
results are compared with every other implementation that runs, or with implementation="xla", before anything is timed; one that
refuses or runs out of memory is reported, not fatal. Implementations take turns, round by round, because clocks drift: times and
ratios are medians over rounds of a few calls, on the host clock with the device kept busy; backward is forward+backward minus
forward, in the same round.
TFLOP/s count 2 B N T S (H + Hv) forward and 2 B N T S (3 H + 2 Hv) backward, half when causal. Prints a table and, as the last
line, one JSON object; `--png` draws the table.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp

from jax_ring_attention import ring_attention

HEADS = 16
OURS = "mosaic_gpu"


def seconds(function, *arguments, rounds=5, calls=8, wait=jax.block_until_ready):
    wait(function(*arguments))
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            result = function(*arguments)
        wait(result)
        taken.append((time.perf_counter() - start) / calls)
    return statistics.median(taken)


def gradient(attention):
    def both(query, key, value, d_out):
        out, pull = jax.vjp(attention, query, key, value)
        return out, pull(d_out)

    return jax.jit(both)


def difference(have, want):
    """Largest relative difference, in norm, of outputs and gradients."""
    pairs = zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True)
    pairs = ((a.astype(jnp.float32), b.astype(jnp.float32)) for a, b in pairs)
    return max(float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in pairs)


def check(have, want, tolerance=1e-2):
    if not (error := difference(have, want)) < tolerance:
        raise SystemExit(f"outputs or gradients differ by {error:.1e}, allowed {tolerance:.0e}: nothing is timed")


@contextlib.contextmanager
def device_to_itself(path):
    """Other processes that were given the same path wait; None waits for nobody."""
    if path is None:
        yield
        return
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def compile_together(attentions):
    """`{name: {"forward": call, "both": call}}` of `{name: (attention, arguments)}`, and why what is missing there is missing."""
    calls, refused, compiling = {}, {}, []
    with ThreadPoolExecutor() as pool:
        for name, (attention, arguments) in attentions.items():
            calls[name] = {}
            for part, function, given in (
                ("forward", jax.jit(attention), arguments[:3]),
                ("both", gradient(attention), arguments),
            ):
                try:
                    compiling.append((name, part, pool.submit(function.lower(*given).compile), given))
                except Exception as error:  # anything: it may not be ours
                    refused[name] = first_line(error)
        for name, part, program, given in compiling:
            try:
                calls[name][part] = functools.partial(program.result(), *given)
            except Exception as error:
                refused[name] = first_line(error)
    return calls, refused


def run_once(calls):
    """Remove the calls that fail, and say why."""
    refused = {}
    for name, parts in calls.items():
        for part, call in list(parts.items()):
            try:
                jax.block_until_ready(call())
            except Exception as error:  # out of memory, say
                del parts[part]
                refused[name] = first_line(error)
    return refused


def take_turns(calls, rounds=7, repeats=6, waits=None):
    """`{name: {direction: seconds of each round}}` of `compile_together`'s calls; `waits` has other ways to wait for a result."""
    taken = {name: {part: [] for part in parts} for name, parts in calls.items()}
    for _ in range(rounds):
        for name, parts in calls.items():
            wait = (waits or {}).get(name, jax.block_until_ready)
            for part, call in parts.items():
                taken[name][part].append(seconds(call, rounds=1, calls=repeats, wait=wait))
    for parts in taken.values():
        if "both" in parts:
            both = parts.pop("both")
            parts["backward"] = [b - f for b, f in zip(both, parts["forward"], strict=True)]
    return taken


def both_directions(attentions):
    """`{name: {direction: median seconds}}` of `{name: (attention, arguments)}`, all of which must run."""
    calls, refused = compile_together(attentions)
    refused |= run_once(calls)
    if refused:
        raise SystemExit(f"not measured: {refused}")
    return {
        name: {part: statistics.median(rounds) for part, rounds in parts.items()} for name, parts in take_turns(calls).items()
    }


def matmul_tflops(size=8192):
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    return 2 * size**3 / seconds(jax.jit(lambda a: a @ a), a) / 1e12


# The others. Each gives, for a work item, a function of (query, key, value); what it cannot do it raises.


def tokamax_attention(is_causal):
    import tokamax

    return functools.partial(tokamax.dot_product_attention, is_causal=is_causal)


def jax_attention_mgpu(is_causal):
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    blocks = dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), 64)
    config = attention_mgpu.TuningConfig(
        block_q=64, block_kv=128, max_concurrent_steps=2, causal=is_causal, compute_wgs_bwd=2, **blocks
    )

    def attend(query, key, value):  # it has no scale
        if max(query.shape[3], value.shape[3]) > 128 or query.shape != value.shape:
            raise NotImplementedError("head dims up to 128, equal")
        return attention_mgpu.attention(query * query.shape[3] ** -0.5, key, value, config)

    return attend


def flash_attention_4(arguments, is_causal):
    """Its calls, what they give as JAX arrays, and how to wait: it is a PyTorch library, and the arrays are shared."""
    import torch
    from flash_attn.cute import flash_attn_func

    query, key, value, d_out = (torch.from_dlpack(x).detach() for x in arguments)
    for x in (query, key, value):
        x.requires_grad_()

    def forward():
        out = flash_attn_func(query, key, value, causal=is_causal)
        return out[0] if isinstance(out, tuple) else out

    def forward_alone():
        with torch.no_grad():
            return forward()

    def both():
        out = forward()
        return out, torch.autograd.grad(out, (query, key, value), d_out)

    out, grads = both()
    results = [jnp.from_dlpack(x.detach().contiguous()) for x in (out, *grads)]
    return {"forward": forward_alone, "both": both}, results, lambda _: torch.cuda.synchronize()


PEERS = {
    "cudnn": (jnp.bfloat16, lambda c: functools.partial(jax.nn.dot_product_attention, implementation="cudnn", is_causal=c)),
    "tokamax": (jnp.bfloat16, tokamax_attention),
    "attention_mgpu (float16)": (jnp.float16, jax_attention_mgpu),
}


def first_line(error):
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"


def measure(work):
    """Rows of one shape: one for each implementation and direction. Only what holds `work["lock"]` uses the device for long."""
    batch, length, dim, value_dim, causal = (work[x] for x in ("batch", "length", "head_dim", "value_dim", "causal"))
    keys = jax.random.split(jax.random.key(length + dim), 4)
    shapes = [(batch, length, HEADS, n) for n in (dim, dim, value_dim, value_dim)]
    arguments = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]
    ours = functools.partial(ring_attention, implementation=OURS, is_causal=causal)
    attentions, refused, waits = {OURS: (ours, arguments)}, {}, {}
    if max(dim, value_dim) <= 128:  # above, it is what runs anyway
        attentions["deterministic"] = (functools.partial(ours, deterministic=True), arguments)
    for name, (dtype, make) in PEERS.items():
        try:
            attentions[name] = (make(causal), [x.astype(dtype) for x in arguments])
        except Exception as error:  # not installed
            refused[name] = first_line(error)
    calls, reasons = compile_together(attentions)
    refused |= reasons
    with contextlib.suppress(Exception):  # compiles; the reason is told below
        flash_attention_4([x[:1, :512] for x in arguments], causal)
    with device_to_itself(work.get("lock")):
        refused |= run_once(calls)
        if "both" not in calls[OURS]:
            raise SystemExit(f"{OURS} does not run: {refused[OURS]}")
        have, checked = calls[OURS]["both"](), 0
        for name, parts in calls.items():
            if "both" in parts:
                check(parts["both"](), have)
            elif "forward" in parts:
                check(parts["forward"](), have[0])
            checked += name in PEERS and bool(parts)
        try:
            parts, results, wait = flash_attention_4(arguments, causal)
            check(results, jax.tree.leaves(have))
            calls["flash attention 4"], waits["flash attention 4"], checked = parts, wait, checked + 1
        except Exception as error:
            refused["flash attention 4"] = first_line(error)
        if not checked:
            one = [x[:1, : min(length, 4096)].astype(jnp.float32) for x in arguments]
            reference = functools.partial(ring_attention, implementation="xla", is_causal=causal)
            check(gradient(ours)(*(x.astype(jnp.bfloat16) for x in one)), gradient(reference)(*one))
        taken = take_turns({name: parts for name, parts in calls.items() if "forward" in parts}, waits=waits)
    pairs = 2 * batch * HEADS * length**2 / (2 if causal else 1)
    flops = {"forward": pairs * (dim + value_dim), "backward": pairs * (3 * dim + 2 * value_dim)}
    heads = f"D{dim}" if dim == value_dim else f"D{dim}/{value_dim}"
    rows = [
        {
            "work": f"{batch}x{length} {heads} {'causal' if causal else 'full'}",
            "direction": direction,
            "implementation": name,
            "tflops": flops[direction] / statistics.median(rounds) / 1e12,
            "over_ours": statistics.median(o / r for o, r in zip(taken[OURS][direction], rounds, strict=True)),
        }
        for name, directions in taken.items()
        for direction, rounds in directions.items()
    ]
    return {"rows": rows, "refused": refused}


def in_own_process(script, work, limit):
    """What `script --one WORK` prints last, or why there is nothing: a kernel that hangs must not take the others with it."""
    command = [sys.executable, script, "--one", json.dumps(work)]
    shared = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # others are on the device, too
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=shared)
    except subprocess.TimeoutExpired:
        return {"failed": f"no result within {limit} s"}
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def draw(path, results):
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    rows = [row for result in results.values() for row in result.get("rows", ())]
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    works = list(dict.fromkeys(row["work"] for row in rows))
    figure, axes = plt.subplots(1, 2, figsize=(14, 0.5 + 0.12 * len(works) * (len(names) + 2)), sharey=True, layout="constrained")
    for axis, direction in zip(axes, ("forward", "backward"), strict=True):
        for i, name in enumerate(names):
            speed = {r["work"]: r["tflops"] for r in rows if (r["direction"], r["implementation"]) == (direction, name)}
            places = [works.index(work) + (i - len(names) / 2) * 0.8 / len(names) for work in speed]
            axis.barh(places, list(speed.values()), 0.8 / len(names), label=name)
        axis.set(title=direction, xlabel="TFLOP/s", yticks=range(len(works)), yticklabels=works)
    axes[0].invert_yaxis()
    axes[1].legend()
    figure.savefig(path, dpi=150)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["1x16384", "4x4096"], help="BATCHxLENGTH")
    parser.add_argument("--head-dims", nargs="+", default=["64", "128", "192/128", "256"], help="H or H/Hv")
    parser.add_argument("--masks", nargs="+", choices=["full", "causal"], default=["full", "causal"])
    parser.add_argument("--jobs", type=int, default=max(os.cpu_count() // 4, 1), help="shapes that compile at the same time")
    parser.add_argument(
        "--limit", type=float, default=400, help="seconds for each shape, with the wait for its turn on the device"
    )
    parser.add_argument("--png", help="draw the table here")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        work = json.loads(options.one)
        print(json.dumps(measure(work) if work else about_this_device()))
        return
    about = in_own_process(__file__, {}, options.limit)
    if "failed" in about:
        raise SystemExit(f"this needs a Hopper GPU: {about['failed']}")
    print(f"{about['device']}, jax {about['jax']}; bfloat16 matmul {about['matmul_tflops']:.0f} TFLOP/s", flush=True)
    works = {}
    for head_dims in options.head_dims:
        dim, value_dim = (int(n) for n in (head_dims.split("/") * 2)[:2])
        for shape in options.shapes:
            batch, length = map(int, shape.split("x"))
            for mask in options.masks:
                works[f"{shape} {head_dims} {mask}"] = {
                    "batch": batch,
                    "length": length,
                    "head_dim": dim,
                    "value_dim": value_dim,
                    "causal": mask == "causal",
                }
    results = {}
    with ThreadPoolExecutor(options.jobs) as pool, tempfile.NamedTemporaryFile() as lock:
        given = [work | {"lock": lock.name} for work in works.values()]
        done = pool.map(lambda work: in_own_process(__file__, work, options.limit), given)
        for name, result in zip(works, done, strict=True):
            results[name] = result
            if "failed" in result:
                print(f"{name} not measured: {result['failed']}", flush=True)
            for row in result.get("rows", ()):
                row["matmul_share"] = row["tflops"] / about["matmul_tflops"]
                speed = f"{row['tflops']:5.0f} TFLOP/s  {row['matmul_share']:4.0%} of matmul  {row['over_ours']:.3f} of ours"
                print(f"{row['work']:26s} {row['direction']:9s} {row['implementation']:25s} {speed}", flush=True)
    if options.png:
        draw(options.png, results)
    print(json.dumps({"script": "bench_chunk", **about, "results": results}))


def about_this_device():
    if jax.default_backend() != "gpu":
        raise SystemExit(f"the backend here is {jax.default_backend()!r}")
    return {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "matmul_tflops": matmul_tflops()}


if __name__ == "__main__":
    sys.exit(main())
