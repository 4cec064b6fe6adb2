"""Means of clusters, all at once: Newton's method on the stars of `_stars.py`, until the logarithms balance."""

from __future__ import annotations

import torch
from torch import Tensor

from pullback._metrics.connection import filtered_inverse, velocity_of
from pullback.statistics._paths import Paths
from pullback.statistics._stars import Star

# Share of the predicted decrease that a step must bring (Armijo; Nocedal and Wright 2006, section 3.1).
_SUFFICIENT = 1e-4
# Longest step, in standard deviations: longer straight ones may leave the domain, and paths lose their geodesics.
_LONGEST = 0.15
# Halvings of a step before the mean counts as found as well as it can be.
_HALVINGS = 8
# Decrease that paths promise by themselves, relative to the variance, from which on they are solved anew: a choice.
_LOST = 0.15
# Error of the energy of a path over the error of its slope, which is that of `_stars.py`.
_ENERGY = 0.01
# Promised decrease, relative to the variance, from which on Hessians are exact; below the second the step just taken
# was mostly the last. Choices.
_NEAR, _LAST = 3e-2, 3e-7
# Share of the paths that may descend alone, part of all that is promised from which on a path is slow, and factor by
# which that must fall from step to step for Hessians to be kept. Choices.
_FEW, _MUCH, _HELD = 0.25, 0.01, 0.1
# Residual in multiples of `rtol` at which a step of Gauss and Newton is enough to end with. A choice.
_FEW_LEFT = 10.0
# Estimated errors of logarithms may be larger than `rtol` by this factor: in elements that resolve a path, nine in ten
# are at most a twentieth of their estimate (30 codes each of three trained decoders, d = 8 and 16).
_CAREFUL = 8.0
# Error of the mean logarithm, in standard deviations, up to which a mean is found: what rectified decoders allow.
ACCEPT = 1e-2
# Share of `rtol` below which what is left of the residual is nothing.
_ENOUGH = 0.5
# Rounds of refinement: one element becomes sixteen.
_MAX_REFINEMENTS = 4


class Balance:
    """Stars whose centers move to the means of their clusters."""

    def __init__(
        self, paths: Paths, rays: Star, labels: Tensor, weights: Tensor, centers: Tensor, kinked: Tensor | None = None
    ) -> None:
        """One path, label and weight per code, centers ``(k, d)``; paths without an end have no weight."""
        self.paths, self.star, self.labels, self.centers = paths, rays, labels, centers
        self.expansion = found = rays.expand(exact=False)
        self.num_steps = 1  # times that all paths were expanded
        weights = torch.where(torch.isfinite(found.energy) & torch.isfinite(found.slope).all(-1), weights, 0)
        total = self._sum(weights)
        self.share = weights / total.clamp_min(torch.finfo(weights.dtype).tiny)[labels]  # in the cluster, (n,)
        self.stuck = torch.zeros_like(total, dtype=torch.bool)  # clusters whose variance no step lowers, (k,)
        self.kinked = rays.kinked() if kinked is None else kinked  # paths that cannot be known better, (n,)

    @property
    def variance(self) -> Tensor:
        """Mean squared distances, ``(k,)``."""
        return self._mean(self.expansion.energy)

    @property
    def residual(self) -> Tensor:
        """Lengths of the mean logarithms relative to the standard deviations, ``(k,)``."""
        momentum = -0.5 * self._mean(self.expansion.slope)
        return _ratio(_lengths(momentum, filtered_inverse(self.paths.tensor(self.centers))), self.variance.sqrt())

    def noise(self, error: Tensor | None = None) -> Tensor:
        """What relative errors ``(n,)`` of logarithms, by default of these, may add to the residual, ``(k,)``."""
        error = self.star.errors() if error is None else error
        return _ratio(self._sum(self._absolute(error).square()).sqrt(), self.variance.sqrt())

    @property
    def mostly_kinked(self) -> bool:
        """Whether second derivatives say little: most paths cross kinks of the decoder."""
        return bool(self.kinked.double().mean() > 0.5)

    def descend(self, rtol: float, max_steps: int) -> None:
        """Takes steps until all promise a decrease below a share ``rtol**2`` of the variance, or below its error."""
        last = torch.inf
        while self.num_steps < max_steps:
            # paths that promise so much have lost their geodesics
            self.stuck |= self._mean(self.expansion.inner) > _LOST * self.variance
            moving, promise = self.moving(rtol), self._promise()
            if not moving.any():
                break
            near = self._is_near(min(_LAST, (_FEW_LEFT * rtol) ** 2))
            slow = moving & (promise > _HELD * last)
            if slow.any():
                self.star = self.star.forgotten(self._are_slow(slow, promise))
            if near or slow.any():
                self.expansion = self.star.expand(exact=near, keep=True)
            self._relax(rtol, near)
            last = self._promise()
            self._take(*self._newton(), moving, rtol)

    def _are_slow(self, slow: Tensor, promise: Tensor) -> Tensor:
        """The paths of slow clusters that promise most; all of a cluster whose center does."""
        inner = self.expansion.inner
        own = self._mean(inner) > 0.5 * promise
        return slow[self.labels] & (~own[self.labels] | (self.share * inner > _MUCH * promise[self.labels]))

    def _relax(self, rtol: float, exact: bool) -> None:
        """Few paths that have more to gain than the centers descend alone: steps of all would be taken for their
        sake."""
        inner, energy = self.expansion.inner, self.expansion.energy
        left = (self._promise() - self._mean(inner)).clamp_min(rtol**2 * self.variance)
        rows = (self.share > 0) & (inner > _ENOUGH * _ratio(left, self.variance)[self.labels] * energy)
        if rows.any() and rows.double().mean() <= _FEW and not self.mostly_kinked:
            self.star = self.star.relaxed(rows, rtol)
            self.expansion = self.star.expand(exact, keep=True)

    def refine(self, rtol: float, max_steps: int) -> None:
        """Resolves paths better until their errors matter no more, or better resolution does not help."""
        for _ in range(_MAX_REFINEMENTS):
            finer = self._resolved(rtol)
            if finer is self.star or self.num_steps >= max_steps:
                break
            self.restart(finer)
            self.descend(rtol, max_steps)

    def _resolved(self, rtol: float) -> Star:
        """The paths in as many elements as their errors ask for, before they are solved in these."""
        found, error = self.star, self.star.errors()
        limit = _CAREFUL * rtol * (self.variance / self._sum(torch.ones_like(self.share))).sqrt()
        for _ in range(_MAX_REFINEMENTS):
            noise = self.noise(error)[self.labels]
            rows = (self._absolute(error) > limit[self.labels]) & (noise > _CAREFUL * rtol)
            if self.mostly_kinked:
                rows &= ~found.kinked() | (noise > ACCEPT)
            if (finer := found.refined(rows)) is None:
                break
            found, error = finer, finer.errors()
        return found

    def restart(self, new: Star) -> None:
        self.stuck[:], self.kinked = False, new.kinked()
        self._replace(new, self._is_near())

    def logarithms(self, codes: Tensor) -> Tensor:
        """The logarithms of the codes at their centers, ``(n, d)``; where M sees nothing, those of straight lines."""
        M, line = self.paths.tensor(self.centers)[self.labels], codes - self.centers[self.labels]
        return velocity_of(-0.5 * self.expansion.slope, M, line)

    def _newton(self) -> tuple[Tensor, Tensor]:
        """The step of every center, and the decrease of the variance that it promises together with the paths."""
        slope, hessian = self._mean(self.expansion.slope), self._mean(self.expansion.hessian)
        values, vectors = torch.linalg.eigh(0.5 * (hessian + hessian.mT))
        # where squared distances curve down, the step still goes downhill
        least = (1e-6 * values.abs().amax(-1, keepdim=True)).clamp_min(torch.finfo(values.dtype).tiny ** 0.5)
        size = torch.maximum(values.abs(), least)
        step = -(vectors @ ((vectors.mT @ slope[..., None]) / size[..., None]))[..., 0]
        return step, self._mean(self.expansion.inner) - 0.5 * (slope * step).sum(-1)

    def moving(self, rtol: float) -> Tensor:
        """The clusters that have something left to gain, ``(k,)``."""
        rtol = max(rtol, 4 * torch.finfo(self.centers.dtype).eps ** 0.5)
        enough = rtol**2 * self.variance
        if self.mostly_kinked:
            enough += _ENERGY * self._mean(self.kinked * self.star.errors() * self.expansion.energy)
        return ~self.stuck & (self._promise() > enough)

    def _promise(self) -> Tensor:
        return self._newton()[1]

    def _take(self, step: Tensor, promise: Tensor, moving: Tensor, rtol: float) -> None:
        """One step of the moving clusters, shortened where the variance does not fall."""
        before, enough = self.variance, (_ENOUGH * rtol) ** 2
        # centers and paths that have next to nothing left to gain stay, so that they need not be expanded again
        stays = promise - self._mean(self.expansion.inner) <= enough * before
        step = torch.where(stays[:, None], 0, step)
        settled = (stays | ~moving)[self.labels] & (self.expansion.inner <= enough * self.expansion.energy)
        size = _lengths(step, self.paths.tensor(self.centers))
        length = moving * (_LONGEST * before.sqrt() / size.clamp_min(torch.finfo(size.dtype).tiny)).clamp_max(1.0)
        # energies that fall faster than the triangle inequality allows are those of paths that have left the domain
        own = (self.expansion.energy - 2 * self.expansion.inner).clamp_min(0).sqrt()
        most = before * (1 + 64 * torch.finfo(step.dtype).eps)
        # a step of length zero is always good, so the loop ends with a trial that is
        for shorter in [0.5] * (_HALVINGS - 1) + [0.0, 0.0]:
            share, gone = length[self.labels], (length * size)[self.labels]
            trial = self.star.moved(share[:, None] * step[self.labels], torch.where(settled, 0, share))
            energy, least = trial.energy(), 0.5 * (own - 2 * gone).clamp_min(0).square()
            after = self._mean(torch.where(energy >= least, energy, torch.inf))
            good = (after <= most - _SUFFICIENT * length * promise) | (length == 0)
            if good.all():
                break
            length = torch.where(good, length, shorter * length.nan_to_num())
        self.stuck |= moving & (length == 0)
        self._replace(trial, self._is_near(_LAST))

    def _replace(self, new: Star, exact: bool) -> None:
        self.star, self.expansion = new, new.expand(exact, keep=not self.mostly_kinked)
        self.num_steps += 1
        self.centers = self.centers.index_copy(0, self.labels, new.centers)

    def _is_near(self, least: float = 0.0) -> bool:
        """Whether so little is left to gain that exact Hessians pay, and more than a share `least` of the variance."""
        return bool(least < _ratio(self._promise(), self.variance).amax() <= _NEAR) and not self.mostly_kinked

    def _absolute(self, error: Tensor) -> Tensor:
        """Relative errors of the logarithms as absolute ones of the mean, zero where there is no path."""
        error = error.clamp_max(1.0) * self.expansion.energy.clamp_min(0).sqrt()
        return self.share * torch.where(self.share > 0, error, 0)

    def _sum(self, values: Tensor) -> Tensor:
        return torch.zeros(len(self.centers), *values.shape[1:]).to(values).index_add(0, self.labels, values)

    def _mean(self, values: Tensor) -> Tensor:
        share = self.share.reshape(-1, *[1] * (values.ndim - 1))
        return self._sum(torch.where(share > 0, share * values, 0))


def _lengths(v: Tensor, matrix: Tensor) -> Tensor:
    return torch.einsum("ni,nij,nj->n", v, matrix, v).clamp_min(0).sqrt()


def _ratio(size: Tensor, spread: Tensor) -> Tensor:
    return torch.where(spread > 0, size / spread.clamp_min(torch.finfo(spread.dtype).tiny), 0)
