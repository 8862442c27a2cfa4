"""Random failures at random times, from a seed: nothing is lost, nothing is stuck.

A failing seed repeats with the command that the failure prints.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import get_args

import pytest

from oobleckd.protocol.api import Control, Drain
from oobleckd.protocol.job import PolicyName
from tests.helpers.manners import FORMS, KEPT, UPDATES, Manner
from tests.helpers.world import World

SEEDS = 200


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
        self.world.break_link(self.dice.choice(sorted(self.world.nodes)))

    def restart_daemon(self) -> None:
        self.world.restart_daemon(self.dice.uniform(0.05, 1.0))

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


def stormy(seed: int, policy: PolicyName) -> None:
    dice = random.Random(f"storm {seed}")
    world = World(
        seed,
        dice.randrange(3, 9),
        num_devices=dice.choice([1, 1, 1, 2]),
        overflows=(5, 9) if dice.random() < 0.3 else (),
        nans=(7,) if dice.random() < 0.3 else (),
        clips=(6, 15) if dice.random() < 0.3 else (),
        codec=dice.random() < 0.2,
        lease_s=dice.choice([1.5, 5.0]),
        grace_s=dice.choice([1.0, 3.0]),
    )
    world.run_for(1.0)
    f = min(dice.randrange(3), len(world.nodes) // 2 - 1)  # n0 is 2: more copies would wait for more nodes
    manner = Manner(policy, *FORMS[seed % 3], UPDATES[seed // 3 % 2])
    world.submit(steps=25, f=f, every=dice.choice([0, 4]), **manner.simulated(dice.choice(KEPT)))
    Storm(world, dice, dice.choice([0, 1, 3])).blow(dice.randrange(1, 14))
    world.run(lambda: world.state() in {"done", "failed"}, limit_s=120)
    world.check_done()


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_storm(policy, seed):
    try:
        stormy(seed, policy)
    except AssertionError as error:
        command = f".venv/bin/pytest 'tests/sim/test_chaos.py::test_storm[{policy}-{seed}]'"
        raise AssertionError(f"{error}\nrepeat with: {command}") from error
