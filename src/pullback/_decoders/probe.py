"""Questions asked once per decoder: is it a function of each code alone, and how can it be differentiated?

A decoder is looked at with three codes: decoded twice, and one by one. So it is refused if it is random or mixes the
codes of a batch. How it can be differentiated is asked when a derivative is wanted: forward mode with torch's own
kernels, forward mode with plain ones, or reverse mode twice. The answers are remembered for as long as the decoder
lives, for each dimension, dtype and device of its codes.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from pullback._autodiff.derivatives import Map, depends_on, jet, pushforward
from pullback._autodiff.torch_internals import batch_norms, differentiable_kernels, dropouts, in_transform, unvalidated
from pullback._decoders import refusals
from pullback._decoders.networks import Memory, networks
from pullback._decoders.refusals import DecoderError
from pullback._families.composite import leaves
from pullback._families.rules import fixed_parameter
from pullback._families.score import tensors_in

Decoder = Callable[[Tensor], Distribution]

# Two decodings of one code differ by rounding; kernels chosen by the size of the batch, and TensorFloat-32, lose half
# of the digits. Statistics of a batch of three change the parameters by more than a tenth.
_SAME = 10.0


@dataclass(frozen=True)
class Facts:
    """What is known of a decoder that was looked at: how many numbers the distribution of one code holds, and its
    layers whose mode matters, dropout and batch normalization, which may change between calls."""

    num_features: int
    layers: tuple[weakref.ref[nn.Module], ...]

    def check_modes(self) -> None:
        """Raises if the decoder was switched to train mode since."""
        for layer in self.layers:
            if (known := layer()) is not None:
                refusals.check_mode(known)


@dataclass(frozen=True)
class Route:
    """How a decoder can be differentiated: with torch's own kernels or with plain ones, in forward mode or not."""

    plain: bool = False
    forward: bool = True


_ANSWERS = Memory()


def once(question: Callable[[Decoder, Tensor], Any], decoder: Decoder, z: Tensor) -> Any:
    """The answer to a question about the decoder at codes ``(N, d)``; None in a transform and without a finite code."""
    detail = question, z.shape[-1], z.dtype, z.device
    known = _ANSWERS.get(decoder, detail)
    if known is None and not in_transform() and (codes := _few(z)) is not None:
        known = question(decoder, codes)
        _ANSWERS.put(decoder, detail, known)
    return known


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


def _fixed(decoder: Decoder, codes: Tensor) -> bool:
    with torch.inference_mode(False), torch.enable_grad(), unvalidated():
        x = codes.clone().requires_grad_()
        parameters = [fixed_parameter(part) for part in leaves(decoder(x))]
        return not any(depends_on(y, x) for y in parameters if y is not None)


def called(decoder: Decoder, z: Tensor) -> Distribution:
    """The decoder's output; invalid parameters get the contract's sentence, errors of the model itself pass through."""
    try:
        p = decoder(z)
    except ValueError as error:
        with unvalidated():
            if _error(partial(decoder, z)) is not None:
                raise
        raise DecoderError(
            "The decoder built a distribution with invalid parameters (NaN, or outside their range). Check the model "
            "at these codes: use softplus for scales and rates, logits instead of probabilities. torch says: "
            f"{refusals.first_line(error)}"
        ) from error
    refusals.check_output(p, z)
    return p


def _few(z: Tensor) -> Tensor | None:
    """Three codes to look with: those given where there are as many, else others a per cent away."""
    z = z.detach()
    z = z[torch.isfinite(z).all(-1)]
    if len(z) == 0:
        return None
    first, last = z[0], z[-1]
    near = 1.01 * first + 1e-3 * (first == 0)
    return torch.stack([first, near, 0.99 * first if len(z) == 1 else last])


def _look(decoder: Decoder, codes: Tensor) -> Facts:
    with torch.no_grad():
        with _watched(decoder) as layers:
            together = _tensors(_first_call(decoder, codes))
        if not _same(together, _tensors(called(decoder, codes))):
            raise DecoderError(refusals.RANDOM)
        for i in range(len(codes)):
            try:
                alone = _tensors(called(decoder, codes[i : i + 1]))
            except (ValueError, RuntimeError) as error:
                raise DecoderError(f"{refusals.MIXING} It fails for a single code: {error}") from error
            # What is the same for all codes has no row of its own.
            pairs = zip(together, alone, strict=True)
            if not _same([x if x.shape == y.shape else x[i : i + 1] for x, y in pairs], alone):
                raise DecoderError(refusals.MIXING)
    return Facts(sum(x.numel() for x in together) // len(codes), tuple(map(weakref.ref, layers)))


def _first_call(decoder: Decoder, codes: Tensor) -> Distribution:
    try:
        return called(decoder, codes)
    except (torch.OutOfMemoryError, NotImplementedError, DecoderError):
        raise
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise DecoderError(refusals.refused_codes(decoder, codes, error)) from error


@contextlib.contextmanager
def _watched(decoder: Decoder) -> Iterator[dict[nn.Module, None]]:
    """The layers that run inside and whose mode matters; those that depend on the batch are refused before they run."""
    seen: dict[nn.Module, None] = {}
    thread = threading.get_ident()

    def check(layer: nn.Module, _: object) -> None:
        if threading.get_ident() == thread:
            seen[layer] = None
            refusals.check_mode(layer)

    layers = [m for n in networks(decoder) for m in n.modules() if isinstance(m, (batch_norms, dropouts))]
    hooks = [layer.register_forward_pre_hook(check) for layer in dict.fromkeys(layers)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _tensors(p: Distribution) -> list[Tensor]:
    return [x for x in tensors_in(p) if x.is_floating_point()]


def _same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(map(_close, first, second))


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

    with torch.inference_mode(False), differentiable_kernels():
        codes = codes.clone()
        moving = _moving(decoder, codes)
        if not moving or _error(partial(_differentiate, f, codes, forward=True, twice=True)) is None:
            return Route()
        with differentiable_kernels(plain=True):
            for forward, twice in [(True, True), (False, True), (True, False)]:
                if _error(partial(_differentiate, f, codes, forward=forward, twice=twice)) is None:
                    return Route(plain=True, forward=forward)
            errors = [_error(partial(pushforward, f, codes, forward=forward)) for forward in (True, False)]
    if errors[1] is None:
        return Route(plain=True, forward=False)
    forward, reverse = (refusals.first_line(error or errors[1]) for error in errors)
    raise NotImplementedError(
        f"The decoder uses an operation without a forward-mode derivative ({forward}) and without a second reverse one "
        f"({reverse}). Write that operation out in elementary ones, {refusals.NO_DERIVATIVE}"
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
                f"({refusals.first_line(error)}). Keep to torch's operations inside it (no numpy(), item() or "
                f"tolist()), {refusals.NO_DERIVATIVE}"
            ) from error
    varies = any(not torch.equal(y[:1], y[2:]) for y in tensors if y.ndim and len(y) == len(codes))
    if varies and not moving:
        raise DecoderError(refusals.DETACHED)
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


def _error(call: Callable[[], object]) -> Exception | None:
    """What torch says against it. Out of memory is no answer."""
    try:
        call()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, UserWarning) as error:
        return error
    return None
