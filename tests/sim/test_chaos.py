"""Random failures at random times, from a seed: nothing is lost, nothing is stuck.

``pytest tests/sim/test_chaos.py --co -q`` lists the seeds; a failing one names itself in its test's id.
"""

import random

import pytest

from oobleckd.protocol.api import Control, Drain
from tests.helpers.world import World


def storm(world: World, dice: random.Random, start: float, num_events: int, *, copies: int) -> None:
    """Schedule failures; at least ``copies`` nodes are left alive by all of them."""
    when = start

    def kill(silent: bool) -> None:
        live = world.live()
        if len(live) > copies:
            world.kill(dice.choice(live), silent=silent)

    def kill_two() -> None:
        for _ in range(2):
            kill(silent=False)

    def kill_device() -> None:
        live = world.live()
        if len(live) > copies:
            world.kill_device(dice.choice(live), restart_s=dice.uniform(0.05, 1.0))

    def revive() -> None:
        dead = [name for name, node in sorted(world.nodes.items()) if not node.alive]
        if dead:
            world.add(dice.choice(dead))

    def drain(undo: bool) -> None:
        if world.machine is not None and world.nodes:
            world.ask(Drain(dice.choice(sorted(world.nodes)), undo=undo))

    def control(act: str) -> None:
        if world.machine is not None:
            world.ask(Control("job-1", act))

    acts = [
        (5, lambda: kill(silent=False)),
        (2, lambda: kill(silent=True)),
        (2, kill_two),
        (3, kill_device),
        (7, revive),
        (3, lambda: world.restart_daemon(dice.uniform(0.05, 1.0))),
        (2, lambda: world.break_link(dice.choice(sorted(world.nodes)))),
        (1, lambda: drain(undo=False)),
        (2, lambda: drain(undo=True)),
        (1, lambda: control("checkpoint")),
        (1, lambda: control("pause")),
        (2, lambda: control("resume")),
    ]
    weights = [weight for weight, _ in acts]
    for _ in range(num_events):
        when += dice.choice([dice.uniform(0, 0.03), dice.uniform(0, 0.3), dice.uniform(0, 2.0)])
        world.at(when, dice.choices(acts, weights)[0][1])
    world.at(when + 1.0, lambda: calm_down(world))


def calm_down(world: World) -> None:
    """The storm is over: everything that can be started is."""
    if world.machine is None:
        world.after(0.5, calm_down, world)
        return
    for name, node in sorted(world.nodes.items()):
        if not node.alive:
            world.add(name)
        world.ask(Drain(name, undo=True))
    world.ask(Control("job-1", "resume"))


@pytest.mark.parametrize("seed", range(200))
def test_storm(seed):
    dice = random.Random(f"storm {seed}")
    world = World(
        seed,
        dice.randrange(3, 9),
        num_devices=dice.choice([1, 1, 1, 2]),
        overflows=(5, 9) if dice.random() < 0.3 else (),
        nans=(7,) if dice.random() < 0.3 else (),
        codec=dice.random() < 0.2,
        lease_s=dice.choice([1.5, 5.0]),
        grace_s=dice.choice([1.0, 3.0]),
    )
    world.run_for(1.0)
    world.submit(steps=25, f=dice.randrange(3), memory=350, every=dice.choice([0, 4]))
    storm(world, dice, world.now, dice.randrange(1, 14), copies=dice.choice([0, 1, 3]))
    world.run(lambda: world.state() in {"done", "failed"}, limit_s=120)
    world.check_done()
