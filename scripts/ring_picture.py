"""Draw how ring attention works: who holds which chunk at each hop, which blocks a mask leaves to do, and who does them.

    python scripts/ring_picture.py --documents 1366 405 1141 258 4619 --seq-len 8192 --devices 8

The drawing is that of `python -m jax_ring_attention explain`, of one packed row, with what a training run adds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from jax_ring_attention.cli.blocks import block_kinds, blocks_per_device, device_loads, held_chunks
from jax_ring_attention.cli.pictures import (
    BLUE,
    GREEN,
    INK,
    PURPLE,
    draw_blocks,
    draw_hops,
    draw_loads,
    draw_storage,
    outline_documents,
    save,
)
from jax_ring_attention.schedule import plan_hops


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
    (leg,) = plan_hops("ring", ring_size, length // ring_size)
    draw_hops(grid[0, 0], held_chunks(leg, leg.streams[0], ring_size), ring_size)
    draw_storage(grid[1, 0], ring_size, layouts)
    kinds = block_kinds(segment_ids, ring_size * per_device)
    draw_blocks(grid[0, 1], kinds, length, "Blocks of one packed row (outlined: documents)")
    outline_documents(grid[0, 1], segment_ids, len(kinds))
    draw_loads(grid[1, 1], loads)
    if losses is not None:
        draw_losses(grid[0, 2], losses, float(np.log(256)))
        draw_memory(grid[1, 2], memory or {})
    for axes in (grid[1, 1], *grid[:, 2:].flat):
        axes.spines[["top", "right"]].set_visible(False)
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.12)
    save(figure, path)
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
