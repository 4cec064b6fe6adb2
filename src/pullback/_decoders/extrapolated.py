r"""A decoder that knows where the data end. docs/uncertainty.md derives what is computed here.

The decoder emits one more observation next to x, silent on the data and louder and louder away from them,

.. math:: y \sim \mathcal N(F(z), 1), \qquad
          F(z) = \frac{W(z)}{\sqrt d}\,\big(\cos\omega z_i,\ \sin\omega z_i\big)_{i=1,\dots,d}, \quad W = \lambda \rho ,

with the distance :math:`\rho` beyond the edge of the support. Its Fisher information is the metric of a cone whose apex
is the support: nothing on the data, and positive definite, in every direction and without bound, off them.
"""

from __future__ import annotations

import torch
from scipy.sparse.csgraph import dijkstra
from torch import Tensor, nn
from torch.distributions import Distribution

from pullback._decoders.contract import Decoder, observe, unvalidated
from pullback._decoders.pullback import pulled_back
from pullback._decoders.reading import WithChannel
from pullback._decoders.support import Support, check_support
from pullback._families.rules import embed, fisher
from pullback._options import check_options
from pullback._progress import progress

# Slope of the wall over the speed between neighboring centers; the excess of `distance2`, in units of h², over which
# the wall rises; and how much more than the way along the data a straight hop has to cost. A wall that rises at once
# bends paths along it within a fraction of a segment (benchmarks/latent.py: with a fourth of this width they took up to
# three times the points, d = 8 to 32); with less to spare paths cut the corners of the toy problem's ring.
_SLOPE, _ONSET, _SPARE = 3.0, 4.0, 1.2
# Centers that are looked at, points between two of them, and the neighbors of each in the graph of ways along the data:
# with 10 these are 13 to 68 % longer than shortest paths, with 32 2 to 31 %, and with 64 some are shorter, because the
# metric at their ends says too little of them (VAE with d = 8, learned variance).
_MAX_PROBES, _LINE_POINTS, _NUM_NEIGHBORS = 192, 7, 32
_HOPS_AT_ONCE = 256


class Extrapolated(WithChannel):
    r"""A decoder together with an observation of how far a code is from the data.

    Called, it is the decoder you gave: ``extrapolated(z)`` is p(x|z), also off the data. Metrics look at `observed`
    instead, so ``FisherRaoMetric(Extrapolated(decoder, Support.fit(codes)))`` is the recommended geometry: the
    decoder's own on the data, and a wall around them. Squared lengths add up, so the part of a path's energy that is
    due to the wall is its energy under ``FisherRaoMetric(extrapolated.channel)``: zero for a path on the data.

    Args:
        decoder: any decoder; without a `strength` its family needs a rule for `pullback.fisher`.
        support: where the data are.
        strength: the slope :math:`\lambda` of the wall, in units of length in the metric per unit of latent distance.
            By default it is found from the decoder at the support's centers: three times the median of the speed
            between neighboring ones, or more where that leaves a short cut, namely the smallest slope for which every
            straight line between two centers that leaves the support is a fifth longer than the way along the data.
            Call `calibrate` after the decoder has changed. For a metric in other units than Fisher-Rao's give your own.

    >>> import torch, pullback as pb
    >>> from torch.distributions import Normal
    >>> codes = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    >>> metric = pb.FisherRaoMetric(pb.Extrapolated(lambda z: Normal(z, 1.0), pb.Support.fit(codes)))
    >>> z = torch.tensor([[0.0, 0.0], [9.0, 0.0]])
    >>> metric.log_volume(z).diff() > 1  # larger off the data than on them
    tensor([True])
    """

    support: Support
    strength: Tensor

    def __init__(self, decoder: Decoder, support: Support, *, strength: float | None = None):
        super().__init__(decoder)
        check_options(strength=strength)
        self.support = check_support(support).matching(decoder)
        self.register_buffer("strength", self.support.scale.new_tensor(strength or 0.0))
        if strength is None:
            self.calibrate()

    @progress("wall")
    def calibrate(self) -> None:
        """Sets `strength` from the decoder as it is now."""
        centers = self.support.centers
        c = centers[:: -(-len(centers) // _MAX_PROBES)]
        try:
            M = pulled_back(fisher, self.decoder, c).detach()
        except NotImplementedError as error:
            raise NotImplementedError(f"{error} To wrap such a decoder give Extrapolated(..., strength=).") from error
        slope = _slope(self.support, self.decoder, c, M)
        if not slope > 0:
            raise ValueError(
                "The decoder is constant at the centers of the support, so lengths on the data are zero and no wall "
                "can be scaled to them. Check that the decoder and the codes belong together, or give strength=."
            )
        self.strength.copy_(slope)

    def extra_repr(self) -> str:
        """What is inside, for printing."""
        inner = "" if isinstance(self.decoder, nn.Module) else f"{getattr(self.decoder, '__name__', self.decoder)}, "
        return f"{inner}strength={self.strength:.3g}"

    def _mean(self, z: Tensor, decoded: Distribution | None) -> Tensor:
        d = z.shape[-1]
        phase = d**0.5 / self.support.spread * (z - self.support.origin)
        direction = torch.cat([phase.cos(), phase.sin()], -1) / d**0.5
        return self.strength * _height(self.support, self.support.distance2(z))[..., None] * direction


def _height(support: Support, distance2: Tensor) -> Tensor:
    r"""The distance ρ beyond the edge of the support: √e exp(-4h²/e), zero with all its derivatives where e <= 0."""
    width = _ONSET * support.scale.square()
    excess = distance2 - support.edge
    outside = excess > width / 80  # below, the exponential is under 1e-34 and its derivatives would divide by zero
    excess = torch.where(outside, excess, width)
    return torch.where(outside, excess.sqrt() * torch.exp(-width / excess), 0.0)


def _slope(support: Support, decoder: Decoder, c: Tensor, M: Tensor) -> Tensor:
    """The slope λ of the wall, from the metric M at some of the centers c; zero if they are all alike.

    It is three times the speed between neighboring centers, or the smallest slope at which every straight hop between
    two of the centers costs a fifth more than the way along the data. A hop costs 2 λ ρ at least, and as much as it is
    long without the wall; the way along the data costs the distance in the graph of near centers that see each other
    inside.
    """
    t = torch.linspace(0, 1, _LINE_POINTS + 2, dtype=c.dtype, device=c.device)[:, None, None]
    peaks = c.new_zeros(len(c), len(c)) + support.edge  # the largest distance2 on each straight line
    for i in range(len(c) - 1):
        peaks[i, i + 1 :] = support.distance2(c[i] + t[1:-1] * (c[i + 1 :] - c[i])).amax(0)
    inside = torch.maximum(peaks, peaks.mT) <= support.border
    v = c[:, None] - c
    lengths = torch.einsum("ijk,ikl,ijl->ij", v, M, v)
    lengths = (0.5 * (lengths + lengths.mT)).clamp_min(0).sqrt()
    neighbors = v.square().sum(-1).argsort(-1)[:, 1 : _NUM_NEIGHBORS + 1]
    steps = v.norm(dim=-1)
    near = torch.zeros_like(inside).scatter_(-1, neighbors, True) & (steps > 0)
    speeds = lengths[near] / steps[near] if near.any() else M.diagonal(0, 1, 2).mean().sqrt()
    along = torch.where((near | near.mT) & inside, lengths, torch.inf)
    along = torch.from_numpy(dijkstra(along.cpu().numpy(), directed=False)).to(c)
    hops = (~inside & along.isfinite()).triu(1).nonzero()
    return _closing_slope(decoder, c[hops], t[::2], along[*hops.mT], _height(support, peaks[*hops.mT]), speeds)


def _closing_slope(decoder: Decoder, hops: Tensor, t: Tensor, along: Tensor, heights: Tensor, speeds: Tensor) -> Tensor:
    """The slope that closes hops ``(n, 2, d)``; those that may want the steepest wall are measured first."""
    slope, costs = _SLOPE * speeds.median(), _SPARE * along
    order = (costs / heights).argsort(descending=True)
    for some in order.split(_HOPS_AT_ONCE):
        if not len(some) or costs[some[0]] <= 2 * slope * heights[some[0]]:
            break
        start, stop = hops[some].unbind(1)
        missing = costs[some].square() - _length(decoder, start + t * (stop - start)).square()
        slope = torch.maximum(slope, (missing.clamp_min(0).sqrt() / (2 * heights[some])).amax())
    return slope


def _length(decoder: Decoder, points: Tensor) -> Tensor:
    """The lengths of chains ``(T + 1, n, d)`` of points by their chords, zero where they are not known."""
    with torch.no_grad(), unvalidated():
        dual = embed(observe(decoder, points.flatten(0, 1)))
    if dual is None:
        return torch.zeros_like(points[0, :, 0])
    steps = [x.flatten(1).unflatten(0, points.shape[:2]).diff(dim=0) for x in dual]
    return (steps[0] * steps[1]).sum(-1).clamp_min(0).sqrt().sum(0).nan_to_num(0.0, 0.0)
