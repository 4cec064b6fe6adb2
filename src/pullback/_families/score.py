r"""Fisher information from the score alone, for families without a formula.

The noise is fixed: every evaluation draws with the same seed, so an estimate is a smooth function of the distribution,
and the caller's random state is left alone. The coordinates ``eta`` are the tensors the distribution holds. They may be
redundant (probabilities beside logits): the chain rule through all of them is still the chain rule.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Size, Tensor
from torch.distributions import Distribution, Transform

from pullback._autodiff.derivatives import directional
from pullback._autodiff.torch_internals import (
    depends_on_code,
    inverse_transform,
    set_batch_shape,
    transform_caches,
    unwrapped,
)
from pullback._families.information import Information, MissingRuleError
from pullback._numerics.random import RandomState, as_seed
from pullback._options import check_options


def score_information(p: Distribution, *, num_samples: int = 1000, random_state: RandomState = 0) -> Information:
    r"""The Fisher information :math:`I(\eta) = E_{x \sim p_\eta}[s s^\top]`, :math:`s = \partial_\eta \log p_\eta(x)`,
    as the mean over `num_samples` scores with fixed noise: unbiased, and positive semi-definite.

    Has the signature of a rule: ``pb.fisher.register(MyFamily)(pb.score_information)`` makes a family known.

    The relative error is of the order ``1 / √num_samples`` for one feature and averages out over many. The result says
    ``exact = False``, and metrics evaluate it code by code, so that a code's estimate does not depend on its neighbors.
    Amari and Nagaoka, *Methods of Information Geometry*, section 2.2.

    Args:
        p: a distribution with ``sample`` and ``log_prob``.
        num_samples: samples for each feature.
        random_state: fixes the noise.

    >>> from torch.distributions import Poisson
    >>> info = score_information(Poisson(torch.tensor(4.0)), num_samples=10_000)
    >>> bool((info.matrix[0, 0] - 1 / 4).abs() < 0.02)
    True
    """
    check_options(num_samples=num_samples)
    held, seed = _Held.of(p), as_seed(random_state)

    def root(eta: Tensor, u: Tensor) -> Tensor:
        with torch.no_grad(), fixed_noise(seed, eta.device):
            x = held.at(eta).sample(Size([num_samples]))
        tangents = u.reshape(-1, *eta.shape)
        (values,), (scores,) = directional(lambda eta: (held.at(eta).log_prob(x),), eta, tangents)
        weighted = scores * unbiased_weight(values)
        return weighted.movedim(1, -1).reshape(*u.shape[:-1], num_samples) / num_samples**0.5

    return Information(held.eta, root=root, exact=False)


def unbiased_weight(log_prob: Tensor) -> Tensor:
    r"""One, with gradient :math:`\frac12 \partial \log p`: squared, it carries the derivative of the sampling itself.

    Samples are constants to autodiff, so the derivative of ``mean(s sᵀ)`` lacks the term that comes from moving the
    distribution they are drawn from. Multiplying the scores by this puts it back (Foerster et al. 2018).
    """
    return (0.5 * (log_prob - log_prob.detach())).exp()


@contextlib.contextmanager
def fixed_noise(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers drawn inside depend on `seed` alone; the random state outside is untouched."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


@dataclass(frozen=True)
class _Held:
    """A distribution taken apart: the tensors it holds, and how to put other tensors in their place."""

    template: Distribution
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, p: Distribution) -> _Held:
        found = {id(t): t for t in tensors_in(p) if t.is_floating_point()}.values()
        moving = tuple(t for t in found if t.shape[: len(p.batch_shape)] == p.batch_shape)
        fixed = [t for t in found if t.shape[: len(p.batch_shape)] != p.batch_shape]
        stray = [tuple(t.shape) for t in fixed if depends_on_code(t)]
        if stray or not moving:
            raise MissingRuleError(
                f"The score in the parameters of {type(p).__name__} needs tensors that start with its batch shape "
                f"{tuple(p.batch_shape)}; it holds {stray or 'none that do'}. Expand the parameters to the batch "
                "shape, or use pullback.ScoreMetric(decoder), which differentiates the whole decoder."
            )
        return cls(_rebuilt(p, {id(t): unwrapped(t) for t in fixed}, Size()), moving)

    @property
    def eta(self) -> Tensor:
        batch = self.template.batch_shape
        return torch.cat([t.reshape(*batch, -1) for t in self.tensors], dim=-1)

    def at(self, eta: Tensor) -> Distribution:
        """The distribution with coordinates ``eta``; leading batch dimensions of the template may be left out."""
        num_batch = len(self.template.batch_shape)
        dropped = self.template.batch_shape[: num_batch - (eta.ndim - 1)]
        parts = eta.split([t[(0,) * num_batch].numel() for t in self.tensors], dim=-1)
        new = {
            id(t): part.reshape(eta.shape[:-1] + t.shape[num_batch:]).to(t.dtype)
            for t, part in zip(self.tensors, parts, strict=True)
        }
        return _rebuilt(self.template, new, dropped)


def tensors_in(thing: Any) -> Iterator[Tensor]:
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, inverse_transform):
        yield from tensors_in(thing.inv)
    elif isinstance(thing, (Distribution, Transform)):
        yield from tensors_in([value for name, value in vars(thing).items() if name not in transform_caches])
    elif isinstance(thing, (list, tuple)):
        for part in thing:
            yield from tensors_in(part)
    elif isinstance(thing, dict):
        yield from tensors_in(list(thing.values()))


def _rebuilt(thing: Any, new: Mapping[int, Tensor], dropped: Size) -> Any:
    """A copy of `thing` with tensors replaced by identity and the leading batch dimensions `dropped`."""
    if isinstance(thing, Tensor):
        return new.get(id(thing), thing)
    if isinstance(thing, inverse_transform):
        return _rebuilt(thing.inv, new, dropped).inv
    if isinstance(thing, (Distribution, Transform)):
        other = copy.copy(thing)
        vars(other).update({name: _rebuilt(value, new, dropped) for name, value in vars(other).items()})
        if isinstance(other, Transform):
            vars(other).update(transform_caches)
        else:
            batch, n = other.batch_shape, len(dropped)
            # Nothing is checked any more: samples on the border of the support are samples.
            set_batch_shape(other, batch[n:] if batch[:n] == dropped else batch)
        return other
    if isinstance(thing, (list, tuple)) and not isinstance(thing, Size):
        return type(thing)(_rebuilt(part, new, dropped) for part in thing)
    if isinstance(thing, dict):
        return {key: _rebuilt(value, new, dropped) for key, value in thing.items()}
    return thing
