"""Everything of torch that is private or global, in one place, with the reason for each."""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor, peek_interpreter_stack
from torch._C._functorch import is_functorch_wrapped_tensor as is_wrapped  # belongs to a transform that is running
from torch.autograd import forward_ad
from torch.distributions import Distribution, ExponentialFamily
from torch.distributions import kl as torch_kl
from torch.nn.attention import SDPBackend, sdpa_kernel

# The base classes of all such layers.
batch_norms = torch.nn.modules.batchnorm._BatchNorm
dropouts = torch.nn.modules.dropout._DropoutNd
# A distribution is taken apart and put together again with other tensors, of which a transform remembers the old.
inverse_transform = torch.distributions.transforms._InverseTransform
transform_caches: dict[str, Any] = {"_inv": None, "_cached_x_y": (None, None)}


def unwrapped(x: Tensor) -> Tensor:
    """The values of a tensor seen inside a transform of `torch.func`, as a tensor that outlives it."""
    while is_wrapped(x):
        x = get_unwrapped(x)
    return x


def in_transform() -> bool:
    """Whether a transform of `torch.func` is running, inside which codes have no values to look at."""
    return peek_interpreter_stack() is not None


def plain_values(x: Tensor) -> Tensor | None:
    """The tensor itself, for work in place, if nothing that is computed from it will be differentiated; else None."""
    if torch.is_grad_enabled() or (torch._C._is_fwd_grad_enabled() and is_wrapped(x)):
        return None
    while is_wrapped(x):
        if is_batchedtensor(x):
            return None
        x = get_unwrapped(x)
    return x if type(x) is Tensor else None


_FORWARD_MODE = threading.RLock()


@contextlib.contextmanager
def forward_mode() -> Iterator[None]:
    """A context for every use of `torch.func.jvp`; torch's levels of forward mode belong to all threads."""
    with _FORWARD_MODE:
        if "torch._decomp.decompositions_for_jvp" not in sys.modules:
            with warnings.catch_warnings():  # that torch 2.13 gives to itself
                warnings.simplefilter("ignore", DeprecationWarning)
                import_module("torch._decomp.decompositions_for_jvp")
        yield


def depends_on_code(x: Tensor) -> bool:
    """Whether a tensor met inside a derivative moves with the variable that is differentiated."""
    return is_wrapped(x) and (x.requires_grad or forward_ad.unpack_dual(x).tangent is not None)


def set_batch_shape(p: Distribution, shape: torch.Size) -> None:
    """Gives a distribution whose tensors were replaced the batch shape of these; nothing is checked any more."""
    p._batch_shape, p._validate_args = shape, False


def given_probs(p: Distribution) -> bool:
    """Whether `p` was built from ``probs=``: the logits torch offers then are clamped, without a word."""
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


def _shared(change: Callable[[contextlib.ExitStack], object]):
    """A global setting of torch as a context: the first thread to enter changes it, the last to leave puts it back."""
    lock, users, undo = threading.Lock(), [], contextlib.ExitStack()

    @contextlib.contextmanager
    def setting() -> Iterator[None]:
        with lock:
            if not users:
                change(undo)
            users.append(None)
        try:
            yield
        finally:
            with lock:
                users.pop()
                if not users:
                    undo.close()

    return setting


def _work_carefully(undo: contextlib.ExitStack) -> None:
    # A NaN reaches the caller instead of ending the batch. Chords are differences of products of matrices, and lose
    # half of the digits of TensorFloat-32 twice.
    undo.callback(Distribution.set_default_validate_args, Distribution._validate_args)
    Distribution.set_default_validate_args(False)
    for backend in (torch.backends.cuda.matmul, torch.backends.cudnn):
        undo.callback(setattr, backend, "allow_tf32", backend.allow_tf32)
        backend.allow_tf32 = False  # pyright: ignore[reportAttributeAccessIssue]


_eager_code = _shared(lambda undo: undo.enter_context(torch.compiler.set_stance("force_eager")))
unvalidated = _shared(_work_carefully)


@contextlib.contextmanager
def differentiable_kernels(*, plain: bool = False) -> Iterator[None]:
    """A context in which compiled code runs as it was written, because it has no second derivatives; with `plain` also
    variants of torch's kernels that have all derivatives: unfused attention, plain recurrences."""
    with contextlib.ExitStack() as stack:
        # To ask for it would load the compiler, so only where it is loaded.
        if "torch._dynamo" in sys.modules:
            stack.enter_context(_eager_code())
        if plain:
            # Some of these settings belong to a thread and some to all: one thread at a time, each with its own.
            stack.enter_context(_FORWARD_MODE)
            stack.callback(torch._C._set_mkldnn_enabled, torch._C._get_mkldnn_enabled())
            stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
            torch._C._set_mkldnn_enabled(False)
            torch.backends.mha.set_fastpath_enabled(False)
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        yield
