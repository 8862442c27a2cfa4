"""What is written of a job, and under which names: the views of the API as records of figures.

Owns the names, which docs/sinks.md documents; sinks for people who compare runs put ``train/`` and ``eval/``
before them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from oobleckd.protocol.evalviews import EvaluationView
from oobleckd.protocol.incidentviews import IncidentView
from oobleckd.protocol.job import Job
from oobleckd.protocol.jobviews import StepView
from oobleckd.sinks.base import EvaluationRecord, IncidentRecord, StepRecord
from oobleckd.words import count, seconds

STEP_FIGURES = (
    "loss", "lr", "grad_norm", "tokens_per_s", "samples_per_s", "step_s", "skipped", "generation",
)  # fmt: skip
"""Of a step. ``skipped``: 1 where it made no update. Rates are missing where its time is not known."""
ROUTER_FIGURES = ("router_aux_loss", "router_z_loss", "expert_load")
"""Of a step of a mixture of experts besides."""
INCIDENT_FIGURES = ("total_s", "steps_lost", "generation")


def step_record(view: StepView, job: Job) -> StepRecord:
    """Of a step of ``job``."""
    figures = {"loss": view.loss, "lr": view.lr, "grad_norm": view.grad_norm}
    if view.step_s > 0:
        rate = view.samples / view.step_s
        figures |= {"tokens_per_s": rate * job.train.sequence, "samples_per_s": rate, "step_s": view.step_s}
    figures |= {"skipped": int(view.outcome == "skipped"), "generation": view.epoch}
    if view.expert_load is not None:
        for name in ROUTER_FIGURES:
            value = getattr(view, name)
            figures[name] = math.nan if value is None else value
    return StepRecord(view.step, view.at, figures)


def evaluation_names(job: Job) -> tuple[str, ...]:
    """Figures that each evaluation of ``job`` has."""
    return tuple(f"{source}/{what}" for source in job.eval_sources for what in ("loss", "perplexity"))


def evaluation_record(view: EvaluationView) -> EvaluationRecord:
    """Of an evaluation."""
    figures: dict[str, float] = {}
    for found in view.losses:
        figures[f"{found.source}/loss"] = math.nan if found.loss is None else found.loss
        figures[f"{found.source}/perplexity"] = math.inf if found.perplexity is None else found.perplexity
    return EvaluationRecord(view.step, view.at, figures)


def incident_record(view: IncidentView) -> IncidentRecord:
    """Of an incident that is over."""
    lost = f", {count(view.steps_lost, 'step')} lost" if view.steps_lost else ""
    text = f"{view.cause}; recovered in {seconds(view.total_s)}{lost}: {view.reason}"
    figures: Mapping[str, float] = {
        "total_s": view.total_s, "steps_lost": view.steps_lost, "generation": view.epoch,
    }  # fmt: skip
    return IncidentRecord(view.step, view.at, view.id, " ".join(text.split()), figures)
