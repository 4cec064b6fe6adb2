"""Models of other people as decoders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributions as td
from torch.distributions import Distribution

from pullback._decoders.contract import Decoder
from pullback._decoders.probe import PLACES, DecoderError
from pullback._typing import Float

Family = type[Distribution] | Callable[..., Distribution]

# What libraries call the decoded mean in what a decoder returns: pythae, diffusers, Hugging Face.
_FIELDS = ("reconstruction", "sample", "logits", "mean", "loc", "px")
# What they call its spread: the logarithm of the variance, or the standard deviation.
_LOG_VARIANCES = ("logvar", "log_var", "log_variance", "logsigma2")
_DEVIATIONS = ("scale", "std", "sigma", "stddev")
# Features from which on an output between 0 and 1 is taken for probabilities. That logits of as many features all lie
# there by chance has a probability below one in a thousand, even if each of them is as likely to as not.
_MANY = 10
_LOGITS = (td.Bernoulli, td.ContinuousBernoulli, td.Binomial, td.Categorical, td.OneHotCategorical, td.Geometric)
_RATES = (td.Poisson, td.Exponential)


class AdaptedDecoder(nn.Module):
    """A model with its likelihood: ``adapted(z)`` is p(x|z). Make one with `as_decoder`."""

    def __init__(self, model: Callable[..., Any], family: Family | None):
        super().__init__()
        self.model = model
        self.family = family
        # The model behind a method is registered, so that .to() and state_dict() reach it.
        self.owner = owner if isinstance(owner := getattr(model, "__self__", None), nn.Module) else None
        self._was_called = False

    def forward(self, z: Float[Tensor, "*batch d"]) -> Distribution:
        """The distribution of the data, for codes of any batch shape where a `family` builds it."""
        if self.family is None:
            return _as_distribution(self.model(z))
        parameters = _parameters(self.model(z.reshape(-1, z.shape[-1])))
        if not self._was_called:
            _check_logits(self.family, parameters[0])
            self._was_called = True
        return _build(self.family, [x.reshape(z.shape[:-1] + x.shape[1:]) for x in parameters])

    def extra_repr(self) -> str:
        """What is inside, for printing."""
        return f"family={getattr(self.family, '__name__', self.family)}"


def as_decoder(model: Any, family: Family | None = None) -> Decoder:
    r"""A decoder made of a model as other libraries build them.

    Finds the part that decodes (the model itself, or its ``decode``, ``decoder`` or ``generative``), what of its output
    are the parameters (a tensor, a tuple ``(mean, log_variance)``, or an object or dictionary with ``reconstruction``,
    ``sample``, ``logits`` …), and puts the likelihood around them.

    Args:
        model: a module (plain, Lightning, pythae, diffusers, scvi-tools), or any function of the codes ``(N, d)``.
        family: the likelihood the model was trained with: a class of `torch.distributions`, or a function from the
            model's tensors to a distribution, such as ``lambda x: Bernoulli(probs=x)``. A class reads a single tensor
            as logits (Bernoulli, categorical), as the logarithm of the rate (Poisson, Exponential), or as the mean of a
            `Normal` of unit variance; of two tensors `Normal` takes the second for the logarithm of the variance. None
            if the model returns distributions.

    Raises:
        DecoderError: no part of the model decodes, or its output cannot be read; the message says what to write.

    >>> from torch.distributions import Bernoulli
    >>> vae = nn.ModuleDict({"encoder": nn.Linear(784, 2), "decoder": nn.Linear(2, 784)})
    >>> as_decoder(vae["decoder"], Bernoulli)(torch.zeros(3, 2)).batch_shape
    torch.Size([3, 784])
    """
    found = [getattr(model, place) for place in PLACES if callable(getattr(model, place, None))]
    if not found and not callable(model):
        raise DecoderError(
            f"{type(model).__name__} cannot decode: it is no function and has none called {', '.join(PLACES)}. Give "
            "the part that does: pullback.as_decoder(model.my_decoder, family=torch.distributions.Bernoulli)."
        )
    return AdaptedDecoder(found[0] if found else model, family)


def _as_distribution(output: Any) -> Distribution:
    if isinstance(output, Distribution):
        return output
    if found := _of_kind(Distribution, _fields(output).values()):
        return found[0]
    raise DecoderError(
        f"The model returned {type(output).__name__} without a distribution. Say which likelihood it was trained with, "
        "for example pullback.as_decoder(model, family=torch.distributions.Bernoulli) for logits, "
        "pullback.as_decoder(model, family=torch.distributions.Normal) for a mean, or a mean and a log-variance."
    )


def _parameters(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Distribution):
        return [output.mean]
    fields = _fields(output)
    mean, log_variance, deviation = (
        _of_kind(Tensor, map(fields.get, names)) for names in (_FIELDS, _LOG_VARIANCES, _DEVIATIONS)
    )
    if isinstance(output, (tuple, list)):
        tensors = _of_kind(Tensor, output)
    elif mean:
        tensors = [mean[0], *log_variance[:1], *(2 * x.log() for x in deviation[:1] if not log_variance)]
    else:
        tensors = _of_kind(Tensor, output.values())[:2] if isinstance(output, Mapping) else []
    if not tensors and _of_kind(Distribution, fields.values()):
        raise DecoderError(
            "The model returns a distribution, and needs no other family: use pullback.as_decoder(model)."
        )
    if not tensors:
        raise DecoderError(
            f"The model returned {type(output).__name__}, in which no tensor was found. Say where the parameters are: "
            "pullback.as_decoder(lambda z: model(z).my_output, family=torch.distributions.Bernoulli)."
        )
    return tensors


def _fields(output: Any) -> Mapping[str, Any]:
    if isinstance(output, Mapping):
        return output
    return {name: getattr(output, name, None) for name in (*_FIELDS, *_LOG_VARIANCES, *_DEVIATIONS)}


def _of_kind(kind: type, values: Iterable[Any]) -> list[Any]:
    return [x for x in values if isinstance(x, kind)]


def _check_logits(family: Family, x: Tensor) -> None:
    """Probabilities in the place of logits would give a wrong geometry without a word."""
    reads_logits = isinstance(family, type) and issubclass(family, _LOGITS)
    if reads_logits and x[0].numel() >= _MANY and bool(((x > 0) & (x < 1)).all()):
        raise DecoderError(
            f"All outputs of the model lie between 0 and 1, as probabilities do, and {family.__name__} reads them as "
            "logits. If they are probabilities, use `pullback.as_decoder(model, family=lambda x: "
            f"torch.distributions.{family.__name__}(probs=x))`; if they are logits, `pullback.as_decoder(model, "
            f"family=lambda x: torch.distributions.{family.__name__}(logits=x))`."
        )


def _build(family: Any, parameters: list[Tensor]) -> Distribution:
    x, known = parameters[0], family if isinstance(family, type) else object
    if issubclass(known, _LOGITS):
        return family(logits=x)
    if issubclass(known, td.Normal):
        return family(x, (0.5 * parameters[1]).exp() if len(parameters) > 1 else torch.ones_like(x))
    return family(x.exp()) if issubclass(known, _RATES) else family(*parameters)
