"""One line on a terminal that says how far a job is while a command waits for it, and what Ctrl-C means then.

Owns the line and its words. Where stderr is no terminal there is none, as a log has no use for it: there a
job that stands still is told of, once each time, with the reason.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from oobleckd.ctl.output import note
from oobleckd.protocol.jobviews import JobState, JobView
from oobleckd.protocol.text import visible
from oobleckd.words import being, done, loss, rate, seconds

Found = TypeVar("Found")
Told = Callable[[JobView], None]
_STANDS: tuple[JobState, ...] = ("queued", "waiting", "paused")
_START, _CLEAR = "\r", "\x1b[2K"


class _Standing:
    """Says that a job stands still, and why. It is queued for a moment without a reason."""

    def __init__(self) -> None:
        self._said: JobState | None = None

    def told(self, view: JobView) -> None:
        if view.state not in _STANDS:
            self._said = None
        elif view.state != self._said and (view.reason or view.state == "paused"):
            self._said = view.state
            note(f"{view.id} {being(view.state)}{': ' if view.reason else ''}{view.reason}")


def on_terminal() -> bool:
    """Whether there is a line."""
    return sys.stderr is not None and sys.stderr.isatty()


@contextmanager
def live_line() -> Iterator[Told]:
    """What it is told of a job is shown until the next, and nothing of it is left in the end."""
    if not on_terminal():
        yield _Standing().told
        return
    shown = ""

    def told(view: JobView) -> None:
        nonlocal shown
        text = progress_words(view)[: shutil.get_terminal_size().columns - 1]
        if text != shown:
            shown = text
            _write(f"{_START}{_CLEAR}{text}")

    try:
        yield told
    finally:
        if shown:
            _write(f"{_START}{_CLEAR}")


def _write(text: str) -> None:
    with suppress(OSError):  # nobody is there any more
        sys.stderr.write(text)
        sys.stderr.flush()


def progress_words(view: JobView) -> str:
    """``"gpt2-3  running  step 120/2,000 (6 %)  loss 5.1234  8,123 tokens/s  about 12 min 5 s left"``."""
    parts = [view.id, view.state, f"step {view.step:,}/{view.steps:,} ({done(view.step, view.steps)})"]
    if view.state != "running":
        return visible("  ".join([*parts, *([view.reason] if view.reason else [])]))
    if view.loss is not None:
        parts.append(f"loss {loss(view.loss)}")
    if speed := tokens_per_s(view):
        parts.append(f"{rate(speed)} tokens/s")
    if (left_s := seconds_left(view)) >= 0:
        parts.append(f"about {seconds(round(left_s))} left")
    return visible("  ".join(parts))


def tokens_per_s(view: JobView) -> float:
    """Of late; 0: not known."""
    if view.progress is not None and view.progress.tokens_per_s:
        return view.progress.tokens_per_s
    return view.samples_per_s * view.spec.train.sequence


def seconds_left(view: JobView) -> float:
    """Until the last step, at the pace of late; -1: not known."""
    if view.progress is not None and view.progress.left_s >= 0:
        return view.progress.left_s
    return (view.steps - view.step) * view.step_s if view.step_s else -1.0


def followed(job: str, wait: Callable[[], Found]) -> Found:
    """What ``wait`` finds. Ctrl-C ends this command and not the job, and says so."""
    try:
        return wait()
    except KeyboardInterrupt:
        note(
            f"{job} goes on without this command: `oobleckctl logs {job} -f` shows it, "
            f"`oobleckctl cancel {job}` ends it"
        )
        raise
