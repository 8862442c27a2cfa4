"""Tells the daemon of device processes that are stopped, and carries out its answer.

Owns that a stopped device is not ended without the daemon's word: it may hold the last copy of a layer, and
the daemon alone knows. It is told again every second, so whatever gets lost, and a daemon that starts
meanwhile, is told in time. While the daemon is away nobody could take a dead device's place either. Whether a
process is stopped is ``watchdog``'s.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass

from oobleckd.protocol.agentmessages import DeviceAwake, DeviceStopped
from oobleckd.worker.processes.children import Child

_AGAIN_S = 1.0
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Stop:
    """An incarnation of a device that is stopped; ``evidence`` and ``stopped_s`` as they were seen last,
    ``told_at`` when the daemon was told.
    """

    incarnation: str
    told_at: float
    evidence: str = ""
    stopped_s: float = 0.0


class Stops:
    """Of all devices of an agent. ``say`` tells the daemon."""

    def __init__(self, say: Callable[[DeviceStopped | DeviceAwake], None]) -> None:
        self._say = say
        self._stops: dict[str, Stop] = {}

    def seen(
        self,
        incarnation: str,
        device: str,
        device_incarnation: str,
        evidence: str,
        stopped_s: float,
        now: float,
    ) -> None:
        """A device was looked at; it is stopped if there is ``evidence``."""
        stop = self._stops.get(device)
        if stop is not None and stop.incarnation != device_incarnation:
            del self._stops[device]
            stop = None
        if not evidence:
            if stop is not None:
                del self._stops[device]
                _log.info("%s goes on after %.1f s", device, stop.stopped_s)
                self._say(DeviceAwake(incarnation, device, device_incarnation, stop.stopped_s))
            return
        if stop is None:
            _log.warning("%s: %s; the daemon says what follows", device, evidence)
            stop = self._stops[device] = Stop(device_incarnation, float("-inf"))
        stop.evidence, stop.stopped_s = evidence, stopped_s
        if now >= stop.told_at + _AGAIN_S:
            stop.told_at = now
            self._say(DeviceStopped(incarnation, device, device_incarnation, evidence, stopped_s))

    def of(self, device: str, incarnation: str) -> Stop | None:
        """The stop of this incarnation of a device; None where it runs."""
        stop = self._stops.get(device)
        return stop if stop is not None and stop.incarnation == incarnation else None


def wake(child: Child) -> None:
    """SIGCONT; in vain where a debugger or a frozen cgroup holds the process, which is then waited for."""
    _log.warning(
        "%s (pid %d) is stopped and nobody else has what it holds: SIGCONT", child.device, child.process.pid
    )
    child.signal(signal.SIGCONT)
