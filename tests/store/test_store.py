from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import huggingface_hub
import pytest
from filelock import FileLock
from huggingface_hub.errors import LocalEntryNotFoundError
from silent_progress import silent

from outrider.cli.main import main
from outrider.cli.models import installed_models
from outrider.errors import ConfigError
from outrider.models import store
from outrider.models.drafters.kinds import is_default_target
from outrider.models.store import PinnedWheel, embedded_model, resolve_model, served_name
from outrider.models.store_folder import check_model_folder

# A process that resolves the wheel of its arguments, tells each new stage, and kills itself at the stage named last.
CHILD = """
import json, os, signal, sys
from pathlib import Path
from outrider.models.store import embedded_model
from outrider.models.store import PinnedWheel

stages = []

def progress(stage, done, total):
    word = stage.split()[0]
    if word not in stages:
        stages.append(word)
        print(word, flush=True)
    if word == sys.argv[3]:
        os.kill(os.getpid(), signal.SIGKILL)

print(embedded_model("tiny", PinnedWheel(**json.loads(sys.argv[1])), Path(sys.argv[2]), progress), flush=True)
"""


def start_child(wheel: PinnedWheel, cache_dir: Path, die_at: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, json.dumps(asdict(wheel)), str(cache_dir), die_at]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(store.__file__).parents[2])


def stages_of(wheel: PinnedWheel, cache_dir: Path) -> list[str]:
    stages: list[str] = []
    embedded_model("tiny", wheel, cache_dir, lambda stage, done, total: stages.append(stage.split()[0]))
    return list(dict.fromkeys(stages))


def have(wheel: PinnedWheel, cache_dir: Path) -> Path:
    """Puts the wheel where a download would, for tests that are about what comes then; returns `cache_dir`."""
    (cache_dir / "downloads").mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(os.environ["PIP_FIND_LINKS"], wheel.filename), cache_dir / "downloads")
    return cache_dir


def test_the_first_use_converts_and_the_second_finds(tmp_path: Path, wheel: PinnedWheel) -> None:
    assert stages_of(wheel, tmp_path / "cache") == ["downloading", "unpacking", "converting"]
    assert stages_of(wheel, tmp_path / "cache") == []
    folder = embedded_model("tiny", wheel, tmp_path / "cache", silent)
    assert folder == tmp_path / "cache" / "models" / "tiny"
    check_model_folder(folder)
    assert wheel.sha256 in (folder / "README.md").read_text()
    assert "Apache License 2.0" in (folder / "README.md").read_text()
    # Neither the wheel nor the work stays.
    names = {path.name for path in (tmp_path / "cache").rglob("*")}
    assert names == {path.name for path in folder.iterdir()} | {"models", "downloads", "tiny", ".tiny.lock"}


@pytest.mark.parametrize(
    ("die_at", "stages"),
    [
        ("downloading", ["downloading", "unpacking", "converting"]),
        ("unpacking", ["unpacking", "converting"]),
        ("converting", ["unpacking", "converting"]),
    ],
)
def test_a_process_killed_half_way_leaves_no_model_and_the_next_goes_on(
    tmp_path: Path, wheel: PinnedWheel, die_at: str, stages: list[str]
) -> None:
    with start_child(wheel, tmp_path / "cache", die_at) as child:
        child.communicate()
    assert child.returncode == -signal.SIGKILL
    assert not (tmp_path / "cache" / "models" / "tiny").exists()
    assert stages_of(wheel, tmp_path / "cache") == stages
    assert not list((tmp_path / "cache" / "models").glob("*.work"))


def test_an_error_half_way_leaves_no_model(tmp_path: Path, wheel: PinnedWheel) -> None:
    def fail(stage: str, done: int, total: int) -> None:
        if stage == "converting" and done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        embedded_model("tiny", wheel, have(wheel, tmp_path / "cache"), fail)
    assert [path.name for path in (tmp_path / "cache" / "models").iterdir()] == [".tiny.lock"]
    assert stages_of(wheel, tmp_path / "cache") == ["unpacking", "converting"]


def test_two_processes_at_once_convert_once(tmp_path: Path, wheel: PinnedWheel) -> None:
    cache_dir = tmp_path / "cache"
    (cache_dir / "models").mkdir(parents=True)
    lock = FileLock(cache_dir / "models" / ".tiny.lock")
    lock.acquire()
    with start_child(wheel, cache_dir) as first, start_child(wheel, cache_dir) as second:
        children = [first, second]
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "waiting\n"
        lock.release()
        outputs = [child.communicate()[0].split() for child in children]
    folder = str(cache_dir / "models" / "tiny")
    assert sorted(outputs, key=len) == [[folder], ["downloading", "unpacking", "converting", folder]]


def test_a_changed_converter_converts_anew(tmp_path: Path, wheel: PinnedWheel, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = embedded_model("tiny", wheel, have(wheel, tmp_path / "cache"), silent)
    (folder / "old").touch()
    monkeypatch.setattr(store, "CONVERTER_VERSION", store.CONVERTER_VERSION + 1)
    assert "converting" in stages_of(wheel, have(wheel, tmp_path / "cache"))
    assert not (folder / "old").exists()
    assert stages_of(wheel, tmp_path / "cache") == []


def test_a_truncated_file_converts_anew(tmp_path: Path, wheel: PinnedWheel) -> None:
    folder = embedded_model("tiny", wheel, have(wheel, tmp_path / "cache"), silent)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:100])
    embedded_model("tiny", wheel, have(wheel, tmp_path / "cache"), silent)
    assert (folder / "model.safetensors").read_bytes() == whole


def test_a_place_that_cannot_be_written_is_named_with_the_way_out(tmp_path: Path, wheel: PinnedWheel) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="OUTRIDER_HOME") as caught:
        embedded_model("tiny", wheel, tmp_path / "file", silent)
    assert str(tmp_path / "file") in caught.value.message


def test_a_disk_that_is_full_says_what_is_needed(tmp_path: Path, wheel: PinnedWheel) -> None:
    whole = embedded_model("tiny", wheel, have(wheel, tmp_path / "roomy"), silent) / "model.safetensors"
    have(wheel, tmp_path / "full")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (whole.stat().st_size - 1, limits[1]))
    try:
        with pytest.raises(ConfigError, match="800 MB"):
            embedded_model("tiny", wheel, tmp_path / "full", silent)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("num_disks", [0.75, 1000])  # pip copies what it has downloaded
def test_what_a_disk_has_no_room_for_is_not_downloaded(tmp_path: Path, wheel: PinnedWheel, num_disks: float) -> None:
    num_bytes = round(num_disks * shutil.disk_usage(tmp_path).free)
    with pytest.raises(ConfigError, match=r"No space left on device.* 800 MB for a moment"):
        embedded_model("tiny", replace(wheel, filename="other.whl", num_bytes=num_bytes), tmp_path, silent)
    assert not list((tmp_path / "downloads").iterdir())


@pytest.mark.parametrize("name", ["smollm2", "SmolLM2-135M-Instruct", "SMOLLM2-135m-instruct"])
def test_the_default_has_its_names_and_obeys_outrider_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    asked: list[object] = []

    def record(*arguments: object) -> Path:
        asked.extend(arguments)
        return tmp_path

    monkeypatch.setattr(store, "embedded_model", record)
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    assert resolve_model(name) == tmp_path
    assert asked[:3] == [store.DEFAULT_MODEL, store.DEFAULT_WHEEL, tmp_path / "home"]
    assert served_name(name) == "SmolLM2-135M-Instruct"


def test_a_local_folder_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"config\.json"):
        resolve_model(str(folder))
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")
    before = sorted(folder.iterdir())
    assert resolve_model(str(folder)) == folder
    assert sorted(folder.iterdir()) == before
    # A folder wins over a hub id of the same form.
    monkeypatch.chdir(tmp_path)
    assert resolve_model("owner/name") == folder
    assert served_name("owner/name") == "name"


@pytest.mark.parametrize("name", ["", "gpt-17", "/no/such/folder", "./nowhere", "a/b/c", "~/none", "owner/na me"])
def test_an_unknown_name_is_answered_with_the_choices(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_model(name)
    assert "SmolLM2-135M-Instruct" in caught.value.message


@pytest.mark.parametrize("find", [resolve_model, served_name, store.config_folder, is_default_target])
def test_a_home_that_is_not_there_is_told(find: Callable[[str], object]) -> None:
    with pytest.raises(
        ConfigError, match=r"~nobody-of-this-name/x names a home that does not exist; write the whole path"
    ):
        find("~nobody-of-this-name/x")


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ConfigError, match="is a file"):
        resolve_model(str(tmp_path / "model.gguf"))


def hub_config(
    folder: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, **changes: object
) -> list[dict[str, object]]:
    """A hub that gives out a config.json; what it was asked for."""
    fields = {"architectures": [architecture], "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9, **changes}
    fields |= {"max_position_embeddings": 64, "intermediate_size": 8, "num_hidden_layers": 1}
    asked: list[dict[str, object]] = []

    def hf_hub_download(repo_id: str, filename: str, **options: object) -> str:
        asked.append({"repo_id": repo_id, "filename": filename, **options})
        (folder / "config.json").write_text(json.dumps(fields))
        return str(folder / "config.json")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url: None)
    return asked


def test_the_hub_gives_data_files_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}
    hub_config(tmp_path, monkeypatch, "LlamaForCausalLM")

    def snapshot_download(repo_id: str, **options: object) -> str:
        asked.update(options, repo_id=repo_id)
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            (tmp_path / name).write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "cache"))
    assert resolve_model("owner/name@v1.0") == tmp_path
    assert (asked["repo_id"], asked["revision"]) == ("owner/name", "v1.0")
    assert asked["cache_dir"] == tmp_path / "cache" / "hub"
    patterns = asked["allow_patterns"]
    assert isinstance(patterns, list)
    assert not [pattern for pattern in patterns if not pattern.endswith((".json", ".safetensors", ".jinja"))]
    assert served_name("owner/name") == "owner/name"


def test_who_runs_a_model_decides_whether_it_is_refused_before_it_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot_download(repo_id: str, **options: object) -> str:
        return str(model_folder(tmp_path / "snapshot"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    hub_config(tmp_path, monkeypatch, "StableLmForCausalLM")
    with pytest.raises(ConfigError, match="'StableLmForCausalLM' is not supported"):
        resolve_model("owner/name", impl="outrider")
    hub_config(tmp_path, monkeypatch, "LlamaForCausalLM", hidden_act="relu")
    with pytest.raises(ConfigError, match="hidden_act 'relu'"):
        resolve_model("owner/name")
    assert resolve_model("owner/name", impl="transformers") == tmp_path / "snapshot"


def test_an_architecture_that_cannot_be_served_is_refused_before_it_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = hub_config(tmp_path, monkeypatch, "MambaForCausalLM")
    with pytest.raises(ConfigError, match="MambaForCausalLM is a state-space or recurrent model"):
        resolve_model("owner/name@v1.0")
    (one,) = asked
    assert (one["repo_id"], one["filename"], one["revision"]) == ("owner/name", "config.json", "v1.0")


def test_outrider_home_means_the_hub_s_files_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = hub_config(tmp_path, monkeypatch, "MambaForCausalLM")
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    with pytest.raises(ConfigError):
        resolve_model("owner/name")
    store.config_folder("owner/name")
    monkeypatch.delenv("OUTRIDER_HOME")
    store.config_folder("owner/name")
    assert [one["cache_dir"] for one in asked] == [tmp_path / "home" / "hub"] * 2 + [None]


def model_folder(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    for name in names or ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return folder


def test_all_that_is_found_is_listed_under_the_name_that_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    assert installed_models() == []
    model_folder(tmp_path / "models" / store.DEFAULT_MODEL)
    other = model_folder(tmp_path / "models" / "other")
    hub = tmp_path / "hub"
    for name, revisions in {"a--whole": {"main": "1" * 40, "v2": "2" * 40}, "a--head": {"main": "3" * 40}}.items():
        repository = hub / f"models--{name}"
        for reference, commit in revisions.items():
            files = () if name == "a--whole" else ("config.json", "model.safetensors")
            model_folder(repository / "snapshots" / commit, *files)
            (repository / "refs").mkdir(exist_ok=True)
            (repository / "refs" / reference).write_text(commit)
    names = [name for name, _, _ in installed_models()]
    assert names == sorted([store.DEFAULT_MODEL, str(other), "a/whole", "a/whole@v2"])
    assert main(["models", "list"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in names) and "a/head" not in printed and "not here" not in printed
    assert printed.split("\n")[0].split("  ")[-2].strip() == "MB on disk"


def test_what_a_model_that_is_not_here_will_take_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    assert main(["models", "list"]) == 0
    name, sizes = "SmolLM2-135M-Instruct (the default)", "93 MB to download, 550 MB on disk"
    assert capsys.readouterr().out == f"{name} is not here yet; {sizes}: outrider models pull\n"


def test_a_hub_out_of_reach_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        hub = f"http://127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub)
        pattern = hub + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", pattern)
        monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it was tried again"))
        monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
        with pytest.raises(ConfigError) as caught:
            resolve_model("owner/name")
    reason = f"[Errno {errno.ECONNREFUSED}] Connection refused"
    assert caught.value.message == (
        f"owner/name could not be fetched from the Hugging Face hub ({hub}): {reason}. Check the id, the network and, "
        "for a gated model, HF_TOKEN; or give the path of a local folder"
    )


def test_what_can_pass_is_tried_again_and_what_the_library_advises_is_not_said_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(url: str) -> None:
        raise TimeoutError("no answer yet")

    def hf_hub_download(repo_id: str, filename: str, **options: object) -> str:
        raise LocalEntryNotFoundError("Please check your connection and try again.") from TimeoutError("no answer.")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", slow)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"hub \(https://.*\): no answer\. Check the id"):
        resolve_model("owner/name")
