"""Steps that are skipped as spikes: the losses before them are known to all, whoever dies, joins, is away or
goes back to a checkpoint, so the same steps are skipped.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from oobleckd.protocol.changes import StepCommitted
from oobleckd.protocol.requests import Submit
from tests.helpers import simchecks, simpasses
from tests.helpers.simjobs import make_job
from tests.helpers.world import World

SPIKES = (9, 12, 13, 17)
"""Numbered from 0, as everywhere here."""
WINDOW, STEPS = 6, 22
plain_loss_of = simpasses.loss_of


def spiky(*steps: int) -> Any:
    return lambda step, mb: plain_loss_of(step, mb) * (30.0 if step in steps else 1.0)


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of ``SPIKES`` are spikes."""
    for module in (simpasses, simchecks):
        monkeypatch.setattr(module, "loss_of", spiky(*SPIKES))


def running(seed: int = 0, num_nodes: int = 6, *, train: dict[str, Any] | None = None, **more: Any) -> World:
    made = {"spikes": SPIKES} | {key: more.pop(key) for key in ("spikes", "clips", "nans") if key in more}
    world = World(seed, num_nodes, overflows=(13,), lease_s=1.5, grace_s=2.0, **made)
    world.run_for(1.0)
    job = make_job(**{"steps": STEPS, "f": 1, "memory": 350} | more)
    said = {"on_spike": "skip", "spike_window": WINDOW} | (train or {})
    world.submit(msgspec.structs.replace(job, train=msgspec.structs.replace(job.train, **said)))
    world.until_step(5)
    return world


def check_skipped(world: World) -> None:
    """It is done, and just these steps made no update."""
    world.until_state("done")
    world.check_done()
    job, view = world.job(), world.view()
    assert [step.step for step in job.steps if step.outcome == "skipped"] == list(SPIKES)
    assert {step.cause for step in job.steps if step.step in SPIKES} == {"loss-spike"}
    assert (view.steps_skipped, view.steps_spiked, view.skipped_in_row) == (len(SPIKES), len(SPIKES), 0)
    assert job.counters.recent == tuple(step.loss for step in job.steps[-WINDOW:])


@pytest.mark.parametrize("update", ["flushed", "staggered"])
def test_spikes_are_skipped_and_told(losses: None, update: str) -> None:
    world = running(schedule=msgspec.structs.replace(make_job().schedule, update=update))
    check_skipped(world)
    told = [change for change in world.daemon.changes if isinstance(change.data, StepCommitted)]
    spikes = [change for change in told if change.data.cause == "loss-spike"]
    assert [change.data.step - 1 for change in spikes] == list(SPIKES)
    assert {change.level for change in spikes} == {"warn"}


@pytest.mark.thin(6)
@pytest.mark.parametrize("seed", range(9))
def test_whoever_dies_meanwhile_the_same_are_skipped(losses: None, seed: int) -> None:
    world = running(seed)
    dice = world.random
    world.until_step(dice.randrange(8, 16))
    world.run_for(dice.uniform(0.0, 0.02))
    (world.kill, world.kill_device, world.spare_takes_place)[seed % 3](dice.choice(world.view().nodes))
    check_skipped(world)


def test_a_device_that_joins_knows_the_losses_before(losses: None) -> None:
    """It takes part from a step in which the window has a spike and losses from before it came."""
    world = running()
    world.until_step(10)
    world.kill(world.view().nodes[0])
    world.add("late")
    check_skipped(world)
    assert any("late" in device.name for device in world.devices())


def test_with_the_daemon_away_devices_skip_by_themselves(losses: None) -> None:
    world = running()
    world.daemon.stop()
    devices = [device for node in world.nodes.values() for device in node.devices.values()]
    world.run(lambda: all(device.counters.step > SPIKES[2] + 1 for device in devices))
    assert {device.counters.spiked for device in devices} <= {3, 4}
    world.daemon.start()
    check_skipped(world)


def test_a_rollback_goes_back_to_the_losses_of_its_checkpoint(losses: None) -> None:
    world = running(policy="varuna", every=4)
    world.until_step(15)
    world.kill(world.view().nodes[0])
    check_skipped(world)
    assert world.job().num_spiked > len(SPIKES)  # of both histories


def test_who_goes_on_from_a_checkpoint_knows_them_too(losses: None) -> None:
    """The first step behind it is a spike, by the losses of the job before."""
    world = running(every=12, steps=12, spikes=(9,))
    world.until_state("done")
    long = world.job().spec
    long = msgspec.structs.replace(long, train=msgspec.structs.replace(long.train, steps=STEPS))
    world.passed_over = SPIKES
    second = world.ask(Submit(long, resume="latest")).id
    world.until_state("done", job_id=second)
    job = world.job(second)
    assert [step.step for step in job.steps if step.outcome == "skipped"] == [12, 13, 17]
    assert (job.start.spiked, job.counters.spiked) == (1, 4)
    assert len(job.start.recent) == WINDOW


def test_three_in_a_row_end_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those before them, which are fewer."""
    steps = (10, 11, 14, 15, 16)
    for module in (simpasses, simchecks):
        monkeypatch.setattr(module, "loss_of", spiky(*steps))
    world = running(train={"on_spike": "stop", "spike_window": 9}, spikes=steps)
    world.until_state("failed")
    view = world.view()
    assert (view.cause, view.step, view.steps_spiked, view.skipped_in_row) == ("spikes", 17, 5, 3)


def test_a_gradient_norm_beyond_the_limit_is_a_spike() -> None:
    """No losses before it are needed, so the first step can be one."""
    clips = (6, 7, 8, 15)
    world = running(train={"spike_factor": 0.0, "spike_grad_norm": 100.0}, clips=clips, spikes=clips)
    world.until_state("done")
    world.check_done()
    skipped = [step for step in world.job().steps if step.outcome == "skipped"]
    assert [step.step for step in skipped] == list(clips)
    assert {step.cause for step in skipped} == {"grad-norm"}
    assert all(step.grad_norm > 999 for step in skipped)


def test_where_the_level_has_changed_for_good_the_median_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a window of 4: two are skipped, the third is less than twice the mean of both levels."""
    for module in (simpasses, simchecks):
        monkeypatch.setattr(module, "loss_of", spiky(*range(10, STEPS)))
    world = running(train={"spike_window": 4}, spikes=(10, 11))
    world.until_state("done")
    world.check_done()
    assert [step.step for step in world.job().steps if step.outcome == "skipped"] == [10, 11]


def test_nobody_looks_where_the_job_does_not_say(losses: None) -> None:
    world = running(train={"on_spike": "ignore", "spike_window": 32}, spikes=())
    world.until_state("done")
    world.check_done()
    assert (world.view().steps_skipped, world.job().counters.recent) == (0, ())
