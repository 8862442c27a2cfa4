"""Tells the daemon what the devices of a node say of themselves, as often as it wants to know.

Owns the rhythm, what is known of a process by the kernel, and how that and what its card says become figures.
All of it takes some microseconds a device, in the agent's loop; what may take longer is ``cards``'.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from oobleckd.protocol.agentmessages import FiguresTold, Welcome
from oobleckd.protocol.nodeviews import DeviceFigures
from oobleckd.protocol.parts import CardReport, DeviceInfo
from oobleckd.worker.telemetry.cards import CardOf, CardWatch
from oobleckd.worker.telemetry.nvml import CardReading

IDLE_S = 60.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class UpDevice(NamedTuple):
    """A device that is up, and the number of its process."""

    info: DeviceInfo
    pid: int


def rss_bytes(pid: int) -> int:
    """Memory of the host that the process has at present; 0 where the kernel does not tell (any more)."""
    # Not smaps_rollup, which looks at every page: of a process with 100 GB that takes a second, in which it
    # cannot map anything.
    try:
        return _PAGE_BYTES * int(Path(f"/proc/{pid}/statm").read_bytes().split()[1])
    except (OSError, ValueError, IndexError):
        return 0


class FigureTeller:
    """Of one agent, in its loop. ``processes``: of the devices that are up; ``say`` tells the daemon;
    ``total_bytes`` of memory may be had on this host.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        processes: Callable[[], Sequence[UpDevice]],
        incarnation: Callable[[], str],
        is_idle: Callable[[], bool],
        say: Callable[[FiguresTold], None],
        total_bytes: int,
        cards: CardWatch | None = None,
    ) -> None:
        self._loop = loop
        self._processes, self._incarnation, self._is_idle, self._say = processes, incarnation, is_idle, say
        self._total_bytes = total_bytes
        self._cards = cards or CardWatch()
        self._timer: asyncio.TimerHandle | None = None
        self._told_at = float("-inf")
        self._told: tuple[CardReport, ...] = ()
        self._read: frozenset[str] = frozenset()

    def welcome(self, message: Welcome) -> None:
        """Tell as often as it says from now on, the first time at once."""
        self._stop()
        if message.figures_s > 0:
            self._told_at = float("-inf")
            self._every(message.figures_s)

    def close(self) -> None:
        """Tell no more."""
        self._stop()
        self._cards.close()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _every(self, figures_s: float) -> None:
        self._timer = self._loop.call_later(figures_s, self._every, figures_s)
        processes, reports = self._processes(), self._cards.reports()
        self._cards.watch(
            {each.info.device: CardOf(each.info.card, each.pid) for each in processes if each.info.card},
            figures_s,
        )
        # A node that trains says other things over its connection anyway. What an idle one says there costs
        # the daemon memory in the long run, for a figure that hardly moves. (D-watching-021)
        now, read = self._loop.time(), frozenset(each.info.device for each in processes if self._card(each))
        nothing_new = (reports, read) == (self._told, self._read)
        if not processes or (nothing_new and self._is_idle() and now < self._told_at + IDLE_S):
            return
        self._told_at, self._told, self._read = now, reports, read
        self._say(FiguresTold(self._incarnation(), tuple(self._of(each) for each in processes), reports))

    def _card(self, process: UpDevice) -> CardReading | None:
        return self._cards.newest(process.info.device)

    def _of(self, process: UpDevice) -> DeviceFigures:
        info, rss = process.info, rss_bytes(process.pid)
        if info.kind == "cpu":
            total = self._total_bytes or info.memory_bytes
            return DeviceFigures(info.device, time.time(), rss, used_bytes=rss, total_bytes=total)
        figures = DeviceFigures(info.device, time.time(), rss, total_bytes=info.memory_bytes, card=info.name)
        card = self._card(process)
        if card is None:
            return figures
        return msgspec.structs.replace(
            figures,
            used_bytes=card.used_bytes,
            total_bytes=card.total_bytes or info.memory_bytes,
            card=card.name or info.name,
            utilisation=card.utilisation,
            power_w=card.power_w,
            power_limit_w=card.power_limit_w,
            temperature_c=card.temperature_c,
            clock_mhz=card.clock_mhz,
            clock_max_mhz=card.clock_max_mhz,
            throttled=card.throttled,
            ecc_corrected=card.ecc_corrected,
            ecc_uncorrected=card.ecc_uncorrected,
            xids=tuple(each.xid for each in self._told if each.device == info.device and each.xid),
        )
