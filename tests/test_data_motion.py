"""Motion: readers against each other, against poses laid out by hand, and against an independent reading of
recordings."""

from __future__ import annotations

import gzip
import itertools
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from pullback import data
from pullback.data._gait import BONES, walk
from pullback.data._kinematics import rotations

REAL = os.environ.get("PULLBACK_DATA")
needs_recordings = pytest.mark.skipif(not REAL, reason="PULLBACK_DATA is not set")


@dataclass(frozen=True)
class Tree:
    """A skeleton without branches of length 0, moving at random: joint j > 0 hangs on ``parents[j]`` at
    ``offsets[j]``."""

    parents: tuple[int, ...]
    offsets: np.ndarray  # (joints, 3)
    angles: np.ndarray  # (frames, joints, 3), degrees about z, y, x
    position: np.ndarray  # (frames, 3)

    def children(self, joint: int) -> list[int]:
        return [j for j, parent in enumerate(self.parents) if parent == joint]

    def local(self) -> np.ndarray:
        frames, joints, _ = self.angles.shape
        return (
            Rotation.from_euler("ZYX", self.angles.reshape(-1, 3), degrees=True)
            .as_matrix()
            .reshape(frames, joints, 3, 3)
        )

    def places(self) -> np.ndarray:
        """Where the joints are, by one 4 x 4 matrix after another."""
        turns = self.local()
        result = np.empty((*self.angles.shape[:2], 3))
        for frame in range(len(turns)):
            chain: list[np.ndarray] = []
            for joint, parent in enumerate(self.parents):
                step = np.eye(4)
                step[:3, :3] = turns[frame, joint]
                step[:3, 3] = self.position[frame] if parent < 0 else self.offsets[joint]
                chain.append(step if parent < 0 else chain[parent] @ step)
            result[frame] = [matrix[:3, 3] for matrix in chain]
        return result

    def bvh(self) -> str:
        lines = ["HIERARCHY", *self._joint(0), "MOTION", f"Frames: {len(self.angles)}", "Frame Time: .0083333"]
        # The hierarchy is written depth first, and so must the columns be.
        order = list(self._depth_first(0))
        for frame, where in zip(self.angles, self.position, strict=True):
            lines.append(" ".join(f"{value:.9f}" for value in [*where, *frame[order].ravel()]))
        return "\n".join(lines) + "\n"

    def _depth_first(self, joint: int):
        yield joint
        for child in self.children(joint):
            yield from self._depth_first(child)

    def _joint(self, joint: int) -> list[str]:
        root = joint == 0
        channels = "6 Xposition Yposition Zposition" if root else "3"
        inside = [
            f"OFFSET {' '.join(f'{x:.9f}' for x in self.offsets[joint])}",
            f"CHANNELS {channels} Zrotation Yrotation Xrotation",
            *itertools.chain.from_iterable(self._joint(child) for child in self.children(joint)),
        ]
        if not self.children(joint):
            inside += ["End Site", "{", "OFFSET 0 0.5 0", "}"]
        return [f"{'ROOT' if root else 'JOINT'} j{joint}", "{", *inside, "}"]


def random_tree(parents: tuple[int, ...] = (-1, 0, 1, 2, 0, 4), frames: int = 7) -> Tree:
    random = np.random.default_rng(0)
    offsets = random.normal(size=(len(parents), 3))
    offsets[0] = 0
    return Tree(parents, offsets, random.uniform(-170, 170, (frames, len(parents), 3)), random.normal(size=(frames, 3)))


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "parents", [(-1, 0, 1, 2), (-1, 0, 1, 2, 0, 4), (-1, 0, 1, 1, 2, 3)], ids=["chain", "star", "fork"]
)
def test_bones_end_where_joints_are(tmp_path, parents):
    tree = random_tree(parents)
    motion = data.motion(write(tmp_path / "a.bvh", tree.bvh()))
    segments = motion.skeleton.segments(motion.directions, motion.root_position)
    ends = {tuple(np.round(end, 6)) for end in segments[:, :, 1].reshape(-1, 3).numpy()}
    assert {tuple(np.round(place, 6)) for place in tree.places()[:, 1:].reshape(-1, 3)} <= ends
    starts = {tuple(np.round(start, 6)) for start in segments[:, :, 0].reshape(-1, 3).numpy()}
    assert starts == {tuple(np.round(place, 6)) for place in tree.places().reshape(-1, 3)}
    torch.testing.assert_close(
        motion.directions.norm(dim=-1), torch.ones(motion.directions.shape[:2], dtype=torch.float64)
    )
    np.testing.assert_allclose(motion.root_rotation, tree.local()[:, 0], atol=1e-9)


@pytest.mark.parametrize("axes", ["ZYX", "XYZ", "YXZ", "ZX", "Y"])
def test_rotations_compose_in_the_order_of_channels(axes):
    angles = np.random.default_rng(0).uniform(-180, 180, (20, len(axes)))
    np.testing.assert_allclose(
        rotations(axes, angles), Rotation.from_euler(axes, angles, degrees=True).as_matrix(), atol=1e-12
    )


ARM = """HIERARCHY
ROOT hip
{{
  OFFSET 0 0 0
  CHANNELS 6 Xposition Yposition Zposition Zrotation Yrotation Xrotation
  JOINT upper
  {{
    OFFSET 0 2 0
    CHANNELS 3 Zrotation Yrotation Xrotation
    JOINT lower
    {{
      OFFSET 3 0 0
      CHANNELS 3 Zrotation Yrotation Xrotation
      End Site
      {{
        OFFSET 1 0 0
      }}
    }}
  }}
}}
MOTION
Frames: 1
Frame Time: 0.0333333
{row}
"""


def test_pose_by_hand(tmp_path):
    """The spine points up; the upper arm is turned a quarter about z, so it points up; the elbow turns it about its own
    x and then z."""
    file = write(tmp_path / "arm.bvh", ARM.format(row="1 2 3  0 0 0  90 0 0  90 0 90.5"))
    motion = data.motion(file)
    assert motion.bones == ("hip", "upper", "lower")
    assert motion.skeleton.parents == (-1, 0, 1)
    assert motion.skeleton.lengths.tolist() == [2, 3, 1]
    assert motion.fps == 30
    expected = torch.tensor([[[0, 1, 0], [0, 1, 0], [-1, 0, 0]]], dtype=torch.float64)
    torch.testing.assert_close(motion.directions, expected)
    assert motion.root_position.tolist() == [[1, 2, 3]]


def test_tpose_is_dropped(tmp_path):
    tree = random_tree()
    with_pose = Tree(
        tree.parents, tree.offsets, np.concatenate([tree.angles[:1].round(), tree.angles]), np.zeros((8, 3))
    )
    file = write(tmp_path / "a.bvh", with_pose.bvh())
    assert len(data.motion(file).directions) == 7
    assert len(data.motion(file, drop_tpose=False).directions) == 8
    captured = write(tmp_path / "b.bvh", tree.bvh())
    assert len(data.motion(captured).directions) == 7


def test_root_relative_removes_the_heading(tmp_path):
    tree = random_tree()
    still = tree.angles.copy()
    still[:, 0] = 0
    turned = data.motion(write(tmp_path / "a.bvh", tree.bvh()), root_relative=True)
    fixed = data.motion(write(tmp_path / "b.bvh", Tree(tree.parents, tree.offsets, still, tree.position).bvh()))
    torch.testing.assert_close(turned.directions, fixed.directions)
    assert turned.root_relative
    assert turned.relative_to_root() is turned


def test_gzip(tmp_path):
    text = random_tree().bvh()
    plain = data.motion(write(tmp_path / "a.bvh", text))
    (tmp_path / "b.bvh.gz").write_bytes(gzip.compress(text.encode()))
    assert torch.equal(plain.directions, data.motion(tmp_path / "b.bvh.gz").directions)


# Broken files

BVH = random_tree().bvh()
BROKEN = {
    "empty": ("a.bvh", "", "no HIERARCHY"),
    "web page": ("a.bvh", "<html></html>", "no HIERARCHY"),
    "cut in the hierarchy": ("a.bvh", BVH[:200], "no HIERARCHY"),
    "cut in the motion": ("a.bvh", BVH[: int(len(BVH) * 0.7)], "frames and has"),
    "cut in a row": ("a.bvh", BVH[: BVH.rindex(" ")] + "\n", "a.bvh cannot be read"),
    "brace lost": ("a.bvh", BVH.replace("}", "", 1), "braces"),
    "brace too many": ("a.bvh", BVH.replace("}", "} } } } }", 1), "a.bvh cannot be read"),
    "word": ("a.bvh", BVH.replace("JOINT", "JOIN", 1), "the word 'JOIN'"),
    "offset": ("a.bvh", BVH.replace("OFFSET 0", "OFFSET x", 1), "a.bvh cannot be read"),
    "letter in a number": ("a.bvh", BVH[:-5] + "x" + BVH[-4:], "a.bvh cannot be read"),
    "not a number": ("a.bvh", BVH[: BVH.rindex(" ")] + " nan\n", "finite"),
    "no time": ("a.bvh", BVH.replace("Frame Time: .0083333", "Frame Time: 0"), "frame time"),
    "no frames": ("a.bvh", BVH.replace("Frames:", "Pictures:"), "not followed"),
    "npz": ("a.npz", "not an archive", "npz of bone directions"),
    "gzip": ("a.bvh.gz", "\x1f\x8b nothing of the kind", "a.bvh.gz cannot be read"),
    "other kind": ("a.fbx", "", r"pass path= a \.bvh"),
}


@pytest.mark.parametrize("case", BROKEN, ids=str)
def test_broken_files(tmp_path, case):
    name, text, message = BROKEN[case]
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(data.DataError, match=message) as raised:
        data.motion(tmp_path / name)
    assert name in str(raised.value)


def test_wrong_arguments(tmp_path):
    with pytest.raises(data.DataError, match="does not exist"):
        data.motion(tmp_path / "none.bvh")
    with pytest.raises(data.DataError, match=r"holds no 69_06\.bvh"):
        data.motion(tmp_path)
    motion = walk(10)
    with pytest.raises(data.DataError, match="unknown: tail"):
        motion.select(["head", "tail"])
    with pytest.raises(data.DataError, match="none given"):
        motion.select([])
    with pytest.raises(data.DataError, match=r"do not end in \(bones, 3\)"):
        motion.skeleton.segments(motion.directions[:, :5])


# Recordings


@needs_recordings
@pytest.mark.parametrize("sequence", ["69_06", "69_01", "35_17"])
def test_recordings_agree_with_an_independent_reading(sequence):
    """The directions in the npz were made from the BVH files without this reader."""
    motion = data.motion(sequence=sequence)
    other = data.motion(Path(str(REAL)) / "cmu" / f"cmu_{sequence}_directions.npz")
    assert motion.source == f"CMU motion {sequence}, from {sequence}.bvh under PULLBACK_DATA."
    assert motion.bones == other.bones == BONES
    assert motion.skeleton.parents == other.skeleton.parents
    torch.testing.assert_close(motion.directions, other.directions, rtol=0, atol=1e-6)
    torch.testing.assert_close(motion.skeleton.lengths, other.skeleton.lengths, rtol=0, atol=1e-6)
    torch.testing.assert_close(motion.root_position, other.root_position, rtol=0, atol=1e-5)
    torch.testing.assert_close(motion.root_rotation, other.root_rotation, rtol=0, atol=1e-6)
    assert torch.equal(motion.skeleton.inferred, other.skeleton.inferred)
    assert motion.fps == other.fps == 120


@needs_recordings
def test_hips_never_move_against_the_root():
    hips = data.motion(root_relative=True, bones=("lhipjoint", "rhipjoint")).directions
    assert (hips - hips[:1]).abs().max() < 1e-9
