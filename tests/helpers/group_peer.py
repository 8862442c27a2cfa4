"""A real process with a transport and groups, led line by line, for tests that kill and stop it.

Prints its ``Peer``; then reads commands as JSON, one a line, and answers each with one line of JSON. What a
message holds is a function of its key, so the receiver knows whether it has the right bits.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from oobleckd.protocol.parts import Peer
from oobleckd.worker.groups.choose import choose
from oobleckd.worker.groups.manager import GroupManager
from oobleckd.worker.messaging.gather import Intake
from oobleckd.worker.messaging.messenger import TransportMessenger
from oobleckd.worker.transport.mailbox import Key, Mailbox
from oobleckd.worker.transport.transport import Transport

SECRET = bytes(range(32))
KINDS = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool)
TIMEOUT_S = 60.0


class Command(msgspec.Struct, omit_defaults=True):
    """``do`` and what it needs: see ``GroupPeer``'s methods."""

    do: str
    peers: dict[str, Peer] = {}
    epoch: int = 0
    names: tuple[str, ...] = ()
    first: int = 0
    count: int = 0
    num_bytes: int = 0


def tensors_of(key: Key) -> list[Tensor]:
    """What the message ``key`` holds: up to three tensors of odd shapes and several dtypes, or
    one large one.
    """
    draw = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
    if key[0] == "large":
        return [torch.randint(0, 256, (int(key[3]),), generator=draw, dtype=torch.uint8)]
    chance = random.Random(repr(key))
    return [
        torch.randint(-9, 9, (chance.randrange(1, 40), chance.randrange(1, 300)), generator=draw).to(
            chance.choice(KINDS)
        )
        for _ in range(chance.randrange(1, 4))
    ]


class GroupPeer:
    """The process's state."""

    def __init__(self, device: str, directory: Path, place: torch.device, backend: str) -> None:
        self.device = device
        self.place = place
        backend, _ = choose(place, {"OOBLECK_BACKEND": backend})
        self.mailbox = Mailbox()
        self.groups = GroupManager(device, self.mailbox, backend, self._send)
        intake = Intake(self.groups)
        self.transport = Transport(
            device, "here", intake, local_dir=directory, on_peer_lost=lambda *lost: None
        )
        self.messenger = TransportMessenger(self.transport, self.groups, intake, self.mailbox, place)
        self.got: Counter[str] = Counter()
        self.wrong: list[Key] = []

    def _send(self, peer: str, key: Key, tensors: Sequence[Tensor], meta: bytes) -> bool:
        return self.transport.send(peer, key, tensors, meta)

    def _put(self, name: str, key: Key) -> None:
        self.messenger.send(name, key, [tensor.to(self.place) for tensor in tensors_of(key)], b"meta")

    def clear(self, _command: Command) -> Any:
        """Forget what has been received."""
        self.got.clear()
        return None

    def enter(self, command: Command) -> Any:
        """A new epoch with members ``peers``."""
        self.transport.configure(command.peers, SECRET)
        self.groups.enter(command.epoch, command.peers)
        return None

    def send(self, command: Command) -> Any:
        """Tensor messages ``first`` to ``first + count`` to each of ``names``, in a random order."""
        messages = [
            (n, i) for n in command.names for i in range(command.first, command.first + command.count)
        ]
        random.Random(self.device).shuffle(messages)
        for name, index in messages:
            key = ("message", self.device, index, name)
            self._put(name, key)
        return self.groups.num_messages

    def send_large(self, command: Command) -> Any:
        """One message of ``num_bytes`` to each of ``names``; returns whether it went to a channel."""
        before = self.groups.num_messages
        for name in command.names:
            key = ("large", self.device, name, command.num_bytes)
            self._put(name, key)
        return self.groups.num_messages - before == len(command.names)

    def open(self, command: Command) -> Any:
        """Wait until the channels to ``names`` are open; a first message must have been sent."""
        group, changed = self.groups._groups[command.epoch], self.groups._changed

        def is_open() -> bool:
            return all(name in group._senders and group._senders[name].is_open for name in command.names)

        with changed:
            deadline = time.monotonic() + TIMEOUT_S
            while not is_open() and time.monotonic() < deadline:
                changed.wait(0.01)
            return is_open()

    def forget(self, command: Command) -> Any:
        """``names`` are dead; returns how long the group of ``epoch`` took to end, in seconds."""
        began = time.monotonic()
        self.groups.forget(command.names)
        self.transport.forget(command.names)
        ended = self.groups._groups[command.epoch].ended.wait(TIMEOUT_S)
        return time.monotonic() - began if ended else None

    def receive(self, command: Command) -> Any:
        """Take messages until there are ``count`` of each of ``names``; how often each key came, what was
        wrong.
        """
        deadline = time.monotonic() + TIMEOUT_S
        self._take()
        while any(self._from(name) < command.count for name in command.names):
            if not self.mailbox.wait(deadline - time.monotonic()):
                break
            self._take()
        return [self.got, self.wrong]

    def end(self, _command: Command) -> Any:
        """Say goodbye."""
        ended = self.groups.close(TIMEOUT_S)
        self.transport.close()
        return ended

    def _from(self, name: str) -> int:
        return sum(times for key, times in self.got.items() if f"'{name}'" in key.split(",")[1])

    def _take(self) -> None:
        for key in self.mailbox.keys():  # noqa: SIM118 - a mailbox is no dict
            while (message := self.messenger.take(key)) is not None:
                self.got[repr(key)] += 1
                wanted = [tensor.to(self.place) for tensor in tensors_of(key)]
                same = len(wanted) == len(message.tensors) and all(
                    a.dtype == b.dtype and torch.equal(a, b)
                    for a, b in zip(wanted, message.tensors, strict=True)
                )
                if not same or message.meta != b"meta" or message.source != key[1]:
                    self.wrong.append(key)


class Member:
    """The parent's end of such a process. ``ask`` is ``tell`` and ``hear``; do not ask who is stopped."""

    def __init__(self, name: str, directory: Path, device: str = "cpu", backend: str = "gloo") -> None:
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.group_peer", name, str(directory), device, backend],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def tell(self, do: str, **what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(Command(do, **what)).decode() + "\n")
        self.process.stdin.flush()

    def hear(self, kind: Any = Any) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"{self.name} ended with {self.process.wait(TIMEOUT_S)}"
        return msgspec.json.decode(line, type=kind)

    def ask(self, do: str, **what: Any) -> Any:
        self.tell(do, **what)
        return self.hear()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


def main() -> None:
    """Arguments: device, directory of the Unix sockets, torch device, backend."""
    device, directory, place, backend = sys.argv[1:]
    peer = GroupPeer(device, Path(directory), torch.device(place), backend)
    print(msgspec.json.encode(peer.transport.peer).decode(), flush=True)
    for line in sys.stdin:
        command = msgspec.json.decode(line, type=Command)
        print(msgspec.json.encode(getattr(peer, command.do)(command)).decode(), flush=True)
        if command.do == "end":
            return


if __name__ == "__main__":
    main()
