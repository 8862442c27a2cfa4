"""What happens to the nodes of a cluster, and when: read from a file. Traces that are drawn are made by
``failures``.

Owns the formats. Two are known, told apart by their lines: that of the Bamboo and Oobleck artefacts,
``ms,add|remove,node``, and our own, ``t_seconds,fail|leave|join,node,notice_seconds,zone`` (notice and zone
may be left out, and a first line with the names of the columns, before all events, is skipped). A node's zone
is said where it joins, once or each time. Times never decrease. What joins at the first instant of a file is
the cluster as it begins, and that instant is 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Literal

import msgspec

from oobleckd.host import anyfile
from oobleckd.words import plain

Kind = Literal["fail", "leave", "join"]
_MAX_BYTES = 64 * 2**20
_HOW = (
    "lines are `t_seconds,fail|leave|join,node,notice_seconds,zone`, or `ms,add|remove,node` "
    "(docs/simulator.md)"
)
_HEADER = "t_seconds"
_THEIRS: dict[str, Kind] = {"add": "join", "remove": "fail"}
_OURS: tuple[Kind, ...] = ("fail", "leave", "join")


class TraceError(ValueError):
    """A trace that cannot be used: what, where, and a hint."""

    def __init__(self, problem: str, hint: str = _HOW) -> None:
        super().__init__(problem)
        self.problem = problem
        self.hint = hint


class TraceEvent(msgspec.Struct, frozen=True):
    """``node`` fails without a word, leaves in order, or joins, at ``at_s`` seconds. ``notice_s``: a leave is
    known so long before the node is gone; then ``at_s`` is when it becomes known.
    """

    at_s: float
    kind: Kind
    node: str
    notice_s: float = 0.0


class Trace(msgspec.Struct, frozen=True):
    """``nodes`` are there at 0; ``events`` in order of time, until ``duration_s``. ``zones``: node -> what it
    fails together with, where that is known. ``seed``: by which it was drawn; 0 of one that was read.
    """

    name: str
    nodes: tuple[str, ...]
    events: tuple[TraceEvent, ...]
    duration_s: float
    zones: dict[str, str] = {}
    seed: int = 0

    @property
    def max_nodes(self) -> int:
        """As many are there at once at most."""
        count = highest = len(self.nodes)
        for event in self.events:
            count += 1 if event.kind == "join" else -1
            highest = max(highest, count)
        return highest


def node_names(num_nodes: int) -> tuple[str, ...]:
    """node-1, node-2, …: as ``oobleckctl up`` calls them."""
    return tuple(f"node-{number}" for number in range(1, num_nodes + 1))


def read_trace(path: Path, *, num_nodes: int = 0, duration_s: float = 0.0) -> Trace:
    """The trace in a file.

    ``num_nodes``: node-1 to node-N are there at the beginning, where nothing joins at the first instant of
    the file. ``duration_s``: how much of it counts (0: until its last line). Raises TraceError naming the
    line.
    """
    try:
        lines = anyfile.text(path, _MAX_BYTES).splitlines()
    except (FileNotFoundError, anyfile.FileError) as error:
        reason = error.strerror if isinstance(error, FileNotFoundError) else error
        raise TraceError(f"{path}: {reason}", "name a file of events; " + _HOW) from error
    # A column of the trace and no option: zones make a difference where they are lost together, and only a
    # trace tells that. (D-simulator-014)
    zones: dict[str, str] = {}
    events = [event for number, line in enumerate(lines, 1) for event in _read(path, number, line, zones)]
    if not events:
        raise TraceError(f"{path}: no events")
    trace = _trace(path, events, num_nodes, duration_s)
    return msgspec.structs.replace(trace, zones=zones)


def _trace(path: Path, events: Sequence[TraceEvent], num_nodes: int, duration_s: float) -> Trace:
    first_s = events[0].at_s
    begins = [event.node for event in events if event.at_s == first_s and event.kind == "join"]
    if begins:
        nodes = tuple(begins)
        rest = [_shifted(event, first_s) for event in events if event.at_s > first_s or event.kind != "join"]
    elif num_nodes:
        nodes, rest = node_names(num_nodes), list(events)
    else:
        raise TraceError(
            f"{path}: nobody joins at its first instant, so it does not say which nodes are there",
            "say how many with --nodes (they are node-1, node-2, …), or begin the file with their joins",
        )
    until_s = duration_s or max((event.at_s + event.notice_s for event in rest), default=0.0)
    if until_s <= 0:
        raise TraceError(
            f"{path}: nothing happens after its first instant", "say for how long with --duration"
        )
    kept = tuple(event for event in rest if event.at_s <= until_s)
    _check(path, nodes, rest)
    return Trace(path.stem, nodes, kept, until_s)


def _shifted(event: TraceEvent, first_s: float) -> TraceEvent:
    return msgspec.structs.replace(event, at_s=event.at_s - first_s)


def _read(path: Path, number: int, line: str, zones: dict[str, str]) -> Iterable[TraceEvent]:
    """The event of a line; none of an empty one, a comment or the names of the columns. A zone that it tells
    is written into ``zones``.
    """
    text = line.partition("#")[0].strip()
    if not text or text.startswith(_HEADER):
        return ()
    cells = [cell.strip() for cell in text.split(",")]
    where = f"{path}, line {number}"
    if not 3 <= len(cells) <= 5 or not cells[2]:
        raise TraceError(f"{where}: {text!r} is no event")
    if cells[1] in _THEIRS and len(cells) == 3:
        return (TraceEvent(_seconds(where, cells[0]) / 1000.0, _THEIRS[cells[1]], cells[2]),)
    kind: Kind | None = next((each for each in _OURS if each == cells[1]), None)
    if kind is None:
        raise TraceError(f"{where}: no event {cells[1]!r}")
    at, _, node, notice, zone = [*cells, "", ""][:5]
    notice_s = _seconds(where, notice) if notice else 0.0
    if notice_s and kind != "leave":
        raise TraceError(f"{where}: a {kind} has no notice", "only a leave is known before the node is gone")
    if zone:
        _note_zone(where, kind, node, zone, zones)
    return (TraceEvent(_seconds(where, at), kind, node, notice_s),)


def _note_zone(where: str, kind: Kind, node: str, zone: str, zones: dict[str, str]) -> None:
    if kind != "join":
        raise TraceError(f"{where}: a {kind} has no zone", "a node's zone is said where it joins")
    if zones.setdefault(node, zone) != zone:
        raise TraceError(
            f"{where}: {node} is in zone {zones[node]!r} before, and in {zone!r} now",
            "give another machine another name",
        )


def _seconds(where: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise TraceError(f"{where}: {text!r} is no number") from error
    if not 0.0 <= value < float("inf"):
        raise TraceError(f"{where}: {text!r} is no time")
    return value


def _check(path: Path, nodes: Sequence[str], events: Sequence[TraceEvent]) -> None:
    """Times never decrease; who goes is there, and who comes is not, nor on its way out."""
    if any(event.at_s < before.at_s for before, event in pairwise(events)):
        raise TraceError(f"{path}: times decrease", "sort its lines by time")
    there = set(nodes)
    if len(there) < len(nodes):
        raise TraceError(f"{path}: a node joins twice at the first instant")
    gone_s: dict[str, float] = {}
    for _, together in groupby(events, key=lambda event: event.at_s):
        for event in together:
            where = f"{path}: at {plain(event.at_s)} s {event.node}"
            if (event.kind == "join") == (event.node in there):
                what = "joins and is there" if event.kind == "join" else f"is not there to {event.kind}"
                raise TraceError(f"{where} {what}")
            if event.kind == "join" and event.at_s < gone_s.get(event.node, 0.0):
                raise TraceError(
                    f"{where} joins, and is there until its notice is over, at {plain(gone_s[event.node])} s",
                    "a node comes back after it is gone",
                )
            gone_s[event.node] = event.at_s + event.notice_s
            (there.add if event.kind == "join" else there.discard)(event.node)


def written(trace: Trace) -> str:
    """``trace`` in our own format, with its header."""
    header = f"{_HEADER},event,node,notice_seconds" + (",zone" if trace.zones else "")
    begins = [TraceEvent(0.0, "join", node) for node in trace.nodes]
    lines = [_line(event, trace.zones) for event in (*begins, *trace.events)]
    return "\n".join([header, *lines]) + "\n"


def _line(event: TraceEvent, zones: Mapping[str, str]) -> str:
    cells = [_number(event.at_s), event.kind, event.node, _number(event.notice_s)]
    if event.kind == "join" and event.node in zones:
        cells.append(zones[event.node])
    return ",".join(cells)


def _number(seconds: float) -> str:
    """To the millisecond, and no longer than needed."""
    return f"{seconds:.3f}".rstrip("0").rstrip(".")
