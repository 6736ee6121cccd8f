from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ["benchmarks", "draft_service", "gateway", "kernels", "outrider", "outrider_tools", "verify_service"]


def test_no_two_classes_have_one_name() -> None:
    """A class is found by its name alone; generated messages are known by their module."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        name = path.relative_to(ROOT)
        if not name.is_relative_to("outrider/v1"):
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(f"{name}:{node.lineno}")
    assert len(places) > 500
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
