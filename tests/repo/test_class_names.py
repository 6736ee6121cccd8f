from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ["benchmarks", "draft_service", "gateway", "kernels", "outrider", "outrider_tools", "verify_service"]
CLASS = re.compile(r"^ *class (\w+)[(:]", re.MULTILINE)


def test_no_two_classes_have_one_name() -> None:
    """A class is found by its name alone; generated messages are known by their module."""
    places: dict[str, list[Path]] = defaultdict(list)
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        if not path.is_relative_to(ROOT / "outrider/v1"):
            for name in CLASS.findall(path.read_text()):
                places[name].append(path)
    assert len(places) > 500
    doubled = {name: [path for path in found if defines(path, name)] for name, found in places.items() if found[1:]}
    assert {name: found for name, found in doubled.items() if len(found) > 1} == {}


def defines(path: Path, name: str) -> bool:
    """Whether it is a class there, and no example in a docstring."""
    nodes = ast.walk(ast.parse(path.read_bytes()))
    return any(isinstance(node, ast.ClassDef) and node.name == name for node in nodes)
