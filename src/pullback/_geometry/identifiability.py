r"""How well distances are determined by the data: their variation over retrained models.

A latent code is not identifiable: any reparametrization :math:`g` of the latent space gives the same densities with the
decoder :math:`f \circ g^{-1}`, and retraining picks another. Distances of a pulled-back metric do not depend on the
coordinates, so they should repeat where the models agree on the data (compare Hauberg, *Only Bayes should learn a
manifold*, 2018).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pullback._decoders.contract import as_codes
from pullback._geometry.geodesic import geodesic
from pullback._metrics.base import Metric, codes_for
from pullback._numerics.random import as_generator
from pullback._options import check_options
from pullback._progress import progress
from pullback._solvers.base import Solver
from pullback._starts.code_graph import CodeGraph
from pullback._starts.graph import Graph
from pullback._starts.lattice import Lattice
from pullback._typing import Array, Bool, CodeSet, Float, Int

# Numbers in the embedding of a code from which on a lattice takes minutes: 2 s of CPU for 784, 94 s for 12,288.
_WIDE = 2048


@dataclass(frozen=True, eq=False)
class Identifiability:
    """What `identifiability` found, for P pairs of observations under R models.

    Attributes:
        pairs: numbers of both observations of each pair, ``(P, 2)``.
        distances: of each pair under each model, ``(R, P)``.
        variation: the coefficient of variation of each pair's distance over the models, ``(P,)``.
        converged: whether each shortest path was found, ``(R, P)``.

    >>> import torch, pullback as pb
    >>> models = [pb.FisherRaoMetric(lambda z, s=s: torch.distributions.Normal(s * z, 1.0)) for s in (1.0, 2.0)]
    >>> codes = torch.tensor([[0.0], [1.0], [3.0]])
    >>> pb.statistics.identifiability(models, [codes, codes], pairs=torch.tensor([[0, 1], [0, 2]])).distances
    tensor([[1., 3.], [2., 6.]])
    """

    pairs: Int[Tensor, "P 2"]
    distances: Float[Tensor, "R P"]
    variation: Float[Tensor, " P"]
    converged: Bool[Tensor, "R P"]

    def __repr__(self) -> str:
        models, pairs = self.distances.shape
        done = int(self.converged.sum())
        return (
            f"Identifiability(variation {float(self.variation.mean()):.3f} on average over {pairs} pairs and {models} "
            f"models; {done} of {self.converged.numel()} paths converged)"
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

    Raises:
        ValueError: if the models do not have codes of the same observations.

    Example:
        Two models of the same data, one with its latent space stretched.

        >>> import torch, pullback as pb
        >>> from torch.distributions import Normal
        >>> z = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]])
        >>> models = [lambda z: Normal(z, 1.0), lambda z: Normal(z / 3, 1.0)]
        >>> metrics = [pb.FisherRaoMetric(model) for model in models]
        >>> pairs = torch.tensor([[0, 1], [0, 2]])
        >>> found = pb.statistics.identifiability(metrics, [z, 3 * z], pairs=pairs, init=pb.CodeGraph.fit)
        >>> found.variation.round(decimals=3)
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
        starts = [(init or _graph)(metric, z) for metric, z in zip(metrics, codes, strict=True)]
        paths = [geodesic(m, a, b, init=s, solver=solver) for m, (a, b), s in zip(metrics, ends, starts, strict=True)]
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
    if metrics is None:
        return found
    return [codes_for(metric, z)[0] for metric, z in zip(metrics, found, strict=True)]


def _graph(metric: Metric, codes: Tensor) -> Graph:
    with torch.no_grad():
        dual = metric.embed(codes[:1]) if codes.shape[1] in (2, 3) else None
    return (CodeGraph if dual is None or dual[0].shape[-1] > _WIDE else Lattice).fit(metric, codes)
