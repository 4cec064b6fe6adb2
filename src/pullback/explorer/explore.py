"""The entry function of the explorer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from torch.distributions import Distribution

from pullback._decoders.contract import Decoder, as_codes
from pullback.explorer.model import Model
from pullback.explorer.render import automatic, one_by_one, together

if TYPE_CHECKING:
    from pullback.explorer.serve import Explorer


def explore(
    decoder: Decoder | Model,
    codes: Tensor | np.ndarray | None = None,
    *,
    labels: Sequence[Any] | np.ndarray | Tensor | None = None,
    render: Callable[[Distribution], Any] | None = None,
    names: Sequence[str] | None = None,
    title: str = "Latent space",
    host: str = "127.0.0.1",
    port: int = 0,
    browser: bool | None = None,
    block: bool | None = None,
) -> Explorer:
    """Opens a page that shows the latent space of a model: click two points, see the geodesic and what it decodes to.

    The page is served by this process, on this machine alone unless `host` says otherwise. In a notebook the result
    shows itself.

    Args:
        decoder: maps codes to a distribution. If it is a `pullback.Extrapolated`, the page uses its support and its
            wall.
        codes: of the data, shape ``(n, d)`` with d at least 2.
        labels: one per code, for colors: names or numbers.
        render: draws what is decoded: a function of the distribution of one code (decoded as a batch of one) that
            returns an image ``(h, w)`` or ``(h, w, 3)`` with values from 0 to 1, or a string of HTML. By default
            images if the distribution's mean looks like one, sequence logos and categories, and else mean ± standard
            deviation.
        names: of the features or categories, for the default pictures.
        title: shown above the picture.
        host: the address to listen on. Others than the local one are reached by anyone in the network who has the
            address with the token that it prints.
        port: the port to listen on; 0 for a free one.
        browser: whether to open the browser; by default in a script, and not in a notebook.
        block: whether to serve until Ctrl-C; by default in a script, which would else end, and not in an interactive
            session.

    Returns:
        An explorer with its `url`; its `stop` ends it.

    Example:
        >>> import torch, pullback as pb
        >>> from torch.distributions import Normal
        >>> decoder = lambda z: Normal(torch.cat([z, z.square()], -1), 0.1)
        >>> explorer = pb.explore(decoder, torch.randn(200, 2), browser=False, block=False)
        The explorer is at http://127.0.0.1:...
        >>> explorer.url.startswith("http://127.0.0.1:")
        True
        >>> explorer.stop()
    """
    try:
        from pullback.explorer.serve import Explorer
    except ImportError as error:
        raise ImportError("The explorer needs a web server and plotly: pip install 'pullback[explorer]'.") from error
    model = decoder if isinstance(decoder, Model) else _model(decoder, codes, labels, render, names, title)
    interactive = hasattr(sys, "ps1") or "ipykernel" in sys.modules
    explorer = Explorer(model, host=host, port=port)
    print(f"The explorer is at {explorer.url}")
    if browser if browser is not None else not interactive:
        explorer.open()
    if block if block is not None else not interactive:
        explorer.wait()
    return explorer


def _model(
    decoder: Decoder,
    codes: Any,
    labels: Any,
    render: Callable[[Distribution], Any] | None,
    names: Sequence[str] | None,
    title: str,
) -> Model:
    if codes is None:
        raise ValueError("The explorer needs the codes of the data: pb.explore(decoder, codes).")
    renderer = together(partial(automatic, names=names)) if render is None else one_by_one(render)
    return Model(title, decoder, as_codes(codes, like=decoder), labels, renderer)
