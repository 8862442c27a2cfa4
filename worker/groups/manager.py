"""A device's groups, one an epoch, between its messenger and its transport.

Owns which group is in force and what is heard about others: about one that is still to come here, it waits;
about one that is over, it is answered from what is left. Tensor messages come in here from the transport:
group messages are taken out, the rest goes on to the mailbox. Without a backend every message takes the
transport, and nothing else changes.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence

from torch import Tensor

from oobleckd.worker.groups import group_messages
from oobleckd.worker.groups.backend import Backend
from oobleckd.worker.groups.channels import Outbound
from oobleckd.worker.groups.group import ABORT_S, DeviceGroup
from oobleckd.worker.transport import wire
from oobleckd.worker.transport.mailbox import Key, Mailbox, TensorMessage

STUCK = 4  # exit code
Send = Callable[[str, Key, Sequence[Tensor], bytes], bool]
_log = logging.getLogger(__name__)


def _end_process(why: str) -> None:
    # The last resort: nothing else takes a kernel off a GPU. The agent starts a new device.
    print(f"error: {why}; this device process ends", file=sys.stderr, flush=True)
    os._exit(STUCK)


class GroupManager:
    """The groups of ``device``. ``send`` is the transport's; ``stuck(why)`` when an abort exceeds
    ``abort_s``.
    """

    def __init__(
        self,
        device: str,
        mailbox: Mailbox,
        backend: Backend | None,
        send: Send,
        *,
        stuck: Callable[[str], None] = _end_process,
        abort_s: float = ABORT_S,
    ) -> None:
        self._device = device
        self._mailbox = mailbox
        self._backend = backend
        self._send = send
        self._stuck = stuck
        self._abort_s = abort_s
        self._changed = threading.Condition()
        self._epoch = 0
        self._groups: dict[int, DeviceGroup] = {}
        self._early: list[tuple[str, group_messages.Any]] = []
        self.num_messages = 0
        """Tensor messages that were given to a channel."""

    def enter(self, epoch: int, members: Collection[str]) -> None:
        """The group of ``epoch``, higher than any before, takes the place of the present one."""
        if self._backend is None or epoch <= self._epoch:
            return
        self._abort(f"epoch {epoch} begins")
        with self._changed:
            ready = self._groups[self._epoch].ended if self._epoch in self._groups else _set_event()
            self._groups = {number: group for number, group in self._groups.items() if not group.settled}
            self._groups[epoch] = self._group(epoch, members, self._backend, ready)
            self._epoch = epoch
            early, self._early = self._early, []
        for source, message in early:
            self._hear(source, message)

    def offer(self, peer: str, key: Key, tensors: Sequence[Tensor], meta: bytes) -> bool:
        """Send a message by the group in force; False: it must take the transport. Raises WireError.

        ``tensors`` must stay as they are until their round is over.
        """
        backend = self._backend
        if backend is None or not backend.carries(tensors):
            return False
        wire.numbers_of(tensors)
        with self._changed:
            group = self._groups.get(self._epoch)
            taken = group is not None and group.offer(
                peer, lambda: Outbound.of(key, tensors, meta, backend.mark(tensors))
            )
            self.num_messages += taken
        return taken

    def forget(self, peers: Collection[str]) -> None:
        """``peers`` are dead or have left: groups with them are over, and nothing is kept for them."""
        with self._changed:
            groups = list(self._groups.values())
            self._early = [(source, message) for source, message in self._early if source not in peers]
        for group in groups:
            group.forget(peers)

    def leave(self) -> None:
        """The job is over for this device."""
        self._abort("the job is over here")

    def put(self, message: TensorMessage) -> None:
        """A tensor message from the transport. Raises WireError for a group message that makes no sense."""
        if message.key != group_messages.KEY:
            self._mailbox.put(message)
            return
        try:
            self._hear(message.source, group_messages.decode(message.meta))
        except ValueError as error:
            raise wire.WireError(str(error)) from error

    def close(self, timeout_s: float) -> bool:
        """End all groups and wait; whether they ended in time."""
        self.leave()
        with self._changed:
            groups = list(self._groups.values())
        deadline = time.monotonic() + timeout_s
        return all(group.ended.wait(max(0.0, deadline - time.monotonic())) for group in groups)

    def _group(
        self, epoch: int, members: Collection[str], backend: Backend, ready: threading.Event
    ) -> DeviceGroup:
        return DeviceGroup(
            epoch,
            self._device,
            members,
            backend,
            self._changed,
            ready,
            say=self._say,
            deliver=self._mailbox.put,
            stage=lambda peer, message: self._send(peer, message.key, message.tensors, message.meta),
            stuck=self._stuck,
            abort_s=self._abort_s,
        )

    def _abort(self, why: str) -> None:
        with self._changed:
            group = self._groups.get(self._epoch)
        if group is not None:
            group.abort(why)

    def _say(self, peer: str, message: group_messages.Any) -> bool:
        return self._send(peer, group_messages.KEY, (), group_messages.encode(message))

    def _hear(self, source: str, message: group_messages.Any) -> None:
        with self._changed:
            group = self._groups.get(message.epoch)
            if group is None and self._backend is not None and message.epoch > self._epoch:
                self._early.append((source, message))
                return
        if group is not None:
            group.hear(source, message)
        elif isinstance(message, group_messages.Open):
            why = f"{self._device} is in no group of epoch {message.epoch}"
            self._say(source, group_messages.ChannelRefused(message.epoch, why))


def _set_event() -> threading.Event:
    event = threading.Event()
    event.set()
    return event
