"""Devices that are to join load the job before the stop, which is left for the copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from oobleckd.core.events import Tell
from oobleckd.protocol.messages import Deploy, PreCopy
from oobleckd.protocol.requests import Control, Drain
from tests.helpers.simdevice import SimDevice
from tests.helpers.simjobs import make_job, profile
from tests.helpers.world import World
from tests.sim.test_detours import until_closed


@dataclass
class Told:
    """Devices in the order in which they were told to preload, and to get ready; ``at_work``: how many
    devices trained when one was told to preload.
    """

    preloads: list[str] = field(default_factory=list)
    deploys: list[str] = field(default_factory=list)
    at_work: list[int] = field(default_factory=list)


def watched(world: World, monkeypatch: pytest.MonkeyPatch) -> Told:
    told, tell = Told(), world.network.tell

    def heard(command: Tell) -> None:
        message = command.message
        if isinstance(message, PreCopy) and message.preload:
            told.preloads.append(message.device)
            executors = (device.executor for device in world.devices())
            told.at_work.append(sum(each is not None and not each.holding for each in executors))
        elif isinstance(message, Deploy):
            told.deploys.append(message.device)
        tell(command)

    monkeypatch.setattr(world.network, "tell", heard)
    return told


def loads(monkeypatch: pytest.MonkeyPatch, told: Told | None = None) -> list[str]:
    """Devices that load the job, as they do it; with ``told`` those are marked that were deployed before."""
    begun: list[str] = []
    begin = SimDevice._begin_job

    def noted(device: SimDevice, *job: Any) -> Any:
        late = told is not None and device.name in told.deploys
        begun.append(f"{device.name}, late" if late else device.name)
        return begin(device, *job)

    monkeypatch.setattr(SimDevice, "_begin_job", noted)
    return begun


def two_join(world: World) -> None:
    world.add("n05")
    world.add("n06")


def running(policy: str = "oobleck", num_nodes: int = 4, **config: float) -> World:
    """Pipelines of two nodes on links that copy in no time, so that nothing is pre-copied."""
    world = World(0, num_nodes, **config)
    world.profile = msgspec.structs.replace(profile(6), link_bytes_per_s=1e9)
    world.run_for(1.0)
    world.submit(make_job(steps=30, f=1, policy=policy, min_pipeline_nodes=2))
    world.until_step(3)
    return world


def finish(world: World) -> None:
    world.until_state("done", limit_s=120.0)
    world.check_done()
    assert world.job().steps_lost == 0
    world.run_for(1.0)
    assert all(device.executor is None for device in world.devices())


LOSSES: dict[str, Callable[[World], None]] = {
    "a device whose place its spare takes": lambda world: world.spare_takes_place("n02", up_s=0.01),
    "a device that is started anew": lambda world: world.kill_device("n02", restart_s=0.01),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("policy", ["oobleck", "slipstream", "bamboo", "adaptive"])
def test_who_comes_for_a_device_that_died_has_the_job_before_the_deploy(
    policy: str, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = running(policy)
    told = watched(world, monkeypatch)
    begun = loads(monkeypatch, told)
    LOSSES[loss](world)
    world.run(lambda: "n02/0" in told.deploys and world.machine.core.run.phase == "run")
    assert told.preloads == ["n02/0"]
    assert told.at_work[0] > 0, "the others mend the step meanwhile"
    assert begun == ["n02/0"], "once, before it was told of the new plan"
    finish(world)


def test_who_joins_without_a_loss_loads_the_job_while_the_others_train(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = running()
    told = watched(world, monkeypatch)
    two_join(world)
    world.run(lambda: len(world.view().pipelines) == 3)
    assert sorted(told.preloads) == ["n05/0", "n06/0"]
    assert all(told.at_work)
    finish(world)


def test_a_node_that_stands_by_loads_nothing_until_a_plan_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(0, 5)
    world.profile = msgspec.structs.replace(profile(6), link_bytes_per_s=1e9)
    world.run_for(1.0)
    told = watched(world, monkeypatch)
    world.submit(make_job(steps=30, f=1, policy="oobleck", min_pipeline_nodes=2, max_nodes=4))
    world.until_step(5)
    standby = ({"n01", "n02", "n03", "n04", "n05"} - set(world.view().nodes)).pop()
    assert world.device(f"{standby}/0").executor is None
    assert not told.preloads
    world.kill(world.view().nodes[0])
    world.run(lambda: bool(world.incidents()))
    until_closed(world)
    assert told.preloads == [f"{standby}/0"]
    finish(world)


def test_who_dies_while_it_loads_is_followed_by_who_is_told_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    world = running()
    told = watched(world, monkeypatch)
    world.spare_takes_place("n02", up_s=0.005)
    world.run(lambda: bool(told.preloads))
    world.spare_takes_place("n02", up_s=0.005)
    until_closed(world)
    assert told.preloads == ["n02/0", "n02/0"]
    assert len(world.view().pipelines) == 2
    finish(world)


def test_who_has_loaded_the_job_and_is_not_wanted_any_more_is_empty_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = running()
    told = watched(world, monkeypatch)
    two_join(world)
    world.run(lambda: len(told.preloads) == 2)
    world.run_for(0.001)
    world.ask(Drain("n05"))
    world.ask(Drain("n06"))
    world.ask(Control("job-1", "cancel", discard=True))
    world.until_state("cancelled")
    world.run_for(1.0)
    assert all(device.executor is None for device in world.devices())
    assert not any(device.job_id for device in world.devices())


def test_a_daemon_that_is_started_anew_may_tell_again_and_the_job_is_loaded_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = running(lease_s=1.5, grace_s=2.0)
    told, begun = watched(world, monkeypatch), loads(monkeypatch)
    two_join(world)
    world.run(lambda: len(told.preloads) == 2)
    world.daemon.restart(down_s=0.1)
    world.run(lambda: world.machine is not None and len(world.view().pipelines) == 3)
    assert sorted(begun) == ["n05/0", "n06/0"]
    finish(world)
