"""Distances on disk: a zarr group whose chunks are the blocks, each written at once or not at all.

A chunk that is there is finished, so a run that was killed goes on where it stopped, and several processes may fill one
store.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import uuid
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pullback._geometry.pairwise.manifest import difference
from pullback._geometry.pairwise.plan import Block, Plan
from pullback._solvers.base import Status

UNFINISHED_WRITE = "*.partial"
_NAMES = ("distances", "status")


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

    Example:
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
        facts = read_manifest(Path(path))
        size, shape = facts["block_size"], facts["shape"]
        per_side = [-(-n // size) for n in shape]
        total = per_side[0] * (per_side[0] + 1) // 2 if facts["symmetric"] else int(np.prod(per_side))
        done = sum(not facts["symmetric"] or block[0] <= block[1] for block in _written(Path(path)))
        return DistanceStore(Path(path), facts, total, total - done)

    @property
    def complete(self) -> bool:
        """Whether every block is finished."""
        return self.num_missing == 0

    @property
    def distances(self) -> Any:
        """The matrix, a zarr array: index it to read, ``store.distances[:]`` for all of it."""
        return _arrays(self.path, "r")["distances"]

    @property
    def status(self) -> Any:
        """The `Status` of every pair as a zarr array."""
        return _arrays(self.path, "r")["status"]

    def failures(self) -> list[tuple[int, int, str]]:
        """The pairs without a distance, each once, with a message."""
        found, status = [], self.status
        size = self.manifest["block_size"]
        for row, column in _written(self.path, "status"):
            part = status[row * size : (row + 1) * size, column * size : (column + 1) * size]
            for i, j in zip(*np.nonzero(part), strict=True):
                pair = (row * size + int(i), column * size + int(j))
                if pair[0] < pair[1] or not self.manifest["symmetric"]:
                    found.append((*pair, str(Status(int(part[i, j])))))
        return sorted(found)

    def __repr__(self) -> str:
        done, shape = self.num_blocks - self.num_missing, tuple(self.manifest["shape"])
        return f"DistanceStore({str(self.path)!r}, shape={shape}, {done} of {self.num_blocks} blocks)"


@dataclass(frozen=True, eq=False)
class BlockWriter:
    """Writes blocks to a store; small, so that it can be sent to other processes."""

    path: str
    plan: Plan

    def has(self, block: Block) -> bool:
        """Whether a block is finished."""
        return all(self.file("distances", chunk).exists() for chunk in self.plan.chunks(block))

    def write(self, block: Block, values: np.ndarray, status: np.ndarray) -> None:
        """Writes a block; its own chunk comes last and says that it is finished."""
        if not Path(self.path, "zarr.json").exists():
            raise FileNotFoundError(
                f"{self.path} is not there for the process that solved block {block}. Put it on a file system that all "
                "workers share."
            )
        with explained(self.path):
            arrays = _arrays(self.path, "r+")
            if status.any():
                for where, part in self.plan.writes(block, status):
                    arrays["status"][where] = part
            for where, part in self.plan.writes(block, values):
                arrays["distances"][where] = part

    def file(self, array: str, chunk: Block) -> Path:
        return Path(self.path, array, "c", *map(str, chunk))


def open_writer(path: Path, plan: Plan, facts: dict[str, Any]) -> BlockWriter:
    """Makes the store, or goes on with the one that is there if it is of the same job."""
    with explained(path):
        if not path.exists():
            _create(path, plan, facts)
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, "no permission")
    changed = difference(read_manifest(path), facts)
    if changed is not None:
        raise ValueError(
            f"{path} holds distances of another run: {changed}. Choose another place, or delete it to start again."
        )
    return BlockWriter(str(path), plan)


def unfinished(writer: BlockWriter, blocks: list[Block]) -> list[Block]:
    """The blocks still to be solved. Damaged ones are dropped, with a warning, and count as unfinished."""
    arrays, missing = _arrays(writer.path, "r"), []
    for block in blocks:
        chunks = list(itertools.product(_NAMES, writer.plan.chunks(block)))
        if writer.has(block):
            try:
                # A chunk that no longer has the bytes that were written cannot be read.
                for name, chunk in chunks:
                    arrays[name].blocks[chunk]
                continue
            except (ValueError, RuntimeError):
                warnings.warn(f"Block {block} of {writer.path} is damaged and is solved again.", stacklevel=4)
                for name, chunk in chunks:
                    writer.file(name, chunk).unlink(missing_ok=True)
        missing.append(block)
    return missing


def read_manifest(path: Path) -> dict[str, Any]:
    """Of a store on disk."""
    facts = _zarr().open_group(path, mode="r").attrs.get("pullback") if (path / "zarr.json").exists() else None
    if not isinstance(facts, dict):
        raise ValueError(f"{path} is not a store of pullback.pairwise_distances. Choose another place.")
    return facts


@contextlib.contextmanager
def explained(path: object) -> Iterator[None]:
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
    # A block whose pairs all failed must leave a chunk too, or it would look unfinished.
    config = {"write_empty_chunks": True}
    group.create_array("distances", dtype=facts["dtype"], fill_value=np.nan, config=config, **layout)
    group.create_array("status", dtype="int8", fill_value=0, **layout)
    try:
        draft.rename(path)
    except OSError as error:
        shutil.rmtree(draft)
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def _written(path: Path, array: str = "distances") -> Iterator[Block]:
    """The chunks that are there."""
    root = path / array / "c"
    for file in root.rglob("*") if root.exists() else ():
        if file.is_file() and not file.match(UNFINISHED_WRITE):
            yield tuple(map(int, file.relative_to(root).parts))


def _arrays(path: str | Path, mode: str) -> Any:
    group = _zarr().open_group(path, mode=mode)
    # The layout records no settings of writing, so they are given again.
    full = group["distances"].with_config({"write_empty_chunks": True})
    return {"distances": full, "status": group["status"]}


def _zarr() -> Any:
    try:
        import zarr
    except ImportError as error:
        raise ImportError("Distances on disk need zarr: pip install 'pullback[scale]'.") from error
    return zarr
