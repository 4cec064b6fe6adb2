"""The Fisher information of one distribution, as an object the metric can contract with.

A family's information matrix is a fact about the family: coordinates ``eta`` and a positive semi-definite matrix
``I(eta)`` on their tangents. Storing the matrix is wasteful for most families (it is diagonal, or a rank-one change of
a diagonal) and impossible for some (a multivariate normal in 784 dimensions), so an `Information` holds a *function*
instead: either a root ``R`` with ``|R u|² = uᵀ I u``, or the product ``I u``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pullback._autodiff.derivatives import basis

Linear = Callable[[Tensor, Tensor], Tensor]


class MissingRuleError(NotImplementedError):
    """No closed form is known for these distributions. Not to be mistaken for a `NotImplementedError` of the user's."""


@dataclass(frozen=True, eq=False)
class Maps:
    """A family's embedding (`pullback.embed`) as pure functions of ``eta`` and of the origin's, ``eta0`` or None."""

    # the distinct maps (phi,) or (phi, psi), of shape (*b, m) each
    values: Callable[[Tensor, Tensor | None], tuple[Tensor, ...]]
    # their derivatives along tangents u of shape (*n, *b, k)
    push: Callable[[Tensor, Tensor | None, Tensor], tuple[Tensor, ...]]
    # its transpose, of shape (*b, k) for a force (*b, m) on each map, where known better than by differentiation
    pull: Callable[[Tensor, Tensor | None, list[Tensor]], Tensor] | None = None
    # rows of two k x k matrices L, R with L(i)ᵀ R(j) + R(i)ᵀ L(j) = φ'(i)ᵀ ψ'(j) + ψ'(i)ᵀ φ'(j), if these are smaller
    factors: Callable[[Tensor, Tensor | None], Sequence[Sequence[Sequence[Tensor]]]] | None = None


@dataclass(frozen=True, eq=False)
class Information:
    r"""Fisher information of a distribution with ``batch_shape`` ``*b`` in the coordinates ``eta``.

    Give `root` or `product`, or both where the product is the cheaper. They are pure functions of ``(eta, u)``, linear
    in the tangents ``u`` of shape ``(*m, *b, k)``; they must not capture tensors that depend on the latent code,
    because the metric differentiates ``eta`` and evaluates them afterward.

    Attributes:
        eta: coordinates of the distribution on its family, shape ``(*b, k)``, differentiable functions of its
            parameters.
        root: ``root(eta, u)`` of shape ``(*m, *b, r)`` with :math:`|\mathrm{root}(\eta, u)|^2 = u^\top I(\eta) u`.
            Keeps the pulled-back metric positive semi-definite by construction.
        product: ``product(eta, u)`` :math:`= I(\eta) u`, of the shape of ``u``.
        exact: False where the information is an estimate (see `pullback.score_information`).
        isometry: a Euclidean embedding ``isometry(eta, eta0)`` of shape ``(*b, r)`` whose derivative is `root`, entry
            by entry. ``eta0`` are coordinates near which rounding should be best, or None. It is the family's
            `pullback.embed`, and the solvers need no derivative of it but `root`.
        separable: True promises that each number of `isometry` depends on the coordinate in its own place alone, so the
            information is diagonal. `pullback.testing.check_metric` verifies both promises.
        pair: a dual embedding as a function of ``eta``, where there is no Euclidean one.

    >>> eta = torch.tensor([4.0])
    >>> Information(eta, root=lambda eta, u: u / eta.sqrt()).matrix  # Poisson: I = 1/λ
    tensor([[0.2500]])
    """

    eta: Tensor
    root: Linear | None = None
    product: Linear | None = None
    exact: bool = True
    isometry: Callable[[Tensor, Tensor | None], Tensor] | None = None
    separable: bool = False
    pair: Maps | None = None

    def __post_init__(self) -> None:
        if self.root is None and self.product is None:
            raise ValueError("Information takes root= or product=; see its docstring for their meaning.")

    @classmethod
    def from_matrix(cls, eta: Tensor, matrix: Callable[[Tensor], Tensor]) -> Information:
        """From a function ``matrix(eta)`` of shape ``(*b, k, k)``: the textbook form, and the easiest to write."""
        return cls(eta, product=lambda eta, u: (matrix(eta) @ u[..., None])[..., 0])

    @property
    def maps(self) -> Maps | None:
        """The embedding as a function of ``eta``: the isometry, or else the pair."""
        isometry, root = self.isometry, self.root
        if isometry is None or root is None:
            return self.pair
        return Maps(lambda eta, eta0: (isometry(eta, eta0),), lambda eta, _, u: (root(eta, u),))

    @property
    def matrix(self) -> Tensor:
        """The information matrix in the coordinates ``eta``, shape ``(*b, k, k)``."""
        return self.gram(self.eta, basis(self.eta), self.eta.ndim - 1)

    def gram(self, eta: Tensor, u: Tensor, num_batch: int) -> Tensor:
        r"""``uᵢᵀ I(eta) uⱼ`` for tangents ``u (m, *b, k)``, summed over all but the first `num_batch` dimensions."""
        if self.product is not None:
            left, right = u, self.product(eta, u)
        else:
            assert self.root is not None
            left = right = self.root(eta, u)
        gram = _flat(left, num_batch) @ _flat(right, num_batch).mT
        return gram if left is right else 0.5 * (gram + gram.mT)


def planar(columns: Sequence[Tensor]) -> Tensor:
    """Coordinates ``(*b, k)`` from their k columns, each of which stays in one piece of memory."""
    return torch.stack(list(columns), -2).mT if columns[0].ndim else torch.stack(list(columns), -1)


def _flat(u: Tensor, num_batch: int) -> Tensor:
    """``(m, *batch, *features, k) -> (*batch, m, prod(features) k)``."""
    return u.flatten(1 + num_batch).movedim(0, -2)
