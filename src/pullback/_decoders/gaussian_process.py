r"""The posterior of a Gaussian process as a decoder: the geometry of the Gaussian process latent variable model.

Given codes :math:`z_n` and data :math:`x_n`, every feature of x is a Gaussian process with the kernel
:math:`k(z, z') = s^2 \exp(-|z - z'|^2 / 2\ell^2)` observed with noise :math:`\tau^2`. Its posterior is Gaussian in
closed form (Rasmussen and Williams 2006, chapter 2),

.. math:: \mu(z) = \bar x + k_z^\top (K + \tau^2)^{-1} (x - \bar x), \qquad
          v(z) = s^2 - k_z^\top (K + \tau^2)^{-1} k_z ,

and it knows where the data end: away from them v rises to :math:`s^2`. With the Cholesky factor
:math:`K + \tau^2 = L L^\top` everything is a function of the whitened features :math:`w(z) = L^{-1} k_z`:
:math:`\mu = \bar x + w^\top A` and :math:`v = s^2 - |w|^2`.
"""

from __future__ import annotations

import math
from typing import Self

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.distributions import Normal

from pullback._decoders.contract import as_codes
from pullback._decoders.support import squared_distances
from pullback._options import check_options
from pullback._typing import Array, Codes, CodeSet, Float


class GPDecoder(nn.Module):
    r"""The exact posterior of independent Gaussian processes, one for each feature, with a common kernel.

    ``decoder(z)`` is the predictive distribution :math:`\mathcal N(\mu(z),\ v(z) + \tau^2)` of an observation. Memory
    grows with the square of the number of codes: a few thousand are fine.

    Args:
        codes, x: latent codes ``(n, d)`` and data ``(n, D)``.
        lengthscale, signal, noise: :math:`\ell`, the standard deviation s of the process, and that of the noise,
            :math:`\tau`. `GPDecoder.fit` finds them by maximal marginal likelihood.

    >>> import torch, pullback as pb
    >>> z = torch.linspace(-2, 2, 9)[:, None]
    >>> decoder = pb.GPDecoder(z, z.sin(), lengthscale=1.0, signal=1.0, noise=0.01)
    >>> decoder(torch.tensor([[0.5], [9.0]])).stddev.flatten()  # grows off the data
    tensor([0.0134, 1.0000])
    """

    codes: Tensor
    origin: Tensor
    mean: Tensor
    lengthscale: Tensor
    signal: Tensor
    noise: Tensor
    whiten: Tensor
    weights: Tensor

    def __init__(
        self, codes: CodeSet, x: Float[Tensor, "n D"] | Array, *, lengthscale: float, signal: float, noise: float
    ):
        super().__init__()
        check_options(lengthscale=lengthscale, signal=signal, noise=noise)
        codes, x = _checked(codes, x)
        for name, value in {"lengthscale": lengthscale, "signal": signal, "noise": noise}.items():
            self.register_buffer(name, codes.new_tensor(value))
        self.register_buffer("origin", codes.mean(0))
        self.register_buffer("codes", codes - self.origin)
        self.register_buffer("mean", x.mean(0))
        factor = _factor(_kernel(squared_distances(self.codes, self.codes), self.lengthscale, self.signal), self.noise)
        self.register_buffer("whiten", torch.linalg.solve_triangular(factor, torch.eye(len(x)).to(x), upper=False))
        self.register_buffer("weights", self.whiten @ (x - self.mean))

    @classmethod
    def fit(cls, codes: CodeSet, x: Float[Tensor, "n D"] | Array, *, max_iterations: int = 100) -> Self:
        """The posterior with the hyperparameters of maximal marginal likelihood (L-BFGS in their logarithms).

        The noise is at least what keeps the kernel matrix regular to working precision, also for data without any.
        """
        check_options(max_iterations=max_iterations)
        codes, x = _checked(codes, x)
        z, y = (codes - codes.mean(0)).double(), (x - x.mean(0)).double()
        squares = squared_distances(z, z)
        start = np.log([math.sqrt(float(squares.median()) + 1e-12), float(y.square().mean().sqrt()), 0.3])

        def objective(log_parameters: np.ndarray) -> tuple[float, np.ndarray]:
            """The negative log-likelihood of a value (Rasmussen and Williams 2006, equation 2.30), and its gradient."""
            theta = torch.tensor(log_parameters, dtype=z.dtype, device=z.device, requires_grad=True)
            lengthscale, signal, share = theta.exp()
            factor = _factor(_kernel(squares, lengthscale, signal), share * signal)
            whitened = torch.linalg.solve_triangular(factor, y, upper=False)
            log_det = 2 * factor.diagonal().log().sum()
            total = whitened.square().sum() + y.shape[1] * log_det + y.numel() * math.log(2 * math.pi)
            loss = 0.5 * total / y.numel()
            (gradient,) = torch.autograd.grad(loss, theta)
            return loss.item(), gradient.cpu().numpy()

        bounds, options = [(value - 8, value + 8) for value in start], {"maxiter": max_iterations}
        # ten times the rounding of the largest eigenvalue: of 160 sets 40 could not be factored with 0.1, none with 1
        bounds[2] = 0.5 * math.log(10 * len(x) * torch.finfo(x.dtype).eps), bounds[2][1]
        best = minimize(objective, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
        lengthscale, signal, share = np.exp(best.x).tolist()
        return cls(codes, x, lengthscale=lengthscale, signal=signal, noise=share * signal)

    def forward(self, z: Codes) -> Normal:
        """The Gaussian distribution of the D features at ``z``."""
        w = self.features(z)
        variance = (self.signal.square() - w.square().sum(-1, keepdim=True)).clamp_min(0) + self.noise.square()
        mean = self.mean + w @ self.weights
        return Normal(mean, variance.sqrt().expand_as(mean))

    def features(self, z: Codes) -> Float[Tensor, "*batch n"]:
        r"""Whitened features :math:`w(z) = L^{-1} k_z`; the posterior covariance is ``k(z, z') - w(z) · w(z')``."""
        squares = squared_distances(as_codes(z, self.codes, dim=self.codes.shape[1]) - self.origin, self.codes)
        return _kernel(squares, self.lengthscale, self.signal) @ self.whiten.mT


def _kernel(squares: Tensor, lengthscale: Tensor, signal: Tensor) -> Tensor:
    return signal.square() * torch.exp(-0.5 * squares / lengthscale.square())


def _factor(kernel: Tensor, noise: Tensor) -> Tensor:
    factor, info = torch.linalg.cholesky_ex(kernel + noise.square() * torch.eye(len(kernel)).to(kernel))
    if info != 0:
        raise ValueError(
            "The kernel matrix of the codes is singular to working precision: some codes are too close for this "
            "lengthscale and noise. Raise noise, lower lengthscale, or use float64 codes."
        )
    return factor


def _checked(codes: Tensor | Array, x: Tensor | Array) -> tuple[Tensor, Tensor]:
    codes, x = as_codes(codes, a_set=True, finite=True), as_codes(x, codes, finite=True)
    if x.ndim != 2 or len(codes) != len(x):
        raise ValueError(
            f"GPDecoder needs codes (n, d) and data (n, D) of the same n; got {tuple(codes.shape)} and "
            f"{tuple(x.shape)}. Flatten images first: x.flatten(1)."
        )
    return codes, x
