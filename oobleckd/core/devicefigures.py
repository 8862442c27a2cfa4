"""What devices and their cards say of themselves, in memory: as each node told it last.

Owns what is kept of that, within bounds, how often it is told, and which reports of a card were not told
before. Not durable, and nothing is decided by it: a node may say here what it likes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import msgspec

from oobleckd.protocol.agentmessages import FiguresTold
from oobleckd.protocol.nodeviews import DeviceFigures
from oobleckd.protocol.parts import CardReport
from oobleckd.protocol.text import visible

MAX_REPORTS = 32
"""Of a node: those that a message may have, and those that are remembered."""
MAX_NAMED = 16
"""XIDs, and reasons of a slower clock, of a device."""
MAX_NAME = 80
"""Characters of a card's name, or of such a reason."""
MAX_XID = 1000
"""No driver has such a number: none is dated that is as high."""
MESSAGES_PER_S = 500
"""Figures are told further apart where there are more nodes: all of them tell."""


def every(figures_s: float, num_nodes: int) -> float:
    """How far apart a node is to tell its figures, where ``figures_s`` is wanted (0: never), in seconds."""
    return max(figures_s, num_nodes / MESSAGES_PER_S) if figures_s else 0.0


@dataclass(slots=True)
class ToldOf:
    """What a node told last, of one ``incarnation``; ``reports``: of its cards, those that were known."""

    incarnation: str = ""
    figures: dict[str, DeviceFigures] = field(default_factory=dict)
    reports: deque[CardReport] = field(default_factory=lambda: deque(maxlen=MAX_REPORTS))


@dataclass(slots=True)
class DevicesTold:
    """Of all nodes. Reports of a card are remembered whatever becomes of their node. ``recalled``: so are
    those of before this daemon. ``xids``: when each was reported last, by device and XID.
    """

    by_node: dict[str, ToldOf] = field(default_factory=dict)
    recalled: bool = False
    xids: dict[tuple[str, int], float] = field(default_factory=dict)

    def recall(self, announced: Iterable[tuple[str, CardReport]]) -> None:
        """What was announced of cards, by node: it is no news any more."""
        for node, report in announced:
            self.by_node.setdefault(node, ToldOf()).reports.append(report)
            self._date(report)
        self.recalled = True

    def take(self, node: str, message: FiguresTold, devices: Collection[str]) -> list[CardReport]:
        """Keep what ``node`` told of its ``devices``, and of no others; the reports that are news."""
        told = self.by_node.setdefault(node, ToldOf())
        told.incarnation = message.incarnation
        told.figures = {each.device: _bounded(each) for each in message.figures if each.device in devices}
        reports = [each for each in message.reports[-MAX_REPORTS:] if each.device in devices]
        news = [each for each in reports if each not in told.reports]
        told.reports.extend(news)
        for each in news:
            self._date(each)
        return news

    def _date(self, report: CardReport) -> None:
        if 0 < report.xid < MAX_XID:
            self.xids[report.device, report.xid] = report.at

    def of(self, node: str, incarnation: str) -> tuple[DeviceFigures, ...]:
        """What ``node`` told last, by device; nothing where that was another incarnation of it."""
        told = self.by_node.get(node)
        if told is None or told.incarnation != incarnation:
            return ()
        return tuple(each for _, each in sorted(told.figures.items()))


def _bounded(said: DeviceFigures) -> DeviceFigures:
    """As much of ``said`` as is kept, and nothing in it that a terminal would obey."""
    card = visible(said.card[:MAX_NAME])
    throttled = tuple(visible(each[:MAX_NAME]) for each in said.throttled[:MAX_NAMED])
    xids = said.xids[-MAX_NAMED:]
    if (card, throttled, xids) == (said.card, said.throttled, said.xids):
        return said
    return msgspec.structs.replace(said, card=card, throttled=throttled, xids=xids)
