"""Sends copies of gradient sums to peers, so that what a device has summed up in a round outlives it.

Neighbours keep what they sent to a lost device (``boundary_cache``), but not what it had added up. So a
device sends its sums a few times in a round to the next holder of the same layers. If it dies, that holder
adds the last copy to its own sums and says so in its ledger: sums do not depend on their grouping, so no bit
shows it (``sums``), and the daemon sees the micro-batches as done.

A copy has all that its sender had added up, so the last is enough. The next goes out when the one before is
said to have arrived: where the network is slow copies are older, and none waits in a queue. On a GPU they lie
in the host's memory. Owns which copies were sent and which are here; neither the sums (``reduce``) nor who is
dead (``executor``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import msgspec
from torch import Tensor

from oobleckd.planner.plan import Layout
from oobleckd.worker.round.messenger import Messenger
from oobleckd.worker.round.reduce import Reducer, SumCopy
from oobleckd.worker.transport.mailbox import Key

KINDS = frozenset({"C", "K"})
"""Of tensor messages: a copy, and the confirmation that it has arrived."""


@dataclass(slots=True)
class Copies:
    """Copies of one device's sums and of its peers', in one round.

    ``per_round``: how many it sends at most (0: none). ``sent``: how many it has. ``awaited``: keepers that
    have not said yet that the last one arrived. ``held``: peer -> its last copy, a tensor for each key in the
    host's memory. ``keepers``: layer -> who keeps this device's sums of it.
    """

    device: str
    per_round: int
    messenger: Messenger
    reducer: Reducer
    layout: int = 0
    round: int = 0
    sent: int = 0
    awaited: set[str] = field(default_factory=set)
    held: dict[str, tuple[SumCopy, Sequence[Tensor]]] = field(default_factory=dict)
    keepers: dict[int, str] = field(default_factory=dict)

    def adopt(self, layout: int) -> None:
        """Begin with a new layout, named by its epoch."""
        self.layout = layout
        self.awaited.clear()

    def begin(self, round_: int) -> None:
        """Begin a new round: what was copied of the last one is in the weights."""
        self.round, self.sent = round_, 0
        self.held.clear()

    def enter(self, layout: Layout, live: Collection[str]) -> None:
        """Choose who keeps what among the ``live``: of every layer the next holder by name, and around."""
        self.keepers = {}
        if not self.per_round:
            return
        self.awaited &= set(live)
        for layer in self.reducer.board.done:
            holders = [device for device in layout.holders(layer) if device in live]
            keeper = holders[(holders.index(self.device) + 1) % len(holders)]
            if keeper != self.device:
                self.keepers[layer] = keeper

    # ------------------------------------------------------------------ sending

    def send(self) -> None:
        """Send what is added up by now, if it is time: after equal parts of the round's gradients, but for
        the last part, which is contributed at once.
        """
        if not self.keepers:
            return
        board = self.reducer.board
        done, owed = (sum(map(len, of.values())) for of in (board.done, board.owed))
        parts = done * (self.per_round + 1) // owed if owed else 0
        # Whole sums a few times in a round: differences would be as large, and a copy for every micro-batch
        # would queue where the network is slower than the backward. (D-recovery-018)
        if parts <= self.sent or done == owed:
            return
        self.sent = parts
        # The next copy leaves when the one before has arrived: copies on a slow network get older, and none
        # stands in a queue. (D-recovery-018)
        for keeper in sorted(set(self.keepers.values()) - self.awaited):
            if self.reducer.inherited:
                # A report came while the copy before was made: that is in the ledger, not yet in the sums.
                return
            self._send(keeper, [layer for layer, who in self.keepers.items() if who == keeper])

    def _send(self, keeper: str, layers: Sequence[int]) -> None:
        what, tensors = self.reducer.copied(layers)
        if what.done:
            self.awaited.add(keeper)
            key = ("C", self.layout, self.round, self.device)
            self.messenger.send(keeper, key, tensors, msgspec.msgpack.encode(what))

    # ------------------------------------------------------------------ keeping

    def hear(self, key: Key, dead: Collection[str]) -> bool:
        """A tensor message of ``KINDS``; False: it is from a peer that is ahead, and waits. What the dead
        sent is told of before they are ``dead``, or not at all: the decision counts on what a device has
        answered.
        """
        here = (self.layout, self.round)
        at, source = (int(key[1]), int(key[2])), str(key[3])
        if at > here and key[0] == "C" and source not in dead:
            return False
        message = self.messenger.take(key)
        assert message is not None
        if at[0] != self.layout or source in dead:
            return True
        if key[0] == "K":
            self.awaited.discard(source)
            return True
        self.messenger.send(source, ("K", *at, self.device), [])
        if at == here:
            self.held[source] = (msgspec.msgpack.decode(message.meta, type=SumCopy), message.tensors)
        return True

    def hear_all(self, dead: Collection[str]) -> None:
        """Take in whatever has arrived."""
        for key in self.messenger.waiting() if self.per_round else ():
            if key[0] in KINDS:
                self.hear(key, dead)

    def inherit(self, dead: Collection[str]) -> None:
        """Count what is here of ``dead`` as this device's own from now on."""
        for device in sorted(self.held.keys() & set(dead)):
            self.reducer.inherit(*self.held.pop(device))
