"""How far a job is and how fast: by hand where that is possible, and the same after a restart."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from oobleckd.core.progress import progress_of, step_times
from oobleckd.core.state import JobRecord
from oobleckd.planner.costs import flops
from oobleckd.protocol.batchramp import BatchRamp
from oobleckd.protocol.jobviews import ProgressView
from oobleckd.protocol.requests import Control, Submit
from tests.helpers.simjobs import evaluation, make_job
from tests.helpers.world import World

EACH = 8 * 8
"""Tokens of a step: batch and sequence of ``make_job``."""
H100 = {"device": "NVIDIA H100 80GB HBM3"}


def running(step: int = 25, **spec: Any) -> World:
    world = World(1, 6)
    world.run_for(1.0)
    world.submit(make_job(**{"steps": 100, "memory": 350} | spec))
    world.until_step(step)
    return world


def seen(world: World, job_id: str = "job-1") -> ProgressView:
    found = world.view(job_id).progress
    assert found is not None
    return found


def core_of(world: World) -> Any:
    assert world.machine is not None
    return world.machine.core


# --------------------------------------------------------------------------- time and tokens


def test_a_job_without_a_plan_has_none() -> None:
    world = World(1, 0)
    world.run_for(1.0)
    world.submit(make_job())
    assert world.view().progress is None


def test_tokens_and_time_by_hand() -> None:
    world = running(step=25)
    job, found = world.job(), seen(world)
    step_s = world.view().step_s
    assert found.tokens == 25 * EACH
    assert found.total_tokens == 100 * EACH
    assert found.elapsed_s == pytest.approx(world.now - job.deployed_at)
    assert found.left_s == pytest.approx(75 * step_s)
    assert found.tokens_per_s == pytest.approx(EACH / step_s)
    assert found.passes == 25 * EACH / 640, "as many tokens as the simulated text has"
    assert found.goodput > 0.99, "nothing has failed, and a bubble is no loss"


def test_a_ramped_job_counts_the_tokens_that_its_steps_have() -> None:
    """Of 8 sequences of 8 tokens: 2 in each of 15 steps, 4 in 8, 6 in 5, and then all."""
    ramp = BatchRamp(start=2, increment=2, samples=90)
    world = running(step=20, steps=40, batch_ramp=ramp)
    sizes, step = world.job().spec.batch_sizes, world.job().counters.step
    assert [sizes.size(at) for at in (0, 14, 15, 22, 23, 27, 28)] == [2, 2, 4, 4, 6, 6, 8]
    found, view = seen(world), world.view("job-1")
    assert sizes.size(step - 1) == 4
    assert found.tokens == (30 + 4 * (step - 15)) * 8
    assert found.total_tokens == (30 + 32 + 30 + 12 * 8) * 8
    assert view.samples_per_s == pytest.approx(4 / view.step_s)
    assert found.tokens_per_s == pytest.approx(32 / view.step_s)
    assert found.left_s == pytest.approx((found.total_tokens - found.tokens) / 32 * view.step_s)
    world.until_state("done")
    assert seen(world).tokens == found.total_tokens


def test_goodput_is_what_failures_leave() -> None:
    world = running()
    world.kill("n02")
    world.run(lambda: bool(world.incidents()) and not world.incidents()[0].open)
    world.run_for(1.0)
    book, found = world.job().book, seen(world).goodput
    assert found < 1.0
    assert found == pytest.approx(1 - sum(book.lost_s.values()) / book.total_s, abs=0.02)


def test_nothing_is_left_of_a_job_that_is_done_and_it_keeps_the_rest() -> None:
    world = running(steps=30)
    world.until_state("done")
    found = seen(world)
    assert (found.left_s, found.tokens, found.total_tokens) == (0.0, 30 * EACH, 30 * EACH)
    took_s = world.job().finished_at - world.job().deployed_at
    assert found.elapsed_s == pytest.approx(took_s)
    assert found.tokens_per_s == pytest.approx(30 * EACH / took_s)
    world.run_for(50.0)
    world.daemon.restart(down_s=0.1)
    world.run(lambda: world.machine is not None)
    assert seen(world) == found


def test_a_restarted_daemon_goes_on_with_the_same_clock() -> None:
    world = running()
    before = seen(world)
    world.daemon.restart(down_s=0.5)
    world.run(lambda: world.machine is not None)
    found = seen(world)
    assert found.elapsed_s >= before.elapsed_s + 0.5
    assert found.elapsed_s == pytest.approx(world.now - world.job().deployed_at)
    assert found.tokens >= before.tokens
    assert found.tokens_per_s == pytest.approx(before.tokens_per_s, rel=0.5)


def test_an_ended_job_that_was_not_done_promises_nothing() -> None:
    world = running()
    world.ask(Control("job-1", "cancel"))
    world.until_state("cancelled")
    assert seen(world).left_s == -1.0


def test_after_a_rollback_tokens_are_those_of_steps_that_stand() -> None:
    world = running(step=28, f=0, every=10, policy="varuna", steps=60)
    before = seen(world).tokens
    world.kill("n02")
    world.run(lambda: world.job().steps_lost > 0)
    found = seen(world)
    assert found.tokens == world.job().counters.step * EACH
    assert found.tokens < before


def test_of_a_resumed_job_the_steps_of_the_checkpoint_count_as_long_as_they_were() -> None:
    world = running(steps=20, step=20)
    world.until_state("done")
    other = make_job("job", steps=30, memory=350)
    longer = msgspec.structs.replace(other, train=msgspec.structs.replace(other.train, sequence=16))
    world.ask(Submit(longer, resume=world.job().checkpoint))
    world.until_step(25, "job-2")
    found = seen(world, "job-2")
    assert found.tokens == 20 * EACH + 5 * 2 * EACH
    assert found.total_tokens == 20 * EACH + 10 * 2 * EACH
    del core_of(world).state.jobs["job-1"]  # as of a checkpoint of another cluster
    found = seen(world, "job-2")
    assert (found.tokens, found.total_tokens) == (25 * 2 * EACH, 30 * 2 * EACH)


def test_what_evaluations_still_take_is_left_too() -> None:
    world = running(step=25, evaluation=evaluation(every=10, at_end=True))
    found, view = seen(world), world.view()
    assert view.evaluation is not None
    assert view.evaluation.last is not None
    assert found.left_s == pytest.approx(75 * view.step_s + 8 * view.evaluation.last.seconds)
    job = world.job()
    none_yet = msgspec.structs.replace(view.evaluation, last=None)
    planned = progress_of(core_of(world), job, view.step_s, none_yet)
    assert planned is not None
    each_s = view.evaluation.planned_s * view.step_s / job.plan.step_s
    assert planned.left_s == pytest.approx(75 * view.step_s + 8 * each_s)


def test_how_long_it_takes_is_not_known_before_the_first_step() -> None:
    world = running(step=1)
    found = progress_of(core_of(world), world.job(), 0.0, None)
    assert found is not None
    assert (found.left_s, found.tokens_per_s, found.mfu) == (-1.0, 0.0, 0.0)


def test_passes_are_not_known_before_a_device_has_said_how_much_data_there_is() -> None:
    world = running()
    job = world.job()
    job.inputs = (msgspec.structs.replace(job.inputs[0], tokens=0),)  # as devices of before have it
    assert seen(world).passes == 0.0


# --------------------------------------------------------------------------- FLOPs


GPT2_TOKEN = 6 * (12 * (4 * 768 * 768 + 2 * 768 * 3072) + 768 * 50257) + 12 * 12 * 768 * 1024
"""FLOPs of GPT-2 124M in sequences of 1,024."""


def on_cards(world: World, *traits: dict[str, str], flops_per_token: float = GPT2_TOKEN) -> JobRecord:
    """The job as if its devices were these, and its profile said that a token takes as much."""
    job: JobRecord = world.job()
    job.kinds = list(traits)
    assert job.setup is not None
    profile = msgspec.structs.replace(job.setup.profile, flops_per_token=flops_per_token)
    job.setup = msgspec.structs.replace(job.setup, profile=profile)
    core_of(world).figures.models.clear()
    return job


def test_mfu_by_hand() -> None:
    world = running()
    on_cards(world, H100)
    found, step_s = seen(world), world.view().step_s
    assert found.flops_per_token == 854_438_400
    assert found.peak_flops == 6 * 67e12
    assert found.peak_of == "NVIDIA H100 SXM, fp32"
    assert found.mfu == pytest.approx(EACH / step_s * 854_438_400 / (6 * 67e12))


def test_by_a_profile_of_before_the_sizes_of_its_layers_count() -> None:
    world = running()
    job = on_cards(world, H100, flops_per_token=0.0)
    assert job.setup is not None
    assert seen(world).flops_per_token == flops.of_profile(job.setup.profile) == 6 * 5 * 25 / 4


def test_of_a_job_that_is_over_flops_stay_known_when_its_plan_is_let_go() -> None:
    world = running(steps=30)
    world.until_state("done")
    job = on_cards(world, H100)
    before = seen(world)
    job.shelve(whole=False)
    assert seen(world).mfu == before.mfu > 0
    core_of(world).figures.models.clear()  # the daemon has restarted
    assert (seen(world).flops_per_token, seen(world).mfu) == (0.0, 0.0)


def test_of_a_mixture_of_experts_both_numbers_of_parameters_are_told() -> None:
    world = running()
    job = on_cards(world, H100)
    assert job.setup is not None
    assert (seen(world).params, seen(world).active_params) == (0, 0), "a profile of before says neither"
    mixture = msgspec.structs.replace(job.setup.profile, params=46_702_792_704, active_params=12_879_925_248)
    job.setup = msgspec.structs.replace(job.setup, profile=mixture)
    core_of(world).figures.models.clear()
    assert (seen(world).params, seen(world).active_params) == (46_702_792_704, 12_879_925_248)


@pytest.mark.parametrize(
    "kinds", [[], [{"device": "cpu"}], [H100, {"device": "NVIDIA H100 PCIe"}], [H100, {"torch": "2.11"}]]
)
def test_where_a_peak_is_not_known_there_is_no_mfu(kinds: list[dict[str, str]]) -> None:
    world = running()
    on_cards(world, *kinds)
    found = seen(world)
    assert found.flops_per_token > 0
    assert (found.peak_flops, found.peak_of, found.mfu) == (0.0, "", 0.0)


def test_devices_of_two_kinds_count_each_by_its_own_sheet() -> None:
    world = running()
    on_cards(world, H100, {"device": "NVIDIA A40"})
    for number, node in enumerate(core_of(world).members.nodes.values()):
        traits = {"device": "NVIDIA A40"} if number < 2 else H100
        node.devices = tuple(msgspec.structs.replace(each, traits=traits) for each in node.devices)
    found = seen(world)
    assert found.peak_of == "NVIDIA A40 and NVIDIA H100 SXM, fp32"
    assert found.peak_flops == 2 * 37.4e12 + 4 * 67e12


def share_cards(world: World, *cards: str) -> None:
    """Its devices, in the order of nodes, say that they are on these."""
    for card, node in zip(cards, core_of(world).members.nodes.values(), strict=True):
        node.devices = tuple(msgspec.structs.replace(each, card=card, traits=H100) for each in node.devices)


def test_a_card_that_several_devices_share_counts_once() -> None:
    world = running()
    on_cards(world, H100)
    alone = seen(world)
    share_cards(world, "GPU-1", "GPU-1", "GPU-1", "GPU-2", "", "")
    found = seen(world)
    assert found.peak_flops == pytest.approx(4 * 67e12), "who names no card has one to itself"
    assert found.mfu == pytest.approx(alone.mfu * 6 / 4)


def test_among_cards_of_two_kinds_a_shared_one_counts_once() -> None:
    world = running()
    on_cards(world, H100, {"device": "NVIDIA A40"})
    share_cards(world, "GPU-1", "GPU-1", "GPU-2", "GPU-3", "GPU-4", "GPU-4")
    for node in list(core_of(world).members.nodes.values())[-2:]:
        traits = {"device": "NVIDIA A40"}
        node.devices = tuple(msgspec.structs.replace(each, traits=traits) for each in node.devices)
    assert seen(world).peak_flops == pytest.approx(3 * 67e12 + 37.4e12)


def test_of_a_job_that_is_done_its_devices_have_the_part_of_a_card_that_they_had_last() -> None:
    world = running(steps=30)
    world.until_state("done")
    job = on_cards(world, H100)
    alone = seen(world)
    share_cards(world, *["GPU-1"] * 6)
    assert len(job.survivors()) == 6
    assert seen(world).mfu == pytest.approx(alone.mfu * 6)


def test_of_a_job_that_is_done_mfu_is_that_of_all_its_time() -> None:
    world = running(steps=30)
    world.until_state("done")
    job = on_cards(world, H100)
    found = seen(world)
    done = 30 * EACH * found.flops_per_token
    assert found.mfu == pytest.approx(done / (67e12 * job.book.total_s))


# --------------------------------------------------------------------------- step times


def test_quantiles_and_histogram_by_hand() -> None:
    found = step_times([float(n) for n in range(1, 201)])
    assert (found.count, found.p50_s, found.p95_s, found.p99_s, found.max_s) == (200, 100, 190, 198, 200)
    assert sum(found.counts) == 200
    assert len(found.edges_s) == len(found.counts) == 16
    ratios = [after / before for before, after in zip(found.edges_s, found.edges_s[1:], strict=False)]
    assert ratios == pytest.approx([200 ** (1 / 16)] * 15)
    below = sum(1 for n in range(1, 201) if n <= found.edges_s[3])
    assert sum(found.counts[:4]) == below


@pytest.mark.parametrize("times_s", [[0.25], [0.25] * 40, [0.0, 0.0]])
def test_steps_that_all_take_as_long_are_one_bin(times_s: list[float]) -> None:
    found = step_times(times_s)
    assert (found.edges_s, found.counts) == ((times_s[0],), (len(times_s),))
    assert found.p50_s == found.p99_s == found.max_s == times_s[0]


def test_the_least_and_the_most_are_in_the_histogram_whatever_they_are() -> None:
    for low, high in ((1e-9, 1e9), (0.1, 0.1 + 1e-17), (0.1, 0.10000000000000002), (0.0, 3.0)):
        found = step_times([low, high])
        assert sum(found.counts) == 2, (low, high)
        assert found.edges_s[-1] == high
        assert list(found.edges_s) == sorted(set(found.edges_s))


def test_step_times_of_a_running_job_name_the_slowest_device() -> None:
    world = running()
    found = seen(world).step_times
    assert found is not None
    assert found.count == 25
    assert found.p50_s == pytest.approx(world.view().step_s, rel=0.2)
    assert found.slowest in world.job().survivors()
    assert found.slowest_factor >= 1.0
    assert seen(world).step_times is found, "found once for all who ask"
    world.until_step(26)
    after = seen(world).step_times
    assert after is not None
    assert after.count == 26
