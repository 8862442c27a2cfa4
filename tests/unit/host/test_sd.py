"""What systemd hears, over a real datagram socket."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from oobleckd.daemon.peers import SocketPeer, may_act, peer_of
from oobleckd.host import sd


def test_notify_reaches_a_path_and_an_abstract_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    abstract = f"oobleck-test-{os.getpid()}"
    for bound, named in ((str(tmp_path / "n"), str(tmp_path / "n")), (f"\0{abstract}", f"@{abstract}")):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.bind(bound)
            sock.settimeout(120)
            monkeypatch.setenv("NOTIFY_SOCKET", named)
            assert sd.notify("READY=1", "STATUS=x")
            assert sock.recv(100) == b"READY=1\nSTATUS=x"
    assert not sd.notify("READY=1"), "nobody listens any more"
    monkeypatch.delenv("NOTIFY_SOCKET")
    assert not sd.notify("READY=1")


def test_watchdog_is_for_the_process_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    assert sd.watchdog_s() is None
    monkeypatch.setenv("WATCHDOG_USEC", "3000000")
    assert sd.watchdog_s() == 3.0
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid() + 1))
    assert sd.watchdog_s() is None


def test_sockets_meant_for_another_process_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISTEN_FDS", "1")
    monkeypatch.setenv("LISTEN_PID", str(os.getpid() + 1))
    assert sd.listen_sockets() == []


def test_the_kernel_names_the_peer() -> None:
    here, there = socket.socketpair()
    with here, there:
        assert peer_of(here) == SocketPeer(os.getpid(), os.getuid(), os.getgid())


def test_who_may_act() -> None:
    assert may_act(SocketPeer(1, 0, 0), "no-such-group")
    assert may_act(SocketPeer(1, os.geteuid(), 12345), "no-such-group")
    assert not may_act(SocketPeer(1, 4_000_000, 4_000_000), "no-such-group")
    assert not may_act(SocketPeer(1, 4_000_000, 0), "root"), "a user whom nobody knows"
    assert str(SocketPeer(1, 4_000_000, 0)) == "uid 4000000"


def test_a_credential_is_a_file_of_this_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    assert sd.credential("oobleck.server.key") is None
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert sd.credential("oobleck.server.key") is None
    (tmp_path / "oobleck.server.key").touch()
    assert sd.credential("oobleck.server.key") == tmp_path / "oobleck.server.key"
