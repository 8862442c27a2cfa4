"""The planning pool with the real planner: answers, refusals, a killed process, and no orphans."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from oobleckd.core.events import MakePlan
from oobleckd.daemon.planning import Planning
from planner.policy import Setup, Situation
from planner.profile import LayerCost, Profile


def setup_of(*, device_memory_bytes: int = 0) -> Setup:
    layers = tuple(LayerCost(f"layer-{i}", 1e-3, 2e-3, 100, 400, 10, 10) for i in range(6))
    return Setup(Profile("key", "cpu", layers), 8, 1, device_memory_bytes, 1, 4)


SITUATION = Situation(("node-1", "node-2", "node-3", "node-4"), {})


@pytest.fixture
def planning() -> Iterator[Planning]:
    made = Planning(1)
    yield made
    made.close()


@pytest.mark.asyncio
async def test_templates_and_plan(planning: Planning) -> None:
    prepared = await planning.plan(MakePlan(1, "oobleck", setup_of()))
    assert (prepared.ticket, prepared.error) == (1, "")
    assert [template.num_nodes for template in prepared.templates]
    planned = await planning.plan(MakePlan(2, "oobleck", setup_of(), SITUATION))
    assert planned.ticket == 2
    assert planned.templates == prepared.templates
    assert planned.proposal is not None
    assert set(planned.proposal.plan.nodes()) == set(SITUATION.nodes)
    await planning.planned_ahead()
    again = await planning.plan(MakePlan(3, "oobleck", setup_of(), SITUATION))
    assert again.proposal == planned.proposal, "what is looked up is what was found"


@pytest.mark.asyncio
async def test_an_impossible_model_is_a_sentence_with_a_hint(planning: Planning) -> None:
    answer = await planning.plan(MakePlan(3, "oobleck", setup_of(device_memory_bytes=1)))
    assert answer.ticket == 3
    assert answer.error
    assert answer.hint
    unknown = await planning.plan(MakePlan(4, "nonesuch", setup_of()))
    assert "nonesuch" in unknown.error


@pytest.mark.asyncio
async def test_a_fault_of_the_planner_is_an_answer_too(
    planning: Planning, caplog: pytest.LogCaptureFixture
) -> None:
    answer = await planning.plan(MakePlan(5, "oobleck", "no setup"))  # type: ignore[arg-type]
    assert "the planner failed" in answer.error
    assert "planner" in caplog.text


@pytest.mark.asyncio
async def test_a_killed_process_is_replaced_and_the_request_repeated(planning: Planning) -> None:
    await planning.plan(MakePlan(1, "oobleck", setup_of()))
    (pid,) = planning.pids()
    os.kill(pid, signal.SIGKILL)
    answer = await planning.plan(MakePlan(2, "oobleck", setup_of(), SITUATION))
    assert answer.proposal is not None
    assert planning.num_rebuilt == 1
    assert planning.pids() != (pid,)


PROGRAM = """
import asyncio, os, signal
from oobleckd.core.events import MakePlan
from oobleckd.daemon.planning import Planning
from tests.loopback.test_daemon_planning import setup_of

async def main():
    planning = Planning(1)
    await planning.plan(MakePlan(1, "oobleck", setup_of()))
    print(*planning.pids(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_no_process_outlives_a_killed_daemon() -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        pid = int(daemon.stdout.readline())
        try:
            child = os.pidfd_open(pid)
        except ProcessLookupError:
            return  # it is gone already
        try:
            assert select.select([child], [], [], 120)[0], "it ends by itself"
        finally:
            os.close(child)
