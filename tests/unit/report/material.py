"""A job to report of, with all that a report may have."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from oobleckd.protocol.changes import Change, PlanChosen, PlanDeployed
from oobleckd.protocol.checkpoint import BucketFile, Manifest
from oobleckd.protocol.evalviews import EvaluationView, SourceLoss
from oobleckd.protocol.incidentviews import IncidentView, PhaseView, ReasonView, RejectedView
from oobleckd.protocol.inputs import Input
from oobleckd.protocol.jobviews import CurveBin, RouterView
from oobleckd.protocol.parts import Counters
from oobleckd.protocol.watch import CurveMark, CurveView, GoodputView
from oobleckd.report.page import Material
from tests.helpers.api_server import job_spec, job_view

INCIDENT = IncidentView(
    id="inc-1", job="job-1", cause="signal 9", nodes=("node-2",), at=86_400.0, epoch=2, step=6, open=False,
    phases=(PhaseView("detect", 0.0, 0.25), PhaseView("plan", 0.25, 0.5), PhaseView("resume", 0.75, 1.25)),
    total_s=2.0, reason="shrink pipeline 0", steps_lost=3, copied_bytes=3 << 20, committed_s=0.1, cost_s=4.5,
    rejected=(RejectedView("roll back", 60.0, "every layer has a copy", at_least=True),),
    parts=ReasonView(plan="shrink pipeline 0"),
)  # fmt: skip


def a_bin(first: int, last: int, loss: float) -> CurveBin:
    return CurveBin(
        first, last, last - first + 1, 0, loss - 0.5, loss, loss + 1.0, 0.1, 0.2, 0.3, 1e-3, 2.0, 1.0, 4.0,
        5e-4, 1e-3, 4000.0, 2000.0, 8000.0,
    )  # fmt: skip


def evaluation(step: int, loss: float) -> EvaluationView:
    found = SourceLoss("held-out", loss, loss.hex(), 2.0, 376)
    return EvaluationView(step=step, loss=loss, losses=(found,), epoch=1, at=90_000.0, seconds=0.25)


CURVE = CurveView(
    "job-1", 10, (a_bin(1, 5, 5.0), a_bin(6, 10, 3.0)),
    evaluations=(evaluation(0, 5.5), evaluation(10, 2.75)),
    marks=(
        CurveMark(5, 86_400.0, "incident", "inc-1", ("node-2",), 2.0),
        CurveMark(2, 86_400.0, "rollback", "inc-1", ("node-2",), steps_lost=3),
    ),
)  # fmt: skip
GOODPUT = GoodputView(
    "job-1", total_s=100.0, useful_s=80.0, lost_s={"detect": 5.0, "bubble": 13.0, "copy": 0.0},
    of_fault_free=0.8, evaluated_s=2.0,
)  # fmt: skip
STORY: tuple[Change, ...] = tuple(
    Change(number, 86_000.0 + number, "plan", "info", "", ("job:job-1",), data)
    for number, data in enumerate(
        (
            PlanChosen("job-1", 1.0, (), "start"),
            PlanDeployed(
                job="job-1",
                epoch=1,
                pipelines=(("node-1", "node-2"), ("node-3",)),
                copied_bytes=0,
                staged_bytes=0,
            ),
            PlanChosen("job-1", 1.0, (), "it stays", stays=True),
            PlanDeployed(
                job="job-1", epoch=2, pipelines=(("node-1",),), copied_bytes=1 << 20, staged_bytes=0
            ),
        )
    )
)


ROUTERS = (
    RouterView(1, 10, 1.0625, 0.0, 1.5, 0, (12, 4, 8, 8)),
    RouterView(3, 10, None, 0.0, 2.5, 1, (20, 0, 6, 6)),
)


def material(**changes: Any) -> Material:
    """Of a job that is done, after an incident."""
    job = changes.pop("job", None) or job_view(
        step=10, steps=10, incidents=1, steps_lost=3, kinds=({"device": "cpu", "torch": "2.13.0"},),
        inputs=(Input("data", "/data/text", 3, 1 << 20, "b1ocks", "1048576-abc"),),
        checkpoint="/ckpt/step-10", checkpoint_step=10,
    )  # fmt: skip
    manifest = Manifest(
        2, "m", Counters(12, 10, 10), (BucketFile(0, "bucket-0.st", 2048, "5ha256", {}),), job_spec()
    )
    usual: dict[str, Any] = {
        "job": job, "at": 100_000.0, "version": "0.1.0", "curve": CURVE, "incidents": (INCIDENT,),
        "evaluations": CURVE.evaluations, "num_evaluations": 2, "story": STORY, "config": 'name = "small"\n',
        "goodput": GOODPUT, "manifest": manifest,
    }  # fmt: skip
    return Material(**(usual | changes))


def bare(state: str = "queued") -> Material:
    """Of a job that never began."""
    job = job_view(state=state, step=0, loss=None, step_s=0.0, nodes=(), finished_at=None)
    return material(
        job=job, curve=CurveView("job-1", 0, ()), incidents=(), evaluations=(), num_evaluations=0, story=(),
        goodput=None, manifest=None,
    )  # fmt: skip


def with_everywhere(text: str) -> Material:
    """``text`` as all that others can write in a job."""
    found = material()
    job = replace(
        found.job, id=text, name=text, reason=text, checkpoint=text, kinds=({text: text},), policy=text,
        inputs=(Input("data", text, 1, 1, text, text),),
    )  # fmt: skip
    rejected = (RejectedView(text, 1.0, text),)
    incident = replace(
        INCIDENT,
        id=text,
        cause=text,
        nodes=(text,),
        reason=text,
        rejected=rejected,
        parts=ReasonView(plan=text),
    )
    marks = tuple(replace(mark, id=text, nodes=(text,)) for mark in CURVE.marks)
    evaluated = tuple(
        replace(each, losses=(replace(each.losses[0], source=text),)) for each in CURVE.evaluations
    )
    return msgspec.structs.replace(
        found, job=job, incidents=(incident,), curve=replace(CURVE, marks=marks), evaluations=evaluated,
        config=text, story=(
            Change(1, 1.0, "plan", "info", text, (), PlanChosen("job-1", 1.0, (), text)),
            Change(2, 1.0, "plan", "info", text, (), replace(STORY[1].data, pipelines=((text,),))),  # type: ignore[type-var]
        ),
    )  # fmt: skip
