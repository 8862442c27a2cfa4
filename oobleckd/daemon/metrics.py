"""Metrics for Prometheus, computed from the views when somebody asks.

Owns names, types and help texts, and that a text is made in turns of the loop and serves all who ask within a
second; no counter lives here. Names follow Prometheus's conventions: base units (seconds, bytes) in the name,
``_total`` for what only grows, ``_info`` for what is always 1. The text is the client library's.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import inf
from typing import cast, get_args

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from oobleckd import __version__
from oobleckd.core import view, watching
from oobleckd.core.context import Core
from oobleckd.core.run import Run
from oobleckd.core.state import JobRecord
from oobleckd.daemon import busy, devicemetrics
from oobleckd.daemon.service import Service
from oobleckd.daemon.stepseconds import BUCKETS_S, StepSeconds
from oobleckd.daemon.turns import Slice
from oobleckd.protocol.incidentviews import IncidentView, Phase
from oobleckd.protocol.jobviews import JobView, ProgressView
from oobleckd.protocol.nodeviews import DeviceFigures, NodeState

FRESH_S = 1.0
RECOVERY_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

Labelled = Mapping[tuple[str, ...], float]


class Scrapes:
    """The text as it was within the last ``FRESH_S`` seconds, however many ask for it."""

    def __init__(self, service: Service, clock: Callable[[], float] = time.monotonic) -> None:
        self._service, self._clock = service, clock
        self._making = asyncio.Lock()
        self._text, self._made_at = b"", float("-inf")

    async def text(self) -> bytes:
        """All metrics of the daemon, in the text format (version 0.0.4)."""
        async with self._making:
            if self._clock() - self._made_at >= FRESH_S:
                self._text = await render(self._service)
                self._made_at = self._clock()
            return self._text


async def render(service: Service) -> bytes:
    """All metrics as of now; others have turns of the loop between."""
    # Families made at each scrape, so that no counter is kept twice; what the format demands is the client
    # library's. (D-watching-012)
    core, part = service.core, Slice()
    jobs = []
    for job in core.state.shown:
        jobs.append(view.job_view(core, job))
        await part.over()
    texts = []
    for family in _families(service, jobs):
        texts.append(_written((family,)))
        await part.over()
    devices = [figures for node in view.node_views(core) for figures in node.figures]
    await part.over()
    texts.append(await asyncio.to_thread(_of_devices, devices, dict(core.devices_told.xids)))
    return b"".join(texts)


def _of_devices(devices: Sequence[DeviceFigures], xids: Mapping[tuple[str, int], float]) -> bytes:
    return _written(devicemetrics.families(devices, xids))


def _written(families: Iterable[Metric]) -> bytes:
    return generate_latest(cast("CollectorRegistry", _Of(families)))


class _Of(Collector):
    """What the client library writes out."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """As of every registry."""
        return self._families


def _families(service: Service, jobs: list[JobView]) -> Iterator[Metric]:
    core = service.core
    yield InfoMetricFamily("oobleck_build", "What this daemon is.", {"version": __version__})
    yield from _of_nodes(core)
    yield from _of_jobs(core, jobs)
    yield from _of_progress(core, {job.id: job.progress for job in jobs if job.progress is not None})
    yield from _of_steps(service.loop.step_seconds)
    yield from _of_time(core, jobs)
    yield from _of_incidents(view.incident_views(core))
    yield from _of_shell(service)
    yield from ProcessCollector(registry=None).collect()


def _of_nodes(core: Core) -> Iterator[Metric]:
    counts = Counter(node.state for node in view.node_views(core))
    states: Labelled = {(state,): float(counts[state]) for state in get_args(NodeState)}
    yield _gauge("oobleck_nodes", "Nodes by state.", states, "state")
    leaving = sum(core.members.nodes[name].alive for name in core.members.leaving)
    yield _gauge("oobleck_nodes_leaving", "Nodes that have notice of their end.", {(): float(leaving)})


def _of_jobs(core: Core, jobs: list[JobView]) -> Iterator[Metric]:
    opened = [job for job in jobs if job.finished_at is None]
    states: Labelled = {
        (state,): float(number) for state, number in sorted(Counter(job.state for job in jobs).items())
    }
    yield _gauge("oobleck_jobs", "Jobs by state.", states, "state")
    for name, text, values in (
        (
            "oobleck_job_skipped_in_row",
            "How many of the last steps, one after the other, made no update.",
            {job.id: float(job.skipped_in_row) for job in opened},
        ),
        ("oobleck_job_step", "Committed steps.", {job.id: float(job.step) for job in jobs}),
        ("oobleck_job_steps", "Steps to do.", {job.id: float(job.steps) for job in jobs}),
        ("oobleck_job_loss", "Loss of the last step.", {j.id: j.loss for j in jobs if j.loss is not None}),
        (
            "oobleck_job_generation",
            "Grows with each loss and each new plan.",
            {job.id: float(job.generation) for job in opened},
        ),
        ("oobleck_job_epoch", "The first name of generation.", {job.id: float(job.epoch) for job in opened}),
        (
            "oobleck_job_tolerance",
            "Nodes that can still be lost at once; -1 when not deployed.",
            {job.id: float(job.tolerance) for job in opened},
        ),
        (
            "oobleck_job_tolerance_wanted",
            "Nodes that the job asks to be able to lose (f).",
            {j.id: float(j.f) for j in opened},
        ),
        ("oobleck_job_nodes", "Nodes that train it.", {job.id: float(len(job.nodes)) for job in opened}),
        ("oobleck_job_step_seconds", "Median of the last steps.", {j.id: j.step_s for j in opened}),
        ("oobleck_job_samples_per_second", "Samples per second.", {j.id: j.samples_per_s for j in opened}),
        (
            "oobleck_job_checkpoint_step",
            "Steps in the last checkpoint.",
            {j.id: float(j.checkpoint_step) for j in opened},
        ),
    ):
        yield _gauge(name, text, {(job,): value for job, value in values.items()}, "job")
    yield from _of_evaluations(jobs)
    yield from _of_routers(jobs)
    yield _counter(
        "oobleck_job_steps_skipped_total",
        "Steps without an update: their loss or a gradient was not finite, or they were spikes.",
        {(job.id,): float(core.state.jobs[job.id].num_skipped) for job in jobs},
        "job",
    )
    yield _counter(
        "oobleck_job_steps_spiked_total",
        "Steps without an update that were spikes (train.on_spike), of those skipped.",
        {(job.id,): float(core.state.jobs[job.id].num_spiked) for job in jobs},
        "job",
    )
    for name, text, values in (
        (
            "oobleck_job_updates_early_total",
            "Updates that a device made before all votes were in.",
            {job.id: float(job.updates_early) for job in opened},
        ),
        (
            "oobleck_job_updates_taken_back_total",
            "Those of them that were in vain.",
            {job.id: float(job.updates_taken_back) for job in opened},
        ),
    ):
        yield _counter(name, text, {(job,): value for job, value in values.items()}, "job")
    yield from _of_gradients(core)
    lost = float(sum(job.steps_lost for job in jobs))
    yield _counter("oobleck_steps_lost_total", "Steps lost to dead layers.", {(): lost})


def _of_gradients(core: Core) -> Iterator[Metric]:
    """Of the active job, by device."""
    run = core.run
    messages: dict[tuple[str, ...], float] = {}
    sent: dict[tuple[str, ...], float] = {}
    if run is not None:
        for device, (number, num_bytes) in run.gradients.items():
            messages[run.job.id, device], sent[run.job.id, device] = number, num_bytes
    text = "Sums and means of gradients that a device sent to others in committed steps."
    yield _counter("oobleck_job_gradient_bytes_total", text, sent, "job", "device")
    yield _counter("oobleck_job_gradient_messages_total", "Messages with them.", messages, "job", "device")
    yield from _in_stages(run)


def _in_stages(run: Run | None) -> Iterator[Metric]:
    """What devices that share a stage had of each other; no samples where no stage has several."""
    of = run.in_stage if run is not None else {}
    job = run.job.id if run is not None else ""
    found: tuple[tuple[str, str, Labelled], ...] = (
        (
            "oobleck_job_gathered_bytes_total",
            "Weights that a device read of the others of its stage.",
            {(job, device): float(each.gathered_bytes) for device, each in of.items()},
        ),
        (
            "oobleck_job_shard_gradient_bytes_total",
            "Gradients that a device sent to the others of its stage.",
            {(job, device): float(each.gradient_bytes) for device, each in of.items()},
        ),
        (
            "oobleck_job_gather_wait_seconds_total",
            "Time in which a device waited for weights of the others of its stage.",
            {(job, device): each.waited_s for device, each in of.items()},
        ),
    )
    for name, text, values in found:
        yield _counter(name, text, values, "job", "device")


def _of_progress(core: Core, jobs: Mapping[str, ProgressView]) -> Iterator[Metric]:
    """What is not known yet has no sample. Tokens are counted as steps are, and those that a rollback took
    once more: the tokens of ``ProgressView`` may become fewer, and a counter must not.
    """
    records = core.state.jobs
    opened = {job: found for job, found in jobs.items() if not records[job].final}
    tokens: Labelled = {
        (job,): float(found.tokens + _tokens_lost(records[job])) for job, found in jobs.items()
    }
    yield _counter("oobleck_job_tokens_total", "Tokens of all committed steps.", tokens, "job")
    for name, text, values in (
        (
            "oobleck_job_tokens_per_second",
            "Tokens per second, as the last steps took.",
            {job: found.tokens_per_s for job, found in opened.items()},
        ),
        (
            "oobleck_job_eta_seconds",
            "Until the last step, at the pace of the last ones.",
            {job: found.left_s for job, found in opened.items() if found.left_s >= 0},
        ),
        (
            "oobleck_job_elapsed_seconds",
            "Since the first plan was in force.",
            {job: found.elapsed_s for job, found in jobs.items()},
        ),
        (
            "oobleck_job_mfu_ratio",
            "Model FLOPs done, of the peak that the devices' data sheets have.",
            {job: found.mfu for job, found in opened.items() if found.peak_flops and found.flops_per_token},
        ),
        (
            "oobleck_job_goodput_ratio",
            "Share of its devices' time that was not lost, since the first plan.",
            {job: found.goodput for job, found in jobs.items()},
        ),
    ):
        yield _gauge(name, text, {(job,): value for job, value in values.items()}, "job")


def _tokens_lost(job: JobRecord) -> int:
    return job.samples_lost * job.spec.train.sequence


def _of_steps(found: StepSeconds) -> Iterator[Metric]:
    family = HistogramMetricFamily(
        "oobleck_job_step_duration_seconds", "Committed steps since the daemon's start.", labels=["job"]
    )
    for job, took in found.jobs.items():
        limits = [*(f"{limit:g}" for limit in BUCKETS_S), "+Inf"]
        so_far = accumulate(map(float, took.within))
        family.add_metric((job,), list(zip(limits, so_far, strict=True)), took.sum_s)
    yield family


def _of_evaluations(jobs: list[JobView]) -> Iterator[Metric]:
    last = {job.id: job.evaluation.last for job in jobs if job.evaluation is not None and job.evaluation.last}
    losses: dict[tuple[str, ...], float] = {}
    perplexities: dict[tuple[str, ...], float] = {}
    for job, found in last.items():
        for each in found.losses:
            if each.loss is not None:
                losses[job, each.source] = each.loss
                perplexities[job, each.source] = inf if each.perplexity is None else each.perplexity
    yield _gauge("oobleck_job_eval_loss", "Mean loss of the last evaluation.", losses, "job", "source")
    text = "Perplexity of the last evaluation."
    yield _gauge("oobleck_job_eval_perplexity", text, perplexities, "job", "source")
    steps: Labelled = {(job,): float(found.step) for job, found in last.items()}
    yield _gauge("oobleck_job_eval_step", "Steps before the last evaluation.", steps, "job")
    took: Labelled = {(job,): found.seconds for job, found in last.items()}
    yield _gauge("oobleck_job_eval_seconds", "What the last evaluation took.", took, "job")


def _of_routers(jobs: list[JobView]) -> Iterator[Metric]:
    """Of each layer of mixtures of experts that are not over. The tokens of each expert would be a series
    each, layers times experts of them: the API has them.
    """
    found = [(job.id, each) for job in jobs if job.finished_at is None for each in job.routers]
    for name, text, value in (
        (
            "oobleck_job_router_aux_loss",
            "Load-balancing loss of a layer's router in the last step, before its coefficient; 1: balanced.",
            lambda each: each.aux_loss,
        ),
        (
            "oobleck_job_router_z_loss",
            "Z-loss of a layer's router in the last step, before its coefficient.",
            lambda each: each.z_loss,
        ),
        (
            "oobleck_job_expert_load_ratio",
            "Tokens of a layer's expert with most in the last step, of those of the mean.",
            lambda each: each.load,
        ),
        (
            "oobleck_job_experts_idle",
            "Experts of a layer without a token in the last step.",
            lambda each: float(each.idle),
        ),
    ):
        values: Labelled = {
            (job, str(each.layer)): number for job, each in found if (number := value(each)) is not None
        }
        yield _gauge(name, text, values, "job", "layer")


def _of_time(core: Core, jobs: list[JobView]) -> Iterator[Metric]:
    """What is booked of an open incident may move to another cause when it is over, so these are gauges."""
    spent: dict[tuple[str, ...], float] = {}
    for job in jobs:
        if job.finished_at is None:
            goodput = watching.goodput_view(core, core.state.jobs[job.id])
            spent[job.id, "useful"] = goodput.useful_s
            spent[job.id, "evaluation"] = goodput.evaluated_s
            for cause, seconds in goodput.lost_s.items():
                spent[job.id, cause] = seconds
    text = "Time of the job's live devices, by what it went into; only useful is training."
    yield _gauge("oobleck_job_device_seconds", text, spent, "job", "spent")


def _of_incidents(incidents: list[IncidentView]) -> Iterator[Metric]:
    closed = [incident for incident in incidents if not incident.open]
    took = [incident.total_s for incident in closed]
    within = Counter(bisect_left(RECOVERY_BUCKETS_S, total) for total in took)
    so_far = accumulate(within[index] for index in range(len(RECOVERY_BUCKETS_S)))
    buckets = [(f"{limit:g}", float(n)) for limit, n in zip(RECOVERY_BUCKETS_S, so_far, strict=True)]
    yield HistogramMetricFamily(
        "oobleck_recovery_seconds",
        "Recoveries from the first evidence to the resumed step.",
        buckets=[*buckets, ("+Inf", float(len(took)))],
        sum_value=sum(took),
    )
    of_phases: dict[tuple[str, ...], float] = {(phase,): 0.0 for phase in get_args(Phase)}
    for each in (phase for incident in closed for phase in incident.phases):
        of_phases[each.phase,] += each.duration_s
    yield _counter(
        "oobleck_recovery_phase_seconds_total", "Time in recoveries, by phase.", of_phases, "phase"
    )
    redone, copied = sum(i.layer_gradients for i in closed), sum(i.copied_bytes for i in closed)
    yield _counter(
        "oobleck_layer_gradients_redone_total", "Layer-gradients computed again.", {(): float(redone)}
    )
    yield _counter("oobleck_recovery_copied_bytes_total", "State copied in recoveries.", {(): float(copied)})
    opened = float(len(incidents) - len(closed))
    yield _gauge("oobleck_incidents_open", "Recoveries under way.", {(): opened})


def _of_shell(service: Service) -> Iterator[Metric]:
    hub, datagrams, loop = service.hub.counters, service.hub.heartbeats.counters, service.loop
    up_s = service.clock.now() - service.started_at
    yield _gauge("oobleck_up_seconds", "Age of this incarnation of the daemon.", {(): up_s})
    text = "The longest time in the last minute in which the daemon heard nobody."
    yield _gauge("oobleck_loop_longest_seconds", text, {(): busy.longest_s()})
    failing = float(bool(service.journal.trouble))
    yield _gauge("oobleck_journal_failing", "1 while the journal cannot be written.", {(): failing})
    for name, text, number in (
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
        ("oobleck_datagram_beats_total", "Heartbeats of idle nodes by UDP.", datagrams.datagram_heartbeats),
        ("oobleck_datagram_answers_total", "Answers of silent nodes by UDP.", datagrams.datagram_answers),
        ("oobleck_strange_datagrams_total", "Datagrams of no session.", datagrams.datagrams_strange),
        ("oobleck_forged_datagrams_total", "Datagrams with a wrong code.", datagrams.datagrams_forged),
        ("oobleck_replayed_datagrams_total", "Datagrams said before.", datagrams.datagrams_replayed),
        ("oobleck_journal_errors_total", "Failed writes of the journal.", service.journal.num_errors),
        ("oobleck_manifest_errors_total", "Failed tries to complete a checkpoint.", loop.num_manifest_errors),
        (
            "oobleck_planner_rebuilt_total",
            "Planner processes lost and made anew.",
            service.planning.num_rebuilt,
        ),
        (
            "oobleck_planner_invalid_orders_total",
            "Plans whose orders of ops could not be run and were left out.",
            service.planning.num_invalid,
        ),
        (
            "oobleck_replay_errors_total",
            "Failed writes of the past that is kept for replay.",
            service.recorder.store.num_errors if service.recorder is not None else 0,
        ),
    ):
        yield _counter(name, text, {(): float(number)})


def _gauge(name: str, text: str, samples: Labelled, *labels: str) -> Metric:
    return _with(GaugeMetricFamily(name, text, labels=labels), samples)


def _counter(name: str, text: str, samples: Labelled, *labels: str) -> Metric:
    return _with(CounterMetricFamily(name, text, labels=labels), samples)


def _with(family: GaugeMetricFamily | CounterMetricFamily, samples: Labelled) -> Metric:
    for labels, value in samples.items():
        family.add_metric(labels, value)
    return family
