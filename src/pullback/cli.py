"""The command line: ``python -m pullback reproduce toy --out out``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import tyro

from pullback.experiments import toy

_EXPERIMENTS = {"toy": toy.run}

app = tyro.extras.SubcommandApp()


@app.command
def reproduce(experiment: tyro.conf.Positional[Literal["toy"]], out: Path = Path("out")) -> None:
    """Runs one experiment of Arvanitidis et al. 2022 and writes its figures.

    Args:
        experiment: toy: the latent spaces of five likelihoods over one circle of codes.
        out: the folder to write to; made if missing.
    """
    for file in _EXPERIMENTS[experiment](out):
        print(f"wrote {file}")


def main() -> None:
    """Entry point of the ``pullback`` command."""
    app.cli(prog="pullback", description="The Fisher-Rao geometry of latent spaces.")
