from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from fake_cluster import FAKES, FakeCluster, is_alive
from service_process import wait_until

from outrider.cli import cluster as cluster_module
from outrider.cli.child import ServiceFailedError
from outrider.config.draft import DraftOptions
from outrider.config.verify import VerifyOptions
from outrider.errors import ConfigError


def pids(cluster: FakeCluster) -> list[int]:
    return [child.pid for child in cluster.children.values()]


def test_entering_starts_three_processes_and_leaving_ends_them() -> None:
    cluster = FakeCluster()
    with cluster:
        started = pids(cluster)
        assert len(set(started)) == 3 and all(map(is_alive, started))
        assert cluster.gateway_address == "127.0.0.1:4711"
        assert cluster.rest_url == "http://127.0.0.1:4711"
        assert cluster.metrics_url("verify") == "http://127.0.0.1:4711/metrics"
        assert cluster.address("verify").startswith("unix:/") and cluster.address("draft") != cluster.address("verify")
        folder = Path(cluster.address("draft").removeprefix("unix:")).parent
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not any(map(is_alive, started))
    assert not folder.exists()
    assert cluster.close() == {"draft": "ended", "verify": "ended", "gateway": "ended"}


def test_services_are_told_of_their_peers_and_only_verify_gets_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with FakeCluster() as cluster:
        assert f"--draft={cluster.address('draft')}" in ready_arguments(cluster, "verify")
        assert f"--verify={cluster.address('verify')}" in ready_arguments(cluster, "gateway")
        assert "--threads=7" in ready_arguments(cluster, "verify")
        wait_until(lambda: len(cluster.lines) == 3)
    lines = dict(reversed(cluster.lines))
    assert "threads 7" in lines["verify"]
    assert "threads 1," in lines["draft"] and "threads 1," in lines["gateway"]
    assert ("gateway", "bye") in cluster.lines


def test_services_are_told_which_ports_their_peers_took() -> None:
    free = "127.0.0.1:0"
    with FakeCluster(verify=VerifyOptions(address=free), draft=DraftOptions(address=free)) as cluster:
        assert "--draft=127.0.0.1:4711" in ready_arguments(cluster, "verify")
        assert "--verify=127.0.0.1:4711" in ready_arguments(cluster, "gateway")


def ready_arguments(cluster: FakeCluster, name: str) -> str:
    return cluster.children[name].ready_file.read_text()


def test_under_mps_verify_gives_way_to_the_draft_unless_it_was_told_otherwise() -> None:
    name = "CUDA_MPS_CLIENT_PRIORITY"
    assert cluster_module.service_env("verify", {})[name] == "1"
    assert name not in cluster_module.service_env("draft", {})
    assert cluster_module.service_env("verify", {name: "0"})[name] == "0"


def test_a_cluster_without_a_draft_tells_verify_of_none() -> None:
    with FakeCluster(services=("verify", "gateway")) as cluster:
        assert '"--draft="' in ready_arguments(cluster, "verify")
        assert list(cluster.children) == ["verify", "gateway"]


def test_a_service_that_fails_to_start_is_quoted_and_nothing_stays() -> None:
    cluster = FakeCluster({"verify": "broken"})
    with pytest.raises(ServiceFailedError, match=r"(?s)verify ended.*exit code 3.*the flux is not compensated"):
        cluster.__enter__()
    assert not any(map(is_alive, pids(cluster)))
    assert cluster.close()["verify"] == "exit code 3"


def test_a_service_that_never_gets_ready_is_given_up() -> None:
    cluster = FakeCluster({"draft": "mute"}, start_seconds=1)
    with pytest.raises(ServiceFailedError, match="draft was not ready after 1 s"):
        cluster.__enter__()
    assert not any(map(is_alive, pids(cluster)))


def test_a_service_that_is_still_starting_is_ended_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "GRACE_SECONDS", 600)
    cluster = FakeCluster({"draft": "loading"}, start_seconds=1)
    with pytest.raises(ServiceFailedError, match="draft was not ready"):
        cluster.__enter__()
    assert not any(map(is_alive, pids(cluster)))
    assert cluster.close()["draft"] == "SIGKILL"


def test_a_service_that_ignores_the_request_to_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "GRACE_SECONDS", 0.1)
    with FakeCluster({"draft": "stubborn"}, draft=DraftOptions(drain_seconds=0)) as cluster:
        pid = cluster.draft.pid
    assert not is_alive(pid)
    assert cluster.close()["draft"] == "SIGKILL"
    assert any("draft did not end" in event for event in cluster.events)


def test_a_killed_service_stays_dead_until_it_is_restarted_on_its_address() -> None:
    with FakeCluster() as cluster:
        address, pid = cluster.address("draft"), cluster.draft.pid
        cluster.draft.kill()
        assert not cluster.draft.running and cluster.draft.poll() == -signal.SIGKILL
        cluster.restart("draft")
        assert cluster.draft.running and cluster.draft.pid != pid
        assert cluster.address("draft") == address
        cluster.restart("gateway")
        assert "--rest-address=127.0.0.1:4711" in ready_arguments(cluster, "gateway")


def test_a_supervised_service_comes_back_by_itself() -> None:
    with FakeCluster(supervise=True) as cluster:
        pid = cluster.draft.pid
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: "draft serves again" in cluster.events)
        assert cluster.draft.running and cluster.draft.pid != pid
        assert cluster.verify.running and cluster.gateway.running
    assert any("draft ended (SIGKILL)" in event for event in cluster.events)


def test_a_supervised_service_comes_back_and_is_found_by_the_others_when_the_folder_of_sockets_was_removed() -> None:
    with FakeCluster(supervise=True) as cluster:
        pids = {name: child.pid for name, child in cluster.children.items()}
        shutil.rmtree(Path(cluster.address("draft").removeprefix("unix:")).parent)
        os.kill(cluster.gateway.pid, signal.SIGKILL)
        for name in cluster.services:
            wait_until(lambda name=name: f"{name} serves again" in cluster.events)  # type: ignore[misc]
        assert all(child.running and child.pid != pids[name] for name, child in cluster.children.items())
    assert set(cluster.close().values()) == {"ended"}


def test_a_service_whose_socket_lies_elsewhere_outlives_the_folder_of_sockets(tmp_path: Path) -> None:
    draft = DraftOptions(drain_seconds=1, address=f"unix:{tmp_path}/draft.sock")
    with FakeCluster(supervise=True, draft=draft) as cluster:
        pid = cluster.draft.pid
        shutil.rmtree(Path(cluster.address("verify").removeprefix("unix:")).parent)
        os.kill(cluster.gateway.pid, signal.SIGKILL)
        for name in ("verify", "gateway"):
            wait_until(lambda name=name: f"{name} serves again" in cluster.events)  # type: ignore[misc]
        assert cluster.draft.running and cluster.draft.pid == pid
        assert not [event for event in cluster.events if event.startswith("draft ")]


def test_a_paused_service_is_alive_and_can_still_be_ended() -> None:
    with FakeCluster() as cluster:
        cluster.verify.pause()
        assert cluster.verify.running
        pid = cluster.verify.pid
    assert not is_alive(pid)


def test_what_a_service_has_started_ends_with_it() -> None:
    with FakeCluster({"verify": "family", "draft": "family"}) as cluster:
        wait_until(lambda: len(grandchildren(cluster)) == 2)
        killed, ended = (grandchildren(cluster)[name] for name in ("verify", "draft"))
        cluster.verify.kill()
        wait_until(lambda: not is_alive(killed))
        assert is_alive(ended)
    wait_until(lambda: not is_alive(ended))


def grandchildren(cluster: FakeCluster) -> dict[str, int]:
    return {name: int(line.split()[1]) for name, line in cluster.lines if line.startswith("grandchild")}


def test_no_service_outlives_a_parent_that_is_killed(tmp_path: Path) -> None:
    program = """
        import sys, threading
        from fake_cluster import FakeCluster
        with FakeCluster({"draft": "stubborn"}) as cluster:
            cluster.verify.pause()
            print(*[child.pid for child in cluster.children.values()], flush=True)
            threading.Event().wait()
    """
    path = os.pathsep.join([str(FAKES.parent), str(FAKES.parents[2])])
    # Nobody is left to remove the folder with the sockets: let it be one that pytest removes.
    environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        children = [int(word) for word in parent.stdout.readline().split()]
        assert len(children) == 3 and all(map(is_alive, children))
        parent.kill()
    wait_until(lambda: not any(map(is_alive, children)))


def test_the_folder_of_a_killed_cluster_is_removed_by_the_next_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = """
        import threading
        from fake_cluster import FakeCluster
        with FakeCluster() as cluster:
            print(cluster.address("verify"), flush=True)
            threading.Event().wait()
    """
    path = os.pathsep.join([str(FAKES.parent), str(FAKES.parents[2])])
    environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)}
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "outrider-notes").mkdir()  # somebody's own
    (tmp_path / "outrider-notes" / "gateway.json").write_text("{}")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / cluster_module.LOCK).touch()
    (tmp_path / "outrider-link").symlink_to(tmp_path / "elsewhere")
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        first = Path(parent.stdout.readline().strip().removeprefix("unix:")).parent
        with FakeCluster():
            lived = (first / "gateway.json").exists()
        parent.kill()
    assert lived and first.exists(), "while it lived nobody removed it, and then nobody was left to do so"
    with FakeCluster() as third, FakeCluster():
        assert not first.exists()
        folder = Path(third.address("verify").removeprefix("unix:")).parent
        assert (folder / "gateway.json").exists(), "its owner lives"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "outrider-link", "outrider-notes"]
    assert (tmp_path / "outrider-notes" / "gateway.json").exists()
    assert (tmp_path / "elsewhere" / cluster_module.LOCK).exists()


def test_a_cluster_tells_what_drafts_in_which_service() -> None:
    inside, beside = VerifyOptions(speculative_algorithm=("EAGLE3",)), DraftOptions(speculative_algorithm=("NGRAM",))
    with FakeCluster(verify=inside, draft=beside) as cluster:
        assert cluster.drafters == {"verify": ("EAGLE3",), "draft": ("NGRAM",)}
    with FakeCluster(verify=inside, services=("verify", "gateway")) as cluster:
        assert cluster.drafters == {"verify": ("EAGLE3",)}
    with FakeCluster(verify=replace(inside, no_speculation=True)) as cluster:
        assert cluster.drafters == {}


def test_a_draft_model_that_could_not_be_used_is_not_said_to_draft() -> None:
    several = DraftOptions(speculative_algorithm=("EAGLE3", "NGRAM"))
    with FakeCluster({"draft": "alone"}, draft=several) as cluster:
        assert cluster.drafters == {"draft": ("NGRAM",)}


def test_a_folder_too_long_for_sockets_is_told_by_its_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(ConfigError, match=r"^TMPDIR: the path .*; use a shorter one$"), FakeCluster():
        pass
    assert not list(folder.iterdir())


def test_a_temporary_folder_that_takes_no_files_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"^TMPDIR: .*No such file or directory; set it to"), FakeCluster():
        pass


@pytest.mark.parametrize("num_threads", [0, 1])
def test_a_machine_that_has_no_thread_left_is_told_and_nothing_stays(num_threads: int) -> None:
    cluster = FakeCluster()
    for _ in range(num_threads):  # that which starts services
        cluster._spawner.submit(int).result()
    former = threading.stack_size(1 << 47)  # for which no machine has room
    try:
        with pytest.raises(ServiceFailedError, match=r"cannot be started: can't start new thread; check .*ulimit -u"):
            cluster.__enter__()
    finally:
        threading.stack_size(former)
    assert not any(pid and is_alive(pid) for pid in pids(cluster))


def test_an_interpreter_that_is_gone_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ServiceFailedError, match=r"cannot be started: .*No such file or directory: .*python"):
        FakeCluster().__enter__()
