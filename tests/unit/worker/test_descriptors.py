"""Open files for other processes: who gets which, and who gets none."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from oobleckd.worker.runtime import descriptors
from oobleckd.worker.runtime.descriptors import Lender, borrowed

LENDER = """
import os, sys
from oobleckd.worker.runtime.descriptors import Lender
lender, (end, other) = Lender(), os.pipe()
lender.lend(end)
os.write(other, b"hello")
sys.stdout.buffer.write(lender.address.hex().encode() + b" %d\\n" % end)
sys.stdout.flush()
sys.stdin.readline()
"""


STRANGER = """
import os, sys
from oobleckd.worker.runtime.descriptors import borrowed
os.setuid(65534)
borrowed(bytes.fromhex(sys.argv[1]), int(sys.argv[2]), os.getppid())
"""


def test_another_process_gets_the_file_itself() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as lender:
        assert lender.stdout is not None
        address, number = lender.stdout.readline().split()
        found = borrowed(bytes.fromhex(address), int(number), lender.pid)
        assert not os.get_inheritable(found)
        assert os.read(found, 5) == b"hello"
        os.close(found)
        lender.send_signal(signal.SIGKILL)
        lender.wait()
    with pytest.raises(FileNotFoundError):
        borrowed(bytes.fromhex(address), int(number), lender.pid)


def test_nobody_gets_what_is_not_lent() -> None:
    lender = Lender()
    end, other = os.pipe()
    lender.lend(end)
    os.close(borrowed(lender.address, end, os.getpid()))
    for number in (other, -1, 0, 2**30):
        with pytest.raises(FileNotFoundError):
            borrowed(lender.address, number, os.getpid())
    lender.end(end)
    with pytest.raises(FileNotFoundError):
        borrowed(lender.address, end, os.getpid())
    os.close(end)
    os.close(other)


def test_a_name_that_is_another_one_s_by_now_is_not_asked() -> None:
    lender, (end, other) = Lender(), os.pipe()
    lender.lend(end)
    with pytest.raises(FileNotFoundError, match="another process"):
        borrowed(lender.address, end, os.getppid())
    os.close(end)
    os.close(other)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_nobody_else_gets_anything() -> None:
    lender, (end, other) = Lender(), os.pipe()
    lender.lend(end)
    asked = [sys.executable, "-c", STRANGER, lender.address.hex(), str(end)]
    stranger = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert "PermissionError: [Errno 13] it is another user's" in stranger.stderr
    os.close(borrowed(lender.address, end, os.getpid()))
    os.close(end)
    os.close(other)


def test_one_who_asks_nothing_keeps_others_waiting_for_no_longer_than_he_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(descriptors, "_ASK_S", 0.05)
    lender, (end, other) = Lender(), os.pipe()
    lender.lend(end)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(lender.address)
        os.close(borrowed(lender.address, end, os.getpid()))
    os.close(end)
    os.close(other)


def test_one_who_asks_too_late_may_ask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its question came when nobody waited for it any more."""
    monkeypatch.setattr(descriptors, "_ASK_S", 0.05)
    lender, (end, other), closed = Lender(), os.pipe(), threading.Event()
    lender.lend(end)
    monkeypatch.setattr(lender, "_answer", lambda connection: (connection.close(), closed.set()))
    with pytest.raises(TimeoutError):
        borrowed(lender.address, end, os.getpid())
    assert closed.wait(60)
    monkeypatch.undo()
    os.close(borrowed(lender.address, end, os.getpid()))
    os.close(end)
    os.close(other)


def test_one_who_does_not_answer_is_told_from_one_who_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "ANSWER_S", 0.05)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stopped:
        stopped.bind("")
        stopped.listen()
        with pytest.raises(TimeoutError):
            borrowed(stopped.getsockname(), 3, os.getpid())
