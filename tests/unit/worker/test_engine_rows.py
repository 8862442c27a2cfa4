"""The exact engine under losses, on rows of documents that are kept apart and ask for unequally many."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.documents import job_on_documents
from tests.helpers.engine import World
from tests.helpers.engine_jobs import GOAL, SCHEDULES, STAGES, Reference, any_deaths, told_by


@pytest.fixture(scope="module", params=["packed", "chats", pytest.param("windows", marks=pytest.mark.slow)])
def rows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A job, and what it comes to without failures."""
    tmp_path = tmp_path_factory.mktemp("rows")
    spec = job_on_documents("llama", tmp_path, request.param, steps=GOAL, global_batch=8)
    world = World(spec, STAGES, 0, tmp_path)
    world.run()
    return spec, world.losses, world.weights()


def test_a_process_alone_has_the_same_losses(rows: Reference, tmp_path: Path) -> None:
    assert told_by(rows[0], tmp_path) == rows[1]


@pytest.mark.thin(50)
@pytest.mark.parametrize("redundant", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(8))
def test_random_deaths_do_not_show(
    rows: Reference, tmp_path: Path, seed: int, schedule: str, redundant: bool
) -> None:
    any_deaths(rows, tmp_path, seed, schedule, redundant=redundant)
