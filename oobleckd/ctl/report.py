"""The verb ``report``: a job as one HTML page. Owns what is asked of the daemon for it, and the file; the
page is ``oobleckd.report``'s.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from oobleckd import __version__
from oobleckd.client import Client
from oobleckd.ctl.connect import connected
from oobleckd.ctl.made import check_free, usual_file, write_made
from oobleckd.ctl.names import job_names
from oobleckd.ctl.options import wants_json
from oobleckd.ctl.output import emit_json, emit_line, note
from oobleckd.protocol.checkpoint import MANIFEST, Manifest
from oobleckd.protocol.job import table_of
from oobleckd.protocol.watch import GoodputView, Scale
from oobleckd.unixhttp import ApiProblem
from oobleckd.words import count, size

if TYPE_CHECKING:
    from oobleckd.protocol.jobviews import JobView
    from oobleckd.report.page import Material

_BINS = 400
_EVALUATIONS = 200


@click.command()
@click.argument("job", shell_complete=job_names)
@click.option("--to", "file", type=click.Path(path_type=Path), metavar="FILE",
              help="The file to write (default: JOB.html here).")  # fmt: skip
@click.option(
    "--scale", type=click.Choice(["linear", "log"]), default="linear", show_default=True,
    help="Of the steps: log shows the beginning of a long run as well as its end.",
)  # fmt: skip
@connected
def report(client: Client, job: str, file: Path | None, scale: Scale) -> None:
    """Write a report of JOB as one HTML file that needs nothing else: summary, curves, incidents, plans,
    where the time went, experts, evaluations, configuration, environment and digests. Prints the file.

    A file is replaced only where it is such a report.
    """
    from oobleckd.report.page import MARK, page  # jinja2 is slow to load

    view = client.job(job)
    file = (file or usual_file(view.id, "html")).expanduser()
    check_free(file, MARK)
    data = page(material_of(client, view, scale)).encode(errors="replace")
    write_made(file, data)
    if wants_json():
        emit_json("Report", {"path": str(file), "job": view.id, "bytes": len(data)})
        return
    emit_line(str(file))
    note(f"{view.id}: {count(view.step, 'step')}, {count(view.incidents, 'incident')}, {size(len(data))}")


def material_of(client: Client, view: JobView, scale: Scale = "linear") -> Material:
    """All that a report of the job is made of, as the daemon tells it now."""
    from oobleckd.ctl.reference import to_toml  # no other verb needs what comes with it
    from oobleckd.report.page import Material

    evaluations = client.evaluations(view.id, last=_EVALUATIONS)
    num = view.spec.eval_rounds.due_steps(view.start_step, view.step)
    return Material(
        job=view,
        at=time.time(),
        version=__version__,
        curve=client.curve(view.id, _BINS, scale),
        incidents=tuple(each for each in client.incidents() if each.job == view.id),
        evaluations=evaluations,
        num_evaluations=max(len(evaluations), sum(1 for _ in num) if len(evaluations) == _EVALUATIONS else 0),
        story=client.story(f"job:{view.id}"),
        config=to_toml(table_of(view.spec)).replace("\n[", "\n\n["),
        goodput=_goodput(client, view),
        manifest=_manifest(view),
        routers=client.routers(view.id) if view.routers else (),
    )


def _goodput(client: Client, view: JobView) -> GoodputView | None:
    try:
        return client.goodput(view.id)
    except ApiProblem:  # it has no time that went anywhere
        return None


def _manifest(view: JobView) -> Manifest | None:
    """Of the last checkpoint, where its folder is on this machine."""
    if not view.checkpoint:
        return None
    try:
        return msgspec.json.decode((Path(view.checkpoint) / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError, ValueError):
        return None
