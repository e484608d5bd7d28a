"""The parser of `python -m jax_ring_attention`, and which command runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jax_ring_attention.cli import check, explain, plan
from jax_ring_attention.cli.console import UsageError

COMMANDS = {
    "check": (check, "compare every implementation on the devices at hand with dense attention"),
    "plan": (plan, "predict memory, traffic and time for a sequence, a ring and a kind of hardware"),
    "explain": (explain, "draw who holds which chunk when, which blocks are computed, and by whom"),
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jax_ring_attention",
        description="Exact attention over sequences too long for one device: check it, plan it, look at it.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="{" + ",".join(COMMANDS) + "}")
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=module.DESCRIPTION)
        module.add_arguments(command)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 where a check failed, 2 for settings that do not fit."""
    options = build_parser().parse_args(arguments)
    module, _ = COMMANDS[options.command]
    try:
        return module.run(options)
    except UsageError as error:
        print(f"python -m jax_ring_attention {options.command}: error: {error}", file=sys.stderr)
        return 2
