r"""How uncertain a distance is, given that its ends are.

To first order (the delta method), with the gradients :math:`g_a, g_b` of the distance in its ends,

.. math:: \operatorname{Var} d(a, b) \approx g_a^\top \Sigma_a\, g_a + g_b^\top \Sigma_b\, g_b .
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pullback._decoders.contract import as_codes
from pullback._geometry.distance import distance
from pullback._geometry.geodesic import geodesic
from pullback._metrics.base import Metric, broadcast, codes_for
from pullback._numerics.random import as_generator
from pullback._options import check_options
from pullback._progress import progress
from pullback._solvers.base import ConvergenceError, Solver
from pullback._typing import Array, Codes, Float


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
        method: ``"delta"`` for the first-order formula at the cost of one path per pair; ``"samples"`` for samples of
            the ends.
        num_samples: per pair, with ``method="samples"``; the standard deviation is then known to about
            ``1 / sqrt(2 n)``.
        solver: as in `pullback.geodesic`.
        random_state: of the samples.

    Raises:
        ConvergenceError: if a path did not converge.

    Example:
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
        variance = torch.zeros_like(found)
        for gradient, root in zip(gradients, roots, strict=True):
            if root is not None:
                variance += (gradient[..., None, :] @ root).square().sum((-2, -1))
        return DistanceUncertainty(found.detach(), variance.sqrt())
    if method != "samples":
        raise ValueError(f'method must be "delta" or "samples", not {method!r}.')
    drawn, generator = [], as_generator(random_state)
    for z, root in zip((a, b), roots, strict=True):
        noise = torch.randn(num_samples, *z.shape, generator=generator, dtype=z.dtype).to(z.device)
        drawn.append(z.expand(num_samples, *z.shape) if root is None else z + (root @ noise[..., None])[..., 0])
    paths = geodesic(metric, *drawn, solver=solver)
    if not paths.converged.all():
        raise ConvergenceError(
            f"{int((~paths.converged).sum())} of {paths.converged.numel()} paths between samples did not converge. Use "
            'method="delta", or narrower covariances.',
            result=paths,
        )
    return DistanceUncertainty(paths.length.mean(0), paths.length.std(0))


def _root(cov: Tensor | None, like: Tensor) -> Tensor | None:
    """A factor R of the covariance R Rᵀ, of shape ``(*batch, d, d)``."""
    if cov is None:
        return None
    cov, shape, d = as_codes(cov, like), like.shape, like.shape[-1]
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
