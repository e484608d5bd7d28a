"""`explain`: who holds which chunk at each hop, which block pairs are computed, and by whom, as text and as a picture."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from jax_ring_attention.arguments import attention_reach
from jax_ring_attention.cli.blocks import block_kinds, blocks_per_device, device_loads, first_hop, held_chunks, hop_loads
from jax_ring_attention.cli.console import (
    UsageError,
    png_path,
    positive_int,
    require_matplotlib,
    table,
    token_count,
    whole_number,
)
from jax_ring_attention.layouts import LAYOUTS, shard_multiple, storage_order
from jax_ring_attention.masks import EMPTY, FULL, PARTIAL
from jax_ring_attention.schedule import PORTABLE_SCHEDULES, Leg, Reach, needed_offsets, plan_hops

DESCRIPTION = """\
Show, from the library's own schedule, layouts and masks: which device stores which tokens, who holds which chunk at each hop,
which pairs of blocks are full, partial or empty, and how the work is shared. Nothing is computed on them."""

SIGNS = {FULL: "#", PARTIAL: "/", EMPTY: "."}
MOST_BLOCKS = 96  # that fit side by side in a terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--devices", type=positive_int, default=8, metavar="P", help="devices in the ring (default 8)")
    add("--seq-len", type=token_count, default=8192, metavar="T", help="tokens of the whole sequence (default 8192)")
    add("--layout", choices=LAYOUTS, default="contiguous", help="order in which tokens are stored (default contiguous)")
    add("--schedule", choices=PORTABLE_SCHEDULES, default="ring", help="how chunks move (default ring)")
    add("--causal", action="store_true", help="a causal mask")
    add(
        "--window",
        type=_side,
        nargs="+",
        metavar="W",
        help="a sliding window: LEFT RIGHT, or one number for both, inclusive; none on a side is unbounded",
    )
    add("--block-size", type=positive_int, help="tokens per block; divides the tokens of a device (default: 4 blocks a device)")
    add("--png", type=png_path, metavar="PATH", help="draw a picture too; needs matplotlib")


def _side(text: str) -> int | None:
    return None if text == "none" else whole_number(text)


def run(options: argparse.Namespace) -> int:
    if options.png is not None:
        require_matplotlib()
    reach = _reach(options)
    size, length = options.devices, options.seq_len
    tokens, block = _tokens_and_block(options)
    per_device = tokens // block
    legs: tuple[Leg, ...] | None = None
    if options.schedule != "all_gather":
        legs = plan_hops(options.schedule, size, tokens, needed_offsets(options.layout, size, tokens, tokens, reach))
    order = storage_order(options.layout, size, length)
    document = np.zeros(length, np.int32)
    kinds = block_kinds(document, size * per_device, order, reach)
    layouts = [options.layout, *(layout for layout in LAYOUTS if layout != options.layout)]
    layouts = [layout for layout in layouts if length % shard_multiple(layout, size) == 0]
    loads = {layout: device_loads(document, size, per_device, layout, reach) for layout in layouts}

    left, right = ("unbounded" if side is None else side for side in reach)
    print(
        f"{length:,} tokens on {size} devices, {tokens:,} each in {per_device} blocks of {block}; {options.layout}, "
        f"{options.schedule}; a query sees {left} tokens to its left and {right} to its right"
    )
    for part in (
        storage_text(order, size),
        hops_text(legs, size),
        blocks_text(kinds, size),
        loads_text(loads, None if legs is None else [hop_loads(order, size, leg, per_device, block, reach) for leg in legs]),
    ):
        print(f"\n{part}")
    if options.png is not None:
        from jax_ring_attention.cli import pictures

        pictures.save_explanation(options.png, size, legs, kinds, length, loads)
        print(f"\npicture: {options.png}")
    return 0


def _reach(options: argparse.Namespace) -> Reach:
    window = options.window
    if window is not None and len(window) > 2:
        raise UsageError(f"--window {' '.join(map(str, window))} has {len(window)} numbers; give LEFT RIGHT, or one for both.")
    if window is not None:
        window = tuple(window) * (3 - len(window))
    return attention_reach(options.causal, window)


def _tokens_and_block(options: argparse.Namespace) -> tuple[int, int]:
    """Tokens per device and per block, checked."""
    multiple = shard_multiple(options.layout, options.devices)
    if options.seq_len % multiple:
        needs = f"{options.layout} on {options.devices} devices needs"
        raise UsageError(f"--seq-len {options.seq_len} is no multiple of {multiple}, as {needs}.")
    tokens = options.seq_len // options.devices
    most = max(1, MOST_BLOCKS // options.devices)
    block = options.block_size
    if block is None:
        block = tokens // blocks_per_device(options.seq_len, options.devices, at_most=min(4, most))
    if tokens % block:
        raise UsageError(f"--block-size {block} does not divide the {tokens} tokens of a device.")
    if tokens // block * options.devices > max(MOST_BLOCKS, options.devices):
        raise UsageError(
            f"--block-size {block} makes {tokens // block * options.devices} blocks a side and at most {MOST_BLOCKS} are drawn: "
            f"use at least {-(-tokens // most)}."
        )
    return tokens, block


def storage_text(order: np.ndarray, ring_size: int) -> str:
    """The natural positions that each device stores, as runs."""
    lines = ["tokens that each device stores"]
    for rank, positions in enumerate(order.reshape(ring_size, -1)):
        lines.append(f"  device {rank}: {_runs(positions)}")
    return "\n".join(lines)


def _runs(positions: np.ndarray) -> str:
    """For example 0..3, 12..15, or 1, 5, .. 61 for a stride."""
    steps = np.diff(positions)
    if len(positions) > 2 and (steps == steps[0]).all() and steps[0] != 1:
        return f"{positions[0]}, {positions[1]}, .. {positions[-1]}"
    runs = np.split(positions, np.flatnonzero(steps != 1) + 1)
    return ", ".join(f"{run[0]}..{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def hops_text(legs: Sequence[Leg] | None, ring_size: int) -> str:
    """Whose chunk each device holds, hop by hop."""
    if legs is None:
        return f"all_gather: every device gets the chunks of all {ring_size} ranks at once, and computes then"
    parts = []
    for leg in legs:
        for stream in leg.streams:
            held = held_chunks(leg, stream, ring_size)
            what = "chunk" if len(leg.streams) == 1 else f"tokens {stream.start}..{stream.start + stream.size - 1} of the chunk"
            title = f"rank whose {what} a device holds, moving by {stream.direction:+d}"
            header = ["  hop", *(str(hop + first_hop(leg)) for hop in range(held.shape[1]))]
            parts.append(f"{title}\n{table(header, [[f'  device {r}', *map(str, row)] for r, row in enumerate(held)])}")
    return "\n\n".join(parts)


def blocks_text(kinds: np.ndarray, ring_size: int) -> str:
    """The square of block pairs: rows are queries, columns are keys, both in stored order."""
    per_device = len(kinds) // ring_size
    names = {FULL: "full", PARTIAL: "partial", EMPTY: "empty"}
    shares = ", ".join(f"{SIGNS[kind]} {name} {(kinds == kind).mean():.0%}" for kind, name in names.items())
    lines = [f"pairs of blocks (rows: queries, columns: keys by rank): {shares}"]
    width = len(f"device {ring_size - 1}")
    for i, row in enumerate(kinds):
        label = f"device {i // per_device}" if i % per_device == 0 else ""
        signs = "".join(SIGNS[int(kind)] for kind in row)
        chunks = [signs[start : start + per_device] for start in range(0, len(signs), per_device)]
        lines.append(f"  {label.ljust(width)}  {' '.join(chunks)}")
    return "\n".join(lines)


def loads_text(loads: dict[str, np.ndarray], by_leg: Sequence[np.ndarray] | None) -> str:
    """Block pairs per device of the first layout, over all hops and per hop, and how it compares."""
    layout, load = next(iter(loads.items()))
    lines = ["block pairs that each device computes"]
    for rank, count in enumerate(load):
        lines.append(f"  device {rank}: {count:5d} {'=' * round(40 * count / load.max())}")
    for name, other in loads.items():
        lines.append(f"  {name}: busiest device over mean {other.max() / other.mean():.2f}")
    if by_leg is not None:
        busiest = [int(n) for hops in by_leg for n in hops.max(0)]
        mean = sum(float(hops.sum()) for hops in by_leg) / len(load)
        per_hop = f"{' '.join(map(str, busiest))}; sum over mean {sum(busiest) / mean:.2f}"
        lines.append(f"  {layout}, busiest device of each hop: {per_hop}")
    return "\n".join(lines)
