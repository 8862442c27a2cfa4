"""What the demo says at its end: of a restart only what follows from the numbers of the run."""

from __future__ import annotations

import pytest

from examples.demo import Kill, Start, proven, restarts
from oobleckd.ctl.compare import Verdict
from oobleckd.protocol.incidentviews import IncidentView
from tests.helpers.api_server import job_view

START = Start(processes_s=4.0, first_step_s=2.0)
KILLS = (Kill(("node-1", "node-7"), 24, 0, 0.5), Kill(("node-6",), 84, 50, 0.25))
INCIDENTS = tuple(
    IncidentView(f"inc-{n}", "job-1", "", (), 0.0, 2, 25, False, (), 0.75, "", committed_s=0.5)
    for n in (1, 2)
)


def test_a_restart_computes_again_what_came_after_the_last_checkpoint() -> None:
    assert [kill.steps_again for kill in KILLS] == [24, 34]
    assert [kill.restart_s(START) for kill in KILLS] == [24 * 0.5 + 6.0, 34 * 0.25 + 6.0]


@pytest.mark.parametrize(
    "number", ["24 steps", "34 steps", "18.0 s", "14.5 s", "58 steps", "32.5 s", "1.5 s"]
)
def test_all_numbers_of_the_estimate_are_shown(number: str) -> None:
    assert number in restarts(KILLS, START, INCIDENTS)


def test_what_was_proven_is_what_was_compared() -> None:
    verdict = Verdict(True, "", 3, 3, 9, 9, 12, "", ())
    text = proven(verdict, job_view(steps_lost=0), KILLS, INCIDENTS)
    for number in ("3 of 3", "9 of 9", "12 samples", "3 nodes", "0 committed steps", "0.5 s and 0.5 s"):
        assert number in text
