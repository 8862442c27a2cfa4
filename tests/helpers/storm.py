"""Random failures at random times on a simulated world, and deaths at chosen fault points; all
from a seed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from oobleckd.planner.plan import node_of
from oobleckd.protocol.requests import Control, Drain
from tests.helpers.simdevice import SimDevice
from tests.helpers.world import World


@dataclass
class Storm:
    """Failures of a world. ``copies``: at least so many nodes are left alive by kills."""

    world: World
    dice: random.Random
    copies: int

    def kill(self) -> None:
        live = self.world.live()
        if len(live) > self.copies:
            self.world.kill(self.dice.choice(live))

    def vanish(self) -> None:
        live = self.world.live()
        if len(live) > self.copies:
            self.world.kill(self.dice.choice(live), silent=True)

    def kill_two(self) -> None:
        self.kill()
        self.kill()

    def kill_device(self) -> None:
        live = self.world.live()
        if len(live) > self.copies:
            self.world.kill_device(self.dice.choice(live), restart_s=self.dice.uniform(0.05, 1.0))

    def spare_takes_place(self) -> None:
        live = self.world.live()
        if len(live) > self.copies:
            index = self.dice.randrange(self.world.num_devices)
            up_s, heard = self.dice.uniform(0.005, 0.5), self.dice.random() < 0.8
            self.world.spare_takes_place(self.dice.choice(live), index, up_s, heard=heard)

    def revive(self) -> None:
        dead = [name for name, node in sorted(self.world.nodes.items()) if not node.alive]
        if dead:
            self.world.add(self.dice.choice(dead))

    def break_link(self) -> None:
        self.world.network.break_link(self.dice.choice(sorted(self.world.nodes)))

    def restart_daemon(self) -> None:
        self.world.daemon.restart(self.dice.uniform(0.05, 1.0))

    def ask(self) -> None:
        node = self.dice.choice(sorted(self.world.nodes))
        acts = ["pause", "resume", "resume", "checkpoint"]
        requests = [Control("job-1", act) for act in acts]
        requests += [Drain(node), Drain(node, undo=True), Drain(node, undo=True)]
        if self.world.machine is not None:
            self.world.ask(self.dice.choice(requests))

    def blow(self, num_events: int) -> None:
        """Schedule everything; afterwards all that can be started is."""
        acts = {
            self.kill: 5, self.vanish: 2, self.kill_two: 2, self.kill_device: 2, self.spare_takes_place: 5,
            self.revive: 7, self.restart_daemon: 3, self.break_link: 2, self.ask: 6,
        }  # fmt: skip
        when = self.world.now
        for _ in range(num_events):
            when += self.dice.uniform(0, self.dice.choice([0.03, 0.3, 2.0]))
            self.world.at(when, self.dice.choices(list(acts), list(acts.values()))[0])
        self.world.at(when + 1.0, self.calm)

    def calm(self) -> None:
        if self.world.machine is None:
            self.world.after(0.5, self.calm)
            return
        for name, node in sorted(self.world.nodes.items()):
            if not node.alive:
                self.world.add(name)
            self.world.ask(Drain(name, undo=True))
        self.world.ask(Control("job-1", "resume"))


@dataclass
class Strikes:
    """Deaths at ``points``, one each, in this order: of one of the first devices that come there and whose
    layers others hold, too.

    What dies is the node, the device for a while, or the device whose place the node's spare takes.
    """

    world: World
    dice: random.Random
    points: list[str]
    first_round: int = 2
    visits: int = 0
    struck: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.world.strikes, self.world.on_strike = self.due, self.strike
        self.visits = self.dice.randrange(4)

    def due(self, device: SimDevice, point: str, round_: int) -> bool:
        """Whether ``device`` dies here."""
        wanted = bool(self.points) and point == self.points[0] and round_ >= self.first_round
        if not wanted or not self._survivable(device):
            return False
        self.visits -= 1
        if self.visits >= 0:
            return False
        self.visits = self.dice.randrange(4)
        self.struck.append(self.points.pop(0))
        return True

    def strike(self, name: str, index: int) -> None:
        how = self.dice.randrange(3)
        if how == 0:
            self.world.kill(name)
        elif how == 1:
            self.world.kill_device(name, self.dice.uniform(0.05, 1.0), index=index)
        else:
            self.world.spare_takes_place(name, index, self.dice.uniform(0.005, 0.5))

    def _survivable(self, victim: SimDevice) -> bool:
        held = {
            layer
            for node in self.world.nodes.values()
            if node.name != node_of(victim.name)
            for device in node.devices.values()
            if device.alive
            for layer in device.held_layers
        }
        return held == set(range(self.world.num_layers))
