"""Verbs that show what is: ``status`` and ``describe``. Lists are ``get``'s, schedules ``watch``'s."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

import click
import msgspec

from oobleckd.client import Client
from oobleckd.ctl import devicefigures, evaluations, progress
from oobleckd.ctl.connect import connected
from oobleckd.ctl.get import columns
from oobleckd.ctl.get.kinds import bare_name, listed
from oobleckd.ctl.names import described_names
from oobleckd.ctl.options import wants_json
from oobleckd.ctl.output import (
    NOT_FOUND,
    USAGE,
    emit_fields,
    emit_item,
    emit_line,
    emit_table,
    fail,
    tolerance,
    when,
)
from oobleckd.ctl.watch import describe_schedule
from oobleckd.draw import experts
from oobleckd.draw.times import day
from oobleckd.planner.plan import Recompute
from oobleckd.protocol import modelnotes
from oobleckd.protocol.api import LostRecords
from oobleckd.protocol.incidentviews import IncidentView
from oobleckd.protocol.inputs import Input
from oobleckd.protocol.jobviews import JobView
from oobleckd.protocol.nodeviews import LayerRange, NodeView, held_together
from oobleckd.protocol.traits import NONE, between, words
from oobleckd.words import count, layers, noun, seconds, size, why_skipped


@click.command()
@connected
def status(client: Client) -> None:
    """Show the daemon's headline."""
    found = client.status()
    if wants_json():
        emit_item("Status", found)
        return
    emit_fields({
        "oobleckd": f"{found.version}, up {seconds(found.up_s)}",
        "now": found.line,
        "nodes": f"{found.nodes} of {found.expected}" if found.nodes < found.expected else str(found.nodes),
        "jobs": str(found.jobs),
        "endpoint": found.endpoint,
        "state": found.state_dir,
        "injection": "allowed" if found.allow_injection else "not allowed",
        **({"records lost": "; ".join(map(_lost, found.lost_records))} if found.lost_records else {}),
    })  # fmt: skip


def _lost(records: LostRecords) -> str:
    kept = f" ({records.kept_as} is what was left)" if records.kept_as else ""
    return f"{day(records.at)}: {records.what}{kept}"


View = TypeVar("View", bound=msgspec.Struct)


# --------------------------------------------------------------------------- describe


_MODES: tuple[Recompute, ...] = ("none", "selective", "blocks")
_DESCRIBED = ("job", "node", "incident", "schedule")


@click.command()
@click.argument("words", nargs=-1, required=True, metavar="KIND NAME...", shell_complete=described_names)
@click.option(
    "--step", type=click.IntRange(min=1), metavar="N", help="Of a schedule: that step, not the newest."
)
@click.option("--modelled", is_flag=True, help="Of a schedule: as the planner has it, not as it was.")
@connected
def describe(client: Client, words: tuple[str, ...], step: int | None, modelled: bool) -> None:
    """Show everything about a job, node or incident (KIND NAME, or KIND/NAME; kinds as with get), or the
    schedule of a job: who did what when in a step.
    """
    wanted = _wanted(words)
    if any(what != "schedule" for what, _ in wanted) and (step is not None or modelled):
        fail(f"--step and --modelled are of a schedule, not of a {wanted[0][0]}", "leave them out", USAGE)
    for index, (what, name) in enumerate(wanted):
        if index and not wants_json():
            emit_line()
        if what == "schedule":
            describe_schedule(client, name, step or 0, modelled=modelled)
        else:
            _describe(client, what, name)


def _wanted(words: Sequence[str]) -> list[tuple[str, str]]:
    """What and which, of each. Raises Failure with exit code 2."""
    if words[0] in {"schedule", "schedules"}:
        found = [("schedule", bare_name(name)) for name in words[1:]]
    else:
        found = [(kind.singular, name) for kind, names in listed(words) for name in names]
        kinds = [kind.singular for kind, _ in listed(words)]
        if other := next((kind for kind in kinds if kind not in _DESCRIBED), ""):
            fail(f"no {other} is described", f"`oobleckctl get {other} -o wide` shows them", USAGE)
    if not found:
        fail("NAME is missing", f"`oobleckctl get {words[0]}` lists them", USAGE)
    return found


def _describe(client: Client, what: str, name: str) -> None:
    match what:
        case "job":
            _describe_job(client, client.job(name))
        case "node":
            _describe_node(_one("node", name, {node.name: node for node in client.nodes()}))
        case _:
            _describe_incident(_one("incident", name, {found.id: found for found in client.incidents()}))


def _one(what: str, name: str, known: dict[str, View]) -> View:
    if name not in known:
        names = ", ".join(sorted(known)) or "none"
        fail(f"no {what} {name!r}", f"known: {names}", NOT_FOUND)
    return known[name]


def _describe_job(client: Client, job: JobView) -> None:
    if wants_json():
        emit_item("Job", job)
        return
    emit_fields({
        "job": f"{job.name} ({job.id})",
        "state": f"{job.state}{': ' if job.reason else ''}{job.reason}",
        "step": f"{job.step} of {job.steps}",
        **progress.facts(job),
        "skipped": _skipped(job),
        "loss": columns.job_loss(job, 6) if job.step else "",
        **evaluations.facts(job),
        "experts": experts.said(job.routers),
        "generation": str(job.generation),
        "can lose": _can_lose(job),
        "policy": job.policy,
        "submitted": when(job.submitted_at),
        "finished": "" if job.finished_at is None else when(job.finished_at),
        "incidents": f"{job.incidents:,}, {count(job.steps_lost, 'step')} lost",
        "schedule": _schedule(job),
        "stages": _stages(job),
        "recompute": _recompute(job),
        "boundary cache": f"at most {job.boundary_bytes / 1e6:,.1f} MB on a device"
        if job.boundary_bytes
        else "none",
        "gradient sums": f"copied to a peer {count(job.sum_copies, 'time')} a step" if job.sum_copies else "",
        "checkpoint": f"{job.checkpoint} (step {job.checkpoint_step})" if job.checkpoint else "",
        "no checkpoint": job.checkpoint_trouble.text if job.checkpoint_trouble is not None else "",
        "cadence": _cadence(job),
        "folder": "; ".join(map(modelnotes.words, job.notes)),
        "bits": _bits(job),
        "deaths": "; ".join(f"step {each.step}: {each.text}" for each in job.deaths[-3:]),
        "data": _data(job),
        "digest": job.digest,
    })  # fmt: skip
    if job.pipelines:
        emit_line("pipelines:")
        columns.table(columns.PIPELINE, job.pipelines)
    incidents = [incident for incident in client.incidents() if incident.job == job.id]
    if incidents:
        emit_line("incidents:")
        columns.table(columns.INCIDENT, incidents)


def _can_lose(job: JobView) -> str:
    """How many nodes, of how many that were asked for."""
    still = tolerance(job.tolerance, job.f)
    return f"{still} {noun(job.f, 'node')}" if 0 <= job.tolerance <= job.f else still


def _stages(job: JobView) -> str:
    """How many devices share one, where that is not one by default."""
    wanted = job.spec.resources.devices_per_stage
    if wanted == 1 or not job.devices_per_stage:
        return ""
    each = f"of {count(job.devices_per_stage, 'device')}"
    return f"auto: {each}" if wanted == "auto" else each


def _recompute(job: JobView) -> str:
    """What blocks compute again in the backward, and where the planner chose, on how many devices."""
    wanted = job.spec.schedule.recompute
    if wanted != "auto" or not job.pipelines:
        return "" if wanted == "none" else wanted
    modes = Counter(
        pipeline.recompute.get(device, "none")
        for pipeline in job.pipelines
        for device in {stage.device for stage in pipeline.stages}
    )
    found = [f"{mode} on {count(modes[mode], 'device')}" for mode in _MODES if modes[mode]]
    return f"auto: {', '.join(found)}"


def _skipped(job: JobView) -> str:
    """How many steps made no update, and what follows of them."""
    if not job.steps_skipped:
        return ""
    row = f", {job.skipped_in_row} in a row now" if job.skipped_in_row else ""
    return (
        f"{count(job.steps_skipped, 'step')}{row}: {why_skipped(job.steps_skipped, job.steps_spiked)} "
        f"({_on_skipped(job)})"
    )


def _on_skipped(job: JobView) -> str:
    """What the job says of the causes that it has met."""
    train = job.spec.train
    keys = [f"train.on_nan = {train.on_nan}"] if job.steps_spiked < job.steps_skipped else []
    keys += [f"train.on_spike = {train.on_spike}"] if job.steps_spiked else []
    return ", ".join(keys)


def _bits(job: JobView) -> str:
    """Why the job does not end bit for bit where another run does; "" where it does."""
    if job.differences:
        return f"not comparable: {'; '.join(map(str, job.differences))}"
    told = dict.fromkeys(words(between(kind, job.kinds[0])) for kind in job.kinds[1:])
    return f"not comparable: trained by devices that differ: {'; '.join(told)}" if told else ""


def _data(job: JobView) -> str:
    """What the job reads, and up to where it is known to have been that."""
    said = [f"{each.place}: {size(each.num_bytes)}, {_digest(each)}" for each in job.inputs]
    checked = f"; read again and found right up to step {job.checked_step}" if job.checked_step else ""
    return f"{'; '.join(said)}{checked}" if said else ""


def _digest(found: Input) -> str:
    whole = found.whole.partition("-")[2]
    return f"SHA-256 {whole[:16]}" if whole else f"not read as a whole yet, blocks {found.blocks[:16]}"


def _cadence(job: JobView) -> str:
    """How often checkpoints are written, and why so often."""
    every, found = job.spec.checkpoint.every, job.cadence
    if every == 0:
        return "at the end and on demand"
    if every != "auto":
        return f"every {count(every, 'step')}"
    if found is None:
        return "auto"
    cost = f"one costs {seconds(found.cost_s)}{'' if found.measured else ' as modelled'}"
    needed = f"one is needed every {seconds(found.mtbf_s)}"
    return f"auto: every {count(found.steps, 'step')} ({seconds(found.interval_s)}), as {cost} and {needed}"


def _schedule(job: JobView) -> str:
    schedule = job.spec.schedule
    words = f"{schedule.backward} backward, {schedule.update} update"
    if not job.updates_early:
        return words
    share = job.updates_taken_back / job.updates_early
    return f"{words} ({job.updates_early} made early, {share:.1%} of them taken back)"


def _describe_node(node: NodeView) -> None:
    if wants_json():
        emit_item("Node", node)
        return
    emit_fields({
        "node": node.name,
        "state": f"{node.state}{': ' if node.reason else ''}{node.reason}",
        "host": node.host,
        "zone": node.zone,
        "incarnation": node.incarnation,
        "last heartbeat": f"{seconds(node.heartbeat_age_s)} ago",
        "devices": ", ".join(
            f"{device} ({kind}, pid {pid})"
            for device, kind, pid in zip(node.devices, node.bits or node.kinds, node.pids, strict=False)
        ),
        "spare": _spare(node),
        "layers": _held(node.layers),
        "redundant": _held(node.redundant),
    })  # fmt: skip
    devicefigures.show(node.figures)
    names = {name: None for traits in node.traits for name in traits}
    if names:
        emit_line("what decides bits:")
        rows = [(name, *(traits.get(name, NONE) for traits in node.traits)) for name in names]
        emit_table(("TRAIT", *node.devices), rows)


def _held(ranges: Sequence[LayerRange]) -> str:
    return ", ".join(f"{held.device}: {layers(held.start, held.stop)}" for held in held_together(ranges))


def _spare(node: NodeView) -> str:
    if not node.spare:
        return "none"
    memory = f", {size(node.spare_bytes)}" if node.spare_bytes else ""
    return f"{node.spare} (pid {node.spare_pid}{memory})"


def _from(incident: IncidentView) -> str:
    """Who sent how much, where anybody did."""
    sent = ", ".join(f"{source.device} ({size(source.num_bytes)})" for source in incident.sources)
    return f" from {sent}" if sent else ""


def _describe_incident(incident: IncidentView) -> None:
    if wants_json():
        emit_item("Incident", incident)
        return
    of = count(incident.step_layer_gradients, "layer-gradient")
    redone = f"{incident.layer_gradients:,} of {of} of the step"
    emit_fields({
        "incident": incident.id,
        "job": incident.job,
        "cause": incident.cause,
        "nodes": ", ".join(incident.nodes),
        "at": f"{when(incident.at)}, step {incident.step}, generation {incident.generation}",
        "took": "still open" if incident.open else seconds(incident.total_s),
        "step committed": f"after {seconds(incident.committed_s)}" if incident.committed_s else "",
        "computed again": redone if incident.step_layer_gradients else "",
        "copied": size(incident.copied_bytes) + _from(incident),
        "steps lost": str(incident.steps_lost),
        "reason": incident.reason,
    })  # fmt: skip
    emit_table(
        ("PHASE", "BEGAN", "TOOK"),
        [(phase.phase, "+" + seconds(phase.start_s), seconds(phase.duration_s)) for phase in incident.phases],
    )
    if incident.rejected:
        emit_line(f"rejected (the way taken: {seconds(incident.cost_s)} as modelled):")
        emit_table(
            ("WAY", "COST", "WHY"), [(way.what, seconds(way.cost_s), way.why) for way in incident.rejected]
        )
