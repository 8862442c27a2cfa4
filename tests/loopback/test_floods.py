"""What anybody may do to the daemon from outside: ask for all, begin and never end."""

from __future__ import annotations

import http.client
import json
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import flood
from oobleckd.daemon import keys
from oobleckd.daemon.accepting import MAX_EACH
from oobleckd.protocol.agentmessages import Welcome
from oobleckd.protocol.job import parse_job
from tests.helpers.agents import hello
from tests.helpers.daemons import Daemon, daemon

HALVES = (b"", b"G", b"GET /v1/jobs HTTP/1.1\r\nHost:", b"GET /v1/jobs HTTP/1.1\r\nHost: d\r\nX: ")
_PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("floods")
    with daemon(folder) as made:
        folder.chmod(0o755)
        yield made


def connected(running: Daemon, said: bytes = b"") -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(_PATIENCE_S)
    sock.connect(str(running.client.socket_path))
    sock.sendall(said)
    return sock


def asked(running: Daemon, target: str) -> tuple[int, dict[str, Any]]:
    sock = connected(running, f"GET {target} HTTP/1.1\r\nHost: d\r\nConnection: close\r\n\r\n".encode())
    with sock:
        response = http.client.HTTPResponse(sock)
        response.begin()
        return response.status, json.loads(response.read())


def test_every_list_comes_in_pages(running: Daemon) -> None:
    train = {"steps": 3, "global_batch": 4, "micro_batch": 2, "sequence": 8}
    ids = [running.client.submit(parse_job({"name": f"j{n}", "train": train})).id for n in range(5)]
    for target in ("/v1/jobs", f"/v1/story?key=job:{ids[0]}"):
        sign = "&" if "?" in target else "?"
        whole = asked(running, target)[1]["items"]
        found, cursor = [], ""
        while cursor or not found:
            _, page = asked(running, f"{target}{sign}limit=1&cursor={cursor}")
            assert len(page["items"]) == 1
            found, cursor = [*found, *page["items"]], page["cursor"]
        assert found == whole
    for path in ("jobs", "nodes", "incidents", "pipelines", "templates", "layers", f"jobs/{ids[0]}/steps"):
        assert asked(running, f"/v1/{path}?limit=0")[0] == 422
        assert asked(running, f"/v1/{path}?limit=5")[1]["cursor"] == ""
    assert [job.id for job in running.client.jobs()] == ids


def test_what_begins_and_does_not_end_is_closed(running: Daemon) -> None:
    head = b"POST /v1/jobs HTTP/1.1\r\nHost: d\r\nContent-Length: 100\r\n\r\n{"
    halves = [connected(running, said) for said in HALVES]
    body = connected(running, head)
    assert b" 408 " in body.recv(4096)
    for sock in halves:
        assert sock.recv(4096) == b""
        sock.close()
    body.close()


AS_NOBODY = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
held = []
for _ in range(int(sys.argv[2])):
    held.append(socket.socket(socket.AF_UNIX))
    held[-1].settimeout(60)
    held[-1].connect(sys.argv[1])
print(sum(b" 429 " in each.recv(4096) for each in held[int(sys.argv[3]):]), flush=True)
sys.stdin.read()
"""


def test_a_user_has_so_many_connections_and_root_its_own(running: Daemon) -> None:
    path = running.client.socket_path
    for folder in path.parents:  # those of pytest are its user's alone
        if not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o001)
    command = [sys.executable, "-c", AS_NOBODY, path, str(2 * MAX_EACH), str(MAX_EACH)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as nobody:
        assert nobody.stdout is not None
        assert int(nobody.stdout.readline()) == MAX_EACH
        ours = [connected(running) for _ in range(2 * MAX_EACH)]
        assert running.client.healthy()
        for sock in ours:
            sock.close()
        nobody.communicate()
    assert nobody.returncode == 0


def test_without_descriptors_it_says_so_once_and_goes_on(tmp_path: Path) -> None:
    with daemon(tmp_path) as running:
        pid = running.process.pid
        now = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (now + 4, now + 4))
        url = running.endpoint.removeprefix("tcp://").rpartition(":")
        held = [socket.create_connection((url[0], int(url[2]))) for _ in range(50)]
        held += [connected(running) for _ in range(50)]
        assert running.log_until("no file descriptor is free")
        for sock in held:
            sock.close()
        assert running.client.healthy()
        running.process.terminate()
        assert running.process.stderr is not None
        rest = running.process.stderr.readlines()
        assert len(rest) < 20, rest
        assert not [line for line in rest if "Traceback" in line]


def test_half_open_connections_at_both_doors_leave_root_and_nodes_their_own(tmp_path: Path) -> None:
    """ZeroMQ takes whatever connects, the last descriptor too."""
    keys.make_node_keys(tmp_path / "keys", "n1")
    with daemon(tmp_path) as running:
        few = flood.FEW_DESCRIPTORS
        resource.prlimit(running.process.pid, resource.RLIMIT_NOFILE, (few, few))
        command = [sys.executable, "-P", flood.FLOODING, "halves", str(running.client.socket_path)]
        address = running.endpoint.removeprefix("tcp://")
        with subprocess.Popen([*command, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as flooding:
            while running.client.debug().counters["half_open_dropped"] < 3 * few:
                assert flooding.poll() is None
            agent = running.agent("n1")
            agent.say(hello("n1"))
            assert isinstance(agent.listen(), Welcome)
            assert [node.name for node in running.client.nodes()] == ["n1"]
            agent.close()
            flooding.communicate(b"\n")


@pytest.mark.slow
def test_floods_while_a_node_is_killed() -> None:
    """The benchmark, short: what it asks of five rounds of a minute holds for one of some seconds."""
    assert flood.main(["--seconds", "6", "--rounds", "1", "--steps", "20000", "--rest", "8"]) == 0
