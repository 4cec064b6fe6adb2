r"""Tensors that carry their derivatives along several directions.

The Jacobian of a decoder at many codes is what solvers spend their time on. A `DualTensor` holds a value and its ``k`` derivatives as one
tensor of shape ``(1 + k, *shape)``. A linear layer is then a single product for all of them,

.. math:: (x, \dot x_1, \dots, \dot x_k) \mapsto (x W + b, \dot x_1 W, \dots, \dot x_k W),

and an activation is evaluated once for the value and multiplies the rest. Automatic differentiation of the same decoder knows neither:
it takes a third longer, and twice as long for few codes with many dimensions. Operations without a rule here refuse (`Refused`), and
`pullback._autodiff.derivatives` then differentiates the decoder in torch's own way: rules are for speed, none is needed.

See Griewank and Walther 2008, *Evaluating Derivatives*, section 3.1, on forward mode with several tangents.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {}  # by the function of torch they are for; see `pullback._autodiff.dual_rules`
METADATA: set[Any] = set()  # functions that look at no numbers
WRITTEN_OUT: dict[Any, Rule] = {}  # functions as expressions in others
CONSTANT: set[Any] = set()  # functions whose derivative is nowhere other than zero


class Refused(NotImplementedError):
    """An operation without a rule, or used in a way that its rule does not cover."""


class _Mode(threading.local):
    primal = False


_MODE = _Mode()


@contextlib.contextmanager
def values_only() -> Iterator[None]:
    """Inside, operations see only the values of dual tensors, and return ordinary ones."""
    before, _MODE.primal = _MODE.primal, True
    try:
        yield
    finally:
        _MODE.primal = before


class DualTensor(Tensor):
    """A value and its derivatives; it has no memory of its own, so that nothing can use it behind our back."""

    carried: Tensor  # (1 + k, *shape)
    shared: bool  # whether another one may look at the same numbers

    @staticmethod
    def __new__(cls, carried: Tensor) -> DualTensor:
        self = Tensor._make_wrapper_subclass(cls, carried.shape[1:], dtype=carried.dtype, device=carried.device)
        self.carried, self.shared = carried, False
        return self

    def view_of(self, carried: Tensor) -> DualTensor:
        """Another look at the same numbers, or at some of them."""
        view = DualTensor(carried)
        view.shared = self.shared = True
        return view

    @property
    def value(self) -> Tensor:
        return self.carried[0]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in WRITTEN_OUT and not _MODE.primal:
            return WRITTEN_OUT[func](*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if func in METADATA:
                return func(*args, **kwargs)
            if _MODE.primal or func in CONSTANT:
                return func(*_values(args), **_values(kwargs))
            rule = RULES.get(func)
            if rule is None or kwargs.get("out") is not None:
                raise Refused(getattr(func, "__name__", str(func)))
            return rule(func, *args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise Refused(str(func))


def _values(x: Any) -> Any:
    """The same arguments with values in the place of dual tensors."""
    if isinstance(x, DualTensor):
        return x.carried[0]
    if isinstance(x, (tuple, list)):
        return type(x)(map(_values, x)) if type(x) in (tuple, list) else x
    return {k: _values(v) for k, v in x.items()} if type(x) is dict else x
