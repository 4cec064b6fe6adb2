"""Distances on disk: a zarr group whose chunks are the blocks, each written at once or not at all.

A chunk that is there is finished, so a run that was killed goes on where it stopped, and several processes may fill one
store. What a result depends on is stored with it, so that a run never adds to the result of another.

A metric enters as a hash. Pickles will not do: their bytes differ between processes for the same model. So the object
is walked, and what decides its values is hashed: tensors, numbers, names of types, and the code of functions with what
they refer to. Functions of installed packages count by their name, as their version is recorded beside the hash.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import hashlib
import inspect
import itertools
import os
import shutil
import sysconfig
import types
import uuid
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import Tensor, nn

from pullback._solvers.base import Status

# The coordinates of a chunk of the result: (row, column) of a matrix, (k,) of a list.
Block = tuple[int, ...]
Slices = tuple[slice, ...]
_UNFINISHED_WRITE = "*.partial"
# Of the probes: processors round differently, and other weights differ by much more.
_PROBE_RTOL = 1e-6
_OTHERS = {
    "codes": "the codes are others",
    "metric": "the metric has other weights or settings",
    "init": "the paths start elsewhere (init)",
    "pairs": "the pairs are others",
}
_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size, np.generic, Enum)
# What every module has by itself: hooks and the like, and the dictionaries of its state, which is hashed by name.
_EVERY_MODULE = frozenset(vars(nn.Module()))
_INSTALLED = tuple({sysconfig.get_paths()[name] for name in ("purelib", "platlib", "stdlib")})


@dataclass(frozen=True, eq=False)
class Plan:
    """All pairs of two sets of codes, or of one with itself (each pair once, no code with itself); or a list of pairs.

    The result has a `shape`, ``(n, m)`` or ``(number of pairs,)``, and is cut into blocks with sides of length `size`.
    """

    shape: tuple[int, ...]
    size: int
    symmetric: bool = False
    listed: tuple[np.ndarray, np.ndarray] | None = None

    def blocks(self) -> list[Block]:
        sides = itertools.product(*(range(-(-n // self.size)) for n in self.shape))
        return [block for block in sides if not self.symmetric or block[0] <= block[1]]

    def slices(self, block: Block) -> Slices:
        """Where a block is in the result."""
        return tuple(slice(b * self.size, min((b + 1) * self.size, n)) for b, n in zip(block, self.shape, strict=True))

    def pairs(self, block: Block) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of the first and of the second codes of a block's pairs."""
        here = self.slices(block)
        i, j = np.mgrid[here].reshape(2, -1) if self.listed is None else (numbers[here] for numbers in self.listed)
        return (i[i < j], j[i < j]) if self._is_diagonal(block) else (i, j)

    def writes(self, block: Block, values: np.ndarray) -> list[tuple[Slices, np.ndarray]]:
        """What to write where for the values of a block's pairs. The chunk at `block` itself comes last."""
        here, (i, j) = self.slices(block), self.pairs(block)
        if self.listed is not None:
            return [(here, values)]
        matrix = np.zeros([s.stop - s.start for s in here], values.dtype)
        matrix[i - here[0].start, j - here[1].start] = values
        if self._is_diagonal(block):
            return [(here, matrix + matrix.T)]
        return [(here[::-1], matrix.T), (here, matrix)] if self.symmetric else [(here, matrix)]

    def chunks(self, block: Block) -> list[Block]:
        """The chunks that `writes` fills."""
        return [block[::-1], block] if self.symmetric and not self._is_diagonal(block) else [block]

    def _is_diagonal(self, block: Block) -> bool:
        return self.symmetric and block[0] == block[1]


@dataclass(frozen=True, eq=False)
class DistanceStore:
    """Distances in a folder, as `pullback.pairwise_distances` with ``out=`` leaves them.

    It is a zarr group: ``distances`` is the matrix, ``status`` has the `Status` of every pair, 0 where it converged.
    Blocks that are not finished yet read as NaN.

    Attributes:
        path: the folder.
        manifest: what the distances depend on: hashes of the codes and of the metric, settings, versions.
        num_blocks, num_missing: how many blocks there are, and how many are not finished.
        num_solved: blocks that the call that returned this store solved; 0 if it was opened.

    >>> import tempfile, torch, pullback as pb
    >>> codes = torch.rand(5, 2, dtype=torch.float64)
    >>> metric = pb.EuclideanMetric(lambda z: torch.distributions.Normal(z, 1.0))
    >>> folder = tempfile.mkdtemp() + "/d.zarr"
    >>> store = pb.pairwise_distances(metric, codes, out=folder)
    >>> store.distances[:2].shape, store.failures(), pb.results.DistanceStore.open(folder).complete
    ((2, 5), [], True)
    """

    path: Path
    manifest: dict[str, Any]
    num_blocks: int
    num_missing: int
    num_solved: int = 0

    @staticmethod
    def open(path: str | os.PathLike[str]) -> DistanceStore:
        """Opens a store to read it, also one that other processes are still filling."""
        path = Path(path)
        facts = _read_manifest(path)
        blocks = set(Plan(tuple(facts["shape"]), facts["block_size"], facts["symmetric"]).blocks())
        return DistanceStore(path, facts, len(blocks), len(blocks.difference(_written(path, "distances"))))

    @property
    def complete(self) -> bool:
        """Whether every block is finished."""
        return self.num_missing == 0

    @property
    def distances(self) -> Any:
        """The matrix, a zarr array: index it to read, ``store.distances[:]`` for all of it."""
        return _zarr().open_group(self.path, mode="r")["distances"]

    @property
    def status(self) -> Any:
        """The `Status` of every pair as a zarr array."""
        return _zarr().open_group(self.path, mode="r")["status"]

    def failures(self) -> list[tuple[int, int, str]]:
        """The pairs without a distance, each once, with a message."""
        group, found, size = _zarr().open_group(self.path, mode="r"), [], self.manifest["block_size"]
        listed = group["pairs"][:] if "pairs" in group else None
        for chunk in _written(self.path, "status"):
            part = group["status"].blocks[chunk]
            for at in np.argwhere(part):
                where = np.array(chunk) * size + at
                i, j = (where if listed is None else listed[:, where[0]]).tolist()
                if i < j or not self.manifest["symmetric"]:
                    found.append((i, j, str(Status(int(part[tuple(at)])))))
        return sorted(found)

    def __repr__(self) -> str:
        done, shape = self.num_blocks - self.num_missing, tuple(self.manifest["shape"])
        return f"DistanceStore({str(self.path)!r}, shape={shape}, {done} of {self.num_blocks} blocks)"


def open_for(plan: Plan, facts: dict[str, Any], path: Path) -> None:
    """Makes a store for results that depend on certain facts, or finds that the one that is there is the same."""
    with _explained(path):
        if not path.exists():
            _create(path, plan, facts)
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, "no permission")
    if (changed := difference(_read_manifest(path), facts)) is not None:
        raise ValueError(
            f"{path} holds distances of another run: {changed}. Choose another place, or delete it to start again."
        )


def has(path: Path, plan: Plan, block: Block) -> bool:
    """Whether a block is finished."""
    return all(_file(path, "distances", chunk).exists() for chunk in plan.chunks(block))


def write(path: Path, plan: Plan, block: Block, values: np.ndarray, status: np.ndarray) -> None:
    """Writes a block; its own chunk comes last and says that it is finished."""
    if not Path(path, "zarr.json").exists():
        raise FileNotFoundError(
            f"{path} is not there for the process that solved block {block}. Put it on a file system that all workers "
            "share."
        )
    with _explained(path):
        group = _zarr().open_group(path, mode="r+")
        if status.any():
            for where, part in plan.writes(block, status):
                group["status"][where] = part
        # A block whose pairs all failed must leave a chunk too, or it would look unfinished.
        distances = group["distances"].with_config({"write_empty_chunks": True})
        for where, part in plan.writes(block, values):
            distances[where] = part


def unfinished(path: Path, plan: Plan, blocks: list[Block]) -> list[Block]:
    """The blocks still to be solved. Damaged ones are dropped, with a warning, and count as unfinished."""
    group, missing = _zarr().open_group(path, mode="r"), []
    for block in blocks:
        if has(path, plan, block):
            chunks = [(name, chunk) for name in ("distances", "status") for chunk in plan.chunks(block)]
            try:
                # A chunk that no longer has the bytes that were written cannot be read.
                for name, chunk in chunks:
                    group[name].blocks[chunk]
                continue
            except (ValueError, RuntimeError):
                warnings.warn(f"Block {block} of {path} is damaged and is solved again.", stacklevel=4)
                for name, chunk in chunks:
                    _file(path, name, chunk).unlink(missing_ok=True)
        missing.append(block)
    return missing


def finished(path: Path, num_solved: int) -> DistanceStore:
    store = replace(DistanceStore.open(path), num_solved=num_solved)
    if store.complete:
        # What killed processes left half written; nobody writes to a finished store.
        for file in path.rglob(_UNFINISHED_WRITE):
            file.unlink(missing_ok=True)
    return store


def _read_manifest(path: Path) -> dict[str, Any]:
    facts = _zarr().open_group(path, mode="r").attrs.get("pullback") if (path / "zarr.json").exists() else None
    if not isinstance(facts, dict):
        raise ValueError(f"{path} is not a store of pullback.pairwise_distances. Choose another place.")
    return facts


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Errors of the file system as sentences that say what to do; they keep their type and number."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            why = f"There is no space left for {path}"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            why = f"{path} cannot be written to"
        else:
            raise
        fix = "Finished blocks are kept: mend this and run the same call again, it goes on from there."
        raise type(error)(error.errno, f"{why} ({os.strerror(error.errno)}). {fix}") from error


def _create(path: Path, plan: Plan, facts: dict[str, Any]) -> None:
    """Makes the whole layout beside its place and moves it there at once: of several processes, the first wins."""
    zarr = _zarr()
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    group = zarr.create_group(draft, attributes={"pullback": facts})
    compressors = [zarr.codecs.ZstdCodec(), zarr.codecs.Crc32cCodec()]
    layout = {"shape": plan.shape, "chunks": (plan.size,) * len(plan.shape), "compressors": compressors}
    group.create_array("distances", dtype=facts["dtype"], fill_value=np.nan, **layout)
    group.create_array("status", dtype="int8", fill_value=0, **layout)
    if plan.listed is not None:
        group.create_array("pairs", data=np.stack(plan.listed))
    try:
        draft.rename(path)
    except OSError as error:
        shutil.rmtree(draft)
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def _file(path: Path, array: str, chunk: Block) -> Path:
    return Path(path, array, "c", *map(str, chunk))


def _written(path: Path, array: str) -> Iterator[Block]:
    root = path / array / "c"
    for file in root.rglob("*"):
        if file.is_file() and not file.match(_UNFINISHED_WRITE):
            yield tuple(map(int, file.relative_to(root).parts))


def _zarr() -> Any:
    try:
        import zarr
    except ImportError as error:
        raise ImportError("Distances on disk need zarr: pip install 'pullback[scale]'.") from error
    return zarr


def difference(stored: dict[str, Any], present: dict[str, Any]) -> str | None:
    """A sentence on the first fact in which two manifests differ; None if they agree."""
    stored, present = (facts | facts.get("versions", {}) for facts in (stored, present))
    for key, here in present.items():
        there = stored.get(key)
        if key == "probe":
            # What is not finite is stored as None, and read as NaN.
            old, new = (np.array(values or [], float) for values in (there, here))
            if not np.allclose(old, new, rtol=_PROBE_RTOL, equal_nan=True):
                return "the metric measures steps between the codes differently, although its weights are the same"
        elif key != "versions" and there != here:
            return _OTHERS.get(key, f"{key} is {here} here and was {there} there")
    return None


def fingerprint(*things: Any) -> str:
    """A hash of everything that the values of some objects depend on."""
    digest, seen = hashlib.sha256(), {}
    for thing in things:
        for piece in _walk(thing, seen):
            digest.update(piece)
    return digest.hexdigest()


def _walk(thing: Any, seen: dict[int, Any]) -> Iterator[bytes]:
    """An object and all it refers to, each part once."""
    if isinstance(thing, bytes):
        yield thing
    elif isinstance(thing, _PLAIN):
        yield repr(thing).encode() + b"\0"
    elif id(thing) in seen:
        yield b"again\0"
    else:
        # Keeping the object keeps its address from being used again. Equal tuples may be one object or two.
        if not isinstance(thing, tuple):
            seen[id(thing)] = thing
        yield f"{type(thing).__module__}.{type(thing).__qualname__}".encode() + b"\0"
        for part in _parts(thing):
            yield from _walk(part, seen)


def _parts(thing: Any) -> Iterable[Any]:
    """What an object's values depend on."""
    if isinstance(thing, Tensor):
        flat = thing.detach().cpu().contiguous().reshape(-1)
        return thing.dtype, tuple(thing.shape), flat.view(torch.uint8).numpy().tobytes()
    if isinstance(thing, np.ndarray):
        return str(thing.dtype), thing.shape, np.ascontiguousarray(thing).tobytes()
    if sparse.issparse(thing):
        matrix = sparse.csr_array(thing)
        return matrix.shape, matrix.indptr, matrix.indices, matrix.data
    if isinstance(thing, nn.Module):
        own = {k: v for k, v in _attributes(thing).items() if k not in _EVERY_MODULE}
        return repr(thing), dict(thing.state_dict()), dict(thing.named_children()), own
    if isinstance(thing, dict):
        return [part for key in sorted(thing, key=repr) for part in (key, thing[key])]
    if isinstance(thing, set | frozenset):
        return sorted(map(repr, thing))
    if isinstance(thing, list | tuple):
        return thing
    if isinstance(thing, functools.partial):
        return thing.func, thing.args, thing.keywords
    if isinstance(thing, types.MethodType):
        return thing.__func__, thing.__self__
    if isinstance(thing, types.CodeType):
        # Instructions and constants, without the places they were read from.
        return thing.co_code, thing.co_names, [c if isinstance(c, types.CodeType) else repr(c) for c in thing.co_consts]
    if isinstance(thing, types.FunctionType) and not thing.__code__.co_filename.startswith(_INSTALLED):
        found = inspect.getclosurevars(thing)
        return thing.__code__, thing.__defaults__, thing.__kwdefaults__, found.nonlocals, found.globals
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return [getattr(thing, f.name) for f in dataclasses.fields(thing)]
    if isinstance(thing, types.ModuleType) or callable(thing):
        return [getattr(thing, name, None) for name in ("__name__", "__module__", "__qualname__")]
    return [_attributes(thing)]


def _attributes(thing: Any) -> dict[str, Any]:
    """Of an object itself, without what is computed from the others."""
    own, kind = getattr(thing, "__dict__", {}), type(thing)
    return {k: v for k, v in own.items() if not isinstance(getattr(kind, k, None), functools.cached_property)}
