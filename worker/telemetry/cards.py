"""Watches the cards of a node, in a thread of its own.

Owns the thread, what it read last, and the last errors that cards reported. NVML's calls may hang where a
card or its driver is in trouble: then this thread does, and nobody else. Nobody waits for it, it asks for
nothing more, and what it read before is not shown any longer than it is true.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from oobleckd.protocol.parts import CardReport
from oobleckd.worker.telemetry import nvml as api
from oobleckd.worker.telemetry.nvml import Card, CardReading, Deaf, Nvml, XidEvents

MAX_REPORTS = 16
_SLICE_S = 1.0  # of a wait for events, after which it is seen that there is something else to do
_TRUE_FOR = 3  # rounds, for which a reading is shown
_NOT_BEFORE_S = 15.0
AGAIN_S = 60.0
"""The same error of the same card is no other one so soon: some come by thousands."""


class CardOf(NamedTuple):
    """The card ``uuid`` of a device, on which its process ``pid`` computes."""

    uuid: str
    pid: int


class CardWatch:
    """The cards of one agent. The thread starts when there is a card to watch; every method returns at
    once.
    """

    def __init__(
        self, load: Callable[[], Nvml | None] = api.load, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._load, self._clock = load, clock
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._wanted: dict[str, CardOf] = {}  # by device
        self._every_s = 5.0
        self._readings: dict[str, tuple[float, CardReading]] = {}  # by device; when it was read
        self._reports: deque[CardReport] = deque(maxlen=MAX_REPORTS)

    def watch(self, wanted: Mapping[str, CardOf], every_s: float) -> None:
        """From now on the cards of these devices are read, ``every_s`` apart."""
        with self._lock:
            if wanted != self._wanted:
                self._wake.set()
            self._wanted, self._every_s = dict(wanted), every_s
            self._readings = {
                device: found for device, found in self._readings.items() if device in self._wanted
            }
        # Not a process: that would be 30 MB for each agent, and one more to look after. (D-watching-022)
        if wanted and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="cards", daemon=True)
            self._thread.start()

    def newest(self, device: str) -> CardReading | None:
        """What was read last of the card of ``device``; None: nothing, or nothing of late."""
        with self._lock:
            read_at, found = self._readings.get(device, (float("-inf"), None))
            true_s = max(_NOT_BEFORE_S, _TRUE_FOR * self._every_s)
        return found if self._clock() - read_at <= true_s else None

    def reports(self) -> tuple[CardReport, ...]:
        """The last errors that cards reported, newest last."""
        with self._lock:
            return tuple(self._reports)

    def close(self) -> None:
        """Read no more. What is being asked is not waited for."""
        self._closed = True
        self._wake.set()

    # ------------------------------------------------------------------ in the thread

    def _run(self) -> None:
        nvml = self._load()
        if nvml is None:
            return
        rounds = _Rounds(nvml)
        while not self._closed:
            self._wake.clear()
            with self._lock:
                wanted, every_s = dict(self._wanted), self._every_s
            for device, watched in wanted.items():
                self._keep(device, watched, *rounds.read(device, watched))
            self._listen(rounds, wanted, self._clock() + every_s)

    def _keep(
        self, device: str, watched: CardOf, found: CardReading | None, report: CardReport | None
    ) -> None:
        with self._lock:
            if found is not None and self._wanted.get(device) == watched:
                self._readings[device] = (self._clock(), found)
            if report is not None:
                self._reports.append(report)

    def _listen(self, rounds: _Rounds, wanted: Mapping[str, CardOf], until: float) -> None:
        """Take in XIDs until the cards are to be read again, or others are to be watched."""
        while not (self._closed or self._wake.is_set()) and (left_s := until - self._clock()) > 0:
            try:
                reports = rounds.wait(wanted, min(left_s, _SLICE_S))
            except Deaf:
                self._wake.wait(left_s)
                return
            with self._lock:
                self._reports.extend(reports)


class _Rounds:
    """What the thread knows of one round for the next: cards that were found, and their counts of errors."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml, self._events = nvml, XidEvents(nvml)
        self._cards: dict[str, Card] = {}  # by the UUID that a device has
        self._wholes: dict[str, str] = {}  # that UUID -> the one of the whole card
        self._names: dict[str, str] = {}
        self._xids: dict[tuple[str, int], float] = {}  # when each was reported, by device
        self._uncorrected: dict[tuple[str, str], tuple[int, float]] = {}  # errors, and when reported

    def read(self, device: str, watched: CardOf) -> tuple[CardReading | None, CardReport | None]:
        """What a card says, and whether it has had more errors than before."""
        uuid = watched.uuid
        if uuid not in self._cards:
            card = api.find(self._nvml, uuid)
            if card is None:
                return None, None
            self._cards[uuid], self._wholes[uuid] = card, self._events.watch(card.whole)
        found = api.read(self._nvml, self._cards[uuid], {watched.pid})
        self._names[device] = found.name
        return found, self._grown(device, uuid, found)

    def _grown(self, device: str, uuid: str, found: CardReading) -> CardReport | None:
        """Whether the card has had more errors than were reported, and none were within a minute. What it had
        before this agent looked may be of any day, and a driver that is loaded anew counts anew.
        """
        number, now = found.ecc_uncorrected, time.time()
        if number < 0:
            return None
        before, reported_at = self._uncorrected.get((device, uuid), (number, float("-inf")))
        grew = before < number and reported_at + AGAIN_S <= now
        if grew:
            before, reported_at = number, now
        self._uncorrected[device, uuid] = min(before, number), reported_at
        return CardReport(device, now, found.name, ecc_uncorrected=number) if grew else None

    def wait(self, wanted: Mapping[str, CardOf], timeout_s: float) -> list[CardReport]:
        """A report for each device that has the card, as soon as a card tells of an XID, but for those of
        which the same was reported within a minute. Raises Deaf.
        """
        event = self._events.wait(timeout_s)
        if event is None:
            return []
        whole, xid = event
        now = time.time()
        devices = [
            device
            for device, watched in wanted.items()
            if self._wholes.get(watched.uuid) == whole
            and self._xids.get((device, xid), float("-inf")) + AGAIN_S <= now
        ]
        self._xids.update(((device, xid), now) for device in devices)
        return [CardReport(device, now, self._names.get(device, ""), xid=xid) for device in devices]
