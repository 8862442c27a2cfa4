"""The overview as plain text, for scripts and logs: the same painters, no terminal needed."""

from __future__ import annotations

from pathlib import Path

from oobleckd.client import Client
from oobleckd.console import replay
from oobleckd.console.feed import fetch_once
from oobleckd.console.model import View, fold
from oobleckd.console.past import Walk
from oobleckd.console.widgets import events, nodes, pipelines, recovery, templates, training, verdict
from oobleckd.draw.lines import framed, plain

_ROWS = {"events": 20, "training": 6, "recovery": 20}
_MAX_ROWS = 60
_SECTIONS = (
    ("nodes", nodes.paint),
    ("pipelines", pipelines.paint),
    ("templates", templates.paint),
    ("training", training.paint),
    ("last incident", recovery.paint),
    ("events", events.paint),
)


def overview(client: Client, now: float, width: int) -> str:
    """What the console would show at ``now``. Raises what ``Client`` raises."""
    return render(fold(View(), fetch_once(client, now)), now, width)


def past(client: Client, at: float | None, file: Path | None, width: int) -> str:
    """What it would show of the past: the end of ``file``, or the daemon's history at ``at``. Raises
    BundleError too.
    """
    load = replay.of_daemon(client)
    if file is not None:
        load, began = replay.of_file(file)
        at = load(began).until if at is None else at
    assert at is not None
    known = load(at)
    at = min(max(at, known.snapshot.at), known.until)
    return render(fold(View(), [Walk(known, at).begin(at, playing=False)]), at, width)


def render(view: View, now: float, width: int) -> str:
    """``view`` in lines of ``width`` cells."""
    lines = [plain(line) for line in verdict.paint(view, now, width)]
    for title, paint in _SECTIONS:
        rows = _ROWS.get(title, _MAX_ROWS)
        painted = framed(paint(view, now, width - 2, rows), width - 2, rows)
        lines += ["", title.upper(), *("  " + plain(line) for line in painted)]
    return "\n".join(line.rstrip() for line in lines)
