"""Curves on their way down to a minimum of their energy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pullback._solvers.base import Status


@dataclass
class Descent:
    """Curves on their way down, one entry a curve in every field."""

    index: Tensor  # position in the caller's batch
    nodes: Tensor  # (B, T + 1, d)
    times: Tensor  # (B, T): shares of the segments in the time, which add to 1
    energy: Tensor
    damping: Tensor
    pull: Tensor  # weight of the Euclidean energy
    held: Tensor  # (B, n, k, k): guess of the curvature, used where the expansion has none of its own; empty if there is none
    rtol: Tensor  # share of the energy that may be left to gain
    growth: Tensor  # factor by which the next rejection raises the damping
    predicted: Tensor  # decrease predicted for the last accepted step
    progress: Tensor  # running mean of the decrease by accepted steps
    left: Tensor  # estimate of the decrease still to come
    exact: Tensor  # whether the expansion holds the exact Hessian
    barred: Tensor  # whether the exact Hessian here is not positive definite
    softness: Tensor  # decrease predicted for the first step with a guessed curvature, over that without; infinite at a saddle
    border: Tensor  # whether a step met a decoder that is not finite, and none has been taken freely since
    status: Tensor
    num_steps: Tensor

    @property
    def known(self) -> Tensor:
        """Whether the Hessian is the exact one, and positive definite."""
        return self.exact & ~self.barred

    @property
    def newton(self) -> Tensor:
        """Which curves take a step of Newton's, hardly damped: the next one is then of second order in this one."""
        return self.known & (self.damping <= 1e-3)

    @property
    def guessed(self) -> Tensor:
        """Which curves take steps with a guessed curvature."""
        return (self.held != 0).flatten(1).any(-1)

    @classmethod
    def start(cls, nodes: Tensor, times: Tensor, damping: Tensor, pull: Tensor, held: Tensor, rtol: Tensor) -> Descent:
        batch = torch.arange(nodes.shape[0], device=nodes.device)
        off = torch.zeros_like(batch, dtype=torch.bool)
        full = torch.full_like
        return cls(
            index=batch,
            nodes=nodes.clone(),
            times=times,
            energy=full(damping, torch.nan),
            damping=damping.clone(),
            pull=pull,
            held=held,
            rtol=rtol,
            growth=full(damping, 4.0),
            predicted=full(damping, torch.inf),
            progress=full(damping, torch.inf),
            left=full(damping, 0.0),
            exact=off,
            barred=off.clone(),
            softness=full(damping, 1.0),
            border=off.clone(),
            status=full(batch, Status.MAX_STEPS),
            num_steps=torch.zeros_like(batch),
        )
