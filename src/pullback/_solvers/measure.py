"""Energies and lengths of the paths between nodes: numbers that belong to the path, not to its discretization."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pullback._numerics.spline import lerp_nodes, refine
from pullback._solvers.chords import ChordEnergy, total_energy, total_length
from pullback._solvers.objective import NOISE

# Ratios of the errors at T and 2T segments that count as the four of theory (VAE: between them all smooth paths,
# outside kinks).
_LEAST_RATIO, _LARGEST_RATIO = 3.0, 5.0
# Part of the last change that the finer of two levels still lacks at order four, each with twice the segments.
FOURTH_ORDER = 1 / (2**4 - 1)


@dataclass(frozen=True)
class Measurement:
    """Energy and length of paths, independent of their nodes up to `error`, relative to the energy; in the memory of
    the host.

    `chord_length` is the length that the chords between the nodes see; at a minimum of their energy it is its root.
    `asymptotic` says that errors fall by about four as segments are halved, so that theory may be believed.
    """

    energy: Tensor
    length: Tensor
    error: Tensor
    chord_length: Tensor
    asymptotic: Tensor


def measure_spline(chords: ChordEnergy, nodes: Tensor) -> Measurement:
    """Measures the splines through ``nodes`` of T segments on T, 2T and 4T segments, by Romberg extrapolation."""
    ds2 = chords.chords(refine(nodes, 4), 4)
    sums = torch.stack([total(x) for total in (total_energy, total_length) for x in ds2]).cpu()
    energies, lengths = sums[:3], sums[3:]
    energy, error = romberg(*energies)
    length, length_error = romberg(*lengths, linear=True)
    error = torch.maximum(_relative(error, energy), 2 * _relative(length_error, length))
    return Measurement(energy, length, error, lengths[0], _asymptotic(*energies))


def measure_pieces(chords: ChordEnergy, nodes: Tensor, substeps: int) -> Measurement:
    """Measures the straight pieces between ``nodes``, each in `substeps` chords; the error is judged by half as
    many."""
    coarse, fine = chords.chords(lerp_nodes(nodes, substeps), 2)
    least, energy, length = torch.stack([total_energy(coarse), total_energy(fine), total_length(fine)]).cpu()
    error = _relative((energy - least).abs(), energy)
    return Measurement(energy, length, error, length, error.isnan())


def romberg(coarse: Tensor, middle: Tensor, fine: Tensor, *, linear: bool = False) -> tuple[Tensor, Tensor]:
    """Two Richardson steps for values of order two at T, 2T, 4T, and an estimate of the error.

    Where the differences do not fall by about four the values are not in the asymptotic range, and the last difference
    is the error. Where they fall by less, the finest value is returned as it is. With `linear` that difference is added
    once more, because at the kinks of a decoder chords miss a part in proportion to their length.
    """
    first, second = middle + (middle - coarse) / 3, fine + (fine - middle) / 3
    change = fine - middle
    regular = change.abs() <= 0.35 * (middle - coarse).abs() + 1e-12 * fine.abs()
    irregular = fine + change.clamp_min(0) if linear else fine
    value = torch.where(regular, second + (second - first) * FOURTH_ORDER, irregular)
    theory = regular & _asymptotic(coarse, middle, fine)
    return value, torch.where(theory, (second - first).abs() * FOURTH_ORDER, change.abs())


def _asymptotic(coarse: Tensor, middle: Tensor, fine: Tensor) -> Tensor:
    first, second = (middle - coarse).abs(), (fine - middle).abs()
    noise = NOISE * torch.finfo(fine.dtype).eps * fine.abs()
    return (second <= noise) | ((first <= _LARGEST_RATIO * second) & (first >= _LEAST_RATIO * second))


def _relative(error: Tensor, energy: Tensor) -> Tensor:
    return error / energy.clamp_min(torch.finfo(energy.dtype).tiny)
