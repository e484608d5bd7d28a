"""What the commands share: numbers in and out of text, tables, and errors that say what to do."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path

_SUFFIXES = {"k": 2**10, "m": 2**20, "g": 2**30}
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


class UsageError(ValueError):
    """Something that the user can put right; `main` prints it without a traceback."""


def token_count(text: str) -> int:
    """A positive number of tokens: 4096, 1_000_000, 128k (x 1024) or 1M (x 1024**2), for argparse."""
    factor = _SUFFIXES.get(text[-1:].lower(), 1)
    digits = text if factor == 1 else text[:-1]
    try:
        number = float(digits.replace("_", "")) * factor
    except ValueError:
        number = 0.0
    if number < 1 or number != int(number):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens; write 4096, 128k (k = 1024) or 1M (M = 1024 x 1024)")
    return int(number)


def positive_int(text: str) -> int:
    """For argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def whole_number(text: str) -> int:
    """At least 0, for argparse."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 0")
    return int(text)


def positive_float(text: str) -> float:
    """For argparse."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0")
    return number


def png_path(text: str) -> Path:
    """For argparse."""
    if not text.lower().endswith(".png"):
        raise argparse.ArgumentTypeError(f"{text!r} must end in .png")
    return Path(text)


def require_matplotlib() -> None:
    """A `UsageError` where pictures cannot be drawn; call it before the work, not after."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "--png needs matplotlib, which is not installed: pip install 'jax-ring-attention[demo]', or leave out --png."
        )


def bytes_text(size: float) -> str:
    """For example 1.5 MiB."""
    unit = 0
    while size >= 1024 and unit < len(_BINARY) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} {_BINARY[unit]}" if unit == 0 or size >= 100 else f"{size:.3g} {_BINARY[unit]}"


def seconds_text(seconds: float) -> str:
    """For example 1.5 ms."""
    for factor, unit in ((1, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def number_text(number: float) -> str:
    """For example 35.2 T, in powers of 1000."""
    for factor, unit in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number:.3g} "


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Columns that line up; the first `left` to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = [x.ljust(n) if i < left else x.rjust(n) for i, (x, n) in enumerate(zip(row, widths, strict=True))]
        return "  ".join(cells).rstrip()

    return "\n".join(line(row) for row in (header, *rows))
