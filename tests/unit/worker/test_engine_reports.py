"""Reports that reach a device in the middle of a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import pytest
from torch import Tensor

from oobleckd.planner.plan import Range
from oobleckd.protocol.jobschedule import Schedule
from oobleckd.worker.round.passes import Passes
from oobleckd.worker.round.reduce import Reducer
from oobleckd.worker.round.round import Work
from tests.helpers.engine import World
from tests.helpers.engine_jobs import (
    check,
)

STAGES_DEEP = {"a": [(0, 3), (3, 6)], "b": [(0, 2), (2, 6)]}


@pytest.mark.parametrize(("backward", "kinds"), [("fused", {"B"}), ("decoupled", {"I", "W"})])
def test_a_report_in_the_middle_of_a_task(
    deep, tmp_path: Path, backward: str, kinds: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers for the layers before the one under way, with which the next attempt goes on where it stays
    here.
    """
    run, gone_on = Passes._run, set()

    def watched(self: Passes, work: Work) -> None:
        if work.num_pieces:
            gone_on.add(work.kind)
        run(self, work)

    monkeypatch.setattr(Passes, "_run", watched)
    changed = msgspec.structs.replace(deep[0], schedule=Schedule(backward=backward))
    for seed in range(12):
        world = World(changed, STAGES_DEEP, seed, tmp_path)
        world.nodes["b0/0" if seed % 2 else "a1/0"].faults.arm(["backward", "forward", "reduce"][seed % 3], 2)
        world.run()
        check(world, deep)
    assert gone_on == kinds


@pytest.mark.parametrize("backward", ["fused", "decoupled"])
def test_a_report_while_gradients_are_added_up(
    deep, tmp_path: Path, backward: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers that they are in the sums, as they are when the decision comes; after the last layer of a
    task too, which is not over then.
    """
    add, halts = Reducer.add, Passes._halts
    halted = set()

    def watched_add(
        self: Reducer, layer: int, micro_batch: int, grads: Mapping[int, Sequence[Tensor]]
    ) -> None:
        if (self.exchange.device, layer) == ("b1/0", doomed_at) and not world.dead:
            world.kill("b0/0")
        add(self, layer, micro_batch, grads)

    def watched_halts(self: Passes, work: Work) -> bool:
        found = halts(self, work)
        if found and work.task.route.micro_batch in self.board.ledger.done[doomed_at]:
            halted.add(doomed_at)
        return found

    monkeypatch.setattr(Reducer, "add", watched_add)
    monkeypatch.setattr(Passes, "_halts", watched_halts)
    changed = msgspec.structs.replace(deep[0], schedule=Schedule(backward=backward))
    layers = Range(*STAGES_DEEP["b"][1]).layers()
    for seed in range(12):
        doomed_at = layers[seed % len(layers)]
        world = World(changed, STAGES_DEEP, seed, tmp_path)
        world.run()
        check(world, deep)
    assert halted == set(layers)
