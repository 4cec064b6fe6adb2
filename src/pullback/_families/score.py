r"""Fisher information from the score alone, for families without a formula.

The noise is fixed: every evaluation draws with the same seed, so an estimate is a smooth function of the distribution,
and the caller's random state is left alone. The coordinates ``eta`` are the tensors the distribution holds. They may be
redundant (probabilities beside logits): the chain rule through all of them is still the chain rule.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Size, Tensor
from torch.distributions import Distribution, Transform

from pullback._autodiff import torch_internals
from pullback._autodiff.derivatives import directional
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
    (held, at), seed = _taken_apart(p), as_seed(random_state)

    def root(eta: Tensor, u: Tensor) -> Tensor:
        with torch.no_grad(), fixed_noise(seed, eta.device):
            x = at(eta).sample(Size([num_samples]))
        (values,), (scores,) = directional(lambda eta: (at(eta).log_prob(x),), eta, u.reshape(-1, *eta.shape))
        weighted = scores * unbiased_weight(values)
        return weighted.movedim(1, -1).reshape(*u.shape[:-1], num_samples) / num_samples**0.5

    return Information(held, root=root, exact=False)


def unbiased_weight(log_prob: Tensor) -> Tensor:
    """One, with gradient ½ ∂ log p: squared, it carries the derivative of the sampling (Foerster et al. 2018)."""
    return (0.5 * (log_prob - log_prob.detach())).exp()


@contextlib.contextmanager
def fixed_noise(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers drawn inside depend on `seed` alone; the random state outside is untouched."""
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng([device] if on_gpu else []):
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            torch.cuda.default_generators[device.index or 0].manual_seed(seed)
        yield


def _taken_apart(p: Distribution) -> tuple[Tensor, Callable[[Tensor], Distribution]]:
    """The tensors that `p` holds, side by side, and the distribution with others in their place."""
    batch, n = p.batch_shape, len(p.batch_shape)
    found = {id(t): t for t in tensors_in(p) if t.is_floating_point()}.values()
    moving = [t for t in found if t.shape[:n] == batch]
    fixed = [t for t in found if t.shape[:n] != batch]
    stray = [tuple(t.shape) for t in fixed if torch_internals.depends_on_code(t)]
    if stray or not moving:
        raise MissingRuleError(
            f"The score in the parameters of {type(p).__name__} needs tensors that start with its batch shape "
            f"{tuple(batch)}; it holds {stray or 'none that do'}. Expand the parameters to the batch "
            "shape, or use pullback.ScoreMetric(decoder), which differentiates the whole decoder."
        )
    constants = {id(t): torch_internals.unwrapped(t) for t in fixed}
    template = _mapped(p, lambda t: constants.get(id(t), t), Size())

    def at(eta: Tensor) -> Distribution:
        """Leading batch dimensions of the template may be left out."""
        pairs = zip(moving, eta.split([t[(0,) * n].numel() for t in moving], dim=-1), strict=True)
        new = {id(t): part.reshape(eta.shape[:-1] + t.shape[n:]).to(t.dtype) for t, part in pairs}
        return _mapped(template, lambda t: new.get(id(t), t), batch[: n - (eta.ndim - 1)])

    return torch.cat([t.reshape(*batch, -1) for t in moving], dim=-1), at


def tensors_in(thing: Any) -> list[Tensor]:
    """The tensors that a distribution or transform, or a list of them, is made of."""
    found: list[Tensor] = []
    _mapped(thing, lambda t: found.append(t) or t)
    return found


def in_batch(p: Distribution, other: Distribution, batch: Size) -> Distribution:
    """A distribution of N rows as one of batch shape ``(*batch, ...)``; `other`, of another number of rows, tells which
    tensors have a row for each."""
    moving = {id(x) for x, y in zip(tensors_in(p), tensors_in(other), strict=True) if x.shape != y.shape}
    return _mapped(p, lambda t: t.reshape(batch + t.shape[1:]) if id(t) in moving else t, p.batch_shape[:1], batch)


def _mapped(thing: Any, change: Callable[[Tensor], Tensor], dropped: Size | None = None, put: Any = ()) -> Any:
    """A copy of `thing` with its tensors changed, and others `put` for the leading batch dimensions `dropped`."""
    if isinstance(thing, Tensor):
        return change(thing)
    if isinstance(thing, torch_internals.inverse_transform):
        return _mapped(thing.inv, change, dropped, put).inv
    if isinstance(thing, (Distribution, Transform)):
        other = copy.copy(thing)
        own = {k: v for k, v in vars(other).items() if k not in torch_internals.transform_caches}
        vars(other).update({name: _mapped(value, change, dropped, put) for name, value in own.items()})
        if isinstance(other, Transform):
            vars(other).update(torch_internals.transform_caches)
        elif dropped is not None:
            batch, n = other.batch_shape, len(dropped)
            # Nothing is checked any more: samples on the border of the support are samples.
            torch_internals.set_batch_shape(other, Size(put) + batch[n:] if batch[:n] == dropped else batch)
        return other
    if isinstance(thing, (list, tuple)) and not isinstance(thing, Size):
        make = getattr(thing, "_make", type(thing))  # of a named tuple, or of any other
        return make(_mapped(part, change, dropped, put) for part in thing)
    if isinstance(thing, dict):
        return {key: _mapped(value, change, dropped, put) for key, value in thing.items()}
    return thing
