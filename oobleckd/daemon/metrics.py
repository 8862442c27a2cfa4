"""Metrics in the Prometheus text format (version 0.0.4), computed from the views at every scrape.

Owns names, types and help texts; no counter lives here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

from oobleckd.core import view
from oobleckd.daemon.service import Service
from oobleckd.protocol.api import IncidentView, JobView, NodeState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
RECOVERY_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

Kind = Literal["gauge", "counter", "histogram"]
Sample = tuple[str, Mapping[str, str], float]


def render(service: Service) -> str:
    """All metrics of the daemon."""
    jobs = view.job_views(service.core)
    incidents = view.incident_views(service.core)
    lines = [*_of_nodes(service), *_of_jobs(jobs), *_of_incidents(incidents), *_of_shell(service)]
    return "\n".join(lines) + "\n"


def _of_nodes(service: Service) -> Iterable[str]:
    counts = Counter(node.state for node in view.node_views(service.core))
    samples = [("", {"state": state}, float(counts[state])) for state in get_args(NodeState)]
    yield from _metric("oobleck_nodes", "gauge", "Nodes by state.", samples)


def _of_jobs(jobs: list[JobView]) -> Iterable[str]:
    open_jobs = [job for job in jobs if job.finished_at is None]
    states = Counter(job.state for job in jobs)
    counted = [("", {"state": state}, float(number)) for state, number in sorted(states.items())]
    yield from _metric("oobleck_jobs", "gauge", "Jobs by state.", counted)
    for name, help_text, values in (
        ("oobleck_job_step", "Committed steps.", {job.id: float(job.step) for job in jobs}),
        ("oobleck_job_steps", "Steps to do.", {job.id: float(job.steps) for job in jobs}),
        ("oobleck_job_loss", "Loss of the last step.", {j.id: j.loss for j in jobs if j.loss is not None}),
        ("oobleck_job_epoch", "Epoch.", {job.id: float(job.epoch) for job in open_jobs}),
        (
            "oobleck_job_tolerance",
            "Nodes that can still be lost at once; -1 when not deployed.",
            {job.id: float(job.tolerance) for job in open_jobs},
        ),
        ("oobleck_job_step_seconds", "Median of the last steps.", {j.id: j.step_s for j in open_jobs}),
        (
            "oobleck_job_samples_per_second",
            "Samples per second.",
            {job.id: job.samples_per_s for job in open_jobs},
        ),
    ):
        samples = [("", {"job": job}, value) for job, value in values.items()]
        yield from _metric(name, "gauge", help_text, samples)
    for name, help_text, counts in (
        (
            "oobleck_job_updates_early_total",
            "Updates that a device made before all votes were in.",
            {job.id: float(job.updates_early) for job in open_jobs},
        ),
        (
            "oobleck_job_updates_taken_back_total",
            "Those of them that were in vain.",
            {job.id: float(job.updates_taken_back) for job in open_jobs},
        ),
    ):
        yield from _metric(name, "counter", help_text, [("", {"job": j}, n) for j, n in counts.items()])
    lost = float(sum(job.steps_lost for job in jobs))
    yield from _metric("oobleck_steps_lost_total", "counter", "Steps lost to dead layers.", [("", {}, lost)])


def _of_incidents(incidents: list[IncidentView]) -> Iterable[str]:
    closed = [incident.total_s for incident in incidents if not incident.open]
    samples: list[Sample] = [
        ("_bucket", {"le": f"{limit:g}"}, float(sum(total <= limit for total in closed)))
        for limit in RECOVERY_BUCKETS_S
    ]
    samples += [
        ("_bucket", {"le": "+Inf"}, float(len(closed))),
        ("_sum", {}, sum(closed)),
        ("_count", {}, float(len(closed))),
    ]
    text = "Recoveries from the first evidence to the resumed step."
    yield from _metric("oobleck_recovery_seconds", "histogram", text, samples)
    still = float(len(incidents) - len(closed))
    yield from _metric("oobleck_incidents_open", "gauge", "Recoveries under way.", [("", {}, still)])


def _of_shell(service: Service) -> Iterable[str]:
    hub, loop = service.hub.counters, service.loop
    up_s = service.clock.now() - service.started_at
    yield from _metric("oobleck_up_seconds", "gauge", "Age of this life of the daemon.", [("", {}, up_s)])
    failing = float(bool(service.journal.trouble))
    yield from _metric(
        "oobleck_journal_failing", "gauge", "1 while the journal cannot be written.", [("", {}, failing)]
    )
    for name, help_text, number in (
        ("oobleck_events_total", "Events that the core took.", loop.num_events),
        ("oobleck_messages_received_total", "Messages of agents.", hub.received),
        ("oobleck_messages_sent_total", "Messages to agents.", hub.sent),
        ("oobleck_messages_undeliverable_total", "Messages to agents that were gone.", hub.undeliverable),
        (
            "oobleck_unknown_messages_total",
            "Messages of a kind that this version does not know.",
            hub.unknown,
        ),
        ("oobleck_damaged_messages_total", "Bytes that were no message.", hub.damaged),
        ("oobleck_refused_hellos_total", "Agents that were refused.", hub.refused),
        ("oobleck_refused_keys_total", "Connections with unknown keys.", service.hub.num_refused_keys),
        ("oobleck_journal_errors_total", "Failed writes of the journal.", service.journal.num_errors),
        ("oobleck_manifest_errors_total", "Failed tries to complete a checkpoint.", loop.num_manifest_errors),
        ("oobleck_planner_rebuilt_total", "Planner pools lost and made anew.", service.planning.num_rebuilt),
    ):
        yield from _metric(name, "counter", help_text, [("", {}, float(number))])


def _metric(name: str, kind: Kind, help_text: str, samples: Iterable[Sample]) -> Iterable[str]:
    yield f"# HELP {name} {help_text}"
    yield f"# TYPE {name} {kind}"
    for suffix, labels, value in samples:
        inside = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
        yield f"{name}{suffix}{{{inside}}} {value!r}" if inside else f"{name}{suffix} {value!r}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
