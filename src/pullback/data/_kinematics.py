r"""Skeletons and how they move: bones of fixed length, each turned against its parent.

A pose gives every joint a rotation against the joint before it. The rotation of a joint in the world is the product of
those from the root to it, :math:`R_j = R_{\mathrm{parent}(j)} L_j`, and carries the rest direction of its bone to where
it points in that pose. As bones keep their length, a pose is one point on the sphere for each bone (Tournier et al.
2009).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pullback.data._errors import DataError

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


@dataclass(frozen=True)
class Skeleton:
    """Bones and how they hang together.

    Attributes:
        bones: their names, parents before children.
        parents: for each bone the index of the bone it begins at the end of; -1 at the root.
        lengths: in the units of the file (multiply by 0.0254 / 0.45 for meters, for files of CMU); 0 where
            ``inferred``.
        inferred: bones whose rest direction the file does not give, and a convention does.
    """

    bones: tuple[str, ...]
    parents: tuple[int, ...]
    lengths: Float[Tensor, " bones"]
    inferred: Bool[Tensor, " bones"]

    def segments(
        self, directions: Float[Tensor, "*batch bones 3"], root: Float[Tensor, "*batch 3"] | None = None
    ) -> Float[Tensor, "*batch bones 2 3"]:
        """Both ends of each bone, for drawing a pose: bones are laid end to end from the root, which is the origin if
        not given."""
        if directions.shape[-2:] != (len(self.bones), 3):
            raise DataError(
                f"directions of shape {tuple(directions.shape)} do not end in (bones, 3) = ({len(self.bones)}, 3)."
            )
        vectors = directions * self.lengths.to(directions)[:, None]
        origin = torch.zeros_like(vectors[..., 0, :]) if root is None else root.to(directions)
        ends: list[Tensor] = []
        starts: list[Tensor] = []
        for bone, parent in enumerate(self.parents):
            starts.append(origin if parent < 0 else ends[parent])
            ends.append(starts[-1] + vectors[..., bone, :])
        return torch.stack([torch.stack(starts, -2), torch.stack(ends, -2)], -2)

    def indices(self, bones: Sequence[str]) -> list[int]:
        """Where the named bones stand in the skeleton, in the skeleton's order."""
        unknown = sorted(set(bones) - set(self.bones))
        if unknown or not bones:
            raise DataError(
                f"bones must be some of {', '.join(self.bones)}; unknown: "
                f"{', '.join(unknown) or 'none, and none given'}."
            )
        return [index for index, name in enumerate(self.bones) if name in bones]

    def subset(self, bones: Sequence[str]) -> Skeleton:
        """The skeleton with only the named bones; where a bone between two of them is missing, the lower hangs on the
        upper."""
        rows = self.indices(bones)
        place = {-1: -1} | {row: index for index, row in enumerate(rows)}
        return Skeleton(
            bones=tuple(self.bones[row] for row in rows),
            parents=tuple(place[self._ancestor(row, place)] for row in rows),
            lengths=self.lengths[rows],
            inferred=self.inferred[rows],
        )

    def _ancestor(self, bone: int, kept: dict[int, int]) -> int:
        parent = self.parents[bone]
        while parent not in kept:
            parent = self.parents[parent]
        return parent


@dataclass(frozen=True)
class Motion:
    """A sequence of poses.

    Attributes:
        directions: the unit vector along each bone, y up; in the world's frame, or in the root's if ``root_relative``.
        skeleton: names, lengths and parents of the bones.
        root_position: where the root of the skeleton is, in the units of the lengths.
        root_rotation: from the root's frame to the world's.
        fps: frames per second.
        root_relative: whether the directions are in the root's frame, which removes the heading.
        source: a sentence that says where the motion comes from.
        license: the terms it comes under.
        standin: whether it stands in for the motion that was asked for.
    """

    directions: Float[Tensor, "frames bones 3"]
    skeleton: Skeleton
    root_position: Float[Tensor, "frames 3"]
    root_rotation: Float[Tensor, "frames 3 3"]
    fps: float
    source: str = ""
    license: str = ""
    standin: bool = False
    root_relative: bool = False

    @property
    def bones(self) -> tuple[str, ...]:
        """The names of the bones."""
        return self.skeleton.bones

    def relative_to_root(self) -> Motion:
        r"""The same motion seen from its root, :math:`R_{\mathrm{root}}^\top d` for each direction."""
        if self.root_relative:
            return self
        turned = torch.einsum("fij,fbi->fbj", self.root_rotation, self.directions)
        return replace(self, directions=turned, root_relative=True)

    def select(self, bones: Sequence[str]) -> Motion:
        """The motion of the named bones alone."""
        rows = self.skeleton.indices(bones)
        return replace(self, directions=self.directions[:, rows], skeleton=self.skeleton.subset(bones))


@dataclass(frozen=True)
class Rig:
    """What the readers make of a file: joints with their parents, and bones with the joint that turns each of them.

    ``rest`` holds one vector for each bone, as long as the bone; where the length is 0 in the file it is a unit vector,
    ``inferred``.
    """

    parents: tuple[int, ...]  # of joints, -1 for the root
    bones: tuple[str, ...]
    bone_parents: tuple[int, ...]
    joints: tuple[int, ...]  # of bones
    rest: np.ndarray  # (bones, 3)
    inferred: np.ndarray  # (bones,)

    def skeleton(self) -> Skeleton:
        """The bones without the joints."""
        lengths = np.where(self.inferred, 0.0, np.linalg.norm(self.rest, axis=-1))
        return Skeleton(self.bones, self.bone_parents, torch.from_numpy(lengths), torch.from_numpy(self.inferred))

    def move(self, local: np.ndarray, root_position: np.ndarray, fps: float) -> Motion:
        """Forward kinematics: directions of the bones from rotations ``(joints, frames, 3, 3)`` of joints against their
        parents."""
        world = np.empty_like(local)
        for joint, parent in enumerate(self.parents):
            world[joint] = local[joint] if parent < 0 else world[parent] @ local[joint]
        unit = self.rest / np.linalg.norm(self.rest, axis=-1, keepdims=True)
        directions = np.empty((local.shape[1], len(self.bones), 3))
        for bone, joint in enumerate(self.joints):
            directions[:, bone] = world[joint] @ unit[bone]
        directions /= np.linalg.norm(directions, axis=-1, keepdims=True)
        root = np.ascontiguousarray(world[0]), np.ascontiguousarray(root_position)
        rotation, position = map(torch.from_numpy, root)
        return Motion(torch.from_numpy(directions), self.skeleton(), position, rotation, fps)


def rotations(axes: str, degrees: np.ndarray) -> np.ndarray:
    """Products of rotations about the axes, ``R_a R_b R_c`` for ``"abc"``, for each row ``(frames, len(axes))`` of
    angles."""
    product = np.broadcast_to(np.eye(3), (len(degrees), 3, 3))
    for axis, angle in zip(axes.upper(), np.asarray(degrees, float).T, strict=True):
        product = product @ _about("XYZ".index(axis), angle * (math.pi / 180))
    return product


def _about(axis: int, angle: np.ndarray) -> np.ndarray:
    i, j = (axis + 1) % 3, (axis + 2) % 3
    matrix = np.zeros((len(angle), 3, 3))
    matrix[:, axis, axis] = 1
    matrix[:, i, i] = matrix[:, j, j] = np.cos(angle)
    matrix[:, j, i] = np.sin(angle)
    matrix[:, i, j] = -matrix[:, j, i]
    return matrix
