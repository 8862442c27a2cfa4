"""Who may do what: everything in the table of docs/security.md, tried and refused. Keys and messages of
workers, the API on both sockets, messages between devices. What the hub alone refuses is in
``test_daemon_hub`` and ``test_datagrams``, what the API alone refuses in ``test_daemon_api``.
"""

from __future__ import annotations

import asyncio
import http.client
import os
import pickle
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from oobleckd.daemon import keys, tokens
from oobleckd.daemon.hub import Hub
from oobleckd.daemon.seldom import AT_ONCE
from oobleckd.protocol import codec
from oobleckd.protocol.agentmessages import FiguresTold, Heartbeat, Refused
from oobleckd.protocol.messages import StepDone
from oobleckd.protocol.nodeviews import DeviceFigures
from oobleckd.protocol.parts import CardReport, Counters
from oobleckd.worker.agent.daemon_link import CurveKeys, Uplink
from tests.helpers.agents import Agent, hello
from tests.helpers.daemons import Daemon
from tests.helpers.tls import make_certificate, remote_daemon

WAIT_S = 120.0


class Planted:
    """A pickle that runs a command where somebody loads it."""

    def __init__(self, trap: Path) -> None:
        self.trap = trap

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.trap}",)


# ---------------------------------------------------------------------- workers


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    server = keys.make_server_keys(tmp_path)
    for node in ("node-1", "node-2"):
        keys.make_node_keys(tmp_path, node)
    made = Hub("tcp://127.0.0.1:0", pair=server, allowed=keys.load_authorized(tmp_path))
    yield made
    made.close()


def agent_of(hub: Hub, folder: Path, node: str) -> Agent:
    pair = keys.load_pair(keys.node_secret_path(folder, node))
    return Agent(hub.endpoint, pair, keys.load_public(keys.server_public_path(folder)))


async def heard_by(hub: Hub, agent: Agent, *messages: bytes | msgspec.Struct) -> list[tuple[str, str]]:
    """What the hub passes on of ``messages``, up to a last Heartbeat that it always understands: (node,
    kind).
    """
    passed: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    hub.start(lambda node, message: passed.put_nowait((node, type(message).__name__)), lambda _node: None)
    for message in (*messages, Heartbeat("last")):
        agent.say(message)
    found = []
    while not found or found[-1][1] != "Heartbeat":
        found.append(await asyncio.wait_for(passed.get(), WAIT_S))
    return found


@pytest.mark.asyncio
async def test_a_worker_cannot_speak_for_a_device_of_another(hub: Hub, tmp_path: Path) -> None:
    agent = agent_of(hub, tmp_path, "node-2")
    done = StepDone("node-1/0", "job-1", 1, Counters(3, 3, 3), "applied", 1.0, 1.0, 0.1, 1, "", 0.1, 0.1)
    stranger = hello("node-2")
    stranger = msgspec.structs.replace(
        stranger, devices=(msgspec.structs.replace(stranger.devices[0], device="node-1/0"),)
    )
    figures = FiguresTold("incarnation.1", (DeviceFigures("node-1/0", 1.0),))
    report = FiguresTold("incarnation.1", (), (CardReport("node-1/0", 1.0, xid=79),))
    assert await heard_by(hub, agent, hello("node-2"), done, stranger, figures, report) == [
        ("node-2", "Hello"),
        ("node-2", "Heartbeat"),
    ]
    assert hub.counters.refused == 4
    agent.close()


@pytest.mark.asyncio
async def test_a_pickle_is_damage_and_is_never_loaded(hub: Hub, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    agent = agent_of(hub, tmp_path, "node-1")
    planted = pickle.dumps(Planted(trap))
    wrapped = msgspec.msgpack.encode({"type": "Goodbye", "incarnation": planted, "reason": planted})
    assert await heard_by(hub, agent, hello("node-1"), planted, wrapped) == [
        ("node-1", "Hello"),
        ("node-1", "Heartbeat"),
    ]
    assert hub.counters.damaged == 2
    assert not trap.exists()
    agent.close()


@pytest.mark.asyncio
async def test_who_sends_nothing_but_damage_is_not_looked_at_for_ever(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    noisy, quiet = agent_of(hub, tmp_path, "node-1"), agent_of(hub, tmp_path, "node-2")
    for _ in range(500):
        noisy.say(b"\xc1")
    noisy.say(hello("node-1"))
    assert await heard_by(hub, quiet, hello("node-2")) == [("node-2", "Hello"), ("node-2", "Heartbeat")]
    while hub.counters.received < 503:  # noqa: ASYNC110 - a counter tells nobody
        await asyncio.sleep(0)
    assert hub.counters.damaged == 501, "its Hello is not read either"
    assert len([record for record in caplog.records if "a newcomer" in record.getMessage()]) == AT_ONCE
    noisy.close()
    quiet.close()


@pytest.mark.asyncio
async def test_a_key_is_changed_while_all_runs(hub: Hub, tmp_path: Path) -> None:
    passed: asyncio.Queue[str] = asyncio.Queue()
    hub.start(lambda node, _message: passed.put_nowait(node), lambda _node: None)
    before = agent_of(hub, tmp_path, "node-1")
    before.say(hello("node-1"))
    assert await asyncio.wait_for(passed.get(), WAIT_S) == "node-1"
    keys.rotate_node_keys(tmp_path, "node-1")
    hub.allow(keys.load_authorized(tmp_path))
    before.say(Heartbeat("with the old key"))
    assert await asyncio.wait_for(passed.get(), WAIT_S) == "node-1"
    after = agent_of(hub, tmp_path, "node-1")
    after.say(hello("node-1", incarnation="incarnation.1"))
    assert await asyncio.wait_for(passed.get(), WAIT_S) == "node-1"
    keys.retire_node_key(tmp_path, "node-1")
    hub.allow(keys.load_authorized(tmp_path))
    before.say(Heartbeat("too late"))
    answer = await before.heard()
    assert isinstance(answer, Refused)
    after.say(Heartbeat("with the new key"))
    assert await asyncio.wait_for(passed.get(), WAIT_S) == "node-1"
    assert passed.empty()
    before.close()
    after.close()


@pytest.mark.asyncio
async def test_a_worker_takes_its_new_key_without_a_restart(hub: Hub, tmp_path: Path) -> None:
    """As its agent does it at SIGHUP; until it is retired the old key is as good, so there is no moment
    without one.
    """
    passed: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    hub.start(lambda node, message: passed.put_nowait((node, type(message).__name__)), lambda _node: None)

    def keys_now() -> CurveKeys:
        pair = keys.load_pair(keys.node_secret_path(tmp_path, "node-1"))
        return CurveKeys(pair.public, pair.secret, keys.load_public(keys.server_public_path(tmp_path)))

    loop = asyncio.get_running_loop()
    uplink = Uplink(
        loop, hub.endpoint, keys_now(), on_message=lambda _data: None,
        on_connected=lambda: uplink.send(codec.encode(hello("node-1"))),
    )  # fmt: skip
    uplink.connect()
    assert await asyncio.wait_for(passed.get(), WAIT_S) == ("node-1", "Hello")
    keys.rotate_node_keys(tmp_path, "node-1")
    hub.allow(keys.load_authorized(tmp_path))
    uplink.rekey(keys_now())
    assert await asyncio.wait_for(passed.get(), WAIT_S) == ("node-1", "Hello")
    keys.retire_node_key(tmp_path, "node-1")
    hub.allow(keys.load_authorized(tmp_path))
    assert uplink.send(codec.encode(Heartbeat("incarnation.1")))
    assert await asyncio.wait_for(passed.get(), WAIT_S) == ("node-1", "Heartbeat")
    uplink.close()


@pytest.mark.asyncio
async def test_daemon_and_agent_speak_ipv6(tmp_path: Path) -> None:
    server, pair = keys.make_server_keys(tmp_path), keys.make_node_keys(tmp_path, "node-1")
    hub = Hub("tcp://[::1]:0", pair=server, allowed=keys.load_authorized(tmp_path))
    assert hub.endpoint.startswith("tcp://[::1]:")
    passed: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    hub.start(lambda node, message: passed.put_nowait((node, type(message).__name__)), lambda _node: None)
    uplink = Uplink(
        asyncio.get_running_loop(), hub.endpoint, CurveKeys(pair.public, pair.secret, server.public),
        on_message=lambda _data: None, on_connected=lambda: uplink.send(codec.encode(hello("node-1"))),
    )  # fmt: skip
    uplink.connect()
    assert await asyncio.wait_for(passed.get(), WAIT_S) == ("node-1", "Hello")
    uplink.close()
    hub.close()


def test_a_key_that_is_being_changed_is_not_changed_again(tmp_path: Path) -> None:
    keys.make_node_keys(tmp_path, "node-1")
    with pytest.raises(keys.KeyFileError, match="not changing"):
        keys.retire_node_key(tmp_path, "node-1")
    with pytest.raises(keys.KeyFileError, match="no key that could be changed"):
        keys.rotate_node_keys(tmp_path, "node-2")
    keys.rotate_node_keys(tmp_path, "node-1")
    with pytest.raises(keys.KeyFileError, match="changing its key already"):
        keys.rotate_node_keys(tmp_path, "node-1")
    assert sorted(keys.load_authorized(tmp_path).values()) == ["node-1", "node-1"]


# ---------------------------------------------------------------------- the API on TCP


class Remote:
    """The API of a daemon over HTTPS."""

    def __init__(self, running: Daemon, port: int, cert: Path) -> None:
        self.running, self.port, self.cert = running, port, cert
        self.keys = running.folder / "keys"

    def ask(
        self, method: str, path: str, token: str | None, body: str = "{}"
    ) -> tuple[int, dict[str, object]]:
        context = ssl.create_default_context(cafile=str(self.cert))
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, context=context, timeout=WAIT_S)
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        connection.request(method, path, None if method == "GET" else body, headers)
        response = connection.getresponse()
        data = response.read()
        connection.close()
        return response.status, msgspec.json.decode(data) if data.startswith(b"{") else {}

    def reload(self) -> None:
        self.running.process.send_signal(signal.SIGHUP)
        assert self.running.log_until("reloaded")


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    certificate = make_certificate(tmp_path_factory.mktemp("tls"))
    with remote_daemon(tmp_path_factory.mktemp("remote"), certificate) as (running, port):
        yield Remote(running, port, certificate[0])


def test_without_a_token_nothing_is_answered(remote: Remote) -> None:
    for path in ("/healthz", "/metrics", "/v1/status", "/openapi.json", "/nowhere"):
        for token in (None, "", "oobleck_guess", "é"):
            status, problem = remote.ask("GET", path, token) if token != "é" else (401, {"hint": "x"})
            assert status in {401, 429}, (path, token)
            assert problem["hint"]


def test_a_token_reads_or_acts_as_it_says_and_until_then(remote: Remote) -> None:
    now = time.time()
    reader = tokens.make_token(remote.keys, "reader", "read", now + 3600)
    actor = tokens.make_token(remote.keys, "actor", "act", now + 3600)
    expired = tokens.make_token(remote.keys, "old", "act", now - 1)
    remote.reload()
    assert remote.ask("GET", "/v1/status", reader)[0] == 200
    status, problem = remote.ask("POST", "/v1/nodes/node-9/drain", reader)
    assert status == 403
    assert problem["detail"] == "token reader may read, but not act"
    assert remote.ask("POST", "/v1/nodes/node-9/drain", actor)[0] == 404, "it may, and there is no such node"
    status, problem = remote.ask("GET", "/v1/status", expired)
    assert status in {401, 429}
    again = tokens.make_token(remote.keys, "actor", "read", now + 3600)
    tokens.drop_token(remote.keys, "reader")
    remote.reload()
    assert remote.ask("GET", "/v1/status", again)[0] == 200
    for gone in (actor, reader):
        assert remote.ask("GET", "/v1/status", gone)[0] in {401, 429}


def test_without_tls_nobody_is_listened_to(remote: Remote) -> None:
    with socket.create_connection(("127.0.0.1", remote.port)) as plain:
        plain.sendall(b"GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n")
        plain.settimeout(WAIT_S)
        assert b"HTTP/1.1 200" not in plain.recv(1024)


def test_the_token_file_has_no_token(remote: Remote) -> None:
    made = tokens.make_token(remote.keys, "kept", "read", time.time() + 60)
    path = tokens.tokens_path(remote.keys)
    assert made not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--api", "127.0.0.1:0"), "tls_cert or tls_key is missing"),
        (("--api", "127.0.0.1", "--tls-cert", "x", "--tls-key", "y"), "has no port"),
        (("--api", "127.0.0.1:1", "--tls-cert", "/none", "--tls-key", "/none"), "cannot be used"),
    ],
)
def test_tcp_without_a_certificate_does_not_start(tmp_path: Path, flags: tuple[str, ...], says: str) -> None:
    command = [
        sys.executable,
        "-m",
        "oobleckd.daemon.app",
        "--state-dir",
        tmp_path,
        "--endpoint",
        "tcp://127.0.0.1:0",
    ]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert done.returncode == 2
    assert says in done.stderr


# ---------------------------------------------------------------------- the unix socket


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_reads_and_does_not_act(remote: Remote) -> None:
    code = (
        "import os, sys, socket\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "for method, path in (('GET', '/v1/status'), ('POST', '/v1/nodes/node-1/drain')):\n"
        "    with socket.socket(socket.AF_UNIX) as s:\n"
        "        s.connect(sys.argv[1])\n"
        "        s.sendall(f'{method} {path} HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: 2\\r\\nConnection: "
        "close\\r\\n\\r\\n{{}}'.encode())\n"
        "        print(s.recv(100).split()[1].decode())\n"
    )
    path = remote.running.folder / "d.sock"
    for folder in path.parents:  # those of pytest are its user's alone
        if not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o001)
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["200", "403"]


def test_one_caller_cannot_ask_without_end(remote: Remote) -> None:
    """Acts are dear: each is journaled. Reading goes on meanwhile."""
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(remote.running.folder / "d.sock"))
    statuses = []
    while 429 not in statuses and len(statuses) < 2000:
        connection.request("POST", "/v1/nodes/node-9/drain", "{}")
        response = connection.getresponse()
        response.read()
        statuses.append(response.status)
    assert statuses[-1] == 429
    assert int(response.headers["Retry-After"]) >= 1
    connection.request("GET", "/healthz")
    assert connection.getresponse().status == 200
    connection.close()


# ---------------------------------------------------------------------- size


def test_a_message_that_is_too_large_costs_its_connection(hub: Hub, tmp_path: Path) -> None:
    agent = agent_of(hub, tmp_path, "node-1")
    monitor = agent.socket.get_monitor_socket()
    agent.say(codec.encode(Heartbeat("x")) + bytes(65 * 2**20))
    assert monitor.poll(int(WAIT_S * 1000))
    agent.socket.disable_monitor()
    monitor.close()
    assert hub.counters.received == 0
    agent.close()


def test_a_body_that_is_too_large_is_refused(remote: Remote) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(remote.running.folder / "d.sock"))
        sock.sendall(
            b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % 2**33 + bytes(2**20 + 1)
        )
        assert b" 413 " in sock.recv(100)
