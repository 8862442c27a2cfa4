"""The report of a job: one HTML page that needs nothing but itself, on a screen, dark or light, or on paper.

Owns what the page is made of; its words in cells are ``tables``', its pictures ``svg``'s, how it looks is in
``report.html``. Pure but for reading that file. Everything is escaped: names and paths are of others.
"""

from __future__ import annotations

import functools
from importlib.resources import files

import msgspec
from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from oobleckd.protocol.changes import Change
from oobleckd.protocol.checkpoint import Manifest
from oobleckd.protocol.evalviews import EvaluationView
from oobleckd.protocol.incidentviews import IncidentView
from oobleckd.protocol.jobviews import JobView, RouterView
from oobleckd.protocol.watch import CurveView, GoodputView
from oobleckd.report import tables
from oobleckd.report.experts import experts_section
from oobleckd.report.panels import panels
from oobleckd.report.svg import bars_svg, curve_svg, mark_words
from oobleckd.words import count, plain

MARK = "oobleckctl report"
"""Stands at the beginning of a page, so that it is known as one."""


class Material(msgspec.Struct, frozen=True):
    """What a report is made of, as of ``at`` (POSIX seconds). ``story``: events of the job, oldest first;
    ``config``: its job.toml; ``goodput`` and ``manifest``, of its last checkpoint: None where there is none.
    ``num_evaluations``: of which ``evaluations`` are the newest. ``routers``: of a mixture of experts, by
    layer, with tokens.
    """

    job: JobView
    at: float
    version: str
    curve: CurveView
    incidents: tuple[IncidentView, ...]
    evaluations: tuple[EvaluationView, ...]
    num_evaluations: int
    story: tuple[Change, ...]
    config: str
    goodput: GoodputView | None = None
    manifest: Manifest | None = None
    routers: tuple[RouterView, ...] = ()


def page(material: Material) -> str:
    """The report as HTML."""
    job, curve, goodput = material.job, material.curve, material.goodput
    first = curve.bins[0].first if curve.bins else 1
    return _template().render(
        mark=MARK,
        version=material.version,
        made=tables.day(material.at),
        job=job,
        headline=tables.headline(job),
        summary=tables.summary(job, goodput),
        curves=[curve_svg(panel, first, curve.step, curve.marks, log=curve.log) for panel in panels(curve)],
        bands=f"A line is the mean of a bin of steps, the band its least to highest; {len(curve.bins):,} "
        f"{'bins of growing width' if curve.log else 'bins'}, of {count(curve.step, 'step')}.",
        marks=[mark_words(mark) for mark in curve.marks[-tables.MOST_BARS :]],
        bins=tables.bin_table(curve.bins),
        incidents=_incidents(material),
        phases=tables.PHASES,
        plans=tables.plan_table(material.story),
        time=_time(material),
        experts=experts_section(material.routers),
        evaluations=tables.evaluation_table(material.evaluations, material.num_evaluations),
        config=material.config,
        environment=tables.environment_table(job.kinds),
        inputs=tables.inputs_table(job.inputs),
        digest=job.digest,
        checkpoint=job.checkpoint,
        checkpoint_step=job.checkpoint_step,
        files=tables.checkpoint_table(material.manifest) if material.manifest is not None else None,
    )


class _Section(msgspec.Struct, frozen=True):
    """A picture and its tables, and the kinds of parts in the picture."""

    picture: Markup
    kinds: tuple[str, ...]
    tables: tuple[tables.ReportTable, ...]


def _incidents(material: Material) -> _Section | None:
    found = material.incidents
    if not found:
        return None
    bars = tables.incident_bars(found)
    told = f"{count(len(bars), 'incident')}, each a bar of its phases; the numbers are in the table below."
    picture = bars_svg(
        "incidents", "Incidents by phase", told, bars, lambda at_s: f"{plain(round(at_s, 6))} s"
    )
    return _Section(
        picture,
        tables.PHASES,
        (tables.incident_table(found), tables.phase_table(found), tables.rejected_table(found)),
    )


def _time(material: Material) -> _Section | None:
    goodput = material.goodput
    if goodput is None or goodput.total_s <= 0.0:
        return None
    kinds = tuple(name for name, _ in tables.time_parts(goodput))
    told = "; ".join(part.told for part in tables.time_bar(goodput).parts)
    bars = [tables.time_bar(goodput)]
    picture = bars_svg("time", "Where the devices' time went", told, bars, lambda share: f"{share:.0%}")
    return _Section(picture, kinds, (tables.time_table(goodput),))


@functools.cache
def _template() -> Template:
    # Names, paths and reasons are of whoever may submit a job: what is not escaped could run where somebody
    # opens the page. (D-curves-002)
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(files(__package__).joinpath("report.html").read_text(encoding="utf-8"))
