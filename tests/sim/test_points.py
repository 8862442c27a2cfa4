"""Deaths inside the backup, the validation and the copy, from a seed: nothing is lost, nothing is stuck.

A failing seed repeats with the command that the failure prints.
"""

from __future__ import annotations

import random

import pytest

from tests.helpers.manners import KEEPING_MANNERS, KEPT
from tests.helpers.storm import Storm, Strikes
from tests.helpers.world import World

SEEDS = 200
POINTS = ("backup", "validate", "copy")


def struck(seed: int) -> None:
    """A short job in which one or two devices die at such points, and in some seeds other things fail."""
    dice = random.Random(f"points {seed}")
    manner = KEEPING_MANNERS[seed % len(KEEPING_MANNERS)]
    possible = [point for point in POINTS if point == "copy" or manner.update == "staggered"]
    points = [dice.choice(possible) for _ in range(dice.choice([1, 2]))]
    world = World(
        seed,
        dice.randrange(5, 9),
        num_devices=dice.choice([1, 1, 1, 2]),
        overflows=(8, 11) if dice.random() < 0.2 else (),
        nans=(13,) if dice.random() < 0.2 else (),
        clips=(10,) if dice.random() < 0.2 else (),
        lease_s=dice.choice([1.5, 5.0]),
        grace_s=dice.choice([1.0, 3.0]),
    )
    world.layer_s = 0.008  # long steps: nodes come and go within a few
    world.run_for(1.0)
    world.submit(steps=16, f=1, every=dice.choice([0, 4]), **manner.simulated(dice.choice(KEPT)))
    strikes = Strikes(world, dice, list(points))
    storm = Storm(world, dice, 4)
    world.until_step(2)
    come_and_go(storm, strikes)
    world.run(lambda: bool(strikes.struck) or world.state() == "done")
    idle = (
        manner.policy == "adaptive" and points[0] == "copy"
    )  # it may leave standing by whom no step is faster with
    assert strikes.struck or idle, f"nobody came to {points}"
    storm.blow(dice.randrange(4))
    world.run(lambda: world.state() in {"done", "failed"}, limit_s=120)
    world.check_done()


def come_and_go(storm: Storm, strikes: Strikes) -> None:
    """A node dies and comes back, whenever all have a place and a copy is to be struck: it gets one under
    every policy, but for ``adaptive`` where that saves nothing."""
    world = storm.world
    if not strikes.points:
        return
    if (
        strikes.points[0] == "copy"
        and world.state() == "running"
        and {*world.view().nodes} == {*world.live()} == {*world.nodes}
    ):
        storm.kill()
        world.after(storm.dice.uniform(0.1, 0.3), storm.revive)
    world.after(0.1, come_and_go, storm, strikes)


@pytest.mark.thin(9)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_deaths_at_points(seed: int) -> None:
    try:
        struck(seed)
    except AssertionError as error:
        command = f".venv/bin/pytest 'tests/sim/test_points.py::test_deaths_at_points[{seed}]'"
        raise AssertionError(f"{error}\nrepeat with: {command}") from error
