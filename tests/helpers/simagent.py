"""An agent of a simulated world, with its devices.

Real is what an agent keeps to say it again, for how long, and when (``oobleckd.worker.agent.outbox``), and
whom it has prepare data (``preparing``); after
``oobleckd.worker.agent.node`` when it says Hello, what it passes on and what it drops. Who starts and who
dies is the world's; how long a message takes and when a connection ends is the network's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from oobleckd.planner.plan import device_name
from oobleckd.protocol.agentmessages import Ack, Dismiss, EndStopped, Heartbeat, Hello, Wake, Welcome
from oobleckd.protocol.datamessages import PrepareData, StopPreparing
from oobleckd.protocol.messages import PROTOCOL
from oobleckd.protocol.parts import Notice
from oobleckd.worker.agent.outbox import MessageHead, Outbox
from oobleckd.worker.processes.preparing import Preparations
from tests.helpers.simdevice import SimDevice

if TYPE_CHECKING:
    from tests.helpers.simnet import Wire
    from tests.helpers.world import World

_HELLO_AGAIN_S = 2.0
_RECONNECT_S = (0.1, 0.2)  # the first try, as libzmq has it
_RETRY_S = (0.1, 2.0)  # the others


@dataclass(slots=True)
class Sleeper:
    """Processes that can be stopped: what is meant for them waits in order, as it does in the buffers of real
    ones.
    """

    asleep: bool = False
    waiting: list[tuple[Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)

    def call(self, act: Callable[..., None], *args: Any) -> None:
        """Now, or once they go on."""
        if self.asleep:
            self.waiting.append((act, args))
        else:
            act(*args)

    def stop(self) -> None:
        """SIGSTOP."""
        self.asleep = True

    def go_on(self) -> None:
        """SIGCONT."""
        self.asleep = False
        while self.waiting and not self.asleep:
            act, args = self.waiting.pop(0)
            act(*args)


@dataclass
class SimNode:
    """An agent and its devices. A new incarnation is a new object.

    ``connected``: the agent takes its connection for open. ``agent`` and ``host`` can be stopped: the agent,
    and the device processes. ``slow``: how many times longer its tasks and what it says take. ``notice``: why
    it is about to end, at ``ends_at``.
    """

    world: World
    name: str
    number: int
    devices: dict[str, SimDevice] = field(default_factory=dict)
    alive: bool = True
    connected: bool = False
    ready: bool = True
    zone: str = ""
    slow: float = 1.0
    agent: Sleeper = field(default_factory=Sleeper)
    host: Sleeper = field(default_factory=Sleeper)
    outbox: Outbox = field(default_factory=Outbox)
    connection: Wire | None = None
    welcomed: bool = False  # on this connection
    incarnations: tuple[str, ...] = ()  # those of the last Welcome: what comes for others is dropped
    notice: str = ""
    ends_at: float = 0.0
    preparations: Preparations = field(init=False)

    def __post_init__(self) -> None:
        self.preparations = Preparations(partial(self.world.folders.begin, self), self.to_daemon)

    @property
    def incarnation(self) -> str:
        return f"{self.name}.{self.number}"

    def start(self, num_devices: int) -> None:
        for index in range(num_devices):
            name = device_name(self.name, index)
            self.devices[name] = SimDevice(self.world, self, name)
        self.world.after(self.world.random.uniform(0, 0.01), self.connect)
        self.heartbeat()

    # ------------------------------------------------------------------ to the daemon

    def connect(self) -> None:
        """Again and again while the network lets nothing through; not while there is no daemon, which calls
        back.
        """
        if not self.alive or self.connected or self.world.machine is None:
            return
        if self.agent.asleep or self.world.network.severed(self.name):
            self.world.after(self.world.random.uniform(*_RETRY_S), self.connect)
            return
        self.connection = self.world.network.open(self)
        self.connected, self.welcomed, self.incarnations = True, False, ()
        self.hello()
        self.world.after(_HELLO_AGAIN_S, self.agent.call, self._hello_again, self.connection)

    def disconnected(self) -> None:
        """The agent finds its connection gone, and comes back after a while."""
        self.connected = False
        self.world.after(self.world.random.uniform(*_RECONNECT_S), self.connect)

    def hello(self) -> None:
        infos = tuple(device.known for device in self.devices.values() if device.alive)
        ready = self.ready and len(infos) == len(self.devices)
        left_s = max(0.0, self.ends_at - self.world.now)
        notice = Notice(self.notice, left_s) if self.notice else None
        who = self.name, self.incarnation, "host"
        self.to_daemon(Hello(PROTOCOL, *who, ready, infos, zone=self.zone, notice=notice, prepares=True))

    def _hello_again(self, connection: Wire) -> None:
        if self.alive and self.connection is connection and not self.welcomed:
            self.hello()
            self.world.after(_HELLO_AGAIN_S, self.agent.call, self._hello_again, connection)

    def heartbeat(self) -> None:
        if self.alive:
            self.to_daemon(Heartbeat(self.incarnation))
            next_s = self.world.config.heartbeat_s + self.world.lateness_s()
            self.world.after(next_s, self.agent.call, self.heartbeat)

    def noticed(self, reason: str, left_s: float) -> None:
        """Somebody is going to end this node: it asks to be let go, and goes when its time is up."""
        self.agent.call(self._noticed, reason, left_s)

    def _noticed(self, reason: str, left_s: float) -> None:
        if self.alive:
            self.notice, self.ends_at = reason, self.world.now + left_s
            self.hello()
            self.world.after(left_s, self.agent.call, self._leave)

    def _leave(self) -> None:
        if self.alive:
            self.world.leave(self.name, self.notice)

    def from_device(self, message: Any) -> None:
        """A device says something."""
        self.agent.call(self._said, message)

    def _said(self, message: Any) -> None:
        if self.alive:
            self.outbox.said(_head(message), message)
            self.to_daemon(message)

    def to_daemon(self, message: Any) -> None:
        if self.connected:
            self.world.network.to_daemon(self, message)

    # ------------------------------------------------------------------ from the daemon

    def from_daemon(self, message: Any) -> None:
        if not self.alive:
            return
        if isinstance(message, Ack):
            self.outbox.acknowledge(message.job, message.round)
        elif isinstance(message, Welcome):
            self._welcome(message)
        elif isinstance(message, Dismiss):
            self._leave()
        elif isinstance(message, EndStopped):
            self.world.end_device(self, message)
        elif isinstance(message, Wake):
            self.world.wake_device(self, message)
        elif isinstance(message, PrepareData):
            self.preparations.prepare(message)
        elif isinstance(message, StopPreparing):
            self.preparations.stop(message.job)
        else:
            self._pass_on(message)

    def _welcome(self, message: Welcome) -> None:
        self.incarnations = message.incarnations
        if not self.welcomed:
            self.welcomed = True
            for kept in self.outbox.pending():
                self.to_daemon(kept)
            self.preparations.say_again()

    def _pass_on(self, message: Any) -> None:
        device = self.devices.get(message.device)
        if device is not None and device.alive and device.incarnation in self.incarnations:
            self.outbox.told(_head(message))
            self.host.call(device.control, message)


def _head(message: Any) -> MessageHead:
    """What ``outbox.peek`` reads of the message's bytes."""
    return MessageHead(
        type(message).__name__,
        getattr(message, "device", ""),
        getattr(message, "peer", ""),
        getattr(message, "epoch", -1),
        getattr(message, "job", ""),
        getattr(message, "round", -1),
        getattr(message, "counters", None),
    )
