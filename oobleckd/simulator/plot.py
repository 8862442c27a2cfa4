"""Runs as a picture: throughput over time with the losses marked, and below it where the time went, policy by
policy.

Owns the drawing. matplotlib is an extra (``oobleckd[plot]``) and imported when there is something to draw; it
opens no window.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from oobleckd.simulator.account import CAUSES
from oobleckd.simulator.outcome import Outcome, Point, Unable
from oobleckd.simulator.report import PolicyLine, name_of

FORMATS = (".png", ".svg", ".pdf")
_WINDOWS = 150
_HOUR_S = 3600.0


def draw(
    path: Path,
    title: str,
    lines: Sequence[PolicyLine],
    runs: Sequence[Outcome],
    unable: Sequence[Unable] = (),
) -> None:
    """Write the picture to ``path``, whose ending says what it is. ``runs``: of one seed, a run a policy.
    Those that are ``unable`` to run are left out, and named.

    Raises OSError.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4 + 0.5 * len(lines)), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(3, 0.6 + 0.45 * len(lines)))
    _throughput(above, runs)
    _lost(below, lines)
    figure.suptitle("\n".join([title, *([left_out(unable)] if unable else [])]))
    figure.savefig(path, dpi=150)


def left_out(unable: Sequence[Unable]) -> str:
    """Who is not in the picture."""
    return f"without {', '.join(map(name_of, unable))}: cannot run here"


def _throughput(axes: Any, runs: Sequence[Outcome]) -> None:
    for number, run in enumerate(runs):
        at_h, rates = throughput(run.points, run.duration_s)
        axes.step(at_h, rates, where="post", label=run.policy, linewidth=1.2, zorder=3 + number)
    struck = [at / _HOUR_S for at in runs[0].struck_at_s] if runs else []
    if struck:
        axes.plot(struck, [0.0] * len(struck), "|", color="black", markersize=8, label="loss", clip_on=False)
    axes.set_xlabel("hours")
    axes.set_ylabel("samples a second")
    axes.set_ylim(bottom=0.0)
    axes.legend(loc="lower left", fontsize="small", ncols=3)


def throughput(points: Sequence[Point], duration_s: float) -> tuple[list[float], list[float]]:
    """(hours, samples a second) of windows of equal length: what was committed in each, over its length."""
    width_s = duration_s / _WINDOWS
    committed = [0.0] * _WINDOWS
    for before, after in pairwise(points):
        done, begins, ends = after.samples - before.samples, before.at_s, after.at_s
        first, last = int(begins / width_s), min(_WINDOWS - 1, int(ends / width_s))
        for window in range(first, last + 1):
            overlap_s = min(ends, (window + 1) * width_s) - max(begins, window * width_s)
            committed[window] += done * overlap_s / (ends - begins) if ends > begins else 0.0
    return [window * width_s / _HOUR_S for window in range(_WINDOWS)], [each / width_s for each in committed]


def _lost(axes: Any, lines: Sequence[PolicyLine]) -> None:
    names = [name_of(line) for line in lines]
    left = [0.0] * len(lines)
    for cause in CAUSES:
        shares = [100 * line.lost[cause] for line in lines]
        axes.barh(names, shares, left=left, label=cause, height=0.7)
        left = [before + share for before, share in zip(left, shares, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("% of the live devices' time that was lost")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")
