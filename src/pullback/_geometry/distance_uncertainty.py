r"""How well distances are known, given that their ends are not, or that a model is one of many.

To first order (the delta method), with the gradients :math:`g_a, g_b` of the distance in its ends,

.. math:: \operatorname{Var} d(a, b) \approx g_a^\top \Sigma_a\, g_a + g_b^\top \Sigma_b\, g_b .

A latent code is not identifiable: any reparametrization :math:`g` of the latent space gives the same densities with the
decoder :math:`f \circ g^{-1}`, and retraining picks another. Distances of a pulled-back metric do not depend on the
coordinates, so they should repeat where models agree on the data (Hauberg 2018, *Only Bayes should learn a manifold*).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pullback._decoders.contract import as_codes
from pullback._geometry.distance import distance
from pullback._geometry.geodesic import check_converged, geodesic
from pullback._metrics.base import Metric, broadcast, codes_for
from pullback._numerics.random import as_generator
from pullback._options import check_options
from pullback._progress import progress
from pullback._solvers.base import Solver
from pullback._starts.graph import CodeGraph, Graph
from pullback._starts.lattice import Lattice
from pullback._typing import Array, Bool, Codes, CodeSet, Float, Int

# Numbers in the embedding of a code from which on a lattice takes minutes: 2 s of CPU for 784, 94 s for 12,288.
_WIDE = 2048


@dataclass(frozen=True, eq=False)
class DistanceUncertainty:
    """A distance and its standard deviation, one per pair.

    Attributes:
        distance: between the means of the ends (``"delta"``), or the mean over samples of them (``"samples"``).
        std: its standard deviation.

    >>> import torch, pullback as pb
    >>> metric = pb.FisherRaoMetric(lambda z: torch.distributions.Normal(z, 0.5))
    >>> pb.statistics.distance_uncertainty(metric, [0.0], [5.0], cov_b=[0.01]).std
    tensor(0.2000)
    """

    distance: Float[Tensor, "*batch"]
    std: Float[Tensor, "*batch"]

    def __repr__(self) -> str:
        pairs = zip(self.distance.flatten().tolist(), self.std.flatten().tolist(), strict=True)
        shown = [f"{d:.4g} ± {s:.2g}" for d, s in list(pairs)[:8]]
        more = ", …" if self.distance.numel() > len(shown) else ""
        return f"DistanceUncertainty({', '.join(shown)}{more})"


@progress("distances")
def distance_uncertainty(
    metric: Metric,
    a: Codes,
    b: Codes,
    cov_a: Float[Tensor, ...] | Array | None = None,
    cov_b: Float[Tensor, ...] | Array | None = None,
    *,
    method: Literal["delta", "samples"] = "delta",
    num_samples: int = 100,
    solver: Solver | None = None,
    random_state: int | torch.Generator | None = 0,
) -> DistanceUncertainty:
    """The uncertainty of distances from the posterior of their ends.

    Args:
        metric: the geometry.
        a: means of the first codes, any shape ``(*batch, d)`` that broadcasts with ``b``.
        b: means of the second codes.
        cov_a: covariance of ``a``: matrices ``(*batch, d, d)``, or variances ``(*batch, d)``, which is what an encoder
            gives; None if it is known exactly. An array of shape ``(d, d)`` is one matrix for all codes.
        cov_b: covariance of ``b``.
        method: ``"delta"`` for the first-order formula, at the cost of one path per pair, or ``"samples"`` of the ends.
        num_samples: per pair; the standard deviation is then known to about ``1 / sqrt(2 n)``.
        solver: as in `pullback.geodesic`.
        random_state: of the samples.

    Raises:
        ConvergenceError: if a path did not converge.

    >>> import torch, pullback as pb
    >>> metric = pb.FisherRaoMetric(lambda z: torch.distributions.Normal(z, 0.5))
    >>> a, b = torch.zeros(2), torch.tensor([3.0, 4.0])
    >>> pb.statistics.distance_uncertainty(metric, a, b, cov_a=0.01 * torch.ones(2))
    DistanceUncertainty(10 ± 0.2)
    """
    check_options(least=2, num_samples=num_samples)
    a, b = (z.detach() for z in broadcast(*codes_for(metric, a, b)))
    roots = [_root(cov, a) for cov in (cov_a, cov_b)]
    if method == "delta":
        with torch.enable_grad():
            ends = [z.clone().requires_grad_() for z in (a, b)]
            found = distance(metric, *ends, solver=solver)
            gradients = torch.autograd.grad(found.sum(), ends)
        parts = [(g[..., None, :] @ root).square().sum((-2, -1)) for g, root in zip(gradients, roots, strict=True)]
        return DistanceUncertainty(found.detach(), torch.stack(parts).sum(0).sqrt())
    if method != "samples":
        raise ValueError(f'method must be "delta" or "samples", not {method!r}.')
    drawn, generator = [], as_generator(random_state)
    for z, root in zip((a, b), roots, strict=True):
        noise = torch.randn(num_samples, *z.shape, 1, generator=generator, dtype=z.dtype).to(z.device)
        drawn.append(z + (root @ noise)[..., 0])
    paths = geodesic(metric, *drawn, solver=solver)
    check_converged(paths, "paths between samples", 'Use method="delta", or narrower covariances.')
    return DistanceUncertainty(paths.length.mean(0), paths.length.std(0))


def _root(cov: Tensor | None, like: Tensor) -> Tensor:
    """A factor R of the covariance R Rᵀ, of shape ``(*batch, d, d)``."""
    shape, d = like.shape, like.shape[-1]
    if cov is None:
        return like.new_zeros(*shape, d)
    cov = as_codes(cov, like)
    if cov.ndim == len(shape) + 1 or (cov.shape == (d, d) and torch.equal(cov, cov.mT)):
        factor, info = torch.linalg.cholesky_ex(cov)
        if (info != 0).any():
            raise ValueError(
                "A covariance is not positive definite. Pass matrices (*batch, d, d) or variances (*batch, d)."
            )
        return factor.expand(*shape, d)
    if cov.shape[-1:] != (d,) or (cov < 0).any():
        raise ValueError(
            f"Covariances of shape {tuple(cov.shape)} do not belong to codes of shape {tuple(shape)}. Pass matrices "
            "(*batch, d, d) or variances (*batch, d), none of them negative."
        )
    return torch.diag_embed(cov.sqrt().expand(shape))


@dataclass(frozen=True, eq=False)
class Identifiability:
    """What `identifiability` found, for P pairs of observations under R models.

    Attributes:
        pairs: numbers of both observations of each pair, ``(P, 2)``.
        distances: of each pair under each model, ``(R, P)``.
        variation: the coefficient of variation of each pair's distance over the models, ``(P,)``.
        converged: whether each shortest path was found, ``(R, P)``.

    >>> import torch, pullback as pb
    >>> codes = torch.tensor([[0.0], [1.0], [3.0]])
    >>> pb.statistics.identifiability(None, [codes, 2 * codes], pairs=torch.tensor([[0, 1], [0, 2]])).distances
    tensor([[1., 3.], [2., 6.]])
    """

    pairs: Int[Tensor, "P 2"]
    distances: Float[Tensor, "R P"]
    variation: Float[Tensor, " P"]
    converged: Bool[Tensor, "R P"]

    def __repr__(self) -> str:
        models, pairs = self.distances.shape
        return (
            f"Identifiability(variation {float(self.variation.mean()):.3f} on average over {pairs} pairs and {models} "
            f"models; {int(self.converged.sum())} of {self.converged.numel()} paths converged)"
        )


@progress("distances")
def identifiability(
    metrics: Sequence[Metric] | None,
    codes: Sequence[CodeSet],
    *,
    pairs: Int[Tensor, "P 2"] | None = None,
    num_pairs: int = 50,
    normalize: bool = False,
    init: Callable[[Metric, Tensor], Graph] | None = None,
    solver: Solver | None = None,
    random_state: int | torch.Generator | None = 0,
) -> Identifiability:
    r"""The coefficient of variation, over retrained models, of the distances between the same observations.

    0 means that all models agree. Lengths of a pulled-back metric are compared as they are; `normalize` divides the
    distances of each model by their mean, which forgives it a scale of its own.

    Args:
        metrics: one per model, on its own latent space; None for Euclidean distances of the codes.
        codes: one tensor ``(n, d)`` per model: codes of the same observations in the same order.
        pairs: which observations to compare, ``(P, 2)``; random pairs of different ones by default.
        num_pairs: how many, if they are random.
        normalize: whether the scale of each model is divided out.
        init: makes the graph where paths start from a metric and its codes; by default a `Lattice` in two and three
            dimensions, and a `CodeGraph` in more or for decoders with thousands of outputs.
        solver: of shortest paths, as in `pullback.geodesic`.
        random_state: of the random pairs.

    >>> import torch, pullback as pb
    >>> z, pairs = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]]), torch.tensor([[0, 1], [0, 2]])
    >>> models = [pb.FisherRaoMetric(lambda z, s=s: torch.distributions.Normal(z / s, 1.0)) for s in (1, 3)]
    >>> pb.statistics.identifiability(models, [z, 3 * z], pairs=pairs).variation.round(decimals=3)
    tensor([0., 0.])
    >>> pb.statistics.identifiability(None, [z, 3 * z], pairs=pairs).variation.round(decimals=3)
    tensor([0.7070, 0.7070])
    """
    check_options(num_pairs=num_pairs)
    codes = _checked(metrics, codes)
    n = len(codes[0])
    if pairs is None:
        generator = as_generator(random_state)
        first = torch.randint(n, (num_pairs,), generator=generator)
        pairs = torch.stack([first, (first + torch.randint(1, n, (num_pairs,), generator=generator)) % n], -1)
    pairs = torch.as_tensor(pairs)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or not len(pairs) or not bool(((pairs >= 0) & (pairs < n)).all()):
        raise ValueError(f"pairs are numbers of observations below {n}, of shape (P, 2); got {tuple(pairs.shape)}.")
    ends = [(z[pairs[:, 0]], z[pairs[:, 1]]) for z in codes]
    if metrics is None:
        distances = torch.stack([(b - a).norm(dim=-1) for a, b in ends])
        converged = torch.ones_like(distances, dtype=torch.bool)
    else:
        pairs_of = zip(metrics, codes, ends, strict=True)
        paths = [geodesic(m, a, b, init=(init or _graph)(m, z), solver=solver) for m, z, (a, b) in pairs_of]
        distances = torch.stack([path.length.detach() for path in paths])
        converged = torch.stack([path.converged for path in paths])
    compared = distances / distances.mean(1, keepdim=True) if normalize else distances
    return Identifiability(pairs, distances, compared.std(0) / compared.mean(0), converged)


def _checked(metrics: Sequence[Metric] | None, codes: Sequence[Tensor | Array]) -> list[Tensor]:
    if not isinstance(codes, (list, tuple)) or not isinstance(metrics, (list, tuple, type(None))):
        raise TypeError(
            "identifiability takes a list of metrics, or None, and a list of codes (n, d), one of each per model."
        )
    found = [as_codes(z, a_set=True) for z in codes]
    if len(found) < 2 or len({len(z) for z in found}) > 1:
        raise ValueError(
            f"identifiability compares at least two models by codes of the same observations; got {len(codes)} models "
            f"with {[len(z) for z in found]} codes. Encode the same data with each model, in the same order."
        )
    if metrics is not None and len(metrics) != len(codes):
        raise ValueError(
            f"There are {len(metrics)} metrics and codes of {len(codes)} models; give one of each per model."
        )
    return [z if metrics is None else codes_for(metrics[i], z)[0] for i, z in enumerate(found)]


def _graph(metric: Metric, codes: Tensor) -> Graph:
    with torch.no_grad():
        dual = metric.embed(codes[:1]) if codes.shape[1] in (2, 3) else None
    return (CodeGraph if dual is None or dual[0].shape[-1] > _WIDE else Lattice).fit(metric, codes)
