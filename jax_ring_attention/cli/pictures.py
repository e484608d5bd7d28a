"""Pictures of the ring, its blocks and its roofline; the only module that needs matplotlib (the extra `demo`)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.patches
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jax_ring_attention.cli.blocks import first_hop, held_chunks
from jax_ring_attention.layouts import storage_order
from jax_ring_attention.masks import EMPTY, FULL, PARTIAL
from jax_ring_attention.schedule import Leg

# Okabe and Ito's colours, which stay apart for every kind of colour vision.
BLUE, ORANGE, GREEN, PURPLE, GREY, INK = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#E8E8E8", "#333333"
KIND_COLORS = {EMPTY: GREY, PARTIAL: ORANGE, FULL: BLUE}
KIND_NAMES = {FULL: "full: no mask", PARTIAL: "partial: mask", EMPTY: "empty: skipped"}


def draw_hops(
    axes: Axes, held: np.ndarray, ring_size: int, start: int = 0, title: str = "Key/value chunk in each device's hand"
) -> None:
    """`held` [device, hop] ranks whose key/value chunk is in hand, the first column at hop `start`."""
    axes.imshow(chunk_colors(ring_size)[held], aspect="equal", interpolation="nearest")
    for (device, hop), source in np.ndenumerate(held):
        axes.text(hop, device, str(source), **_chunk_label(source, ring_size))
    _grid(axes, held.shape, "white", 2)
    hops = range(held.shape[1])
    axes.set_xticks(hops, [str(hop + start) for hop in hops])
    axes.set(xlabel="hop", ylabel="device", yticks=range(ring_size))
    axes.set_title(title)


def draw_storage(axes: Axes, ring_size: int, layouts: Sequence[str]) -> None:
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
    first, last = axes.get_xticklabels()
    first.set_horizontalalignment("left")
    last.set_horizontalalignment("right")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title("Device that stores each part of the sequence")


def draw_blocks(axes: Axes, kinds: np.ndarray, length: int, title: str) -> None:
    """`kinds` [query block, key block] of `length` tokens, in the order in which `kinds` has them."""
    num_blocks = len(kinds)
    shades = np.array([matplotlib.colors.to_rgb(KIND_COLORS[kind]) for kind in range(3)])
    axes.imshow(shades[kinds], aspect="equal", interpolation="nearest")
    _grid(axes, kinds.shape, "white", 0.8)
    ticks = np.linspace(0, num_blocks, 5)
    labels = [f"{int(tick * length / num_blocks):,}" for tick in ticks]
    axes.set_xticks(ticks - 0.5, labels)
    axes.set_yticks(ticks - 0.5, labels)
    axes.set(xlabel="key token", ylabel="query token")
    axes.set_title(title)
    handles = [matplotlib.patches.Patch(color=KIND_COLORS[kind]) for kind in KIND_NAMES]
    names = [f"{name} ({(kinds == kind).mean():.0%})" for kind, name in KIND_NAMES.items()]
    axes.legend(handles, names, loc="upper right", fontsize=9, framealpha=0.95, edgecolor="none")


def outline_documents(axes: Axes, segment_ids: np.ndarray, num_blocks: int) -> None:
    """On `draw_blocks` in natural order: a document's tokens see the triangle below its diagonal."""
    block = len(segment_ids) / num_blocks
    edges = [0, *(np.flatnonzero(np.diff(segment_ids)) + 1), len(segment_ids)]
    for first, end in itertools.pairwise(edges):
        if segment_ids[first] >= 0:
            low, high = first / block - 0.5, end / block - 0.5
            axes.plot([low, high, low, low], [low, high, high, low], color=INK, linewidth=1.2)


def draw_loads(axes: Axes, loads: Mapping[str, np.ndarray]) -> None:
    """Block pairs per device, for up to three layouts side by side."""
    colors, hatches = (GREEN, PURPLE, ORANGE), ("", "///", "...")
    width = 0.8 / len(loads)
    for i, (layout, load) in enumerate(loads.items()):
        at = np.arange(len(load)) + (i - (len(loads) - 1) / 2) * width
        label = f"{layout} (max/mean {load.max() / load.mean():.2f})"
        axes.bar(at, load, width, label=label, color=colors[i], hatch=hatches[i], edgecolor="white", linewidth=0.5)
    axes.set(xlabel="device", ylabel="block pairs", xticks=range(len(next(iter(loads.values())))))
    axes.set_ylim(0, (1.1 + 0.25 * -(-len(loads) // 2)) * max(load.max() for load in loads.values()))  # room for the legend
    axes.legend(loc="upper left", fontsize=9, frameon=False, ncols=2)
    axes.set_title("Work per device")


def chunk_colors(ring_size: int) -> np.ndarray:
    """One colour per chunk, from dark to light, so that they can be told apart by brightness alone."""
    return np.asarray(matplotlib.colormaps["viridis"](np.linspace(0.08, 0.95, ring_size)))


def _chunk_label(source: int, ring_size: int) -> dict[str, Any]:
    color = "white" if source < 0.6 * ring_size else INK
    return {"ha": "center", "va": "center", "color": color, "fontsize": 11 * min(1, 8 / ring_size)}


def _grid(axes: Axes, shape: tuple[int, ...], color: str, width: float) -> None:
    """Lines between the cells of an image of (rows, columns)."""
    rows, columns = shape
    axes.hlines(np.arange(1, rows) - 0.5, -0.5, columns - 0.5, color=color, linewidth=width)
    axes.vlines(np.arange(1, columns) - 0.5, -0.5, rows - 0.5, color=color, linewidth=width)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


# Whole pictures.


def save(figure: Figure, path: Path) -> None:
    """Save a figure; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def save_explanation(
    path: Path, ring_size: int, legs: Sequence[Leg] | None, kinds: np.ndarray, length: int, loads: Mapping[str, np.ndarray]
) -> None:
    """What `explain` draws: hops, storage, blocks and loads.

    Args:
      path: where to.
      ring_size: number of devices P.
      legs: the hops; None where all chunks are gathered at once.
      kinds: [query block, key block] in stored order, of `length` tokens.
      loads: block pairs per device by layout; the first layout is the one explained.
    """
    streams = [(leg, stream) for leg in legs or () for stream in leg.streams]
    figure = Figure(figsize=(5.6 * (1 + max(1, len(streams))), 8), layout="constrained")  # not pyplot: no state, no display
    grid = figure.subplots(2, 1 + max(1, len(streams)), height_ratios=[3.1, 1], squeeze=False)
    layout = next(iter(loads))
    for axes, (leg, stream) in zip(grid[0], streams, strict=False):
        part = "Chunk" if len(leg.streams) == 1 else f"Tokens {stream.start}..{stream.start + stream.size - 1} of the chunk"
        title = f"{part} in hand, moving by {stream.direction:+d}"
        draw_hops(axes, held_chunks(leg, stream, ring_size), ring_size, first_hop(leg), title)
    if not streams:
        everything = np.tile(np.arange(ring_size), (ring_size, 1))
        draw_hops(grid[0, 0], everything, ring_size, title="all_gather: every chunk in every device's hand")
        grid[0, 0].set(xlabel="chunk")
    draw_storage(grid[1, 0], ring_size, list(loads))
    for axes in grid[1, 1:-1]:
        axes.set_axis_off()
    draw_blocks(grid[0, -1], kinds, length, f"Blocks in the order that {layout} stores")
    draw_loads(grid[1, -1], loads)
    grid[1, -1].spines[["top", "right"]].set_visible(False)
    save(figure, path)


def save_roofline(path: Path, flops: float, link: float, intensities: Mapping[str, float], tokens: int, hardware: str) -> None:
    """What `plan` draws: speed of one hop against FLOPs per byte that it sends.

    Args:
      path: where to.
      flops, link: rates of a device, FLOP/s and bytes/s.
      intensities: FLOPs per byte by pass, at `tokens` tokens per device, in proportion to which they grow.
      hardware: its name.
    """
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    ridge = flops / link
    x = np.geomspace(min(ridge, *intensities.values()) / 8, max(ridge, *intensities.values()) * 8, 200)
    axes.loglog(x, np.minimum(flops, x * link) / 1e12, color=INK, linewidth=2)
    axes.axvline(ridge, color=GREY, linewidth=1)
    low, high = axes.get_ylim()
    axes.set_ylim(low, 3 * high)  # room for the legend
    axes.text(ridge, low, f" transfers hide to the right of {ridge:,.0f} FLOP/B", va="bottom", fontsize=9, color=INK)
    for (name, intensity), color, marker in zip(intensities.items(), (BLUE, ORANGE), "os", strict=False):
        attained = min(flops, intensity * link)
        hides = int(np.ceil(tokens * ridge / intensity))
        label = f"{name}, T/P = {tokens:,} (hidden from T/P = {hides:,})"
        axes.plot(intensity, attained / 1e12, marker, color=color, markersize=10, label=label)
    axes.set(xlabel="FLOPs per byte sent in a hop", ylabel="TFLOP/s per device")
    axes.set_title(f"Roofline of one hop on {hardware}: link {link / 1e9:g} GB/s, kernel {flops / 1e12:,.0f} TFLOP/s")
    axes.legend(loc="upper left", frameon=False)
    axes.grid(visible=True, which="major", color=GREY)
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)
