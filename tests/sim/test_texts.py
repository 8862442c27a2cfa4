"""Texts that are replaced, written to in place, gone and back, in whole worlds: the job ends with the losses
of the right text, or not at all.
"""

from __future__ import annotations

import msgspec
import pytest

from oobleckd.core.entries import CheckpointChecked, InputsFixed, RolledBack
from oobleckd.core.inputs import PATIENCE_S, trusted
from oobleckd.planner.plan import node_of
from oobleckd.protocol.changes import FileMoved, NodeKeptOut, NodeLetIn
from oobleckd.protocol.jobschedule import Schedule
from oobleckd.protocol.requests import Drain, Submit
from tests.helpers.simjobs import make_job
from tests.helpers.simtext import PATH, RIGHT, WRONG, SimCorpus, identity
from tests.helpers.world import World

POLICIES = ["oobleck", "slipstream", "bamboo", "varuna", "adaptive"]
FOREVER = 100_000


def begun(seed: int = 0, num_nodes: int = 4, step: int = 6, **spec) -> World:
    """A job that has committed a few steps, with a checkpoint every 4."""
    world = World(seed, num_nodes)
    world.run_for(3.0)
    memory = 1200 if spec.get("policy") == "bamboo" else 350
    world.submit(make_job(**{"steps": 30, "memory": memory, "every": 4} | spec))
    world.until_step(step)
    return world


def of_kind(world: World, kind: type) -> list:
    return [entry for entry in world.daemon.disk.entries() if isinstance(entry, kind)]


def kept_out(world: World) -> list[str]:
    run = world.machine.core.run
    return sorted(run.kept_out) if run is not None else []


def told_of(world: World) -> list[str]:
    """Of which nodes it was said that they are kept out."""
    return [said.node for said in world.told(NodeKeptOut)]


def finish(world: World) -> None:
    world.until_state("done", limit_s=200.0)
    world.check_done()
    assert world.job().kept[-1].checked


def until_failed(world: World) -> None:
    world.until_state("failed", limit_s=200.0)
    job = world.job()
    assert job.cause == "data-changed"
    assert all(kept.checked for kept in job.kept)


# ---------------------------------------------------------------------- replaced


@pytest.mark.thin(8)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_a_node_that_comes_back_with_another_text_is_kept_out(seed: int, policy: str) -> None:
    world = begun(seed, 6, policy=policy, steps=40)
    world.texts.put(WRONG)
    victim = sorted(world.job().surviving_nodes())[1]
    world.kill(victim)
    world.run_for(0.3)
    world.add(victim)
    world.run(lambda: kept_out(world) == [victim] or world.state() == "done")
    finish(world)
    if policy != "varuna":  # which needs its survivors alone, and was through before it was asked
        assert victim in told_of(world)
    assert world.told(FileMoved) == [FileMoved("job-1", PATH, "other")]
    assert victim not in world.job().surviving_nodes()


@pytest.mark.parametrize("gone", [False, True])
def test_it_may_be_used_again_once_the_text_is_back(*, gone: bool) -> None:
    world = begun(1, 4, policy="oobleck", steps=60)
    right = world.texts.at("n02")
    world.texts.remove() if gone else world.texts.put(WRONG)
    world.kill("n02")
    world.run_for(0.3)
    world.add("n02")
    world.run(lambda: kept_out(world) == ["n02"])
    assert (world.node("n02").kept_out, world.node("n02").cause) == ("data-changed", "data-changed")
    world.texts.put_back(right)
    world.run(lambda: not kept_out(world))
    assert NodeLetIn("n02", "job-1") in world.told(NodeLetIn)
    finish(world)
    assert "n02" in world.job().plan.nodes()


def test_the_same_text_in_another_file_is_the_same_text() -> None:
    world = begun(steps=60)
    world.texts.put(RIGHT)
    world.kill("n02")
    world.run_for(0.3)
    world.add("n02")
    finish(world)
    assert "n02" in world.job().plan.nodes()
    assert not world.told(FileMoved)


def test_one_that_is_kept_out_does_not_disturb_the_others_again_and_again() -> None:
    world = begun(steps=150, policy="oobleck")
    world.texts.put(WRONG)
    world.kill("n02")
    world.run_for(0.3)
    world.add("n02")
    world.run(lambda: kept_out(world) == ["n02"])
    world.until_state("running")
    epoch = world.job().epoch
    world.until_step(world.job().counters.step + 20)
    assert world.job().epoch == epoch
    assert told_of(world) == ["n02"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_rollback_reads_what_is_still_open(policy: str) -> None:
    """All holders of a layer die while another text lies there: those who live have the right one open, and
    too few are left until it is back.
    """
    world = begun(1, 4, policy=policy, steps=40)
    right = world.texts.at("n01")
    world.texts.put(WRONG)
    first, *others = sorted(world.job().surviving_nodes())
    for name in others:
        world.kill(name)
    world.run_for(0.2)
    for name in others:
        world.add(name)
    world.run(lambda: kept_out(world) == others, limit_s=20.0)
    world.texts.put_back(right)
    finish(world)
    assert first in world.job().plan.nodes()


def test_after_a_loss_of_all_nobody_has_it_any_more() -> None:
    world = begun(steps=60)
    world.run(lambda: bool(world.job().kept) and world.job().kept[-1].checked)
    world.texts.put(WRONG)
    good = world.job().checkpoint
    for name in ("n01", "n02", "n03", "n04"):
        world.kill(name)
    world.run_for(0.2)
    for name in ("n01", "n02", "n03", "n04"):
        world.add(name)
    world.until_state("waiting")
    world.run(lambda: len(kept_out(world)) == 4)
    assert world.job().cause == "too-few-nodes"
    at = world.now
    until_failed(world)
    assert at + PATIENCE_S - 5 <= world.now <= at + PATIENCE_S + 5
    assert trusted(world.job()).directory == good
    assert world.job().steps_lost > 0


# ---------------------------------------------------------------------- written in place


@pytest.mark.thin(8)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shows", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_written_in_place_on_one_node(seed: int, policy: str, *, shows: bool) -> None:
    """Found by its times within a second, or by its bytes after the next checkpoint: what was given since is
    given back.
    """
    world = begun(seed, 6, policy=policy, steps=50)
    victim = sorted(world.job().surviving_nodes())[seed]
    world.texts.put(RIGHT, [victim])  # a file of its own
    world.kill(victim)
    world.run_for(0.2)
    world.add(victim)
    world.until_step(20)
    world.run(lambda: victim in world.job().surviving_nodes() or world.state() == "done")
    if world.state() == "done":
        return
    world.texts.write(WRONG, [victim], shows=shows)
    finish(world)
    assert kept_out(world) == []
    assert victim in told_of(world)
    assert victim not in world.job().surviving_nodes()
    changes = [
        incident
        for incident in world.incidents()
        if incident.parts.rollback is not None and incident.parts.rollback.cause == "data-changed"
    ]
    assert len(changes) == 1
    assert changes[0].steps_lost <= world.job().steps_lost


@pytest.mark.thin(6)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shows", [True, False])
@pytest.mark.parametrize("large", [True, False])
def test_written_in_place_under_all(policy: str, *, shows: bool, large: bool) -> None:
    world = World(3, 4)
    world.texts.large = large
    world.run_for(3.0)
    memory = 1200 if policy == "bamboo" else 350
    world.submit(make_job(steps=FOREVER, memory=memory, every=4, policy=policy))
    world.run(lambda: any(kept.checked for kept in world.job().kept))
    world.texts.write(WRONG, shows=shows)
    until_failed(world)
    assert {told.cause for told in world.told(NodeKeptOut)} == {"data-changed"}
    assert len(world.incidents()) == 1
    assert world.incidents()[0].steps_lost == world.job().steps_lost > 0
    assert world.job().kept[-1].directory in world.complete
    for step in world.job().steps:
        assert step.loss < 100
    newest = max(world.complete, key=lambda name: int(name.rpartition("-")[2]))
    assert newest == world.job().checkpoint, "what may be wrong is named so"


def test_put_back_in_time_it_goes_on() -> None:
    world = begun(2, steps=200)
    world.texts.write(WRONG)
    world.until_state("waiting")
    world.run_for(5.0)
    world.texts.write(RIGHT)
    finish(world)
    assert world.job().steps_lost > 0


def test_a_touch_is_nothing() -> None:
    world = begun(steps=40)
    world.texts.write(RIGHT)
    finish(world)
    assert world.job().steps_lost == 0
    assert world.incidents() == []


@pytest.mark.thin(8)
@pytest.mark.parametrize("seed", range(6))
def test_the_last_checkpoint_counts_only_when_it_was_checked(seed: int) -> None:
    """The text changes in the last steps; nothing shows but its bytes."""
    world = begun(seed, step=24 + seed)
    world.texts.write(WRONG, shows=False)
    until_failed(world)


@pytest.mark.thin(8)
@pytest.mark.parametrize("update", ["flushed", "staggered"])
@pytest.mark.parametrize("seed", range(3))
def test_all_die_right_after(seed: int, update: str) -> None:
    """Nobody can say any more that the newest checkpoint is good: the rollback leads to one that was checked.
    The text is back before they are.
    """
    world = begun(seed, steps=60, every=2, memory=1000, schedule=Schedule(update=update))
    world.texts.pass_s = (10.0, 10.0)
    world.run_for(0.1)  # what is under way is over
    world.texts.write(WRONG, shows=False)
    step = world.job().counters.step
    world.run(lambda: bool(world.job().kept) and world.job().kept[-1].counters.step >= step + 4)
    for name in ("n01", "n02", "n03", "n04"):
        world.kill(name)
    world.texts.write(RIGHT)
    world.texts.pass_s = (0.001, 0.05)
    for name in ("n01", "n02", "n03", "n04"):
        world.add(name)
    finish(world)
    back = of_kind(world, RolledBack)[0]
    assert back.counters.step <= step


@pytest.mark.thin(8)
@pytest.mark.parametrize("seed", range(6))
def test_while_the_daemon_is_away(seed: int) -> None:
    world = begun(seed, steps=FOREVER)
    world.daemon.stop()
    world.texts.write(WRONG)
    world.run_for(0.4 * seed)
    world.daemon.start()
    until_failed(world)


@pytest.mark.thin(6)
@pytest.mark.parametrize("seed", range(4))
def test_while_a_node_dies(seed: int) -> None:
    world = begun(seed, 6, steps=FOREVER, policy="oobleck")
    world.texts.write(WRONG)
    world.run_for(0.1 * seed)
    world.kill("n02")
    until_failed(world)


# ---------------------------------------------------------------------- the first deployment


def submitted(different: dict[str, str | None], num_nodes: int = 6, **spec) -> World:
    world = World(0, num_nodes)
    world.run_for(3.0)
    for name, content in different.items():
        world.texts.remove([name]) if content is None else world.texts.put(content, [name])
    world.submit(make_job(**{"steps": 20, "memory": 350} | spec))
    return world


def test_the_majority_has_the_text() -> None:
    world = submitted({"n01": WRONG})
    finish(world)
    assert "n01" not in world.job().plan.nodes()
    (fixed,) = of_kind(world, InputsFixed)
    assert fixed.inputs == (msgspec.structs.replace(identity(RIGHT), tokens=SimCorpus.num_tokens),)


def test_one_against_one_is_nobody() -> None:
    world = submitted({"n01": WRONG}, num_nodes=2, memory=0)
    world.until_state("failed")
    job = world.job()
    assert job.cause == "data-changed"
    assert job.deployed_at is None


@pytest.mark.parametrize("without", [["n01"], ["n02"], ["n01", "n03"]])
def test_whoever_has_none_is_kept_out(without: list[str]) -> None:
    world = submitted(dict.fromkeys(without))
    finish(world)
    assert not set(without) & set(world.job().plan.nodes())
    assert set(told_of(world)) >= set(without)
    assert all(PATH in told.why for told in world.told(NodeKeptOut))


def test_nobody_has_one() -> None:
    world = submitted(dict.fromkeys(["n01", "n02", "n03", "n04"]), num_nodes=4)
    world.until_state("failed", limit_s=5.0)
    assert world.job().cause == "data-unreadable"


def test_a_large_text_that_differs_where_nobody_looked() -> None:
    """The blocks are the same, the whole is not: known once all of it was read, and given back to
    the start.
    """
    world = World(0, 4)
    world.texts.large, world.texts.pass_s = True, (1.0, 1.2)
    world.run_for(3.0)
    world.texts.put("right~", ["n03"])
    world.texts.written = True  # its losses are wrong until it is found
    world.submit(make_job(steps=100, memory=350, every=4))
    finish(world)
    assert "n03" not in world.job().plan.nodes()
    assert of_kind(world, RolledBack)[0].source == "init"
    assert [entry.inputs[0].whole for entry in of_kind(world, InputsFixed)] == ["", "100-right"]


# ---------------------------------------------------------------------- resumed, drained, restarted


def resumed(world: World, **spec) -> None:
    world.ask(Submit(make_job(**{"steps": 40, "memory": 350, "every": 4} | spec), "latest", "tester"))


def test_a_resumed_job_reads_what_its_checkpoint_was_made_from() -> None:
    world = begun(steps=10)
    finish(world)
    world.texts.put(WRONG)
    resumed(world)
    world.run(lambda: world.job("job-2").state == "failed", limit_s=10.0)
    job = world.job("job-2")
    assert job.cause == "data-changed"
    assert trusted(job).directory == world.job("job-1").checkpoint


def test_a_resumed_job_whose_text_is_as_it_was() -> None:
    world = begun(steps=10)
    finish(world)
    resumed(world)
    world.run(lambda: world.job("job-2").state == "done", limit_s=60.0)
    assert world.job("job-2").inputs == world.job("job-1").inputs


@pytest.mark.thin(6)
@pytest.mark.parametrize("seed", range(3))
def test_a_drained_node_has_its_text_read_once_more(seed: int) -> None:
    """It leaves with a wrong text that nobody saw: what it gave is given back all the same."""
    world = begun(seed, 6, steps=60, policy="oobleck")
    victim = min(world.job().surviving_nodes())
    world.texts.put(RIGHT, [victim])
    world.kill(victim)
    world.run_for(0.2)
    world.add(victim)
    world.run(lambda: victim in world.job().surviving_nodes())
    world.until_step(world.job().counters.step + 6)
    world.texts.write(WRONG, [victim], shows=False)
    world.ask(Drain(victim, "", who="tester"))
    world.run(lambda: victim not in world.job().surviving_nodes())
    finish(world)
    assert world.job().steps_lost > 0


def test_what_is_checked_is_in_the_journal() -> None:
    world = begun(steps=FOREVER)
    world.run(lambda: bool(world.job().kept) and world.job().kept[-1].checked)
    assert of_kind(world, CheckpointChecked)
    checked = [kept for kept in world.job().kept if kept.checked]
    world.daemon.stop()
    world.daemon.start()
    assert [kept for kept in world.job().kept if kept.checked] == checked
    assert {node_of(device) for device in world.job().incarnations} == world.job().surviving_nodes()
