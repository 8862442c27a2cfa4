"""Weights & Biases: a run a job, sent while it goes on, or kept offline for ``wandb sync``.

Owns names, and when a run is begun anew. What a run has is read from the files that the wandb package
writes (``wandbfiles``), and online from what the server says. Whoever runs the daemon gives the key, by
WANDB_API_KEY or ~/.netrc; no job does.
"""

from __future__ import annotations

import netrc
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from oobleckd.host.durable import write_whole
from oobleckd.protocol.job import table_of
from oobleckd.sinks import wandbfiles
from oobleckd.sinks.base import (
    EvaluationRecord,
    IncidentRecord,
    OutputContents,
    Record,
    Sink,
    SinkRun,
    StepRecord,
)
from oobleckd.sinks.wandbfiles import AT

_HOST = "https://api.wandb.ai"
_PROJECT = "oobleckd"
_WRITER_S = 30.0
_LOOK_S = 0.2


class WandbRun(Protocol):
    """What is used of ``wandb.Run``."""

    @property
    def step(self) -> int:
        """The next step that it takes: behind all that the server has."""

    def log(self, data: dict[str, Any], step: int) -> None:
        """Add to the row of ``step``; that of an earlier one is complete then."""

    def alert(self, title: str, text: str) -> None:
        """Tell people."""

    def finish(self, exit_code: int | None = None) -> None:
        """Write all of it, and end."""


class WandbSink(Sink):
    """A row a step, with ``train/…``, and ``eval/SOURCE/…`` where there was an evaluation after it; an
    incident is an alert. The newest row is written with the next one, since an evaluation may belong to it.
    """

    def __init__(self, run: SinkRun) -> None:
        super().__init__(run)
        self._run: WandbRun | None = None
        self._newest: StepRecord | None = None
        self._id_file = run.folder / "run-id"

    def open(self) -> OutputContents:
        """Read what was written, and take the run up."""
        for folder in self._folders(mine=False):  # of a run that was begun anew
            shutil.rmtree(folder)
        self._await_writers()
        written = wandbfiles.read(self._folders(mine=True))
        if is_online():  # what was written here, and is not there, is sent again
            written.cut(self._begun().step)
        return written

    def write(self, records: Sequence[Record]) -> None:
        """One row a step."""
        run = self._begun()
        for record in records:
            match record:
                case StepRecord():
                    run.log({**_under("train", record.figures), AT: record.at}, step=record.step)
                    self._newest = record
                case EvaluationRecord():
                    # The row keeps the time of its step, by which it is known again.
                    newest = self._newest
                    at = newest.at if newest is not None and newest.step == record.step else record.at
                    row = _under("eval", record.figures) | {"eval/at": record.at, AT: at}
                    run.log(row, step=record.step)
                case IncidentRecord():
                    run.alert(f"{self.run.id}: {record.id} at step {record.step}", record.text)

    def rewind(self, first: int) -> OutputContents:
        """Begin a run of another id, with all steps: a row that was sent cannot be taken back."""
        # W&B's own way, resume_from, is not there on all servers, and never offline. (D-sinks-004)
        del first
        self._finish()
        number = int(self._id().removeprefix(self.run.id).removeprefix("-again-") or 0) + 1
        write_whole(self._id_file, f"{self.run.id}-again-{number}".encode())
        for folder in self._folders(mine=False):
            shutil.rmtree(folder)
        return OutputContents()

    def close(self, *, over: bool) -> None:
        """Have it written to its end."""
        del over
        self._finish()

    def _finish(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish(0)

    def _id(self) -> str:
        return self._id_file.read_text(encoding="utf-8") if self._id_file.exists() else self.run.id

    def _folders(self, *, mine: bool) -> list[Path]:
        """Those of the run as it is now, or those of what it was before."""
        name = self._id()
        return [
            folder
            for folder in wandbfiles.folders_of(self.run.folder)
            if (folder / f"run-{name}.wandb").exists() == mine
        ]

    def _await_writers(self) -> None:
        """The package writes in a process of its own, which ends a moment after who started it."""
        until = time.monotonic() + _WRITER_S
        while wandbfiles.is_open(self.run.folder) and time.monotonic() < until:
            time.sleep(_LOOK_S)

    def _begun(self) -> WandbRun:
        """The run, begun where it is not: a process that has nothing to write makes no files."""
        if self._run is None:
            self._run = self._begin()
        return self._run

    def _begin(self) -> WandbRun:
        import wandb

        table, name = self.run.table, self._id()
        quiet = wandb.Settings(
            console="off", silent=True, x_disable_stats=True, disable_git=True, disable_code=True,
            x_disable_meta=True,
        )  # fmt: skip
        run: WandbRun = wandb.init(
            id=name,
            project=table.project or _PROJECT,
            entity=table.entity or None,
            name=table.name or self.run.id,
            tags=list(table.tags),
            group=self.run.id,
            config=table_of(self.run.spec),
            dir=str(self.run.folder),
            mode="online" if is_online() else "offline",
            resume="allow" if is_online() else None,
            reinit="create_new",
            settings=quiet,
        )
        return run


def is_online() -> bool:
    """As WANDB_MODE says; without it where there is a key."""
    if mode := os.environ.get("WANDB_MODE"):
        return mode == "online"
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", _HOST)).hostname
    try:
        return bool(host and netrc.netrc().authenticators(host))
    except (OSError, netrc.NetrcParseError):
        return False


def _under(prefix: str, figures: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in figures.items()}
