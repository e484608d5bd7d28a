"""Reads programs: in optimised HLO, which collectives run, how often, and how many bytes they move; in jaxprs, the equations.

Only the text is used, so the same questions can be put to programs for devices that are not here. A collective inside a loop
counts as often as the loop runs; a loop whose trip count depends on data gives `executions=None`.
"""

from __future__ import annotations

import collections
import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

COLLECTIVES = ("collective-permute", "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-broadcast")

_BYTES = {"pred": 1, "bf16": 2, **{f"{kind}{bits}": bits // 8 for kind in "suf" for bits in (8, 16, 32, 64)}}
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^ +(?:ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_NAMES = r"=(\{[^}]*\}|%?[\w.\-]+)"
_CALLED = re.compile(r"\b(?:body|calls|to_apply|called_computations)" + _NAMES)
_BRANCHES = re.compile(r"\b(?:branch_computations|true_computation|false_computation)" + _NAMES)


def compile_only(function: Callable, *arguments) -> jax.stages.Compiled:
    """Compile for the CPU devices without optimising machine code, which nobody looks at or runs; HLO is optimised as always."""
    return jax.jit(function).lower(*arguments).compile(compiler_options={"xla_backend_optimization_level": 0})


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr and of the jaxprs inside it, each once."""

    def is_jaxpr(x):
        return hasattr(getattr(x, "jaxpr", x), "eqns")

    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(inner):
                yield from equations(inner)


class Array(NamedTuple):
    """Element type as HLO spells it, and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.size * _BYTES[self.dtype]


class Instruction(NamedTuple):
    """`name = result opcode(operands), attributes`; `arguments` is what stands in the parentheses."""

    name: str
    result: str
    opcode: str
    arguments: str
    attributes: str

    @property
    def operands(self) -> tuple[str, ...]:
        return tuple(re.findall(r"%([\w.\-]+)", self.arguments))

    @property
    def arrays(self) -> tuple[Array, ...]:
        return tuple(Array(d, tuple(int(n) for n in s.split(",") if n)) for d, s in _ARRAY.findall(self.result))


class Collective(NamedTuple):
    """One collective instruction of a program.

    Attributes:
      opcode: one of `COLLECTIVES`, whether or not it was split into a start and a done.
      operands: the arrays that one device sends.
      executions: how often it runs per run of the program; None when that depends on data.
      in_branch: whether it stands in a branch of a conditional.
      split: whether it is a start with a done further down, so that it may overlap what lies between.
      pairs: (source, target) of a collective-permute.
    """

    opcode: str
    operands: tuple[Array, ...]
    executions: int | None
    in_branch: bool
    split: bool
    pairs: tuple[tuple[int, int], ...]

    @property
    def bytes(self) -> int:
        """Bytes that one device sends over the whole run of the program."""
        return self.known_executions * sum(array.bytes for array in self.operands)

    @property
    def known_executions(self) -> int:
        if self.executions is None:
            raise ValueError(f"{self.opcode} of {self.operands} stands in a loop whose trip count depends on data")
        return self.executions

    @property
    def shift(self) -> int:
        """The k for which device r sends to (r + k) mod P, between -P/2 and P/2; a ValueError for any other permutation."""
        size = len(self.pairs)
        shifts = {(target - source) % size for source, target in self.pairs}
        if len(shifts) != 1 or {source for source, _ in self.pairs} != set(range(size)):
            raise ValueError(f"not a rotation of the whole ring: {self.pairs}")
        (shift,) = shifts
        return shift if shift <= size // 2 else shift - size


class Program:
    """The computations of a compiled program and what they call."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, list[Instruction]] = {}
        current: list[Instruction] | None = None
        for line in text.splitlines():
            if header := _HEADER.match(line):
                current = self.computations.setdefault(header[2], [])
                if header[1]:
                    self.entry = header[2]
            elif current is not None and (found := _INSTRUCTION.match(line)):
                current.append(_instruction(*found.groups()))

    @property
    def size(self) -> int:
        """Number of instructions, over all computations."""
        return sum(len(body) for body in self.computations.values())

    def count(self, opcode: str) -> int:
        return sum(one.opcode == opcode for body in self.computations.values() for one in body)

    @functools.cached_property
    def collectives(self) -> list[Collective]:
        """Every collective instruction that the entry computation reaches."""
        found: list[Collective] = []
        self._visit(self.entry, 1, False, False, found)
        return found

    def sent(self, opcode: str = "collective-permute") -> dict[tuple[str, int], int]:
        """How often an array of (dtype, number of elements) is sent by `opcode`, over the whole run."""
        counts: collections.Counter = collections.Counter()
        for one in self.collectives:
            if one.opcode == opcode:
                for array in one.operands:
                    counts[array.dtype, array.size] += one.known_executions
        return dict(counts)

    def bytes_sent(self, opcode: str = "collective-permute", shift: int | None = None) -> int:
        """Bytes that one device sends by `opcode`, in one direction when `shift` is given."""
        return sum(one.bytes for one in self.collectives if one.opcode == opcode and shift in (None, one.shift))

    def between(self, opcode: str) -> list[list[str]]:
        """For every `opcode`-start, the opcodes of the instructions up to its done."""
        spans = []
        for body in self.computations.values():
            for i, one in enumerate(body):
                if one.opcode == f"{opcode}-start":
                    ends = [j for j, other in enumerate(body) if other.opcode == f"{opcode}-done" and one.name in other.operands]
                    spans.append([other.opcode for other in body[i + 1 : ends[0]]])
        return spans

    def _visit(self, name: str, executions: int | None, in_branch: bool, split: bool, found: list[Collective]) -> None:
        body = self.computations[name]
        for one in body:
            opcode = one.opcode.removesuffix("-start")
            if opcode in COLLECTIVES:
                operands = tuple(array for operand in one.operands for array in self._find(name, operand).arrays)
                pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", one.attributes)
                pairs = tuple((int(a), int(b)) for a, b in re.findall(r"(\d+),(\d+)", pairs[1])) if pairs else ()
                found.append(Collective(opcode, operands, executions, in_branch, split or opcode != one.opcode, pairs))
            times = executions
            if one.opcode == "while":
                trips = self.trip_count(name, one)
                times = None if trips is None or executions is None else executions * trips
            for called in _names(_CALLED, one.attributes):
                self._visit(called, times, in_branch, split or one.opcode == "async-start", found)
            for called in _names(_BRANCHES, one.attributes):
                self._visit(called, executions, True, split, found)

    def trip_count(self, where: str, loop: Instruction) -> int | None:
        """How often the body of a `while` in computation `where` runs; None when the text does not say.

        Either the compiler noted it, or it follows from `counter < limit` in the condition, the counter's start and its step.
        """
        if noted := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
            return int(noted[1])
        condition = re.search(r"\bcondition=%?([\w.\-]+)", loop.attributes)[1]
        body = re.search(r"\bbody=%?([\w.\-]+)", loop.attributes)[1]
        test = self.computations[condition][-1]
        if test.opcode != "compare" or "direction=LT" not in test.attributes:
            return None
        counter = self._origin(condition, test.operands[0])
        limit = self._constant(condition, test.operands[1])
        if counter.opcode != "get-tuple-element" or limit is None:
            return None
        index = int(re.search(r"index=(\d+)", counter.attributes)[1])
        start = self._constant(where, self._find(where, loop.operands[0]).operands[index])
        update = self._origin(body, self.computations[body][-1].operands[index])
        if start is None or update.opcode != "add":
            return None
        steps = [step for operand in update.operands if (step := self._constant(body, operand)) is not None]
        return max(0, -(-(limit - start) // steps[0])) if len(steps) == 1 and steps[0] > 0 else None

    def _find(self, where: str, name: str) -> Instruction:
        return next(one for one in self.computations[where] if one.name == name)

    def _origin(self, where: str, name: str) -> Instruction:
        """The instruction behind copies."""
        one = self._find(where, name)
        while one.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
            one = self._find(where, one.operands[0])
        return one

    def _constant(self, where: str, name: str) -> int | None:
        one = self._origin(where, name)
        return int(one.arguments) if one.opcode == "constant" and re.fullmatch(r"-?\d+", one.arguments) else None


def _names(pattern: re.Pattern, attributes: str) -> list[str]:
    return [name for group in pattern.findall(attributes) for name in re.findall(r"[\w.\-]+", group)]


def _instruction(name: str, rest: str) -> Instruction:
    """Result types of tuples stand in parentheses, layouts may have parentheses of their own, and neither may be split at."""
    cut = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    result, call = rest[:cut], rest[cut:].lstrip()
    opening = call.index("(")
    closing = _closing(call, opening)
    return Instruction(name, result, call[:opening], call[opening + 1 : closing], call[closing + 1 :])


def _closing(text: str, opening: int) -> int:
    """Index of the parenthesis that closes the one at `opening`."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, opening):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.start()
    raise ValueError(f"unbalanced: {text[opening : opening + 80]}")
