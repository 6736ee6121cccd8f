from __future__ import annotations

from pathlib import Path

import pytest

from outrider.cli.demo import remark
from outrider.cli.main import main


def test_the_demo_says_that_its_figures_are_of_one_prompt(model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", f"--model={model_path}", "--max-tokens=8"]) == 0
    told = capsys.readouterr().out
    assert "one answer to one prompt, measured once on this machine: speeds vary from run to run" in told
    assert "This prompt suits drafts" in told and "suits" not in remark("Why is the sky blue?")
