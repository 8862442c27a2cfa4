"""Reports that reach a device in the middle of a task."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from oobleckd.protocol.job import Schedule
from tests.helpers.engine import World
from tests.helpers.engine_jobs import (
    check,
)
from worker.passes import Passes
from worker.round import Work

STAGES_DEEP = {"a": [(0, 3), (3, 6)], "b": [(0, 2), (2, 6)]}


@pytest.mark.parametrize(("backward", "kinds"), [("fused", {"B"}), ("decoupled", {"I", "W"})])
def test_a_report_in_the_middle_of_a_task(
    deep, tmp_path: Path, backward: str, kinds: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers for the layers before the one under way, with which the next attempt goes on where it stays here."""
    run, gone_on = Passes._run, set()

    def watched(self: Passes, work: Work) -> None:
        if work.num_layers:
            gone_on.add(work.kind)
        run(self, work)

    monkeypatch.setattr(Passes, "_run", watched)
    changed = msgspec.structs.replace(deep[0], schedule=Schedule(backward=backward))
    for seed in range(24):
        world = World(changed, STAGES_DEEP, seed, tmp_path)
        world.nodes["b0/0" if seed % 2 else "a1/0"].faults.arm(["backward", "forward", "reduce"][seed % 3], 2)
        world.run()
        check(world, deep)
    assert gone_on == kinds
