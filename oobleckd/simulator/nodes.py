"""The nodes of a simulated cluster: who comes, goes and dies, and how the daemon gets to know.

Owns the incarnations of nodes and the evidence of their ends, which is what a real cluster would have: the
agent's link closes and a peer in the layout has lost its link too; where there is none only silence tells,
after longer. Heartbeats are not sent, since nobody is silent who lives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from oobleckd.core.events import Asked, Event, Heard, LinkLost
from oobleckd.core.machine import Machine
from oobleckd.planner.plan import device_name, node_of
from oobleckd.protocol.agentmessages import DeviceLost, Goodbye, Hello
from oobleckd.protocol.messages import PROTOCOL, LinkDown
from oobleckd.protocol.parts import DeviceInfo, Notice
from oobleckd.protocol.requests import Drain
from oobleckd.simulator.account import Account
from oobleckd.simulator.clock import VirtualClock
from oobleckd.simulator.costs import Costs
from oobleckd.simulator.training import Training

TICKET = 0  # nobody waits for the answers


class NodesShell(Protocol):
    """What nodes need of the world around them."""

    clock: VirtualClock
    account: Account
    machine: Machine

    def feed(self, event: Event) -> None:
        """Bring an event to the core."""

    def counted(self) -> None:
        """Another number of nodes is alive."""


@dataclass(slots=True)
class SimulatedNodes:
    """All nodes ever seen: name -> number of its incarnation. ``alive``: now; ``known``: of those, who has
    said Hello. ``zones``: node -> its zone, if it has one.
    """

    world: NodesShell
    training: Training
    costs: Costs
    devices_per_node: int
    device_name: str
    memory_bytes: int
    zones: Mapping[str, str] = field(default_factory=dict)
    incarnations: dict[str, int] = field(default_factory=dict)
    alive: set[str] = field(default_factory=set)
    known: set[str] = field(default_factory=set)

    def join(self, name: str, *, start_s: float) -> None:
        """A node comes, or comes back; its devices can be used after ``start_s``."""
        self.incarnations[name] = self.incarnations.get(name, 0) + 1
        self.alive.add(name)
        self._count()
        self.world.clock.after(start_s, partial(self._hello, name, self.incarnations[name]))

    def fail(self, names: Sequence[str]) -> None:
        """Nodes die at once, without a word."""
        dead = [name for name in names if name in self.alive]
        self._die(dead)
        said = [(name, self.incarnations[name]) for name in dead if name in self.known]
        self.known.difference_update(dead)
        self.world.clock.after(self.costs.detect_s, partial(self._closed, said))

    def leave(self, name: str, notice_s: float) -> None:
        """A node goes in order: after a notice, in which it is taken out of the plan. It is paid for until
        then.
        """
        if notice_s > 0.0 and name in self.known:
            self.world.feed(Heard(name, self._introduction(name, Notice("announced", notice_s))))
        self.world.clock.after(notice_s, partial(self._goodbye, name, self.incarnations[name]))

    # ------------------------------------------------------------------ what the daemon hears

    def _hello(self, name: str, number: int) -> None:
        if name not in self.alive or self.incarnations[name] != number:
            return
        self.known.add(name)
        self.training.born(self._devices(name))
        self.world.feed(Heard(name, self._introduction(name)))
        if name in self.world.machine.core.state.drained:  # its incarnation before was evicted
            self.world.feed(Asked(TICKET, Drain(name, undo=True)))

    def _introduction(self, name: str, notice: Notice | None = None) -> Hello:
        infos = tuple(
            DeviceInfo(
                device,
                "cuda",
                self.device_name,
                self.memory_bytes,
                "",
                "",
                0,
                incarnation=f"{self._incarnation(name)}/{index}",
            )
            for index, device in enumerate(self._devices(name))
        )
        who = name, self._incarnation(name), name
        zone = self.zones.get(name, "")
        return Hello(PROTOCOL, *who, ready=True, devices=infos, zone=zone, notice=notice, prepares=True)

    def _closed(self, dead: Sequence[tuple[str, int]]) -> None:
        """Links of the dead have closed: those of their agents, and of their devices to peers."""
        silent = []
        for name, number in dead:
            if self.incarnations[name] != number and name in self.known:
                continue  # its next incarnation has told already
            self.world.feed(LinkLost(name))
            victim, peer = self._victim(name), next(iter(self.training.survivors()), "")
            if victim and peer:
                self.world.feed(Heard(node_of(peer), LinkDown(peer, victim, "closed")))
            if self.world.machine.core.members.nodes[name].alive:
                silent.append((name, number))
        if silent:
            self.world.clock.after(
                max(0.0, self.costs.silence_s - self.costs.detect_s), partial(self._silent, silent)
            )

    def _silent(self, dead: Sequence[tuple[str, int]]) -> None:
        """Nobody but the agent could have told: in the core's words its devices ended, here that is what the
        lease says.
        """
        for name, number in dead:
            if self.incarnations[name] == number:
                incarnation = self._incarnation(name)
                self.world.feed(Heard(name, DeviceLost(incarnation, device_name(name, 0), "silent")))

    def _goodbye(self, name: str, number: int) -> None:
        if name not in self.alive or self.incarnations[name] != number:
            return
        self._die([name])
        if name in self.known:
            self.known.discard(name)
            self.world.feed(Heard(name, Goodbye(self._incarnation(name), "it was told to")))
            self.world.feed(LinkLost(name))

    # ------------------------------------------------------------------ small common acts

    def _die(self, names: Sequence[str]) -> None:
        self.alive.difference_update(names)
        self._count()
        self.training.strike([device for name in names for device in self._devices(name)])

    def _count(self) -> None:
        self.world.account.alive(self.world.clock.now, len(self.alive) * self.devices_per_node)
        self.world.counted()

    def _victim(self, name: str) -> str:
        """A device of the node to which others have links: one of the layout."""
        layout = self.training.layout
        held = layout.holdings if layout is not None else {}
        return next((device for device in self._devices(name) if device in held), "")

    def _devices(self, name: str) -> tuple[str, ...]:
        return tuple(device_name(name, index) for index in range(self.devices_per_node))

    def _incarnation(self, name: str) -> str:
        return f"{name}.{self.incarnations[name]}"
