"""``oobleckctl plan`` with stages of several devices: what is said, which number is taken, what refused."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from oobleckd.ctl.main import main
from oobleckd.ctl.profiles import analytic, limit_bytes, node_link
from oobleckd.ctl.stagesize import fastest_world
from oobleckd.ctl.world import PlannedWorld
from oobleckd.host.jobfile import load_job
from oobleckd.planner.costs.devices import SHEETS
from oobleckd.planner.costs.sharded import NodeLink, Sharding
from oobleckd.planner.plan import Plan
from oobleckd.planner.policy import PlanError
from oobleckd.protocol.forecast import Forecast
from tests.unit.ctl.test_plan import EXAMPLE, ctl, planned, refused
from tests.unit.planner.build import even_profile

BY_TWO = ("--devices", "4", "--devices-per-stage", "2")


def held(found: Forecast) -> dict[str, tuple[int, int]]:
    return {stage.device: (stage.start, stage.stop) for each in found.pipelines for stage in each.stages}


def test_devices_of_a_stage_have_the_same_layers_and_micro_batches_of_their_own() -> None:
    found = planned(EXAMPLE, "--nodes", "2", *BY_TWO)
    assert (found.devices_per_stage, found.stages_because, found.stage_options) == (2, "asked", ())
    layers = held(found)
    assert sorted(layers) == [f"node-{node}/{device}" for node in (1, 2) for device in range(4)]
    assert all(layers[f"node-{n}/{d}"] == layers[f"node-{n}/{d + 1}"] for n in (1, 2) for d in (0, 2))
    numbers = [number for each in found.pipelines for number in each.micro_batches]
    assert sorted(numbers) == list(range(found.micro_batches))
    assert found.plan.can_lose == 1


def test_in_the_last_turn_some_devices_have_nothing_to_do() -> None:
    """Twelve micro-batches are two turns of eight devices, and take as long as sixteen."""
    twelve = planned(EXAMPLE, "--nodes", "1", "--devices", "8", "--devices-per-stage", "8")
    sixteen = planned(
        EXAMPLE,
        "--nodes",
        "1",
        "--devices",
        "8",
        "--devices-per-stage",
        "8",
        "--set",
        "train.global_batch=16",
    )
    assert (twelve.micro_batches, sixteen.micro_batches) == (12, 16)
    assert twelve.plan.step_s == sixteen.plan.step_s
    assert twelve.schedule.of_micro_batches == 2
    assert twelve.plan.bubble > sixteen.plan.bubble == pytest.approx(0, abs=1e-9)


def test_the_best_number_is_taken_and_the_others_are_said() -> None:
    found = planned(EXAMPLE, "--nodes", "4", "--devices", "4", "--devices-per-stage", "auto")
    assert [each.devices_per_stage for each in found.stage_options] == [1, 2, 4]
    chosen = next(each for each in found.stage_options if each.devices_per_stage == found.devices_per_stage)
    assert chosen.step_s == found.plan.step_s == min(each.step_s for each in found.stage_options)
    assert (chosen.memory_bytes, chosen.can_lose) == (found.plan.memory_bytes, found.plan.can_lose)
    text = ctl(EXAMPLE, "--nodes", "4", "--devices", "4", "--devices-per-stage", "auto").stdout
    assert f"stages: of {found.devices_per_stage} devices each, the fastest of those that have a plan" in text
    assert "DEVICES A STAGE  FEWEST NODES" in text
    assert f"{found.devices_per_stage} (chosen)" in text
    for each in found.stage_options:
        alone = planned(
            EXAMPLE, "--nodes", "4", "--devices", "4", "--devices-per-stage", str(each.devices_per_stage)
        )
        assert (alone.plan.step_s, alone.guarantee.n0) == (each.step_s, each.n0)
        shares = each.devices_per_stage > 1
        assert (alone.plan.gathered_bytes > 0) == shares
        assert alone.plan.gathered_bytes == pytest.approx(2 * alone.plan.shard_gradient_bytes, abs=1)
    assert ("gathers:" in text) == (found.devices_per_stage > 1)


def test_the_job_may_say_it_and_one_device_a_stage_says_nothing() -> None:
    said = planned(EXAMPLE, "--nodes", "2", "--devices", "4", "--set", "resources.devices_per_stage=2")
    assert said == planned(EXAMPLE, "--nodes", "2", *BY_TWO)
    plain = ctl(EXAMPLE, "--nodes", "2", "--devices", "4").stdout
    assert plain == ctl(EXAMPLE, "--nodes", "2", "--devices", "4", "--devices-per-stage", "1").stdout
    assert "stages:" not in plain


@pytest.mark.parametrize("policy", ["oobleck", "slipstream", "adaptive", "varuna"])
def test_what_follows_a_loss_is_planned_under_every_policy(policy: str) -> None:
    found = planned(
        EXAMPLE, "--nodes", "5", *BY_TWO, "--set", f"fault_tolerance.policy={policy}",
        "--set", "resources.min_pipeline_nodes=2", "--without", "node-2",
    )  # fmt: skip
    assert found.change is not None
    assert found.change.plan == found.plan
    vacant = {device for each in found.pipelines for device in each.vacant}
    assert vacant == ({"node-2/0", "node-2/1", "node-2/2", "node-2/3"} if policy == "slipstream" else set())
    assert sorted(n for each in found.pipelines for n in each.micro_batches) == list(range(12))


def test_redundant_layers_are_of_stages_too() -> None:
    words = (
        EXAMPLE, "--nodes", "6", "--devices", "2", "--devices-per-stage", "2",
        "--set", "fault_tolerance.policy=bamboo", "--set", "resources.min_pipeline_nodes=3",
        "--set", "resources.device_memory=0",
    )  # fmt: skip
    before, after = planned(*words), planned(*words, "--without", "node-2")
    assert [len(pipeline.nodes) for pipeline in before.pipelines] == [3, 3]
    assert after.change is not None
    assert (after.change.way, after.change.copied_bytes) == ("take-over", 0)


def test_a_copy_is_of_whole_layers_however_many_devices_hold_them() -> None:
    job = load_job(Path(EXAMPLE), {"fault_tolerance.policy": "oobleck", "resources.min_pipeline_nodes": 2})
    profile = analytic(job, SHEETS["cpu"])
    world = PlannedWorld(job, profile, 0, 5, 2, Sharding(2, node_link(profile, SHEETS["cpu"])))
    loss = world.lose(world.start(), ["node-2"])
    assert loss.copies
    assert all(copy.num_bytes == profile.layers[copy.layer].copied_bytes for copy in loss.copies)


def test_a_decoupled_backward_is_planned_too() -> None:
    found = planned(EXAMPLE, "--nodes", "2", *BY_TWO, "--set", "schedule.backward=decoupled")
    assert found.schedule.decoupled
    assert len(held(found)) == 8


# --------------------------------------------------------------------------- refused


def test_what_cannot_be() -> None:
    said = refused(EXAMPLE, "--nodes", "2", "--devices", "6", "--devices-per-stage", "4", code=1)
    assert "6 devices of a node do not divide into stages of 4" in said
    assert "set resources.devices_per_stage to 1 or 2" in said
    said = refused(EXAMPLE, "--nodes", "2", "--set", "resources.devices_per_stage=3")
    assert "resources.devices_per_stage" in said


@pytest.mark.parametrize(
    "verb", [("plan", "--nodes", "4"), ("submit", "--dry-run"), ("simulate", "--nodes", "4", "--mtbf", "5m")]
)
def test_layers_that_are_gathered_are_not_compiled(
    verb: tuple[str, ...], job_file: Callable[[str], Path]
) -> None:
    file = str(job_file("compile = true\n[resources]\ndevices_per_stage = 2\n"))
    arguments = [verb[0], file, *verb[1:]]
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "resources.devices_per_stage: 2 beside train.compile" in done.stderr
    assert "hint: set train.compile to false, or leave resources.devices_per_stage out" in done.stderr


class World(SimpleNamespace):
    """A world of which this is known; without a step it has too few nodes."""

    def start(self) -> Plan:
        if not self.step_s:
            raise PlanError(f"needs {self.n0}")
        return Plan((), step_s=self.step_s)

    def most_bytes(self, _plan: Plan) -> int:
        return 7

    def can_lose(self, _plan: Plan) -> int:
        return int(self.lost)


def taken(f: int, **worlds: Any) -> Any:
    def make(number: int) -> PlannedWorld:
        known = worlds.get(f"by_{number}")
        if known is None:
            raise PlanError(f"{number} fits none")
        return cast("PlannedWorld", World(**dict(zip(("n0", "step_s", "lost"), known, strict=True))))

    return fastest_world(8, f, make)


def test_why_a_number_is_taken() -> None:
    assert taken(1, by_8=(1, 2.0, 1)).because == "only"
    found = taken(1, by_4=(1, 3.0, 1), by_8=(1, 2.0, 1))
    assert (found.devices_per_stage, found.because) == (8, "fastest")
    found = taken(1, by_4=(2, 1.0, 0), by_8=(1, 2.0, 1))
    assert (found.devices_per_stage, found.because) == (8, "can-lose")
    assert [each.n0 for each in found.options] == [0, 0, 2, 1]


def test_where_none_has_a_plan_it_is_said_what_the_one_that_comes_closest_lacks() -> None:
    with pytest.raises(PlanError, match="needs 5"):
        taken(1, by_2=(9, 0.0, 0), by_8=(5, 0.0, 0))
    with pytest.raises(PlanError, match="8 fits none"):
        taken(1)


# --------------------------------------------------------------------------- numbers


def test_the_link_of_a_node_is_that_of_the_sheet_or_else_what_the_profile_knows() -> None:
    profile = replace(even_profile(3), link_bytes_per_s=5.0, link_latency_s=0.5)
    assert node_link(profile, SHEETS["h100"]) == NodeLink(0.8 * 450e9, 0.5)
    assert node_link(replace(profile, device="NVIDIA A100-SXM4-80GB"), None) == NodeLink(0.8 * 300e9, 0.5)
    assert node_link(replace(profile, host_bytes_per_s=9.0), None) == NodeLink(9.0, 0.5)
    assert node_link(profile, SHEETS["cpu"]) == NodeLink(5.0, 0.5)


def test_a_large_model_by_hand() -> None:
    """Llama-2 7B as one stage of eight devices: 26 bytes of state a parameter, 24 of what is not rounded."""
    job = load_job(Path(EXAMPLE).with_name("llama-2-7b.toml"))
    profile = analytic(job, SHEETS["a100"])
    limit = limit_bytes(job, profile, SHEETS["a100"])
    world = PlannedWorld(job, profile, limit, 1, 8, Sharding(8, node_link(profile, SHEETS["a100"])))
    (stage,) = world.by_size[1].stages
    blocks, table, norms = 32 * 202_375_168, 32000 * 4096, 32 * 2 * 4096
    state = 24 * (blocks + norms + 2 * table + 4096) + 2 * (blocks + table)
    # Fullest is the embedding in its backward, or the head with a block's weights: these are gathered in
    # bfloat16, but for norms.
    head, block = 2 * table + 4 * 4096, 2 * 202_375_168 + 4 * 2 * 4096
    passing = max(2 * 4 * table, 2 * head + block, 2 * block + max(block, 4 * table))
    activations = profile.activation_bytes(range(34))
    assert stage.memory_bytes == ceil(state / 8) + passing + activations + profile.reserve_bytes
    assert world.start().step_s == pytest.approx(
        256 / 8 * sum(layer.forward_s + layer.backward_s for layer in profile.layers), rel=0.005
    )
