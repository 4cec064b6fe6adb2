"""What the library says about a decoder that breaks the contract."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributions import Distribution

from pullback._autodiff.torch_internals import batch_norms, dropouts

NO_DERIVATIVE = (
    "or use a metric that needs no derivative of the decoder: pullback.DivergenceMetric(decoder, "
    "method=pullback.divergences.CentralDifference())."
)

# Where libraries keep the decoder of a model: diffusers (`decode`), plain and Lightning modules and pythae (`decoder`),
# scvi-tools (`generative`).
PLACES = ("decode", "decoder", "generative")

RANDOM = (
    "The decoder drew random numbers: decoding the same code twice gives two distributions. Switch dropout off "
    "(model.eval(), or F.dropout(x, training=False)) and return the distribution itself, not one around a sample."
)
MIXING = (
    "The decoder must give for a batch what it gives for its codes one by one: no statistics of the batch, no sum or "
    "recurrence over its codes, no shared noise. Use batch_first=True in recurrences and attention, LayerNorm or "
    "GroupNorm instead of statistics of the batch, and model.eval()."
)
DETACHED = (
    "The decoder's output depends on the codes, but torch cannot differentiate it: the codes are detached, or leave "
    "torch, on the way (detach(), .data, numpy(), torch.no_grad() or torch.inference_mode() inside the decoder). Take "
    "that away, "
) + NO_DERIVATIVE


class DecoderError(ValueError):
    """The decoder breaks the contract; the message says how to mend it.

    >>> import torch, pullback as pb
    >>> pb.FisherRaoMetric(torch.nn.Linear(2, 3)).tensor([0.0, 0.0])
    Traceback (most recent call last):
    pullback...DecoderError: The decoder returned a tensor, not a distribution. Say which...
    """


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


def no_decoder(thing: object) -> str:
    """For what stands in the place of a decoder and cannot be called."""
    name = type(thing).__name__
    if hasattr(thing, "decoder") or hasattr(thing, "tensor"):
        return f"A decoder is expected, not the metric {name}. Give the decoder itself, as in metric.decoder."
    return (
        f"A decoder is a function from codes (N, d) to a torch.distributions.Distribution, not {name}. "
        "For example `lambda z: torch.distributions.Bernoulli(logits=model(z))`."
    )


def refused_codes(model: object, z: Tensor, error: Exception) -> str:
    """For a decoder that fails at its first codes, perhaps because it is a whole model with a part that decodes."""
    for place in PLACES:
        if callable(getattr(model, place, None)):
            return (
                f"{type(model).__name__} does not take codes of shape {tuple(z.shape)} ({first_line(error)}), but it "
                f"has {place}: use pullback.as_decoder(model, family=torch.distributions.Bernoulli), with the "
                "likelihood it was trained with."
            )
    return (
        f"The decoder does not take codes of {z.shape[-1]} dimensions, {z.dtype}, on {z.device}: {first_line(error)}. "
        "Give codes of its latent dimension, with its dtype and device. It is called with any number N of codes (N, "
        "d): what else it needs must not have a row per observation, and codes of another shape are reshaped inside, "
        "as in `pullback.as_decoder(lambda z: model.decode(z.reshape(-1, channels, height, width)), family=...)`."
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
    if p.batch_shape[:1] != z.shape[:1]:
        raise DecoderError(
            f"The decoder was given codes of shape {tuple(z.shape)} and returned a distribution with batch shape "
            f"{tuple(p.batch_shape)}, which must start with ({len(z)},). Keep the first dimension of z: do not "
            "squeeze, and use flatten(1) or view(len(z), -1)."
        )


def first_line(error: Exception) -> str:
    """The beginning of a message."""
    return str(error).split("\n")[0][:240]
