"""Transports of one process: what came, and what was reported."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path

from oobleckd.worker.messaging.gather import Intake
from oobleckd.worker.transport import sockets
from oobleckd.worker.transport.mailbox import Key, Mailbox, TensorMessage
from oobleckd.worker.transport.transport import Transport

SECRET = bytes(range(32))
TIMEOUT_S = 30.0


class Device:
    """A transport and what it reported."""

    def __init__(self, name: str, directory: Path, host: str = "here", handshake_s: float = 10.0) -> None:
        self.mailbox = Mailbox()
        self.intake = Intake(self.mailbox)
        self.lost: list[tuple[str, str]] = []
        self.transport = Transport(
            name,
            host,
            self.intake,
            local_dir=directory,
            on_peer_lost=self._on_lost,
            handshake_s=handshake_s,
            room=self.intake.room,
        )

    def _on_lost(self, peer: str, why: str) -> None:
        self.lost.append((peer, why))
        self.mailbox.put_control("lost")

    def until(self, done: Callable[[], bool]) -> None:
        """Wait for messages and losses until ``done``."""
        deadline = time.monotonic() + TIMEOUT_S
        while not done():
            assert self.mailbox.wait(deadline - time.monotonic()), "nothing came"

    def receive(self, key: Key) -> TensorMessage:
        """Wait for the message of ``key``."""
        got: list[TensorMessage] = []

        def done() -> bool:
            message = self.mailbox.take(key)
            if message is not None:
                got.append(message)
            return bool(got)

        self.until(done)
        return got[0]


MakeDevice = Callable[..., Device]


def introduce(*devices: Device, secret: bytes = SECRET) -> None:
    """Name all to each other."""
    peers = {device.transport.device: device.transport.peer for device in devices}
    for device in devices:
        device.transport.configure(peers, secret)


def dial(device: Device) -> socket.socket:
    """A connection of a stranger to ``device``."""
    sock = sockets.open_socket(device.transport.peer, unix=False)
    sock.settimeout(TIMEOUT_S)
    sockets.connect(sock, device.transport.peer, unix=False)
    return sock
