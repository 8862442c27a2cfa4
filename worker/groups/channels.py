"""The two ends of a channel at work: a thread each, which opens its channel and then moves one payload at a
time.

Owns what is under way on a channel. Does not decide when a channel ends: any trouble goes to the group, which
ends all of its channels together. Everything here that several threads see is guarded by the manager's one
condition.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from oobleckd.worker.groups import group_messages, payload
from oobleckd.worker.groups.backend import RECEIVER, SENDER, Backend, Channel
from oobleckd.worker.groups.ledger import Received, Sent
from oobleckd.worker.groups.store import ChannelOver, ChannelStore
from oobleckd.worker.transport.mailbox import Key, TensorMessage


@dataclass(frozen=True, slots=True)
class Outbound:
    """A tensor message on its way out. ``computed`` waits until its tensors are there."""

    key: Key
    tensors: Sequence[Tensor]
    meta: bytes
    computed: Callable[[], object]
    versions: tuple[int, ...]

    @classmethod
    def of(cls, key: Key, tensors: Sequence[Tensor], meta: bytes, computed: Callable[[], object]) -> Outbound:
        """Remember the tensors as they are now."""
        return cls(key, tuple(tensors), meta, computed, _versions(tensors))

    @property
    def changed(self) -> bool:
        """Whether somebody has written into a tensor since: its round is over, and nobody wants
        the message.
        """
        return _versions(self.tensors) != self.versions


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a channel needs of its group. ``say`` and ``deliver`` never block and may be called under
    ``changed``.

    ``ready`` is set when the group before this one has ended on this device; ``broke`` takes the blame.
    """

    epoch: int
    device: str
    backend: Backend
    changed: threading.Condition
    ready: threading.Event
    say: Callable[[str, group_messages.Any], object]
    deliver: Callable[[TensorMessage], None]
    broke: Callable[[str], None]
    opened: Callable[[str], None]


class ChannelEnd(ABC):
    """What both ends have in common: the channel, its store, the thread, and how it ends."""

    def __init__(self, around: Surroundings, peer: str, rank: int) -> None:
        sender = rank == SENDER
        self.around = around
        self.peer = peer
        self.over = False
        self.store = ChannelStore(
            lambda key, value: around.say(peer, group_messages.Stored(around.epoch, sender, key, value))
        )
        # One direction each: torch runs both directions between two ranks on one stream, where two sends
        # that meet block each other. (D-transport-003)
        ends = (around.device, peer) if sender else (peer, around.device)
        self.name = f"{ends[0]} > {ends[1]}"
        self.channel: Channel = around.backend.channel(self.store, rank, f"{around.epoch} {self.name}")
        self.thread = threading.Thread(target=self._run, name=f"channel {self.name}", daemon=True)

    def start(self) -> None:
        """Begin to open."""
        self.thread.start()

    def end(self, why: str) -> None:
        """Nothing more may happen here; wakes the thread. Under the condition; ``abort`` must follow."""
        self.over = True
        self.store.end(why)
        self.around.changed.notify_all()

    def _run(self) -> None:
        around = self.around
        around.ready.wait()
        try:
            with around.backend.thread():
                self.channel.open()
                self._work()
        except RuntimeError as error:
            # Of torch, or LaneOver. Whatever it is, the group ends and its messages go by the transport.
            if not self.over:
                around.broke(f"{self.name}: {_first_line(error)}")

    @abstractmethod
    def _work(self) -> None:
        """Move messages until there are none or the channel is over; in the channel's thread."""


class SenderEnd(ChannelEnd):
    """Our messages to ``peer``."""

    def __init__(self, around: Surroundings, peer: str) -> None:
        super().__init__(around, peer, SENDER)
        self.sent: Sent[Outbound] = Sent()
        self.is_open = False

    def offer(self, message: Outbound) -> bool:
        """Take the message if the channel is open. Under the condition."""
        if self.over or not self.is_open:
            return False
        self.sent.add(message)
        self.around.changed.notify_all()
        return True

    def _work(self) -> None:
        around = self.around
        self.channel.send(around.backend.empty(1).zero_())  # makes the connection
        with around.changed:
            self.is_open = True
        around.opened(self.name)
        while (found := self._next()) is not None:
            self._write(*found)

    def _write(self, number: int, message: Outbound) -> None:
        message.computed()
        if message.changed:
            return
        body = payload.pack(message.tensors)
        around = self.around
        # Headers by the transport, payloads alone by NCCL: a group can be aborted at any time and lose what
        # is under way, so keys and order live where nothing is lost. (D-transport-002)
        around.say(
            self.peer, group_messages.header(around.epoch, number, message.key, message.meta, message.tensors)
        )
        self.channel.send(body)

    def _next(self) -> tuple[int, Outbound] | None:
        with self.around.changed:
            self.around.changed.wait_for(lambda: self.over or self.sent.unwritten)
            return None if self.over else self.sent.unwritten.popleft()


class ReceiverEnd(ChannelEnd):
    """Tensor messages of ``peer`` to us."""

    def __init__(self, around: Surroundings, peer: str) -> None:
        super().__init__(around, peer, RECEIVER)
        self.received = Received()

    def announce(self, header: group_messages.Header) -> None:
        """A header has come. Under the condition. Raises ValueError out of order."""
        self.received.announce(header)
        self.around.changed.notify_all()

    def _work(self) -> None:
        backend = self.around.backend
        self.channel.receive(backend.empty(1))
        while (header := self._next()) is not None:
            body = backend.empty(payload.num_bytes(header.dtypes, header.shapes))
            self.channel.receive(body)
            tensors = payload.unpack(body, header.dtypes, header.shapes)
            self.channel.settle(tensors)
            self._arrived(tensors)

    def _arrived(self, tensors: list[Tensor]) -> None:
        """The payload is complete. It counts if this end is still open: else ``Again`` has been said without
        it.
        """
        around = self.around
        with around.changed:
            if self.over:
                raise ChannelOver("aborted")
            header = self.received.arrived()
            around.deliver(TensorMessage(header.key, self.peer, header.meta, tensors))
            around.say(self.peer, group_messages.Arrived(around.epoch, header.number))

    def _next(self) -> group_messages.Header | None:
        with self.around.changed:
            self.around.changed.wait_for(lambda: self.over or self.received.announced)
            return None if self.over else self.received.announced[0]


def _versions(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in tensors)  # noqa: SLF001 - torch's counter of writes


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
