"""The decoder contract, in one place.

A decoder is any callable that maps latent codes ``z`` of shape ``(N, d)`` to a `torch.distributions.Distribution` whose
``batch_shape`` starts with ``N``. Further batch dimensions are independent features, so a plain ``Normal(mu, sigma)``
of shape ``(N, D)`` is a decoder of ``D`` features. Nothing else is asked of it: it may be a lambda, an ``nn.Module``,
or a method. It must be a *function*: the same code always gives the same distribution, whatever else is in the batch.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution

from pullback._autodiff.torch_internals import differentiable_kernels, in_transform
from pullback._autodiff.torch_internals import unvalidated as unvalidated
from pullback._decoders.networks import reference
from pullback._decoders.probe import Decoder as Decoder
from pullback._decoders.probe import DecoderError as DecoderError
from pullback._decoders.probe import called, check_mode, facts, route
from pullback._progress import decoded


def decode(decoder: Decoder, z: Tensor) -> Distribution:
    """Decodes codes ``(N, d)`` to ``p(x|z)``; a `DecoderError` where the contract is broken."""
    if z.ndim != 2:
        raise ValueError(f"Decoders are called with codes of shape (N, d), got {tuple(z.shape)}. Use z.reshape(-1, d).")
    decoded(len(z))
    if known := facts(decoder, z):
        for layer in known.layers:
            check_mode(layer)
    wanted = in_transform() or (torch.is_grad_enabled() and z.requires_grad)
    with differentiable_kernels(plain=route(decoder, z).plain) if wanted else contextlib.nullcontext():
        return called(decoder, z)


def observed(decoder: Decoder) -> Decoder:
    """What the geometry looks at: ``decoder.observed`` where it has one (`pullback.Extrapolated`), else the decoder."""
    return getattr(decoder, "observed", decoder)


def observe(decoder: Decoder, z: Tensor) -> Distribution:
    """What the geometry sees of codes ``(N, d)``."""
    return decode(observed(decoder), z)


def as_codes(
    z: Any, like: object = None, *, a_set: bool = False, least: int = 1, finite: bool = False, dim: int | None = None
) -> Tensor:
    """Codes as a tensor ``(*batch, d)``: the first line of every public function with codes.

    They get the dtype and the device of `like`, a metric, a decoder, a module or a tensor, and keep their gradient.
    Where that does not tell, tensors and floating-point arrays stay what they are, other numbers get torch's default
    dtype. Further options say what is refused: what is no set ``(n, d)`` of at `least` n, not finite, or of another d.
    """
    # A list of Python's numbers has no dtype of its own.
    has_dtype = isinstance(z, (Tensor, np.ndarray)) or _holds_tensors(z)
    z, model = real_numbers(z, "Latent codes"), reference(like)
    if model is not None:
        z = z.to(model)
    elif not (has_dtype and z.is_floating_point()):
        z = z.to(torch.get_default_dtype())
    if z.ndim == 0:
        raise ValueError("Latent codes must have shape (*batch, d); got a scalar. Use z.reshape(1) for d = 1.")
    if z.shape[-1] == 0:
        raise ValueError(f"Latent codes must have at least one dimension; got shape {tuple(z.shape)}.")
    if z.dtype in (torch.float16, torch.bfloat16):
        raise DecoderError(
            f"Codes or model are {z.dtype}, whose two or three digits are lost in differences of neighboring codes. "
            "Use `model.float()` and `codes.float()`."
        )
    if dim is not None and z.shape[-1] != dim:
        raise ValueError(
            f"Codes and tangents of {dim} dimensions are expected, of the same model; got shape {tuple(z.shape)}."
        )
    if a_set and (z.ndim != 2 or len(z) < least):
        raise ValueError(
            f"A set of codes must have shape (n, d), with at least {'one code' if least == 1 else f'{least} codes'}; "
            f"got {tuple(z.shape)}. Use codes.flatten(0, -2), and codes[None] for a single code."
        )
    if finite and not z.isfinite().all():
        bad = ~z.isfinite().all(-1).flatten()
        raise ValueError(
            f"{int(bad.sum())} of {len(bad)} rows are NaN or infinite, first number {int(bad.nonzero()[0])}. Drop "
            "them: codes[torch.isfinite(codes).all(-1)]."
        )
    return z


def real_numbers(z: Any, what: str) -> Tensor:
    """An array or a list as a tensor; a TypeError that says what it should have been."""
    try:
        if _holds_tensors(z):
            z = torch.stack([torch.as_tensor(part) for part in z])
        if isinstance(z, Tensor) and not z.is_complex():
            return z
        array = np.asarray(z)
        if isinstance(z, np.ndarray) and array.dtype == object:
            array = array.astype(np.float64)
        if array.dtype.kind not in "fiub":
            raise TypeError(f"got {array.dtype}")
        # A copy, since torch warns of memory that it may not write to, and does not know negative strides.
        return torch.from_numpy(np.array(array, order="C"))
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{what} must be a tensor or an array of real numbers; {type(z).__name__} could not be read as one "
            f"({error}). Use torch.as_tensor(z), and z.real of complex numbers."
        ) from error


def _holds_tensors(z: Any) -> bool:
    return isinstance(z, (list, tuple)) and any(isinstance(part, Tensor) for part in z)


def check_finite(values: Tensor, z: Tensor, what: str = "parameters") -> None:
    """Raises a `DecoderError` that names the first code at which ``values (*batch, ...)`` are not finite."""
    # One pass instead of five. The sum of finite values may overflow, so otherwise look closer.
    if torch.isfinite(values.sum()):
        return
    bad = ~torch.isfinite(values).reshape(*z.shape[:-1], -1).all(-1)
    if bad.any():
        first = [round(x, 4) for x in z[bad][0].tolist()]
        raise DecoderError(
            f"The decoder returned NaN or infinite {what} at {int(bad.sum())} of {bad.numel()} codes, first at z = "
            f"{first}. Check the model there: bound its exponentials (softplus instead of exp), or keep the codes "
            "within the region it was trained on."
        )
