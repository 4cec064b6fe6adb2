r"""What the estimators share: scikit-learn's habits, NumPy or torch at the door, and files without pickles.

An estimator follows scikit-learn: parameters are stored by the constructor as they come, `fit` checks its data and sets
attributes whose names end with an underscore, `get_params` and `clone` work. Data may be NumPy arrays or torch
tensors. What comes out is of the kind that went in: the fitted attributes follow the data of `fit`, the answers those
of the call.

The geometry is the parameter `metric`. None means flat space, in which every estimator is its well-known Euclidean
namesake.
"""

from __future__ import annotations

import abc
import json
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
from pullback.statistics._paths import DEFAULT_RTOL, Flat, Paths

Array = np.ndarray | Tensor
_PLAIN = (bool, int, float, str, type(None))
# Parameters that must be positive, checked with the codes.
_POSITIVE = ("rtol", "max_iter", "n_init", "num_points")


class Estimator(BaseEstimator, abc.ABC):
    """The base of the estimators (abstract): data of either kind, the metric, saving and loading."""

    metric: Metric | None

    @abc.abstractmethod
    def fit(self, X: Any, y: Any = None) -> Self:
        """Fits the estimator to codes ``(n, d)``."""

    def save(self, path: str | PathLike[str]) -> None:
        """Writes parameters and fitted attributes to one file: tensors as safetensors, the rest as JSON in its header.

        Objects, such as the metric or a solver, are not written; give them to `load` again.
        """
        check_is_fitted(self)
        params = self.get_params(deep=False)
        plain = {name: value for name, value in params.items() if isinstance(value, _PLAIN)}
        fitted = {n: v for n, v in vars(self).items() if n.endswith("_") and not n.startswith("_")}
        tensors = {n: v for n, v in fitted.items() if _is_numeric(v)}
        rest = {n: _plain(n, v) for n, v in fitted.items() if n not in tensors}
        header = {
            "estimator": type(self).__name__,
            "params": plain,
            "objects": sorted(params.keys() - plain.keys()),
            "numpy": sorted(n for n, v in tensors.items() if not isinstance(v, Tensor)),
            "attributes": rest,
        }
        columns = {n: torch.as_tensor(v).detach().cpu().contiguous().clone() for n, v in tensors.items()}
        save_file(columns, path, metadata={"pullback": json.dumps(header)})

    @classmethod
    def load(cls, path: str | PathLike[str], **params: Any) -> Self:
        """Reads what `save` wrote. Parameters that are objects must be given again: ``load(path, metric=metric)``."""
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
        header = json.loads(metadata.get("pullback", "{}"))
        if header.get("estimator") != cls.__name__:
            raise ValueError(
                f"{path} holds {header.get('estimator', 'no estimator of pullback')}, not {cls.__name__}. Use its own "
                "load."
            )
        missing = set(header["objects"]) - params.keys()
        if missing:
            given = ", ".join(f"{name}=…" for name in sorted(missing))
            raise ValueError(
                f"Objects are not stored: {', '.join(sorted(missing))}. Give them again: {cls.__name__}.load(path, "
                f"{given})."
            )
        estimator = cls(**{**header["params"], **params})
        for name, value in tensors.items():
            setattr(estimator, name, value.numpy() if name in header["numpy"] else value)
        for name, value in header["attributes"].items():
            setattr(estimator, name, np.array(value, dtype=object) if isinstance(value, list) else value)
        return estimator

    def _paths(self, rtol: float | None = None) -> Paths:
        """How paths are found, by the parameters `metric`, `init`, `solver` and `rtol`."""
        rtol = getattr(self, "rtol", DEFAULT_RTOL) if rtol is None else rtol
        metric = Flat() if self.metric is None else self.metric
        return Paths(metric, getattr(self, "init", None), getattr(self, "solver", None), rtol or DEFAULT_RTOL)

    def _codes(self, X: Any, *, reset: bool = False, **checks: Any) -> Tensor:
        """Checks codes ``(n, d)`` as scikit-learn does, and returns them as a tensor; `reset` when fitting.

        They get the precision and the device of the metric's decoder. Where these cannot be told, and in flat space,
        tensors and single or double precision arrays keep theirs, and everything else becomes double.
        """
        if not reset:
            check_is_fitted(self)
        check_options(**{name: value for name, value in self.get_params(deep=False).items() if name in _POSITIVE})
        plain: Any = X.detach().cpu().numpy() if isinstance(X, Tensor) else X
        array = validate_data(self, plain, reset=reset, dtype=[np.float64, np.float32], **checks)
        codes = X.detach() if isinstance(X, Tensor) and X.is_floating_point() else owned(array)
        return codes if self.metric is None else codes_for(self.metric, codes)[0]


def owned(values: Any) -> Tensor:
    """A tensor of an array's numbers; a copy, since torch warns of memory that it may not write to."""
    return values.detach() if isinstance(values, Tensor) else torch.from_numpy(np.array(values, order="C"))


def like(value: Tensor, X: Any) -> Any:
    """A result as the caller's kind of array: a tensor for tensors, else NumPy."""
    return value if isinstance(X, Tensor) else value.detach().cpu().numpy()


def _is_numeric(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, np.ndarray) and value.dtype.kind in "fiub")


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if not isinstance(value, _PLAIN):
        raise TypeError(f"The attribute {name} is a {type(value).__name__}, which cannot be written to a file.")
    return value
