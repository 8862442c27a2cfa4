"""Keeps messages that the daemon may not have heard, so that an agent can send them again.

Owns what is kept, for how long, and the peek at a message's head. Pure: no socket, no clock. Rounds and
checkpoint parts are kept until the daemon acknowledges them; of a device's standing answers (Ready, Held,
...) the last one, until an order of the daemon supersedes it; that a link broke, until the device is deployed
anew, which gives it new links.
"""

from __future__ import annotations

import msgspec

from oobleckd.protocol.codec import CodecError
from oobleckd.protocol.parts import Counters
from oobleckd.protocol.unreadable import UNREADABLE, problem_of

# By their names on the wire, which a class may have no more: ``PreCopy`` is "Prepare", ``PreCopied``
# "Prepared".
_UNTIL_ACK = frozenset({"StepDone", "CheckpointPart", "CheckpointFailed"})
_STANDING = frozenset(
    {
        "Measured", "Prepared", "Emptied", "Ready", "Progress", "Held", "DeviceFailed", "Corrupted",
        "Identified", "InputsChecked", "InputsChanged",
    }
)  # fmt: skip
_SUPERSEDED_BY = {
    "Measure": {"Measured", "DeviceFailed"},
    "Identify": {"Identified"},
    "Prepare": {"Prepared"},
    "Deploy": {"Prepared", "Emptied", "Ready", "DeviceFailed"},
    "Report": {"Progress"},
    "Decide": {"Progress"},
    "Resume": {"Ready", "Held", "Progress"},
    "Release": set(_STANDING),
}
_NEW_LINKS = frozenset({"Deploy", "Release"})


class MessageHead(msgspec.Struct, frozen=True):
    """What the agent reads of a message that it passes on."""

    type: str
    device: str = ""
    peer: str = ""
    epoch: int = -1
    job: str = ""
    round: int = -1
    counters: Counters | None = None


_decoder = msgspec.msgpack.Decoder(MessageHead)


def peek(data: bytes) -> MessageHead:
    """The head of a message. Raises CodecError."""
    try:
        return _decoder.decode(data)
    except UNREADABLE as error:
        raise CodecError(problem_of(error)) from error


class Outbox:
    """Messages of this node's devices as bytes, kept to be sent again after a reconnect."""

    __slots__ = ("_broken", "_standing", "_until_ack")

    def __init__(self) -> None:
        self._until_ack: dict[tuple[str, str, int], list[bytes]] = {}  # (job, device, round)
        self._standing: dict[
            tuple[str, str], tuple[MessageHead, bytes]
        ] = {}  # (device, type) -> head, message
        self._broken: dict[tuple[str, str], bytes] = {}  # (device, peer)

    def said(self, head: MessageHead, data: bytes) -> None:
        """A device said ``data``: keep it if it is of a kind that is kept."""
        if head.type in _UNTIL_ACK and head.counters is not None:
            self._until_ack.setdefault((head.job, head.device, head.counters.round), []).append(data)
        elif head.type in _STANDING:
            self._standing[head.device, head.type] = (head, data)
        elif head.type == "LinkDown":
            # Until the device is deployed anew: a broken link is not made again, and nobody else knows of
            # it. (D-detection-004)
            self._broken[head.device, head.peer] = data
        self._drop_older(head)

    def told(self, head: MessageHead) -> None:
        """The daemon told a device something: drop the answers that it supersedes."""
        for kind in _SUPERSEDED_BY.get(head.type, ()):
            kept, _ = self._standing.get((head.device, kind), (None, b""))
            if kept is not None and not _is_of_before(head, kept):
                del self._standing[head.device, kind]
        if head.type in _NEW_LINKS:
            # Deploy and Release give new links; what was lost before evicted a live node as soon as both
            # ends were in a layout again. (D-detection-006)
            self._mend(head.device)
        if head.type == "Release":
            self._until_ack = {
                key: value for key, value in self._until_ack.items() if key[:2] != (head.job, head.device)
            }
        self._drop_older(head)

    def acknowledge(self, job: str, round_: int) -> None:
        """The daemon has journaled everything of ``job`` up to ``round_``."""
        for key in [key for key in self._until_ack if key[0] == job and key[2] <= round_]:
            del self._until_ack[key]

    def forget(self, device: str) -> None:
        """``device`` starts a new incarnation: its standing answers mean nothing any more."""
        for key in [key for key in self._standing if key[0] == device]:
            del self._standing[key]
        self._mend(device)

    def pending(self) -> list[bytes]:
        """All that is kept: rounds and parts in the order they came, standing answers, broken links."""
        kept = [data for group in self._until_ack.values() for data in group]
        return [*kept, *(data for _, data in self._standing.values()), *self._broken.values()]

    def _mend(self, device: str) -> None:
        self._broken = {key: data for key, data in self._broken.items() if key[0] != device}

    def _drop_older(self, head: MessageHead) -> None:
        """A higher epoch is known: answers of a lower one would be fenced anyway."""
        for key, (kept, _) in list(self._standing.items()):
            if key[0] == head.device and 0 <= kept.epoch < head.epoch:
                del self._standing[key]


def _is_of_before(order: MessageHead, answer: MessageHead) -> bool:
    """Whether ``order`` is a Resume from another boundary than the one at which ``answer`` says that the
    device holds: it was said twice.
    """
    if order.type != "Resume" or answer.type != "Held" or answer.counters is None:
        return False
    return order.round not in {-1, answer.counters.round}
