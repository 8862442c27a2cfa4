"""A target outside of an engine's world, which gets from a device of it what a pre-copy consists of."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from oobleckd.worker.reconfigure.precopy_source import PreCopySource
from oobleckd.worker.reconfigure.precopy_target import PreCopyTarget
from oobleckd.worker.state.bucket_state import BucketState
from oobleckd.worker.state.host_copy import Hosted, States, Then
from oobleckd.worker.state.store import Store
from oobleckd.worker.transport.mailbox import TensorMessage
from tests.helpers.engine import LocalMessenger, World

TARGET = "t/0"
NUMBER = 7


class Late(Hosted):
    """Copies that take their time, as beside a GPU: they are there when a test says so, or when somebody must
    wait for them.
    """

    made: ClassVar[list[Late]] = []

    def __init__(self, store: Store, buckets: Collection[int], then: Then = lambda _: None) -> None:
        self._late = then
        super().__init__(store, buckets)
        self._arrived.clear()
        self.settled = 0
        store.read_by(self.settle)
        self.made.append(self)

    def settle(self) -> None:
        self.settled += 1

    def states(self) -> States:
        self.come()
        return super().states()

    def come(self) -> None:
        """They are there now."""
        if not self.arrived:
            self._arrive(self._late)


@dataclass
class PreCopyRig:
    """Tensor messages to ``TARGET`` in the order in which they were sent, and the target's side of the
    pre-copy.
    """

    world: World
    source: str
    sent: list[TensorMessage] = field(default_factory=list)

    def __post_init__(self) -> None:
        deliver, world = self.world.deliver, self.world

        def keep(source: str, peer: str, message: TensorMessage) -> None:
            if peer == TARGET:
                self.sent.append(message)
            else:
                deliver(source, peer, message)

        world.deliver = keep  # type: ignore[method-assign]
        self.executor = world.nodes[self.source].executor
        self.buckets = tuple(self.executor.store.buckets)
        self.messenger = LocalMessenger(TARGET, world)
        store = Store(world.spec, torch.device("cpu"))
        self.precopy_target = PreCopyTarget(
            NUMBER, world.job, store, self.messenger, dict.fromkeys(self.buckets, self.source)
        )

    def begin(self, rounds: int = 100) -> PreCopySource:
        """From now on."""
        precopy_source = PreCopySource(
            NUMBER, self.source, self.executor.messenger, {TARGET: list(self.buckets)}, rounds
        )
        self.executor.begin_precopy(precopy_source)
        return precopy_source

    def arrive(self, messages: Sequence[TensorMessage]) -> None:
        """Tensor messages are in the mailbox of the target."""
        for message in messages:
            self.messenger.messages[message.key] = message

    def replay(self) -> int:
        """All that is to be done; how many pieces it was."""
        pieces = 0
        while self.precopy_target.advance():
            pieces += 1
        return pieces

    def here(self) -> dict[int, BucketState] | None:
        """The state at the source's present boundary, if it is here."""
        states = {
            bucket: self.precopy_target.state_at(bucket, self.executor.counters) for bucket in self.buckets
        }
        found = {bucket: state for bucket, state in states.items() if state is not None}
        return found if len(found) == len(states) else None

    def check(self) -> None:
        """What is here is what the source has, to the bit."""
        found = self.here()
        assert found is not None, f"{self.precopy_target.round} and {self.executor.counters}"
        for bucket, state in found.items():
            own = self.executor.store.buckets[bucket]
            assert state.exponents == own.exponents
            assert all(torch.equal(a, b) for a, b in zip(state.tensors(), own.tensors(), strict=True))
            assert all(param.requires_grad for param in state.params)
