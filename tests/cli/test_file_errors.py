"""A file that cannot be read or written is named once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.chat_template import read_config
from outrider.errors import ConfigError
from outrider.models.fields import read_json
from outrider_tools.bench.requests import read_prompts
from outrider_tools.files import whole_output


def _write(path: Path) -> None:
    with whole_output(path / "out", f"--out {path / 'out'}"):
        pass


@pytest.mark.parametrize(
    "touch",
    [read_config, read_json, lambda path: read_prompts(path, 9), _write],
    ids=["tokenizer", "config", "prompts", "output"],
)
def test_a_path_that_is_at_fault_is_told_once(touch: Callable[[Path], object], tmp_path: Path) -> None:
    path = tmp_path / "folder.json"
    path.mkdir()
    if touch is _write:
        path.rmdir()
        path.write_text("a file")
    with pytest.raises(ConfigError) as caught:
        touch(path)
    assert caught.value.message.count(str(path)) == 1, caught.value.message
