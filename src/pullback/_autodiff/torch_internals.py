"""Everything of torch that is private or global, in one place, with the reason for each.

- `is_wrapped`, `unwrapped` (``torch._C._functorch``): a tensor seen inside a transform must not be kept after it.
- `in_transform` (``torch._C._functorch``): inside a transform codes have no values to look at.
- `plain_values` (``torch._C._is_fwd_grad_enabled``): there is no public way to ask whether forward mode is on.
- `forward_mode` (``torch._decomp``): the first derivative of a process compiles rules with a deprecated function.
- `differentiable_kernels` (``torch._C._set_mkldnn_enabled``): there is no public switch for oneDNN's recurrences.
- `batch_norms`, `dropouts` (``torch.nn.modules``): the base classes of all such layers are private.
- `torch_kl_rule`, `has_registered_kl` (``torch.distributions.kl``): torch has no public way to ask which rules exist.
- `inverse_transform`, `transform_caches`, `set_batch_shape` (``torch.distributions``): a distribution is taken apart
  and put together again with other tensors, for which torch has no public way.
- `given_probs` (``Distribution._param``): the logits torch offers then are clamped, without a word.
- `exponential_family` (``ExponentialFamily._natural_params``): torch has them for its own use only.
- `unvalidated` (``Distribution._validate_args``): the public setter has no getter.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor, peek_interpreter_stack
from torch.autograd import forward_ad
from torch.distributions import Distribution, ExponentialFamily
from torch.distributions import kl as torch_kl
from torch.distributions.transforms import _InverseTransform
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

inverse_transform: type[_InverseTransform] = _InverseTransform
transform_caches: dict[str, Any] = {"_inv": None, "_cached_x_y": (None, None)}
batch_norms: type[_BatchNorm] = _BatchNorm
dropouts: type[_DropoutNd] = _DropoutNd


def is_wrapped(x: Tensor) -> bool:
    """Whether the tensor belongs to a transform of `torch.func` that is running."""
    return is_functorch_wrapped_tensor(x)


def unwrapped(x: Tensor) -> Tensor:
    """The values of a tensor seen inside a transform, as a tensor that outlives it."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x


def in_transform() -> bool:
    """Whether a transform of `torch.func` is running."""
    return peek_interpreter_stack() is not None


def plain_values(x: Tensor) -> Tensor | None:
    """The tensor itself, for work in place, if nothing that is computed from it will be differentiated; else None."""
    if torch.is_grad_enabled() or (torch._C._is_fwd_grad_enabled() and is_wrapped(x)):
        return None
    while is_functorch_wrapped_tensor(x):
        if is_batchedtensor(x):
            return None
        x = get_unwrapped(x)
    return x if type(x) is Tensor else None


_FORWARD_MODE = threading.RLock()


@contextlib.contextmanager
def forward_mode() -> Iterator[None]:
    """A context for every use of `torch.func.jvp`; torch's levels of forward mode belong to all threads."""
    with _FORWARD_MODE:
        _load_forward_mode()
        yield


@functools.cache
def _load_forward_mode() -> None:
    # without the deprecation warning that torch 2.13 causes to itself
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import torch._decomp.decompositions_for_jvp  # noqa: F401


def depends_on_code(x: Tensor) -> bool:
    """Whether a tensor met inside a derivative moves with the variable that is differentiated."""
    return is_wrapped(x) and (x.requires_grad or forward_ad.unpack_dual(x).tangent is not None)


def set_batch_shape(p: Distribution, shape: torch.Size) -> None:
    """Gives a distribution whose tensors were replaced the batch shape of these; nothing is checked any more."""
    p._batch_shape, p._validate_args = shape, False


def given_probs(p: Distribution) -> bool:
    """Whether `p` was built from ``probs=``."""
    attributes = vars(getattr(p, "_categorical", p))
    return attributes["_param"] is attributes.get("probs") if "_param" in attributes else "logits" not in attributes


def exponential_family(p: ExponentialFamily) -> tuple[tuple[Tensor, ...], Callable[..., Tensor]]:
    """The natural parameters and the log-normalizer."""
    return p._natural_params, p._log_normalizer


def torch_kl_rule(p: type[Distribution], q: type[Distribution]) -> Callable[[Any, Any], Tensor] | None:
    """The rule that `torch.distributions.kl_divergence` would use, or None."""
    rule = torch_kl._dispatch_kl(p, q)
    return None if rule is NotImplemented else rule


def has_registered_kl(family: type[Distribution], base: type) -> bool:
    """Whether torch has a rule for a class of `family` below `base`, or one for `base` that is not its own."""
    return any(
        left is not base or rule.__module__ != torch_kl.__name__
        for (left, right), rule in torch_kl._KL_REGISTRY.items()
        if issubclass(family, left) and issubclass(family, right) and issubclass(left, base)
    )


class SharedSetting:
    """A global setting of torch as a context: the first thread to enter changes it, the last to leave puts it back."""

    def __init__(self, change: Callable[[contextlib.ExitStack], object]):
        self._change, self._lock, self._users = change, threading.Lock(), 0
        self._undo = contextlib.ExitStack()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if self._users == 0:
                self._change(self._undo)
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._undo.close()


def _choose_plain_kernels(undo: contextlib.ExitStack) -> None:
    undo.callback(torch._C._set_mkldnn_enabled, torch._C._get_mkldnn_enabled())
    undo.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
    torch._C._set_mkldnn_enabled(False)
    torch.backends.mha.set_fastpath_enabled(False)
    undo.enter_context(sdpa_kernel(SDPBackend.MATH))
    undo.enter_context(torch.backends.cudnn.flags(enabled=False))


def _work_carefully(undo: contextlib.ExitStack) -> None:
    undo.callback(Distribution.set_default_validate_args, Distribution._validate_args)
    Distribution.set_default_validate_args(False)
    for backend in (torch.backends.cuda.matmul, torch.backends.cudnn):
        undo.callback(setattr, backend, "allow_tf32", backend.allow_tf32)
        backend.allow_tf32 = False  # pyright: ignore[reportAttributeAccessIssue]


_eager_code = SharedSetting(lambda undo: undo.enter_context(torch.compiler.set_stance("force_eager")))
unvalidated = SharedSetting(_work_carefully)
"""A context for the library's own work. Distributions do not check their parameters: a NaN reaches the caller instead
of ending the batch. Products of matrices keep the digits of float32: chords are differences, and lose half of those of
TensorFloat-32 twice."""


@contextlib.contextmanager
def differentiable_kernels(*, plain: bool = False) -> Iterator[None]:
    """A context in which compiled code runs as it was written, because it has no second derivatives."""
    # With `plain` also variants of torch's kernels that have all derivatives: unfused attention, plain recurrences.
    with contextlib.ExitStack() as stack:
        # To ask for it would load the compiler, so only where it is loaded.
        if "torch._dynamo" in sys.modules:
            stack.enter_context(_eager_code())
        if plain:
            # Some of these settings belong to a thread and some to all: one thread at a time, each with its own.
            stack.enter_context(_FORWARD_MODE)
            _choose_plain_kernels(stack)
        yield
