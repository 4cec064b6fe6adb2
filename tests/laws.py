"""Laws every decoder family obeys, run on lists of cases: independent routes to the same metric must meet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.distributions import Distribution, kl_divergence

import pullback as pb
from pullback import testing
from pullback._autodiff.derivatives import pushforward


@dataclass(frozen=True)
class Case:
    """A decoder of one family: a smooth, curved map from codes to its parameters (all of them, so every entry of I is
    seen)."""

    name: str
    decoder: Callable[[Tensor], Distribution]
    z: Tensor = field(repr=False)
    # None where torch has no KL divergence, or one that autodiff gets wrong
    kl: Callable[[Distribution, Distribution], Tensor] | None = kl_divergence
    embedded: bool = True

    def __str__(self) -> str:
        return self.name


def total(values: Tensor, num_batch: int) -> Tensor:
    """Sums all but the first `num_batch` dimensions."""
    return values.flatten(num_batch).sum(-1) if values.ndim > num_batch else values


def check_kl_hessian(case: Case, rtol: float = 1e-10) -> None:
    """M equals the Hessian of KL(p(z), p(z + v)) at v = 0."""
    assert case.kl is not None
    M = pb.FisherRaoMetric(case.decoder).tensor(case.z)
    for z, expected in zip(case.z, M, strict=True):
        p = case.decoder(z)
        hessian = torch.autograd.functional.hessian(lambda w, p=p: total(case.kl(p, case.decoder(w)), 0), z)
        torch.testing.assert_close(hessian, expected, rtol=rtol, atol=rtol * expected.abs().max().item())


def check_score_covariance(case: Case, num_samples: int = 20_000) -> None:
    """M equals E[s sᵀ], s the score in z, within five standard errors, entry by entry."""
    M = pb.FisherRaoMetric(case.decoder).tensor(case.z)
    torch.manual_seed(0)
    for z, expected in zip(case.z, M, strict=True):
        with torch.no_grad():
            x = case.decoder(z).sample((num_samples,))
        w = z.detach().expand(num_samples, -1).clone().requires_grad_()
        log_prob = total(case.decoder(w).log_prob(x), 1).sum()
        (score,) = torch.autograd.grad(log_prob, w)
        outer = score[:, :, None] * score[:, None, :]
        error = outer.std(0) / num_samples**0.5
        assert ((outer.mean(0) - expected).abs() <= 5 * error + 1e-9 * expected.abs().max()).all()


def check_embedding(case: Case) -> None:
    """Dφᵀ Dψ = M to rounding, and chord² = vᵀ M v to third order in v, symmetric."""
    metric = pb.FisherRaoMetric(case.decoder)
    M = metric.tensor(case.z)
    scale = M.abs().amax((-2, -1), keepdim=True)
    for origin in (None, case.z):
        _, (jphi, jpsi) = pushforward(lambda z, o=origin: metric.embed(z, origin=o), case.z)
        gram = torch.einsum("ink,jnk->nij", jphi, jpsi)
        torch.testing.assert_close(gram / scale, M / scale, rtol=0, atol=1e-10)
    check_chord_order(case)


def check_frame(case: Case) -> None:
    """A metric's frame is its embedding and the derivatives of it, up to a constant; families whose root is that
    derivative (`pullback.Information.isometric`) reach it without differentiating the embedding."""
    metric = pb.FisherRaoMetric(case.decoder)
    for origin in (None, case.z[:1]):
        phi, psi = metric.embed(case.z, origin=origin)
        expected, slopes = pushforward(lambda z, o=origin: metric.embed(z, origin=o), case.z)
        frame = metric.frame_at(case.z, origin=origin)
        values, jacobians = frame.values, frame.tangents
        assert len(values) == len(jacobians) == (1 if phi is psi else 2)
        for value, other, jacobian, slope in zip(values, expected, jacobians, slopes, strict=False):
            _agree(value - value[:1], other - other[:1])
            _agree(jacobian, slope)
        (phi, psi), (left, right) = ((x[0].movedim(1, 0), x[-1].movedim(1, 0)) for x in (slopes, *frame.factors))
        expected, gram = (x.flatten(0, 1) @ y.flatten(0, 1).mT for x, y in ((phi, psi), (left, right)))
        _agree(gram + gram.mT, expected + expected.mT)
        forces = [torch.randn_like(value) for value in values]
        _agree(frame.hessians(forces), replace(frame, parts=()).hessians(forces))


def _agree(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * expected.abs().max().item())


def check_chord_order(case: Case) -> None:
    """ds2(z - v, z + v) = 4 vᵀ M(z) v (1 + O(|v|²)): halving v divides the relative error by four; ds2 is symmetric."""
    metric = pb.FisherRaoMetric(case.decoder)
    torch.manual_seed(1)
    v = 0.05 * torch.nn.functional.normalize(torch.randn_like(case.z), dim=-1)

    def relative_error(h: float) -> Tensor:
        forward, backward = metric.ds2(case.z - h * v, case.z + h * v), metric.ds2(case.z + h * v, case.z - h * v)
        torch.testing.assert_close(forward, backward, rtol=1e-9, atol=1e-13)
        return (forward / (4 * h**2 * metric.inner(case.z, v, v)) - 1).abs()

    coarse, fine = relative_error(1.0), relative_error(0.5)
    assert (fine <= 0.35 * coarse + 1e-9).all(), (coarse, fine)


def check_promises(case: Case) -> None:
    """What the family's `Information` declares of itself holds, and is declared wherever the embedding has one number a
    coordinate."""
    testing._promises(pb.FisherRaoMetric(case.decoder), case.z, 1e-7)
