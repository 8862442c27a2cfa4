"""The verb ``plot``: the curves of a whole run as a picture. Owns the file and the drawing with matplotlib,
which is an extra (``oobleckd[plot]``) and opens no window; what is drawn is ``oobleckd.report.panels``'.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import click

from oobleckd.client import Client
from oobleckd.ctl.connect import connected_with
from oobleckd.ctl.made import check_free, usual_file, write_made
from oobleckd.ctl.names import job_names
from oobleckd.ctl.options import output_format, wants_json
from oobleckd.ctl.output import FAILED, NOT_FOUND, USAGE, emit_json, emit_line, fail
from oobleckd.protocol.watch import CurveMark, CurveView, Scale
from oobleckd.words import count

if TYPE_CHECKING:
    from oobleckd.protocol.jobviews import JobView
    from oobleckd.report.panels import CurvePanel

Format = Literal["svg", "png"]
FORMATS: tuple[Format, ...] = get_args(Format)
MARK = "oobleckctl plot"
_BINS = 1000
_LINE, _POINT, _INCIDENT, _ROLLBACK = "#0b5cad", "#b3400f", "#b3261e", "#7b3fb5"


@click.command()
@click.argument("job", shell_complete=job_names)
@click.option("--to", "file", type=click.Path(path_type=Path), metavar="FILE",
              help="The file to write (default: JOB.svg here).")  # fmt: skip
@click.option(
    "--scale", type=click.Choice(["linear", "log"]), default="linear", show_default=True,
    help="Of the axis of steps: log shows the beginning of a long run as well as its end.",
)  # fmt: skip
@connected_with(*FORMATS)
def plot(client: Client, job: str, file: Path | None, scale: Scale) -> None:
    """Draw the whole run of JOB: loss with evaluations, learning rate, gradient norm and tokens/s, with
    incidents and rollbacks marked. Prints the file.

    -o svg and -o png say what is drawn; without them the ending of FILE does, or it is an SVG. Lines are
    means of bins of steps, bands their least to highest. Needs the extra oobleckd[plot]. A file is replaced
    only where it is such a plot.
    """
    if find_spec("matplotlib") is None:
        fail("plot needs matplotlib", "install the extra: pip install 'oobleckd[plot]'", FAILED)
    kind = _kind(next((each for each in FORMATS if each == output_format()), None), file)
    view = client.job(job)
    file = (file or usual_file(view.id, kind)).expanduser()
    check_free(file, MARK)
    curve = client.curve(view.id, _BINS, scale)
    if not curve.bins:
        fail(
            f"{view.id} has no step to draw",
            f"`oobleckctl describe job {view.id}` says how far it is",
            NOT_FOUND,
        )
    write_made(file, drawn(view, curve, kind))
    if wants_json():
        emit_json("Plot", {"path": str(file), "job": view.id, "step": curve.step})
    else:
        emit_line(str(file))


def _kind(kind: Format | None, file: Path | None) -> Format:
    """The format that is meant. Fails where two are."""
    if file is None:
        return kind or "svg"
    ending = next((each for each in FORMATS if file.suffix.lower() == f".{each}"), None)
    if ending is None and kind is None:
        fail(f"--to: {file} ends in neither .svg nor .png", "say which with -o", USAGE)
    if ending is not None and kind is not None and kind != ending:
        fail(f"--to: {file} is no {kind}", "leave -o out, or name another file", USAGE)
    return kind or ending or "svg"


def drawn(view: JobView, curve: CurveView, kind: Format) -> bytes:
    """The picture as a file of that ``kind``."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure

    from oobleckd.report.panels import panels

    made = panels(curve)
    with mpl.rc_context({"svg.hashsalt": view.id, "svg.fonttype": "none"}):
        figure = Figure(figsize=(9, 1.2 + 2.1 * len(made)), layout="constrained")
        many = figure.subplots(len(made), 1, sharex=True, squeeze=False)[:, 0]
        for axes, panel in zip(many, made, strict=True):
            axes.set_xscale("log" if curve.log else "linear")  # which gives it labels of its own
            _draw(axes, panel, curve.marks)
        many[-1].set_xlabel(f"step{', log scale' if curve.log else ''}")
        first = curve.bins[0].first
        many[-1].set_xlim(first if curve.log else first - 1, max(curve.step, first + 1))
        figure.suptitle(
            _literal(f"{view.id}: {curve.step:,} of {count(view.steps, 'step')}"), fontsize="medium"
        )
        data = io.BytesIO()
        said = {"Creator": MARK, "Date": None} if kind == "svg" else {"Software": MARK}
        figure.savefig(data, format=kind, dpi=150, metadata=said)
    return data.getvalue()


def _draw(axes: Any, panel: CurvePanel, marks: Sequence[CurveMark]) -> None:
    from oobleckd.report.axes import written

    steps, low, line, high = panel.steps, *map(_gaps, (panel.low, panel.line, panel.high))
    _mark(axes, marks, steps[0])
    axes.fill_between(steps, low, high, color=_LINE, alpha=0.2, linewidth=0, label="least to highest")
    axes.plot(steps, line, color=_LINE, linewidth=1.3, label="mean", marker="." if len(steps) == 1 else "")
    if panel.points:
        at = [max(step, steps[0]) for step, _ in panel.points]  # a logarithmic axis has no step 0
        values = [value for _, value in panel.points]
        axes.plot(at, values, "o", color=_POINT, clip_on=False, markersize=4, label=panel.point_name)
    axes.set_yscale("log" if panel.log else "linear")
    axes.set_ylim(panel.bottom, panel.top)
    axes.set_ylabel(panel.label.replace(" (", "\n(").replace(", ", ",\n"))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: written(value))
    axes.grid(alpha=0.3)
    if panel.key == "loss":
        axes.legend(loc="upper right", fontsize="small")


def _mark(axes: Any, marks: Sequence[CurveMark], first: float) -> None:
    """A line for each incident and rollback, behind the curve; faint where there are many."""
    from oobleckd.report.svg import MANY

    alpha = 0.3 if len(marks) > MANY else 0.9
    for kind, name, colour, style in (
        ("incident", "incident", _INCIDENT, "--"), ("rollback", "rollback to here", _ROLLBACK, ":")
    ):  # fmt: skip
        steps = [max(mark.step, first) for mark in marks if mark.kind == kind]
        for number, step in enumerate(steps):
            label = "_" if number else name  # one line of the legend for all of them
            axes.axvline(
                step, color=colour, linestyle=style, linewidth=0.9, alpha=alpha, label=label, zorder=1
            )


def _gaps(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def _literal(text: str) -> str:
    """Matplotlib takes what stands between two dollars for mathematics."""
    return text.replace("$", r"\$")
