r"""What is known for certain about a distance.

A curve of codes is a curve of distributions, so it is at least as long as the shortest curve through *all*
distributions of the family, whose length is known in closed form (`pullback.rao_distance`) or bounded,

.. math:: d_{\text{Rao}}(p_a, p_b) \le d(a, b) \le L(\gamma).

A path is a strict local minimum if the Hessian of its discrete energy is positive definite, which its Cholesky
factorization proves. In the limit of many segments that is Jacobi's condition: no conjugate point on the way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pullback._autodiff.derivatives import depends_on
from pullback._curves.curve import CubicSpline, length
from pullback._decoders.contract import decode, observed, unvalidated
from pullback._families.lower_bound import lower_bound
from pullback._geometry.distance import stationary
from pullback._geometry.geodesic import Geodesic
from pullback._metrics.base import Metric, check_metric
from pullback._metrics.fisher_rao import FisherRaoMetric
from pullback._numerics.tridiagonal import solve_tridiagonal
from pullback._progress import progress
from pullback._solvers.chords import ChordEnergy
from pullback._typing import Bool, Float

# Segments on which lengths are measured, at least, and nodes of the paths handled at once.
_MEASURED_ON, _MAX_NODES = 1024, 2**14
# Of a Hessian's diagonal: what positive definiteness must have to spare, to be more than rounding.
_MARGIN = 1e-9


@dataclass(frozen=True, eq=False)
class Certificate:
    r"""Bounds on the distances of a batch of pairs, and the nature of the minimum found.

    Attributes:
        lower: distance of the decoded end points on the whole family, where that has a closed form; otherwise the angle
            between their square roots, or the straight line in the metric's Euclidean embedding; 0 where none is known.
            A closed form for a known parameter counts only if that parameter is not computed from the code.
        upper: length of the path, with the error of its measurement added; infinite where there is no path.
        error: the solver's estimate of the relative error of the path's length as a distance in its valley.
        strict: whether the path is a strict local minimum of the discrete energy. False where the decoder ignores a
            latent dimension (the path can then move for free) and for metrics without an embedding, where it is not
            known.

    >>> import torch, pullback as pb
    >>> metric = pb.FisherRaoMetric(lambda z: torch.distributions.Normal(z[..., 0], z[..., 1]))
    >>> a, b = torch.tensor([[0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    >>> pb.certify(metric, pb.geodesic(metric, a, b)).strict
    tensor(True)
    """

    lower: Float[Tensor, "*batch"]
    upper: Float[Tensor, "*batch"]
    error: Float[Tensor, "*batch"]
    strict: Bool[Tensor, "*batch"]

    def __str__(self) -> str:
        if self.lower.numel() == 1:
            nature = "a strict local minimum" if self.strict.item() else "not known to be a strict local minimum"
            bracket = f"{self.lower.item():.6g} <= distance <= {self.upper.item():.6g}"
            return f"{bracket}; the path is {nature}, its length right to {self.error.item():.1g} within its valley"
        ratio = (self.lower / self.upper.clamp_min(torch.finfo(self.upper.dtype).tiny)).median().item()
        return (
            f"{self.lower.numel()} distances, the median lower bound {ratio:.1%} of the upper; "
            f"{int(self.strict.sum())} of the paths are strict local minima, their lengths right to "
            f"{self.error.max().item():.1g} within their valleys"
        )


@progress("certificates")
def certify(metric: Metric, geodesic: Geodesic) -> Certificate:
    r"""Brackets distances, ``lower <= d(a, b) <= upper``, and tests whether the paths found are minima.

    The bracket holds whatever the solver did, up to the quadrature of the path's length; if both ends agree the path is
    the shortest of all. (Atkinson and Mitchell 1981 for Rao distances; Milnor 1963, *Morse Theory*, section 15, for the
    second variation.)

    Args:
        metric: the metric the paths were found in.
        geodesic: the result of `pullback.geodesic`.

    >>> import torch, pullback as pb
    >>> metric = pb.FisherRaoMetric(lambda z: torch.distributions.Normal(z[..., 0], z[..., 1]))
    >>> a, b = torch.tensor([[0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    >>> print(pb.certify(metric, pb.geodesic(metric, a, b)))
    0.980258 <= distance <= 0.980258; the path is a strict local minimum, its length right to ... within its valley
    """
    check_metric(metric)
    if not isinstance(geodesic, Geodesic):
        raise TypeError(f"certify takes the result of pullback.geodesic, not {type(geodesic).__name__}.")
    curves, batch = geodesic.curve.flatten(), geodesic.length.shape
    paths, levels = curves.points.detach(), geodesic.num_segments.reshape(-1)
    lower, upper = torch.zeros_like(paths[:, 0, 0]), torch.full_like(paths[:, 0, 0], torch.inf)
    strict, known = torch.zeros_like(levels, dtype=torch.bool), torch.isfinite(geodesic.energy.reshape(-1))
    size = max(1, _MAX_NODES // max(paths.shape[1], _MEASURED_ON))
    num = 4 * curves.num_pieces * math.ceil(_MEASURED_ON / (4 * curves.num_pieces))
    groups = [(T, (known & (levels == T)).nonzero()[:, 0].split(size)) for T in levels[known].unique().tolist()]
    with torch.no_grad(), unvalidated():
        for T, index in ((T, index) for T, chunks in groups for index in chunks):
            lower[index] = lower_bounds(metric, paths[index, 0], paths[index, -1])
            fine, coarse = (length(metric, curves[index], num_segments=m, extrapolate=True) for m in (num, num // 2))
            # Rounded up: chords of a Euclidean embedding are too short, others too long.
            measured = fine + (fine - coarse).abs() + 64 * torch.finfo(fine.dtype).eps * fine
            upper[index] = measured.nan_to_num(torch.inf)
            strict[index] = _strict(metric, paths[index], T)
    return Certificate(lower.reshape(batch), upper.reshape(batch), geodesic.error, strict.reshape(batch))


def lower_bounds(metric: Metric, a: Tensor, b: Tensor) -> Tensor:
    """What no path between ``a`` and ``b``, of shape ``(n, d)``, can be shorter than; rounded down."""
    bound = torch.zeros_like(a[:, 0])
    if isinstance(metric, FisherRaoMetric):
        # A parameter is a constant of the model only if it is not computed from the code.
        with torch.enable_grad():
            code = a.detach().requires_grad_()
            p, q = decode(observed(metric.decoder), code), decode(observed(metric.decoder), b.detach())
            bound = lower_bound(p, q, 1, lambda parameter: not depends_on(parameter, code)).detach()
    elif (dual := metric.embed(torch.stack([a, b]))) is not None and dual[0] is dual[1]:
        bound = torch.linalg.vector_norm(dual[0][1] - dual[0][0], dim=-1)
    return bound * (1 - 64 * torch.finfo(bound.dtype).eps)


def _strict(metric: Metric, paths: Tensor, num_segments: int) -> Tensor:
    """Whether the exact Hessian at the discrete minimum near each path is positive definite."""
    chords, every = ChordEnergy.checked(metric, paths), torch.ones_like(paths[:, 0, 0], dtype=torch.bool)
    if chords.num_parts == 0:
        return ~every
    (minimum,) = stationary(chords, CubicSpline(paths).resample(num_segments + 1), num_levels=1)
    model = chords.expand(minimum, every)
    spare = torch.diag_embed(_MARGIN * model.diagonal.diagonal(dim1=-2, dim2=-1))
    return solve_tridiagonal(model.diagonal + model.curvature - spare, model.upper, model.gradient)[1]
