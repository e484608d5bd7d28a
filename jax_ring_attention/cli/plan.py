"""`plan`: what a ring costs before it is run: memory, bytes, time and the best layout and schedule, by formula."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jax_ring_attention.cli import cost
from jax_ring_attention.cli.console import (
    UsageError,
    bytes_text,
    number_text,
    png_path,
    positive_float,
    positive_int,
    require_matplotlib,
    seconds_text,
    table,
    token_count,
)
from jax_ring_attention.cli.hardware import HARDWARE, Hardware
from jax_ring_attention.layouts import LAYOUTS
from jax_ring_attention.schedule import PORTABLE_SCHEDULES

DESCRIPTION = """\
Predict memory, traffic and time of ring attention from formulas and data sheets; nothing is run. Memory and bytes are what
compiled programs need and send (the test suite compares them); times are as good as --efficiency and the link's rate."""

#: Share of the peak that the attention kernel attains: what docs/performance.md has for one H200, 586 and 547 of 989 TFLOP/s.
EFFICIENCY = 0.57

DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
LARGEST_RING = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--seq-len", type=token_count, required=True, metavar="T", help="tokens of the whole sequence: 4096, 128k, 1M")
    add("--devices", type=positive_int, required=True, metavar="P", help="devices in the ring")
    add("--hardware", choices=HARDWARE, required=True, help="whose data sheet to use; a device is what JAX calls one")
    add("--heads", type=positive_int, default=32, metavar="N", help="query heads on one device (default 32)")
    add("--kv-heads", type=positive_int, metavar="K", help="key/value heads on one device (default: as many as --heads)")
    add("--head-dim", type=positive_int, default=128, metavar="H", help="of query and key (default 128)")
    add("--value-dim", type=positive_int, metavar="HV", help="of value (default: --head-dim)")
    add("--dtype", choices=DTYPES, default="bf16", help="of query, key and value (default bf16)")
    add("--causal", action="store_true", help="a causal mask; without it every query sees every key")
    add("--batch", type=positive_int, default=1, metavar="B", help="sequences per ring (default 1)")
    add("--layers", type=positive_int, default=1, help="layers whose residuals are held and whose times add up (default 1)")
    add("--hidden", type=positive_int, help="width of the model: counts one input per layer, kept for the backward pass")
    add("--block-size", type=positive_int, default=128, help="tokens of a kernel's block, for causal work (default 128)")
    add("--peak-tflops", type=positive_float, help="instead of the data sheet's figure")
    add("--link-gbs", type=positive_float, help="GB/s that one device sends its neighbour, instead of the data sheet's figure")
    add("--memory-gib", type=positive_float, help="memory of one device, instead of the data sheet's figure")
    add("--efficiency", type=positive_float, default=EFFICIENCY, help=f"share of the peak that a kernel attains ({EFFICIENCY})")
    add("--formulas", action="store_true", help="print the formulas too")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    add("--png", type=png_path, metavar="PATH", help="draw the roofline; needs matplotlib")


def run(options: argparse.Namespace) -> int:
    if options.png is not None:
        require_matplotlib()
    work, hardware = _workload(options), HARDWARE[options.hardware]
    rates = _rates(options, hardware)
    plan = make_plan(work, rates, hardware, options)
    if options.png is not None:
        draw(options.png, work, rates, plan)
    if options.json:
        print(json.dumps(plan))
    else:
        print(text(plan))
        if options.formulas:
            print(f"\n{cost.FORMULAS}")
        if options.png is not None:
            print(f"\nroofline: {options.png}")
    return 0


def _workload(options: argparse.Namespace) -> cost.Workload:
    kv_heads = options.heads if options.kv_heads is None else options.kv_heads
    if options.heads % kv_heads:
        raise UsageError(f"--heads {options.heads} is no multiple of --kv-heads {kv_heads}; every key head serves as many.")
    if options.devices > LARGEST_RING:
        raise UsageError(f"--devices {options.devices}: a plan looks at every pair of devices, for at most {LARGEST_RING}.")
    if options.devices > options.seq_len:
        raise UsageError(f"--devices {options.devices} cannot share --seq-len {options.seq_len} tokens; use fewer devices.")
    return cost.Workload(
        seq_len=options.seq_len,
        devices=options.devices,
        heads=options.heads,
        kv_heads=kv_heads,
        head_dim=options.head_dim,
        value_dim=options.head_dim if options.value_dim is None else options.value_dim,
        dtype=jnp.dtype(DTYPES[options.dtype]),
        batch=options.batch,
        is_causal=options.causal,
        block_size=options.block_size,
    )


def _rates(options: argparse.Namespace, hardware: Hardware) -> cost.Rates:
    if options.efficiency > 1:
        raise UsageError(f"--efficiency {options.efficiency} is a share of the peak, above 0 and at most 1.")
    if options.peak_tflops is None and options.dtype == "f32":
        raise UsageError("the data sheets' figures are for bf16 and f16; give the float32 rate: --peak-tflops.")
    peak = hardware.peak_tflops if options.peak_tflops is None else options.peak_tflops
    link = hardware.ring_link_gbs(options.devices) if options.link_gbs is None else options.link_gbs
    return cost.Rates(peak * 1e12 * options.efficiency, link * 1e9, hardware.is_torus)


def make_plan(work: cost.Workload, rates: cost.Rates, hardware: Hardware, options: argparse.Namespace) -> dict[str, Any]:
    """Everything that is printed, in plain types: bytes, FLOPs, seconds."""
    estimates = [cost.estimate(work, rates, layout, schedule) for layout in LAYOUTS for schedule in PORTABLE_SCHEDULES]
    # Of what is equally fast, the first: contiguous before zigzag before striped, ring before the others.
    best = min(estimates, key=lambda one: round(one.total / estimates[0].total, 6))
    activations = cost.activation_bytes(work, best.layout)
    residuals = {"out": activations["out"], "lse": activations["lse"]}
    buffers = {
        "forward": cost.forward_buffers(work, best.schedule, best.layout),
        "backward": cost.backward_buffers(work, best.schedule, best.layout),
    }
    buffers["backward"]["d_out, d_query, d_key, d_value"] = sum(activations.values()) - activations["lse"]
    kept = {"query, key and value": activations["query"] + activations["key and value"], "out and lse": sum(residuals.values())}
    if options.hidden is not None:
        kept["layer input"] = work.batch * work.tokens(best.layout) * options.hidden * work.itemsize
    peak = options.layers * sum(kept.values()) + max(sum(part.values()) for part in buffers.values())
    memory_gib = hardware.memory_gib if options.memory_gib is None else options.memory_gib
    in_domain = work.devices <= hardware.domain
    link = "the command line" if options.link_gbs is not None else "neighbours" if in_domain else "the network between domains"
    return {
        "workload": work._replace(dtype=jnp.dtype(work.dtype).name)._asdict() | {"layers": options.layers},
        "tokens_per_device": work.tokens(best.layout),
        "hardware": {
            "name": options.hardware,
            "peak_tflops": rates.flops / options.efficiency / 1e12,
            "efficiency": options.efficiency,
            "link_gbs": rates.link / 1e9,
            "link_of": link,
            "both_directions_double": rates.is_torus,
            "memory_gib": memory_gib,
            "source": hardware.source,
        },
        "best": {"layout": best.layout, "schedule": best.schedule},
        "memory": {
            "activations": activations,
            "residuals": residuals,
            "buffers": buffers,
            "kept_per_layer": kept,
            "peak": peak,
            "fits": peak <= memory_gib * 2**30,
        },
        "hops": hop_costs(work, rates, best.layout),
        "sent_bytes": {schedule: cost.sent_bytes(work, schedule, best.layout) for schedule in PORTABLE_SCHEDULES},
        "estimates": [_estimate(work, rates, one, options.layers) for one in estimates],
    }


def hop_costs(work: cost.Workload, rates: cost.Rates, layout: str) -> dict[str, dict[str, float]]:
    """What a hop of the `ring` schedule computes and sends, for the hop that has the least compute to hide behind."""
    tokens = work.tokens(layout)
    pairs = float(cost.hop_pairs(work, layout, "ring")[1:].max(1).min()) if work.devices > 1 else tokens**2
    found = {}
    per_token = (work.chunk_token, work.chunk_token + work.d_chunk_token)
    for i, (name, flops) in enumerate((("forward", work.forward_flops), ("backward", work.backward_flops))):
        sent = tokens * per_token[i]
        compute, transfer = pairs * flops / rates.flops, sent / rates.link
        threshold = cost.hidden_from(work, rates, layout, "ring")
        found[name] = {
            "flops": pairs * flops,
            "bytes": sent,
            "compute_seconds": compute,
            "transfer_seconds": transfer,
            "compute_over_transfer": compute / transfer,
            "flops_per_byte": pairs * flops / sent,
            "hidden_from_tokens_per_device": threshold[i] if threshold else 0,
        }
    return found


def _estimate(work: cost.Workload, rates: cost.Rates, one: cost.Estimate, layers: int) -> dict[str, Any]:
    flops = work.visible_pairs * (work.forward_flops + work.backward_flops) / work.devices
    hidden = cost.hidden_from(work, rates, one.layout, one.schedule)
    return {
        "layout": one.layout,
        "schedule": one.schedule,
        "busiest_over_mean": one.busiest,
        "in_step_over_mean": one.in_step,
        "forward_seconds": layers * one.forward.total,
        "backward_seconds": layers * one.backward.total,
        "seconds": layers * one.total,
        "exposed_seconds": layers * (one.forward.exposed + one.backward.exposed),
        "efficiency": one.efficiency,
        "tflops_per_device": flops / one.total / 1e12,
        "hidden_from_tokens_per_device": hidden,
    }


def text(plan: dict[str, Any]) -> str:
    """The plan as tables."""
    work, hardware, memory, best = (plan[name] for name in ("workload", "hardware", "memory", "best"))
    mask = "causal" if work["is_causal"] else "no mask"
    both = "a link each way to each neighbour" if hardware["both_directions_double"] else "one port, shared by both directions"
    lines = [
        f"ring attention over {work['seq_len']:,} tokens on {work['devices']} x {hardware['name']}: "
        f"{plan['tokens_per_device']:,} tokens per device, batch {work['batch']}, {work['heads']}/{work['kv_heads']} heads, "
        f"head dim {work['head_dim']}/{work['value_dim']}, {work['dtype']}, {mask}, {work['layers']} layer(s)",
        f"peak {hardware['peak_tflops']:g} TFLOP/s x efficiency {hardware['efficiency']:g} (assumed; --efficiency), "
        f"{hardware['memory_gib']:g} GiB",
        f"link {hardware['link_gbs']:g} GB/s (of {hardware['link_of']}; {both})",
        f"source: {hardware['source']}",
        "",
        f"memory of one device, {best['layout']}, {best['schedule']}",
    ]
    rows: list[tuple[str, ...]]
    rows = [(f"  {name}, one layer", bytes_text(size)) for name, size in memory["activations"].items()]
    rows.append(("  residuals (out, lse), one layer", bytes_text(sum(memory["residuals"].values()))))
    for direction, buffers in memory["buffers"].items():
        rows += [(f"  {direction}: {name}", bytes_text(size)) for name, size in buffers.items()]
    kept = " + ".join(memory["kept_per_layer"])
    verdict = "fits" if memory["fits"] else "DOES NOT FIT"
    rows.append((f"  peak: {work['layers']} x ({kept}) + the larger buffers", f"{bytes_text(memory['peak'])}, {verdict}"))
    lines += [table(("", ""), rows).lstrip("\n"), "", f"one hop of the ring, {best['layout']}"]
    rows = [
        (
            f"  {name}",
            number_text(hop["flops"]) + "FLOP",
            bytes_text(hop["bytes"]),
            seconds_text(hop["compute_seconds"]),
            seconds_text(hop["transfer_seconds"]),
            f"{hop['compute_over_transfer']:.2f}",
            f"{hop['hidden_from_tokens_per_device']:,}",
        )
        for name, hop in plan["hops"].items()
    ]
    lines += [table(("", "compute", "sent", "compute time", "transfer time", "ratio", "hidden from T/P ="), rows), ""]
    lines.append(f"time of {work['layers']} layer(s), attention alone")
    rows = []
    for one in plan["estimates"]:
        marked = {"layout": one["layout"], "schedule": one["schedule"]} == best
        hidden = one["hidden_from_tokens_per_device"]
        rows.append(
            (
                f"{'*' if marked else ' '} {one['layout']}",
                one["schedule"],
                f"{one['busiest_over_mean']:.2f}",
                f"{one['in_step_over_mean']:.2f}",
                seconds_text(one["forward_seconds"]),
                seconds_text(one["backward_seconds"]),
                seconds_text(one["exposed_seconds"]),
                f"{one['efficiency']:.1%}",
                f"{one['tflops_per_device']:.0f}",
                "-" if hidden is None else f"{max(hidden):,}",
            )
        )
    header = (
        "  layout",
        "schedule",
        "busiest",
        "in step",
        "forward",
        "backward",
        "waiting",
        "efficiency",
        "TFLOP/s",
        "T/P hides",
    )
    lines += [table(header, rows, left=2), "* the fastest of these. busiest: load of the busiest device over the mean; in step:"]
    lines.append("the same when every hop waits for its busiest device. efficiency: of the kernel's own speed. See --formulas.")
    return "\n".join(lines)


def draw(path: Path, work: cost.Workload, rates: cost.Rates, plan: dict[str, Any]) -> None:
    """The roofline of a hop."""
    from jax_ring_attention.cli import pictures

    intensities = {name: hop["flops_per_byte"] for name, hop in plan["hops"].items()}
    tokens = work.tokens(plan["best"]["layout"])
    pictures.save_roofline(path, rates.flops, rates.link, intensities, tokens, plan["hardware"]["name"])
