"""A job whose data is to be prepared first: whatever dies meanwhile, it is, and no piece is made twice."""

from __future__ import annotations

import random

import msgspec
import pytest

from oobleckd.core.entries import JobSubmitted
from oobleckd.core.events import Heard
from oobleckd.protocol.changes import PreparingBegan, PreparingEnded
from oobleckd.protocol.datamessages import PrepareDone, PrepareFailed
from oobleckd.protocol.jobparts import without_folders
from oobleckd.protocol.requests import Control, Drain
from tests.helpers.simjobs import UNPREPARED, make_job
from tests.helpers.simprepare import FOLDER
from tests.helpers.storm import Storm
from tests.helpers.world import World


def preparing(num_nodes: int = 4, seed: int = 1, *, blind: tuple[str, ...] = (), **spec) -> World:
    """A job whose data is just being prepared."""
    world = World(seed, num_nodes, lease_s=1.5, grace_s=2.0)
    world.folders.blind.update(blind)
    world.run_for(1.0)
    world.submit(make_job(**{"steps": 8, "f": 0, "memory": 350, "data": UNPREPARED} | spec))
    return world


def half_done(*args, **kwargs) -> World:
    world = preparing(*args, **kwargs)
    world.run(lambda: world.folders.pieces == 2)
    return world


def check_trained(world: World) -> None:
    """It is prepared once, and trained."""
    world.until_state("done")
    world.check_done()
    job = world.job()
    assert job.spec.data.prepared == FOLDER
    assert without_folders(job.spec) == submitted(world)
    assert [each.folders for each in world.told(PreparingEnded) if each.cause == "done"] == [(FOLDER,)]
    assert world.folders.at_work() == []


def submitted(world: World):
    (entry,) = [each for each in world.daemon.disk.entries() if isinstance(each, JobSubmitted)]
    return entry.spec


def test_one_node_prepares_and_then_all_train() -> None:
    world = preparing()
    assert world.state() == "preparing"
    world.run(lambda: world.folders.pieces == 2)
    world.run_for(0.1)
    far = world.view().preparing
    assert far is not None
    assert (far.node, far.phase, far.done_bytes, far.total_bytes) == ("n01", "tokenize", 2 << 20, 5 << 20)
    assert far.left_s == pytest.approx(3.0)
    assert "n01" in world.view().reason
    check_trained(world)
    assert world.view().preparing is None
    assert [each.node for each in world.told(PreparingBegan)] == ["n01"]


def test_what_is_prepared_already_is_trained_at_once() -> None:
    world = World(1, 4)
    world.run_for(1.0)
    world.submit(make_job(steps=3, f=0, data=msgspec.structs.replace(UNPREPARED, prepared=FOLDER)))
    world.until_state("done")
    assert world.told(PreparingBegan) == []


@pytest.mark.parametrize("silent", [False, True])
def test_the_node_dies_and_another_one_goes_on(silent: bool) -> None:
    world = half_done()
    world.kill("n01", silent=silent)
    check_trained(world)
    assert [each.node for each in world.told(PreparingBegan)] == ["n01", "n02"]
    assert world.told(PreparingEnded)[0].cause == "node-gone"


def test_its_agent_comes_back_at_once_and_goes_on() -> None:
    world = half_done()
    world.kill("n01")
    world.add("n01")
    check_trained(world)


@pytest.mark.parametrize("notice", [False, True])
def test_a_node_that_is_drained_or_about_to_end_passes_it_on(notice: bool) -> None:
    world = half_done()
    if notice:
        world.nodes["n01"].noticed("SIGTERM", 30.0)
    else:
        world.ask(Drain("n01"))
    world.run(lambda: world.folders.at_work() == ["n02"])
    check_trained(world)


def test_its_process_dies_and_another_node_goes_on() -> None:
    world = half_done()
    world.folders.kill()
    check_trained(world)
    assert [each.node for each in world.told(PreparingBegan)] == ["n01", "n02"]
    assert world.told(PreparingEnded)[0].cause == "died"


def test_with_one_node_it_is_begun_there_again() -> None:
    world = half_done(1, memory=0)
    world.folders.kill()
    check_trained(world)


def test_a_process_that_dies_again_and_again_fails_the_job() -> None:
    world = preparing()
    while world.state() == "preparing":
        world.run(lambda: bool(world.folders.at_work()) or world.state() == "failed")
        world.folders.kill()
        world.run_for(0.1)
    assert (world.state(), world.view().cause) == ("failed", "data-unprepared")
    assert world.folders.at_work() == []


@pytest.mark.parametrize("down_s", [0.1, 1.0, 5.0])
def test_the_daemon_restarts_and_nothing_is_begun_anew(down_s: float) -> None:
    """Also where all is done by then, which the agent says again."""
    world = half_done()
    world.daemon.restart(down_s)
    world.run(lambda: world.machine is None)
    world.run(lambda: world.machine is not None)
    check_trained(world)
    assert len(world.folders.processes) == 1


@pytest.mark.parametrize("gone_s", [0.0, 0.5])
def test_daemon_and_node_die_together(gone_s: float) -> None:
    world = half_done()
    world.daemon.restart(0.5)
    world.run_for(gone_s)
    world.kill("n01")
    check_trained(world)


def test_a_link_that_breaks_takes_nothing_along() -> None:
    world = half_done()
    world.network.break_link("n01")
    check_trained(world)
    assert len(world.folders.processes) == 1


def test_one_that_was_given_up_and_comes_back_is_told_to_stop() -> None:
    world = half_done()
    world.network.cut("n01", "", 6.0)
    world.network.cut("", "n01", 6.0)
    world.run(lambda: "n02" in world.folders.at_work())
    check_trained(world)
    world.run_for(15.0)
    assert world.folders.at_work() == []


def test_a_node_that_does_not_see_the_text_is_passed_over() -> None:
    world = preparing(blind=("n01", "n03"))
    check_trained(world)
    assert [each.node for each in world.told(PreparingBegan)] == ["n01", "n02"]
    assert world.told(PreparingEnded)[0].cause == "refused"


def test_where_no_node_sees_it_the_job_fails() -> None:
    world = preparing(blind=("n01", "n02", "n03", "n04"))
    world.until_state("failed")
    assert world.view().cause == "data-unprepared"
    assert world.folders.looks == 4


def test_one_that_sees_it_is_waited_for_where_no_other_does() -> None:
    world = preparing(blind=("n01", "n03", "n04"))
    world.run(lambda: world.folders.pieces == 2)
    world.kill("n02")
    world.run(lambda: world.view().cause == "nodes-not-ready")
    assert "n02" in world.view().reason
    world.run_for(5.0)
    assert world.state() == "preparing"
    world.add("n02")
    check_trained(world)


def test_what_is_wrong_with_the_text_fails_the_job_and_no_other_node_is_asked() -> None:
    world = preparing()
    world.folders.bad = True
    world.until_state("failed")
    assert world.view().cause == "data-unprepared"
    assert "/x.jsonl:3" in world.view().reason
    assert world.folders.looks == 1


def test_a_node_that_says_something_else_than_folders_fails_the_job() -> None:
    world = half_done()
    order = world.machine.core.run.preparation.order
    world.daemon.feed_now(Heard("n01", PrepareDone("job-1", (), order)))
    assert (world.state(), world.view().cause) == ("failed", "data-unprepared")


def test_a_late_word_of_an_order_before_counts_for_nothing() -> None:
    world = half_done()
    world.daemon.feed_now(Heard("n01", PrepareFailed("job-1", "late", begun=True, order="d0.0")))
    world.daemon.feed_now(Heard("n02", PrepareDone("job-1", ("/other",), "d0.0")))
    check_trained(world)


def test_an_agent_of_a_version_that_cannot_is_not_asked() -> None:
    world = World(1, 3)
    world.run_for(1.0)
    world.machine.core.members.nodes["n01"].prepares = False
    world.submit(make_job(steps=8, f=0, memory=350, data=UNPREPARED))
    check_trained(world)
    assert [each.node for each in world.told(PreparingBegan)] == ["n02"]


def test_without_a_node_it_waits_for_one() -> None:
    world = half_done(1, memory=0)
    assert world.node("n01").reason
    world.ask(Drain("n01"))
    world.run_for(1.0)
    assert (world.state(), world.view().cause) == ("preparing", "nodes-not-ready")
    assert world.folders.at_work() == []
    world.ask(Drain("n01", undo=True))
    check_trained(world)


def test_a_cancel_ends_it() -> None:
    world = half_done()
    world.ask(Control("job-1", "cancel"))
    assert world.state() == "cancelled"
    world.run_for(0.5)
    assert world.folders.at_work() == []
    assert world.folders.pieces < world.folders.num_pieces


def test_a_cancel_that_the_node_does_not_hear_is_said_when_it_is_back() -> None:
    world = preparing()
    world.folders.num_pieces = 1000
    world.run(lambda: world.folders.pieces == 2)
    world.network.break_link("n01")
    world.ask(Control("job-1", "cancel"))
    world.run(lambda: not world.folders.at_work(), limit_s=10.0)


def test_jobs_are_prepared_in_their_turn() -> None:
    world = World(1, 4)
    world.run_for(1.0)
    world.submit(make_job("one", steps=20, f=0))
    world.submit(make_job("two", steps=3, f=0, data=UNPREPARED))
    world.submit(make_job("three", steps=3, f=0, data=UNPREPARED))
    world.until_state("running", job_id="one-1")
    assert (world.state("two-2"), world.folders.looks) == ("queued", 0)
    world.until_state("done", job_id="one-1")
    world.until_state("done", job_id="two-2")
    assert world.state("three-3") in {"queued", "preparing"}
    world.until_state("done", job_id="three-3")
    assert {world.job(name).spec.data.prepared for name in ("two-2", "three-3")} == {FOLDER}


@pytest.mark.thin(20)
@pytest.mark.parametrize("seed", range(120))
def test_storm(seed: int) -> None:
    dice = random.Random(f"preparing {seed}")
    world = preparing(dice.randrange(2, 6), seed, steps=6)
    Storm(world, dice, 1).blow(dice.randrange(2, 14))
    for _ in range(dice.randrange(3)):
        world.at(world.now + dice.uniform(0, 3.0), world.folders.kill)
    world.run(lambda: world.state() in {"done", "failed"}, limit_s=120)
    world.check_done()
    assert world.folders.at_work() == []
