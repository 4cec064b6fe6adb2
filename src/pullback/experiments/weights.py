"""Trained networks, kept as safetensors, and randomness that a seed decides entirely.

A network is named after everything that decides its weights: the settings, the data, its shapes and the version of this
package. The second run of an experiment finds the file and does not train again; a run with other settings does not
find it and does.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import pullback as pb

Module = TypeVar("Module", bound=nn.Module)


def cached(
    out: Path,
    name: str,
    key: Any,
    build: Callable[[], Module],
    fit: Callable[[Module], object],
    *,
    seed: int = 0,
) -> Module:
    """The trained network, from ``out/weights`` if it has been trained before.

    Args:
        out: the folder of the experiment's results.
        name: what the file is called, before the hash.
        key: all that decides the weights beside the seed: settings (a dataclass) and the data's ``source``. Its
            ``repr`` is hashed.
        build: makes the untrained network; its shapes must not depend on the training.
        fit: trains it, in place.
        seed: of both.
    """
    with reproducible(seed):
        network = build()
        file = weights_file(out, name, key, network, seed=seed)
        if not file.exists():
            fit(network)
            _save(network, file)
    network.load_state_dict(load_file(file))
    return network.eval().requires_grad_(False)


def weights_file(out: Path, name: str, key: Any, network: nn.Module, *, seed: int = 0) -> Path:
    """The file of a network's weights: its name, and a hash of all that decides them."""
    shapes = {parameter: tuple(value.shape) for parameter, value in network.state_dict().items()}
    digest = hashlib.sha256(repr((pb.__version__, (key, seed, shapes))).encode()).hexdigest()
    return out / "weights" / f"{name}-{digest[:12]}.safetensors"


@contextmanager
def reproducible(seed: int) -> Iterator[None]:
    """Inside, torch draws from the seed and sums in one order, on one thread; afterward all is as before."""
    num_threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(num_threads)


def _save(network: nn.Module, file: Path) -> None:
    """Writes beside the place and moves there, so that neither an interrupted run nor two at once leave half a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}.part")
    save_file({name: value.contiguous() for name, value in network.state_dict().items()}, part)
    part.replace(file)
