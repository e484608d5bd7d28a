"""`check`: every implementation on the devices at hand, in every layout and schedule, against dense attention."""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_ring_attention.api import ring_attention
from jax_ring_attention.chunk import KERNELS
from jax_ring_attention.cli.console import UsageError, positive_int, seconds_text, token_count
from jax_ring_attention.layouts import LAYOUTS, storage_order
from jax_ring_attention.schedule import PORTABLE_SCHEDULES
from jax_ring_attention.testing import (
    AttentionInputs,
    Expected,
    dense_expected,
    earned_tolerances,
    random_inputs,
    relative_error,
    visible_pairs,
)
from jax_ring_attention.topology import make_ring_mesh

DESCRIPTION = """\
Run every implementation in every layout and schedule, with and without a causal mask, forward and backward, on the devices that
JAX finds, and compare with dense float64 attention. The allowed error is earned: a small multiple of what dense attention in the
same dtype makes on the same inputs. Exit code 0 where all agree, else 1. On several hosts run it on each, with --distributed."""

DTYPES = ("float32", "bfloat16", "float16")
NAMES = Expected._fields[:5]
SPEC = PartitionSpec(None, "ring")
LEAST_TOKENS = 256

HEADER = ("implementation", "dtype", "layout", "schedule", "mask", "result", "forward", "allowed", "gradients", "allowed", "time")
WIDTHS = (14, 8, 10, 13, 6, 6, 8, 8, 9, 8, 8)


class Case(NamedTuple):
    implementation: str
    dtype: str
    layout: str
    schedule: str
    is_causal: bool


class Reference(NamedTuple):
    """Inputs and a cotangent of lse in natural order, what dense attention gives for them, and the allowed errors."""

    inputs: AttentionInputs
    d_lse: np.ndarray
    expected: Expected
    allowed: Expected


class Finding(NamedTuple):
    """What came of a case.

    Attributes:
      result: "pass", "FAIL", or "refused".
      errors, allowed: by name of the output or gradient.
      seconds: of one run, forward and backward, without compiling.
      reason: why it failed or refused.
    """

    result: str
    errors: dict[str, float]
    allowed: dict[str, float]
    seconds: float
    reason: str

    def worst(self, *names: str) -> tuple[float, float]:
        """Error and allowed error of that name for which the former is largest in terms of the latter."""
        name = max(names, key=lambda name: self.errors[name] / self.allowed[name])
        return self.errors[name], self.allowed[name]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--cpu-devices", type=positive_int, metavar="P", help="emulate so many devices on this CPU, whatever else there is")
    add("--devices", type=positive_int, metavar="P", help="use the first P devices (default: all)")
    add("--implementation", action="append", choices=KERNELS, help="check this one alone, suited or not; may be repeated")
    add(
        "--dtype",
        action="append",
        choices=DTYPES,
        help="may be repeated (default: float32 and bfloat16; on CPU, where compiling takes long, float32)",
    )
    add("--fast", action="store_true", help="three combinations of layout and schedule instead of all nine, one dtype")
    add("--seq-len", type=token_count, metavar="T", help=f"a multiple of 2 x devices (default: the first from {LEAST_TOKENS} on)")
    add("--heads", type=positive_int, default=4, help="query heads (default 4)")
    add("--kv-heads", type=positive_int, default=2, help="key/value heads (default 2)")
    add("--head-dim", type=positive_int, default=64, help="of query, key and value (default 64)")
    add("--batch", type=positive_int, default=1, help="sequences (default 1)")
    add("--distributed", action="store_true", help="jax.distributed.initialize() first: one ring over all hosts")
    add("--coordinator", metavar="HOST:PORT", help="with --distributed, where JAX cannot find it out: the first process")
    add("--num-processes", type=positive_int, help="with --coordinator: how many processes there are")
    add("--process-id", type=int, help="with --coordinator: which one this is, from 0")


def run(options: argparse.Namespace) -> int:
    start = time.perf_counter()
    devices = _devices(options)
    sizes = _sizes(options, len(devices))
    mesh = make_ring_mesh((len(devices),), ("ring",), devices=devices)
    speaks = jax.process_index() == 0
    say = functools.partial(print, flush=True) if speaks else _silent
    say(
        f"jax {jax.__version__}, {len(devices)} {devices[0].platform} devices ({devices[0].device_kind}), processes: "
        f"{jax.process_count()}; B{sizes['batch']} T{sizes['query_length']} N{sizes['heads']} K{sizes['kv_heads']} "
        f"H{sizes['head_dim']}"
    )
    unsuited = [name for name in KERNELS if options.implementation is None and not KERNELS[name].is_preferred()]
    names = [name for name in options.implementation or KERNELS if name not in unsuited]
    say(_line(HEADER))
    reference = functools.cache(lambda dtype, is_causal: make_reference(dtype, is_causal, **sizes))
    counts = dict.fromkeys(("pass", "FAIL", "refused"), 0)
    refusals: dict[str, int] = {}
    dtypes = tuple(options.dtype or _default_dtypes(devices[0].platform, options.fast))
    for case in cases(tuple(names), dtypes, options.fast):
        finding = check(case, mesh, reference(case.dtype, case.is_causal))
        counts[finding.result] += 1
        if finding.result == "refused":
            refusals[f"{case.dtype}: {finding.reason}"] = refusals.get(f"{case.dtype}: {finding.reason}", 0) + 1
            continue
        say(_line(_cells(case, finding)))
        if finding.reason:
            say(f"    {finding.reason}")
    for reason, count in refusals.items():
        say(f"refused, {count} cases of {reason}")
    for name in unsuited:
        say(f"not run: {name} is not made for these devices ({devices[0].platform}); --implementation {name} runs it regardless")
    ran = counts["pass"] + counts["FAIL"]
    say(f"{counts['pass']} of {ran} passed in {time.perf_counter() - start:.0f} s" + ("" if ran else ": nothing was checked"))
    return 0 if ran and not counts["FAIL"] else 1


def _silent(_: str) -> None:
    """Processes other than the first compute the same and say nothing."""


def _default_dtypes(platform: str, is_fast: bool) -> tuple[str, ...]:
    if platform == "cpu":
        return ("float32",)
    return ("bfloat16",) if is_fast else ("float32", "bfloat16")


def _devices(options: argparse.Namespace) -> list[jax.Device]:
    """The devices to use; everything here happens before JAX starts its backends."""
    if options.cpu_devices is not None:
        _emulate(options.cpu_devices)
    if options.distributed:
        details = {"num_processes": options.num_processes, "process_id": options.process_id}
        try:
            jax.distributed.initialize(options.coordinator, **details)
        except (ValueError, RuntimeError) as error:
            raise UsageError(f"--distributed: {error} (--coordinator, --num-processes and --process-id say it all.)") from error
    elif (options.coordinator, options.num_processes, options.process_id) != (None, None, None):
        raise UsageError("--coordinator, --num-processes and --process-id go with --distributed; add it, or leave them out.")
    found = jax.devices()
    if options.cpu_devices is not None and found[0].platform != "cpu":
        raise UsageError(f"--cpu-devices {options.cpu_devices} comes too late, JAX has started on {found[0].platform} already.")
    if options.devices is None:
        return found
    if options.devices > len(found):
        raise UsageError(f"--devices {options.devices}, but JAX finds {len(found)} ({found[0].platform}).")
    if jax.process_count() > 1:
        raise UsageError("--devices leaves processes without a device; with --distributed leave it out.")
    return found[: options.devices]


def _emulate(count: int) -> None:
    """`count` CPU devices, as jax_num_cpu_devices says, which works until the backend starts."""
    try:
        jax.config.update("jax_platforms", "cpu")
        if jax.config.jax_num_cpu_devices != count:  # type: ignore[attr-defined]
            jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        raise UsageError(f"--cpu-devices {count} comes too late, JAX has started its devices already: {error}") from error


def _sizes(options: argparse.Namespace, ring_size: int) -> dict[str, int]:
    multiple = 2 * ring_size
    length = -(-LEAST_TOKENS // multiple) * multiple if options.seq_len is None else options.seq_len
    if length % multiple:
        raise UsageError(f"--seq-len {length} is no multiple of {multiple}, 2 x devices, as zigzag needs.")
    if options.heads % options.kv_heads:
        raise UsageError(f"--heads {options.heads} is no multiple of --kv-heads {options.kv_heads}.")
    sizes = {name: getattr(options, name) for name in ("batch", "heads", "kv_heads", "head_dim")}
    return {"query_length": length, **sizes}


def cases(implementations: tuple[str, ...], dtypes: tuple[str, ...], is_fast: bool) -> Iterator[Case]:
    """What to run: everything, or each layout and each schedule once, with and without a mask."""
    pairs = zip(LAYOUTS, PORTABLE_SCHEDULES, strict=True) if is_fast else itertools.product(LAYOUTS, PORTABLE_SCHEDULES)
    for (layout, schedule), name, dtype, is_causal in itertools.product(pairs, implementations, dtypes, (True, False)):
        yield Case(name, dtype, layout, schedule, is_causal)


def make_reference(dtype: str, is_causal: bool, **sizes: int) -> Reference:
    """Inputs in natural order and dense float64 attention of them."""
    length = sizes["query_length"]
    inputs = random_inputs(0, dtype=jnp.dtype(dtype), **sizes)
    d_lse = np.random.default_rng(1).normal(size=inputs.query.shape[:3]).astype(np.float32)
    seen = visible_pairs(length, length, is_causal=is_causal)[:, None]
    # Float64 on the CPU where there is one: TPUs emulate it. The earned error is that of the devices at hand.
    with jax.default_device(_cpu()):
        expected = dense_expected(inputs, seen, d_lse=d_lse)
    return Reference(inputs, d_lse, expected, earned_tolerances(inputs, expected, seen, d_lse=d_lse))


def _cpu() -> Any:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS names none
        return jax.local_devices()[0]


def check(case: Case, mesh: Mesh, reference: Reference) -> Finding:
    """Compile, run and compare one case."""
    order = storage_order(case.layout, mesh.size, reference.inputs.query.shape[1])
    arguments = [_put(np.asarray(x)[:, order], mesh) for x in (*reference.inputs, reference.d_lse)]
    refused = f"implementation={case.implementation!r} refuses: "
    # On CPU machine code is not optimised: devices are emulated, nobody looks at their speed, and compiling is what takes long.
    fast_compile = {"xla_backend_optimization_level": 0} if mesh.devices.flat[0].platform == "cpu" else None
    try:
        compiled = _attention_and_grads(case, mesh).lower(*arguments).compile(compiler_options=fast_compile)
        jax.block_until_ready(compiled(*arguments))
        start = time.perf_counter()
        results = jax.block_until_ready(compiled(*arguments))
        seconds = time.perf_counter() - start
    except NotImplementedError as error:
        if str(error).startswith(refused):
            return Finding("refused", {}, {}, 0.0, str(error).removeprefix(refused))
        return Finding("FAIL", {}, {}, 0.0, _reason(error))
    except Exception as error:  # whatever a kernel or its compiler raises is what the user wants to know
        return Finding("FAIL", {}, {}, 0.0, _reason(error))
    back = np.argsort(order)
    errors, allowed = {}, {}
    for name, x in zip(NAMES, results, strict=True):
        errors[name] = relative_error(np.asarray(x.addressable_data(0))[:, back], getattr(reference.expected, name))
        allowed[name] = getattr(reference.allowed, name)
    wrong = [name for name in NAMES if not errors[name] <= allowed[name]]
    reason = ", ".join(f"{name} {errors[name]:.1e} (allowed {allowed[name]:.1e})" for name in wrong)
    return Finding("FAIL" if wrong else "pass", errors, allowed, seconds, reason and f"relative errors: {reason}")


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _put(x: np.ndarray, mesh: Mesh) -> jax.Array:
    """A sharded array; every process has all of `x` and gives what is its own."""
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, SPEC), lambda where: x[where])


def _attention_and_grads(case: Case, mesh: Mesh) -> Any:
    """A jitted function of query, key, value, d_out and d_lse in stored order; its results are whole on every device."""
    options: dict[str, Any] = {name: x for name, x in case._asdict().items() if name != "dtype"}

    def both(query, key, value, d_out, d_lse):
        def attend(query, key, value):
            return ring_attention(query, key, value, mesh=mesh, spec=SPEC, return_residual=True, **options)

        (out, lse), pull = jax.vjp(attend, query, key, value)
        return out, lse, *pull((d_out, d_lse.astype(lse.dtype)))

    return jax.jit(both, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _cells(case: Case, finding: Finding) -> tuple[str, ...]:
    mask = "causal" if case.is_causal else "full"
    cells = [case.implementation, case.dtype, case.layout, case.schedule, mask, finding.result]
    if finding.errors:
        for names in (NAMES[:2], NAMES[2:]):
            cells += [f"{x:.1e}" for x in finding.worst(*names)]
        cells.append(seconds_text(finding.seconds))
    return tuple(cells)


def _line(cells: tuple[str, ...]) -> str:
    """One row; columns are fixed, since rows appear as they are found."""
    return "  ".join(x.ljust(n) if i < 6 else x.rjust(n) for i, (x, n) in enumerate(zip(cells, WIDTHS, strict=False))).rstrip()
