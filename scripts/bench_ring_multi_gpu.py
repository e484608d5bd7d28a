"""Measure the ring over the GPUs of one host: is it right, how much of the GPUs' time does it lose, and to what.

    python scripts/bench_ring_multi_gpu.py --variants --png ring.png          every GPU
    python scripts/bench_ring_multi_gpu.py --devices 4 --tokens 8192          the first four
    python scripts/bench_ring_multi_gpu.py --cpu-devices 4 --tokens 64 --check-tokens 16 --heads 4 --kv-heads 2 --head-dim 8 \\
        --dtype float32 --steps 20 --memory-gib 0.001                         emulated: results are checked, times mean nothing

Correctness comes first, and where it fails nothing is timed and the exit code is 1: output and gradients of every layout and
schedule against dense float64 attention, with at most 2x (gradients 3x) the error of dense attention in the same dtype;
gradients with deterministic=True, the same bit by bit from run to run; --steps forward and backward passes without a hang. Then,
for one sequence in the zigzag layout, causal and without a mask:

* speed: efficiency is the seconds of one GPU with all of the work over P times the ring's. It runs the same kernel on the whole
  sequence of P x tokens; where that does not fit in its memory there is no efficiency, and the table says so.
* peers: those that multi_gpu_peers.py describes, on the same numbers: cuDNN with keys and values gathered, cuDNN with heads
  exchanged for tokens, TransformerEngine's ring where it is installed. One that refuses or disagrees is reported, not fatal.
* overlap: the share of the transfers' time during which the same GPU runs kernels, from a profile, causal. NCCL's kernels count
  from their start, so waiting for another GPU counts as transfer.
* --variants: check, time and profile the ring again with transfers by NCCL's kernels or by copy engines, with one process for all
  GPUs or one for each. A flag that the installed jaxlib does not know is reported; profiles are process 0's.
* longest: the most tokens per GPU of which one forward and backward pass, causal, fits in memory. The compiler's count of bytes
  is the first guess; each try is a process of its own. Memory is taken when a program starts, so a try that still runs after
  --longest-limit seconds counts as fitting, and is marked as unfinished.

Every stage runs in a process of its own, which ends itself when nothing progresses for --limit seconds and says where it stood.
Times are medians on the host clock. NVLink multicast stays off (NCCL_NVLS_ENABLE=0 and NVSHMEM_DISABLE_NVLS=1 in every process):
what would turn it on is refused. Prints tables and, as the last line, one JSON object; --png draws them.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import multi_gpu_stages as stages
from multi_gpu_peers import PEERS
from multi_gpu_processes import MULTICAST_OFF, Failure, flags_known, in_own_processes, refuse_multicast, start, stop
from multi_gpu_trace import search_longest

from jax_ring_attention.chunk import AUTOMATIC
from jax_ring_attention.cli.console import UsageError, positive_float, positive_int, require_matplotlib, token_count

#: Efficiency of others, as a share of the single-GPU kernel, and what is aimed at here.
MARKS = {
    "source": "README of ring-flash-attention: PyTorch, 8 H800, 8k tokens a GPU, 32/8 heads, D128, bfloat16, causal zigzag",
    "forward": 0.852,
    "forward+backward": 0.902,
    "goal": 0.95,
}
PATIENCE = 3600
"""Seconds for a stage that progresses for ever; one that does not is ended by its own watchdog."""
SKIPPABLE = ("repeat", "steps", "speed", "peers", "overlap", "longest")


class Variant(NamedTuple):
    """A way to make transfers: XLA's flags, and whether each GPU gets a process."""

    flags: str
    process_each: bool


#: For collective-permutes newer XLA reads the first flag; the second is the older one, which may change nothing here.
VARIANTS = {
    "NCCL": Variant("--xla_gpu_collective_permute_mode=private", False),
    "copy engine": Variant("--xla_gpu_collective_permute_mode=peer", False),
    "copy engine, older flag": Variant("--xla_gpu_use_memcpy_local_p2p=true", False),
    "NCCL, one process per GPU": Variant("--xla_gpu_collective_permute_mode=private", True),
    "copy engine, one process per GPU": Variant("--xla_gpu_collective_permute_mode=peer", True),
}


# Stages.


class Runner:
    """Runs stages, each in a process of its own or, for a debugger and tests, in this one."""

    def __init__(self, setting: stages.Setting, in_process: bool) -> None:
        self.setting, self.in_process = setting, in_process

    def __call__(self, stage: str, patience: float = PATIENCE, **work: Any) -> dict[str, Any] | Failure:
        if self.in_process:
            return stages.run(stage, self.setting, **work)
        return self.apart(stage, patience, **work)

    def apart(
        self, stage: str, patience: float = PATIENCE, environment: dict[str, str] | None = None, processes: int = 1, **work: Any
    ) -> dict[str, Any] | Failure:
        given = {"stage": stage, "setting": self.setting._asdict(), "work": work}
        return in_own_processes(__file__, given, patience, environment, processes)


def one(work: dict[str, Any]) -> None:
    """What a process of its own does."""
    setting = stages.Setting(**work["setting"])
    with stages.watched(setting):
        start(setting.cpu_devices, work["processes"], work["process"], work["port"])
    print(json.dumps(stages.run(work["stage"], setting, **work["work"])), flush=True)
    stop(work["processes"])


# The parts of the report. Each prints as it goes, and gives what belongs in the JSON object.


def say(*words: object) -> None:
    print(*words, flush=True)


def needs(result: dict[str, Any] | Failure, what: str) -> dict[str, Any]:
    if isinstance(result, Failure):
        raise SystemExit(f"{what}: {result.failed}. Nothing is timed.")
    return result


def report_correctness(run: Runner, options: argparse.Namespace) -> dict[str, Any]:
    """Ends the program where anything is wrong."""
    which = "each once" if options.fast else "all"
    found = {"layouts_and_schedules": needs(run("correctness", masks=options.masks, which=which), "correctness")}
    for row in found["layouts_and_schedules"]["rows"]:
        line = f"{row['layout']:10s} {row['schedule']:13s} {row['mask']:6s} {row['result']}"
        if "forward_error" in row:
            line += f"  forward {row['forward_error']:.1e} (allowed {row['forward_allowed']:.1e})"
            line += f"  gradients {row['gradients_error']:.1e} (allowed {row['gradients_allowed']:.1e})"
        say(line if not row["reason"] else f"{line}  {row['reason']}")
    wrong = found["layouts_and_schedules"]["wrong"]
    if wrong:
        raise SystemExit(f"{wrong} of {len(found['layouts_and_schedules']['rows'])} combinations are wrong. Nothing is timed.")
    if "repeat" not in options.skip:
        result = needs(run("repeatability", tokens=min(options.tokens), runs=options.runs), "repeatability")
        found["repeatability"] = result
        say(f"deterministic gradients, {result['runs']} runs of {result['tokens']} tokens a GPU: {result['different']} differ")
        if result["different"]:
            raise SystemExit("deterministic=True is not repeatable. Nothing is timed.")
    if "steps" not in options.skip:
        result = needs(run("steps", count=options.steps), "steps")
        found["steps"] = result
        say(
            f"{result['steps']} steps in {result['seconds']:.1f} s; the last differs from the first by {result['difference']:.1e}"
        )
        if result["wrong"]:
            raise SystemExit("the results of the last step are not those of the first. Nothing is timed.")
    return found


def report_speed(run: Runner, options: argparse.Namespace) -> dict[str, Any]:
    """Each peer gets a process, with the ring beside it, so that one that crashes takes nothing else along."""
    rows: list[dict[str, Any]] = []
    refused: list[dict[str, Any]] = []
    peers = [] if "peers" in options.skip else list(PEERS)
    for tokens in options.tokens:
        for name in ("ring", *peers):
            is_ring = name == "ring"
            result = run("speed", tokens=tokens, masks=options.masks, alone=is_ring, peers=[] if is_ring else [name])
            if isinstance(result, Failure):
                result = {"rows": [], "refused": [{"name": name, "mask": "any", "reason": result.failed}], "wrong": []}
            if is_ring and result["wrong"]:
                raise SystemExit(f"one device {result['wrong'][0]['reason']} ({tokens} tokens a GPU). Nothing more is timed.")
            new = [row for row in result["rows"] if is_ring or row["name"] == name]
            for row in new:
                row |= share_of_one_device(row, rows)
                share = f"  efficiency {row['efficiency']:.3f}" if "efficiency" in row else ""
                say(
                    f"{tokens:7d} {row['mask']:6s} {row['direction']:16s} {row['name']:22s} {row['seconds'] * 1e3:10.3f} ms  "
                    f"{row['tflops_per_device']:6.1f} TFLOP/s a GPU  {row['over_ring']:.3f} of the ring{share}"
                )
            rows += new
            for row in result["refused"]:
                refused.append({"tokens": tokens, **row})
                say(f"{tokens:7d} {row['mask']:6s} {row['name']}: {row['reason']}")
    marks = ", ".join(f"{direction} {MARKS[direction]:.1%}" for direction in stages.DIRECTIONS)
    say(f"marks for causal: {marks} ({MARKS['source']}); goal {MARKS['goal']:.0%}")
    return {"rows": rows, "refused": refused}


def share_of_one_device(row: dict[str, Any], measured: list[dict[str, Any]]) -> dict[str, float]:
    """A peer's efficiency, by our one-device time and the ring's efficiency, which were measured together."""
    key = ("tokens", "mask", "direction")
    ring = [one for one in measured if one["name"] == "ring" and all(one[x] == row[x] for x in key) and "efficiency" in one]
    return {"efficiency": ring[0]["efficiency"] * row["over_ring"]} if ring else {}


def overlap_line(found: dict[str, Any], direction: str) -> str:
    least = found[direction]["least"]
    what = found[direction]["reason"] if least is None else f"{least:.1%} of the transfers' time beside kernels, on the worst GPU"
    return f"overlap, {found[direction]['tokens']} tokens a GPU, causal, {direction}: {what}"


def report_overlap(run: Runner, options: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for tokens in options.tokens:
        result = run("overlap", tokens=tokens)
        if isinstance(result, Failure):
            say(f"overlap, {tokens} tokens a GPU: not measured: {result.failed}")
            result = {"tokens": tokens, "failed": result.failed}
        else:
            for direction in stages.DIRECTIONS:
                say(overlap_line(result, direction))
        found.append(result)
    return found


def report_variants(run: Runner, options: argparse.Namespace, devices: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    tokens = min(options.tokens)
    for name in options.variants:
        flags, process_each = VARIANTS[name]
        result: dict[str, Any] | Failure = Failure(f"this jaxlib does not know {flags}")
        if flags_known(flags):
            environment = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
            processes = devices if process_each else 1
            result = run.apart("variant", PATIENCE, environment, processes, tokens=tokens, masks=options.masks)
        if isinstance(result, Failure):
            found[name] = {"failed": result.failed}
            say(f"variant {name}: not measured: {result.failed}")
            continue
        found[name] = result | {"flags": flags, "processes": devices if process_each else 1}
        for row in result["rows"]:
            say(f"variant {name}, {tokens} tokens a GPU, {row['mask']} {row['direction']}: {row['seconds'] * 1e3:.3f} ms")
        for direction in stages.DIRECTIONS:
            say(f"variant {name}, {overlap_line(result['overlap'], direction)}")
    return found


def report_longest(run: Runner, options: argparse.Namespace, devices: int) -> list[dict[str, Any]]:
    # What the allocator leaves is for NCCL.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.94")
    sizes = options.ring_sizes or sorted({2**i for i in range(devices.bit_length()) if 2**i <= devices} | {devices})
    rows = []
    for size in sizes:
        guess = run("memory_guess", ring_size=size)
        if isinstance(guess, Failure):
            say(f"longest, {size} GPUs: not measured: {guess.failed}")
            rows.append({"ring_size": size, "failed": guess.failed})
            continue
        tries: list[dict[str, Any]] = []
        step = 2 ** max(1, (guess["tokens"] // 32).bit_length() - 1)

        def fits(tokens: int, size: int = size, tries: list[dict[str, Any]] = tries) -> bool:
            result = run("train_once", options.longest_limit, ring_size=size, tokens=tokens)
            if isinstance(result, Failure):
                result = {"status": "unfinished" if result.out_of_time else "failed", "reason": result.failed}
            tries.append({"tokens": tokens, **result})
            say(f"longest, {size} GPUs, {tokens} tokens each: {result['status']}")
            return result["status"] in ("finished", "unfinished")

        most, least = search_longest(fits, guess["tokens"], step, options.tries)
        rows.append(
            {"ring_size": size, "tokens_per_gpu": most, "too_many": least, **guess, "guess": guess["tokens"], "tries": tries}
        )
        del rows[-1]["tokens"]
        said = "none of those tried" if most is None else f"{most} tokens a GPU, {most * size} in all"
        say(f"longest, {size} GPUs: {said}; too many: {least}; the compiler says {guess['bytes_per_token']:.0f} bytes a token")
    return rows


def draw(path: Path, report: dict[str, Any]) -> None:
    """Efficiency with the marks; what the peers need for the same; the longest sequences."""
    from matplotlib.figure import Figure

    from jax_ring_attention.cli.pictures import save

    figure = Figure(figsize=(16, 5), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    rows = report.get("speed", {}).get("rows", [])

    def label(row: dict[str, Any]) -> str:
        return f"{row['tokens']} {row['mask']}\n{row['direction']}"

    ring = [row for row in rows if row["name"] == "ring" and "efficiency" in row]
    left.bar([label(row) for row in ring], [row["efficiency"] for row in ring])
    left.axhline(MARKS["goal"], color="black", linestyle="--", label=f"goal {MARKS['goal']:.0%}")
    for direction, style in zip(stages.DIRECTIONS, (":", "-."), strict=True):
        left.axhline(MARKS[direction], color="grey", linestyle=style, label=f"ring-flash-attention, H800, {direction}")
    left.set(title="Ring: one GPU's time / (P x ring's)", ylim=(0, 1.05))
    left.legend(loc="lower right", fontsize=8)
    for name in dict.fromkeys(row["name"] for row in rows if row["name"] not in ("ring", "one device")):
        mine = [row for row in rows if row["name"] == name]
        middle.plot([label(row) for row in mine], [row["over_ring"] for row in mine], "o", label=name)
    middle.axhline(1, color="black", linewidth=1)
    middle.set(title="Peers' speed over the ring's")
    if middle.get_legend_handles_labels()[0]:
        middle.legend(fontsize=8)
    longest = [row for row in report.get("longest", []) if row.get("tokens_per_gpu")]
    right.plot([row["ring_size"] for row in longest], [row["tokens_per_gpu"] * row["ring_size"] for row in longest], "o-")
    right.set(title="Longest sequence, forward and backward", xlabel="GPUs", ylabel="tokens")
    for axis, shown in ((left, ring), (middle, middle.lines[:-1]), (right, longest)):
        axis.set_visible(bool(shown))  # what was skipped leaves its place empty
    for axis in (left, middle):
        axis.tick_params(axis="x", labelrotation=45, labelsize=7)
    save(figure, path)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--devices", type=positive_int, metavar="P", help="use the first P devices (default: all)")
    add("--cpu-devices", type=positive_int, metavar="P", help="emulate so many devices on the CPU")
    add("--tokens", type=token_count, nargs="+", default=[8192, 32768], help="per GPU, multiples of 2 (default: 8k 32k)")
    add("--masks", nargs="+", choices=("causal", "full"), default=["causal", "full"], help="to check and time (default: both)")
    add("--heads", type=positive_int, default=32, help="query heads (default 32)")
    add("--kv-heads", type=positive_int, default=8, help="key/value heads (default 8)")
    add("--head-dim", type=positive_int, default=128, help="of query, key and value (default 128)")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"), help="default bfloat16")
    add("--implementation", choices=AUTOMATIC, help="checked and timed (default: what these devices take by themselves)")
    add("--check-tokens", type=token_count, default=256, help="per GPU for correctness and --steps (default 256)")
    add("--fast", action="store_true", help="check each layout and each schedule once, and what is timed, instead of all nine")
    add("--runs", type=positive_int, default=20, help="that must give the same bits (default 20)")
    add("--steps", type=positive_int, default=2000, help="that must not hang (default 2000)")
    add("--repeats", type=positive_int, default=5, help="rounds that a median is taken of (default 5)")
    add("--skip", nargs="+", choices=SKIPPABLE, default=[], help="leave these out; layouts and schedules are always checked")
    add(
        "--variants",
        nargs="*",
        choices=VARIANTS,
        metavar="NAME",
        help=f"ways to transfer, all where none is named: {list(VARIANTS)}",
    )
    add("--ring-sizes", type=positive_int, nargs="+", help="of the longest sequences (default: powers of 2 up to P, and P)")
    add("--tries", type=positive_int, default=4, help="per ring size, for the longest sequence (default 4)")
    add("--longest-limit", type=positive_float, default=120, help="seconds for each of these tries (default 120)")
    add("--memory-gib", type=positive_float, help="memory of a device, for the first guess (default: what it says)")
    add(
        "--limit", type=positive_float, default=300, help="seconds without progress after which a stage is given up (default 300)"
    )
    add("--in-process", action="store_true", help="run all stages in this process, for a debugger")
    add("--png", type=Path, help="draw the tables here")
    add("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if odd := [n for n in [*options.tokens, options.check_tokens] if n % 2]:
        parser.error(f"{odd[0]} tokens a GPU are no two pieces for zigzag: give a multiple of 2")
    if options.heads % options.kv_heads:
        parser.error(f"--heads {options.heads} is no multiple of --kv-heads {options.kv_heads}")
    if options.in_process and (options.variants is not None or options.cpu_devices):
        parser.error("--in-process cannot start JAX anew, as --variants and --cpu-devices do: leave them out")
    if options.devices and options.variants is not None:
        parser.error("--variants runs one process per GPU on all of them: use CUDA_VISIBLE_DEVICES instead of --devices")
    options.variants = list(VARIANTS) if options.variants == [] else options.variants or []
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.one:
        one(json.loads(options.one))
        return
    refuse_multicast(os.environ)
    os.environ.update(MULTICAST_OFF)  # before anything starts NCCL
    if options.png:
        try:
            require_matplotlib()
        except UsageError as error:
            raise SystemExit(str(error)) from error
    shared = {name: getattr(options, name) for name in stages.Setting._fields if hasattr(options, name)}
    memory = None if options.memory_gib is None else int(options.memory_gib * 2**30)
    run = Runner(stages.Setting(**shared, memory_bytes=memory), options.in_process)
    about = run("about")
    if isinstance(about, Failure):
        raise SystemExit(f"JAX does not start here: {about.failed}")
    run.setting = run.setting._replace(implementation=about["implementation"])  # so that all processes take the same
    say(f"{about['devices']} x {about['device']}, jax {about['jax']}, {about['implementation']}, {options.dtype}")
    setting = {name: getattr(options, name) for name in ("heads", "kv_heads", "head_dim", "dtype", "repeats")}
    report: dict[str, Any] = {"script": "bench_ring_multi_gpu", "date": time.strftime("%Y-%m-%d"), **about, **setting}
    report |= {"marks": MARKS, "correctness": report_correctness(run, options)}
    if "speed" not in options.skip:
        report["speed"] = report_speed(run, options)
    if "overlap" not in options.skip:
        report["overlap"] = report_overlap(run, options)
    if options.variants:
        report["variants"] = report_variants(run, options, about["devices"])
    if "longest" not in options.skip:
        report["longest"] = report_longest(run, options, about["devices"])
    if options.png:
        draw(options.png, report)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
