"""The laws every metric obeys, to be run on your own: one that passes can be trusted to solvers."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from pullback._autodiff.derivatives import pushforward
from pullback._decoders.contract import as_codes, decode, observed
from pullback._families.composite import independent
from pullback._families.information import Information
from pullback._metrics.base import Metric, codes_for
from pullback._metrics.fisher_rao import FisherRaoMetric
from pullback._typing import Codes

__all__ = ["check_metric"]


def check_metric(metric: Metric, z: Codes, *, rtol: float | None = None) -> None:
    r"""Raises an AssertionError with a sentence for the first law that the metric breaks at the codes ``z``.

    The laws: shapes for codes of any batch shape, dtype and device kept; M symmetric and positive semi-definite;
    `inner`, `norm` and `log_volume` are those of M; `ds2` symmetric, not negative, zero for equal codes, and equal to
    ``vᵀ M v`` up to third order in ``v``; a batch gives what a loop over its codes gives; a NaN in one code is refused
    or stays with that code; and if the metric is a dataclass with a field ``decoder``, M transforms as a tensor under a
    change of latent coordinates. For a `FisherRaoMetric`, what the family's `Information` promises (``isometry``,
    ``separable``, ``pair``) holds at the codes.

    Args:
        metric: the metric to check.
        z: codes, at least two, inside the region where the decoder makes sense.
        rtol: accuracy of the metric relative to its largest entry. By default ten roots of the dtype's precision; a
            metric by finite differences needs more.
    """
    (z,) = codes_for(metric, z)
    codes = as_codes(z.detach().reshape(-1, z.shape[-1]), a_set=True, least=2, finite=True)
    tolerance = rtol or 10 * torch.finfo(z.dtype).eps ** 0.5
    for law in (_shapes, _loop, _tensor, _steps, _nan, _coordinates, _promises):
        law(metric, codes, tolerance)


def _require(holds: bool | Tensor, sentence: str) -> None:
    if not bool(holds):
        raise AssertionError(sentence)


def _close(value: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Equal up to the tolerance times the largest expected entry of the same code."""
    size, error = (x[..., None].abs().flatten(1).amax(1) for x in (expected, value - expected))
    return bool((error <= tolerance * size.clamp_min(torch.finfo(value.dtype).tiny)).all())


def _noise(z: Tensor) -> list[Tensor]:
    """Two unit tangents at each code, always the same ones, without touching the caller's random state."""
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randn(z.shape, generator=generator, dtype=torch.float64) for _ in range(2)]
    return [torch.nn.functional.normalize(v, dim=-1).to(z) for v in noise]


def _shapes(metric: Metric, z: Tensor, _: float) -> None:
    d = z.shape[-1]
    for codes in (z[0], z, torch.stack([z, z.flip(0)])):
        given, batch = tuple(codes.shape), tuple(codes.shape[:-1])
        for name, measure, count, shape in (
            ("tensor(z)", metric.tensor, 1, (*batch, d, d)),
            ("ds2(z, z)", metric.ds2, 2, batch),
            ("norm(z, v)", metric.norm, 2, batch),
            ("log_volume(z)", metric.log_volume, 1, batch),
        ):
            value = measure(*[codes] * count)
            found = tuple(value.shape)
            _require(found == shape, f"{name} must have shape {shape} for codes of shape {given}, not {found}.")
            _require(value.dtype == z.dtype, f"{name} must keep the dtype {z.dtype} of the codes, not {value.dtype}.")
            _require(value.device == z.device, f"{name} must stay on the codes' device {z.device}, not {value.device}.")


def _tensor(metric: Metric, z: Tensor, tolerance: float) -> None:
    M = metric.tensor(z)
    _require(torch.isfinite(M).all(), "tensor(z) must be finite at codes where the decoder is.")
    _require(_close(M.mT, M, 1e3 * torch.finfo(M.dtype).eps), "tensor(z) must be symmetric: return ½ (M + Mᵀ).")
    eigenvalues = torch.linalg.eigvalsh(M)
    least, most = eigenvalues[:, 0], eigenvalues[:, -1]
    _require(
        (least >= -tolerance * most.abs()).all(),
        f"tensor(z) must be positive semi-definite; an eigenvalue is {least.min():.3g}, the largest {most.max():.3g}.",
    )
    u, v = _noise(z)
    size = M.abs().amax((-2, -1))
    products = torch.einsum("ni,nij,nj->n", u, M, v)
    _require(((metric.inner(z, u, v) - products).abs() <= tolerance * size).all(), "inner(z, u, v) must be uᵀ M(z) v.")
    squares = torch.einsum("ni,nij,nj->n", v, M, v).clamp_min(0)
    _require(((metric.norm(z, v) ** 2 - squares).abs() <= tolerance * size).all(), "norm(z, v) must be √(vᵀ M(z) v).")
    sign, logdet = torch.linalg.slogdet(M)
    singular = torch.linalg.cond(M) > 1 / tolerance
    right = (sign > 0) & ((metric.log_volume(z) - 0.5 * logdet).abs() <= tolerance * (1 + logdet.abs()))
    _require((singular | right).all(), "log_volume(z) must be ½ log det M(z) (and -inf where M is singular).")


def _steps(metric: Metric, z: Tensor, tolerance: float) -> None:
    v = _noise(z)[0]
    short = 0.05 / metric.norm(z, v).clamp_min(2.5)  # in z and under the metric
    b = z + short[:, None] * v
    forward, backward, zero = metric.ds2(z, b), metric.ds2(b, z), metric.ds2(z, z)
    _require(_close(backward, forward, tolerance), "ds2(a, b) must equal ds2(b, a): average both directions.")
    _require((forward >= 0).all(), "ds2(a, b) must not be negative: it is a squared length.")
    still = zero.abs() <= tolerance * forward.abs()
    _require(still.all(), "ds2(z, z) must be zero: a code has no distance to itself.")
    squares = metric.inner(z, v, v)
    visible = squares > tolerance * metric.tensor(z).abs().amax((-2, -1))

    def relative_error(h: Tensor) -> Tensor:
        return torch.where(visible, (metric.ds2(z, z + h[:, None] * v) / (h**2 * squares) - 1).abs(), 0).max()

    coarse, fine = relative_error(short), relative_error(short / 8)
    _require(
        fine <= 0.35 * coarse + 10 * tolerance,
        f"ds2(z, z + v) must be vᵀ M(z) v up to third order in v; the relative error falls only from {coarse:.2g} to "
        f"{fine:.2g} for a step eight times shorter. Is ds2 a squared length (twice a Kullback-Leibler divergence)?",
    )


def _loop(metric: Metric, z: Tensor, tolerance: float) -> None:
    law = "must give for a batch what it gives for its codes one by one: no statistics of the batch, no shared noise."
    tensors = torch.stack([metric.tensor(code) for code in z])
    _require(_close(metric.tensor(z), tensors, tolerance), f"tensor(z) {law}")
    b = z + 0.05 * _noise(z)[0]
    steps = torch.stack([metric.ds2(*pair) for pair in zip(z, b, strict=True)])
    _require(_close(metric.ds2(z, b), steps, tolerance), f"ds2(a, b) {law}")


def _nan(metric: Metric, z: Tensor, tolerance: float) -> None:
    broken = z.clone()
    broken[0] = torch.nan
    b = z + 0.05 * _noise(z)[0]
    for name, measure in (("tensor(z)", metric.tensor), ("ds2(a, b)", lambda a: metric.ds2(a, b))):
        try:
            value = measure(broken)
        except (ValueError, RuntimeError, ArithmeticError):
            continue  # refused with an error: as good
        _require(not torch.isfinite(value[0]).all(), f"{name} must not be finite for a code that is NaN.")
        alone = _close(value[1:], measure(z)[1:], tolerance)
        _require(alone, f"{name} must not let a NaN in one code reach its neighbors.")


def _coordinates(metric: Metric, z: Tensor, tolerance: float) -> None:
    """Under ``z = g(w)`` the tensor of ``decoder ∘ g`` at w must be ``Dgᵀ M(g(w)) Dg``."""
    if not dataclasses.is_dataclass(metric) or "decoder" not in {field.name for field in dataclasses.fields(metric)}:
        return
    structure: Any = metric
    decoder = observed(structure.decoder)
    d = z.shape[-1]
    noise = torch.randn(d, d, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rotation = torch.linalg.qr(noise)[0].to(z)

    def bend(w: Tensor) -> Tensor:
        return 0.1 * torch.sin(w @ rotation)

    w = z
    for _ in range(30):
        w = z - bend(w)
    other = dataclasses.replace(structure, decoder=lambda w: decoder(w + bend(w)))
    (g,), (J,) = pushforward(lambda w: (w + bend(w),), w)
    expected = torch.einsum("ink,nkl,jnl->nij", J, metric.tensor(g), J)
    _require(
        _close(other.tensor(w), expected, tolerance),
        "tensor(z) must transform as a tensor, Dgᵀ M Dg, under a change of latent coordinates: derive it from the "
        "decoded distributions alone.",
    )


def _promises(metric: Metric, z: Tensor, tolerance: float) -> None:
    """What an `Information` says of its family's embedding is true: solvers rely on it without looking."""
    if not isinstance(metric, FisherRaoMetric):
        return
    parts = independent(decode(observed(metric.decoder), z))
    _require(
        all(not part.separable or _is_separable(part, tolerance) for part in parts),
        "An Information with separable=True must have a Euclidean embedding, each number of which depends on the "
        "coordinate in its own place alone. Leave separable at False.",
    )
    if all(part.maps is not None for part in parts):
        origin = z[:1] if any(part.isometry is None for part in parts) else None
        frames = metric.frame_at(z, origin=origin), Metric.frame_at(metric, z, origin=origin)
        # Values of all codes at once: at the origin they are zero up to the rounding of the others.
        maps = [(*(x[None] for x in frame.values), *frame.tangents) for frame in frames]
        _require(
            all(_close(a, b, tolerance) for a, b in zip(*maps, strict=True)),
            "An Information with an isometry must have its derivative for a root, entry by entry and with its sign; "
            "one with a pair, the derivatives of the pair's values for its push. Leave both at None, or change one of "
            "the two.",
        )


def _is_separable(info: Information, tolerance: float) -> bool:
    """For every digit of the places in base two, those with digit 0 are moved: the others must not notice."""
    eta, maps = info.eta.detach(), info.maps
    if maps is None:
        return False
    one, place = torch.ones_like(eta), torch.arange(eta.shape[-1], device=eta.device)
    base, *more = maps.push(eta, None, one)
    if more or base.shape != eta.shape:
        return False
    for digit in range(eta.shape[-1].bit_length()):
        half = (place >> digit) % 2 == 1
        for kept in (half, ~half):
            (moved,) = maps.push(torch.where(kept, eta, 1.01 * eta), None, torch.where(kept, one, 0))
            if not _close(moved.flatten(1), torch.where(kept, base, 0).flatten(1), tolerance):
                return False
    return True
