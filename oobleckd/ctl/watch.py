"""Verbs for who watches: what would follow a loss, an incident as a file; and what ``describe`` prints of
schedules.

Owns the words. Answers are the daemon's.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from oobleckd.client import Client
from oobleckd.ctl.connect import client as connect
from oobleckd.ctl.connect import connected, translated
from oobleckd.ctl.get.columns import in_brackets
from oobleckd.ctl.names import bare, incident_names, job_names
from oobleckd.ctl.options import file_option, named_file, socket_option, wants_json
from oobleckd.ctl.output import (
    FAILED,
    NOT_FOUND,
    USAGE,
    Failure,
    emit_fields,
    emit_item,
    emit_line,
    emit_table,
    fail,
    note,
    when,
)
from oobleckd.draw.lines import plain as unstyled
from oobleckd.draw.schedule import LEGEND, Row, ScheduleMark, draw
from oobleckd.protocol.jobviews import PipelineView
from oobleckd.protocol.watch import ImpactView, LaneView, OpView, ScheduleView
from oobleckd.words import count, layers, seconds, size

_WIDTH = (60, 140)
_MAX_ROWS = 40
_DRAWN = frozenset({"F", "B", "I", "W"})


# --------------------------------------------------------------------------- describe schedule


def describe_schedule(client: Client, job: str, step: int, *, modelled: bool) -> None:
    """A step as it was, or as modelled."""
    found = client.schedule(client.job(job).id, step, modelled=modelled)
    if wants_json():
        emit_item("Schedule", found)
        return
    emit_fields(_headline(found))
    shown = [lane for lane in found.lanes if lane.ops]
    rows = [Row(_label(lane), [_mark(op) for op in lane.ops if op.kind in _DRAWN]) for lane in shown]
    width = min(max(shutil.get_terminal_size((100, 24)).columns, _WIDTH[0]), _WIDTH[1])
    for line in (*draw(rows, width, _MAX_ROWS), LEGEND):
        emit_line(unstyled(line))


def _headline(found: ScheduleView) -> dict[str, str]:
    alive = [lane for lane in found.lanes if not lane.dead]
    waiting = sum(lane.bubble for lane in alive) / len(alive) if alive else 0.0
    moved = Counter((op.origin, lane.device) for lane in found.lanes for op in lane.ops if op.origin)
    again = sum(op.again for lane in found.lanes for op in lane.ops)
    how = "measured" if found.measured else "as modelled"
    return {
        "step": f"{found.step} of {found.job}, generation {found.generation}, {how}",
        "began": when(found.at) if found.measured else "",
        "took": seconds(found.span_s),
        "waiting": f"{waiting:.1%} of the devices' time (bubble)",
        "lost": ", ".join(lane.device for lane in found.lanes if lane.dead),
        "re-routed": "; ".join(
            f"{count(number, 'op')} of {origin} by {device}"
            for (origin, device), number in sorted(moved.items())
        ),
        "done again": count(again, "op") if again else "",
        "gathers": _gathers(alive),
    }


def _gathers(alive: Sequence[LaneView]) -> str:
    """For how long a device computed nothing, as weights that others of its stage hold were not here yet."""
    most = max((sum(op.gather_s for op in lane.ops) for lane in alive), default=0.0)
    return f"weights waited for: {seconds(most)} on a device at most" if most else ""


def _label(lane: LaneView) -> str:
    stages = ", ".join(map(str, lane.stages)) or "-"
    return f"{lane.pipeline}: {lane.device} ({stages})"


def _mark(op: OpView) -> ScheduleMark:
    return ScheduleMark(op.micro_batch, op.kind != "F", op.start_s, op.stop_s)


# --------------------------------------------------------------------------- what-if


@click.command()
@click.option(
    "--without", multiple=True, required=True, metavar="NODE[,NODE]", help="The nodes (repeat for more)."
)
@click.argument("job", required=False, default="", callback=bare, shell_complete=job_names)
@connected
def what_if(client: Client, without: tuple[str, ...], job: str) -> None:
    """Say what would follow for JOB (or the one that runs) if these nodes died now, all at once. Nothing
    happens to them.

    Exit code 3 where the job would stop.
    """
    nodes = [name for names in without for name in names.split(",") if name]
    if not nodes:
        fail("--without names no node", "write --without node-1,node-2", USAGE)
    found = client.impact(client.job(job).id if job else "", nodes)
    if wants_json():
        emit_item("Impact", found)
    else:
        emit_fields(_what_follows(found))
        if found.plan:
            emit_table(("PIPELINE", "NODES", "STAGES", "MICRO-BATCHES"), [_pipeline(p) for p in found.plan])
        if found.rejected:
            emit_line("rejected:")
            emit_table(
                ("WAY", "COST", "WHY"), [(way.what, seconds(way.cost_s), way.why) for way in found.rejected]
            )
    if found.stops:
        fail(f"{found.job} would stop", "start more nodes first", NOT_FOUND)


def _what_follows(found: ImpactView) -> dict[str, str]:
    steps = found.steps_back
    lost = _ranges(found.lost_layers)
    if found.stops:
        then = {"then": "the job stops and waits for nodes"}
    else:
        then = {
            "pause": f"{seconds(found.stall_s)} as modelled",
            "throughput": f"{found.throughput:.1%} of now",
            "copies": f"{size(found.copied_bytes)} in {seconds(found.copy_s)} on the busiest link"
            if found.copied_bytes
            else "nothing",
            "can lose": f"{count(found.can_lose, 'node')} then",
        }
    return {
        "without": ", ".join(found.nodes),
        "job": found.job,
        "lost layers": lost or "none: every layer has a copy left",
        "rolls back": f"{count(steps, 'step')}, to the last checkpoint" if steps or lost else "no step",
        **then,
        "because": found.reason,
    }


def _ranges(numbers: Sequence[int]) -> str:
    """``"0-3, 7"``."""
    parts: list[tuple[int, int]] = []
    for number in numbers:
        if parts and parts[-1][1] == number:
            parts[-1] = (parts[-1][0], number + 1)
        else:
            parts.append((number, number + 1))
    return ", ".join(layers(start, stop) for start, stop in parts)


def _pipeline(pipeline: PipelineView) -> tuple[str, str, str, str]:
    stages = ", ".join(
        f"{stage.name}: {layers(stage.start, stage.stop)}{in_brackets(stage.absence)}"
        for stage in pipeline.shown
    )
    return str(pipeline.index), ", ".join(pipeline.nodes), stages, str(len(pipeline.micro_batches))


# --------------------------------------------------------------------------- export-incident


@click.command()
@click.argument("incident", callback=bare, shell_complete=incident_names)
@file_option("The file to write.", old=True)
@socket_option
def export_incident(incident: str, file: Path | None) -> None:
    """Write INCIDENT to a file, with the past around it, to be looked at elsewhere. Prints the file."""
    target = named_file(file)
    if target is None:
        fail("--to is missing", "name the file to write", USAGE)
    with translated():
        found = connect().bundle(incident)
    try:
        target.write_bytes(msgspec.json.encode(found))
    except OSError as error:
        raise Failure(f"{target}: {error.strerror}", "name another file with --to", FAILED) from error
    if wants_json():
        emit_item("IncidentExport", found.incident)
        return
    emit_line(str(target))
    note(
        f"{found.incident.id}: {count(len(found.past.changes), 'change')} "
        f"from {when(found.past.snapshot.at, 0)} to {when(found.past.until, 0)}"
    )
