"""An agent of a simulated world, with its devices.

Owns what an agent keeps to say it again, its beats, and its side of the connection to the daemon. Who starts and
who dies is the world's; how long a message takes is the network's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from oobleckd.protocol.messages import (
    PROTOCOL,
    Ack,
    Beat,
    CheckpointPart,
    Held,
    Hello,
    Progress,
    Ready,
    StepDone,
    Welcome,
)
from planner.plan import device_name
from tests.helpers.simdevice import SimDevice

if TYPE_CHECKING:
    from tests.helpers.world import World


@dataclass
class SimNode:
    """An agent and its devices. A new life is a new object."""

    world: World
    name: str
    life: int
    devices: dict[str, SimDevice] = field(default_factory=dict)
    alive: bool = True
    connected: bool = False
    ready: bool = True
    link: int = 0
    kept: list[StepDone | CheckpointPart] = field(default_factory=list)
    last: dict[str, Ready | Held | Progress] = field(default_factory=dict)
    lives: tuple[str, ...] = ()  # those of the last Welcome: what comes for others is dropped

    @property
    def incarnation(self) -> str:
        return f"{self.name}.{self.life}"

    def start(self, num_devices: int) -> None:
        for index in range(num_devices):
            name = device_name(self.name, index)
            self.devices[name] = SimDevice(self.world, self, name)
        self.world.after(self.world.random.uniform(0, 0.01), self.connect)
        self.beat()

    def connect(self) -> None:
        if not self.alive or self.world.machine is None:
            return
        self.connected, self.lives = True, ()
        self.link += 1
        self.world.network.links[self.name] = (self, self.link)
        self.hello()
        for message in [*self.kept, *self.last.values()]:
            self.to_daemon(message)

    def hello(self) -> None:
        infos = tuple(device.known for device in self.devices.values() if device.alive)
        ready = self.ready and len(infos) == len(self.devices)
        self.to_daemon(Hello(PROTOCOL, self.name, self.incarnation, "host", ready, infos))

    def beat(self) -> None:
        if self.alive:
            self.to_daemon(Beat(self.incarnation))
            self.world.after(self.world.config.beat_s + self.world.lateness_s(), self.beat)

    def from_device(self, message: Any) -> None:
        if not self.alive:
            return
        if isinstance(message, StepDone | CheckpointPart):
            self.kept.append(message)
        elif isinstance(message, Ready | Held | Progress):
            self.last[message.device] = message
        self.to_daemon(message)

    def to_daemon(self, message: Any) -> None:
        if self.connected:
            self.world.network.to_daemon(self, message)

    def from_daemon(self, message: Any) -> None:
        if not self.alive:
            return
        if isinstance(message, Ack):
            self.kept = [kept for kept in self.kept if not _covered(kept, message)]
        elif isinstance(message, Welcome):
            self.lives = message.lives
        else:
            device = self.devices.get(message.device)
            if device is not None and device.alive and device.life in self.lives:
                device.control(message)

    def disconnect(self) -> None:
        """The link to the daemon breaks; the agent comes back after a while."""
        if self.connected:
            self.connected = False
            self.world.network.links.pop(self.name, None)
            self.world.after(self.world.random.uniform(0.05, 0.3), self.connect)


def _covered(kept: StepDone | CheckpointPart, ack: Ack) -> bool:
    return kept.job == ack.job and kept.counters.round <= ack.round
