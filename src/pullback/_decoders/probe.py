"""What is asked of a decoder, once, and what is said to one that breaks the contract.

A decoder is looked at with three codes: decoded twice, and one by one. So it is refused if it is random or mixes the
codes of a batch. How it can be differentiated is asked when a derivative is wanted: forward mode with torch's own
kernels, forward mode with plain ones, or reverse mode twice. The answers are remembered for as long as the decoder
lives, for each dimension, dtype and device of its codes.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from pullback._autodiff.derivatives import Map, depends_on, jet, pushforward
from pullback._autodiff.torch_internals import batch_norms, differentiable_kernels, dropouts, in_transform, unvalidated
from pullback._decoders.networks import memory, networks
from pullback._families.composite import leaves
from pullback._families.rules import fixed_parameter
from pullback._families.score import in_batch, tensors_in

Decoder = Callable[[Tensor], Distribution]

# Two decodings of one code differ by rounding; kernels chosen by the size of the batch, and TensorFloat-32, lose half
# of the digits. Statistics of a batch of three change the parameters by more than a tenth.
_SAME = 10.0
# Where libraries keep the decoder of a model: diffusers (`decode`), plain and Lightning modules and pythae (`decoder`),
# scvi-tools (`generative`).
PLACES = ("decode", "decoder", "generative")
_MIXING = (
    "The decoder must give for a batch what it gives for its codes one by one: no statistics of the batch, no sum or "
    "recurrence over its codes, no shared noise. Use batch_first=True in recurrences and attention, LayerNorm or "
    "GroupNorm instead of statistics of the batch, and model.eval()."
)
_NO_DERIVATIVE = (
    "or use a metric that needs no derivative of the decoder: pullback.DivergenceMetric(decoder, "
    "method=pullback.divergences.CentralDifference())."
)


class DecoderError(ValueError):
    """The decoder breaks the contract; the message says how to mend it.

    >>> import torch, pullback as pb
    >>> pb.FisherRaoMetric(torch.nn.Linear(2, 3)).tensor([0.0, 0.0])
    Traceback (most recent call last):
    pullback...DecoderError: The decoder returned a tensor, not a distribution. Say which...
    """


class Facts(NamedTuple):
    """How many numbers the distribution of one code holds, and the layers that run and whose mode may change."""

    num_features: int
    layers: weakref.WeakSet[nn.Module]


class Route(NamedTuple):
    """How a decoder can be differentiated: with torch's own kernels or with plain ones, in forward mode or not."""

    plain: bool = False
    forward: bool = True


def once(question: Callable[[Decoder, Tensor], Any], decoder: Decoder, z: Tensor) -> Any:
    """The answer to a question about the decoder at codes ``(N, d)``; None in a transform and without a finite code."""
    answers, detail = memory(decoder), (question, z.shape[-1], z.dtype, z.device)
    if detail not in answers and not in_transform() and (codes := _few(z)) is not None:
        answers[detail] = question(decoder, codes)
    return answers.get(detail)


def facts(decoder: Decoder, z: Tensor) -> Facts | None:
    """What is known of the decoder at codes ``(N, d)``; None without a code to look with."""
    return once(_look, decoder, z)


def route(decoder: Decoder, z: Tensor) -> Route:
    """How the decoder can be differentiated at codes ``(N, d)``."""
    return once(_ask, decoder, z) or Route()


def has_constants(decoder: Decoder, z: Tensor) -> bool:
    """Whether what the family's embedding takes for constants of the model (a total count, degrees of freedom) is not
    computed from the codes. Equal values do not tell: the next path may change them."""
    return once(_fixed, decoder, z) is not False


def _few(z: Tensor) -> Tensor | None:
    """Three codes to look with: those given where there are as many, else others a per cent away."""
    z = z.detach()
    z = z[torch.isfinite(z).all(-1)]
    if len(z) == 0:
        return None
    first, last = z[0], z[-1]
    near = 1.01 * first + 1e-3 * (first == 0).to(first)
    return torch.stack([first, near, 0.99 * first if len(z) == 1 else last])


def _fixed(decoder: Decoder, codes: Tensor) -> bool:
    with torch.inference_mode(False), torch.enable_grad(), unvalidated():
        x = codes.clone().requires_grad_()
        parameters = [fixed_parameter(part) for part in leaves(decoder(x))]
        return not any(depends_on(y, x) for y in parameters if y is not None)


def called(decoder: Decoder, z: Tensor) -> Distribution:
    """The decoder's output; invalid parameters get the contract's sentence, errors of the model itself pass through."""
    check_callable(decoder)
    try:
        p = decoder(z)
    except ValueError as error:
        with unvalidated():
            decoder(z)  # fails again if the error is the model's own
        raise DecoderError(
            "The decoder built a distribution with invalid parameters (NaN, or outside their range). Check the model "
            "at these codes: use softplus for scales and rates, logits instead of probabilities. torch says: "
            f"{_first_line(error)}"
        ) from error
    check_output(p, z)
    return p


def decoded(decoder: Decoder, z: Tensor) -> Distribution:
    """What a decoder, which takes codes ``(N, d)``, makes of codes ``(*batch, d)``."""
    if z.ndim == 2:
        return decoder(z)
    rows = z.reshape(-1, z.shape[-1])
    check_output(p := decoder(rows), rows)
    return in_batch(p, decoder(rows[:1] if len(rows) > 1 else rows.expand(2, -1)), z.shape[:-1])


def check_callable(decoder: object) -> None:
    """Raises if what stands in the place of a decoder cannot be called."""
    name = type(decoder).__name__
    if callable(decoder):
        return
    if hasattr(decoder, "decoder") or hasattr(decoder, "tensor"):
        raise TypeError(f"A decoder is expected, not the metric {name}. Give the decoder itself, as in metric.decoder.")
    raise TypeError(
        f"A decoder is a function from codes (N, d) to a torch.distributions.Distribution, not {name}. "
        "For example `lambda z: torch.distributions.Bernoulli(logits=model(z))`."
    )


def check_output(p: object, z: Tensor) -> None:
    """Raises unless a decoder returned one distribution for each of the codes ``(N, d)``."""
    if isinstance(p, Tensor):
        raise DecoderError(
            "The decoder returned a tensor, not a distribution. Say which likelihood the model was trained with: "
            "pullback.as_decoder(model, family=torch.distributions.Bernoulli) for logits, or in general "
            "`lambda z: torch.distributions.Bernoulli(logits=model(z))`."
        )
    if isinstance(p, (tuple, list)) and any(isinstance(part, Tensor) for part in p):
        raise DecoderError(
            f"The decoder returned {type(p).__name__}, not a torch.distributions.Distribution. If it holds a mean and "
            "a log-variance, use pullback.as_decoder(model, family=torch.distributions.Normal)."
        )
    if not isinstance(p, Distribution):
        raise DecoderError(
            f"The decoder returned {type(p).__name__}, not a torch.distributions.Distribution. Return one "
            "distribution; for features of different kinds use pullback.Product(p, q, ...). For the output of a model "
            "of another library use pullback.as_decoder(model, family=torch.distributions.Normal), with the "
            "likelihood it was trained with."
        )
    batch = z.shape[:-1]
    if p.batch_shape[: len(batch)] != batch:
        raise DecoderError(
            f"The decoder was given codes of shape {tuple(z.shape)} and returned a distribution with batch shape "
            f"{tuple(p.batch_shape)}, which must start with {tuple(batch)}. Keep the first dimension of z: do not "
            "squeeze, and use flatten(1) or view(len(z), -1)."
        )


def check_mode(layer: nn.Module) -> None:
    """Raises if the layer makes a decoder random or dependent on the rest of the batch."""
    name = type(layer).__name__
    if isinstance(layer, dropouts) and layer.training and layer.p > 0:
        raise DecoderError(
            f"The decoder is in train mode and has {name}, so its output is random. Call model.eval() first."
        )
    if isinstance(layer, batch_norms) and layer.training:
        raise DecoderError(
            f"The decoder is in train mode and has {name}, so each code's distribution depends on the rest of its "
            "batch. Call model.eval() first."
        )
    if isinstance(layer, batch_norms) and layer.running_mean is None:
        raise DecoderError(
            f"The decoder has {name} without running statistics, so each code's distribution depends on the rest of "
            "its batch. Build it with track_running_stats=True, or use LayerNorm or GroupNorm."
        )


def _look(decoder: Decoder, codes: Tensor) -> Facts:
    with torch.no_grad():
        try:
            with _watched(decoder) as layers:
                together = _tensors(called(decoder, codes))
        except (torch.OutOfMemoryError, NotImplementedError, DecoderError):
            raise
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
            if _is_ours(error):
                raise
            raise DecoderError(_refused_codes(decoder, codes, _first_line(error))) from error
        again = _tensors(called(decoder, codes))
        if len(together) != len(again) or not all(map(_close, together, again)):
            raise DecoderError(
                "The decoder drew random numbers: decoding the same code twice gives two distributions. Switch dropout "
                "off (model.eval(), or F.dropout(x, training=False)) and return the distribution itself, not one "
                "around a sample."
            )
        for i in range(len(codes)):
            try:
                alone = _tensors(called(decoder, codes[i : i + 1]))
            except (ValueError, RuntimeError) as error:
                raise DecoderError(f"{_MIXING} It fails for a single code: {error}") from error
            # What is the same for all codes has no row of its own.
            rows = [x if x.shape == y.shape else x[i : i + 1] for x, y in zip(together, alone, strict=True)]
            if not all(map(_close, rows, alone)):
                raise DecoderError(_MIXING)
    return Facts(sum(x.numel() for x in together) // len(codes), layers)


@contextlib.contextmanager
def _watched(decoder: Decoder) -> Iterator[weakref.WeakSet[nn.Module]]:
    """The layers that run inside and whose mode matters; those that depend on the batch are refused before they run."""
    seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
    thread = threading.get_ident()

    def check(layer: nn.Module, _: object) -> None:
        if threading.get_ident() == thread:
            seen.add(layer)
            check_mode(layer)

    layers = [m for n in networks(decoder) for m in n.modules() if isinstance(m, (batch_norms, dropouts))]
    hooks = [layer.register_forward_pre_hook(check) for layer in dict.fromkeys(layers)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _is_ours(error: Exception) -> bool:
    """Whether this library refused something: then the sentence says already what to do."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return isinstance(error, (TypeError, ValueError)) and frame.f_globals["__name__"].startswith("pullback.")


def _refused_codes(model: object, z: Tensor, reason: str) -> str:
    """For a decoder that fails at its first codes, perhaps because it is a whole model with a part that decodes."""
    for place in PLACES:
        if callable(getattr(model, place, None)):
            return (
                f"{type(model).__name__} does not take codes of shape {tuple(z.shape)} ({reason}), but it has {place}: "
                "use pullback.as_decoder(model, family=torch.distributions.Bernoulli), with the likelihood it was "
                "trained with."
            )
    return (
        f"The decoder does not take codes of {z.shape[-1]} dimensions, {z.dtype}, on {z.device}: {reason}. "
        "Give codes of its latent dimension, with its dtype and device. It is called with any number N of codes (N, "
        "d): what else it needs must not have a row per observation, and codes of another shape are reshaped inside, "
        "as in `pullback.as_decoder(lambda z: model.decode(z.reshape(-1, channels, height, width)), family=...)`."
    )


def _tensors(p: Distribution) -> list[Tensor]:
    return [x for x in tensors_in(p) if x.is_floating_point()]


def _close(x: Tensor, y: Tensor) -> bool:
    size = float(y.nan_to_num(0, 0, 0).abs().amax()) if y.numel() else 0.0
    tolerance = _SAME * torch.finfo(x.dtype).eps ** 0.5
    return x.shape == y.shape and torch.allclose(x, y, rtol=tolerance, atol=tolerance * size, equal_nan=True)


def _ask(decoder: Decoder, codes: Tensor) -> Route:
    """The first way that gives second derivatives of all kinds; else one that gives first ones."""
    facts(decoder, codes)

    def f(z: Tensor) -> tuple[Tensor, ...]:
        tensors = _tensors(decoder(z))
        return tuple(tensors[i] for i in moving)

    own, *plain = Route(), Route(plain=True), Route(plain=True, forward=False)
    errors = []
    with torch.inference_mode(False):
        codes = codes.clone()
        with differentiable_kernels():
            moving = _moving(decoder, codes)
        if not moving:
            return own
        for twice, ways in ((True, (own, *plain)), (False, plain)):
            for way in ways:
                try:
                    with differentiable_kernels(plain=way.plain):
                        _differentiate(f, codes, forward=way.forward, twice=twice)
                    return way
                except torch.OutOfMemoryError:  # is no answer
                    raise
                except (RuntimeError, ValueError, UserWarning) as error:
                    errors.append(_first_line(error))
    raise NotImplementedError(
        f"The decoder uses an operation without a forward-mode derivative ({errors[-2]}) and without a second reverse "
        f"one ({errors[-1]}). Write that operation out in elementary ones, {_NO_DERIVATIVE}"
    )


def _moving(decoder: Decoder, codes: Tensor) -> list[int]:
    """The places of the tensors of a decoded distribution that torch can differentiate in the codes."""
    x = codes.clone().requires_grad_()
    with torch.enable_grad():
        try:
            tensors = _tensors(decoder(x))
            moving = [i for i, y in enumerate(tensors) if depends_on(y, x)]
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError) as error:
            raise DecoderError(
                "The decoder cannot be differentiated: it fails when its codes require a gradient "
                f"({_first_line(error)}). Keep to torch's operations inside it (no numpy(), item() or tolist()), "
                f"{_NO_DERIVATIVE}"
            ) from error
    varies = any(not torch.equal(y[:1], y[2:]) for y in tensors if y.ndim and len(y) == len(codes))
    if varies and not moving:
        raise DecoderError(
            "The decoder's output depends on the codes, but torch cannot differentiate it: the codes are detached, or "
            "leave torch, on the way (detach(), .data, numpy(), torch.no_grad() or torch.inference_mode() inside the "
            f"decoder). Take that away, {_NO_DERIVATIVE}"
        )
    return moving


def _differentiate(f: Map, codes: Tensor, *, forward: bool, twice: bool) -> None:
    """Asks torch for all that geometry may ask for."""
    with torch.no_grad():
        pushforward(f, codes, forward=forward)
    if twice:
        with torch.enable_grad():
            x = codes.clone().requires_grad_()
            total = sum((t.square().sum() for t in pushforward(f, x, forward=forward)[1]), start=0 * x.sum())
            torch.autograd.grad(total, x)
        jet(f, codes, codes, codes[None])


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0][:240]
