"""Sends copies of gradient sums to peers, so that what a device has summed up in a round outlives it.

Neighbours keep what they sent to a lost device (``boundary_cache``), but not what it had added up. Copies of
that lie with the next holder of the same layers, who adds the last one to its own sums if their owner dies:
sums do not depend on their grouping, so no bit shows it (``sums``). On a GPU copies lie in the host's memory.
Owns their tensors; who keeps whose and when, ``oobleckd.worker.round_machine.copies`` says.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from torch import Tensor

from oobleckd.worker.messaging.messenger import Messenger
from oobleckd.worker.round.reduce import Reducer
from oobleckd.worker.round_machine.copies import SumCopies, SumCopy
from oobleckd.worker.transport.mailbox import Key

KINDS = frozenset({"C", "K"})
"""Of tensor messages: a copy, and the confirmation that it has arrived."""


class Copies:
    """The copies that ``plan`` speaks of. ``tensors``: peer -> those of its last copy, one for each key, in
    the host's memory.
    """

    def __init__(self, plan: SumCopies, messenger: Messenger, reducer: Reducer) -> None:
        self.plan, self.messenger, self.reducer = plan, messenger, reducer
        self.tensors: dict[str, Sequence[Tensor]] = {}

    def begin(self) -> None:
        """A new round: what was copied of the last one is in the weights."""
        self.tensors.clear()

    def send(self) -> None:
        """Send what is added up by now, if it is time. Not while a decision is awaited: what was inherited
        since the last one is in the ledger, and not yet in the sums.
        """
        exchange = self.reducer.exchange
        if not exchange.open or not self.plan.due(exchange.ledger):
            return
        for keeper, layers in self.plan.to_send():
            if self.reducer.inherited:
                # A report came while the copy before was made: that is in the ledger, not yet in the sums.
                return
            self._send(keeper, layers)

    def _send(self, keeper: str, layers: Sequence[int]) -> None:
        what, tensors = self.reducer.copied(layers)
        if what.done:
            plan = self.plan
            plan.awaited.add(keeper)
            key = ("C", plan.layout, plan.round, plan.device)
            self.messenger.send(keeper, key, tensors, msgspec.msgpack.encode(what))

    def hear(self, key: Key) -> bool:
        """A tensor message of ``KINDS``; False: it is from a peer that is ahead, and waits."""
        layout, round_, source = int(key[1]), int(key[2]), str(key[3])
        if key[0] == "K":
            self.messenger.take(key)
            self.plan.arrived(source, layout)
            return True
        fate = self.plan.fate(source, layout, round_)
        if fate == "wait":
            return False
        message = self.messenger.take(key)
        assert message is not None
        if fate == "drop":
            return True
        self.messenger.send(source, ("K", layout, round_, self.plan.device), [])
        if fate == "keep":
            self.plan.held[source] = msgspec.msgpack.decode(message.meta, type=SumCopy)
            self.tensors[source] = message.tensors
        return True

    def hear_all(self) -> None:
        """Take in whatever has arrived."""
        for key in self.messenger.waiting() if self.plan.per_round else ():
            if key[0] in KINDS:
                self.hear(key)

    def inherit(self, device: str, what: SumCopy) -> None:
        """The sums of ``device``, which is dead, count as this device's own from now on."""
        self.reducer.inherit(what, self.tensors.pop(device))
