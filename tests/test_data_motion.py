"""Motion: readers against each other, against poses laid out by hand, and against an independent reading of recordings."""

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
from pullback.data._gait import BONES, FPS, STRIDES_PER_SECOND, walk
from pullback.data._kinematics import rotations

REAL = os.environ.get("PULLBACK_DATA")
needs_recordings = pytest.mark.skipif(not REAL, reason="PULLBACK_DATA is not set")


@dataclass(frozen=True)
class Tree:
    """A skeleton without branches of length 0, moving at random: joint j > 0 hangs on ``parents[j]`` at ``offsets[j]``."""

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
    """The spine points up; the upper arm is turned a quarter about z, so it points up; the elbow turns it about its own x and then z."""
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


# ASF and AMC


def asf(tree: Tree, vectors: np.ndarray, axes: np.ndarray, freedoms: list[str], unit: str) -> str:
    """The skeleton whose bone at joint j is ``vectors[j]``, with axes ``(joints, 3)`` in the unit."""
    entries = []
    for joint in range(1, len(tree.parents)):
        vector, length = vectors[joint], np.linalg.norm(vectors[joint])
        entries += [
            f"begin\nid {joint}\nname j{joint}",
            f"direction {' '.join(f'{x:.12f}' for x in vector / length)}\nlength {length:.12f}",
            f"axis {' '.join(f'{a:.12f}' for a in axes[joint])} XYZ",
            *(
                [f"dof {freedoms[joint]}\nlimits (-180.0 180.0)\n(-180.0 180.0)\n(-180.0 180.0)"]
                if freedoms[joint]
                else []
            ),
            "end",
        ]
    lines = [
        f"j{joint} {' '.join(f'j{child}' for child in tree.children(joint))}" for joint in range(len(tree.parents))
    ]
    hierarchy = "\n".join(line for line in lines if len(line.split()) > 1).replace("j0", "root")
    return "\n".join(
        [
            f"# a comment\n:version 1.10\n:name VICON\n:units\nmass 1.0\nlength 0.45\nangle {unit}\n:documentation\nsome words",
            ":root\norder TX TY TZ RX RY RZ\naxis XYZ\nposition 0 0 0\norientation 0 0 0\n:bonedata",
            *entries,
            f":hierarchy\nbegin\n{hierarchy}\nend\n",
        ]
    )


def amc(tree: Tree, axes: np.ndarray, freedoms: list[str], unit: str) -> str:
    """The motion of the tree: with C the axes and L the turn of a joint, the degrees of freedom make up M = C^-1 L C."""
    degrees = unit == "deg"
    c = Rotation.from_euler("xyz", axes, degrees=degrees).as_matrix()
    lines = ["#!OML:ASF", ":FULLY-SPECIFIED", ":DEGREES" if degrees else ":RADIANS"]
    for frame, turns in enumerate(tree.local()):
        m = Rotation.from_matrix(np.swapaxes(c, -1, -2) @ turns @ c).as_euler("xyz", degrees=degrees)
        lines += [str(frame + 1), f"root {' '.join(f'{x:.12f}' for x in [*tree.position[frame], *m[0]])}"]
        for joint in range(1, len(tree.parents)):
            values = [f"{m[joint]['xyz'.index(freedom[1])]:.12f}" for freedom in freedoms[joint].split()]
            lines += [f"j{joint} {' '.join(values)}"] if values else []
    return "\n".join(lines) + "\n"


def written(
    folder: Path,
    tree: Tree,
    axes: np.ndarray,
    freedoms: list[str],
    unit: str = "deg",
    vectors: np.ndarray | None = None,
) -> Path:
    """Writes both files; bones lead to the first child unless their vectors are given."""
    leaf = np.array([0, 0.5, 0])
    firsts = (tree.children(joint) for joint in range(len(tree.parents)))
    along = np.array([tree.offsets[first[0]] if first else leaf for first in firsts]) if vectors is None else vectors
    write(folder / "69.asf", asf(tree, along, axes, freedoms, unit))
    return write(folder / "69_06.amc", amc(tree, axes, freedoms, unit))


@pytest.mark.parametrize("unit", ["deg", "rad"])
def test_amc_agrees_with_bvh(tmp_path, unit):
    tree = random_tree()
    axes = np.random.default_rng(1).uniform(-3, 3, (6, 3)) * (57 if unit == "deg" else 1)
    axes[0] = 0
    freedoms = ["rx ry rz"] * 6
    file = written(tmp_path, tree, axes, freedoms, unit)
    bvh = data.motion(write(tmp_path / "a.bvh", tree.bvh())).select(["j1", "j2", "j3", "j4", "j5"])
    motion = data.motion(file)
    assert motion.bones == bvh.bones == ("j1", "j2", "j3", "j4", "j5")
    assert motion.skeleton.parents == (-1, 0, 1, -1, 3)
    torch.testing.assert_close(motion.directions, bvh.directions, rtol=0, atol=1e-7)
    torch.testing.assert_close(motion.skeleton.lengths, bvh.skeleton.lengths, rtol=0, atol=1e-7)
    torch.testing.assert_close(motion.root_rotation, bvh.root_rotation, rtol=0, atol=1e-7)
    torch.testing.assert_close(motion.root_position, bvh.root_position, rtol=0, atol=1e-7)


def test_amc_of_joints_with_fewer_degrees_of_freedom(tmp_path):
    """Hinges, and bones that never move and have no line in the AMC file."""
    tree = random_tree()
    angles = tree.angles.copy()
    angles[:, 1] = 0
    angles[:, 2, :2] = 0  # about x alone
    angles[:, 3, 1] = 0  # about z and x
    hinged = Tree(tree.parents, tree.offsets, angles, tree.position)
    freedoms = ["", "", "rx", "rx rz", "rx ry rz", "rx ry rz"]
    axes = np.zeros((6, 3))
    motion = data.motion(written(tmp_path, hinged, axes, freedoms))
    bvh = data.motion(write(tmp_path / "a.bvh", hinged.bvh())).select(motion.bones)
    torch.testing.assert_close(motion.directions, bvh.directions, rtol=0, atol=1e-7)


def test_skeleton_of_an_amc_file(tmp_path):
    file = written(tmp_path, random_tree(), np.zeros((6, 3)), ["rx ry rz"] * 6)
    directions = data.motion(file).directions
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "69.asf").rename(elsewhere / "walker.asf")
    with pytest.raises(data.DataError, match=r"69\.asf beside it, or pass asf="):
        data.motion(file)
    assert torch.equal(data.motion(file, asf=elsewhere / "walker.asf").directions, directions)
    (elsewhere / "walker.asf").rename(tmp_path / "walker.asf")
    assert torch.equal(data.motion(file).directions, directions)
    assert torch.equal(data.motion(tmp_path).directions, directions)


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


ASF_CHANGES = {
    "no bones": ("asf", ":bonedata", ":bonedat", "no section :bonedata"),
    "no length": ("asf", "length 0.5000000", "length 0.0000000", "j3 has no length"),
    "bone outside the hierarchy": ("asf", "j4 j5\n", "j4\n", "leaves out j5"),
    "unknown bone in the hierarchy": ("asf", "j4 j5\n", "j4 j5 tail\n", r"69\.asf cannot be read"),
    "unknown bone": ("amc", "j3 ", "tail ", "degrees of freedom"),
    "number too many": ("amc", "j3 ", "j3 0 ", r"69_06\.amc cannot be read"),
    "frame number": ("amc", "\n4\n", "\n5\n", "numbered from 1"),
    "word": ("amc", "j3 ", "j3 x", r"69_06\.amc cannot be read"),
}


@pytest.mark.parametrize("case", ASF_CHANGES, ids=str)
def test_broken_skeletons_and_motions(tmp_path, case):
    kind, old, new, message = ASF_CHANGES[case]
    file = written(tmp_path, random_tree(), np.zeros((6, 3)), ["rx ry rz"] * 6)
    broken = tmp_path / "69.asf" if kind == "asf" else file
    text = broken.read_text()
    assert old in text
    broken.write_text(text.replace(old, new, -1 if case == "unknown bone" else 1))
    with pytest.raises(data.DataError, match=message) as raised:
        data.motion(file)
    assert broken.name in str(raised.value)


def test_amc_that_ends_within_a_frame(tmp_path):
    file = written(tmp_path, random_tree(), np.zeros((6, 3)), ["rx ry rz"] * 6)
    file.write_text(file.read_text()[:-200])
    with pytest.raises(data.DataError, match=r"69_06\.amc cannot be read"):
        data.motion(file)


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


# The generated walk


@pytest.fixture(scope="module")
def gait() -> data.Motion:
    return walk(1200).select(data.BONES26)


def test_generated_walk_is_named_as_such(monkeypatch, caplog):
    monkeypatch.delenv("PULLBACK_DATA", raising=False)
    motion = data.motion(sequence="00_00", download=False)
    assert motion.standin
    assert motion.source.startswith("A stand-in")
    assert motion.source in caplog.text
    assert motion.directions.shape == (5213, 30, 3)
    assert torch.equal(motion.directions, data.motion(sequence="00_00", download=False).directions)


def test_generated_walk_returns_after_a_stride_and_not_after_half(gait):
    """Seen from the root, walking straight: phase is a loop."""
    poses = gait.relative_to_root().directions[:360]
    stride = round(FPS / STRIDES_PER_SECOND)
    apart = {k: (poses[k:] - poses[:-k]).flatten(1).norm(dim=1).mean() for k in (stride // 2, stride)}
    assert apart[stride] < 0.25 * apart[stride // 2]


def test_generated_walk_is_symmetric(gait):
    """After half a stride the left side does what the right side did, up to the deviations from the perfect gait."""
    poses = gait.relative_to_root().directions[:360]
    half = round(FPS / STRIDES_PER_SECOND / 2)
    swap = {"l": "r", "r": "l"}
    sided = [name for name in gait.bones if name not in ("lowerback", "lowerneck")]
    mirrored = [
        gait.bones.index(swap.get(name[0], name[0]) + name[1:] if name in sided else name) for name in gait.bones
    ]
    mirror = poses[half:, mirrored] * torch.tensor([-1.0, 1, 1], dtype=torch.float64)
    angle = (mirror * poses[:-half]).sum(-1).clamp(-1, 1).acos().rad2deg()
    assert angle.mean() < 5


def test_generated_walk_turns_around(gait):
    ahead = gait.root_rotation[:, :, 2]
    heading = torch.atan2(ahead[:, 0], ahead[:, 2])
    assert (heading.abs() < 0.2).any()
    assert (heading.abs() > 3).any()
    steps = gait.root_position.diff(dim=0)[:, [0, 2]]
    straight = steps.norm(dim=1) > 0.9 * steps.norm(dim=1).max()
    assert ((steps * ahead[1:, [0, 2]]).sum(1)[straight] > 0.97 * steps.norm(dim=1)[straight]).all()


def test_generated_feet_stay_near_the_ground(gait):
    height = gait.skeleton.segments(gait.directions, gait.root_position)[..., 1].amin(dim=(1, 2)) * 0.0254 / 0.45
    assert height.max() - height.min() < 0.15
    assert height.abs().max() < 0.2


def test_bones():
    assert len(BONES) == 30
    assert len(data.BONES26) == 26
    whole, some = walk(3), walk(3).select(data.BONES26)
    rows = [whole.bones.index(name) for name in some.bones]
    assert torch.equal(some.directions, whole.directions[:, rows])
    segments = whole.skeleton.segments(whole.directions)[:, rows]
    torch.testing.assert_close(some.skeleton.segments(some.directions), segments)


def test_bones_hang_on_the_nearest_that_is_left():
    skeleton = walk(1).skeleton.subset(["lfemur", "lfoot", "head"])
    assert skeleton.bones == ("lfemur", "lfoot", "head")
    assert skeleton.parents == (-1, 0, -1)


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


def recorded(path: Path) -> tuple[Tree, np.ndarray]:
    """The joints of a BVH recording without its T-pose, and vectors along the bones, by its lines rather than by its grammar."""
    head, tail = path.read_text().split("MOTION")
    parents, offsets, ends, above = [], [], {}, []
    for keyword, *words in (line.split() for line in head.splitlines() if line.split()):
        if keyword in ("ROOT", "JOINT"):
            parents.append(next((joint for joint in reversed(above) if joint is not None), -1))
            offsets.append(None)
        elif keyword == "{":
            above.append(len(parents) - 1 if offsets[-1] is None else None)
        elif keyword == "}":
            above.pop()
        elif keyword == "OFFSET" and above[-1] is None:
            ends[len(parents) - 1] = np.array(words, float)
        elif keyword == "OFFSET":
            offsets[-1] = np.array(words, float)
    rows = np.loadtxt(tail.splitlines()[3:])[1:]
    tree = Tree(tuple(parents), np.array(offsets), rows[:, 3:].reshape(len(rows), -1, 3), rows[:, :3])
    vectors = [ends[j] if j in ends else offsets[tree.children(j)[0]] for j in range(len(parents))]
    lost = {"thorax": (0, 1, 0), "lwrist": (1, 0, 0), "rwrist": (-1, 0, 0)}
    return tree, np.array([lost.get(bone, vector) for bone, vector in zip(("", *BONES), vectors, strict=True)])


@needs_recordings
def test_recording_as_asf_and_amc_agrees_with_bvh(tmp_path):
    tree, vectors = recorded(Path(str(REAL)) / "cmu" / "35_17.bvh")
    axes = np.random.default_rng(1).uniform(-170, 170, (31, 3))
    axes[0] = 0
    motion = data.motion(written(tmp_path, tree, axes, ["rx ry rz"] * 31, vectors=vectors))
    bvh = data.motion(sequence="35_17")
    assert motion.skeleton.parents == bvh.skeleton.parents
    torch.testing.assert_close(motion.directions, bvh.directions, rtol=0, atol=1e-7)
    torch.testing.assert_close(motion.root_position, bvh.root_position, rtol=0, atol=1e-7)


@needs_recordings
def test_hips_never_move_against_the_root():
    hips = data.motion(root_relative=True, bones=("lhipjoint", "rhipjoint")).directions
    assert (hips - hips[:1]).abs().max() < 1e-9
