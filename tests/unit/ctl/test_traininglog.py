"""``logs JOB``: steps as trainers print them, with evaluations and incidents where they happened."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import msgspec
import pytest

from oobleckd.protocol.changes import Change
from oobleckd.protocol.evalviews import EvaluationView, SourceLoss
from oobleckd.protocol.jobviews import StepView
from tests.helpers.api_server import job_spec, job_view, node_view
from tests.unit.ctl.conftest import Ctl
from tests.unit.ctl.test_verbs import INCIDENT


def step(number: int, **changes: object) -> StepView:
    usual = StepView(number, 5.25, "", 1.5, 0.00012345, 4, "x", "applied", 1, 100.0 + number, 0.5)
    return msgspec.structs.replace(usual, **changes)


@pytest.fixture
def trained(ctl: Ctl) -> Ctl:
    spec = job_spec(eval={"every": 2, "held_out": 0.1, "sequences": 4})
    ctl.api.jobs = [job_view(spec=spec, step=4, steps=30)]
    skipped = step(3, outcome="skipped", loss=None, loss_hex="nan")
    ctl.api.steps["job-1"] = [step(1), step(2), skipped, step(4)]
    losses = (SourceLoss("held-out", 4.5, "", 90.0, 100),)
    ctl.api.evaluations["job-1"] = [EvaluationView(2, 4.5, losses, 1, 102.5, 0.25)]
    ctl.api.incidents = [
        msgspec.structs.replace(INCIDENT, at=103.2, total_s=0.3, step=4),
        msgspec.structs.replace(INCIDENT, id="inc-2", job="another", at=103.0),
    ]
    return ctl


def test_it_tells_what_happened_in_its_order(trained: Ctl) -> None:
    told = [line.split("  ", 1)[1] for line in trained("logs", "small").stdout.splitlines()]
    assert told == [
        "step  1/30  loss 5.2500    grad norm 1.5     lr 0.0001234  64.0 tokens/s  500 ms",
        "step  2/30  loss 5.2500    grad norm 1.5     lr 0.0001234  64.0 tokens/s  500 ms",
        "evaluated after step 2: held-out 4.5000, in 250 ms",
        "step  3/30  loss NaN       grad norm 1.5     lr 0.0001234  64.0 tokens/s  500 ms  skipped",
        "inc-1 in step 4: node-2: signal 9",
        "inc-1 is over after 300 ms, 0 steps lost: shrink pipeline 0",
        "step  4/30  loss 5.2500    grad norm 1.5     lr 0.0001234  64.0 tokens/s  500 ms",
    ]  # fmt: skip
    assert len(trained("logs", "job/small", "-n", "2").stdout.splitlines()) == 2
    kinds = [json.loads(line)["kind"] for line in trained("logs", "small", "-o", "json").stdout.splitlines()]
    assert kinds == ["Step", "Step", "Evaluation", "Step", "Incident", "Incident", "Step"]


def test_it_is_followed_until_the_job_is_over(trained: Ctl) -> None:
    """A step that a rollback has done again is told again."""
    trained.api.jobs = [job_view(state="running", finished_at=None, step=4, steps=5)]
    asked = threading.Event()

    def follow() -> Iterator[Change]:
        trained.api.steps["job-1"] += [step(4, at=110.0, epoch=2, generation=2), step(5, at=111.0)]
        trained.api.jobs = [job_view(state="done", step=5, steps=5)]
        yield Change(1, 1.0, "step", "info", "step 5", ())
        asked.wait(20)

    trained.api.follow = follow
    result = trained("logs", "small", "-f", "-n", "1")
    asked.set()
    assert result.exit_code == 0
    assert [line.split()[3] for line in result.stdout.splitlines()[-2:]] == ["4/5", "5/5"]
    assert result.stderr.endswith("job-1 is done\n")


def test_a_name_that_nobody_has_is_neither_job_nor_node(ctl: Ctl) -> None:
    ctl.api.nodes = [node_view("node-1")]
    assert ctl("logs", "job/nobody").exit_code == 3
    result = ctl("logs", "nobody")
    assert result.exit_code == 3
    assert "no log of nobody" in result.stderr
