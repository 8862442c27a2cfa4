"""Painters of answers: what is ranked, measured, sent, and what is not kept of the past."""

from __future__ import annotations

import time

import msgspec

from oobleckd.console.facts import Watched
from oobleckd.console.model import View, fold
from oobleckd.console.past import Walk
from oobleckd.console.widgets import coverage, goodput, impact, recovery, templatetable, verdict
from oobleckd.console.widgets.choices import lines as choices
from oobleckd.draw.lines import plain
from oobleckd.protocol.incidentviews import SourceView
from tests.helpers.api_server import node_view
from tests.unit.console import build, watching
from tests.unit.console.build import NOW, incident
from tests.unit.console.test_painters import LIVE, drawn, said


def test_of_the_past_nobody_is_asked_and_that_is_said() -> None:
    bare = msgspec.structs.replace(watching.past(), schedules=())
    view = fold(View(), [Walk(bare, 0.0).begin(bare.snapshot.at + 5, playing=False)])
    assert drawn(view) == ["no step of that time was kept op by op"]
    assert drawn(view, "modelled") == ["of the past only measured steps are kept"]
    assert said(goodput.paint(view, NOW, 60, 5)) == "this is not kept of the past"
    assert "not kept" in said(impact.paint(view, NOW, 80, 5, ("node-1",)))


def test_what_matters_most_is_ranked_while_nothing_is_marked() -> None:
    known = fold(LIVE, [Watched(NOW, impact=watching.impact("node-5", stops=True))])
    text = said(impact.paint(known, NOW, 80, 20)).split("\n")
    assert text[0] == "mark nodes to see what follows when they die; the loss of one alone:"
    assert text[1].split() == ["node", "stall", "throughput", "what", "follows"]
    (row,) = [line for line in text if line.startswith(" node-2")]
    assert row.split() == ["node-2", "2", "s", "75.0%", "no", "step", "is", "lost"]
    wide = said(impact.ranking(known, NOW, 100, 20)).split("\n")
    (row,) = [line for line in wide if line.startswith(" node-2")]
    assert row.split()[4:] == ["5", "MiB", "0", "nodes", "no", "step", "is", "lost"]
    assert any("node-5" in line and "the job stops" in line for line in text)


def test_templates_as_modelled_and_as_measured() -> None:
    whole = fold(LIVE, [Watched(NOW, schedule=watching.schedule(lanes=watching.modelled().lanes[:2]))])
    row = said(templatetable.paint(whole, NOW, 120, 20)).split("\n")[1]
    assert row.split()[1:7] == ["2", "2", "2", "1", "MiB", "700"]
    assert "900 ms" in row
    narrow = said(templatetable.paint(whole, NOW, 60, 20)).split("\n")[0]
    assert narrow.split()[-2:] == ["modelled", "measured"]


def test_what_can_still_be_lost_stands_out_once_it_is_less_than_was_asked_for() -> None:
    roles = {
        tolerance: verdict.can_lose(build.job(tolerance=tolerance, f=2))[0][1] for tolerance in (0, 1, 2)
    }
    assert roles == {0: "banner-bad", 1: "banner-warn", 2: "dim"}


def test_more_than_was_asked_for_is_no_part_of_it() -> None:
    said = {lose: plain(verdict.can_lose(build.job(tolerance=lose, f=1))).strip() for lose in (0, 1, 2)}
    assert said == {
        0: "can still lose 0 of 1 node",
        1: "can still lose 1 of 1 node",
        2: "can still lose 2 nodes, 1 asked for",
    }


def test_copies_say_who_sent_them() -> None:
    sent = (SourceView("node-1/0", 2 << 20), SourceView("node-3/0", 1 << 20))
    known = incident(sources=sent)
    assert "copied 3 MiB at 7.5 MiB/s   from node-1 2 MiB, node-3 1 MiB" in said(choices(known, 90, 9))
    assert "3 MiB copied from node-1, node-3" in said(recovery.one(LIVE, known, NOW, 120, 12))


def test_what_ten_thousand_nodes_can_be_made_of_is_known_at_once() -> None:
    sizes = range(4, 44)
    began = time.process_time()
    covered = coverage.covers(tuple(sizes), 10_000)
    assert covered.way(10_000) == (4,) * 2500
    assert covered.way(9_999) == (7, *(4,) * 2498)
    assert covered.gaps(4, 10_000) == []
    took_s = time.process_time() - began
    assert took_s < 0.5
    began = time.process_time()
    many = tuple(node_view(f"n{number}") for number in range(10_000))
    made = tuple(msgspec.structs.replace(build.templates(2)[0], num_nodes=size) for size in sizes)
    view = fold(LIVE, [build.fetched(nodes=many, templates=made)])
    for _ in range(4):
        assert "every number from 4 to 10,000 nodes" in said(coverage.paint(view, NOW, 60, 40))
    assert time.process_time() - began < 0.5
    assert coverage.covers(tuple(sizes), 10_000) is covered


def test_numbers_that_no_templates_make_are_said() -> None:
    made = tuple(msgspec.structs.replace(build.templates(2)[0], num_nodes=size) for size in (3, 5))
    view = fold(LIVE, [build.fetched(templates=made)])
    text = said(coverage.paint(view, NOW, 60, 9)).split("\n")
    assert text[0] == "covered: all but 4 of 3 to 5"
    assert "▸    4  ✗ none" in text
