"""``generation`` is ``epoch`` by the name that is shown."""

from __future__ import annotations

import msgspec
import pytest

from oobleckd.protocol.changes import IncidentBegan, PlanDeployed, StepCommitted
from oobleckd.protocol.incidentviews import IncidentView
from oobleckd.protocol.jobviews import JobView, StepView
from oobleckd.protocol.watch import ScheduleView

STEP = StepCommitted("job-1", 3, 0.5, "applied", 4)


@pytest.mark.parametrize(
    "struct", [IncidentBegan, IncidentView, JobView, PlanDeployed, ScheduleView, StepCommitted, StepView]
)
def test_whatever_has_an_epoch_has_a_generation(struct: type[msgspec.Struct]) -> None:
    assert {"epoch", "generation"} <= set(struct.__struct_fields__)


def test_both_are_the_same_number_however_it_is_made() -> None:
    assert msgspec.to_builtins(STEP)["generation"] == 4
    assert msgspec.structs.replace(STEP, epoch=5).generation == 5


def test_what_was_written_before_there_was_a_generation_has_one() -> None:
    raw = {name: value for name, value in msgspec.to_builtins(STEP).items() if name != "generation"}
    assert msgspec.convert(raw, StepCommitted) == STEP
