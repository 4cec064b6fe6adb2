"""Distances on disk: a zarr group whose chunks are the blocks, each written at once or not at all.

A chunk that is there is finished, so a run that was killed goes on where it stopped, and several processes may fill one
store.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pullback._geometry.pairwise.manifest import difference, manifest
from pullback._geometry.pairwise.plan import Block, Job, Plan
from pullback._solvers.base import Status

_UNFINISHED_WRITE = "*.partial"


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


def open_for(job: Job, path: Path) -> None:
    """Makes the store of a job, or finds that the one that is there is of the same job."""
    facts = manifest(job)
    with _explained(path):
        if not path.exists():
            _create(path, job.plan, facts)
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, "no permission")
    changed = difference(_read_manifest(path), facts)
    if changed is not None:
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
    """The store after a run."""
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
    """The chunks that are there."""
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
