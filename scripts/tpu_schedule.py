"""Read the static schedule of a Pallas TPU kernel from the TPU compiler's dump; no TPU is needed.

The compiler writes the program of each kernel as bundles, one issued a cycle. This reader cuts it at labels and branches into
straight pieces and counts, for each, its bundles and what they do. A wait for memory is one bundle whatever it takes: the numbers
say what the arithmetic costs when data is there in time.

Work of the matrix units is counted in cycles of all of them at once; every product instruction takes the rows of one register.
On v5e and v5p the scheduler may print fewer bundles than that, so a piece costs the larger of the two.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple


class Chip(NamedTuple):
    """Matrix units of one core: how many, their side, and rows of the moving operand that each takes per cycle."""

    units: int
    side: int
    rows_per_cycle: int

    @property
    def flops_per_cycle(self) -> int:
        return 2 * self.units * self.side**2 * self.rows_per_cycle


CHIPS = {"v5e": Chip(4, 128, 1), "v5p": Chip(4, 128, 1), "v6e": Chip(2, 256, 2)}

_ROWS = {"bf16": 16, "f32": 8}  # of the moving operand in one register
_BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+(LH|LB|LE|PB|PF|CT)?\s*:([ >]*)(.*)$")
_PRODUCT = re.compile(r"\bvmatmul[.\w]*")
_SKIP = re.compile(r"\bsbr\.rel .*?target = \$region(\d+)")
_REGION = re.compile(r"\bregion (\d+)")


def compiler_flags(folder: Path | str) -> str:
    """For LIBTPU_INIT_ARGS, which the compiler reads when it is loaded: dump all programs into `folder`."""
    wanted = ("xla_jf_dump_hlo_text", "xla_jf_dump_llo_text", "xla_jf_emit_annotations")
    return " ".join([f"--xla_jf_dump_to={folder}", *(f"--{flag}=true" for flag in wanted)])


class Piece(NamedTuple):
    """A straight piece of the program.

    Attributes:
      begin, end: its bundles.
      matmul_cycles: what its products take on all matrix units.
      fills, spills: vector registers read from and written to memory for want of registers.
      stores: other vector stores.
      in_loop: whether it runs once per grid step.
      skippable: whether a branch around it skips no products: copies and transfers that not every step makes.
      loops: the loops around it, from the outermost, each by its first bundle.
    """

    begin: int
    end: int
    matmul_cycles: float
    fills: int
    spills: int
    stores: int
    in_loop: bool
    skippable: bool
    loops: tuple[int, ...] = ()

    @property
    def bundles(self) -> int:
        return self.end - self.begin

    @property
    def cycles(self) -> float:
        return max(self.bundles, self.matmul_cycles)


class Schedule(NamedTuple):
    """The pieces of one kernel, in program order."""

    pieces: tuple[Piece, ...]

    @property
    def branches(self) -> list[Piece]:
        """The pieces with products: one per kind of block pair."""
        return [piece for piece in self.pieces if piece.matmul_cycles]

    @property
    def step_overhead(self) -> int:
        """Bundles that every grid step runs beside its branch."""
        return sum(p.bundles for p in self.pieces if p.in_loop and not p.matmul_cycles and not p.skippable)

    @property
    def first_step(self) -> int:
        """Bundles of what only the first step of a result does, such as copying the carry: of skippable pieces before the
        branches, the one with most stores."""
        start = self.branches[0].begin
        copies = [p for p in self.pieces if p.skippable and p.in_loop and p.end <= start and p.stores]
        return max(copies, key=lambda p: p.stores).bundles if copies else 0

    @property
    def passes(self) -> list[list[Piece]]:
        """The branches by the loop of grid steps that they stand in: a kernel of several hops has a loop for the hop at home
        and one, inside the loop over hops, for all others."""
        found: dict[tuple[int, ...], list[Piece]] = {}
        for piece in self.branches:
            found.setdefault(piece.loops, []).append(piece)
        return list(found.values())

    def overhead(self, loops: tuple[int, ...]) -> int:
        """Bundles that every turn of the innermost of `loops` runs itself: no inner loops, branches, nor what may be skipped."""
        return sum(p.bundles for p in self.pieces if p.loops == loops and not p.matmul_cycles and not p.skippable)

    def most_overhead(self, loops: tuple[int, ...]) -> int:
        """The same with all that may be skipped but the copy of the first step: one kernel skips copies by branches, another
        makes them conditional, and only this treats them alike."""
        inside = [p for p in self.pieces if p.loops == loops and not p.matmul_cycles]
        copy = max((p.bundles for p in inside if p.skippable and p.stores), default=0)
        return sum(p.bundles for p in inside) - copy


def kernel_files(folder: Path | str) -> dict[str, Path]:
    """Final bundles of every program in a dump, by the compiler's name for it."""
    found = {}
    for path in sorted(Path(folder).glob("*-final_bundles.txt")):
        match = re.fullmatch(r"\d+-(.+)-\d+-final_bundles\.txt", path.name)
        if match:
            found[match[1]] = path
    return found


def read(path: Path, chip: Chip) -> Schedule:
    """The schedule in one file of final bundles."""
    bundles: list[list[str]] = []  # label, one > for each loop around it, and text
    for line in path.read_text(errors="replace").splitlines():
        match = _BUNDLE.match(line)
        if match:
            bundles.append([match[1] or "", match[2], match[3]])
        elif bundles:
            bundles[-1][2] += line
    if not bundles:
        raise ValueError(f"{path} holds no bundles; was it dumped with the flags of compiler_flags()?")
    return Schedule(tuple(_pieces(bundles, chip)))


def _pieces(bundles: list[list[str]], chip: Chip) -> list[Piece]:
    cuts, skips = {0, len(bundles)}, []
    homes: dict[str, list[int]] = {}
    for i, (label, _, text) in enumerate(bundles):
        if label:
            cuts.add(i)
        for region in _REGION.findall(text):
            homes.setdefault(region, []).append(i)
    for i, (_, _, text) in enumerate(bundles):
        match = _SKIP.search(text)
        if match:
            cuts.add(i + 1)
            target = next((home for home in homes.get(match[1], ()) if home > i), None)
            if target is not None:
                skips.append((i + 1, target))
    products = [_cycles(text, chip) for _, _, text in bundles]
    idle_skips = [(a, b) for a, b in skips if not any(products[a:b])]
    loop = [i for i, (label, _, _) in enumerate(bundles) if label == "LB"]
    loop_end = max((i for i, (_, _, text) in enumerate(bundles) if _SKIP.search(text)), default=-1)
    nested = _loops(bundles)
    cuts |= {i for i in range(1, len(bundles)) if nested[i] != nested[i - 1]}
    pieces = []
    for a, b in zip(ordered := sorted(cuts), ordered[1:], strict=False):
        texts = [text for _, _, text in bundles[a:b]]
        fills = sum(len(re.findall(r"\bvld \[vmem:\[#allocation\d+_spill\]", text)) for text in texts)
        spills = sum(len(re.findall(r"\bvst \[vmem:\[#allocation\d+_spill\]", text)) for text in texts)
        stores = sum(len(re.findall(r"\bvst(?:\.\w+)* ", text)) for text in texts) - spills
        in_loop = bool(loop) and loop[0] <= a and b - 1 <= loop_end
        skippable = any(c <= a and b <= d for c, d in idle_skips)
        pieces.append(Piece(a, b, sum(products[a:b]), fills, spills, stores, in_loop, skippable, nested[a]))
    return pieces


def _loops(bundles: list[list[str]]) -> list[tuple[int, ...]]:
    """For every bundle, the first bundles of the loops around it."""
    found: list[tuple[int, ...]] = []
    around: tuple[int, ...] = ()
    for i, (label, marks, text) in enumerate(bundles):
        depth = marks.count(">")
        if label == "LB":
            around = (*around[: depth - 1], i)
        elif not text.startswith("{}"):  # an empty bundle bears no mark
            around = around[:depth]
        found.append(around)
    return found


def _cycles(text: str, chip: Chip) -> float:
    rows = 0
    for product in _PRODUCT.findall(text):
        known = [_ROWS[part] for part in product.split(".") if part in _ROWS]
        if not known:
            raise ValueError(f"{product} is a product of unknown type; known are {', '.join(_ROWS)}")
        rows += known[0]
    return rows / (chip.units * chip.rows_per_cycle)
