"""Pre-copies in a simulated cluster: training goes on meanwhile, and the stop has what is left."""

from __future__ import annotations

import pytest

from oobleckd.core import precopy as core_precopy
from oobleckd.core import steer
from oobleckd.core.context import Core
from oobleckd.core.events import Command, Heard
from oobleckd.core.events import Event as CoreEvent
from oobleckd.core.machine import Machine
from oobleckd.core.run import Run
from oobleckd.core.state import JobRecord
from oobleckd.planner.placement import precopy
from oobleckd.planner.plan import Layout, Transfer
from oobleckd.planner.policy import Proposal
from oobleckd.protocol.job import Job
from oobleckd.protocol.messages import Deploy, FromWorker, PreCopied, PreCopy, ToWorker
from oobleckd.protocol.parts import Counters
from oobleckd.simulator.clock import VirtualClock
from oobleckd.simulator.outcome import Outcome
from oobleckd.simulator.precopy import SimulatedPreCopy
from oobleckd.simulator.traces import TraceEvent
from oobleckd.simulator.world import simulate
from tests.unit.simulator.build import even_profile, job_of, question, trace_of

LINK_BYTES_PER_S = 320.0
"""A stage of two layers, 180 bytes, takes 0.56 s; with six micro-batches a pipeline a step takes 0.42 s, with
four 0.30.
"""
JOINS = (TraceEvent(10.0, "join", "node-5"), TraceEvent(10.0, "join", "node-6"))


def run(*events: TraceEvent) -> Outcome:
    profile = even_profile(link_bytes_per_s=LINK_BYTES_PER_S)
    found = simulate(question("oobleck", trace_of(4, *events), profile=profile, job=job_of(12)))
    booked = found.useful_device_s + sum(found.lost_device_s.values())
    assert booked == pytest.approx(found.live_device_s, abs=1e-9)
    return found


def test_a_join_costs_the_copy_of_the_last_update(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = run(*JOINS)
    assert ahead.plans == 2
    whole_s = 6 * 180 / LINK_BYTES_PER_S
    assert ahead.lost_device_s["copy"] == pytest.approx(whole_s / 3)
    monkeypatch.setattr(precopy, "MAX_STEPS", 0.0)
    stopped = run(*JOINS)
    assert stopped.plans == 2
    assert stopped.lost_device_s["copy"] == pytest.approx(whole_s)


def test_what_looks_at_every_device_is_done_once_for_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each device of a copy the daemon asked for the job, and with each that had its copy it looked at
    all nodes: 10,000 kept it busy for minutes.
    """
    specs: list[str] = []
    looks: list[float] = []
    begun: list[tuple[int, int]] = []
    spec_of, steered, begin, handle = Core.spec_of, steer.steer, core_precopy._begin, Machine.handle

    def counted_spec(core: Core, job: JobRecord) -> Job:
        specs.append(job.id)
        return spec_of(core, job)

    def counted_steer(core: Core) -> None:
        looks.append(core.now)
        steered(core)

    def counted_begin(core: Core, run: Run, proposal: Proposal, incarnations: dict[str, str]) -> None:
        before = len(specs)
        begin(core, run, proposal, incarnations)
        begun.append((len(incarnations), len(specs) - before))

    def watched(machine: Machine, event: CoreEvent, now: float) -> list[Command]:
        before = len(looks)
        commands = handle(machine, event, now)
        if isinstance(event, Heard) and isinstance(event.message, PreCopied):
            assert machine.core.run is not None
            after.append((core_precopy.is_complete(machine.core.run), len(looks) - before))
        return commands

    after: list[tuple[bool, int]] = []
    monkeypatch.setattr(Core, "spec_of", counted_spec)
    monkeypatch.setattr(steer, "steer", counted_steer)
    monkeypatch.setattr(core_precopy, "_begin", counted_begin)
    monkeypatch.setattr(Machine, "handle", watched)
    run(*JOINS)
    assert begun == [(6, 1)]
    assert after == [(False, 0), (True, 1)]


def test_all_who_join_at_once_are_told_to_preload_with_one_look_at_all_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[int] = []
    told: list[str] = []
    preload, spec_of, tell = core_precopy._preload, Core.spec_of, Core.tell

    def counted(core: Core, run: Run, proposal: Proposal) -> None:
        specs: list[str] = []
        with monkeypatch.context() as within:
            within.setattr(Core, "spec_of", lambda core, job: specs.append(job.id) or spec_of(core, job))
            preload(core, run, proposal)
        looked.append(len(specs))

    def heard(core: Core, to: str, message: ToWorker, **how: bool) -> None:
        if isinstance(message, PreCopy):
            assert message.preload
            told.append(to)
        tell(core, to, message, **how)

    monkeypatch.setattr(precopy, "MAX_STEPS", 0.0)
    monkeypatch.setattr(core_precopy, "_preload", counted)
    monkeypatch.setattr(Core, "tell", heard)
    run(*JOINS)
    assert sorted(told) == ["node-5/0", "node-6/0"]
    assert sum(looked) == 1


class Still:
    """A world in which nothing happens."""

    def __init__(self) -> None:
        self.clock = VirtualClock()

    def hear(self, device: str, message: FromWorker) -> None:
        raise AssertionError(f"{device}: {message}")


def deploy(prepared: int, step: int, moved: tuple[Transfer, ...]) -> Deploy:
    layout, at = Layout(2, 4, {}, ()), Counters(step, step, step)
    return Deploy("b/0", 2, "job-1", job_of(), layout, at, "copy", moved, {}, "", "", prepared)


@pytest.mark.parametrize(
    ("after_s", "steps", "left_s"),
    [
        (0.0, 0, 3.0),  # nothing was sent
        (1.2, 1, 3.0 - 1.2 * 2 / 3),  # what was sent misses the update
        (1.2, 0, 3.0 - 1.2),  # and there was none
        (3.5, 1, 1.0),
        (3.5, 2, 3.0 - 2.5 * 2 / 3),  # the update in between took a second of it
        (9.0, 4, 1.0),
    ],
)
def test_what_is_left_for_the_stop(after_s: float, steps: int, left_s: float) -> None:
    moved = (Transfer(0, "a/0", "b/0", 300),)
    world = Still()
    found = SimulatedPreCopy(world, even_profile(link_bytes_per_s=100.0), set())
    found.prepare(PreCopy("b/0", 7, "job-1", job_of(), moved, 9, {}, ""), 10, 0.1)
    world.clock.pass_to(after_s)
    assert found.copies_s(deploy(7, 10 + steps, moved)) == pytest.approx(left_s)
    assert found.copies_s(deploy(0, 10 + steps, moved)) == pytest.approx(3.0)
    in_stop, before = found.copied(deploy(7, 10 + steps, moved))["b/0"]
    assert in_stop + before == 300


def test_after_a_loss_copies_begin_in_the_step_that_is_mended() -> None:
    """Nobody waits for them, and the stop is shorter than one with all of them."""
    lost = (TraceEvent(10.05, "fail", "node-2"),)
    copies = {}
    for policy in ("adaptive", "oobleck"):
        profile = even_profile(8, link_bytes_per_s=LINK_BYTES_PER_S)
        asked = question(policy, trace_of(8, *lost), profile=profile, job=job_of(24, limit_bytes=500))
        copies[policy] = simulate(asked).lost_device_s["copy"]
    assert 0 < copies["adaptive"] < copies["oobleck"]


@pytest.mark.parametrize("after_s", [0.35, 0.5, 0.7, 0.9, 1.1])
def test_a_target_that_is_lost_meanwhile_is_not_waited_for(after_s: float) -> None:
    found = run(*JOINS, TraceEvent(10.0 + after_s, "fail", "node-6"))
    assert found.rollbacks == 0
    assert found.steps > 30


@pytest.mark.parametrize("after_s", [0.35, 0.5, 0.7, 0.9, 1.1])
def test_a_source_that_is_lost_meanwhile(after_s: float) -> None:
    found = run(*JOINS, TraceEvent(10.0 + after_s, "fail", "node-1"))
    assert found.rollbacks == 0
    assert found.plans >= 2
