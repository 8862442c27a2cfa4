"""Who keeps copies of whose gradient sums, and what a device inherits of them when somebody dies.

A device sends its sums a few times in a round to the next holder of the same layers. If it dies, that holder
counts the last copy as its own and says so in its ledger, so the daemon sees the micro-batches as done. A
copy has all that its sender had added up, so the last is enough. The next goes out when the one before is
said to have arrived: where the network is slow copies are older, and none waits in a queue. Has no sums:
those are ``oobleckd.worker.round.sum_copies``'s.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from oobleckd.planner.plan import Layout
from oobleckd.worker.round_machine.ledger import Ledger

Fate = Literal["wait", "drop", "confirm", "keep"]
"""Of a copy that has come: it is of a round to come; nobody wants it; it is too late, and its sender is
waiting for the word that it has arrived; it is kept, and that is said.
"""


class SumCopy(msgspec.Struct, frozen=True):
    """What travels with a copy of sums: layer -> micro-batches in those of its buckets; buckets with a NaN or
    an overflow; losses.
    """

    done: dict[int, tuple[int, ...]]
    nan: tuple[int, ...]
    overflow: tuple[int, ...]
    losses: dict[int, float]


@dataclass(slots=True)
class SumCopies:
    """Copies of one device's sums and of its peers', in one round.

    ``per_round``: how many it sends at most (0: none). ``sent``: how many it has. ``awaited``: keepers that
    have not said yet that the last one arrived. ``held``: peer -> what its last copy has. ``keepers``: layer
    -> who keeps this device's sums of it. ``dead``: whose copies count for nothing any more.
    """

    device: str
    per_round: int
    layout: int = 0
    round: int = 0
    sent: int = 0
    awaited: set[str] = field(default_factory=set)
    held: dict[str, SumCopy] = field(default_factory=dict)
    keepers: dict[int, str] = field(default_factory=dict)
    dead: frozenset[str] = frozenset()

    def adopt(self, layout: int) -> None:
        """Begin with a new layout, named by its epoch."""
        self.layout, self.dead = layout, frozenset()
        self.awaited.clear()

    def begin(self, round_: int) -> None:
        """Begin a new round: what was copied of the last one is in the weights."""
        self.round, self.sent = round_, 0
        self.held.clear()

    def enter(self, layout: Layout, live: Collection[str], layers: Iterable[int]) -> None:
        """Choose who keeps what of ``layers`` among the ``live``: of every layer the next holder by name, and
        around.
        """
        self.keepers = {}
        if not self.per_round:
            return
        self.awaited &= set(live)
        self.choose({layer: [d for d in layout.holders(layer) if d in live] for layer in layers})

    def choose(self, holders: Mapping[int, Sequence[str]]) -> None:
        """Choose among ``holders``: layer -> the live ones, this device among them, by name."""
        self.keepers = {}
        for layer, names in holders.items():
            keeper = names[(names.index(self.device) + 1) % len(names)]
            if keeper != self.device:
                self.keepers[layer] = keeper

    def due(self, ledger: Ledger) -> bool:
        """Whether it is time for the next copies: after equal parts of the round's gradients, but for the
        last part, which is contributed at once. They count as sent from now on.
        """
        return bool(self.keepers) and self.passed(*ledger.totals)

    def passed(self, done: int, owed: int) -> bool:
        """Whether with ``done`` of ``owed`` gradients another of those parts is over."""
        parts = done * (self.per_round + 1) // owed if owed else 0
        # Whole sums a few times in a round: differences would be as large, and a copy for every micro-batch
        # would queue where the network is slower than the backward. (D-recovery-018)
        if parts <= self.sent or done == owed:
            return False
        self.sent = parts
        return True

    def to_send(self) -> list[tuple[str, list[int]]]:
        """The keepers that a copy may go to now, each with the layers whose sums it keeps."""
        # The next copy leaves when the one before has arrived: copies on a slow network get older, and none
        # stands in a queue. (D-recovery-018)
        return [
            (keeper, [layer for layer, who in self.keepers.items() if who == keeper])
            for keeper in sorted(set(self.keepers.values()) - self.awaited)
        ]

    def arrived(self, source: str, layout: int) -> None:
        """``source`` says that the last copy is there."""
        if layout == self.layout:
            self.awaited.discard(source)

    def fate(self, source: str, layout: int, round_: int) -> Fate:
        """What becomes of a copy that has come from ``source``. What the dead sent is told of before they are
        ``dead``, or not at all: the decision counts on what a device has answered.
        """
        here, at = (self.layout, self.round), (layout, round_)
        if source in self.dead:
            return "drop"
        if at > here:
            return "wait"
        if layout != self.layout:
            return "drop"
        return "keep" if at == here else "confirm"

    def inherit(self, dead: frozenset[str]) -> dict[str, SumCopy]:
        """Take out what is here of the ``dead``, by name; nothing more is taken of them."""
        self.dead = dead
        return {device: self.held.pop(device) for device in sorted(self.held.keys() & dead)}
