"""Questions asked once per decoder: is it a function of each code alone, and how can it be differentiated?

A decoder is looked at with three codes: decoded twice, and one by one. So it is refused if it is random or mixes the
codes of a batch, without a word about what other threads draw and without hooks that stay. How it can be differentiated
is asked when a derivative is wanted: forward mode with torch's own kernels, forward mode with plain ones, or reverse
mode twice. The answers are remembered for as long as the decoder lives, for each dimension, dtype and device of its
codes.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from pullback._autodiff.derivatives import Map, jet, pushforward
from pullback._autodiff.torch_internals import batch_norms, differentiable_kernels, dropouts, in_transform, unvalidated
from pullback._decoders.memory import Memory
from pullback._decoders.networks import networks
from pullback._decoders.refusals import (
    DETACHED,
    MIXING,
    RANDOM,
    DecoderError,
    batch_dependence,
    invalid_parameter,
    leaves_torch,
    no_derivative,
    refused_codes,
    whole_model,
    wrong_output,
)
from pullback._families.composite import leaves
from pullback._families.rules import fixed_parameter
from pullback._families.score import tensors_in

Decoder = Callable[[Tensor], Distribution]

# Two decodings of one code differ by rounding; kernels chosen by the size of the batch, and TensorFloat-32, lose half
# of the digits. Statistics of a batch of three change the parameters by more than a tenth.
_SAME = 10.0


@dataclass(frozen=True)
class Facts:
    """What is known of a decoder that was looked at.

    Attributes:
        family: the type of the distributions it returns.
        num_features: numbers that the distribution of one code holds.
        layers: its layers whose mode matters, dropout and batch normalization, which may change between calls.
    """

    family: type[Distribution]
    num_features: int
    layers: tuple[weakref.ref[nn.Module], ...]

    def check_modes(self) -> None:
        """Raises if the decoder was switched to train mode since."""
        for layer in self.layers:
            known = layer()
            sentence = None if known is None else batch_dependence(known)
            if sentence is not None:
                raise DecoderError(sentence)


@dataclass(frozen=True)
class Route:
    """How a decoder can be differentiated: with torch's own kernels or with plain ones, in forward mode or not."""

    plain: bool = False
    forward: bool = True


_FACTS, _ROUTES, _CONSTANTS = Memory(), Memory(), Memory()


def _detail(z: Tensor) -> object:
    return z.shape[-1], z.dtype, z.device


def facts(decoder: Decoder, z: Tensor) -> Facts | None:
    """What is known of the decoder at codes ``(N, d)``; looks at it if nothing is. None without a code to look with."""
    known = _FACTS.get(decoder, _detail(z))
    if known is None and not in_transform() and (codes := _few(z)) is not None:
        known = _look(decoder, codes)
        _FACTS.put(decoder, _detail(z), known)
    return known


def route(decoder: Decoder, z: Tensor) -> Route:
    """How the decoder can be differentiated at codes ``(N, d)``; asks if it is not known."""
    known = _ROUTES.get(decoder, _detail(z))
    if known is None and not in_transform() and (codes := _few(z)) is not None:
        facts(decoder, z)
        with torch.inference_mode(False), differentiable_kernels():
            known = _ask(decoder, codes.clone())
        _ROUTES.put(decoder, _detail(z), known)
    return known or Route()


def has_constants(decoder: Decoder, z: Tensor) -> bool:
    """Whether what the family's embedding takes for constants of the model (a total count, degrees of freedom) is not
    computed from the codes; asks if it is not known. Equal values do not tell: the next path may change them."""
    known = _CONSTANTS.get(decoder, _detail(z))
    if known is None and not in_transform() and (codes := _few(z)) is not None:
        with torch.inference_mode(False), torch.enable_grad(), unvalidated():
            x = codes.clone().requires_grad_()
            parameters = [fixed_parameter(part) for part in leaves(decoder(x))]
            known = not any(depends_on(y, x) for y in parameters if y is not None)
        _CONSTANTS.put(decoder, _detail(z), known)
    return True if known is None else known


def depends_on(y: Tensor, x: Tensor) -> bool:
    """Whether torch sees y computed from x."""
    return y.requires_grad and torch.autograd.grad(y.sum(), x, retain_graph=True, allow_unused=True)[0] is not None


def called(decoder: Decoder, z: Tensor) -> Distribution:
    """The decoder's output; invalid parameters get the contract's sentence, errors of the model itself pass through."""
    try:
        p = decoder(z)
    except ValueError as error:
        with unvalidated():
            works = _works(lambda: decoder(z))
        if not works:
            raise
        raise DecoderError(invalid_parameter(error)) from error
    sentence = wrong_output(p, z)
    if sentence is not None:
        raise DecoderError(sentence)
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
            p = _first_call(decoder, codes)
        together = _tensors(p)
        if not _same(together, _tensors(called(decoder, codes))):
            raise DecoderError(RANDOM)
        for i in range(len(codes)):
            try:
                alone = _tensors(called(decoder, codes[i : i + 1]))
            except (ValueError, RuntimeError) as error:
                raise DecoderError(f"{MIXING} It fails for a single code: {error}") from error
            if not _same([_row(x, y, i) for x, y in zip(together, alone, strict=True)], alone):
                raise DecoderError(MIXING)
    size = sum(x.numel() for x in together) // len(codes)
    return Facts(type(p), size, tuple(weakref.ref(layer) for layer in layers))


def _first_call(decoder: Decoder, codes: Tensor) -> Distribution:
    """As `called`; a whole model in place of its decoder, and codes that the decoder does not take, get a sentence."""
    try:
        return called(decoder, codes)
    except (torch.OutOfMemoryError, NotImplementedError, DecoderError):
        raise
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise DecoderError(whole_model(decoder, codes, error) or refused_codes(codes, error)) from error


@contextlib.contextmanager
def _watched(decoder: Decoder) -> Iterator[list[nn.Module]]:
    """The layers that run inside and whose mode matters; those that depend on the batch are refused before they run."""
    seen: dict[nn.Module, None] = {}
    thread = threading.get_ident()

    def check(layer: nn.Module, _: object) -> None:
        if threading.get_ident() == thread:
            seen[layer] = None
            sentence = batch_dependence(layer)
            if sentence is not None:
                raise DecoderError(sentence)

    layers = [m for n in networks(decoder) for m in n.modules() if isinstance(m, (batch_norms, dropouts))]
    hooks = [layer.register_forward_pre_hook(check) for layer in dict.fromkeys(layers)]
    found: list[nn.Module] = []
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
        found.extend(seen)


def _tensors(p: Distribution) -> list[Tensor]:
    return [x for x in tensors_in(p) if x.is_floating_point()]


def _row(together: Tensor, alone: Tensor, i: int) -> Tensor:
    """The part of a batch's tensor that belongs to code i; all of it where it is the same for all codes."""
    return together if together.shape == alone.shape else together[i : i + 1]


def _same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(map(_close, first, second))


def _close(x: Tensor, y: Tensor) -> bool:
    size = float(y.nan_to_num(0, 0, 0).abs().amax()) if y.numel() else 0.0
    tolerance = _SAME * torch.finfo(x.dtype).eps ** 0.5
    return x.shape == y.shape and torch.allclose(x, y, rtol=tolerance, atol=tolerance * size, equal_nan=True)


def _ask(decoder: Decoder, codes: Tensor) -> Route:
    """The first way that gives second derivatives of all kinds; else one that gives first ones."""
    moving = _moving(decoder, codes)
    if not moving:
        return Route()

    def f(z: Tensor) -> tuple[Tensor, ...]:
        tensors = _tensors(decoder(z))
        return tuple(tensors[i] for i in moving)

    if _works(lambda: _differentiate(f, codes, forward=True, twice=True)):
        return Route()
    with differentiable_kernels(plain=True):
        for forward, twice in [(True, True), (False, True), (True, False)]:
            if _works(lambda: _differentiate(f, codes, forward=forward, twice=twice)):  # noqa: B023
                return Route(plain=True, forward=forward)
        errors = [_error(lambda: pushforward(f, codes, forward=forward)) for forward in (True, False)]  # noqa: B023
    if errors[1] is None:
        return Route(plain=True, forward=False)
    raise NotImplementedError(no_derivative(errors[0] or errors[1], errors[1]))


def _moving(decoder: Decoder, codes: Tensor) -> list[int]:
    """The places of the tensors of a decoded distribution that torch can differentiate in the codes.

    Refuses a decoder whose output depends on the codes, but in no way that torch knows of.
    """
    x = codes.clone().requires_grad_()
    with torch.enable_grad():
        try:
            tensors = _tensors(decoder(x))
            moving = [i for i, y in enumerate(tensors) if depends_on(y, x)]
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError) as error:
            raise DecoderError(leaves_torch(error)) from error
    varies = any(not torch.equal(y[:1], y[2:]) for y in tensors if y.ndim and len(y) == len(codes))
    if varies and not moving:
        raise DecoderError(DETACHED)
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


def _works(call: Callable[[], object]) -> bool:
    return _error(call) is None


def _error(call: Callable[[], object]) -> Exception | None:
    """What torch says against it. Out of memory is no answer."""
    try:
        call()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, UserWarning) as error:
        return error
    return None
