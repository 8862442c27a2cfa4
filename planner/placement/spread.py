"""Chooses which holder sends which copy, so that no node's link has much more to send than it must.

Owns the choice among holders; what is copied, and to whom, is ``transfer``'s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from oobleckd.planner.plan import node_of


@dataclass(frozen=True, slots=True)
class Copy:
    """``num_bytes`` for device ``target``. ``holders``: the nodes that could send them, each with the
    devices of it that could; copies with the same holders share one object.
    """

    target: str
    num_bytes: int
    holders: Mapping[str, tuple[str, ...]]


def spread(copies: Sequence[Copy]) -> list[str]:
    """The device that sends each copy, in order. Every copy has a holder.

    A holder on the target's own node needs no link. Of the others the node that has sent least so far,
    copies with few holders first, then large ones; then copies move away from the busiest senders as
    long as that makes the busiest link less busy. For equal copies that is the optimum (Harvey et al.,
    Semi-matchings for bipartite graphs and load balancing, 2006).
    """
    links = _Links(copies)
    links.share_out()
    while links.relieve():
        pass
    return links.devices()


@dataclass(slots=True)
class _Links:
    """Copies between nodes, and what every node has to send of them.

    ``options[c]``: the nodes that could send copy ``c`` (numbers of ``names``); empty where its own node
    does. ``chosen[c]``: the one that does.
    """

    copies: Sequence[Copy]
    names: list[str] = field(init=False)
    options: list[NDArray[np.intp]] = field(init=False)
    chosen: dict[int, int] = field(init=False, default_factory=dict)
    sent: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        shared = {id(copy.holders): copy.holders for copy in self.copies}
        self.names = sorted(set().union(*shared.values()))
        number = {name: index for index, name in enumerate(self.names)}
        numbers = {key: np.array([number[name] for name in sorted(nodes)]) for key, nodes in shared.items()}
        nobody = np.empty(0, dtype=np.intp)
        self.options = [
            # Over nodes and not devices: the link between nodes decides, and within a node there is none.
            # (D-planner-002)
            nobody if node_of(copy.target) in copy.holders else numbers[id(copy.holders)]
            for copy in self.copies
        ]
        self.sent = np.zeros(len(self.names), dtype=np.int64)

    def share_out(self) -> None:
        """Choose for one copy after the other the node that has sent least."""
        far = [c for c in range(len(self.copies)) if len(self.options[c])]
        for c in sorted(far, key=lambda c: (len(self.options[c]), -self.copies[c].num_bytes, c)):
            nodes = self.options[c]
            self._choose(c, int(nodes[self.sent[nodes].argmin()]))

    def relieve(self) -> bool:
        """Take a copy from the busiest sender, by a chain of moves; whether that helped.

        Every node of the chain stays below what the busiest had. Nothing to do while a receiver's
        link is busier than every sender's.
        """
        busiest = int(self.sent.argmax()) if len(self.sent) else 0
        if not self.chosen or self.sent[busiest] <= self._max_received():
            return False
        peak = self.sent[busiest]
        came: dict[int, tuple[int, int]] = {}  # node -> the copy that it would take, and from whom
        takes = {busiest: 0}
        queue = deque([busiest])
        while queue:
            giver = queue.popleft()
            for c in sorted(c for c, node in self.chosen.items() if node == giver):
                num_bytes = self.copies[c].num_bytes
                if self.sent[giver] + takes[giver] - num_bytes >= peak:
                    continue
                for taker in map(int, self.options[c]):
                    if taker in takes:
                        continue
                    came[taker], takes[taker] = (c, giver), num_bytes
                    if self.sent[taker] + num_bytes < peak:
                        self._move(taker, came)
                        return True
                    queue.append(taker)
        return False

    def devices(self) -> list[str]:
        """The sender of each copy: of the chosen node, the holder that has sent least."""
        sent: dict[str, int] = {}
        senders = []
        for c, copy in enumerate(self.copies):
            node = self.names[self.chosen[c]] if c in self.chosen else node_of(copy.target)
            sender = min(copy.holders[node], key=lambda device: (sent.get(device, 0), device))
            sent[sender] = sent.get(sender, 0) + copy.num_bytes
            senders.append(sender)
        return senders

    def _choose(self, c: int, node: int) -> None:
        if c in self.chosen:
            self.sent[self.chosen[c]] -= self.copies[c].num_bytes
        self.chosen[c] = node
        self.sent[node] += self.copies[c].num_bytes

    def _move(self, taker: int, came: dict[int, tuple[int, int]]) -> None:
        while taker in came:
            c, giver = came[taker]
            self._choose(c, taker)
            taker = giver

    def _max_received(self) -> int:
        received: dict[str, int] = {}
        for c in self.chosen:
            node = node_of(self.copies[c].target)
            received[node] = received.get(node, 0) + self.copies[c].num_bytes
        return max(received.values())
