"""Random failures at random times, from a seed: nothing is lost, nothing is stuck.

A failing seed repeats with the command that the failure prints.
"""

from __future__ import annotations

import random
from typing import get_args

import pytest

from oobleckd.protocol.job import PolicyName
from tests.helpers.manners import KEPT, SUM_COPIES, UPDATES, Manner, forms_of
from tests.helpers.storm import Storm
from tests.helpers.weather import DEVICES_PER_STAGE
from tests.helpers.world import World

SEEDS = 200


def stormy(seed: int, policy: PolicyName) -> None:
    dice = random.Random(f"storm {seed}")
    each = random.Random(f"stages {seed}").choice(DEVICES_PER_STAGE)
    world = World(
        seed,
        dice.randrange(3, 9),
        num_devices=each * dice.choice([1, 1, 1, 2]),
        overflows=(5, 9) if dice.random() < 0.3 else (),
        nans=(7,) if dice.random() < 0.3 else (),
        clips=(6, 15) if dice.random() < 0.3 else (),
        codec=dice.random() < 0.2,
        lease_s=dice.choice([1.5, 5.0]),
        grace_s=dice.choice([1.0, 3.0]),
    )
    world.run_for(1.0)
    f = min(dice.randrange(3), len(world.nodes) // 2 - 1)  # n0 is 2: more copies would wait for more nodes
    forms = forms_of(policy)
    manner = Manner(policy, *forms[seed % len(forms)], UPDATES[seed // 3 % 2], dice.choice(SUM_COPIES))
    world.submit(
        steps=25,
        f=f,
        every=dice.choice([0, 4]),
        devices_per_stage=each,
        **manner.simulated(dice.choice(KEPT)),
    )
    Storm(world, dice, dice.choice([0, 1, 3])).blow(dice.randrange(1, 14))
    world.run(lambda: world.state() in {"done", "failed"}, limit_s=120)
    world.check_done()


@pytest.mark.thin(30)
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_storm(policy, seed):
    try:
        stormy(seed, policy)
    except AssertionError as error:
        command = f".venv/bin/pytest 'tests/sim/test_chaos.py::test_storm[{policy}-{seed}]'"
        raise AssertionError(f"{error}\nrepeat with: {command}") from error
