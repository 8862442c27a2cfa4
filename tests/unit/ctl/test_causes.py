"""A job that failed by something a script should know ends `wait` and `submit --wait` with a code
of its own.
"""

from __future__ import annotations

import pytest

from oobleckd.ctl.output import CAUSES, NOT_FOUND
from oobleckd.protocol.parts import JobCause
from tests.helpers.api_server import job_view
from tests.unit.ctl.conftest import Ctl


@pytest.mark.parametrize("cause", CAUSES)
def test_a_cause_has_an_exit_code(ctl: Ctl, cause: JobCause) -> None:
    ctl.api.jobs = [job_view(state="failed", reason="why it failed", cause=cause)]
    result = ctl("wait", "job-1", "--for", "state=done")
    assert result.exit_code == CAUSES[cause]
    assert "why it failed" in result.stderr


def test_a_job_that_is_done_says_how_many_steps_made_no_update(ctl: Ctl) -> None:
    ctl.api.jobs = [job_view(step=40, steps=40, steps_skipped=39, skipped_in_row=39, loss=None, reason="why")]
    assert (
        "small is done at step 40: 39 of them skipped" in ctl("wait", "job-1", "--for", "state=done").stderr
    )
    row = ctl("get", "jobs").stdout.splitlines()[1].split()
    assert row[:7] == ["job-1", "small", "done", "40/40", "39", "not", "finite"]
    told = ctl("describe", "job", "job-1").stdout
    assert "39 steps, 39 in a row now: loss or gradients not finite (train.on_nan = stop)" in told


def test_a_job_that_failed_otherwise_has_none(ctl: Ctl) -> None:
    ctl.api.jobs = [job_view(state="failed", reason="why it failed")]
    assert ctl("wait", "job-1", "--for", "state=done").exit_code == NOT_FOUND
