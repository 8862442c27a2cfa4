"""The verb ``debug``: one file with everything that helps to find a fault, also of a daemon that does not
answer.

Owns what is in the file. It has no key and no secret; it does have names of hosts, users and folders, and the
jobs.
"""

from __future__ import annotations

import io
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec

from oobleckd import __version__
from oobleckd.client import Client, socket_of, state_dir
from oobleckd.ctl import config, doctor
from oobleckd.ctl.connect import client as connect
from oobleckd.ctl.local import Home
from oobleckd.ctl.options import file_option, named_file, socket_option, wants_json
from oobleckd.ctl.output import FAILED, Failure, emit_json, emit_line, note
from oobleckd.unixhttp import ClientError

_LOG_LINES = 5000
_LOG_BYTES = 2**20
_UNITS = ("oobleckd.service", "oobleckd.socket", "oobleck-worker@*")
Piece = tuple[str, Callable[[], bytes]]


class _Absent(Exception):
    """A piece that cannot be had here, and why."""


@click.group()
def debug() -> None:
    """Gather what helps to find a fault."""


@debug.command()
@file_option("The file to write; one with the time in its name if not given.", old=True)
@socket_option
def dump(file: Path | None) -> None:
    """Write a .tar.gz with state, events, metrics, logs, settings, checks and the daemon's stacks. Prints the
    file.

    What cannot be had (the daemon is dead, say) is listed in it. Run it as root where daemon and workers are
    services: it has their logs and stacks then.
    """
    target = named_file(file) or Path(time.strftime("oobleck-debug-%Y%m%dT%H%M%SZ.tar.gz", time.gmtime()))
    asked = connect()
    found, missing = _gather(_pieces(asked))
    try:
        _write(target, found, missing)
    except OSError as error:
        raise Failure(f"{target}: {error.strerror}", "name another file with --to", FAILED) from error
    if wants_json():
        emit_json("DebugDump", {"file": str(target), "pieces": sorted(found), "missing": missing})
        return
    emit_line(str(target))
    for name, why in missing.items():
        note(f"without {name}: {why}")
    note("it has names of hosts, users and folders, and your jobs: look before you send it to somebody")


# --------------------------------------------------------------------------- what is in it


def _pieces(asked: Client) -> Iterator[Piece]:
    """Name in the archive, and how to get it."""
    views: dict[str, Callable[[], Any]] = {
        "status": asked.status, "jobs": asked.jobs, "nodes": asked.nodes, "incidents": asked.incidents,
        "pipelines": asked.pipelines, "templates": asked.templates, "layers": asked.layers,
        "daemon": asked.debug,
    }  # fmt: skip
    for name, ask in views.items():
        yield f"{name}.json", partial(_answer, ask)
    yield "metrics.txt", lambda: asked.metrics().encode()
    yield "events.jsonl", partial(_events, asked)
    yield "settings.json", partial(_answer, config.found_here)
    yield "doctor.json", lambda: _json(doctor.checks(asked))
    if asked.socket_path == socket_of(state_dir()):
        for log in sorted(Home(state_dir()).logs.glob("*.log")):
            yield f"logs/{log.name}", partial(_tail, log)
    else:
        yield "logs/journal.export", _journal


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value, enc_hook=str)


def _answer(ask: Callable[[], Any]) -> bytes:
    return _json(ask())


def _events(asked: Client) -> bytes:
    """All that is kept, one a line."""
    with asked.events(0, follow=False) as changes:
        return b"".join(_json(change) + b"\n" for change in changes)


def _tail(log: Path) -> bytes:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_BYTES))
        return file.read()


def _journal() -> bytes:
    """What the services said, with all fields: from the system's journal, as far as this user may read it."""
    units = [word for unit in _UNITS for word in ("--unit", unit)]
    command = ["journalctl", "--no-pager", "--output", "export", "--lines", str(_LOG_LINES), *units]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError as error:
        raise _Absent("this machine has no journalctl") from error
    if done.returncode != 0 or not done.stdout:
        raise _Absent(
            done.stderr.decode(errors="replace").strip()
            or "it has no entries, or this user may not read them"
        )
    return done.stdout


# --------------------------------------------------------------------------- gathering


def _gather(pieces: Iterable[Piece]) -> tuple[dict[str, bytes], dict[str, str]]:
    """What could be had, and why the rest could not."""
    found: dict[str, bytes] = {}
    missing: dict[str, str] = {}
    for name, get in pieces:
        try:
            found[name] = get()
        except ClientError as error:
            missing[name] = error.problem
        except Failure as error:
            missing[name] = error.problem
        except (_Absent, OSError) as error:
            missing[name] = str(error)
    return found, missing


def _write(target: Path, found: dict[str, bytes], missing: dict[str, str]) -> None:
    """Readable for this user alone."""
    about = {"version": __version__, "made_at": time.time(), "missing": missing}
    folder = target.name.removesuffix(".gz").removesuffix(".tar")
    target.touch(mode=0o600)
    with tarfile.open(target, "w:gz") as archive:
        for name, data in {"about.json": _json(about), **found}.items():
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
            archive.addfile(entry, io.BytesIO(data))
