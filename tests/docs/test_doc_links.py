from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED = re.compile(r"\b(?:docs|benchmarks/notes)/[\w-]+\.md\b")


def tracked(*patterns: str) -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return [ROOT / name for name in names if name and (ROOT / name).exists()]


PAGES = tracked("*.md")
FOLDERS = "|".join(sorted({re.escape(path.relative_to(ROOT).parts[0]) for path in tracked("*/*")}))
# What has gone is named with a commit, as in: `benchmarks/old.py` at 0123456. The secrets are what users put there.
FILE = re.compile(rf"(?<![\w./-])(?!docker/secrets)(?:{FOLDERS})/[\w./-]*+(?!`? at [0-9a-f]{{7}})")
MODULE = re.compile(rf"python3? -m ((?:{FOLDERS})(?:\.\w+)*)(?!\w|\.\S)")


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Anchors that GitHub gives a page's headings."""
    titles = re.findall(r"^#+ +(.+?) *$", prose(page), re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in titles)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_there_are(page: Path) -> None:
    broken = []
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        there = (page.parent / name).resolve() if name else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            broken.append(link)
    assert broken == []


def test_code_names_pages_that_there_are() -> None:
    """Comments, docstrings and configuration; the changelog may name pages of its time."""
    kinds = ("*.py", "*.proto", "*.yml", "*.yaml", "*.toml", "*.html", "*.js", "Makefile", "scripts", "*.md")
    broken = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in tracked(*kinds)
        if file.name != "CHANGELOG.md"
        for name in NAMED.findall(file.read_text("utf-8"))
        if not (ROOT / name).exists()
    }
    assert broken == set()


def test_pages_name_files_and_runnable_modules_that_there_are() -> None:
    """In commands as well; the changelog may name those of its time."""
    broken = set()
    for page in PAGES:
        if page.name == "CHANGELOG.md":
            continue
        text = page.read_text("utf-8")
        for name in FILE.findall(text):
            if not (ROOT / name.rstrip(".-")).exists():
                broken.add(f"{page.name}: {name}")
        for name in MODULE.findall(text):
            path = ROOT / name.replace(".", "/")
            if not path.with_suffix(".py").exists() and not (path / "__main__.py").exists():
                broken.add(f"{page.name}: -m {name}")
    assert broken == set()


def test_the_page_of_benchmarks_names_modules_that_there_are() -> None:
    _, _, rest = (ROOT / "docs" / "benchmarks.md").read_text("utf-8").partition("| `python -m benchmarks.` |")
    cells = re.findall(r"^\| (`[^|]*`) \|", rest.partition("\n\n")[0], re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)}
    there = {path.relative_to(ROOT / "benchmarks") for path in tracked("benchmarks/*.py")}
    modules = {".".join(path.with_suffix("").parts).removesuffix(".__main__") for path in there}
    assert len(named) > 20 and named - modules == set()


def test_every_page_of_docs_is_reached_from_the_readme() -> None:
    links = {name.partition("#")[0] for name in LINK.findall(prose(ROOT / "README.md"))}
    pages = {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}
    assert pages - links == set()


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 130


def test_the_stages_of_training_name_modules_that_there_are() -> None:
    stages = (ROOT / "docs/training.md").read_text("utf-8").split("## Stages")[1].split("##")[0]
    rows = [line.split("|")[2] for line in stages.splitlines() if line.startswith("|")][2:]
    named = {name for cell in rows for name in re.findall(r"`(\w+)`", cell)}
    there = {path.stem for path in (ROOT / "outrider_tools/training").glob("*.py")}
    assert len(named) > 10 and named <= there
