"""The command line: ``pullback COMMAND ...``.

Each command is a module with a function ``main(arguments)``, which is imported when it is asked for.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from pullback import __version__

# In the order of ``pullback --help``; the module of each, and what it does.
COMMANDS = {
    "reproduce": ("experiments.command", "run an experiment of the paper, or all of them"),
    "distances": ("cli.distances", "fill a store with the distances of all pairs of codes, or find nearest neighbors"),
    "explore": ("explorer.command", "open a page that shows a latent space, built-in or your own"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the ``pullback`` command."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    width = max(map(len, COMMANDS)) + 2
    commands = "\n".join(f"  {name:{width}}{text}" for name, (_, text) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="pullback",
        usage="pullback [-h] [--version] COMMAND ...",
        description="The Fisher-Rao geometry of latent spaces.",
        epilog=f"commands:\n{commands}\n\n'pullback COMMAND --help' lists the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pullback {__version__}")
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help=argparse.SUPPRESS)
    if not arguments:
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    command = parser.parse_args(arguments[:1]).command  # the rest belongs to the command
    import_module(f"pullback.{COMMANDS[command][0]}").main(arguments[1:])
