r"""Distances of codes, and their derivatives by the envelope theorem.

The squared distance is the energy at its minimum, :math:`d^2(a, b) = \min_z E(a, z, b; \theta)` over the inner nodes z
of a curve. At the minimum :math:`\partial E / \partial z = 0`, so how the path reacts to a change of its ends or of the
decoder's parameters :math:`\theta` does not matter to first order:

.. math:: \frac{\partial d^2}{\partial (a, b, \theta)}
   = \frac{\partial E}{\partial (a, b, \theta)}(a, z^*, b; \theta), \quad z^* \text{ fixed.}

That is exact for the *discrete* energy if :math:`z^*` minimizes that very energy. So the path is solved anew on T, 2T
and 4T segments, and the energies with their exact derivatives are extrapolated (Romberg).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pullback._curves.steps import MAX_DECODED, safe_sqrt
from pullback._decoders.contract import unvalidated
from pullback._geometry.geodesic import Geodesic, Starts, check_converged, geodesic
from pullback._metrics.base import Metric, codes_for
from pullback._metrics.connection import filtered_inverse
from pullback._numerics.spline import refine
from pullback._progress import progress
from pullback._solvers.base import ConvergenceError, Solver
from pullback._solvers.chords import ChordEnergy
from pullback._solvers.measure import romberg
from pullback._solvers.newton import Minimizer
from pullback._typing import Codes, Float

# Segments of the coarsest of the three curves that are extrapolated, and steps to solve each.
_MIN_SEGMENTS, _MAX_SEGMENTS, _MAX_STEPS = 8, 256, 20
# A path whose energy differs by more when it is solved or measured anew has hopped over a wall.
AGREEMENT = 1e-2
# Relative change of the extrapolated gradient from which on it is not given: ten times what smooth decoders have on the
# coarsest curves (test_gradients_of_rectified_decoders_are_right_or_refused).
_GRADIENT_RTOL = 0.02


def distance(
    metric: Metric, a: Codes, b: Codes, *, solver: Solver | None = None, init: Starts = None
) -> Float[Tensor, "*batch"]:
    r"""The distance :math:`d(a, b)`: the length of the shortest path found from ``a`` to ``b``.

    Differentiable once in ``a``, ``b`` and the decoder's parameters, by the envelope theorem. Equal codes have distance
    0 and gradient 0 (a distance has a kink there; `squared_distance` is smooth). Inside ``torch.no_grad()`` the cost is
    that of `pullback.geodesic`, with gradients a few times that. Arguments as there.

    Raises:
        ConvergenceError: if a path did not converge. Its `result` is the `pullback.results.Geodesic` of all pairs.

    >>> import torch, pullback as pb
    >>> metric = pb.FisherRaoMetric(lambda z: torch.distributions.Normal(z[..., 0], z[..., 1]))
    >>> pb.distance(metric, [0.0, 1.0], [0.0, 2.0]).round(decimals=3)  # √2 log 2
    tensor(0.9800)
    """
    return safe_sqrt(squared_distance(metric, a, b, solver=solver, init=init))


@progress("distances")
def squared_distance(
    metric: Metric, a: Codes, b: Codes, *, solver: Solver | None = None, init: Starts = None
) -> Float[Tensor, "*batch"]:
    r"""The squared distance :math:`d^2(a, b)`: the energy of the shortest path found; smooth also at equal codes.

    Its gradient in ``a`` is :math:`-2 M(a) \operatorname{Log}_a(b)`. Derivatives and errors as for `distance`.

    >>> import torch, pullback as pb
    >>> metric = pb.FisherRaoMetric(lambda z: torch.distributions.Normal(z, 1.0))
    >>> a = torch.tensor([3.0, 4.0], requires_grad=True)
    >>> pb.squared_distance(metric, a, torch.zeros(2)).backward()
    >>> a.grad.round(decimals=3)
    tensor([6., 8.])
    """
    a, b = codes_for(metric, a, b)
    path = geodesic(metric, a, b, solver=solver, init=init)
    check_converged(path, "paths", "The error's `result` is the Geodesic, with a status for each pair.")
    with unvalidated():
        # the codes may have a gradient, or something the decoder is made of
        first = metric.ds2(*(z.reshape(-1, z.shape[-1])[:1] for z in (a, b)))
    if not first.requires_grad:
        return path.length**2
    return differentiable_once(*energies_and_doubts(metric, path, a, b))


def energies_and_doubts(metric: Metric, path: Geodesic, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The energies ``(*batch)``, and by how much their gradients change with the number of segments; see `_doubt`."""
    batch, d = path.length.shape, a.shape[-1]
    start, stop = (z.expand(*batch, d).reshape(-1, d) for z in (a, b))
    # curves grouped by the number of segments that resolves them
    levels = path.num_segments.flatten().clamp(_MIN_SEGMENTS, _MAX_SEGMENTS)
    rows = [(T, (levels == T).nonzero()[:, 0]) for T in levels.unique().tolist()]
    found = [_along(metric, path, index, T, start[index], stop[index]) for T, index in rows]
    order = torch.cat([index for _, index in rows]).argsort()
    energies, doubts = (torch.cat(x)[order].reshape(batch) for x in zip(*found, strict=True))
    return energies, doubts


def _along(metric: Metric, path: Geodesic, index: Tensor, T: int, start: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
    """Squared distances of the pairs at `index`, as functions of end points and decoder, and their doubts."""
    fixed = path.curve.resample(4 * T + 1).detach().reshape(-1, 4 * T + 1, start.shape[-1])[index]
    found = path.length.flatten()[index] ** 2
    chords = ChordEnergy.checked(metric, fixed)
    solved = stationary(chords, fixed[:, ::4], num_levels=3)
    with torch.no_grad(), unvalidated():
        value = romberg(*(chords.energy(nodes) for nodes in solved))[0]
    # Where solving on T segments leads away from the path (it then hops over a wall of the metric), the path is kept as
    # it is, and its length differentiated, which unlike its energy does not ask for constant speed.
    agree = (value - found).abs() <= AGREEMENT * found
    paths = [torch.where(agree[:, None, None], x, fixed[:, ::k]) for x, k in zip(solved, (4, 2, 1), strict=True)]
    ds2 = [_differentiable_chords(chords, nodes, start, stop) for nodes in paths]
    energy = romberg(*(x.shape[1] * x.sum(-1) for x in ds2))[0]
    square = safe_sqrt(ds2[-1]).sum(-1) ** 2
    return torch.where(agree, energy, square + (found - square.detach())), _doubt(chords, paths)


def _doubt(chords: ChordEnergy, paths: list[Tensor]) -> Tensor:
    """How far the gradients in the end points by T and 2T segments are from those by 2T and 4T, over their size."""
    # At the kinks of a rectified decoder, and at sharp walls, they do not settle; nor have they the length that the
    # gradient of a squared distance has, twice the distance.
    coarse, middle, fine = (_end_slopes(chords, nodes) for nodes in paths)
    first, second = (4 * middle - coarse) / 3, (4 * fine - middle) / 3
    size = second.flatten(1).norm(dim=1).clamp_min(torch.finfo(fine.dtype).tiny)
    change = (second - first).flatten(1).norm(dim=1) / size
    with torch.no_grad(), unvalidated():
        inverse = filtered_inverse(chords.metric.tensor(paths[-1][:, [0, -1]]))
        norm = (second[..., None, :] @ inverse @ second[..., None])[..., 0, 0].clamp_min(0).sqrt()
        length = safe_sqrt(chords.energy(paths[-1]))[:, None]
    ratio = torch.where(length > 0, norm / (2 * length), 1.0)
    return torch.maximum(change, (ratio - 1).abs().amax(-1))


def _end_slopes(chords: ChordEnergy, nodes: Tensor) -> Tensor:
    """Derivatives of the energy in both end points, ``(B, 2, d)``, of which only the outer chords know."""
    T = nodes.shape[1] - 1
    with torch.enable_grad(), unvalidated():
        ends = nodes[:, [0, -1]].detach().requires_grad_()
        outer = [torch.stack([ends[:, 0], nodes[:, 1]], 1), torch.stack([ends[:, 1], nodes[:, -2]], 1)]
        (slopes,) = torch.autograd.grad(T * torch.stack([chords.chords(x)[0].sum() for x in outer]).sum(), ends)
    return slopes


def stationary(chords: ChordEnergy, nodes: Tensor, *, num_levels: int) -> list[Tensor]:
    """Minima of the discrete energy near the path ``nodes``: on as many segments, on twice as many, and so on."""
    # So the nodes are right to 1e-6 and better: the relative error of the gradient, whose square is that of the energy.
    damping, rtol = (torch.full_like(nodes[:, 0, 0], x) for x in (1e-3, 1e-12))
    found = []
    with torch.no_grad(), unvalidated():
        for level in range(num_levels):
            nodes = refine(found[-1], 2) if level else nodes
            found.append(Minimizer(_MAX_STEPS, always_exact=True).run(chords, nodes, damping, rtol).nodes)
    return found


def _differentiable_chords(chords: ChordEnergy, nodes: Tensor, start: Tensor, stop: Tensor) -> Tensor:
    """``ds2`` along curves as functions of end points and decoder, inner nodes fixed."""

    def ds2(inner: Tensor, start: Tensor, stop: Tensor) -> Tensor:
        with unvalidated():
            return chords.chords(torch.cat([start[:, None], inner, stop[:, None]], 1))[0]

    # Decoded again on the way back, chunk by chunk, so that memory does not grow with the batch.
    size = max(1, MAX_DECODED // nodes.shape[1])
    chunks = list(zip(*(x.split(size) for x in (nodes[:, 1:-1], start, stop)), strict=True))
    if len(chunks) == 1:
        return ds2(*chunks[0])
    return torch.cat([checkpoint(ds2, *chunk, use_reentrant=False) for chunk in chunks])


def differentiable_once(energy: Tensor, doubt: Tensor) -> Tensor:
    """The same energies, to be differentiated once, and only where the gradient has settled; others would be wrong."""

    def refuse(_: Tensor) -> None:
        raise RuntimeError(
            "A distance has first derivatives only: second ones need the derivative of the path itself. Differentiate "
            "pullback.energy(metric, curve) for a fixed curve, or take differences of gradients."
        )

    def check(grad: Tensor) -> Tensor:
        unknown = (doubt > _GRADIENT_RTOL) & (grad != 0)
        if unknown.any():
            raise ConvergenceError(
                f"{int(unknown.sum())} of {unknown.numel()} distances have no gradient that can be trusted: it still "
                f"changes by {doubt[unknown].max():.0%} with the number of segments, because the decoder has kinks "
                "(rectified units) or sharp walls where the paths begin or end. Use smooth units (SiLU, softplus, "
                "tanh), or call distance() inside torch.no_grad() for the values alone."
            )
        if torch.is_grad_enabled():
            # what differentiates the gradient once more comes by here
            grad = grad + 0 * energy
            grad.register_hook(refuse)
        return grad

    result = energy.clone()
    result.register_hook(check)
    return result
