from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.results_page.plots import IMAGES, PLOTS
from benchmarks.results_page.reports import RESULTS, report, targets
from benchmarks.results_page.tables import BEGIN, PAGES, TABLES, filled

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_what_the_reports_say(page: Path) -> None:
    text = page.read_text("utf-8")
    assert filled(text) == text, "run python -m benchmarks.results_page"


def test_every_table_is_on_one_page() -> None:
    shown = re.findall(BEGIN.format(r"(\w+)"), "".join(page.read_text("utf-8") for page in PAGES))
    assert sorted(shown) == sorted(TABLES)


def test_a_target_is_met_or_missed_by_its_exact_value() -> None:
    made = targets([("speed", "at least", 1.8, [("a", 1.7992), ("b", 1.8)]), ("gap", "at most", 0.1, [("", 0.1004)])])
    assert "| a 1.799, b 1.800 | **missed**, met |" in made and made.endswith("| 0.100 | **missed** |")


@pytest.mark.parametrize("name", PLOTS)
def test_a_plot_names_its_axes_device_day_and_report(name: str) -> None:
    figure = PLOTS[name]()
    assert figure.axes and all(axes.get_xlabel() and axes.get_ylabel() for axes in figure.axes)
    title = figure.get_suptitle()
    reports = re.findall(r"\w+\.json", title)
    assert reports and all((RESULTS / name).exists() for name in reports)
    assert report(reports[0].removesuffix(".json")).device in title
    assert re.search(r"\d{4}-\d\d-\d\d", title)


def test_pages_show_every_image_and_no_other() -> None:
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    text = "".join(page.read_text("utf-8") for page in pages)
    shown = {Path(name).name for name in re.findall(r"!\[[^]]*\]\(([^)]+)\)", text)}
    assert shown == {path.name for path in IMAGES.iterdir()}
    assert {f"{name}.svg" for name in PLOTS} <= shown
