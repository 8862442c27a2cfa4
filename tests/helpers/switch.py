"""A network for boxes: each has a TUN device, and a switch in this process carries packets from one to the
other.

Owns the weather: what is lost, late, cut off one way or both, and how much passes. It needs no kernel module
(netem and nftables are missing in some), and what is done to a packet is known exactly.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import random
import select
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_PACKET_BYTES = 65536
_QUEUE_S = 0.5
"""What waits longer than that for its turn on a slow link is dropped, as by any router."""
_LOOK_S = 0.5


@dataclass
class Weather:
    """``loss``: share of packets. ``delay_s``: one way. ``rate_bytes_s`` into each host (0: as it comes).
    ``cuts``: (from, to), by address. ``tcp``: whether any of it passes: else connections stand still, as
    where packets are lost several times in a row.
    """

    loss: float = 0.0
    delay_s: float = 0.0
    rate_bytes_s: float = 0.0
    cuts: set[tuple[str, str]] = field(default_factory=set)
    tcp: bool = True

    def loses(self, source: str, target: str, packet: bytes, dice: random.Random) -> bool:
        """Whether ``packet`` does not arrive."""
        stands = not self.tcp and packet[9] == socket.IPPROTO_TCP
        return stands or (source, target) in self.cuts or dice.random() < self.loss


class Switch(threading.Thread):
    """Between hosts with addresses of 10.213.78.0/24. ``weather`` may be changed at any time."""

    def __init__(self) -> None:
        super().__init__(name="switch", daemon=True)
        self.weather = Weather()
        self.num_passed = self.num_lost = 0
        self._ends: dict[str, int] = {}
        self._of: dict[int, str] = {}
        self._on_the_way: list[tuple[float, int, str, bytes]] = []
        self._free_at: dict[str, float] = {}
        self._order = itertools.count()
        self._dice = random.Random(0)
        self._closed = threading.Event()

    @staticmethod
    def address(number: int) -> str:
        """Of the host with this number, from 1 on."""
        return f"10.213.78.{number}"

    def plug(self, number: int, pid: int) -> None:
        """Give the network namespace of process ``pid`` a device with the address ``number``. Before
        ``start``.
        """
        address, name = self.address(number), f"oob{os.getpid() % 100000}n{number}"
        fd = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
        inside = ["nsenter", "--target", str(pid), "--net", "ip"]
        _run("ip", "link", "set", name, "netns", str(pid))
        _run(*inside, "address", "add", f"{address}/24", "dev", name)
        _run(*inside, "link", "set", name, "up")
        self._ends[address], self._of[fd] = fd, address

    def part(self, one: Iterable[int], other: Iterable[int], *, one_way: bool = False) -> None:
        """Nothing gets from ``one`` side to the ``other`` (host numbers), nor back unless ``one_way``."""
        pairs = [(self.address(a), self.address(b)) for a in one for b in other]
        self.weather.cuts = {*pairs, *(() if one_way else ((b, a) for a, b in pairs))}

    def heal(self) -> None:
        """Good weather."""
        self.weather = Weather()

    def close(self) -> None:
        """End, and take the devices away."""
        self._closed.set()
        self.join()
        for fd in self._of:
            os.close(fd)

    def run(self) -> None:
        """Until ``close``."""
        while not self._closed.is_set():
            due_s = self._on_the_way[0][0] - time.monotonic() if self._on_the_way else _LOOK_S
            ready, _, _ = select.select(list(self._of), [], [], min(max(0.0, due_s), _LOOK_S))
            for fd in ready:
                self._take(fd)
            while self._on_the_way and self._on_the_way[0][0] <= time.monotonic():
                _, _, target, packet = heapq.heappop(self._on_the_way)
                with suppress(OSError, KeyError):  # a host whose power is cut
                    os.write(self._ends[target], packet)

    def _take(self, fd: int) -> None:
        try:
            packet = os.read(fd, _PACKET_BYTES)
        except OSError:  # its host is gone, and its device with it
            del self._ends[self._of.pop(fd)]
            os.close(fd)
            return
        target = ".".join(map(str, packet[16:20]))
        if packet[0] >> 4 != 4 or target not in self._ends:
            return
        weather = self.weather
        if weather.loses(self._of[fd], target, packet, self._dice):
            self.num_lost += 1
            return
        now = time.monotonic()
        sent_at = now
        if weather.rate_bytes_s:
            begun_at = max(now, self._free_at.get(target, 0.0))
            if begun_at - now > _QUEUE_S:
                self.num_lost += 1
                return
            sent_at = self._free_at[target] = begun_at + len(packet) / weather.rate_bytes_s
        self.num_passed += 1
        heapq.heappush(self._on_the_way, (sent_at + weather.delay_s, next(self._order), target, packet))


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
