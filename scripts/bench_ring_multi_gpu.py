"""Measure the ring over the GPUs of one host: is it right, how much of the GPUs' time does it lose, and to what.

    python scripts/bench_ring_multi_gpu.py --variants --png ring.png          every GPU
    python scripts/bench_ring_multi_gpu.py --devices 4 --tokens 8192          the first four
    python scripts/bench_ring_multi_gpu.py --cpu-devices 4 --tokens 64 --check-tokens 16 --heads 4 --kv-heads 2 --head-dim 8 \\
        --dtype float32 --steps 20 --memory-gib 0.001                         emulated: what runs there is checked, times mean nothing

Correctness comes first, and where it fails nothing is timed and the exit code is 1: output and gradients of every layout and
schedule against dense float64 attention, with at most 2x (gradients 3x) the error of dense attention in the same dtype; gradients
with deterministic=True, the same bit by bit from run to run; --steps forward and backward passes without a hang. Then, for 1
sequence, causal and without a mask, in the zigzag layout:

* efficiency: seconds of one GPU with all of the work, over P times the ring's. The one GPU runs the same kernel on the whole sequence
  of P x tokens; where that does not fit in its memory there is no efficiency, and the table says so. Results of both are compared.
* the peers that multi_gpu_peers.py describes, on the same numbers: cuDNN with keys and values gathered, cuDNN with heads exchanged
  for tokens, and TransformerEngine's ring where it is installed. One that refuses or disagrees is reported, not fatal.
* overlap: the share of the transfers' time during which the same GPU runs kernels, from a profile. A kernel of NCCL counts from its
  start, waiting for the other GPU included.
* --variants: the same in processes of their own, with transfers by NCCL's kernels or by copy engines, and with one process for all GPUs
  or one for each. XLA flags are first shown to the installed jaxlib on CPU, which ends a process for a flag that it does not know.
* longest: the most tokens per GPU with which one forward and backward pass, causal, fits in memory. The compiler's count of bytes is
  the first guess; each try is a process of its own. A try that is still running at --longest-limit has its memory and counts as fitting,
  and is marked as unfinished.

Every stage runs in a process of its own, which ends itself when nothing progresses for --limit seconds and says where it stood. Times
are medians on the host clock. NVLink multicast stays off (NCCL_NVLS_ENABLE=0 and NVSHMEM_DISABLE_NVLS=1 in every process): a setting
that turns it on is refused. Prints tables and, as the last line, one JSON object; --png draws them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}
os.environ.update({name: os.environ.get(name, value) for name, value in MULTICAST_OFF.items()})  # main refuses other values

import multi_gpu_stages as stages
from multi_gpu_trace import search_longest

from jax_ring_attention.chunk import AUTOMATIC
from jax_ring_attention.cli.console import positive_float, positive_int, require_matplotlib, token_count

#: Efficiency of others, as a share of the single-GPU kernel, and what is aimed at here.
MARKS = {
    "source": "README of ring-flash-attention: PyTorch, 8 H800, 8k tokens a GPU, 32/8 heads, D128, bfloat16, causal zigzag",
    "forward": 0.852,
    "forward+backward": 0.902,
    "goal": 0.95,
}
SKIPPABLE = ("repeat", "steps", "speed", "peers", "overlap", "longest")


class Variant(NamedTuple):
    """A way to make transfers: XLA's flags, and whether each GPU gets a process."""

    flags: str
    process_each: bool


#: Collective-permutes follow the first flag in the versions supported here; the second is what older XLA reads, and other collectives.
VARIANTS = {
    "NCCL": Variant("--xla_gpu_collective_permute_mode=private", False),
    "copy engine": Variant("--xla_gpu_collective_permute_mode=peer", False),
    "copy engine, older flag": Variant("--xla_gpu_use_memcpy_local_p2p=true", False),
    "NCCL, one process per GPU": Variant("--xla_gpu_collective_permute_mode=private", True),
    "copy engine, one process per GPU": Variant("--xla_gpu_collective_permute_mode=peer", True),
}


# Processes.


def refuse_multicast(environment: dict[str, str] | os._Environ[str]) -> None:
    """A program that uses NVLink multicast can take the GPUs of a shared host out of service."""
    for name, off in MULTICAST_OFF.items():
        if environment.get(name, off) != off:
            raise SystemExit(f"{name}={environment[name]} turns NVLink multicast on; unset it or set it to {off}")
    if found := re.search(r"\S*(symmetric|multicast|nvls)\S*", environment.get("XLA_FLAGS", "").lower()):
        raise SystemExit(f"XLA_FLAGS has {found[0]}, which may use NVLink multicast; leave it out")


class Failure(NamedTuple):
    """Why a stage gave no result."""

    failed: str


def why(code: int, text: str) -> str:
    """From the exit code of a process and what it wrote to stderr: the watchdog's finding, or the last line."""
    if "Timeout (" in text:
        frames = re.findall(
            r'^  File "(.*?)", line (\d+) in (\S+)', text[text.rindex("(most recent call first)") :], re.MULTILINE
        )
        place = f" in {frames[0][2]}, {Path(frames[0][0]).name}:{frames[0][1]}" if frames else ""
        return f"no progress within the limit, stopped by the watchdog{place}"
    lines = [line for line in text.strip().splitlines() if line.strip()]
    ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"{lines[-1][:300] if lines else 'no message'} ({ended})"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def in_own_processes(
    work: dict[str, Any], patience: float, environment: dict[str, str] | None = None, processes: int = 1
) -> dict[str, Any] | Failure:
    """The last line of process 0, which runs `work` with all others; when one fails, or at `patience` seconds, all are ended."""
    environment = os.environ | MULTICAST_OFF | (environment or {})
    refuse_multicast(environment)
    work |= {"processes": processes, "port": free_port()}
    with tempfile.TemporaryDirectory() as directory:
        children = []
        for process in range(processes):
            command = [sys.executable, __file__, "--one", json.dumps(work | {"process": process})]
            with open(f"{directory}/{process}.out", "wb") as out, open(f"{directory}/{process}.err", "wb") as err:
                children.append(subprocess.Popen(command, env=environment, stdout=out, stderr=err))
        deadline = time.monotonic() + patience
        try:
            while any(child.poll() is None for child in children):
                if any(child.poll() for child in children):
                    break
                if time.monotonic() > deadline:
                    return Failure(f"not finished within {patience:g} s")
                time.sleep(0.05)
            for process, child in enumerate(children):
                if child.poll():
                    return Failure(why(child.returncode, Path(f"{directory}/{process}.err").read_text(errors="replace")))
            return json.loads(Path(f"{directory}/0.out").read_text().splitlines()[-1])
        finally:
            for child in children:
                child.kill()
                child.wait()


class Runner:
    """Runs stages, each in a process of its own or, for a debugger and tests, in this one."""

    def __init__(self, setting: stages.Setting, in_process: bool) -> None:
        self.setting, self.in_process = setting, in_process

    def __call__(self, stage: str, patience: float | None = None, **work: Any) -> dict[str, Any] | Failure:
        if self.in_process:
            return stages.run(stage, self.setting, **work)
        # A stage watches itself; an hour is for one that progresses for ever.
        return in_own_processes(self.work(stage, **work), patience or 3600)

    def work(self, stage: str, **work: Any) -> dict[str, Any]:
        return {"stage": stage, "setting": self.setting._asdict(), "work": work}


def one(work: dict[str, Any]) -> None:
    """What a process of its own does."""
    setting = stages.Setting(**work["setting"])
    with stages.watched(setting):
        stages.start(setting, work["processes"], work["process"], work["port"])
    print(json.dumps(stages.run(work["stage"], setting, **work["work"])))


# The parts of the report. Each prints as it goes, and gives what belongs in the JSON object.


def say(*words: object) -> None:
    print(*words, flush=True)


def needs(result: dict[str, Any] | Failure, what: str) -> dict[str, Any]:
    if isinstance(result, Failure):
        raise SystemExit(f"{what}: {result.failed}. Nothing is timed.")
    return result


def report_correctness(run: Runner, options: argparse.Namespace) -> dict[str, Any]:
    """Ends the program where anything is wrong."""
    found = {"layouts_and_schedules": needs(run("correctness", masks=options.masks), "correctness")}
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
    rows, refused = [], []
    for tokens in options.tokens:
        for mask in options.masks:
            result = run("speed", tokens=tokens, mask=mask, peers="peers" not in options.skip)
            if isinstance(result, Failure):
                refused.append({"tokens": tokens, "mask": mask, "name": "ring", "reason": result.failed})
                say(f"{tokens:7d} tokens a GPU, {mask}: not measured: {result.failed}")
                continue
            for row in result["rows"]:
                share = f"  efficiency {row['efficiency']:.3f}" if "efficiency" in row else ""
                say(
                    f"{tokens:7d} {mask:6s} {row['direction']:16s} {row['name']:22s} {row['seconds'] * 1e3:10.3f} ms  "
                    f"{row['tflops_per_device']:6.1f} TFLOP/s a GPU  {row['over_ring']:.3f} of the ring{share}"
                )
            for name, reason in result["refused"].items():
                refused.append({"tokens": tokens, "mask": mask, "name": name, "reason": reason})
                say(f"{tokens:7d} {mask:6s} {name}: {reason}")
            rows += result["rows"]
    marks = ", ".join(f"{direction} {MARKS[direction]:.1%}" for direction in stages.DIRECTIONS)
    say(f"marks for causal: {marks} ({MARKS['source']}); goal {MARKS['goal']:.0%}")
    return {"rows": rows, "refused": refused}


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


def flags_known(flags: str) -> bool:
    """Whether the installed jaxlib starts with these XLA flags: it is asked on CPU, in a process of its own."""
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    return subprocess.run(command, env=environment, capture_output=True, timeout=120).returncode == 0


def report_variants(run: Runner, options: argparse.Namespace, devices: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    tokens = min(options.tokens)
    work = run.work("variant", tokens=tokens, masks=options.masks)
    for name in options.variants:
        flags, process_each = VARIANTS[name]
        result: dict[str, Any] | Failure = Failure(f"this jaxlib does not know {flags}")
        if flags_known(flags):
            environment = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
            result = in_own_processes(work, 3600, environment, devices if process_each else 1)
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
                unfinished = result.failed.startswith("not finished")
                result = {"status": "unfinished" if unfinished else "failed", "reason": result.failed}
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
    if options.png:
        require_matplotlib()
    shared = {name: getattr(options, name) for name in stages.Setting._fields if hasattr(options, name)}
    memory = None if options.memory_gib is None else int(options.memory_gib * 2**30)
    run = Runner(stages.Setting(**shared, memory_bytes=memory), options.in_process)
    about = run("about")
    if isinstance(about, Failure):
        raise SystemExit(f"JAX does not start here: {about.failed}")
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
