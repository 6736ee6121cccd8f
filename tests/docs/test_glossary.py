"""Words of the glossary are what the code says."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("outrider", "gateway", "verify_service", "draft_service")


def test_the_glossary_names_classes_that_there_are() -> None:
    terms = re.findall(r"^\| ([^|]*) \|", (ROOT / "docs" / "glossary.md").read_text("utf-8"), re.MULTILINE)
    named = {name for term in terms for name in re.findall(r"`([A-Z]\w*[a-z]\w*)`", term)}
    sources = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    classes = {name for path in sources for name in re.findall(r"^class (\w+)", path.read_text("utf-8"), re.MULTILINE)}
    assert len(named) > 10 and named - classes == set()
