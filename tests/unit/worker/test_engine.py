"""The exact engine under losses, many interleavings, one process."""

from __future__ import annotations

import itertools
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from oobleckd.protocol.parts import Counters, Flags
from oobleckd.worker import sums
from oobleckd.worker.messaging.gather import Gathered
from oobleckd.worker.round.boundary_cache import BoundaryCache
from oobleckd.worker.round.reduce import Reducer
from oobleckd.worker.runtime.faults import POINTS
from oobleckd.worker.tools import reference as reference_run
from oobleckd.worker.training.executor import Executor
from tests.helpers.engine import World, flag_all
from tests.helpers.engine_jobs import (
    ELSEWHERE,
    GOAL,
    STAGES,
    check,
    job,
    random_deaths,
    scheduled,
    survivable,
)
from tests.helpers.kernels import fused


def test_training_learns(reference) -> None:
    losses = reference[1]
    assert sorted(losses) == list(range(GOAL))
    assert losses[GOAL - 1] < losses[0]


@pytest.mark.parametrize("seed", range(5))
def test_order_of_work_does_not_show(reference, tmp_path: Path, seed: int) -> None:
    world = World(reference[0], STAGES, seed, tmp_path)
    world.run()
    check(world, reference)
    assert world.redone == 0


def test_single_process_reference_run_is_equal(reference, tmp_path: Path) -> None:
    recorded = []
    reference_run.run(reference[0], tmp_path, recorded.append)
    losses = {m.counters.step: m.loss for m in recorded if type(m).__name__ == "StepDone"}
    assert losses == reference[1]


@pytest.mark.thin(6)
@pytest.mark.parametrize("point", [p for p in POINTS if p not in ELSEWHERE])
@pytest.mark.parametrize("victim", ["a0/0", "a1/0", "b0/0", "b1/0", "b2/0"])
def test_kill_at_every_point(reference, tmp_path: Path, point: str, victim: str) -> None:
    """One death at a fault point of round 2 (checkpoint and frozen need a first death or the end)."""
    world = World(reference[0], STAGES, zlib.crc32(f"{point} {victim}".encode()) % 1000, tmp_path)
    if point == "frozen":
        first = "b1/0" if victim.startswith("a") else "a1/0"
        if {first, victim} in ({"a1/0", "b1/0"}, {"a1/0", "b2/0"}):
            first = "a0/0"
        if not survivable(world, {first, victim}):
            return
        world.nodes[first].faults.arm("backward", 2)
    world.nodes[victim].faults.arm(point, 2)
    world.run()
    if not point.startswith("checkpoint"):  # some have no share
        assert (victim, point) in world.fired
    check(world, reference)


@pytest.mark.thin(6)
@pytest.mark.parametrize("seed", range(30))
def test_random_deaths(reference, tmp_path: Path, seed: int) -> None:
    world = World(reference[0], STAGES, seed, tmp_path)
    random_deaths(world)
    world.run()
    check(world, reference)


@pytest.mark.parametrize("point", ["reduce", "reduced"])
def test_what_is_reduced_is_not_reduced_again(
    reference, tmp_path: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a loss in the exchange donors have the means already, and give them; whoever has them too takes
    nothing.
    """
    make, enter = Reducer._make, Reducer.enter
    made: Counter[tuple[str, int, int]] = Counter()
    given: set[int] = set()

    def counted(self: Reducer, bucket: int, gathered: Gathered) -> None:
        made[self.exchange.device, self.exchange.round, bucket] += 1
        make(self, bucket, gathered)

    def watched(self: Reducer) -> None:
        given.update(self.exchange.donors)
        enter(self)

    monkeypatch.setattr(Reducer, "_make", counted)
    monkeypatch.setattr(Reducer, "enter", watched)
    for seed in range(4):
        made.clear()
        world = World(reference[0], STAGES, seed, tmp_path)
        world.nodes["b1/0"].faults.arm(point, 2)
        world.run()
        check(world, reference)
        assert max(made.values()) == 1
    assert given


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1300))
def test_many_random_deaths(reference, tmp_path: Path, seed: int) -> None:
    test_random_deaths(reference, tmp_path, seed)


def decoupled(reference, tmp_path: Path, seed: int) -> World:
    return scheduled(reference, tmp_path, seed, backward="decoupled")


@pytest.mark.parametrize("seed", range(3))
def test_a_decoupled_backward_does_not_show(reference, tmp_path: Path, seed: int) -> None:
    world = decoupled(reference, tmp_path, seed)
    world.run()
    check(world, reference)
    assert world.redone == 0


@pytest.mark.parametrize("point", ["forward", "backward", "weights", "reduce", "reduced", "update"])
@pytest.mark.parametrize("victim", ["a0/0", "b0/0", "b2/0"])
def test_kill_in_a_decoupled_step(reference, tmp_path: Path, point: str, victim: str) -> None:
    world = decoupled(reference, tmp_path, zlib.crc32(f"{point} {victim}".encode()) % 1000)
    world.nodes[victim].faults.arm(point, 2)
    world.run()
    assert (victim, point) in world.fired
    check(world, reference)


@pytest.mark.thin(6)
@pytest.mark.parametrize("backward", ["fused", "decoupled"])
@pytest.mark.parametrize("point", ["forward", "backward", "reduce"])
@pytest.mark.parametrize("victim", ["a0/0", "a1/0", "b0/0", "b1/0", "b2/0"])
def test_only_what_the_dead_did_is_done_again(
    reference, tmp_path: Path, point: str, victim: str, backward: str
) -> None:
    seed = zlib.crc32(f"{point} {victim}".encode()) % 1000
    world = scheduled(reference, tmp_path, seed, backward=backward)
    world.nodes[victim].faults.arm(point, 2)
    world.run()
    check(world, reference)
    share = sum(route.touches([victim]) for route in world.first.routes)
    assert world.redone <= share * len(world.first.holdings[victim])


@pytest.mark.parametrize("backward", ["fused", "decoupled"])
@pytest.mark.parametrize("limit_bytes", [0, 2500])
@pytest.mark.parametrize("seed", range(3))
def test_what_was_not_kept_is_done_again(
    reference, tmp_path: Path, seed: int, limit_bytes: int, backward: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off, or room for one boundary message of two (2 KiB each): whole routes take the place of
    spliced ones.
    """
    put, held = BoundaryCache.put, set()

    def watched(self: BoundaryCache, *args: Any) -> None:
        put(self, *args)
        held.add(self.held_bytes)

    monkeypatch.setattr(BoundaryCache, "put", watched)
    world = scheduled(reference, tmp_path, seed, backward=backward, boundary_memory=limit_bytes)
    world.nodes["a0/0"].faults.arm("backward", 2)
    world.run()
    check(world, reference)
    assert max(held) == (2048 if limit_bytes else 0)


@pytest.mark.parametrize("seed", range(10))
def test_random_deaths_in_decoupled_steps(reference, tmp_path: Path, seed: int) -> None:
    world = decoupled(reference, tmp_path, seed)
    random_deaths(world)
    world.run()
    check(world, reference)


@pytest.mark.parametrize("seed", range(4))
def test_overflow_repeats_the_step_and_does_not_show(
    reference, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales so large that the first rounds overflow, with deaths on top: the same weights in the end."""
    monkeypatch.setattr(sums, "START_EXPONENT", 60)
    calm = World(reference[0], STAGES, seed, tmp_path)
    calm.run()
    rounds = calm.nodes["a0/0"].executor.counters.round
    assert rounds > GOAL
    world = World(reference[0], STAGES, seed, tmp_path)
    random_deaths(world)
    world.run()
    assert world.losses == calm.losses
    ours, theirs = world.weights(), calm.weights()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert world.nodes[world.live()[0]].executor.counters.round == rounds


@pytest.mark.parametrize("seed", range(2))
def test_how_sums_are_kept_does_not_show(
    reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """By torch chunk by chunk or in one piece, or by compiled code: some buckets so, and some so."""
    kinds = itertools.cycle([sums.Chunked, sums.Whole, fused, sums.Whole, fused])

    def empty(*args: Any, guarded: bool) -> sums.Sum:
        return next(kinds)(*args, guarded=guarded)

    monkeypatch.setattr(sums, "empty", empty)
    world = World(reference[0], STAGES, seed, tmp_path)
    world.run()
    check(world, reference)


@pytest.mark.parametrize(
    ("kind", "empty", "exact"),
    [
        (sums.Chunked, sums.Chunked, True),
        (sums.Chunked, sums.Chunked, False),
        (sums.Whole, sums.Whole, True),
        (sums.Whole, sums.Whole, False),
        (sums.Fused, fused, True),
    ],
)
def test_nan_in_a_gradient_skips_the_update_and_counts_the_step(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[sums.Sum],
    empty: Callable[..., sums.Sum],
    exact: bool,
) -> None:
    add = kind.add
    bad = {"left": 1}

    def add_with_nan(self, grads, exponents, num_contributions):
        if bad["left"]:
            bad["left"] -= 1
            grads = [torch.full_like(grads[0], torch.nan), *grads[1:]]
        return add(self, grads, exponents, num_contributions)

    monkeypatch.setattr(kind, "add", add_with_nan)
    monkeypatch.setattr(sums, "empty", empty)
    world = World(job(tmp_path, exact=exact), STAGES, 1, tmp_path)
    world.run()
    counters = {world.nodes[device].executor.counters for device in world.live()}
    assert counters == {Counters(round=GOAL, step=GOAL, applied=GOAL - 1)}
    assert all(weight.isfinite().all() for weight in world.weights().values())


def test_a_flag_that_comes_after_the_vote_waits_for_the_next_round(reference, tmp_path: Path) -> None:
    world = World(reference[0], STAGES, 1, tmp_path)
    executor = world.nodes["a0/0"].executor
    while executor.machine.commit.own is None:
        for device in world.live():
            world.nodes[device].executor.advance()
            world.deliver_late()
    executor.machine.flags = Flags(hold=True)
    world.run()
    assert world.layout.epoch == 2, "all held once before the end, so they were laid out anew"
    check(world, reference)


def test_a_micro_batch_counted_twice_is_noticed(reference, tmp_path: Path) -> None:
    world = World(reference[0], STAGES, 1, tmp_path)
    board = world.nodes["a0/0"].executor.now.board
    board.ledger.done[0].add(1)  # micro-batch 1 belongs to the other pipeline
    with pytest.raises(AssertionError, match="counted"):
        world.run()


@pytest.mark.parametrize("change", [{"exact": False}, {"precision": "bf16"}])
def test_other_modes_train_and_survive(tmp_path: Path, change: dict[str, object]) -> None:
    calm = World(job(tmp_path, **change), STAGES, 1, tmp_path)
    calm.run()
    world = World(job(tmp_path, **change), STAGES, 2, tmp_path)
    world.nodes["b1/0"].faults.arm("backward", 2)
    world.run()
    assert sorted(world.losses) == list(range(GOAL))
    if calm.job.train.exact:
        assert world.losses == calm.losses
    else:
        assert world.losses == pytest.approx(calm.losses, rel=1e-4)


def test_who_is_told_to_go_on_at_the_end_says_that_it_is_there(reference, tmp_path: Path) -> None:
    """A rollback to the checkpoint of the last step."""
    world = World(reference[0], STAGES, 0, tmp_path)
    world.run()
    node = world.nodes["a0/0"]
    node.told.clear()
    node.executor.resume()
    assert node.executor.holding
    assert [message.finished for message in node.told] == [True]


def test_a_checkpoint_is_begun_when_the_sums_of_its_round_are_gone(
    reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the state takes their room: both at once is memory that nobody planned."""
    write, totals = Executor.write_checkpoint, []

    def watched(self: Executor) -> None:
        totals.append(len(self.reducer.reduced))
        write(self)

    monkeypatch.setattr(Executor, "write_checkpoint", watched)
    world = World(reference[0], STAGES, 0, tmp_path)
    flag_all(world, Flags(checkpoint=True))
    world.run()
    check(world, reference)
    assert len(totals) >= len(world.nodes)
    assert not any(totals)
