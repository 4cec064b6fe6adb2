"""What the page draws of a decoded distribution.

A renderer takes a decoder and codes ``(n, d)`` and returns a description with a ``kind`` that the page knows:
``images``, ``lines`` (stick figures), ``ranking`` (named probabilities), ``bars`` (mean ± standard deviation),
``logo`` (letters at positions) or ``html``.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, Independent, OneHotCategorical

from pullback._decoders.contract import Decoder, decode

Renderer = Callable[[Decoder, Tensor], dict[str, Any]]

# Features that fit side by side into a small picture.
MAX_BARS = 40
MAX_POSITIONS = 60
# Letters stacked at a position of a sequence logo, most probable first.
MAX_LETTERS = 4


def together(draw: Callable[[Distribution], dict[str, Any]]) -> Renderer:
    """A renderer that draws the distribution of all codes at once."""
    return lambda decoder, z: draw(decode(decoder, z))


def one_by_one(render: Callable[[Distribution], Any]) -> Renderer:
    """A renderer by a user's function of the distribution of one code, decoded as a batch of one."""
    return lambda decoder, z: custom([render(decode(decoder, row[None])) for row in z])


def automatic(p: Distribution, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Probabilities of categorical distributions, images of means that look like images, and else mean ± sd."""
    base = p
    while isinstance(base, Independent):
        base = base.base_dist
    if isinstance(base, Categorical | OneHotCategorical):
        probs = base.probs
        return logo(probs, names) if probs.ndim == 3 else ranking(probs.flatten(1), names)
    mean = _known(p, "mean")
    if _is_image(mean):
        return images(mean)
    return bars(mean.flatten(1), _known(p, "stddev").flatten(1), names)


def images(values: Tensor, size: tuple[int, int] | None = None, low: float = 0.0, high: float = 1.0) -> dict[str, Any]:
    """Images ``(n, h, w)``, ``(n, 3, h, w)`` or ``(n, h, w, 3)``, or rows of numbers with the `size` of the images."""
    x = values.detach().cpu().double()
    x = x.reshape(len(x), *size) if size else x
    x = x.movedim(1, -1) if x.ndim == 4 and x.shape[-1] not in (1, 3) else x
    x = x[..., 0] if x.ndim == 4 and x.shape[-1] == 1 else x
    pixels = ((x - low) / (high - low)).nan_to_num().clamp(0, 1).mul(255).round().to(torch.uint8).contiguous()
    return {
        "kind": "images",
        "height": pixels.shape[1],
        "width": pixels.shape[2],
        "channels": 3 if pixels.ndim == 4 else 1,
        "count": len(pixels),
        "data": base64.b64encode(pixels.numpy().tobytes()).decode(),
    }


def lines(ends: np.ndarray) -> dict[str, Any]:
    """Stick figures: both ends of each line, ``(n, lines, 2, 2)``."""
    return {"kind": "lines", "frames": rounded(ends.reshape(len(ends), -1)), "count": len(ends)}


def ranking(probs: Tensor, names: Sequence[str] | None = None, noun: str = "category") -> dict[str, Any]:
    """Named probabilities ``(n, k)``; the page lists what was gained and lost since the start of the path."""
    known = list(names) if names is not None else [f"{noun} {i}" for i in range(probs.shape[1])]
    return {"kind": "ranking", "names": known, "frames": rounded(probs), "count": len(probs)}


def bars(mean: Tensor, stddev: Tensor, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Means and standard deviations ``(n, k)`` of the first features."""
    known = list(names) if names is not None else [f"x{i + 1}" for i in range(mean.shape[1])]
    parts = (rounded(x[:, :MAX_BARS]) for x in (mean, stddev))
    return {
        "kind": "bars",
        "names": known[:MAX_BARS],
        "left_out": max(0, mean.shape[1] - MAX_BARS),
        "count": len(mean),
        **dict(zip(("mean", "stddev"), parts, strict=True)),
    }


def logo(probs: Tensor, letters: Sequence[str] | None = None) -> dict[str, Any]:
    r"""A sequence logo of ``(n, positions, letters)``: heights are probabilities times :math:`\log_2 K - H` bits."""
    known = list(letters) if letters is not None else [str(i) for i in range(probs.shape[-1])]
    p = probs[:, :MAX_POSITIONS].detach().cpu().double()
    bits = np.log2(p.shape[-1]) + torch.xlogy(p, p).sum(-1) / np.log(2)
    top = p.topk(min(MAX_LETTERS, p.shape[-1]), -1)
    frames = [
        [
            [[known[k], round(q * b, 3)] for k, q in zip(ks, qs, strict=True)]
            for ks, qs, b in zip(index, value, bit, strict=True)
        ]
        for index, value, bit in zip(top.indices.tolist(), top.values.tolist(), bits.tolist(), strict=True)
    ]
    return {"kind": "logo", "frames": frames, "count": len(p), "bits": float(np.log2(p.shape[-1]))}


def custom(shown: Sequence[Any]) -> dict[str, Any]:
    """What a user's function returned for each frame: images of one shape, or pieces of HTML."""
    if all(isinstance(x, str) for x in shown):
        return {"kind": "html", "frames": list(shown), "count": len(shown)}
    arrays = [_image(x) for x in shown]
    return images(torch.stack(arrays))


def _image(x: Any) -> Tensor:
    """One image ``(h, w)`` or ``(h, w, 3)`` with values from 0 to 1; bytes are divided by 255."""
    array = torch.as_tensor(np.asarray(x.detach().cpu() if isinstance(x, Tensor) else x))
    array = array / 255 if array.dtype == torch.uint8 else array
    while array.ndim > 2 and array.shape[0] == 1:
        array = array[0]
    if array.ndim == 3 and array.shape[-1] not in (1, 3) and array.shape[0] == 3:
        array = array.movedim(0, -1)
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[-1] not in (1, 3)):
        raise ValueError(
            f"render returned an array of shape {tuple(array.shape)}. Return an image of shape (h, w) or (h, w, 3) "
            "with values from 0 to 1, or a string of HTML."
        )
    return array[..., 0] if array.ndim == 3 and array.shape[-1] == 1 else array


def _is_image(mean: Tensor) -> bool:
    smallest = min(mean.shape[-2:]) if mean.ndim >= 3 else 0
    gray = mean.ndim == 3 or (mean.ndim == 4 and mean.shape[1] in (1, 3))
    return gray and smallest >= 8


def _known(p: Distribution, name: str) -> Tensor:
    """The mean or standard deviation; that of samples where the family does not know it."""
    try:
        return getattr(p, name).detach()
    except NotImplementedError:
        samples = p.sample(torch.Size([64]))
        return samples.mean(0) if name == "mean" else samples.std(0)


def rounded(x: Tensor | np.ndarray, digits: int = 4) -> list[Any]:
    """Nested lists of numbers with a few digits; None for what is not finite, which JSON has no word for."""
    array = np.asarray(x.detach().cpu() if isinstance(x, Tensor) else x, dtype=float)
    if np.isfinite(array).all():
        return array.round(digits).tolist()
    known = array.round(digits).astype(object)
    known[~np.isfinite(array)] = None
    return known.tolist()
