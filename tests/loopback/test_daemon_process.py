"""The daemon as a process: it starts, refuses a second one, survives a full disk, and ends in order."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from oobleckd.client import Client
from oobleckd.daemon import keys
from oobleckd.host.ports import free_port
from oobleckd.protocol.agentmessages import Refused, Welcome
from oobleckd.protocol.changes import Audited, Change, DaemonTrouble
from oobleckd.unixhttp import ApiProblem, ClientError, Unreachable
from tests.helpers.agents import hello
from tests.helpers.daemons import command, daemon


def test_it_starts_refuses_a_second_and_ends_in_order(tmp_path: Path) -> None:
    with daemon(tmp_path) as first:
        assert first.client.healthy()
        second = subprocess.run(command(tmp_path), capture_output=True, text=True, check=False, timeout=120)
        assert second.returncode == 5
        errors = [line for line in second.stderr.splitlines() if line.startswith("error:")]
        assert errors == [f"error: another oobleckd (pid {first.process.pid}) works on {tmp_path}/state"]
        elsewhere = command(tmp_path, "--state-dir", str(tmp_path / "other"))
        third = subprocess.run(elsewhere, capture_output=True, text=True, check=False, timeout=120)
        assert third.returncode == 5
        assert "another daemon answers on" in third.stderr
        assert first.client.healthy()
        assert first.stop() == 0
    with pytest.raises(Unreachable) as caught:
        first.client.status()
    assert "oobleckctl up" in caught.value.hint


@pytest.mark.parametrize(
    ("flags", "code", "problem"),
    [
        (["--endpoint", "tcp://0.0.0.0:0", "--no-curve"], 2, "beyond this machine"),
        (["--lease-s", "0.1"], 2, "shorter than two heartbeats"),
        (["--nonsense"], 2, "no option --nonsense"),
        (["--endpoint", "tcp://192.0.2.1:1"], 1, "cannot listen"),
    ],
)
def test_wrong_settings_are_one_clear_error(
    tmp_path: Path, flags: list[str], code: int, problem: str
) -> None:
    done = subprocess.run(command(tmp_path, *flags), capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == code
    assert problem in done.stderr
    assert "Traceback" not in done.stderr


def test_state_and_numbers_go_on_after_kill_9(tmp_path: Path) -> None:
    keys.make_node_keys(tmp_path / "keys", "node-1")
    with daemon(tmp_path, "--lease-s", "3600") as first:
        agent = first.agent("node-1")
        agent.say(hello("node-1"))
        agent.listen()
        first.client.drain("node-1", "repair")
        seen = list(first.client.events(0, follow=False))
        first.stop(signal.SIGKILL)
        agent.close()
    with daemon(tmp_path, "--lease-s", "3600") as second:
        assert [change.seq for change in second.client.events(0, follow=False)] == [c.seq for c in seen]
        agent = second.agent("node-1")
        agent.say(hello("node-1"))
        agent.listen()
        (node,) = second.client.nodes()
        assert (node.state, node.cause, node.reason) == ("drained", "operator", "repair")
        agent.close()
        assert second.stop(signal.SIGINT) == 0


def test_a_reload_lets_a_new_key_in_and_throws_an_old_one_out(tmp_path: Path) -> None:
    with daemon(tmp_path) as running:
        keys.make_node_keys(tmp_path / "keys", "node-1")
        running.process.send_signal(signal.SIGHUP)
        assert running.log_until("reloaded")
        agent = running.agent("node-1")
        agent.say(hello("node-1"))
        assert isinstance(agent.listen(), Welcome)
        keys.authorized_path(tmp_path / "keys", "node-1").unlink()
        running.process.send_signal(signal.SIGHUP)
        assert running.log_until("reloaded")
        agent.say(hello("node-1"))
        assert isinstance(agent.listen(), Refused)
        agent.close()


def asked(change: Change, act: str, reason: str) -> bool:
    """Whether it tells that somebody asked for that."""
    data = change.data
    return isinstance(data, Audited) and (data.act, data.reason) == (act, reason)


def test_a_full_disk_holds_answers_back_and_loses_none(tmp_path: Path) -> None:
    keys.make_node_keys(tmp_path / "keys", "node-1")
    with daemon(tmp_path, "--lease-s", "3600") as running:
        client, pid = running.client, running.process.pid
        agent = running.agent("node-1")
        agent.say(hello("node-1"))
        agent.listen()
        stream = client.events()
        client.drain("node-1", "before")
        assert any(asked(change, "drain", "before") for change in stream), "told when it was durable"
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        with pytest.raises(ApiProblem) as caught:
            client.undrain("node-1", "held")
        assert caught.value.status == 503
        assert "cannot be written" in caught.value.problem
        assert not client.healthy()
        assert "cannot be written" in client.status().line
        notice = next(
            change for change in stream if change.level == "error"
        )  # what is kept for replay says so, too
        assert isinstance(notice.data, DaemonTrouble)
        assert (notice.data.what, notice.data.over) == ("journal", False)
        assert "oobleck_journal_failing 1.0" in client.metrics()
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        over = DaemonTrouble("journal", over=True)
        heard = {"written again": False, "undrained": False}
        for change in stream:
            heard["written again"] |= change.data == over
            heard["undrained"] |= asked(change, "undrain", "held")
            if all(heard.values()):
                break
        assert client.healthy()
        stream.close()
        agent.close()
        assert running.stop() == 0


def test_systemd_hears_of_it(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(120)
        env = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "3000000"}
        with daemon(tmp_path, env=env) as running:
            assert sock.recv(1000) == b"READY=1"
            assert sock.recv(1000) == b"STATUS=0 nodes, no job\nWATCHDOG=1"
            assert running.stop() == 0
        said = b""
        while said != b"STOPPING=1":
            said = sock.recv(1000)


def test_a_socket_of_systemd_is_served(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "d.sock"))
        listening.listen()
        process = activated(tmp_path, listening)
        try:
            client = socket.socket(socket.AF_UNIX)
            with client:
                client.settimeout(120)
                client.connect(str(tmp_path / "d.sock"))
                client.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
                assert b" 200 " in client.recv(100)
            os.kill(process.pid, signal.SIGTERM)
            assert process.wait(120) == 0
        finally:
            process.kill()
            process.wait()


def activated(folder: Path, listening: socket.socket) -> subprocess.Popen[bytes]:
    """A daemon on systemd's socket. What systemd does between fork and exec: it becomes number 3, and the pid
    is the child's own.
    """
    script = 'exec 3<&"$0"; export LISTEN_FDS=1 LISTEN_PID=$$; exec "$@"'
    words = ["bash", "-c", script, str(listening.fileno()), *command(folder)]
    return subprocess.Popen(words, pass_fds=[listening.fileno()], stderr=subprocess.DEVNULL)


def test_requests_across_a_restart_are_answered(tmp_path: Path) -> None:
    asked, enough, unanswered = 0, threading.Event(), []
    client = Client(tmp_path / "d.sock", timeout_s=120.0)

    def ask() -> None:
        nonlocal asked
        while not enough.wait(0.002):
            try:
                client.status()
            except ClientError as error:
                unanswered.append(error.problem)
            asked += 1

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "d.sock"))
        listening.listen(128)
        process = activated(tmp_path, listening)
        asker = threading.Thread(target=ask, daemon=True)
        try:
            assert client.status().line == "0 nodes, no job"
            asker.start()
            for how in (signal.SIGTERM, signal.SIGKILL, signal.SIGTERM):
                before = client.status().daemon
                process.send_signal(how)
                process.wait(120)
                process = activated(tmp_path, listening)
                assert client.status().daemon != before
                answered = asked
                while asked < answered + 4:  # each of these is an answer, too
                    client.status()
            enough.set()
            asker.join(120)
        finally:
            enough.set()
            process.kill()
            process.wait()
    assert asked > 10
    assert unanswered == []


def test_an_aborted_daemon_leaves_its_stacks(tmp_path: Path) -> None:
    with daemon(tmp_path) as running:
        running.process.send_signal(signal.SIGABRT)
        assert running.log_until("Fatal Python error: Aborted")
        assert running.log_until("most recent call first")


def test_metrics_on_a_port_of_this_machine(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    with daemon(tmp_path, "--metrics", address) as running:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=120) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert b"oobleck_build_info{version=" in answer.read()
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"http://{address}/v1/jobs", timeout=120)
        assert caught.value.code == 404
        caught.value.close()
        taken = subprocess.run(
            command(tmp_path / "other", "--metrics", address),
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert taken.returncode == 1
        assert "Traceback" not in taken.stderr
        assert "--metrics" in taken.stderr
        assert running.stop() == 0


def test_the_daemon_shows_where_it_stands(tmp_path: Path) -> None:
    with daemon(tmp_path) as running:
        found = running.client.debug()
        assert "MainThread" in found.threads
        assert found.tasks["loop"]
        assert found.counters["events"] >= 0
        assert found.journal == str(tmp_path / "state" / "journal.sqlite")
        assert running.stop() == 0
