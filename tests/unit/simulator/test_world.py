"""Whole runs against cases that were worked out by hand, and what holds of every run.

Four nodes of one device, four layers of 30 ms, memory for two of them: two pipelines of two stages with two
micro-batches each, a step of (2 + 2 - 1) * 60 ms = 180 ms. Three nodes: one pipeline of stages of 1, 2 and 1
layers. The second is busy for 4 * 60 ms, begins after a forward of 10 ms, waits 10 ms for the first gradient,
and ends before a backward of 20 ms: 280 ms.
"""

from __future__ import annotations

import time
from typing import get_args

import msgspec
import pytest

from oobleckd.core.cadence import cadence
from oobleckd.planner.plan import node_of
from oobleckd.planner.policy import WITH_REDUNDANT_LAYERS, Action
from oobleckd.protocol.job import Checkpoint, Job, PolicyName
from oobleckd.protocol.jobeval import Eval
from oobleckd.protocol.jobschedule import Schedule
from oobleckd.protocol.messages import Deploy, PreCopy, ToWorker
from oobleckd.simulator.failures import memoryless
from oobleckd.simulator.outcome import Outcome, SimulationError
from oobleckd.simulator.runs import apart, run_all
from oobleckd.simulator.traces import TraceEvent
from oobleckd.simulator.world import World, simulate
from tests.helpers.simjobs import UNPREPARED
from tests.unit.simulator.build import BATCH_S, FREE, even_profile, job_of, question, trace_of

STEP_S = 0.18
AFTER_S = {"oobleck": 0.28, "slipstream": 0.30}
POLICIES: tuple[str, ...] = get_args(PolicyName)


def booked(run: Outcome) -> float:
    return run.useful_device_s + sum(run.lost_device_s.values())


def test_nothing_happens() -> None:
    run = simulate(question())
    assert run.steps == int((20.0 - BATCH_S) / STEP_S)
    assert run.samples == 4 * run.steps
    assert run.ideal_samples == run.oracle_samples == pytest.approx(4 * 20.0 / STEP_S)
    assert run.live_device_s == 80.0
    assert booked(run) == pytest.approx(80.0, abs=1e-9)
    assert run.useful_device_s == pytest.approx(4 * STEP_S * run.steps)
    assert (run.losses, run.plans, run.rollbacks) == (0, 1, 0)
    assert [decided.step_s for decided in run.decisions] == [pytest.approx(STEP_S)]


@pytest.mark.parametrize("policy", ["oobleck", "slipstream"])
def test_steps_are_longer_where_blocks_are_computed_again(policy: str) -> None:
    """Each stage has a block, of 10 ms: (2 + 2 - 1) * 70 ms."""
    job = msgspec.structs.replace(job_of(), schedule=Schedule(recompute="blocks"))
    run = simulate(question(policy, job=job))
    assert run.steps == int((20.0 - BATCH_S) / 0.21)
    loss = trace_of(4, TraceEvent(10.0, "fail", "node-2"))
    again, plain = simulate(question(policy, loss, job=job)), simulate(question(policy, loss))
    assert again.losses == plain.losses == 1
    assert again.decisions[-1].step_s > plain.decisions[-1].step_s
    assert again.rollbacks == 0


def test_a_job_that_evaluates_is_simulated_without_that() -> None:
    job = msgspec.structs.replace(job_of(), eval=Eval(held_out=0.1, every=1))
    assert simulate(question(job=job)).steps == simulate(question()).steps


def test_data_that_is_not_prepared_takes_no_time() -> None:
    job = msgspec.structs.replace(job_of(), data=UNPREPARED)
    assert simulate(question(job=job)).steps == simulate(question()).steps


@pytest.mark.parametrize("policy", ["oobleck", "slipstream"])
def test_one_loss(policy: str) -> None:
    """At 10 s 53 steps are committed, the last at 9.84; of the one under way 16/18 are done.

    The dead stage 1 had both of its pipeline's micro-batches in its sums. Their other stage has the first
    behind it and of the second the forward. So the other holder of stage 1 has 2 * 60 ms to do besides what
    is left of its own 2 * 60 ms: the step commits at 10 + 0.12 + 0.12 * 2/18. Then steps take 280 ms under
    oobleck, as planned. Under slipstream they take 300: one device computes four micro-batches (240 ms) after
    the first forward of the stage before it (20 ms), and before its last backward (40 ms).
    """
    run = simulate(question(policy, trace_of(4, TraceEvent(10.0, "fail", "node-2"))))
    before, mended_at = int((10.0 - BATCH_S) / STEP_S), 10.0 + 0.12 * (1 + 2 / 18)
    assert before == 53
    assert run.steps == before + 1 + int((20.0 - mended_at) / AFTER_S[policy])
    assert (run.losses, run.rollbacks, run.steps_lost) == (1, 0, 0)
    assert run.plans == (2 if policy == "oobleck" else 1)
    assert run.live_device_s == 4 * 10.0 + 3 * 10.0
    assert booked(run) == pytest.approx(run.live_device_s, abs=1e-9)
    stall_s = mended_at - (BATCH_S + (before + 1) * STEP_S)
    cut_off_s = 20.0 - mended_at - (run.steps - before - 1) * AFTER_S[policy]
    assert run.lost_device_s["redone"] == pytest.approx(3 * (stall_s + cut_off_s))
    assert run.oracle_samples == pytest.approx(4 * (10.0 / STEP_S + 10.0 / AFTER_S["oobleck"]))
    assert run.ideal_samples == pytest.approx(4 * (10.0 / STEP_S + 0.75 * 10.0 / STEP_S))


@pytest.mark.parametrize("policy", ["oobleck", "slipstream"])
def test_a_node_comes_back(policy: str) -> None:
    events = (TraceEvent(10.0, "fail", "node-2"), TraceEvent(12.0, "join", "node-2"))
    run = simulate(question(policy, trace_of(4, *events)))
    assert run.decisions[-1].step_s == pytest.approx(STEP_S)
    assert run.steps > simulate(question(policy, trace_of(4, events[0]))).steps
    assert run.lost_device_s["waiting"] == pytest.approx(0.0, abs=1e-6)
    assert booked(run) == pytest.approx(run.live_device_s, abs=1e-9)


@pytest.mark.parametrize("joins_s", [5.0, 5.9, 6.1])
def test_a_node_that_is_back_before_its_loss_is_noticed_is_noticed_all_the_same(joins_s: float) -> None:
    """Its next incarnation is heard of when its process has started, and its death no later than
    without one.
    """
    costs = msgspec.structs.replace(FREE, detect_s=1.0, start_s=8.0)
    trace = trace_of(4, TraceEvent(5.0, "fail", "node-4"), TraceEvent(joins_s, "join", "node-4"))
    found = simulate(question("slipstream", trace, costs=costs))
    assert 0 < found.lost_device_s["detect"] <= 4 * 1.0
    assert found.losses == 1


def test_the_last_copy_is_lost_and_the_job_goes_back_to_its_checkpoint() -> None:
    both = (TraceEvent(10.0, "fail", "node-2"), TraceEvent(10.0, "fail", "node-4"))
    anew = simulate(question("oobleck", trace_of(4, *both)))
    assert (anew.rollbacks, anew.steps_lost, anew.checkpoints) == (1, 53, 0)
    saved = simulate(question("oobleck", trace_of(4, *both), job=job_of(every=10)))
    assert (saved.rollbacks, saved.steps_lost) == (1, 3)
    assert saved.checkpoints >= 5
    assert saved.steps - anew.steps == 50
    for run in (anew, saved):
        assert run.lost_device_s["redone"] >= run.steps_lost * 4 * STEP_S - 1e-6
        assert booked(run) == pytest.approx(run.live_device_s, abs=1e-9)


def test_a_node_that_leaves_with_notice_costs_no_work() -> None:
    run = simulate(question("oobleck", trace_of(4, TraceEvent(10.0, "leave", "node-2", 2.0))))
    assert (run.losses, run.rollbacks) == (0, 0)
    assert run.plans == 2
    assert run.lost_device_s["redone"] <= 3 * AFTER_S["oobleck"]  # what the end cut off


def test_a_goodbye_without_notice_is_a_loss() -> None:
    run = simulate(question("oobleck", trace_of(4, TraceEvent(10.0, "leave", "node-2"))))
    assert (run.losses, run.rollbacks) == (1, 0)


def test_too_few_nodes_wait_until_there_are_enough() -> None:
    events = [TraceEvent(10.0, "fail", f"node-{n}") for n in (2, 3, 4)] + [TraceEvent(15.0, "join", "node-3")]
    run = simulate(question("oobleck", trace_of(4, *events)))
    assert run.lost_device_s["waiting"] >= 5.0  # of the one node that is left
    assert run.rollbacks == 1
    assert booked(run) == pytest.approx(run.live_device_s, abs=1e-9)


def test_a_standby_takes_the_place_of_the_dead() -> None:
    job = job_of(max_nodes=4)
    for policy in ("oobleck", "slipstream"):
        run = simulate(question(policy, trace_of(5, TraceEvent(10.0, "fail", "node-2")), job=job))
        assert run.decisions[-1].step_s == pytest.approx(STEP_S)
    idle = simulate(question("oobleck", trace_of(5, TraceEvent(10.0, "fail", "node-5")), job=job))
    assert idle.losses == 0  # nobody misses a node that stands by
    assert idle.steps == int((20.0 - BATCH_S) / STEP_S)


def test_what_an_engine_takes_is_lost_to_its_cause() -> None:
    costs = msgspec.structs.replace(FREE, detect_s=1.0, report_s=0.5, plan_s=0.25, deploy_s=2.0)
    run = simulate(question("oobleck", trace_of(4, TraceEvent(10.0, "fail", "node-2")), costs=costs))
    # Detection and the answers of the rest are lost but for what was left of the step, of which others made
    # use.
    assert run.lost_device_s["detect"] == pytest.approx(3.0, rel=0.1)
    assert run.lost_device_s["plan"] == pytest.approx(4 * 0.25 + 3 * (0.5 + 0.25), rel=0.3)
    assert run.lost_device_s["reconfigure"] == pytest.approx(4 * 2.0 + 3 * 2.0, rel=0.01)
    slow = simulate(
        question(
            "oobleck",
            trace_of(4, TraceEvent(10.0, "fail", "node-2")),
            profile=even_profile(link_bytes_per_s=90.0),
        )
    )
    assert slow.lost_device_s["copy"] >= 3 * 0.99  # a layer of 90 bytes, or more, through a link


def test_an_engine_that_keeps_nothing_does_the_step_again() -> None:
    costs = msgspec.structs.replace(FREE, keeps="nothing")
    trace = trace_of(4, TraceEvent(10.0, "fail", "node-2"))
    kept, anew = (simulate(question("slipstream", trace, costs=each)) for each in (FREE, costs))
    first = [min(point.at_s for point in run.points if point.at_s > 10.0) for run in (kept, anew)]
    assert first == [pytest.approx(10.0 + 0.12 * (1 + 2 / 18)), pytest.approx(10.0 + STEP_S)]


def test_checkpoints_stall_steps() -> None:
    costs = msgspec.structs.replace(FREE, snapshot_bytes_per_s=900.0)
    run = simulate(question("oobleck", job=job_of(every=10), costs=costs))
    stall_s = 4 * 90 / 4 / 900.0
    assert run.lost_device_s["checkpoint"] == pytest.approx(4 * stall_s * (run.steps // 10), rel=0.15)


def test_what_a_checkpoint_costs_is_measured() -> None:
    """Though the core hears of many steps at once: it was a guess throughout, three and more
    times too dear.
    """
    costs = msgspec.structs.replace(FREE, snapshot_bytes_per_s=90.0)
    job = msgspec.structs.replace(job_of(), checkpoint=Checkpoint(every="auto"))
    world = World(question("oobleck", trace_of(4, duration_s=1000.0), job=job, costs=costs))
    run = world.run()
    record = world.machine.core.state.jobs[world.training.job]
    found = cadence(record)
    assert found is not None
    assert found.measured
    assert found.cost_s == pytest.approx(4 * 90 / 4 / 90.0)
    assert len(record.steps) < run.steps / 10
    assert run.checkpoints == pytest.approx(1000.0 / found.interval_s, abs=2)


# --------------------------------------------------------------------------- of every run


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_nodes", [4, 32])
def test_storms(policy: str, num_nodes: int) -> None:
    for seed in range(2):
        trace = memoryless(num_nodes, 30.0, 60.0, 200.0, seed)
        # Two stages in place of one, and a third more while a checkpoint is written.
        job = job_of(2 * num_nodes, every=20, limit_bytes=500 if policy in WITH_REDUNDANT_LAYERS else 250)
        run = simulate(
            question(policy, trace, job=job, costs=msgspec.structs.replace(FREE, detect_s=0.1, deploy_s=0.5))
        )
        assert booked(run) == pytest.approx(run.live_device_s, abs=1e-6)
        assert min(run.lost_device_s.values()) >= -1e-9
        assert 0 < run.samples <= 1.05 * run.oracle_samples
        assert run.losses > 0


def test_the_same_question_has_the_same_answer_to_the_byte() -> None:
    questions = [
        question(policy, memoryless(6, 20.0, 30.0, 200.0, seed), job=job_of(12))
        for policy in ("oobleck", "slipstream")
        for seed in (1, 2)
    ]
    first, again = run_all(questions, 1), run_all(questions[::-1], 1)[::-1]
    assert msgspec.json.encode(first) == msgspec.json.encode(again)


def test_processes_change_nothing() -> None:
    questions = [question(trace=memoryless(4, 20.0, 30.0, 60.0, seed)) for seed in (1, 2)]
    assert run_all(questions, 2) == run_all(questions, 1)


def test_a_job_that_cannot_begin() -> None:
    with pytest.raises(SimulationError, match="never began to train") as caught:
        simulate(question(trace=trace_of(3)))
    assert "f = 1 needs 2 copies" in caught.value.problem
    with pytest.raises(SimulationError, match="memory"):
        simulate(
            question(
                job=msgspec.structs.replace(
                    job_of(), resources=job_of().resources.__class__(device_memory=50)
                )
            )
        )


def test_a_policy_that_cannot_run_keeps_no_other_from_it() -> None:
    questions = [
        question(policy, memoryless(4, 20.0, 30.0, 60.0, seed), seed=seed)
        for policy in ("bamboo", "oobleck")
        for seed in (1, 2)
    ]
    for num_jobs in (1, 2):
        runs, unable = apart(run_all(questions, num_jobs))
        assert [(run.policy, run.seed) for run in runs] == [("oobleck", 1), ("oobleck", 2)]
        assert [(each.policy, each.seed) for each in unable] == [("bamboo", 1)]
        assert "f = 1 needs 2 copies of every layer: 8 nodes, and 4 are here" in unable[0].problem


def test_means_are_of_all_seeds_or_of_none() -> None:
    begins, never = question(seed=1), question(trace=trace_of(3), seed=2)
    runs, unable = apart(run_all([begins, never], 1))
    assert runs == ()
    assert [each.seed for each in unable] == [2]


def test_nodes_say_the_zones_of_the_trace() -> None:
    """Two rings of four, east and west in turn; of two nodes that stand by that takes the place which is in
    the zone of who is gone.
    """
    zones = {f"node-{number}": "east" if number in {1, 2, 3, 4, 9} else "west" for number in range(1, 11)}
    stand_by = TraceEvent(2.0, "join", "node-9"), TraceEvent(2.0, "join", "node-10")
    for victim, follows in (("node-1", "node-9"), ("node-5", "node-10")):
        trace = trace_of(8, *stand_by, TraceEvent(10.0, "fail", victim))
        trace = msgspec.structs.replace(trace, zones=zones)
        world = World(question("bamboo", trace, job=job_of(max_nodes=8)))
        run = world.run()
        assert Action("take-place", (follows,), (victim,)) in run.decisions[-1].actions
        core = world.machine.core
        assert {name: node.zone for name, node in core.members.nodes.items()} == zones
        assert core.run is not None
        assert core.run.job.plan is not None
        for pipeline in core.run.job.plan.pipelines:
            placed = [zones[node] for node in pipeline.nodes]
            assert all(one != other for one, other in zip(placed, [*placed[1:], placed[0]], strict=True))


def test_a_hundred_thousand_events_a_minute() -> None:
    """A bound that a busy machine meets too: the core hears of a thousand events in well under a second."""
    trace = memoryless(32, 30.0, 60.0, 3600.0, seed=0)
    began = time.process_time()
    run = simulate(question("oobleck", trace, job=job_of(128)))
    took_s = time.process_time() - began
    assert run.events / took_s * 60 > 100_000


@pytest.mark.parametrize(("exact", "times"), [(True, 2), (False, 1)])
def test_what_a_step_takes_besides_its_timeline(exact: bool, times: int) -> None:
    """20 ms of every step; and each device sends the sums of its two layers of 30 bytes, twice that where
    they are exact, to the one other holder.

    After the loss the mended step ends so much later, too, and one pipeline is left, with nobody to send
    anything to.
    """
    job = job_of()
    job = msgspec.structs.replace(job, train=msgspec.structs.replace(job.train, exact=exact))
    costs = msgspec.structs.replace(FREE, commit_s=0.02, sums_bytes_per_s=6000.0)
    longer_s = 0.02 + times * 2 * 30 / 6000.0
    calm = simulate(question(job=job, costs=costs))
    assert calm.steps == int((20.0 - BATCH_S) / (STEP_S + longer_s))
    assert booked(calm) == pytest.approx(80.0, abs=1e-9)
    run = simulate(question("oobleck", trace_of(4, TraceEvent(10.0, "fail", "node-2")), job=job, costs=costs))
    mended = next(point for point in run.points if point.at_s > 10.0)
    assert (
        10.0 + longer_s < mended.at_s <= 10.0 + 0.24 + longer_s
    )  # no more than all that the dead had done, by one device
    first, last = run.points[-2:]
    assert (last.at_s - first.at_s) / (last.samples - first.samples) * 4 == pytest.approx(
        AFTER_S["oobleck"] + 0.02
    )


def linked(job: Job, link: int) -> Job:
    return msgspec.structs.replace(job, resources=msgspec.structs.replace(job.resources, link=link))


def test_more_pipelines_lose_because_of_the_exchange() -> None:
    """Eight nodes, each of which has room for the model. With nothing known of the link eight pipelines are
    best, asked for (f = 7) or not. Over 1 kB/s a layer of 30 bytes takes 127.5 ms among eight, of which 20
    hide under each layer below. Among four pipelines of two it takes 105, and the two of the first stage show
    190; a micro-batch takes 61 ms a stage there, with its sends.
    """
    few, many = (job_of(16, f=f, limit_bytes=0) for f in (1, 7))
    trace = trace_of(8)
    free = [simulate(question("oobleck", trace, job=job)) for job in (few, many)]
    assert free[0].samples == free[1].samples
    slow = [simulate(question("oobleck", trace, job=linked(job, 1000))) for job in (few, many)]
    steps_s = [run.decisions[0].step_s for run in slow]
    assert steps_s[1] == pytest.approx(2 * 0.12 + 4 * 0.1275 - 0.06)
    assert steps_s[0] == pytest.approx(5 * 0.061 + 2 * 0.105 - 0.02)
    for run, step_s in zip(slow, steps_s, strict=True):
        assert run.steps == int((20.0 - BATCH_S) / step_s)
    # The oracle knows it as well: what follows from a plan is no loss of time to it.
    assert slow[0].useful_device_s == pytest.approx(8 * steps_s[0] * slow[0].steps)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_loss_with_a_link_that_is_known(policy: str) -> None:
    events = (TraceEvent(10.0, "fail", "node-2"), TraceEvent(14.0, "join", "node-2"))
    job = linked(job_of(limit_bytes=0 if policy in WITH_REDUNDANT_LAYERS else 250), 10_000)
    run = simulate(question(policy, trace_of(4, *events), job=job))
    assert run.losses == 1
    assert run.decisions[0].step_s == pytest.approx(run.decisions[-1].step_s)
    assert booked(run) == pytest.approx(run.live_device_s, abs=1e-6)


def test_a_loss_in_the_exchange_comes_after_all_passes() -> None:
    """A third of a step is the exchange. Who dies in it has done all passes, and so have the others: the
    other holder of its stage does both micro-batches of that again, in 120 ms, and the exchange of 100
    follows.
    """
    job = linked(job_of(), 1000)
    step_s = simulate(question(job=job)).decisions[0].step_s
    assert step_s == pytest.approx(STEP_S + 0.003 + 0.1)  # with three sends of a byte that nobody hides
    dies_at = BATCH_S + 20.8 * step_s
    run = simulate(question("oobleck", trace_of(4, TraceEvent(dies_at, "fail", "node-2")), job=job))
    mended = next(point for point in run.points if point.at_s > dies_at)
    assert mended.at_s == pytest.approx(dies_at + 0.12 + 0.1)


def test_who_goes_on_alone_exchanges_with_nobody() -> None:
    """Going around a dead stage the one that is left of it has nobody to exchange its layers with, and the
    two holders of the others do so under its backward.
    """
    world = World(
        question("slipstream", trace_of(4, TraceEvent(10.0, "fail", "node-2")), job=linked(job_of(), 1000))
    )
    run = world.run()
    job = next(iter(world.machine.core.state.jobs.values()))
    assert job.setup is not None
    assert world.training.layout is not None
    layout, dead = world.training.layout, world.training.machine.dead
    assert {node_of(device) for device in dead} == {"node-2"}
    # Two holders of the first two layers, of 60 ms each, 20 of which hide.
    assert world.steps.exchange_s(job.setup, layout, dead) == pytest.approx(0.1)
    assert world.besides_s() == pytest.approx(0.1)
    assert run.losses == 1


@pytest.mark.parametrize("begin_s", [0.05, 1.5])
def test_all_wait_for_what_a_process_that_has_just_started_did_not_load_before_the_stop(
    begin_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    told_at: dict[type, list[float]] = {PreCopy: [], Deploy: []}
    tell = World._tell

    def noted(world: World, node: str, message: ToWorker) -> None:
        if isinstance(message, PreCopy | Deploy) and message.device == "node-2/0":
            told_at[type(message)].append(world.clock.now)
        tell(world, node, message)

    events = (TraceEvent(10.0, "fail", "node-2"), TraceEvent(12.0, "join", "node-2"))
    slow = msgspec.structs.replace(FREE, begin_s=begin_s)
    quick = simulate(question("oobleck", trace_of(4, *events)))
    monkeypatch.setattr(World, "_tell", noted)
    run = simulate(question("oobleck", trace_of(4, *events), costs=slow))
    (preload,), (_, joined) = told_at[PreCopy], told_at[Deploy]
    assert 0.05 < joined - preload < 1.5
    left_s = max(0.0, begin_s - (joined - preload))
    # The first plan, and that with the one that is back.
    waited_s = run.lost_device_s["reconfigure"] - quick.lost_device_s["reconfigure"]
    assert waited_s == pytest.approx(4 * begin_s + 4 * left_s)
    assert quick.plans == run.plans == 3
