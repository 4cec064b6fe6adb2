"""Principal geodesics: the directions from the mean in which the data vary most."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, Self

import torch
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted

from pullback._decoders.contract import as_codes
from pullback._progress import progress
from pullback._solvers.base import ConvergenceError
from pullback.statistics._estimator import Estimator, like
from pullback.statistics._frechet import frechet_mean
from pullback.statistics._paths import DEFAULT_RTOL


@dataclass(eq=False, repr=False)
class PrincipalGeodesicAnalysis(ClassNamePrefixFeaturesOutMixin, TransformerMixin, Estimator):
    r"""Principal component analysis of the logarithms at the Fréchet mean, in the metric's inner product.

    A component is a tangent :math:`u_k` at the mean and stands for a geodesic from there (Fletcher et al. 2004, in the
    linearized form, also called tangent PCA). `transform` gives the coordinates :math:`\langle \mathrm{Log}_\mu(z), u_k
    \rangle_{M(\mu)}` of codes and `inverse_transform` the codes :math:`\mathrm{Exp}_\mu(\sum_k s_k u_k)`. Distances
    from the mean are kept: with all components, \|s\| is :math:`d(\mu, z)`. In flat space it is
    `sklearn.decomposition.PCA`.

    Args:
        metric: the geometry; None for flat space.
        n_components: how many; by default as many as the latent space has dimensions (or codes there are).
        rtol: relative accuracy of the mean and of logarithms.
        init, solver: as in `pullback.geodesic`.

    Attributes:
        mean_: the Fréchet mean, ``(d,)``.
        components_: ``(n_components, d)``, of unit length and orthogonal in M(μ).
        covectors_: `components_` M(μ).
        explained_variance_: and `explained_variance_ratio_`, `singular_values_`, `n_components_`, as in scikit-learn.

    >>> import torch, pullback as pb
    >>> z = torch.tensor([[0.0, 0.0], [1.0, 2.0], [2.0, 4.0]], dtype=torch.float64)
    >>> pb.statistics.PrincipalGeodesicAnalysis(n_components=1).fit(z).explained_variance_ratio_
    tensor([1.], dtype=torch.float64)
    """

    n_components: int | None = None
    _: KW_ONLY
    rtol: float = DEFAULT_RTOL

    @progress("principal geodesics")
    def fit(self, X: Any, y: Any = None) -> Self:
        """Finds the mean and the principal directions of codes ``(n, d)``."""
        codes = self._codes(X, reset=True, ensure_min_samples=2)
        most, paths = min(codes.shape), self._paths()
        num = most if self.n_components is None else self.n_components
        if not 1 <= num <= most:
            raise ValueError(
                f"n_components={num} must be between 1 and {most}, the smaller of the number of codes and of "
                "dimensions."
            )
        found = frechet_mean(paths.metric, codes, solver=self.solver, init=self.init, rtol=self.rtol)
        if not torch.isfinite(found.logarithms).all():
            raise ConvergenceError(f"Not every code has a logarithm at the mean: {found.message}.", found)
        # the symmetric square root of M
        values, vectors = torch.linalg.eigh(paths.tensor(found.mean))
        root = (vectors * torch.where(values > 1e-10 * values.amax(), values, 0).sqrt()) @ vectors.mT
        tangents = found.logarithms @ root
        _, values, directions = torch.linalg.svd(tangents - tangents.mean(0), full_matrices=False)
        largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
        directions = directions[:num] * torch.where(largest[:num] < 0, -1, 1)
        self.mean_, self.n_components_ = like(found.mean, X), num
        inverse = torch.linalg.pinv(root, rtol=1e-6, hermitian=True)
        self.components_, self.covectors_ = like(directions @ inverse, X), like(directions @ root, X)
        variance = values**2 / (len(codes) - 1)
        self.explained_variance_, self.singular_values_ = like(variance[:num], X), like(values[:num], X)
        total = variance.sum().clamp_min(torch.finfo(variance.dtype).tiny)
        self.explained_variance_ratio_ = like(variance[:num] / total, X)
        return self

    def transform(self, X: Any) -> Any:
        """The coordinates ``(n, n_components)`` of codes along the components; NaN for codes that no path reaches."""
        codes = self._codes(X)
        found = self._paths().logarithms(torch.as_tensor(self.mean_).to(codes).expand_as(codes), codes)
        return like(found.velocity @ torch.as_tensor(self.covectors_).to(codes).mT, X)

    def inverse_transform(self, X: Any) -> Any:
        """The codes ``(n, d)`` with coordinates ``(n, n_components)``: where geodesics from the mean arrive, or NaN."""
        check_is_fitted(self)
        scores = as_codes(X, torch.as_tensor(self.components_), dim=self.n_components_, a_set=True)
        v = scores @ torch.as_tensor(self.components_).to(scores)
        return like(self._paths().exponentials(torch.as_tensor(self.mean_).to(scores).expand_as(v), v), X)

    @property
    def _n_features_out(self) -> int:
        return self.n_components_

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        if tags.transformer_tags is not None:
            tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags
