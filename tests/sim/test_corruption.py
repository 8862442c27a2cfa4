"""Silent data corruption in whole worlds: found, named, quarantined, and the job ends as if nothing had been
(docs/corruption.md).
"""

from __future__ import annotations

import pytest

from oobleckd.core import view
from oobleckd.core.entries import CorruptionFound, CorruptionSettled, LayoutDeployed, RolledBack
from oobleckd.protocol.changes import DevicesDiffer, JobWentBack, NodeQuarantined
from oobleckd.protocol.jobschedule import Schedule
from oobleckd.protocol.requests import Drain
from tests.helpers.simjobs import make_job
from tests.helpers.world import World

MANNERS = [Schedule(), Schedule(backward="decoupled"), Schedule(update="staggered")]


SAME, OTHER = "1f8a02bb90c4d7e1 of 5b1c9d02", "77d0a3c94e215f08 of 5b1c9d02"


def running(
    seed: int = 0,
    num_nodes: int = 6,
    step: int = 6,
    rounds_apart: dict[str, str] | None = None,
    canaries: dict[str, str] | None = None,
    **spec,
) -> World:
    """A job of two copies (six nodes, pipelines of three) that has committed a few steps; a checkpoint every
    4.
    """
    world = World(seed, num_nodes, rounds_apart=rounds_apart)
    world.canaries = canaries or {}
    world.run_for(3.0)
    world.submit(
        make_job(
            **{
                "steps": 20,
                "memory": 600 if spec.get("policy") == "bamboo" else 300,
                "every": 4,
                "min_pipeline_nodes": 3,
            }
            | spec
        )
    )
    world.until_step(step)
    return world


def of_kind(world: World, kind: type) -> list:
    return [entry for entry in world.daemon.disk.entries() if isinstance(entry, kind)]


def flip(world: World, device: str) -> None:
    """A bit of what ``device`` holds changes."""
    store = world.device(device).executor.store
    store.flipped.add(min(store.buckets))


def finish(world: World) -> None:
    world.until_state("done", limit_s=200.0)
    world.check_done()


def quarantined(world: World) -> list[str]:
    return sorted(world.machine.core.state.quarantined)


@pytest.mark.thin(6)
@pytest.mark.parametrize("schedule", MANNERS)
@pytest.mark.parametrize("seed", range(4))
def test_with_three_copies_the_majority_names_it_at_once(seed: int, schedule: Schedule) -> None:
    world = running(seed, 9, f=2, schedule=schedule)
    victim = "n05/0"
    flip(world, victim)
    world.run(lambda: of_kind(world, CorruptionFound))
    (found,) = of_kind(world, CorruptionFound)
    assert found.named == (victim,)
    assert quarantined(world) == ["n05"]
    finish(world)
    (back,) = of_kind(world, RolledBack)
    assert back.counters.step in {0, 4, 8}
    assert back.counters.step < found.step
    assert of_kind(world, CorruptionSettled) == []
    assert "n05" not in world.job().plan.nodes()
    assert {odd.what for odd in found.odds} == {"state"}
    assert [went.cause for went in world.told(JobWentBack)] == ["corruption"]
    (incident,) = world.incidents()
    assert (incident.nodes, incident.step) == (("n05",), found.step + 1)
    assert incident.steps_lost == world.job().steps_lost > 0


@pytest.mark.thin(6)
@pytest.mark.parametrize("policy", ["oobleck", "slipstream", "adaptive", "bamboo", "varuna"])
@pytest.mark.parametrize("seed", range(4))
def test_with_two_copies_computing_it_again_names_it(seed: int, policy: str) -> None:
    world = running(seed, policy=policy, num_nodes=7)
    victim = sorted(world.job().layout.holdings)[seed % 5]
    flip(world, victim)
    world.run(lambda: of_kind(world, CorruptionFound))
    (found,) = of_kind(world, CorruptionFound)
    if not found.named:  # a layer may have a third holder
        assert quarantined(world) == []
        world.run(lambda: of_kind(world, CorruptionSettled))
        (settled,) = of_kind(world, CorruptionSettled)
        assert settled.named == (victim,)
    assert quarantined(world) == [victim.partition("/")[0]]
    finish(world)
    assert world.job().disputes == ()


@pytest.mark.parametrize("seed", range(4))
def test_a_total_that_comes_out_wrong_is_found_in_the_same_round(seed: int) -> None:
    world = running(seed)
    device = world.device("n02/0")
    device.executor.store.misadded.add(min(device.executor.store.buckets))
    world.run(lambda: of_kind(world, CorruptionSettled))
    (found,), (settled,) = of_kind(world, CorruptionFound), of_kind(world, CorruptionSettled)
    assert {odd.what for odd in found.odds} == {"means"}
    assert settled.named == ("n02/0",)
    finish(world)
    assert quarantined(world) == ["n02"]


@pytest.mark.parametrize("seed", range(4))
def test_a_sum_that_changes_in_memory_is_found_by_its_own_device(seed: int) -> None:
    world = running(seed)
    reducer = world.device("n02/0").executor.reducer
    next(iter(reducer.parts.values())).flipped = True
    world.run(lambda: of_kind(world, CorruptionFound))
    (found,) = of_kind(world, CorruptionFound)
    assert (found.named, found.odds) == (("n02/0",), ())
    finish(world)
    assert quarantined(world) == ["n02"]


def test_the_newest_checkpoint_is_not_trusted_if_it_may_have_the_wrong_bits() -> None:
    """Compared in every tenth step, found in step 20: the checkpoint of step 16 may have them, that of step
    12 too.
    """
    world = running(check_every=10, steps=40, step=17)
    flip(world, "n02/0")
    world.run(lambda: of_kind(world, RolledBack))
    (found,), (back,) = of_kind(world, CorruptionFound), of_kind(world, RolledBack)
    assert found.step == 20
    assert back.counters.step <= 10
    assert world.job().checkpoint in {"", back.source}
    finish(world)


def test_the_last_state_is_compared_although_no_vote_follows() -> None:
    world = running(step=18)
    flipped = []

    def strikes(device, point, round_) -> bool:
        if point == "updated" and device.name == "n02/0" and device.counters.step == 20 and not flipped:
            device.executor.store.flipped.add(min(device.executor.store.buckets))
            flipped.append(round_)
        return False

    world.strikes = strikes
    finish(world)
    assert flipped
    (found,) = of_kind(world, CorruptionFound)
    assert found.step == 20
    assert world.job().steps_lost > 0


def test_without_checks_nobody_looks() -> None:
    world = running(check_every=0)
    flip(world, "n02/0")
    finish(world)
    assert of_kind(world, CorruptionFound) == []


@pytest.mark.parametrize("seed", range(3))
def test_devices_that_come_to_other_bits_and_say_so_are_not_corrupt(seed: int) -> None:
    world = running(seed, rounds_apart={"n02/0": "another torch"})
    finish(world)
    assert of_kind(world, CorruptionFound) == []


def test_one_that_says_nothing_is_found() -> None:
    world = running(step=0, rounds_apart={"n02/0": ""})
    world.run(lambda: of_kind(world, CorruptionFound))
    assert of_kind(world, CorruptionFound)[0].odds


def test_nothing_is_compared_from_when_another_kind_joins() -> None:
    """Nor is anything told of by those who were there before."""
    world = running(num_nodes=7, steps=60, step=4)
    world.kill("n02")
    world.run_for(1.0)
    world.rounds_apart["n02/0"] = "another torch"
    world.add("n02")
    finish(world)
    assert of_kind(world, CorruptionFound) == []
    assert "n02/0" in world.job().layout.holdings


@pytest.mark.parametrize("seed", range(6))
def test_a_daemon_that_restarts_in_the_middle_still_settles_it(seed: int) -> None:
    world = running(seed)
    flip(world, "n02/0")
    world.run(lambda: of_kind(world, CorruptionFound))
    world.daemon.stop()
    world.run_for(0.2 + 0.1 * seed)
    world.daemon.start()
    finish(world)
    assert quarantined(world) == ["n02"]


@pytest.mark.parametrize("seed", range(8))
def test_whoever_dies_right_after_is_no_excuse(seed: int) -> None:
    """The device with the wrong bit, or another one, is killed within the round: what it gave is in nobody's
    weights in the end.
    """
    world = running(seed, 7)
    flip(world, "n02/0")
    world.run_for(0.001 * seed)
    world.kill("n02" if seed % 2 else "n03")
    finish(world)


def test_a_quarantined_node_comes_back_when_an_operator_says_so() -> None:
    world = running(0, 9, f=2, steps=60)
    flip(world, "n05/0")
    world.run(lambda: quarantined(world))
    world.until_state("running")
    said = world.told(NodeQuarantined)
    assert [(each.node, each.device, each.evidence) for each in said] == [("n05", "n05/0", "outvoted")]
    world.ask(Drain("n05", "memory replaced", undo=True, who="tester"))
    finish(world)
    assert "n05" in world.job().plan.nodes()


def told_of_differences(world: World) -> list:
    return [change for change in view.changes(world.machine.core) if isinstance(change.data, DevicesDiffer)]


def test_people_hear_once_who_differs_and_in_what() -> None:
    world = running(rounds_apart={"n02/0": "another torch"})
    (found,) = world.view().differences
    assert (found.devices, found.usual) == (("n02/0",), "n01/0")
    finish(world)
    (told,) = told_of_differences(world)
    assert told.level == "warn"
    assert told.data.differences == (found,)
    assert found.traits == {"device": ("cpu, another torch", "cpu")}
    assert told.story == ("job:job-1", "node:n02")
    assert world.view().differences == ()  # it is done; what trained it stays known
    assert world.view().kinds == ({"device": "cpu"}, {"device": "cpu, another torch"})
    world.daemon.stop()
    world.daemon.start()
    assert len(world.view().kinds) == 2


def test_one_of_another_kind_that_stands_by_does_not_keep_others_from_being_compared() -> None:
    world = World(0, 7, rounds_apart={"n07/0": "another torch"})
    world.run_for(3.0)
    world.submit(make_job(steps=20, memory=300, every=4, min_pipeline_nodes=3, max_nodes=6))
    world.until_step(6)
    assert "n07/0" not in world.job().layout.holdings
    assert told_of_differences(world) == []
    flip(world, "n02/0")
    world.run(lambda: of_kind(world, CorruptionFound))


def singing(num_nodes: int = 6, **others: str) -> dict[str, str]:
    """What devices come to, all the same but ``others``, by node."""
    return {f"n{number:02}/0": others.get(f"n{number:02}", SAME) for number in range(1, num_nodes + 1)}


def plans(world: World) -> int:
    return len(of_kind(world, LayoutDeployed))


@pytest.mark.parametrize("seed", range(3))
def test_one_whose_canary_is_another_is_told_apart_and_not_corrupt(seed: int) -> None:
    """Although all that it says of its versions is the same."""
    world = running(seed, rounds_apart={"n02/0": ""}, canaries=singing(n02=OTHER))
    assert plans(world) == 1  # the one that would have compared never came into force
    (found,) = world.view().differences
    assert (found.devices, found.traits) == (("n02/0",), {"canary": (OTHER, SAME)})
    finish(world)
    assert of_kind(world, CorruptionFound) == []
    assert len(told_of_differences(world)) == 1


def test_devices_of_other_versions_with_one_canary_are_compared() -> None:
    world = World(0, 6)
    world.canaries = singing()
    world.says_apart = {"n02/0": "another torch"}
    world.run_for(3.0)
    world.submit(make_job(steps=20, memory=300, every=4, min_pipeline_nodes=3))
    world.until_step(6)
    assert (world.view().differences, told_of_differences(world)) == ((), [])
    flip(world, "n02/0")
    world.run(lambda: of_kind(world, CorruptionFound))
    assert of_kind(world, CorruptionFound)


def test_a_daemon_that_begins_anew_hears_the_canaries_in_hellos() -> None:
    world = running(steps=60, rounds_apart={"n02/0": ""}, canaries=singing(n02=OTHER))
    world.daemon.stop()
    world.daemon.start()
    world.run_for(2.0)
    assert [found.devices for found in world.view().differences] == [("n02/0",)]
    world.kill("n05")
    finish(world)
    assert of_kind(world, CorruptionFound) == []
    assert plans(world) == 2  # at the second everybody's was known


def test_one_that_joins_with_another_canary_ends_comparing() -> None:
    world = running(num_nodes=7, steps=60, step=4, canaries=singing(7))
    world.kill("n02")
    world.run_for(1.0)
    world.rounds_apart["n02/0"] = ""
    world.canaries["n02/0"] = OTHER
    world.add("n02")
    finish(world)
    assert of_kind(world, CorruptionFound) == []
    assert world.job().kinds == [{"device": "cpu", "canary": said} for said in (SAME, OTHER)]


def test_canaries_of_another_job_say_nothing_of_this_one() -> None:
    """One that has had no canary, as a layer was too large, beside those that have: versions decide."""
    old = OTHER.replace("5b1c9d02", "00000000")
    world = running(canaries=singing(n02=old, n03=""))
    assert world.view().differences == ()
    flip(world, "n02/0")
    world.run(lambda: of_kind(world, CorruptionFound))
    assert of_kind(world, CorruptionFound)
