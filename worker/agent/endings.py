"""Finds out how a device process ended: by its own last words, by the kernel for want of memory, or by
whoever killed it.

Owns the verdict, and when there is no use in starting a device once more. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Collection

from oobleckd.host.starts import alike
from oobleckd.protocol.deaths import OUT_OF_MEMORY, TO_MEND, Death
from oobleckd.protocol.parts import DeviceInfo
from oobleckd.worker.processes.children import EXITING, Child
from oobleckd.worker.runtime.activity import phase_of
from oobleckd.worker.runtime.host_memory import OomKills, memory_of_host, most_of

_KILLED = "signal 9"
_LOOK_EVERY_S = 1.0  # at how much memory they have


class Endings:
    """Of the device processes of one agent."""

    def __init__(self, kills: OomKills | None = None) -> None:
        self._kills = kills or OomKills()
        self._most: dict[int, int] = {}  # pid -> bytes
        self._idle: dict[int, int] = {}  # the same, when it was up and had no job
        self._looked_s = float("-inf")
        self._before: set[str] = set()  # how devices ended at their starts since all were up

    def look(self, children: Collection[Child], now_s: float) -> None:
        """See what may have to be known afterwards. To be called often."""
        self._kills.look(now_s)
        if now_s - self._looked_s >= _LOOK_EVERY_S:
            self._looked_s = now_s
            self._most = {child.process.pid: most_of(child.process.pid) for child in children}
            self._idle = {pid: idle for pid, idle in self._idle.items() if pid in self._most}

    def up(self, child: Child) -> None:
        """A device is up: what it takes by now it takes without a job."""
        self._idle[child.process.pid] = most_of(child.process.pid)

    def of(
        self, child: Child, info: DeviceInfo | None, evidence: str, said: Death | None, now_s: float
    ) -> Death | None:
        """Why ``child`` died, which said ``said`` itself; None where all that is known is ``evidence``."""
        if said is not None or evidence not in {EXITING, _KILLED} or not self._kills.look(now_s):
            return said
        reading, pid = child.watchdog.reading(), child.process.pid
        return Death(
            OUT_OF_MEMORY,
            phase_of(reading.what if reading is not None else ""),
            "killed by the kernel, which had no memory left",
            info.job if info is not None else "",
            info.epoch if info is not None else 0,
            memory=memory_of_host(max(0, self._most.get(pid, 0) - self._idle.get(pid, 0))),
        )

    def hopeless(self, death: Death | None, *, others_up: bool) -> bool:
        """A device died of ``death`` before it was up: whether it would again. At once where a user must mend
        something, else at the second time since all were up.
        """
        if death is None:
            self._before.clear()
            return False
        words = alike(str(death))
        again = words in self._before
        self._before.add(words)
        return again or (death.kind == TO_MEND and not others_up)

    def all_up(self) -> None:
        """Whatever kept a device from starting does so no more."""
        self._before.clear()

    def close(self) -> None:
        """Close what belongs to it."""
        self._kills.close()
