"""``pullback explore NAME`` opens a page that shows the latent space of a built-in model, or of your own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tyro

import pullback as pb
from pullback._decoders.contract import as_codes
from pullback._named import own
from pullback.explorer.builtin import BUILTIN, builtin
from pullback.explorer.model import Model


def explore(
    model: tyro.conf.Positional[str],
    codes: Path | None = None,
    labels: Path | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    browser: bool = True,
    out: Path = Path("out"),
) -> None:
    """Opens a page that shows a latent space: click two points, see the geodesic and what it decodes to.

    Args:
        model: toy, mnist, mocap or movies, trained the first time; or my_module:make_decoder, a function without
            arguments that returns your decoder, or the decoder itself.
        codes: codes of your data, an .npy file of shape (n, d).
        labels: one label per code, an .npy file.
        host: the address to listen on; others than 127.0.0.1 ask for the token in the address that is printed.
        port: the port to listen on; 0 for a free one.
        browser: whether to open the browser.
        out: where the built-in models keep their trained weights.
    """
    options = {"host": host, "port": port, "browser": browser, "block": True}
    if model in BUILTIN:
        pb.explore(builtin(model, out), **options)
        return
    if ":" not in model or codes is None:
        raise SystemExit(
            f"pullback explore: {model!r} is not one of {', '.join(BUILTIN)}. For your own model write\n"
            "  pullback explore my_module:make_decoder --codes codes.npy --labels labels.npy"
        )
    pb.explore(_own(model, codes, labels), **options)


def main(arguments: Sequence[str]) -> None:
    """Runs the command."""
    tyro.cli(explore, args=arguments, prog="pullback explore")


def _own(name: str, codes: Path, labels: Path | None) -> Model:
    """The model that ``module:attribute`` names, a decoder or a function without arguments that makes one."""
    try:
        decoder, made = own(name)
    except (ImportError, ValueError) as error:
        raise SystemExit(f"pullback explore: {error}") from error
    module, attribute = name.split(":", 1)
    lines = [
        "import numpy",
        f"from {module} import {attribute}",
        "",
        f"decoder = {attribute}{'()' if made else ''}",
        f"codes = torch.as_tensor(numpy.load({str(codes)!r}))",
    ]
    given = None if labels is None else _load(labels)
    return Model(name, decoder, as_codes(_load(codes), like=decoder), given, lines="\n".join(lines))


def _load(file: Path) -> np.ndarray:
    """An array from a file, without running anything that is pickled in it."""
    try:
        return np.load(file, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise SystemExit(f"pullback explore: cannot read {file}: {error}. Save it with numpy.save.") from error
