"""What the estimators share: scikit-learn's habits, files without pickles, and NumPy or torch at the door.

What comes out is of the kind that went in: fitted attributes follow the data of `fit`, answers those of the call.
"""

from __future__ import annotations

import abc
import json
from dataclasses import KW_ONLY, dataclass
from os import PathLike
from typing import Any, Self

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from pullback._metrics.base import Metric, codes_for
from pullback._options import check_options
from pullback._solvers.base import Solver
from pullback.statistics._paths import DEFAULT_RTOL, Flat, Paths, Starts

Array = np.ndarray | Tensor
# Parameters that must be positive, checked with the codes.
_POSITIVE = ("rtol", "max_iter", "n_init", "num_points")


@dataclass(eq=False, repr=False)
class Estimator(BaseEstimator, abc.ABC):
    """The base of the estimators (abstract): data of either kind, the metric and its paths, saving and loading."""

    metric: Metric | None = None
    _: KW_ONLY
    init: Starts = None
    solver: Solver | None = None

    @abc.abstractmethod
    def fit(self, X: Any, y: Any = None) -> Self:
        """Fits the estimator to codes ``(n, d)``."""

    def save(self, path: str | PathLike[str]) -> None:
        """Writes parameters and fitted attributes to one file: tensors as safetensors, the rest as JSON in its header.

        Objects, such as the metric or a solver, are not written; give them to `load` again.
        """
        check_is_fitted(self)
        params = self.get_params(deep=False)
        plain = {n: v for n, v in params.items() if isinstance(v, bool | int | float | str | None)}
        fitted = {n: v for n, v in vars(self).items() if n.endswith("_") and not n.startswith("_")}
        arrays = {n: v for n, v in fitted.items() if isinstance(v, np.ndarray) and v.dtype.kind in "fiub"}
        tensors = {n: torch.as_tensor(v) for n, v in fitted.items() if n in arrays or isinstance(v, Tensor)}
        header = {
            "estimator": type(self).__name__,
            "params": plain,
            "objects": sorted(params.keys() - plain.keys()),
            "numpy": sorted(arrays),
            "attributes": {n: v for n, v in fitted.items() if n not in tensors},
        }
        columns = {n: v.detach().cpu().contiguous().clone() for n, v in tensors.items()}
        save_file(columns, path, metadata={"pullback": json.dumps(header, default=lambda value: value.tolist())})

    @classmethod
    def load(cls, path: str | PathLike[str], **params: Any) -> Self:
        """Reads what `save` wrote. Parameters that are objects must be given again: ``load(path, metric=metric)``."""
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("pullback", "{}"))
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
        found = header.get("estimator", "no estimator of pullback")
        if found != cls.__name__:
            raise ValueError(f"{path} holds {found}, not {cls.__name__}. Use its own load.")
        if missing := sorted(set(header["objects"]) - params.keys()):
            again = f"{cls.__name__}.load(path, {', '.join(f'{name}=…' for name in missing)})"
            raise ValueError(f"Objects are not stored: {', '.join(missing)}. Give them again: {again}.")
        estimator = cls(**{**header["params"], **params})
        for name, value in tensors.items():
            setattr(estimator, name, value.numpy() if name in header["numpy"] else value)
        for name, value in header["attributes"].items():
            setattr(estimator, name, np.array(value, dtype=object) if isinstance(value, list) else value)
        return estimator

    def _paths(self, rtol: float | None = None) -> Paths:
        """How paths are found, by the parameters `metric`, `init`, `solver` and `rtol`."""
        metric = Flat() if self.metric is None else self.metric
        return Paths(metric, self.init, self.solver, rtol or getattr(self, "rtol", None) or DEFAULT_RTOL)

    def _codes(self, X: Any, *, reset: bool = False, **checks: Any) -> Tensor:
        """Codes ``(n, d)``, checked as scikit-learn does, as a tensor of the decoder's kind; `reset` when fitting."""
        if not reset:
            check_is_fitted(self)
        check_options(**{name: value for name, value in self.get_params(deep=False).items() if name in _POSITIVE})
        plain: Any = X.detach().cpu().numpy() if isinstance(X, Tensor) else X
        array = validate_data(self, plain, reset=reset, dtype=[np.float64, np.float32], **checks)
        # a copy, since torch warns of memory that it may not write to
        is_float = isinstance(X, Tensor) and X.is_floating_point()
        codes = X.detach() if is_float else torch.from_numpy(np.array(array, order="C"))
        return codes if self.metric is None else codes_for(self.metric, codes)[0]


def like(value: Tensor, X: Any) -> Any:
    """A result as the caller's kind of array: a tensor for tensors, else NumPy."""
    return value if isinstance(X, Tensor) else value.detach().cpu().numpy()
