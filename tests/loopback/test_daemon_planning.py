"""The planning pool with the real planner: answers, refusals, a killed process, and no orphans."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from oobleckd.core.events import MakePlan
from oobleckd.daemon import planforker, poolwork
from oobleckd.daemon import planning as daemon_planning
from oobleckd.daemon.planning import Planning
from oobleckd.host import urgency
from oobleckd.planner.costs.sharded import UNKNOWN, Sharding, sharded_setup
from oobleckd.planner.policy import PlanError, Setup, Situation
from oobleckd.planner.profile import LayerCost, Profile
from oobleckd.planner.schedules import decoupled


def setup_of(*, device_memory_bytes: int = 0) -> Setup:
    layers = tuple(LayerCost(f"layer-{i}", 1e-3, 2e-3, 100, 400, 10, 10) for i in range(6))
    return Setup(Profile("key", "cpu", layers), 8, 1, device_memory_bytes, 1, 4)


SITUATION = Situation(("node-1", "node-2", "node-3", "node-4"), {})


@pytest_asyncio.fixture
async def planning(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Planning]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # for what the tests have it do
    made = Planning()
    yield made
    made.close()


@pytest.mark.asyncio
async def test_of_several_set_ups_the_best_is_prepared(planning: Planning) -> None:
    """A layer of 400 bytes has no room on one device, and on two of them it has."""
    whole = msgspec.structs.replace(setup_of(device_memory_bytes=600), devices_per_node=2, nodes_now=4, f=0)
    first, other = (sharded_setup(whole, Sharding(number, UNKNOWN)) for number in (1, 2))
    found = await planning.plan(MakePlan(1, "oobleck", first, others=(other,)))
    assert found.setup in {first, other}
    alone = await planning.plan(MakePlan(2, "oobleck", found.setup or first))
    assert (found.templates, alone.setup) == (alone.templates, None)
    again = await planning.plan(MakePlan(3, "oobleck", other, others=(other,), num_nodes=1))
    assert again.setup == other


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
    assert [record.name for record in caplog.records if record.exc_info] == [daemon_planning.__name__]


@pytest.mark.asyncio
async def test_a_killed_process_is_replaced_and_the_request_repeated(planning: Planning) -> None:
    await planning.plan(MakePlan(1, "oobleck", setup_of(), SITUATION))
    await planning.planned_ahead()
    forker, *pids = planning.pids()
    assert len(pids) == 2
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    answer = await planning.plan(MakePlan(2, "oobleck", setup_of(), SITUATION))
    assert answer.proposal is not None
    assert (await planning.plan(MakePlan(3, "oobleck", setup_of(device_memory_bytes=10**6)))).templates
    assert planning.num_rebuilt == 2
    same, *others = planning.pids()
    assert same == forker
    assert not set(others) & set(pids)


@pytest.mark.asyncio
async def test_a_killed_forker_is_replaced_with_all_that_it_forked(planning: Planning) -> None:
    await planning.plan(MakePlan(1, "oobleck", setup_of(), SITUATION))
    await planning.planned_ahead()
    pids = planning.pids()
    handles = [os.pidfd_open(pid) for pid in pids]
    os.kill(pids[0], signal.SIGKILL)
    for handle in handles:
        assert await asyncio.to_thread(select.select, [handle], [], [], 60), "it ends with who forked it"
        os.close(handle)
    answer = await planning.plan(MakePlan(2, "oobleck", setup_of(), SITUATION))
    assert answer.proposal is not None
    assert (await planning.plan(MakePlan(3, "oobleck", setup_of(device_memory_bytes=10**6)))).templates
    assert len({*pids, *planning.pids()}) == 6


@pytest.mark.asyncio
async def test_who_stops_waiting_takes_nobody_else_s_answer(
    planning: Planning, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A call that nobody waits for any more is made to its end, and the next one has its own answer."""
    os.mkfifo(tmp_path / "go")
    monkeypatch.setattr(poolwork, "prepare", waits)
    left = asyncio.create_task(planning.plan(MakePlan(1, str(tmp_path / "go"), setup_of())))
    go = await asyncio.to_thread((tmp_path / "go").open, "w")  # it is at it
    left.cancel()
    monkeypatch.undo()
    after = asyncio.create_task(planning.plan(MakePlan(2, "oobleck", setup_of())))
    go.close()
    answer = await after
    assert (answer.ticket, answer.error) == (2, "")
    assert left.cancelled()
    assert planning.num_rebuilt == 0


@pytest.mark.asyncio
async def test_a_recovery_does_not_wait_for_templates(
    planning: Planning, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    await planning.plan(MakePlan(1, "oobleck", setup_of(), SITUATION))
    await planning.planned_ahead()
    os.mkfifo(tmp_path / "go")
    monkeypatch.setattr(poolwork, "prepare", waits)
    long = asyncio.create_task(planning.plan(MakePlan(2, str(tmp_path / "go"), setup_of())))
    answer = await planning.plan(MakePlan(3, "oobleck", setup_of(), SITUATION))
    assert answer.proposal is not None
    assert not long.done()
    (tmp_path / "go").write_text("now", encoding="utf-8")
    assert "now" in (await long).error


@pytest.mark.asyncio
async def test_sizes_are_computed_ahead_and_more_nodes_extend_them(planning: Planning) -> None:
    await planning.plan(MakePlan(1, "oobleck", setup_of(), SITUATION))
    await planning.planned_ahead()
    (prepared,) = planning._prepared.values()
    assert sorted(prepared.catalogue.by_nodes) == [1, 2, 3, 4]
    more = Situation((*SITUATION.nodes, "node-5", "node-6"), {})
    await planning.plan(MakePlan(2, "oobleck", setup_of(), more))
    await planning.planned_ahead()
    assert sorted(prepared.catalogue.by_nodes) == [1, 2, 3, 4, 5, 6]
    assert planning.num_rebuilt == 0


@pytest.mark.asyncio
async def test_what_cannot_be_computed_ahead_is_logged_and_plans_go_on(
    planning: Planning, caplog: pytest.LogCaptureFixture
) -> None:
    prepared = await planning._prepare("oobleck", setup_of())
    packed, prepared.packed = prepared.packed, b""
    planning._plan_ahead(prepared, 4)
    await planning.planned_ahead()
    (record,) = [record for record in caplog.records if record.name == daemon_planning.__name__]
    assert (record.levelname, record.args) == ("ERROR", (4,))
    prepared.packed = packed
    answer = await planning.plan(MakePlan(1, "oobleck", setup_of(), SITUATION))
    assert answer.proposal is not None
    await planning.planned_ahead()
    assert sorted(prepared.catalogue.by_nodes) == [1, 2, 3, 4]


def dies_in_the_pool(*arguments: Any) -> bytes:
    """``adapt`` of a planner that is killed each time; not so in the daemon's own process."""
    if "oobleckd.daemon.planforker" in Path("/proc/self/cmdline").read_text(encoding="utf-8"):
        os.kill(os.getpid(), signal.SIGKILL)
    return adapt(*arguments)


def waits(policy: str, _setup: bytes) -> bytes:
    """``prepare`` that ends when somebody writes to the pipe ``policy``."""
    raise PlanError(Path(policy).read_text(encoding="utf-8"))


def has_no_memory(*_arguments: Any) -> bytes:
    raise MemoryError


_spent: list[bool] = []


def has_none_left(policy: str, setup: bytes) -> bytes:
    """``prepare`` in a process that has no room the second time that it is asked."""
    if policy == "again" and _spent:
        raise MemoryError
    _spent.append(True)
    return prepare("oobleck", setup)


def test_a_sandbox_that_forbids_nice_costs_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_by: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "nice", refuse)
    planforker.stand(planforker.LaneOrder(nicer_by=5))


def test_plans_after_a_loss_come_before_what_computes() -> None:
    """The process that makes them is urgent: not the one that forks it, nor that for all else. On their way
    to it and back they pass no thread but the loop's.
    """

    async def policies() -> tuple[list[int], set[threading.Thread]]:
        before = {*threading.enumerate()}
        planning = Planning()
        planning.warm()
        await planning.plan(MakePlan(1, "oobleck", setup_of(), SITUATION))
        found = [os.sched_getscheduler(pid) & ~os.SCHED_RESET_ON_FORK for pid in planning.pids()]
        planning.close()
        return found, {*threading.enumerate()} - before

    def hurried() -> tuple[bool, list[int], set[threading.Thread]]:
        return urgency.hurry(), *asyncio.run(policies())

    with ThreadPoolExecutor(1) as other:  # the tests' own thread is to stay as it is
        allowed, processes, threads = other.submit(hurried).result()
    assert processes == [os.SCHED_OTHER, os.SCHED_RR if allowed else os.SCHED_OTHER, os.SCHED_OTHER]
    assert not threads


def threads_of(pid: int) -> int:
    return len([*Path(f"/proc/{pid}/task").iterdir()])


def test_who_forks_the_planner_has_one_thread() -> None:
    """What another thread held at a fork would be held for ever in it."""

    async def looked() -> int:
        planning = Planning()
        await planning.plan(MakePlan(1, "oobleck", setup_of(), SITUATION))
        found = threads_of(planning.pids()[0])
        planning.close()
        return found

    assert asyncio.run(looked()) == 1


adapt, prepare = poolwork.adapt, poolwork.prepare


@pytest.mark.asyncio
async def test_a_plan_that_kills_every_process_is_made_by_the_daemon(
    planning: Planning, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await planning.plan(MakePlan(1, "oobleck", setup_of(), SITUATION))
    await planning.planned_ahead()
    said: list[str] = []
    planning._on_trouble = said.append
    monkeypatch.setattr(poolwork, "adapt", dies_in_the_pool)
    answer = await planning.plan(MakePlan(2, "oobleck", setup_of(), SITUATION))
    assert answer.proposal == before.proposal
    assert planning.num_rebuilt == 2
    assert ["lost" in text for text in said] == [True] * 3
    assert "the daemon makes it itself" in said[-1]
    (prepared,) = planning._prepared.values()
    assert sorted(prepared.catalogue.by_nodes) == [1, 2, 3, 4], "what was computed ahead is still there"
    monkeypatch.undo()
    assert (await planning.plan(MakePlan(3, "oobleck", setup_of(), SITUATION))).proposal == before.proposal


def adapt_in_a_wrong_order(*arguments: Any) -> bytes:
    """In the planner's process: an op is missing."""
    found = decoupled.best_orders

    def wrong(*asked: Any) -> tuple[str, ...]:
        first, *others = found(*asked)
        return first[:-1], *others

    decoupled.best_orders = wrong
    try:
        return adapt(*arguments)
    finally:
        decoupled.best_orders = found


@pytest.mark.asyncio
async def test_an_order_that_cannot_be_run_is_said_and_no_device_gets_one(
    planning: Planning, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = msgspec.structs.replace(setup_of(), decoupled=True, min_nodes=2)
    before = await planning.plan(MakePlan(1, "oobleck", setup, SITUATION))
    said: list[str] = []
    planning._on_trouble = said.append
    monkeypatch.setattr(poolwork, "adapt", adapt_in_a_wrong_order)
    answer = await planning.plan(MakePlan(2, "oobleck", setup, SITUATION))
    assert before.proposal is not None
    assert before.proposal.ops
    assert answer.error == ""
    assert answer.proposal is not None
    assert answer.proposal.ops == {}
    assert answer.proposal.plan == before.proposal.plan, "training goes on"
    assert len(said) == planning.num_invalid == 1
    assert answer.proposal.invalid in said[0]
    monkeypatch.undo()
    again = await planning.plan(MakePlan(3, "oobleck", setup, SITUATION))
    assert again.proposal == before.proposal


@pytest.mark.asyncio
async def test_templates_without_memory_are_an_answer_and_the_pool_comes_back(
    planning: Planning, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poolwork, "prepare", has_no_memory)
    answer = await planning.plan(MakePlan(1, "oobleck", setup_of()))
    assert "lost twice" in answer.error
    assert "memory" in answer.error
    monkeypatch.undo()
    assert (await planning.plan(MakePlan(2, "oobleck", setup_of()))).templates


@pytest.mark.asyncio
async def test_who_has_no_memory_is_replaced_before_the_call_is_made_again(
    planning: Planning, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poolwork, "prepare", has_none_left)
    assert (await planning.plan(MakePlan(1, "first", setup_of()))).templates
    assert (await planning.plan(MakePlan(2, "again", setup_of()))).templates
    assert planning.num_rebuilt == 1


PROGRAM = """
import asyncio, os, signal
from oobleckd.core.events import MakePlan
from oobleckd.daemon.planning import Planning
from tests.loopback.test_daemon_planning import setup_of

async def main():
    planning = Planning()
    await planning.plan(MakePlan(1, "oobleck", setup_of()))
    print(*planning.pids(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_no_process_outlives_a_killed_daemon() -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        pids = [int(pid) for pid in daemon.stdout.readline().split()]
        assert len(pids) == 2
        for pid in pids:
            try:
                child = os.pidfd_open(pid)
            except ProcessLookupError:
                continue  # it is gone already
            try:
                assert select.select([child], [], [], 120)[0], "it ends by itself"
            finally:
                os.close(child)
