"""Adds up what the other holders of a bucket send, as it comes, in the thread that reads it.

Owns the contributions to the exchange that is open, and how many of them may come in at a time: sums are the
largest tensor messages that there are, every holder sends them at the end of its backward passes, and if all
of them lay here until the executor has a moment for them, they would be as much as the training state. Does
not own whose contributions are wanted and when all are there (``reduce``).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from torch import Tensor

from oobleckd.worker import sums
from oobleckd.worker.runtime.deaths import is_out_of_memory
from oobleckd.worker.transport.mailbox import Key, TensorMessage
from oobleckd.worker.transport.transport import Inbox
from oobleckd.worker.transport.wire import WireError

KIND = "G"
MEANS = "M"
# Unbounded, a device with redundant layers held seven or eight contributions at once. Readers wait for each
# other and never for the executor: what that waits for may lie behind them in the same stream, which would
# be a deadlock. (D-exactness-012)
_AT_A_TIME = 2
"""Large contributions that are read at once: one that is added up while the next one comes."""
_LARGE_BYTES = 1 << 20


@dataclass(slots=True)
class Gathered:
    """What ``sources`` have contributed to a bucket so far: by key, float64 integers (``exact``) or float32.

    Integers are added up as they come, in whatever order, so that of many holders' sums no more than one
    waits in memory, 8 bytes a parameter. This device's own lie in memory anyway and stay as they are: they
    are a second part, added where means are made of both. Float sums wait, as their order matters. Any thread
    may add tensors; what they are is the exchange's to hear. ``beside``: source -> what came with its sums
    (``marks``). Of a donor, who alone is heard, what it gives is kept as it is.
    """

    sources: tuple[str, ...]
    exact: bool
    beside: dict[str, Tensor] = field(default_factory=dict)
    _floats: dict[str, Sequence[Tensor]] = field(default_factory=dict)
    _own: Sequence[Tensor] | None = None
    _sum: Sequence[Tensor] | None = None  # of all others
    _ours: bool = False  # the sum is nobody else's: it may be added to in place
    _added: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, source: str, tensors: Sequence[Tensor], *, lent: bool = False, own: bool = False) -> bool:
        """Take in what ``source`` has contributed: a tensor for each key, and what travels beside them. False
        if it is not wanted, or here already. Raises ValueError or RuntimeError where they are of other shapes
        than what is here.

        ``lent``: the tensors are the reader's, so integers are copied and not kept for long. ``own``: they
        are this device's, and stay as they are until the commit.
        """
        with self._lock:
            if source not in self.sources or source in self._added:
                return False
            self._added.add(source)
            *tensors, beside = tensors
            self.beside[source] = beside.clone() if lent else beside
            if not self.exact:
                self._floats[source] = tensors
                return True
            if (here := self._own or self._sum) is not None:
                _check(here, tensors)
            if own:
                self._own = tensors
            # Integers leave no trace of their order, so they are added as they come and one sum waits in
            # memory, not one a holder. Floats wait for all and are added in the holders' order.
            # (D-exactness-011)
            elif self._sum is None:
                # Where our own are here, means are made of both before much more comes: no copy, and no
                # total in memory besides. (D-kernels-006)
                copied = lent and self._own is None
                self._sum = [tensor.clone() for tensor in tensors] if copied else tensors
                self._ours = lent
            elif self._ours:
                for into, tensor in zip(self._sum, tensors, strict=True):
                    into.add_(tensor)
            else:
                self._sum, self._ours = sums.total([self._sum, tensors]), True
            return True

    def parts(self) -> list[Sequence[Tensor]]:
        """What adds up to the sum of all sources by key: two at most, where sums are exact, else one. Floats
        are added in the sources' order.
        """
        with self._lock:
            if self.exact:
                return [part for part in (self._own, self._sum) if part is not None]
            return [sums.total([self._floats[name] for name in self.sources if name in self._floats])]

    def total(self) -> list[Tensor]:
        """The sum of all sources by key."""
        return sums.total(self.parts())


def _check(here: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    shapes = [[(tensor.shape, tensor.dtype) for tensor in each] for each in (here, tensors)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"{shapes[1]} beside {shapes[0]}")


@dataclass(frozen=True, slots=True)
class Gathering:
    """The exchange of an ``epoch`` and a ``round``, bucket by bucket."""

    epoch: int
    round: int
    buckets: Mapping[int, Gathered]

    def without_sums(self, message: TensorMessage) -> TensorMessage:
        """The tensor message, without its tensors if they belong here and were added."""
        key = message.key
        if len(key) != len(key_of(0, 0, 0, "")) or key[:3] != (KIND, self.epoch, self.round):
            return message
        gathered = self.buckets.get(int(key[3]))
        if gathered is None or not message.tensors:
            return message
        added = gathered.add(str(key[4]), message.tensors, lent=True)
        return TensorMessage(key, message.source, message.meta, [], added=True) if added else message


def key_of(epoch: int, round_: int, bucket: int, source: str) -> Key:
    """Of the message with a contribution."""
    return (KIND, epoch, round_, bucket, source)


def means_key_of(epoch: int, round_: int, bucket: int, giver: str) -> Key:
    """Of the message with means that a device gives."""
    return (MEANS, epoch, round_, bucket, giver)


class Intake:
    """The inbox before ``inbox``, where reader threads add what belongs to the ``gathering`` that is open, if
    one is.
    """

    def __init__(self, inbox: Inbox) -> None:
        self.gathering: Gathering | None = None
        self._inbox = inbox
        self._room = threading.BoundedSemaphore(_AT_A_TIME)

    def put(self, message: TensorMessage) -> None:
        """A tensor message that has come. Raises WireError for one that nobody can have meant to send."""
        gathering = self.gathering
        if gathering is not None:
            try:
                message = gathering.without_sums(message)
            except (ValueError, RuntimeError) as error:
                if is_out_of_memory(error):
                    raise
                raise WireError(f"sums that do not fit: {error}") from error
        self._inbox.put(message)

    def room(self, key: Key, num_bytes: int) -> AbstractContextManager[object]:
        """To be held while a message of this key and size is read and put. Nobody who holds it waits for
        anything but the sender.
        """
        return self._room if key[0] == KIND and num_bytes >= _LARGE_BYTES else nullcontext()
