"""Compare our TPU kernels with others by the compiler's static schedule; needs no TPU.

Claim under test: fewer cycles per pair of blocks than JAX's splash attention and than tokamax's, for the same head dim and chip.

Every kernel is compiled ahead of time, in a process of its own, and its program is read from the compiler's dump
(`tpu_kernels.py`, `tpu_schedule.py`). The unit is cycles per 512 x 1024 (query x key) tokens of one head, bfloat16, one core:

* full: the branch of pairs that need no mask, max(bundles, what the products take on the matrix units). The overhead of steps,
  transfers, their waits and what only some steps run are excluded.
* causal: a whole chunk of 8192 x 8192 on the diagonal: every step costs the branch that it takes and what all steps run beside
  it. The sum is divided by half the pairs of the full chunk; "x half" is over half of the full chunk, counted in the same way.

--fused compares the kernels of the fused ring over 8 chips with ours for one chunk instead, at the same tiling: bundles of the
pair without a mask (the larger of its two copies, for the hop at home and for the others), of a step and of a hop, and memory.

Efficiency counts two products forward and five backward, whatever a kernel computes. Of the others, each kernel takes the best of
the block sizes tried; the backward pass is one kernel or the sum of two. A schedule says nothing about memory bandwidth.
Prints a table and one JSON object as the last line, and draws the full figures.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tpu_schedule

HERE = Path(__file__).parent
PAIR = 512 * 1024
CHUNK = 8192
CARRIED = 4096  # tokens per device for which the cost of the carry is stated
PEERS = ("splash", "tokamax")
DIRECTIONS = {"fwd": "forward", "bwd": "backward"}
#: block_q, block_kv, and keys computed at once
QUICK, QUICK_LARGE_HEADS = ((1024, 2048, 1024),), ((1024, 1024, 1024),)  # larger blocks do not fit when H is 256
THOROUGH = ((512, 1024, 512), (512, 2048, 1024), (1024, 1024, 1024), (1024, 2048, 512), (1024, 2048, 1024), (2048, 2048, 512))

FUSED = {"heads": 8, "tokens": 4096}  # per chip of the fused ring
RESULTS = 3  # of a kernel of the fused ring; what follows are its buffers

NOTHING, UNMASKED = "0", "1"  # kinds of steps, as in mosaic_tpu/common.py
TIMEOUT = 900


class Compiler:
    """Runs jobs of `tpu_kernels.py` one at a time; a job asked for again is not run again."""

    def __init__(self) -> None:
        self.results: dict[str, Any] = {}
        self.failed: list[dict[str, Any]] = []

    def run(self, **job: Any) -> dict[str, Any] | None:
        """The result, or None where the job failed, which is reported at the end."""
        text = json.dumps(job)
        if text not in self.results:
            self.results[text], reason = self._run(text)
            if reason:
                self.failed.append({**job, "reason": reason})
            print(f"# {f'FAILED: {reason}' if reason else 'compiled'} {text}", file=sys.stderr, flush=True)
        return self.results[text]

    @staticmethod
    def _run(text: str) -> tuple[dict[str, Any] | None, str]:
        """The result and "", or None and why."""
        command = [sys.executable, str(HERE / "tpu_kernels.py"), text]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            return None, f"took more than {TIMEOUT} seconds"
        if done.returncode == 0:
            return json.loads(done.stdout.splitlines()[-1]), ""
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        errors = [line for line in lines if re.match(r"[\w.]*Error\b", line)]
        return None, (errors or lines)[-1][:300]


def per_pair(cycles: float, block_q: int, block_kv: int) -> float:
    return cycles * PAIR / (block_q * block_kv)


def useful_cycles(chip: str, head_dim: int, direction: str) -> float:
    """What the products of one pair take at the chip's peak rate."""
    products = {"forward": 2, "backward": 5}[direction]
    return products * 2 * PAIR * head_dim / tpu_schedule.CHIPS[chip].flops_per_cycle


def full_cost(branch: dict[str, Any], block_q: int, block_kv: int) -> dict[str, float]:
    names = {"cycles": "cycles", "bundles": "bundles", "matmul_cycles": "minimum", "spills": "spills", "fills": "fills"}
    return {name: per_pair(branch[field], block_q, block_kv) for field, name in names.items()}


def causal_cost(cycles: float, whole_full: float) -> dict[str, float]:
    """From the cycles of a whole causal chunk, and of a full one."""
    return {"cycles": cycles / (CHUNK * CHUNK / PAIR / 2), "over_half_of_full": cycles / (whole_full / 2)}


def ours(
    compiler: Compiler, chip: str, head_dim: int, direction: str, masks: list[str], tiling: list[int] | None
) -> dict[str, Any] | None:
    """What "full" and, if it is among `masks`, "causal" cost at one tiling; None if it does not compile.

    The program for a causal mask has the branch without a mask too, so both are read from one compilation.
    """
    job = {"who": "ours", "direction": direction, "chip": chip, "head_dim": head_dim, "causal": "causal" in masks}
    result = compiler.run(**job, **({"tiling": tiling} if tiling else {}))
    if result is None:
        return None
    schedule = result["schedules"][direction]
    branches = dict(zip(map(str, result["kinds"]), schedule["branches"], strict=True))
    block_q, block_kv, *_ = result["tiling"]
    overhead, unmasked = schedule["step_overhead"], branches[UNMASKED]["cycles"]
    found: dict[str, Any] = {"full": full_cost(branches[UNMASKED], block_q, block_kv)}
    if direction == "forward":
        found["full"]["carry_percent"] = 100 * schedule["first_step"] / (CARRIED / block_kv * (unmasked + overhead))
    if "causal" in masks:
        whole = CHUNK**2 / (block_q * block_kv) * (unmasked + overhead)
        cycles = {NOTHING: 0} | {kind: branch["cycles"] for kind, branch in branches.items()}
        chunk = sum(count * (overhead + cycles[kind]) for kind, count in result["steps"].items())
        found["causal"] = causal_cost(chunk, whole) | {"spills": found["full"]["spills"]}
        found["causal"]["branches"] = {kind: per_pair(branch["cycles"], block_q, block_kv) for kind, branch in branches.items()}
        found["causal"]["steps"] = result["steps"]
    for cost in found.values():
        cost |= {"step_overhead": per_pair(overhead, block_q, block_kv), "at": result["tiling"]}
    return found


def peer_kernels(compiler: Compiler, who: str, chip: str, head_dim: int, blocks: tuple[int, ...], causal: bool) -> dict[str, Any]:
    """label -> (schedule, blocks) of every kernel of a peer at one choice of blocks."""
    kernels: dict[str, Any] = {}
    for fused in (False, True) if who == "splash" else (True,):
        result = compiler.run(who=who, chip=chip, head_dim=head_dim, causal=causal, fused=fused, blocks=list(blocks))
        for label, schedule in (result["schedules"] if result else {}).items():
            kernels[label] = schedule, result["blocks"][label]
    return kernels


def peer_cost(schedule: dict[str, Any], blocks: list[int], mask: str) -> dict[str, Any]:
    """Of one kernel; a kernel with two branches has the one without a mask first."""
    free, masked = schedule["branches"][0], schedule["branches"][-1]
    overhead = schedule["step_overhead"]
    if mask == "full":
        cost = full_cost(free, *blocks)
    else:
        full, partial = causal_blocks(*blocks)
        chunk = full * free["cycles"] + partial * masked["cycles"] + (full + partial) * overhead
        cost = causal_cost(chunk, CHUNK**2 / math.prod(blocks) * (free["cycles"] + overhead))
        cost["spills"] = per_pair(free["spills"], *blocks)
    return {**cost, "step_overhead": per_pair(overhead, *blocks), "at": blocks}


def causal_blocks(block_q: int, block_kv: int) -> tuple[int, int]:
    """Full and partial blocks of a causal chunk."""
    first_query, first_key = np.arange(0, CHUNK, block_q)[:, None], np.arange(0, CHUNK, block_kv)[None]
    full = first_key + block_kv - 1 <= first_query
    some = first_key <= first_query + block_q - 1
    return int(full.sum()), int((some & ~full).sum())


def peers(compiler: Compiler, who: str, chip: str, head_dim: int, mask: str, masks: list[str], candidates: Any) -> dict[str, Any]:
    """The best forward and backward pass of a peer, where one compiled; keys of dq + dkv are added up."""
    best: dict[str, Any] = {}
    for blocks in candidates:
        # tokamax's program for a causal mask has the branch without a mask too; that of splash masks every block.
        causal = "causal" in masks if who == "tokamax" else mask == "causal"
        kernels = peer_kernels(compiler, who, chip, head_dim, blocks, causal)
        for label, (schedule, kernel_blocks) in kernels.items():
            cost = peer_cost(schedule, kernel_blocks, mask)
            if label not in best or cost["cycles"] < best[label]["cycles"]:
                best[label] = cost
    if "dkv" in best and "dq" in best:
        dkv, dq = best.pop("dkv"), best.pop("dq")
        added = ("cycles", "bundles", "minimum", "spills", "fills", "step_overhead")
        two = {name: dkv[name] + dq[name] for name in added if name in dkv} | {"at": [*dkv["at"], *dq["at"]]}
        best["dkv+dq"] = two
        if "backward" not in best or two["cycles"] < best["backward"]["cycles"]:
            best["backward"] = two
    return best


def measure(compiler: Compiler, options: argparse.Namespace) -> list[dict[str, Any]]:
    names = () if options.ours_only else PEERS
    rows = []
    for chip in options.chips:
        for head_dim in options.head_dims:
            quick = QUICK if head_dim <= 128 else QUICK_LARGE_HEADS
            candidates = quick if options.quick else THOROUGH
            mine = {direction: tilings_of(options.tiling, direction) for direction in DIRECTIONS.values()}
            costs = {d: [ours(compiler, chip, head_dim, d, options.masks, t) for t in ts] for d, ts in mine.items()}
            for mask in options.masks:
                others = {who: peers(compiler, who, chip, head_dim, mask, options.masks, candidates) for who in names}
                for direction, found in costs.items():
                    for one in found:
                        if one is not None:
                            rows.append(row_of(chip, head_dim, direction, mask, one[mask], others))
                            print(line_of(rows[-1]), flush=True)
    return rows


def tilings_of(given: list[str], direction: str) -> list[list[int] | None]:
    """The tilings asked for by --tiling; the kernel's own where none is asked for at all."""
    parsed = [text.split(":") for text in given]
    return (
        [[int(n) for n in numbers.split(",")] for name, numbers in parsed if DIRECTIONS[name] == direction] if given else [None]
    )


def row_of(chip: str, head_dim: int, direction: str, mask: str, mine: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    useful = useful_cycles(chip, head_dim, direction)
    row: dict[str, Any] = {"chip": chip, "head_dim": head_dim, "direction": direction, "mask": mask}
    row["ours"] = {**mine, "efficiency": useful / mine["cycles"]}
    for who, found in others.items():
        if direction in found:
            row[who] = {**found[direction], "efficiency": useful / found[direction]["cycles"]}
            row[f"over_{who}"] = mine["cycles"] / found[direction]["cycles"]
        if direction == "backward" and "dkv+dq" in found:
            row["splash_dkv_dq"] = found["dkv+dq"]
    return row


def fused_rows(compiler: Compiler, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each chip, head dim, mask and pass: the fused ring's kernel beside ours for one chunk."""
    rows = []
    for chip, head_dim, mask in itertools.product(options.chips, options.head_dims, options.masks):
        job = {"chip": chip, "head_dim": head_dim, "causal": mask == "causal"}
        fused = compiler.run(who="fused", **job, **FUSED)
        for direction in DIRECTIONS.values():
            plain = compiler.run(who="ours", direction=direction, **job)
            if fused is not None and plain is not None:
                rows.append({"head_dim": head_dim, "mask": mask, **fused_row(plain, fused, direction), "chip": chip})
                print(fused_line(rows[-1]), flush=True)
    return rows


def fused_row(plain: dict[str, Any], fused: dict[str, Any], direction: str) -> dict[str, Any]:
    """Raises RuntimeError where the tilings differ: then there is nothing to compare."""
    if plain["tiling"] != fused["tilings"][direction]:
        raise RuntimeError(f"tilings differ: {plain['tiling']} for one chunk, {fused['tilings'][direction]} in the fused ring")
    (alone,), copies = plain["schedules"][direction]["passes"], fused["schedules"][direction]["passes"]
    hot, hots = alone["branches"][0], [copy["branches"][0] for copy in copies]
    results = [one for one in fused["schedules"][direction]["operands"] if one["kind"] == "output"]
    return {
        "direction": direction,
        "tiling": plain["tiling"],
        "bundles": hot["bundles"],
        "fused_bundles": [one["bundles"] for one in hots],
        "ratio": max(one["bundles"] for one in hots) / hot["bundles"],
        "cycles_ratio": max(one["cycles"] for one in hots) / hot["cycles"],
        "spills": [hot["spills"], max(one["spills"] for one in hots)],
        "step_overhead": [one["most_step_overhead"] for one in (alone, copies[-1])],
        "hop_overhead": copies[-1]["hop_overhead"],
        "scoped_vmem": [plain["scoped_vmem"], fused["scoped_vmem"][direction]],
        "buffers": sum(one["bytes"] for one in results[RESULTS:]),
        "memory": fused["memory"],
    }


FUSED_HEADER = (
    f"{'chip':4s} {'H':>3s} {'pass':8s} {'mask':6s} | {'bundles':>7s} {'fused':>7s} {'ratio':>6s} {'cycles':>6s} {'spills':>11s} "
    f"| {'step':>4s} {'fused':>5s} {'a hop':>5s} | {'VMEM MiB':>9s} {'fused':>6s} {'HBM buffers MiB':>15s} "
    f"{'temporary MiB':>13s} | tiling"
)


def fused_line(row: dict[str, Any]) -> str:
    mib = [size / 2**20 for size in (*row["scoped_vmem"], row["buffers"], row["memory"]["temporary"])]
    return (
        f"{row['chip']:4s} {row['head_dim']:3d} {row['direction']:8s} {row['mask']:6s} | {row['bundles']:7d} "
        f"{max(row['fused_bundles']):7d} {row['ratio']:6.3f} {row['cycles_ratio']:6.3f} {'{} {}'.format(*row['spills']):>11s} | "
        f"{row['step_overhead'][0]:4d} {row['step_overhead'][1]:5d} {row['hop_overhead']:5d} | {mib[0]:9.1f} {mib[1]:6.1f} "
        f"{mib[2]:15.1f} {mib[3]:13.1f} | {','.join(map(str, row['tiling']))}"
    )


HEADER = (
    f"{'chip':4s} {'H':>3s} {'pass':8s} {'mask':6s} | {'ours':>6s} {'bundles':>7s} {'minimum':>7s} {'eff.':>4s} {'spills':>6s} "
    f"{'x half':>6s} {'carry':>5s} | {'splash':>6s} {'bundles':>7s} {'dkv+dq':>6s} {'ours/':>5s} | "
    f"{'tokamax':>7s} {'bundles':>7s} {'ours/':>5s} | tiling; blocks of splash; of tokamax"
)


def line_of(row: dict[str, Any]) -> str:
    def number(cost: dict[str, Any], name: str, width: int, form: str = ".0f") -> str:
        return f"{cost[name]:{width}{form}}" if name in cost else " " * (width - 1) + "-"

    mine, splash, tokamax = (row.get(who, {}) for who in ("ours", *PEERS))
    cells = [
        f"{row['chip']:4s} {row['head_dim']:3d} {row['direction']:8s} {row['mask']:6s} |",
        number(mine, "cycles", 6),
        number(mine, "bundles", 7),
        number(mine, "minimum", 7),
        number(mine, "efficiency", 4, ".0%"),
        number(mine, "spills", 6),
        number(mine, "over_half_of_full", 6, ".2f"),
        number({"c": mine["carry_percent"] / 100} if "carry_percent" in mine else {}, "c", 5, ".1%") + " |",
        number(splash, "cycles", 6),
        number(splash, "bundles", 7),
        number(row.get("splash_dkv_dq", {}), "cycles", 6),
        number(row, "over_splash", 5, ".2f") + " |",
        number(tokamax, "cycles", 7),
        number(tokamax, "bundles", 7),
        number(row, "over_tokamax", 5, ".2f") + " |",
        "; ".join(",".join(map(str, cost["at"])) if cost else "-" for cost in (mine, splash, tokamax)),
    ]
    return " ".join(cells)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Bars of cycles per full pair; a line across each group is what the products alone take at the peak rate."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 1, figsize=(10, 7), layout="constrained")
    shown = [row for row in rows if row["mask"] == "full"]
    for axis, direction in zip(axes, DIRECTIONS.values(), strict=True):
        groups = [row for row in shown if row["direction"] == direction]
        at = np.arange(len(groups))
        for i, (who, color) in enumerate(zip(("ours", *PEERS), ("#1f5fa8", "#c9c9c9", "#8a8a8a"), strict=True)):
            present = [j for j, row in enumerate(groups) if who in row]
            heights = [groups[j][who]["cycles"] for j in present]
            label = {"ours": "this library", "splash": "splash (JAX)", "tokamax": "tokamax"}[who]
            bars = axis.bar(at[present] + (i - 1) * 0.27, heights, 0.25, color=color, label=label)
            if who == "ours":
                axis.bar_label(bars, [f"{groups[j][who]['efficiency']:.0%}" for j in present], fontsize=8)
        peak = [useful_cycles(row["chip"], row["head_dim"], direction) for row in groups]
        axis.hlines(peak, at - 0.42, at + 0.42, color="#d1495b", label="products at peak rate")
        axis.set_xticks(at, [f"{row['chip']}\nH {row['head_dim']}" for row in groups])
        axis.set_ylabel("cycles per 512 x 1024 tokens")
        axis.set_title(f"{direction}, full attention")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def tiling_argument(text: str) -> str:
    name, _, numbers = text.partition(":")
    fields = numbers.split(",")
    if name not in DIRECTIONS or not 6 <= len(fields) <= 7 or not all(field.isdigit() for field in fields):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not fwd: or bwd: and block_q,block_kv,tile_q,tile_kv,ahead,lag[,side_by_side]"
        )
    return text


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", default=list(tpu_schedule.CHIPS), choices=list(tpu_schedule.CHIPS))
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--masks", nargs="+", default=["full", "causal"], choices=["full", "causal"])
    parser.add_argument("--quick", action="store_true", help="one choice of blocks for the others, not several")
    parser.add_argument("--ours-only", action="store_true")
    parser.add_argument(
        "--tiling",
        action="append",
        default=[],
        type=tiling_argument,
        help="fwd:block_q,block_kv,tile_q,tile_kv,ahead,lag,side_by_side, or bwd:...; may be repeated, a row for each",
    )
    parser.add_argument("--png", type=Path, default=Path("outputs/profile_tpu_static.png"), help="where to draw the picture")
    parser.add_argument("--fused", action="store_true", help="compare the fused ring's kernels with those for one chunk")
    options = parser.parse_args(arguments)
    print(FUSED_HEADER if options.fused else HEADER, flush=True)
    compiler = Compiler()
    rows = (fused_rows if options.fused else measure)(compiler, options)
    for failure in compiler.failed:
        print("not measured:", json.dumps(failure))
    if not options.fused and any(row["mask"] == "full" for row in rows):
        draw(rows, options.png)
        print(f"picture: {options.png}")
    print(json.dumps({"script": "profile_tpu_static", "pair": [512, 1024], "results": rows, "failed": compiler.failed}))


if __name__ == "__main__":
    main()
