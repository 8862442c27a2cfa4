"""Verbs of a local cluster as far as they go without one."""

from __future__ import annotations

import json
import os
import signal
import stat
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from oobleckd.ctl import cluster, processes, startcheck
from oobleckd.ctl.checkup import CheckupItem
from oobleckd.ctl.local import Cluster, Home, free_endpoint, free_memory_bytes, spares_fit
from oobleckd.ctl.main import main
from oobleckd.ctl.output import Failure
from oobleckd.host.needs import ClusterSize


def ctl(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words], catch_exceptions=False)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def test_up_on_a_running_cluster_is_refused(home: Home) -> None:
    here = processes.identify(os.getpid())
    assert here
    processes.remember("node-1", here, home.run)
    result = ctl("up", "--nodes", "2", "--state", home.state)
    assert result.exit_code == 5
    assert "a cluster runs already" in result.stderr
    assert "hint: end it with `oobleckctl down`" in result.stderr
    assert home.alive() == {"node-1": here}


def test_up_in_a_folder_too_deep_for_a_socket(tmp_path: Path) -> None:
    result = ctl("up", "--state", tmp_path / ("x" * 100))
    assert result.exit_code == 2
    assert "choose a shorter --state folder" in result.stderr


def test_up_where_nothing_can_be_written() -> None:
    result = ctl("up", "--state", "/dev/null/x")
    assert result.exit_code == 2
    assert "cannot be made" in result.stderr


def test_what_up_says_of_a_machine_before_it_starts_anything(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = ClusterSize()
    monkeypatch.setattr(startcheck.checkup, "state_folder", lambda _: CheckupItem("state folder", "ok", ""))
    startcheck.check_machine(home, one)
    assert capsys.readouterr().err == ""
    on_nfs = CheckupItem("state folder", "fail", "it is on nfs4", "move it", "network-file-system")
    monkeypatch.setattr(startcheck.checkup, "state_folder", lambda _: on_nfs)
    startcheck.check_machine(home, one)
    assert capsys.readouterr().err == "state folder: it is on nfs4; move it\n"
    no_room = CheckupItem("tasks", "fail", "room for 3", "raise it", "few-tasks")
    monkeypatch.setattr(startcheck.limitcheck, "tasks", lambda _: no_room)
    with pytest.raises(Failure, match="room for 3") as caught:
        startcheck.check_machine(home, one)
    assert caught.value.code == 1


def test_spares_are_kept_where_they_leave_room_for_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spares_fit(64, 1, 8 * 2**30)
    assert not spares_fit(64, 1, 5 * 2**30)
    monkeypatch.setenv("OOBLECK_FORK", "0")
    assert spares_fit(4, 2, 16 * 2**30)
    assert not spares_fit(4, 2, 5 * 2**30)
    assert not spares_fit(4, 2, 2**30)
    assert free_memory_bytes() > 0


def test_down_without_a_cluster(home: Home) -> None:
    result = ctl("down", "--state", home.state)
    assert (result.exit_code, result.stdout) == (0, "")
    assert json.loads(ctl("down", "--state", home.state, "-o", "json").stdout)["ended"] == []


def test_start_node_needs_a_cluster_and_a_name_in_it(home: Home) -> None:
    assert ctl("start-node", "node-1", "--state", home.state).exit_code == 3
    home.save(Cluster(("node-1",), 1, free_endpoint(), allow_injection=True))
    result = ctl("start-node", "node-2", "--state", home.state)
    assert result.exit_code == 3
    assert "known: oobleckd, node-1" in result.stderr
    ended = ctl("start-node", "oobleckd", "--state", home.state)  # after `down` up starts all of it, or none
    assert ended.exit_code == 5
    assert "oobleckctl up" in ended.stderr
    here = processes.identify(os.getpid())
    assert here
    processes.remember("node-1", here, home.run)
    assert ctl("start-node", "node-1", "--state", home.state).exit_code == 5


def test_keygen(tmp_path: Path) -> None:
    first = ctl("keygen", "a", "b", "--dir", tmp_path)
    assert first.stdout.splitlines() == [
        str(tmp_path / name) for name in ("server.key", "nodes/a.key_secret", "nodes/b.key_secret")
    ]
    assert stat.S_IMODE((tmp_path / "nodes/a.key_secret").stat().st_mode) == 0o600
    before = (tmp_path / "nodes/a.key_secret").read_bytes()
    assert ctl("keygen", "a", "--dir", tmp_path).exit_code == 0
    assert (tmp_path / "nodes/a.key_secret").read_bytes() == before
    assert ctl("keygen", "../x", "--dir", tmp_path).exit_code == 2


def test_logs(home: Home) -> None:
    assert ctl("logs", "--state", home.state).exit_code == 3
    home.logs.mkdir()
    (home.logs / "node-1.log").write_text("one\ntwo\nthree without an end")
    (home.logs / "oobleckd.log").write_text("up\n")
    assert ctl("logs", "node-1", "-n", "1", "--state", home.state).stdout == "two\n"
    assert ctl("logs", "node/node-1", "--tail", "1", "--state", home.state).stdout == "two\n"
    assert ctl("logs", "daemon", "--state", home.state).stdout == "up\n"
    shown = ctl("logs", "--state", home.state).stdout.splitlines()
    assert [line.split() for line in shown] == [["node-1", "one"], ["node-1", "two"], ["oobleckd", "up"]]
    assert ctl("logs", "node-9", "--state", home.state).exit_code == 3
    lines = map(json.loads, ctl("logs", "--state", home.state, "-o", "json").stdout.splitlines())
    assert [(line["kind"], line["source"], line["text"]) for line in lines] == [
        ("LogLine", "node-1", "one"), ("LogLine", "node-1", "two"), ("LogLine", "oobleckd", "up"),
    ]  # fmt: skip


def test_logs_of_all_are_one_in_the_order_of_time(home: Home) -> None:
    """Each program writes times as it does; a traceback stays below its line."""
    home.logs.mkdir()
    local = datetime.fromtimestamp(1_700_000_000).isoformat(" ")  # noqa: DTZ006 - as logging writes it
    utc = datetime.fromtimestamp(1_700_000_001, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    late = datetime.fromtimestamp(1_700_000_002).isoformat(" ")  # noqa: DTZ006 - the same
    (home.logs / "node-1.log").write_text(
        f"{local},500 W node-1 oobleckd.worker: first\n    below it\n{late},000 INFO worker.device: last\n"
    )
    (home.logs / "oobleckd.log").write_text(f"{utc}.250Z ERROR oobleckd: between\n")
    shown = [line.split() for line in ctl("logs", "--state", home.state).stdout.splitlines()]
    assert [line[2:] if len(line) > 3 else line for line in shown] == [
        ["W", "node-1", "oobleckd.worker:", "first"],
        ["node-1", "below", "it"],
        ["E", "oobleckd", "oobleckd:", "between"],
        ["I", "node-1", "worker.device:", "last"],
    ]
    lines = [
        json.loads(line) for line in ctl("logs", "--state", home.state, "-o", "json").stdout.splitlines()
    ]
    assert [line["at"] for line in lines] == [
        1_700_000_000.5,
        1_700_000_000.5,
        1_700_000_001.25,
        1_700_000_002,
    ]


def test_the_socket_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*words: Any) -> str:
        return ctl(*words, "status").stderr

    monkeypatch.setenv("OOBLECK_STATE", str(tmp_path))
    assert f"{tmp_path}/run/oobleckd.sock does not exist" in missing()
    monkeypatch.setenv("OOBLECK_SOCKET", "/nowhere/s")
    assert "/nowhere/s does not exist" in missing()
    assert "/elsewhere/s does not exist" in missing("--socket", "/elsewhere/s")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("thread", ["any thread", "another thread"])
@pytest.mark.parametrize("when", ["before", "as it begins", "later"])
def test_an_interrupt_ends_the_waiting_whenever_it_comes(
    when: str, thread: str, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that came as the waiting began was noted and never heard; so was one that another thread took."""
    over = threading.Event()
    other = threading.Thread(target=over.wait)
    other.start()

    def interrupt() -> None:
        if thread == "any thread":
            os.kill(os.getpid(), number)
        else:
            signal.pthread_kill(other.ident or 0, number)

    set_wakeup_fd = signal.set_wakeup_fd

    def begins(fd: int) -> int:
        if fd < 0:
            return set_wakeup_fd(fd)
        if when == "before":
            interrupt()
        before = set_wakeup_fd(fd)
        if when == "as it begins":
            interrupt()
        elif when == "later":
            threading.Timer(0.05, interrupt).start()
        return before

    monkeypatch.setattr(signal, "set_wakeup_fd", begins)
    try:
        with cluster._interruptible(), pytest.raises(KeyboardInterrupt):
            cluster.wait_for_interrupt()
    finally:
        over.set()
        other.join()
    assert set_wakeup_fd(-1) == -1
