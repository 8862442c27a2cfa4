"""The verb ``logs``: of a job its training log, of the local cluster what daemon and nodes have written.

Owns how lines of several files become one log: in the order of their times, in one format, whatever program
wrote them.
"""

from __future__ import annotations

import re
import select
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import click

from oobleckd.client import Client, state_dir
from oobleckd.ctl import nodelog
from oobleckd.ctl.cluster import state_option
from oobleckd.ctl.connect import client as connect
from oobleckd.ctl.connect import translated
from oobleckd.ctl.get.kinds import bare_name
from oobleckd.ctl.local import DAEMON, Home
from oobleckd.ctl.names import logged_names
from oobleckd.ctl.options import output_option, settings, socket_option, wants_json
from oobleckd.ctl.output import NOT_FOUND, emit_json, emit_line, fail, when
from oobleckd.ctl.traininglog import print_log
from oobleckd.protocol.nodeviews import NodeLogView
from oobleckd.unixhttp import ClientError

_LOOK_EVERY_S = 0.05
_LINES = 20
_stamped = re.compile(
    r"(?P<day>\d{4}-\d\d-\d\d)[T ](?P<time>\d\d:\d\d:\d\d)[.,](?P<ms>\d{3})(?P<utc>Z?) "
    r"(?P<level>[A-Z]+) (?P<text>.*)",
    re.DOTALL,
)


@click.command()
@click.argument("name", default="", metavar="[JOB|NODE|oobleckd]", shell_complete=logged_names)
@state_option
@click.option("-f", "--follow", is_flag=True, help="Go on with what comes from now on.")
@click.option(
    "-n", "--lines", "--tail", "num_lines", type=click.IntRange(0), default=_LINES, show_default=True,
    help="Of each log, the last so many.",
)  # fmt: skip
@socket_option
@output_option
def logs(name: str, home: Home, follow: bool, num_lines: int) -> None:
    """Show the training log of JOB: steps, evaluations and incidents; or what a NODE or the daemon of the
    local cluster has written, without a name all of them, in the order of time.

    Of a NODE that is on another machine: the newest lines that its agent tells, 1000 at most.

    With -o json one document a line. A job called as a node is job/NAME.
    """
    if name and not name.startswith(("node/", "no/")) and _is_job(name, home):
        with translated():
            print_log(connect(), bare_name(name), num_lines, follow=follow)
        return
    name = DAEMON if name == "daemon" else bare_name(name)
    found = sorted(home.logs.glob("*.log")) if not name else [home.log(name)]
    here = bool(found) and found[0].exists()
    if name not in {"", DAEMON} and _is_asked(home, here=here):
        told = nodelog.fetch(_client(home), name, num_lines, follow=follow)
        if told is not None:
            _show(_timed(told), named=False)
            return
    if not here:
        known = ", ".join(path.stem for path in sorted(home.logs.glob("*.log"))) or "none"
        hint = f"known: {known}; of a job: `oobleckctl logs JOB`"
        fail(f"no log of {name or 'a cluster'} in {home.logs}", hint, NOT_FOUND)
    _show_files([LogTail(path) for path in found], num_lines, follow=follow)


def _is_job(name: str, home: Home) -> bool:
    """Whether a job is meant: there is no log of that name, and the daemon knows such a job. Where no daemon
    answers, it is a node's that is missing.
    """
    if name.startswith(("job/", "jobs/", "j/")):
        return True
    if home.log(DAEMON if name == "daemon" else name).exists():
        return False
    client: Client = connect()
    try:
        client.job(name)
    except ClientError:
        return False
    return True


def _is_asked(home: Home, *, here: bool) -> bool:
    """Whether the daemon is asked for a node's log: where none is ``here``, and where somebody named a
    daemon, whose node need not be the one of that name here.
    """
    return not here or (bool(settings().config.socket) and home.state == state_dir())


def _client(home: Home) -> Client:
    """For the daemon of ``home``; where nobody named that, for the one that every verb would ask."""
    return connect() if home.state == state_dir() else Client(home.socket)


# --------------------------------------------------------------------------- files


class LoggedLine(NamedTuple):
    """A line of a log as it is written, and what its beginning says. ``at``: of a line without a time, that
    of the line before (0: there was none), and ``level`` is "".
    """

    at: float
    source: str
    written: str
    level: str
    text: str


def line_of(source: str, written: str, before: float) -> LoggedLine:
    """A line that came after one of the time ``before``. Daemon and workers each have a form of their own."""
    found = _stamped.fullmatch(written)
    if found is None:
        return LoggedLine(before, source, written, "", written)
    at = datetime.fromisoformat(f"{found['day']} {found['time']}.{found['ms']}")
    at = at.replace(tzinfo=UTC) if found["utc"] else at.astimezone()
    text = found["text"].removeprefix(f"{source} ")
    return LoggedLine(at.timestamp(), source, written, found["level"][0], text)


class LogTail:
    """A log as far as it was read. A line that is not finished yet waits for its end."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self._time = path, 0, 0.0

    def new(self) -> list[LoggedLine]:
        """The lines that have come since it was last asked."""
        with self._path.open("rb") as file:
            file.seek(self._at)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._at += len(whole) + len(newline)
        lines = []
        for written in whole.decode(errors="replace").split("\n") if newline else []:
            lines.append(line_of(self._path.stem, written, self._time))
            self._time = lines[-1].at
        return lines


def _timed(told: NodeLogView) -> list[LoggedLine]:
    lines: list[LoggedLine] = []
    for written in told.lines:
        lines.append(line_of(told.node, written, lines[-1].at if lines else 0.0))
    return lines


def _show_files(tails: Sequence[LogTail], num_lines: int, *, follow: bool) -> None:
    named = len(tails) > 1
    _show([line for tail in tails for line in tail.new()[-num_lines or len(tails) * 2**31 :]], named=named)
    while follow:
        _show([line for tail in tails for line in tail.new()], named=named)
        select.select([], [], [], _LOOK_EVERY_S)


def _show(lines: Iterable[LoggedLine], *, named: bool) -> None:
    """In the order of their times; lines without one stay behind the line that they belong to."""
    for line in sorted(lines, key=lambda line: line.at):
        if wants_json():
            emit_json("LogLine", {"source": line.source, "at": line.at or None, "level": line.level,
                                  "text": line.written})  # fmt: skip
            continue
        source = f"{line.source:<8}  " if named else ""
        head = f"{when(line.at)}  {line.level}  " if line.level else " " * 4 if named else ""
        emit_line(f"{head}{source}{line.text}")
