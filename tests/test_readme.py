"""The README's code runs as printed, and its pictures and links are there."""

from __future__ import annotations

import re
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()


def test_python_blocks_run():
    blocks = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    assert blocks
    namespace: dict[str, object] = {}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"README.md, block {number}", "exec"), namespace)
    shapes = {name: tuple(value.shape) for name, value in namespace.items() if isinstance(value, torch.Tensor)}
    comments = re.findall(r"^(\w+) = .*#.*?(\(\d[\d, ]*\))", "\n".join(blocks), re.MULTILINE)
    promised = {name: tuple(int(n) for n in re.findall(r"\d+", shape)) for name, shape in comments}
    assert promised
    assert promised == {name: shapes[name] for name in promised}


def test_make_targets_exist():
    targets = re.findall(r"^make (\w+)", TEXT, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert {"demo", "test"} <= set(targets)
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_links_lead_somewhere():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", TEXT) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).is_file()] == []


def test_pictures_are_small():
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", TEXT)
    assert pictures
    assert all((ROOT / picture).stat().st_size < 400_000 for picture in pictures)
