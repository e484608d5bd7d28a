"""Predict a ring step hop by hop from the compiler's static schedule and a link model; needs no TPU.

Claim under test: what share of the chips' peak each schedule of the ring keeps, from which T/P on transfers are hidden, and for
which T/P one kernel for all hops takes less time than a kernel per hop.

    cycles    of every kind of block pair, of a grid step, of a hop: from kernels compiled for the chip (`ring_costs.py`)
    clock     the data sheet's peak over what the matrix units do in a cycle
    links     bytes over the data sheet's rate of a link in one direction, one transfer at a time (`ring_model.py`), --latency-us
    memory    over the data sheet's bandwidth: what no step hides (`ring_costs.unhidden`), and the pass that adds gradients; other
              transfers of a step are taken to hide behind it

What no schedule says is an argument: --boundary-us, all that lies between two kernels of a program, several values; --latency-us
of a hop; --dma-us before the first byte of a copy from memory. Blocks smaller than those compiled are charged by their tiles.

    contiguous, zigzag    schedule="ring" in these layouts
    bidirectional         half chunks both ways, zigzag, a kernel for each half
    fused                 schedule="fused", zigzag
    fused_bidirectional   half chunks both ways in one kernel, zigzag, two buffers each: a forecast

Prints tables and one JSON object as the last line; --output draws the timelines.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import profile_tpu_static
import ring_costs
import ring_model
from ring_costs import PASSES, Attention

from jax_ring_attention.cli import cost
from jax_ring_attention.cli.console import png_path, positive_int, table, token_count
from jax_ring_attention.cli.hardware import HARDWARE
from jax_ring_attention.schedule import plan_hops

#: name -> (how it runs, what moves, layout of a causal ring)
SCHEDULES = {
    "contiguous": ("scanned", "ring", "contiguous"),
    "zigzag": ("scanned", "ring", "zigzag"),
    "bidirectional": ("scanned", "bidirectional", "zigzag"),
    "fused": ("fused", "ring", "zigzag"),
    "fused_bidirectional": ("fused", "bidirectional", "zigzag"),
}
#: Memory bandwidth of a chip, 1e9 bytes/s.
HBM_GBS = {"v5e": 819, "v5p": 2765, "v6e": 1640}
SOURCES = {
    "memory": "Google Cloud, docs.cloud.google.com/tpu/docs/: pages v5e, v5p, v6e, HBM bandwidth per chip",
    "latency": "'How to Scale Your Model', chapter on sharded matrices: about 1 us per hop",
    "boundary": "assumed, hence several values: no public figure, and no schedule has it",
    "dma": "assumed: no public figure, and no schedule has it",
}
#: Tokens per device at which crossovers are looked for: powers of two and what lies half way.
SWEEP = sorted([512 << k for k in range(9)] + [768 << k for k in range(8)])
#: Transfers count as hidden when they cost no more than this share of the step.
HIDDEN = 0.01


class Parameters(NamedTuple):
    """What no schedule says: seconds, and bytes/s."""

    boundary: float
    latency: float
    dma: float
    memory: float


def work_of(attention: Attention, devices: int, tokens: int) -> cost.Workload:
    _, heads, kv_heads, dim, causal = attention
    return cost.Workload(devices * tokens, devices, heads, kv_heads, dim, dim, is_causal=causal)


def streams_of(
    attention: Attention, measured: Mapping[str, Any], name: str, direction: str, devices: int, tokens: int, given: Parameters
) -> tuple[list[ring_model.Stream], float]:
    """What `ring_model` wants, and the seconds of a hop's own bundles."""
    how, moves, layout = SCHEDULES[name]
    fused = how == "fused"
    kernel = measured["fused" if fused else "plain"][direction]
    work, link = work_of(attention, devices, tokens), HARDWARE[attention.chip].ring_link_gbs(devices) * 1e9
    (leg,) = plan_hops(moves, devices, tokens)
    hops, ranks = np.arange(devices)[:, None], np.arange(devices)[None]
    streams = []
    for stream in leg.streams:
        order = np.sign(stream.source(ranks, hops, devices) - ranks)
        compute, adds, gradient = np.zeros(order.shape), np.zeros(order.shape), stream.size * work.d_chunk_token
        for which in (-1, 0, 1):
            part = stream.start, stream.size
            chunk = ring_costs.chunk_steps(
                attention, layout if attention.causal else "contiguous", direction, tokens, part, which
            )
            seconds = ring_costs.chunk_cycles(attention, kernel, direction, chunk, fused) / attention.clock
            if seconds:
                size, copies = ring_costs.unhidden(attention, direction, chunk.tiling, stream.size)
                seconds += copies * given.dma + size / given.memory
                adds[order == which] = 2 * given.dma + 3 * gradient / given.memory
            compute[order == which] = seconds
        behind = (gradient / link, adds) if direction == "backward" else (None, 0.0)
        streams.append(ring_model.Stream(stream.direction, compute, stream.size * work.chunk_token / link, *behind))
    return streams, len(streams) * kernel["hop_overhead"] / attention.clock


def simulate(
    attention: Attention,
    measured: Mapping[str, Any],
    name: str,
    direction: str,
    devices: int,
    tokens: int,
    given: Parameters,
    links: bool = True,
) -> ring_model.Timeline:
    """One pass; without `links`, transfers take no time."""
    streams, hop = streams_of(attention, measured, name, direction, devices, tokens, given)
    latency = given.latency if links else 0.0
    if not links:
        streams = [one._replace(chunk=0.0, gradient=None if one.gradient is None else 0.0) for one in streams]
    if SCHEDULES[name][0] == "scanned":  # a kernel for each stream
        return ring_model.scanned(streams, len(streams) * given.boundary, latency)
    return ring_model.fused(streams, given.boundary + given.latency, hop, latency)


def efficiency(attention: Attention, direction: str, devices: int, tokens: int, seconds: float) -> float:
    """FLOPs of visible pairs over what all chips could do in that time at their peak."""
    work = work_of(attention, devices, tokens)
    flops = work.visible_pairs * (work.forward_flops if direction == "forward" else work.backward_flops)
    return flops / (devices * HARDWARE[attention.chip].peak_tflops * 1e12 * seconds)


def names_of(attention: Attention) -> list[str]:
    """Without a mask the two layouts are the same."""
    return [name for name in SCHEDULES if attention.causal or name != "zigzag"]


def predict(
    attention: Attention, measured: Mapping[str, Any], devices: Sequence[int], tokens: int, cases: Sequence[Parameters]
) -> list[dict[str, Any]]:
    """A row for every ring, pass, schedule and case."""
    rows = []
    for count, direction, name, given in itertools.product(devices, PASSES, names_of(attention), cases):
        ask = functools.partial(simulate, attention, measured, name, direction, count, tokens, given)
        timeline = ask()
        rows.append(
            {
                "devices": count,
                "pass": direction,
                "schedule": name,
                "boundary_us": given.boundary * 1e6,
                "seconds": timeline.total,
                "efficiency": efficiency(attention, direction, count, tokens, timeline.total),
                "busy": float(timeline.busy.mean() / timeline.total),
                "exposed": ring_model.exposed(timeline, ask(links=False)),
            }
        )
    return rows


def crossovers(
    attention: Attention, measured: Mapping[str, Any], devices: Sequence[int], cases: Sequence[Parameters]
) -> list[dict[str, Any]]:
    """Over SWEEP: where transfers are hidden, and where fused takes less time than the same moves with a kernel per hop."""
    names, pairs = (
        names_of(attention),
        {"fused": "zigzag" if attention.causal else "contiguous", "fused_bidirectional": "bidirectional"},
    )
    rows = []
    for count, direction, given in itertools.product(devices, PASSES, cases):
        times, hidden = {}, {}
        for name in names:
            asked = [(attention, measured, name, direction, count, tokens, given) for tokens in SWEEP]
            timelines, bare = [simulate(*one) for one in asked], [simulate(*one, links=False) for one in asked]
            times[name] = np.array([timeline.total for timeline in timelines])
            hides = [ring_model.exposed(*both) <= HIDDEN for both in zip(timelines, bare, strict=True)]
            hidden[name] = ring_model.settled(SWEEP, hides)
        ratios = {name: times[name] / times[other] for name, other in pairs.items()}
        rows.append(
            {
                "devices": count,
                "pass": direction,
                "boundary_us": given.boundary * 1e6,
                "hidden_from": hidden,
                "fused_is_faster": {name: ring_model.intervals(SWEEP, ratio < 1) for name, ratio in ratios.items()},
                "fused_over_scanned": {name: ratio.tolist() for name, ratio in ratios.items()},
            }
        )
    return rows


# What is printed and drawn.


def predictions_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line for every ring, pass and schedule; efficiencies at each boundary, the rest at the middle one."""
    boundaries = sorted({row["boundary_us"] for row in rows})
    lines = []
    for _, group in itertools.groupby(rows, key=lambda row: (row["devices"], row["pass"], row["schedule"])):
        cases = {row["boundary_us"]: row for row in group}
        middle = cases[boundaries[len(boundaries) // 2]]
        numbers = [f"{middle['seconds'] * 1e3:.3f}", f"{middle['busy']:.1%}", f"{middle['exposed']:.1%}"]
        shares = [f"{cases[boundary]['efficiency']:.1%}" for boundary in boundaries]
        lines.append([middle["schedule"], str(middle["devices"]), middle["pass"], *numbers, *shares])
    header = ["schedule", "P", "pass", "ms", "computing", "exposed", *(f"of peak at {boundary:g} us" for boundary in boundaries)]
    return table(header, lines)


def crossovers_table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for row in rows:
        for name, first in row["hidden_from"].items():
            faster = row["fused_is_faster"].get(name)
            cells = ["nowhere" if first is None else str(first), "" if faster is None else _spans(faster)]
            lines.append([name, str(row["devices"]), row["pass"], f"{row['boundary_us']:g}", *cells])
    return table(["schedule", "P", "pass", "boundary us", "hidden from", "faster than a kernel per hop"], lines)


def _spans(found: Sequence[tuple[int, int | None]]) -> str:
    return ", ".join(f"{first}.." if last is None else f"{first}..{last}" for first, last in found) or "nowhere"


def draw(timelines: Mapping[tuple[str, int, str], tuple[ring_model.Timeline, float]], title: str, path: Path) -> None:
    """A lane per device: compute above, what it sends below. `timelines` by schedule, ring size and pass, with efficiencies."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    from jax_ring_attention.cli.pictures import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, save

    names, columns = list(dict.fromkeys(name for name, *_ in timelines)), list(dict.fromkeys(key[1:] for key in timelines))
    figure = Figure(figsize=(5.6 * len(columns), 2.6 * len(names) + 0.8), layout="constrained")
    grid = figure.subplots(len(names), len(columns), squeeze=False)
    sends = {("chunk", 1): ORANGE, ("chunk", -1): GREEN, ("gradient", 1): PURPLE, ("gradient", -1): INK}
    for (name, devices, direction), (timeline, share) in timelines.items():
        axes = grid[names.index(name), columns.index((devices, direction))]
        edge, top = (0.5, 0.06) if devices <= 16 else (0, 0.0)  # no gaps between lanes that are a few pixels high
        _bars(axes, np.zeros((1, devices)), np.full((1, devices), timeline.total), top, 1 - 2 * top, GREY)
        _bars(axes, timeline.begin, timeline.computed, top, 0.58 - top, BLUE, edge)
        for (what, way), color in sends.items():
            some = [one for one in timeline.transfers if (one.what, one.direction) == (what, way)]
            if some:
                spans = np.stack([one.begin for one in some]), np.stack([one.end for one in some])
                _bars(axes, *spans, 0.6 if way == 1 else 0.78, 0.16, color, edge)
        axes.set(xlim=(0, timeline.total * 1e3), ylim=(devices, 0), yticks=[0.5, devices - 0.5], yticklabels=[0, devices - 1])
        axes.set_title(f"{name}, P = {devices}, {direction}: {timeline.total * 1e3:.2f} ms, {share:.0%} of peak", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel("device")
    for axes in grid[-1]:
        axes.set_xlabel("ms")
    labels = {"compute": BLUE, "waiting": GREY, "key and value sent by +1": ORANGE, "by -1": GREEN, "gradients by +1": PURPLE}
    handles = [Patch(color=color, label=label) for label, color in (labels | {"gradients by -1": INK}).items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.suptitle(title)
    save(figure, path)


def _bars(axes: Any, begin: np.ndarray, end: np.ndarray, top: float, height: float, color: str, edge: float = 0) -> None:
    """From `begin` to `end` [any, rank] seconds, `top` below the upper end of the device's lane."""
    from matplotlib.collections import PolyCollection

    above = np.broadcast_to(np.arange(begin.shape[1]) + top, begin.shape)
    corners = [(begin, above), (end, above), (end, above + height), (begin, above + height)]
    shapes = np.stack([np.stack([x.ravel() * 1e3 if i == 0 else x.ravel() for i, x in enumerate(c)], -1) for c in corners], 1)
    axes.add_collection(PolyCollection(shapes, facecolor=color, edgecolor="white", linewidth=edge))


def microseconds(text: str) -> float:
    """At least 0, in seconds, for argparse."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of microseconds of at least 0")
    return number * 1e-6


def costs_of(attention: Attention, path: Path | None) -> dict[str, Any]:
    """Read from `path` if it exists; measured, and written there if a path is given, if not.

    Raises:
      ValueError: the file is about another chip, head dim or mask.
    """
    about = {"chip": attention.chip, "head_dim": attention.head_dim, "causal": attention.causal}
    if path is not None and path.exists():
        found = json.loads(path.read_text())
        if found["about"] != about:
            raise ValueError(f"{path} is about {found['about']}, not {about}; name another file, or remove this one.")
        return found["costs"]
    measured = ring_costs.measure(profile_tpu_static.Compiler(), attention)
    if path is not None:
        path.write_text(json.dumps({"about": about, "costs": measured}))
    return measured


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", default="v5e", choices=list(HBM_GBS))
    parser.add_argument("--heads", type=positive_int, default=32, help="query heads of one device")
    parser.add_argument("--kv-heads", type=positive_int, default=8)
    parser.add_argument("--head-dim", type=positive_int, default=128)
    mask = parser.add_mutually_exclusive_group()
    mask.add_argument("--causal", action="store_true", default=True, help="the default")
    mask.add_argument("--full", dest="causal", action="store_false")
    parser.add_argument("--tokens", type=token_count, default=4096, help="T/P of the predictions and the picture")
    parser.add_argument("--devices", type=positive_int, nargs="+", default=[8, 64])
    parser.add_argument("--boundary-us", type=microseconds, nargs="+", default=[2e-6, 5e-6, 10e-6], metavar="US")
    parser.add_argument("--latency-us", type=microseconds, default=1e-6, metavar="US", help="of a transfer between neighbours")
    parser.add_argument("--dma-us", type=microseconds, default=1e-6, metavar="US", help="of a copy from or to memory")
    parser.add_argument("--costs", type=Path, help="JSON of what kernels cost: read if it exists, else measured and written")
    parser.add_argument("--output", type=png_path, help="draw the timelines")
    options = parser.parse_args(arguments)
    if options.heads % options.kv_heads:
        parser.error(f"--heads {options.heads} must be a multiple of --kv-heads {options.kv_heads}")
    if min(options.devices) < 2 or options.tokens % 512:
        parser.error("--devices must be at least 2 and --tokens a multiple of 512")
    attention = Attention(options.chip, options.heads, options.kv_heads, options.head_dim, options.causal)
    hardware, memory = HARDWARE[attention.chip], HBM_GBS[attention.chip]
    measured = costs_of(attention, options.costs)
    cases = [Parameters(x, options.latency_us, options.dma_us, memory * 1e9) for x in sorted(options.boundary_us)]
    figures = f"{hardware.peak_tflops:g} TFLOP/s, {hardware.link_gbs:g} GB/s a link and direction, memory {memory} GB/s"
    print(f"{attention.chip}: {figures}, {attention.clock / 1e9:.3f} GHz")
    print(f"  peak and links: {hardware.source}")
    print(*(f"  {what}: {source}" for what, source in SOURCES.items()), sep="\n")
    rows = predict(attention, measured, options.devices, options.tokens, cases)
    print(f"\nT/P = {options.tokens}\n{predictions_table(rows)}")
    found = crossovers(attention, measured, options.devices, cases)
    print(f"\nT/P of {SWEEP[0]} to {SWEEP[-1]}; hidden: transfers cost at most {HIDDEN:.0%} of the step, the way home aside")
    print(crossovers_table(found))
    if options.output is not None:
        middle = cases[len(cases) // 2]
        timelines = {}
        for name, count, direction in itertools.product(names_of(attention), options.devices, PASSES):
            one = simulate(attention, measured, name, direction, count, options.tokens, middle)
            timelines[name, count, direction] = one, efficiency(attention, direction, count, options.tokens, one.total)
        heads = f"{options.heads} heads on {options.kv_heads} of {options.head_dim}"
        about = f"{attention.chip}, {'causal' if attention.causal else 'full'}, T/P = {options.tokens}, {heads}"
        draw(timelines, f"{about}, {middle.boundary * 1e6:g} us between kernels: a prediction", options.output)
    printed = {
        "script": "profile_ring_steps",
        "attention": attention._asdict(),
        "tokens": options.tokens,
        "parameters": {"latency_us": options.latency_us * 1e6, "dma_us": options.dma_us * 1e6, "memory_gbs": memory},
        "link_gbs": hardware.link_gbs,
        "peak_tflops": hardware.peak_tflops,
        "clock_ghz": attention.clock / 1e9,
        "sources": {"peak and links": hardware.source, **SOURCES},
        "costs": measured,
        "predictions": rows,
        "sweep": SWEEP,
        "crossovers": found,
    }
    print(json.dumps(printed))


if __name__ == "__main__":
    main()
