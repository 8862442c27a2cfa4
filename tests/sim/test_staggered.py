"""Staggered updates, followed to the end of the job: made early, taken back where the round does not go
through.
"""

from __future__ import annotations

import pytest

from tests.helpers.manners import FORMS, KEEPING_MANNERS, Manner
from tests.helpers.world import World


def running(manner: Manner, seed: int, **config: tuple[int, ...]) -> World:
    world = World(seed, 7, **config)
    world.run_for(3.0)
    world.submit(steps=20, f=1, **manner.simulated())
    world.until_step(3)
    return world


@pytest.mark.thin(8)
@pytest.mark.parametrize(
    "manner", [m for m in KEEPING_MANNERS if m.update == "staggered"], ids=lambda m: m.name
)
@pytest.mark.parametrize("seed", range(8))
def test_a_loss_at_any_time_of_a_round(manner: Manner, seed: int) -> None:
    """Who has reduced all it holds may have to let attempts through before it updates: with the weights as
    they were.
    """
    world = running(manner, seed)
    world.run_for(0.01 * seed)
    world.kill(world.random.choice(world.view().nodes))
    world.until_state("done")
    world.check_done()
    assert world.job().steps_lost == 0
    assert world.early > 0


@pytest.mark.parametrize("trouble", ["overflows", "nans", "clips"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_one_bucket_in_trouble_has_all_take_back(form: tuple[str, int], trouble: str) -> None:
    """Only the holders of that bucket see it before the votes are in."""
    world = running(Manner("oobleck", *form, "staggered"), 1, **{trouble: (8, 14)})
    world.until_state("done")
    world.check_done()
    assert 0 < world.taken_back < world.early
