"""ASF and AMC files, written here from motions that are known from BVH files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from pullback import data
from pullback.data._gait import BONES
from test_data_motion import REAL, Tree, needs_recordings, random_tree, write


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
