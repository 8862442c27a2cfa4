"""The group of one epoch: its channels, and how all of them end together.

Channels are opened by the first tensor message that wants one; until a channel is open, and after the group
is over, messages are staged. A group ends as a whole, on every member that has channels: freeing one
communicator waits for the kernels of all others on that GPU, and those wait for peers that may be ending
theirs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from typing import assert_never

from oobleckd.words import seconds
from oobleckd.worker.groups import group_messages, payload
from oobleckd.worker.groups.backend import Backend
from oobleckd.worker.groups.channels import ChannelEnd, Outbound, ReceiverEnd, SenderEnd, Surroundings
from oobleckd.worker.transport.mailbox import TensorMessage

ABORT_S = 20.0  # above NCCL's own limit for an init that is under way
_AGAIN_S = 0.05
_log = logging.getLogger(__name__)


class DeviceGroup:
    """``device``'s end of the group of ``epoch`` among ``members``.

    ``say(peer, group message)`` and ``deliver(tensor message)`` as in ``Surroundings``;
    ``stage(peer, message)`` sends by the transport, ``ready`` as there. ``stuck(why)`` is called when the
    channels did not end within ``abort_s``.
    """

    def __init__(
        self,
        epoch: int,
        device: str,
        members: Collection[str],
        backend: Backend,
        changed: threading.Condition,
        ready: threading.Event,
        *,
        say: Callable[[str, group_messages.Any], object],
        deliver: Callable[[TensorMessage], None],
        stage: Callable[[str, Outbound], object],
        stuck: Callable[[str], None],
        abort_s: float = ABORT_S,
    ) -> None:
        self.epoch = epoch
        self.ended = threading.Event()
        self._around = Surroundings(
            epoch, device, backend, changed, ready, say, deliver, self.abort, self._opened
        )
        self._members = frozenset(members) - {device}
        self._changed = changed
        self._stage = stage
        self._stuck = stuck
        self._abort_s = abort_s
        self._senders: dict[str, SenderEnd] = {}
        self._receivers: dict[str, ReceiverEnd] = {}
        self._refused: set[str] = set()
        self._over = ""

    @property
    def settled(self) -> bool:
        """Whether it is over and no message of it can be asked for any more. Under the condition."""
        return bool(self._over) and not any(end.sent.kept for end in self._senders.values())

    def offer(self, peer: str, message: Callable[[], Outbound]) -> bool:
        """Send a message on the channel to ``peer``; False if it must be staged. Under the condition.

        The first message for a peer begins to open the channel, and is staged itself.
        """
        if self._over or peer not in self._members or peer in self._refused:
            return False
        end = self._senders.get(peer)
        if end is None:
            self._senders[peer] = end = SenderEnd(self._around, peer)
            self._around.say(peer, group_messages.Open(self.epoch, self._around.backend.place))
            end.start()
        return end.is_open and end.offer(message())

    def hear(self, source: str, message: group_messages.Any) -> None:
        """A group message of a member. Raises ValueError for what no member would say."""
        match message:
            case group_messages.Open():
                self._open(source, message)
            case group_messages.Stored():
                with self._changed:
                    end = (self._receivers if message.ours else self._senders).get(source)
                if end is not None:
                    end.store.put(message.key, message.value)
            case group_messages.Header():
                payload.num_bytes(
                    message.dtypes, message.shapes
                )  # a header that makes no sense is refused here
                with self._changed:
                    if source in self._receivers and not self._over:
                        self._receivers[source].announce(message)
            case group_messages.Arrived():
                with self._changed:
                    if source in self._senders:
                        self._senders[source].sent.arrived(message.number)
            case group_messages.Over():
                self.abort(f"{source} has left it ({message.why})")
            case group_messages.Again():
                self._again(source, message)
            case group_messages.ChannelRefused():
                self._refuse(source, message.why)
            case _:
                assert_never(message)

    def forget(self, peers: Collection[str]) -> None:
        """``peers`` are dead or leave: if they are members, the group is over; nothing is kept for them."""
        gone = self._members & frozenset(peers)
        if not gone:
            return
        self.abort(f"without {', '.join(sorted(gone))}")
        with self._changed:
            for peer in gone & self._senders.keys():
                self._senders[peer].sent.forget()

    def abort(self, why: str) -> None:
        """End the group on this device, once; returns at once. What has not arrived is sent by
        the transport.
        """
        with self._changed:
            if self._over:
                return
            self._over = why
            for peer, sender in self._senders.items():
                sender.end(why)
                self._around.say(peer, group_messages.Over(self.epoch, why))
            for peer, receiver in self._receivers.items():
                receiver.end(why)
                # Payloads come in order, so one number says what has come, and exactly once is one
                # comparison. (D-transport-005)
                self._around.say(peer, group_messages.Again(self.epoch, receiver.received.number, why))
            # The whole group and not the channels to the dead: freeing a communicator waits for all kernels
            # of the GPU, and those of other channels wait for peers that may be freeing theirs.
            # (D-transport-004)
            ends = [*self._senders.values(), *self._receivers.values()]
        _log.info("group of epoch %d is over: %s", self.epoch, why)
        threading.Thread(target=self._end, args=(ends,), name=f"group-{self.epoch}-end", daemon=True).start()

    # ------------------------------------------------------------------ group messages

    def _open(self, source: str, message: group_messages.Open) -> None:
        with self._changed:
            problem = self._around.backend.refusal(message.place)
            if source not in self._members:
                problem = f"{source} is no member of epoch {self.epoch}"
            if problem:
                self._around.say(source, group_messages.ChannelRefused(self.epoch, problem))
            elif self._over:
                self._around.say(source, group_messages.Again(self.epoch, 0, self._over))
            else:
                assert source not in self._receivers, f"{source} opened its channel twice"
                self._receivers[source] = end = ReceiverEnd(self._around, source)
                end.start()

    def _again(self, source: str, message: group_messages.Again) -> None:
        self.abort(f"{source} has left it ({message.why})")
        with self._changed:
            end = self._senders.get(source)
            rest = end.sent.rest(message.number) if end else []
        for outbound in rest:
            if not outbound.changed:
                self._stage(source, outbound)

    def _refuse(self, source: str, why: str) -> None:
        with self._changed:
            end = self._senders.pop(source, None)
            self._refused.add(source)
            if end is None or self._over:
                return
            end.end(why)
        threading.Thread(target=_end_channel, args=(end,), name="channel-end", daemon=True).start()
        _log.info("messages to %s are staged in epoch %d: %s", source, self.epoch, why)

    def _opened(self, channel: str) -> None:
        _log.info("channel %s is open in epoch %d", channel, self.epoch)

    # ------------------------------------------------------------------ the end

    def _end(self, ends: Collection[ChannelEnd]) -> None:
        """Abort every channel at the same time, each in a thread of its own, and see that they end."""
        self._around.ready.wait()
        enders = [threading.Thread(target=_end_channel, args=(end,), daemon=True) for end in ends]
        deadline = time.monotonic() + self._abort_s
        for ender in enders:
            ender.start()
        for ender in enders:
            ender.join(max(0.0, deadline - time.monotonic()))
        alive = [end.name for end, ender in zip(ends, enders, strict=True) if ender.is_alive()]
        if alive:
            self._stuck(
                f"channels of epoch {self.epoch} did not end in {seconds(self._abort_s)}: {', '.join(alive)}"
            )
        self.ended.set()


def _end_channel(end: ChannelEnd) -> None:
    # More than once: what is being opened may not have been there to be aborted.
    end.channel.abort()
    while end.thread.is_alive():
        end.thread.join(_AGAIN_S)
        end.channel.abort()
