"""Which messages of a channel are where: numbers at the sender, headers at the receiver. Pure bookkeeping.

Together the two ends keep one promise: every message that was given to a channel arrives once, whenever the
channel breaks. The sender keeps a message until the receiver has said that it arrived. The receiver counts an
arrival only while its end is open, and says its last number when it closes: what is above is sent again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from oobleckd.worker.groups.group_messages import Header

L = TypeVar("L")


@dataclass(slots=True)
class Sent(Generic[L]):
    """The sender's end. Tensor messages are numbered from 1 in the order in which they were given to the
    channel.
    """

    last: int = 0
    unwritten: deque[tuple[int, L]] = field(default_factory=deque)
    kept: deque[tuple[int, L]] = field(default_factory=deque)

    def add(self, message: L) -> None:
        """A tensor message for the channel: to be written, and kept until it has arrived."""
        self.last += 1
        self.unwritten.append((self.last, message))
        self.kept.append((self.last, message))

    def arrived(self, number: int) -> None:
        """The receiver has everything up to ``number``. Raises ValueError for a number never given."""
        if number > self.last:
            raise ValueError(f"message {number} is said to have arrived, and only {self.last} were sent")
        while self.kept and self.kept[0][0] <= number:
            self.kept.popleft()

    def rest(self, number: int) -> list[L]:
        """The channel is over and the receiver has everything up to ``number``: what must be sent again, in
        order.
        """
        self.arrived(number)
        messages = [message for _, message in self.kept]
        self.forget()
        return messages

    def forget(self) -> None:
        """Keep nothing any more: the receiver is gone, or all is settled."""
        self.kept.clear()
        self.unwritten.clear()


@dataclass(slots=True)
class Received:
    """The receiver's end: headers whose payload is still to come, and the number of the last that came."""

    number: int = 0
    announced: deque[Header] = field(default_factory=deque)

    def announce(self, header: Header) -> None:
        """A header; its payload follows those of the headers before it. Raises ValueError out of order."""
        last = self.announced[-1].number if self.announced else self.number
        if header.number <= last:
            raise ValueError(f"message {header.number} came after message {last}")
        self.announced.append(header)

    def arrived(self) -> Header:
        """The payload of the oldest header is here."""
        header = self.announced.popleft()
        self.number = header.number
        return header
