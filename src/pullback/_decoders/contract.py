"""The decoder contract, in one place.

A decoder is any callable that maps latent codes ``z`` of shape ``(*batch, d)`` to a `torch.distributions.Distribution`
whose ``batch_shape`` starts with ``batch``. Further batch dimensions are independent features, so a plain
``Normal(mu, sigma)`` of shape ``(n, D)`` is a decoder of ``D`` features. Nothing else is asked of it: it may be a lambda,
an ``nn.Module``, or a method.

The geometry differentiates the decoder and compares decodings of neighbouring codes, so the decoder must be a *function*:
the same code must always give the same distribution, whatever else is in the batch. `decode` checks that, and says in one
sentence what to change where it does not hold.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.distributions import Distribution
from torch.nn.modules import module as nn_module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

_RANDOM = (
    "The decoder drew random numbers: decoding the same code twice gives two distributions. Switch dropout off "
    "(model.eval(), or F.dropout(x, training=False)) and return the distribution itself, not one around a sample."
)

Decoder = Callable[[Tensor], Distribution]


class DecoderError(ValueError):
    """The decoder breaks the contract; the message says how to mend it."""


def decode(decoder: Decoder, z: Tensor) -> Distribution:
    """Decodes ``z`` to ``p(x|z)`` and checks the contract.

    Raises `DecoderError` if the decoder is random (train mode, dropout, batch normalisation with batch statistics), does
    not return a distribution, or returns one whose batch shape does not start with that of ``z``.
    """
    check_codes(z)
    before = _random_state(z)
    guard = nn_module.register_module_forward_pre_hook(_guard())
    try:
        p = decoder(z)
    except (ValueError, RuntimeError) as error:
        sentence = _explanation(error)
        if sentence is None:
            raise
        raise DecoderError(sentence) from error
    finally:
        guard.remove()
    if _random_state(z) != before:
        raise DecoderError(_RANDOM)
    _check_distribution(p, z)
    return p


def observed(decoder: Decoder) -> Decoder:
    """The decoder the geometry looks at: ``decoder.observed`` where it has one (see `pullback.Extrapolated`), else itself."""
    return getattr(decoder, "observed", decoder)


@contextlib.contextmanager
def unvalidated() -> Iterator[None]:
    """Distributions built inside do not check their parameters: a NaN reaches the caller instead of ending the batch."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def check_codes(z: Tensor) -> None:
    """Raises unless ``z`` is a floating-point tensor of shape ``(*batch, d)``."""
    if not isinstance(z, Tensor):
        raise TypeError(
            f"Latent codes must be a torch.Tensor of shape (*batch, d), not {type(z).__name__}. Use torch.as_tensor(z)."
        )
    if not z.is_floating_point():
        raise TypeError(f"Latent codes must be floating point, not {z.dtype}. Use z.double().")
    if z.ndim == 0:
        raise ValueError("Latent codes must have shape (*batch, d); got a scalar. Use z.reshape(1) for d = 1.")


def check_finite(values: Tensor, z: Tensor, what: str = "parameters") -> None:
    """Raises a `DecoderError` that names the first code at which ``values``, of shape ``(*batch, ...)``, are not finite."""
    if torch.isfinite(values.sum()):
        return  # one pass instead of five; the sum of finite values may overflow, so otherwise look closer
    finite = torch.isfinite(values)
    if finite.all():
        return
    bad = ~finite.reshape(*z.shape[:-1], -1).all(-1)
    first = z[bad][0].tolist()
    raise DecoderError(
        f"The decoder returned NaN or infinite {what} at {int(bad.sum())} of {bad.numel()} codes, first at "
        f"z = {[round(x, 4) for x in first]}. Check the model there: bound its exponentials (softplus instead of exp), "
        "or keep the codes within the region it was trained on."
    )


def _check_distribution(p: object, z: Tensor) -> None:
    if isinstance(p, Tensor):
        raise DecoderError(
            "The decoder returned a tensor, not a distribution. Wrap it in the likelihood the model was trained with, for "
            "example `lambda z: torch.distributions.Bernoulli(logits=model(z))` or `Normal(model(z), sigma)`."
        )
    if not isinstance(p, Distribution):
        raise DecoderError(
            f"The decoder returned {type(p).__name__}, not a torch.distributions.Distribution. Return one distribution; for "
            "features of different kinds use pullback.Product(p, q, ...)."
        )
    batch = z.shape[:-1]
    if p.batch_shape[: len(batch)] != batch:
        raise DecoderError(
            f"The decoder was given codes of shape {tuple(z.shape)} and returned a distribution with batch shape "
            f"{tuple(p.batch_shape)}, which must start with {tuple(batch)}. Keep the leading dimensions of z: index from the "
            "right (z[..., 0], dim=-1), use flatten(-3) instead of view(n, -1), and do not squeeze."
        )


def _random_state(z: Tensor) -> object:
    if peek_interpreter_stack() is not None:
        return None  # inside vmap torch itself refuses random numbers
    if z.device.type == "cuda":
        return torch.cuda.default_generators[z.device.index or 0].get_offset()
    return torch.default_generator.get_state().numpy().tobytes()


def _guard() -> Callable[[nn.Module, object], None]:
    """A hook on every module the decoder calls, wherever it keeps them; modules of other threads are none of its business."""
    thread = threading.get_ident()

    def check(module: nn.Module, _inputs: object) -> None:
        if isinstance(module, (_DropoutNd, _BatchNorm)) and threading.get_ident() == thread:
            _refuse_batch_dependence(module)

    return check


def _refuse_batch_dependence(module: nn.Module) -> None:
    name = type(module).__name__
    if isinstance(module, _DropoutNd) and module.training and module.p > 0:
        raise DecoderError(
            f"The decoder is in train mode and has {name}, so its output is random. Call model.eval() first."
        )
    if isinstance(module, _BatchNorm) and module.training:
        raise DecoderError(
            f"The decoder is in train mode and has {name}, so each code's distribution depends on the rest of its batch. "
            "Call model.eval() first."
        )
    if isinstance(module, _BatchNorm) and module.running_mean is None:
        raise DecoderError(
            f"The decoder has {name} without running statistics, so each code's distribution depends on the rest of its batch. "
            "Build it with track_running_stats=True, or use LayerNorm or GroupNorm."
        )


def _explanation(error: Exception) -> str | None:
    """The contract's sentence where torch's error is a symptom of breaking it."""
    if "called random operation" in str(error):
        return _RANDOM
    return _invalid_parameter(error) if "Expected parameter" in str(error) else None


def _invalid_parameter(error: Exception) -> str:
    reason = str(error).split("\n")[0][:240]
    return (
        "The decoder built a distribution with invalid parameters (NaN, or outside their range). Check the model at these codes: "
        f"use softplus for scales and rates, logits instead of probabilities. torch says: {reason}"
    )
