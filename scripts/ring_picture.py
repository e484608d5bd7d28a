"""Draw how ring attention works: who holds which chunk at each hop, which blocks a mask leaves to do, and who does them.

    python scripts/ring_picture.py --documents 1366 405 1141 258 4619 --seq-len 8192 --devices 8

Everything drawn comes from the library's own schedule, layouts and masks, so that the picture cannot drift from the code.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import matplotlib
import matplotlib.patches
import numpy as np
from matplotlib.figure import Figure

from jax_ring_attention.layouts import storage_order
from jax_ring_attention.masks import EMPTY, FULL, PARTIAL, Tokens, block_bounds, classify
from jax_ring_attention.schedule import plan_hops

CAUSAL = (None, 0)  # reach of a query: every key to its left, none to its right

# Okabe and Ito's colours, which stay apart for every kind of colour vision.
BLUE, ORANGE, GREEN, PURPLE, GREY, INK = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#E8E8E8", "#333333"
KIND_COLORS = {EMPTY: GREY, PARTIAL: ORANGE, FULL: BLUE}
KIND_NAMES = {FULL: "full: no mask", PARTIAL: "partial: mask", EMPTY: "empty: skipped"}


def held_chunks(ring_size: int, chunk_length: int) -> np.ndarray:
    """[device, hop]: rank whose key/value chunk the device holds, by the schedule that ring attention runs."""
    ((stream,),) = (leg.streams for leg in plan_hops("ring", ring_size, chunk_length))
    devices, hops = np.arange(ring_size)[:, None], np.arange(stream.hops + 1)[None, :]
    return stream.source(devices, hops, ring_size)


def block_kinds(segment_ids: np.ndarray, num_blocks: int, order: np.ndarray | None = None) -> np.ndarray:
    """[query block, key block]: EMPTY, PARTIAL or FULL, causal within documents, for tokens stored in `order`."""
    order = np.arange(len(segment_ids)) if order is None else order
    tokens = Tokens(jnp.asarray(order, jnp.int32)[None], jnp.asarray(segment_ids[order], jnp.int32)[None])
    bounds = block_bounds(tokens, len(order), num_blocks)
    return np.asarray(classify(bounds, bounds, CAUSAL)[0])


def device_loads(segment_ids: np.ndarray, ring_size: int, blocks_per_device: int, layout: str) -> np.ndarray:
    """Block pairs that each device has to compute over all hops."""
    order = storage_order(layout, ring_size, len(segment_ids))
    kinds = block_kinds(segment_ids, ring_size * blocks_per_device, order)
    return (kinds != EMPTY).reshape(ring_size, -1).sum(1)


def blocks_per_device(length: int, ring_size: int, at_most: int = 4) -> int:
    """Few enough blocks to read; an even number, so that none straddles the two pieces of a zigzag shard, if that divides."""
    return next(n for n in (at_most, 2, 1) if length // ring_size % n == 0)


def draw_hops(axes, ring_size: int, chunk_length: int) -> None:
    held = held_chunks(ring_size, chunk_length)
    axes.imshow(chunk_colors(ring_size)[held], aspect="equal", interpolation="nearest")
    for (device, hop), source in np.ndenumerate(held):
        axes.text(hop, device, str(source), **_chunk_label(source, ring_size))
    _grid(axes, ring_size, "white", 2)
    axes.set(xlabel="hop", ylabel="device", xticks=range(ring_size), yticks=range(ring_size))
    axes.set_title("Key/value chunk in each device's hand")


def draw_storage(axes, ring_size: int, layouts: Sequence[str]) -> None:
    """Which device stores which part of the sequence: one strip per layout, in the colours of the chunks."""
    pieces = 2 * ring_size
    owner = [np.argsort(storage_order(layout, ring_size, pieces)) // 2 for layout in layouts]
    colors = chunk_colors(ring_size)
    for i, ranks in enumerate(owner):
        axes.barh([i] * pieces, 1, left=range(pieces), height=0.72, color=colors[ranks], edgecolor="white", linewidth=1)
        for piece, rank in enumerate(ranks):
            axes.text(piece + 0.5, i, str(rank), **_chunk_label(rank, ring_size))
    axes.set(xlim=(0, pieces), ylim=(len(layouts) - 0.5, -0.5), xticks=[0, pieces], xticklabels=["first token", "last token"])
    axes.set_yticks(range(len(layouts)), layouts)
    axes.get_xticklabels()[0].set_ha("left")
    axes.get_xticklabels()[1].set_ha("right")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title("Device that stores each part of the sequence")


def draw_blocks(axes, kinds: np.ndarray, segment_ids: np.ndarray) -> None:
    num_blocks = len(kinds)
    block = len(segment_ids) / num_blocks
    shades = np.array([matplotlib.colors.to_rgb(KIND_COLORS[kind]) for kind in range(3)])
    axes.imshow(shades[kinds], aspect="equal", interpolation="nearest")
    _grid(axes, num_blocks, "white", 0.8)
    edges = [0, *(np.flatnonzero(np.diff(segment_ids)) + 1), len(segment_ids)]
    for first, end in itertools.pairwise(edges):
        if segment_ids[first] >= 0:  # a document: its tokens see the triangle below its diagonal
            low, high = first / block - 0.5, end / block - 0.5
            axes.plot([low, high, low, low], [low, high, high, low], color=INK, linewidth=1.2)
    ticks = np.linspace(0, num_blocks, 5)
    labels = [f"{int(tick * block):,}" for tick in ticks]
    axes.set_xticks(ticks - 0.5, labels)
    axes.set_yticks(ticks - 0.5, labels)
    axes.set(xlabel="key token", ylabel="query token")
    axes.set_title("Blocks of one packed row (outlined: documents)")
    handles = [matplotlib.patches.Patch(color=KIND_COLORS[kind]) for kind in KIND_NAMES]
    names = [f"{name} ({(kinds == kind).mean():.0%})" for kind, name in KIND_NAMES.items()]
    axes.legend(handles, names, loc="upper right", fontsize=9, framealpha=0.95, edgecolor="none")


def draw_loads(axes, loads: dict[str, np.ndarray]) -> None:
    colors, hatches = (GREEN, PURPLE), ("", "///")
    width = 0.4
    for i, (layout, load) in enumerate(loads.items()):
        at = np.arange(len(load)) + (i - 0.5) * width
        label = f"{layout} (max/mean {load.max() / load.mean():.2f})"
        axes.bar(at, load, width, label=label, color=colors[i], hatch=hatches[i], edgecolor="white", linewidth=0.5)
    axes.set(xlabel="device", ylabel="block pairs", xticks=range(len(load)))
    axes.set_ylim(0, 1.35 * max(load.max() for load in loads.values()))
    axes.legend(loc="upper left", fontsize=9, frameon=False, ncols=2)
    axes.set_title("Work per device")


def draw_memory(axes, memory: dict[str, int]) -> None:
    """Working memory per device: `memory` maps a name to bytes."""
    mib = [size / 2**20 for size in memory.values()]
    axes.barh(range(len(mib)), mib, height=0.6, color=[GREEN, PURPLE][: len(mib)])
    for i, size in enumerate(mib):
        axes.text(size + 0.02 * max(mib), i, f"{size:,.0f} MiB" if size >= 10 else f"{size:.1f} MiB", va="center", fontsize=10)
    axes.set(xlim=(0, 1.3 * max(mib)), ylim=(len(mib) - 0.4, -0.6), xlabel="MiB per device")
    axes.set_yticks(range(len(mib)), memory)
    axes.tick_params(axis="y", length=0)
    axes.set_title("Working memory of loss and gradients")


def draw_losses(axes, losses: list[float], guess: float) -> None:
    axes.axhline(guess, color=INK, linewidth=1, linestyle=":")
    axes.text(len(losses), guess, "uniform guess, ln 256 ", ha="right", va="bottom", fontsize=9, color=INK)
    axes.plot(np.arange(1, len(losses) + 1), losses, color=BLUE, linewidth=2, marker="o", markersize=4)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", ylim=(0.95 * min(losses), 1.06 * max(guess, *losses)))
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    axes.set_title("Training with ring attention")


def chunk_colors(ring_size: int) -> np.ndarray:
    """One colour per chunk, from dark to light, so that they can be told apart by brightness alone."""
    return matplotlib.colormaps["viridis"](np.linspace(0.08, 0.95, ring_size))


def _chunk_label(source: int, ring_size: int) -> dict:
    color = "white" if source < 0.6 * ring_size else INK
    return {"ha": "center", "va": "center", "color": color, "fontsize": 11 * min(1, 8 / ring_size)}


def _grid(axes, count: int, color: str, width: float) -> None:
    """Lines between the cells of an image."""
    lines = np.arange(1, count) - 0.5
    axes.hlines(lines, -0.5, count - 0.5, color=color, linewidth=width)
    axes.vlines(lines, -0.5, count - 0.5, color=color, linewidth=width)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def draw(
    path: Path,
    segment_ids: np.ndarray,
    ring_size: int,
    losses: list[float] | None = None,
    memory: dict[str, int] | None = None,
) -> dict[str, float]:
    """Save the picture.

    Args:
      path: where to; folders are made.
      segment_ids: (T,) of one packed row in natural order, -1 in padding; T is a multiple of 2 * ring_size.
      ring_size: number of devices P.
      losses, memory: one loss per step, and bytes per device by name; without them their column is left out.

    Returns:
      Load of the busiest device over the mean, by layout.
    """
    length, columns = len(segment_ids), 2 if losses is None else 3
    per_device = blocks_per_device(length, ring_size)
    layouts = ("zigzag", "contiguous")
    loads = {layout: device_loads(segment_ids, ring_size, per_device, layout) for layout in layouts}

    figure = Figure(figsize=(5.6 * columns, 8), layout="constrained")  # not pyplot: no global state, no display needed
    grid = figure.subplots(2, columns, height_ratios=[3.1, 1])
    draw_hops(grid[0, 0], ring_size, length // ring_size)
    draw_storage(grid[1, 0], ring_size, layouts)
    draw_blocks(grid[0, 1], block_kinds(segment_ids, ring_size * per_device), segment_ids)
    draw_loads(grid[1, 1], loads)
    if losses is not None:
        draw_losses(grid[0, 2], losses, float(np.log(256)))
        draw_memory(grid[1, 2], memory or {})
    for axes in (grid[1, 1], *grid[:, 2:].flat):
        axes.spines[["top", "right"]].set_visible(False)
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.12)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return {layout: float(load.max() / load.mean()) for layout, load in loads.items()}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, nargs="+", default=[1366, 405, 1141, 258, 4619], help="tokens of each")
    parser.add_argument("--seq-len", type=int, default=8192, help="tokens of the row; the rest is padding")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--output", type=Path, default=Path("outputs/ring.png"))
    options = parser.parse_args(arguments)
    if options.seq_len % (2 * options.devices):
        parser.error(f"--seq-len {options.seq_len} must be a multiple of 2 x --devices {options.devices}")
    segment_ids = np.full(options.seq_len, -1)
    documents = np.repeat(np.arange(len(options.documents)), options.documents)[: options.seq_len]
    segment_ids[: len(documents)] = documents
    balance = draw(options.output, segment_ids, options.devices)
    print(json.dumps({"script": "ring_picture", "picture": str(options.output), "busiest_device_over_mean": balance}))


if __name__ == "__main__":
    main()
