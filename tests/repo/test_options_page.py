from __future__ import annotations

import runpy
from pathlib import Path

from outrider.cli.cluster import OPTION_TYPES
from outrider.config.base import describe_options

ROOT = Path(__file__).resolve().parents[2]


def test_the_reference_of_options_is_what_the_code_says() -> None:
    fresh = runpy.run_path(str(ROOT / "scripts" / "gen_options"))["page"]()
    assert (ROOT / "docs" / "options.md").read_text() == fresh, "docs/options.md is not current; run: make options"


def test_the_reference_holds_every_option_of_every_service() -> None:
    sections = (ROOT / "docs" / "options.md").read_text().split("\n## ")
    for kind, title in ((OPTION_TYPES[name], name.capitalize()) for name in OPTION_TYPES):
        (section,) = (text for text in sections if text.startswith(title))
        assert [row.flag for row in describe_options(kind) if f"| `{row.flag}` | `{row.env}` |" not in section] == []
