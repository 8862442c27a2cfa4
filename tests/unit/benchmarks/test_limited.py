"""A link takes what it says, whatever it is that sends and receives: real sockets, the kernel's own limit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.limited import within

ROOT = Path(__file__).resolve().parents[3]
BYTES, BYTES_PER_S, BURST_BYTES = 3_000_000, 10e6, 2**17
_RECEIVE = """
import socket, sys, time
listener = socket.create_server((sys.argv[1], 5000))
print("ready", flush=True)
links = [listener.accept()[0] for _ in range(int(sys.argv[2]))]
for link in links:
    while link.recv(1 << 20):
        pass
"""
_SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000)) as link:
    link.sendall(bytes(int(sys.argv[2])))
    link.shutdown(socket.SHUT_WR)
    link.recv(1)
"""
_PROGRAM = """
import json, subprocess, sys, time
from benchmarks.limited import Links

receive, send, num_bytes, rate, senders, receivers = json.loads(sys.argv[1])

def start(place, *words, **more):
    return subprocess.Popen([*links.inside(place), sys.executable, "-c", *map(str, words)], **more)

with Links("test", ("a", "b", "c"), rate) as links:
    listening = [
        start(place, receive, links.address(place), len(senders), stdout=subprocess.PIPE)
        for place in receivers
    ]
    for program in listening:
        program.stdout.readline()
    began = time.monotonic()
    programs = [start(a, send, links.address(b), num_bytes) for a in senders for b in receivers]
    codes = [program.wait() for program in programs + listening]
    print(json.dumps([time.monotonic() - began, links.sent(), codes]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("senders", "receivers"), [("a", "bc"), ("bc", "a")], ids=["one to two", "two to one"]
)
def test_what_passes_a_link_takes_its_time(senders: str, receivers: str) -> None:
    words = json.dumps([_RECEIVE, _SEND, BYTES, BYTES_PER_S, list(senders), list(receivers)])
    done = subprocess.run(
        within(sys.executable, "-c", _PROGRAM, words), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    took_s, sent, codes = json.loads(done.stdout)
    assert set(codes) == {0}
    # Both streams go through the one link, of which a burst takes no time.
    assert took_s >= (2 * BYTES - BURST_BYTES) / BYTES_PER_S
    for node in senders:
        assert sent[node] >= BYTES * len(receivers)
    for node in receivers:
        assert sent[node] < BYTES / 10
