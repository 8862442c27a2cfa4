"""Painters of op times, grids, tables, choices and what would follow."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

import msgspec
import pytest

from oobleckd.console.facts import Away, QueryRefused, Watched
from oobleckd.console.letters import ascii_line
from oobleckd.console.model import StepPoint, View, fold
from oobleckd.console.themes import COLOURED, THEMES
from oobleckd.console.widgets import (
    copies,
    coverage,
    curves,
    fleet,
    goodput,
    grid,
    impact,
    incidents,
    jobfacts,
    log,
    nodetable,
    optimes,
    recovery,
    shares,
    templatetable,
    timeline,
    training,
    verdict,
)
from oobleckd.console.widgets.choices import lines as choices
from oobleckd.console.widgets.listing import matches, rows, window
from oobleckd.console.widgets.panel import Painter
from oobleckd.draw.lines import Line, framed, length, plain
from oobleckd.draw.times import minute
from oobleckd.planner.plan import Recompute
from oobleckd.protocol.incidentviews import PhaseView, RejectedView
from oobleckd.protocol.jobviews import RouterView
from oobleckd.protocol.watch import LaneView, OpView, SampledSteps
from tests.helpers.api_server import node_view
from tests.helpers.fleet import Fleet
from tests.unit.console import build, watching
from tests.unit.console.build import NOW, fetched, incident
from tests.unit.console.test_panels import MANY

LIVE = fold(View(), watching.facts())
LARGE = fold(
    MANY,
    [
        Watched(
            NOW,
            SampledSteps("job-1", tuple(range(1, 500))),
            watching.schedule(
                lanes=tuple(
                    watching.lane(f"node-{i}/0", i // 4, i % 4, watching.ops(i % 4),
                    bubble=i % 40 / 40) for i in range(1000)
                )
            ),
            goodput=watching.goodput(),
        )
    ],
)  # fmt: skip
PAINTERS: tuple[Painter, ...] = (
    *(partial(timeline.paint, look=timeline.TimelineLook(mode)) for mode in timeline.MODES),
    fleet.paint,
    *(partial(grid.paint, by=by) for by in grid.GROUPINGS),
    nodetable.paint,
    copies.paint,
    coverage.paint,
    goodput.paint,
    incidents.paint,
    jobfacts.paint,
    log.paint,
    shares.paint,
    templatetable.paint,
    partial(impact.paint, nodes=("node-2",)),
    partial(impact.paint, nodes=("node-1", "node-2")),
)


def said(painted: Sequence[Line]) -> str:
    return "\n".join(map(plain, painted))


@pytest.mark.parametrize("view", [View(), LIVE, LARGE, fold(LARGE, [Away(NOW, "x" * 300)])])
@pytest.mark.parametrize("paint", PAINTERS)
def test_every_panel_stays_in_its_frame_at_any_size(paint: Painter, view: View) -> None:
    for width, height in itertools.product((1, 8, 30, 52, 158), (1, 2, 3, 6, 27)):
        painted = framed(paint(view, NOW + 1, width, height), width, height)
        assert len(painted) <= height
        assert all(length(line) <= width for line in painted), (width, height, said(painted))
        assert said(painted).replace("\n", "").isprintable()
        assert {role for line in painted for _, role in line} <= COLOURED["dark"].keys()
        assert said([ascii_line(line) for line in painted]).isascii()
        assert [length(ascii_line(line)) for line in painted] == [length(line) for line in painted]


def test_themes_know_every_role_and_no_two_ops_look_alike() -> None:
    for theme in THEMES:
        looks = COLOURED[theme]
        ops = [str(looks[role]) for role in ("op-F", "op-B", "op-W", "op-moved", "op-again", "bubble", "bad")]
        assert len(set(ops)) == len(ops), theme


# --------------------------------------------------------------------------- op times


def drawn(view: View, mode: timeline.Mode = "measured", width: int = 78) -> list[str]:
    return said(timeline.paint(view, NOW, width, 20, timeline.TimelineLook(mode))).split("\n")


def test_ops_by_time_with_bubbles_a_dead_stage_and_what_was_re_routed() -> None:
    text = drawn(LIVE)
    assert text[0].startswith("▾ P0  2 stages  bubble 25%")
    assert "↪ runs 1 micro-batch of node-5/0" in text[0]
    assert text[1].startswith(" s0   node-1      F0    F1    F2    B0")
    assert text[2].split("      ")[1].startswith("······F0")
    assert text[3] == "", "a line between, where there is room"
    assert "✖ stage 1 lost" in text[4]
    assert text[6].startswith("✗s1   node-5")
    assert text[6].endswith("✗✗✗✗")
    assert "»U" in text[1]


def test_what_was_re_routed_has_its_own_colour_and_so_has_what_is_done_again() -> None:
    moved = [
        role for line in timeline.paint(LIVE, NOW, 78, 20) for text, role in line if text.startswith("B2")
    ]
    assert moved.count("op-moved") == 1
    assert timeline.role_of(OpView("F", 0, 0, 0.0, 1.0, again=True)) == "op-again"
    assert timeline.role_of(OpView("S", 0, 0, 0.0, 1.0, origin="node-1/0")) == "op-S"


def test_more_ops_than_cells_still_fit_and_each_in_its_place() -> None:
    many = tuple(OpView("F", 0, i, i / 100, (i + 1) / 100) for i in range(100))
    lane = LaneView("node-1/0", 0, (0,), many, 0.0)
    text = "".join(part for part, _ in timeline.cells(lane, 2.0, 20))
    assert len(text) == 20
    assert text.count("·") in {9, 10}


def test_of_a_node_with_several_devices_each_has_its_name() -> None:
    """As where a stage is of several devices; a node with one device is named by itself."""
    lanes = (
        watching.lane("node-1/0", 0, 0, watching.ops(0)),
        watching.lane("node-1/1", 0, 0, watching.ops(0)),
        watching.lane("node-2/0", 0, 1, watching.ops(1)),
    )
    view = fold(LIVE, [Watched(NOW, schedule=watching.schedule(lanes=lanes))])
    shown = [line.split() for line in drawn(view)[1:]]
    assert [row[:2] for row in shown] == [["s0", "node-1/0"], ["s0", "node-1/1"], ["s1", "node-2"]]
    times = map(plain, optimes.paint(watching.schedule(lanes=lanes), [0], 150))
    assert [row.split()[1] for row in times][1:] == ["node-1/0", "node-1/1", "node-2"]


def test_modelled_and_the_difference() -> None:
    assert "modelled  900 ms" in plain(timeline.headline(LIVE, timeline.TimelineLook("modelled")))
    assert "+11.1% against the model" in plain(timeline.headline(LIVE, timeline.TimelineLook("difference")))
    text = drawn(LIVE, "difference")
    assert set(text[1].split("node-1")[1].split("25%")[0].strip()) <= {"─", "·"}
    assert "F" in text[2].split("node-2")[1]
    assert text[6].endswith("not in the plan that is modelled")


def test_no_schedule_is_said_and_why() -> None:
    bare = fold(View(), build.facts())
    assert drawn(bare) == ["no step with known op times yet"]
    assert drawn(bare, "modelled") == ["the plan's schedule is being modelled"]
    assert drawn(fold(bare, [QueryRefused(NOW, "schedule", "no such route")])) == [
        "the daemon has none: no such route"
    ]
    assert drawn(View()) == ["no job"]


def test_pipelines_in_order_or_most_waiting_first_from_the_one_that_is_looked_at() -> None:
    assert LIVE.schedule is not None
    assert timeline.by_pipeline(LIVE.schedule) == [0, 1]
    worse = fold(LIVE, [Watched(NOW, schedule=watching.schedule(lanes=(
        watching.lane("a/0", 0, 0, (), bubble=0.1),
        watching.lane("b/0", 1, 0, (), bubble=0.5))))])  # fmt: skip
    assert worse.schedule is not None
    assert timeline.by_pipeline(worse.schedule, "waiting") == [1, 0]
    hurt = fold(LIVE, [Watched(NOW, schedule=watching.schedule(lanes=(
        watching.lane("a/0", 0, 0, ()), watching.lane("b/0", 1, 0, (), dead=True))))])  # fmt: skip
    assert hurt.schedule is not None
    assert timeline.by_pipeline(hurt.schedule, "hurt") == [1, 0]
    assert said(timeline.paint(LARGE, NOW, 80, 9, timeline.TimelineLook(top=30))).startswith("▾ P30 ")
    assert said(timeline.paint(LARGE, NOW, 80, 9, timeline.TimelineLook(top=9999))).startswith("▾ P249 ")


def test_the_fleet_is_a_cell_for_each_pipeline_by_bubble() -> None:
    strip = said(fleet.paint(LARGE, NOW, 125, 3)).split("\n")
    assert "<8%" in strip[0]
    assert len("".join(strip[1:])) == 250
    assert set("".join(strip[1:])) == {"▂", "▄", "▆", "█"}
    assert len(said(fleet.paint(LARGE, NOW, 50, 2)).split("\n")[1]) == 50


# --------------------------------------------------------------------------- nodes


def test_two_nodes_in_a_cell_and_those_that_are_not_well_by_name() -> None:
    states = ["active", "active", "active", "lost", "lost", "lost", "disconnected", "active", "active"]
    many = tuple(node_view(f"node-{i}", state=state) for i, state in enumerate(states, 1))
    view = fold(View(), [fetched(nodes=many)])
    text = said(grid.paint(view, NOW, 80, 3)).split("\n")
    assert text[0] == "█▀✗▄▀"
    assert text[1] == "✗ node-4 lost  ✗ node-5 lost  ✗ node-6 lost  ? node-7 disconnected"
    assert said(grid.paint(view, NOW, 80, 6)).split("\n")[:2] == [
        "■ node-1  ■ node-2  ■ node-3  ✗ node-4  ✗ node-5  ✗ node-6  ? node-7  ■ node-8",
        "■ node-9",
    ], "where there is room each has its name"


def test_nodes_by_rack_and_by_pipeline() -> None:
    racks = tuple(node_view(f"node-{i}", zone=f"r{i % 3}") for i in range(1, 10))
    view = fold(LIVE, [fetched(nodes=racks)])
    assert [line.split()[0] for line in said(grid.paint(view, NOW, 60, 9, "rack")).split("\n")[:3]] == [
        "r0",
        "r1",
        "r2",
    ]
    by_pipeline = said(grid.paint(LIVE, NOW, 60, 9, "pipeline")).split("\n")
    assert [line.split()[0] for line in by_pipeline[:3]] == ["P0", "P1", "-"]


def test_a_thousand_nodes_keep_the_worst_in_sight() -> None:
    text = said(grid.paint(LARGE, NOW, 40, 8)).split("\n")
    assert "✗ node-700 lost" in text[-2]
    assert any(sign in "".join(text[:-2]) for sign in "✗▀▄")


def test_every_pair_of_halves_has_a_look() -> None:
    for upper, lower in itertools.product(set(grid.HALVES.values()), repeat=2):
        assert grid.cell(upper, lower)[1] in COLOURED["dark"]


def test_the_table_filters_sorts_and_says_copies() -> None:
    text = said(nodetable.paint(LIVE, NOW, 120, 10, nodetable.NodeTableLook(cursor=9)))
    assert "P0 s1" in text
    (row,) = [line for line in text.split("\n") if "node-2" in line]
    assert row.split()[6] == "1"
    found = nodetable.selected(LIVE, nodetable.NodeTableLook(words="LOST node"))
    assert [node.name for node in found] == ["node-4"]
    assert nodetable.selected(LIVE, nodetable.NodeTableLook(order="state"))[0].name == "node-4"
    assert 'no node has "x y"' in said(
        nodetable.paint(LIVE, NOW, 80, 5, nodetable.NodeTableLook(words="x y"))
    )
    marked = said(nodetable.paint(LIVE, NOW, 80, 9, nodetable.NodeTableLook(cursor=4, marked=("node-1",))))
    assert "◆■ node-1" in marked


def test_only_rows_in_sight_are_made() -> None:
    made: list[int] = []

    def row(item: int) -> Line:
        made.append(item)
        return ((str(item), ""),)

    lines = rows(range(100_000), 50_000, 20, 9, row)
    assert made == list(range(49_996, 50_005))
    assert [role for line in lines for _, role in line].count("cursor") == 1
    assert list(window(0, 3, 9)) == [0, 1, 2]
    assert list(window(99, 100, 4)) == [96, 97, 98, 99]
    assert matches("Node-7 LOST r04", "r04 lost")


def test_layers_at_risk_come_first() -> None:
    text = said(copies.paint(LIVE, NOW, 60, 8)).split("\n")
    assert text[0] == "layers 0-9: 1 with 1  9 with 2"
    assert text[1] == "2222222221"
    assert text[2] == " layer 9    1 live: node-2/0"
    assert "not known: gone" in said(
        copies.paint(fold(View(), [QueryRefused(NOW, "layers", "gone")]), NOW, 60, 8)
    )


# --------------------------------------------------------------------------- templates, incidents, job


def test_what_templates_cover() -> None:
    covered = coverage.covers((3, 5), 11)
    assert {number: covered.way(number) for number in range(1, 12) if covered.way(number)} == {
        3: (3,), 5: (5,), 6: (3, 3), 8: (5, 3), 9: (3, 3, 3), 10: (5, 5), 11: (5, 3, 3),
    }  # fmt: skip
    text = said(coverage.paint(LIVE, NOW, 60, 10)).split("\n")
    assert text[0] == "covered: every number from 2 to 4 nodes"
    assert text[1] == " nodes  pipelines of so many nodes"
    assert text[2].endswith("✗ none")
    assert text[5] == "▸    4  2 \u00d7 2"


def test_shares_of_the_templates() -> None:
    text = said(shares.paint(LIVE, NOW, 52, 9)).split("\n")
    assert text[1].split()[:2] == ["▸", "2"]
    assert text[1].endswith("100%")
    assert len(said(shares.paint(LARGE, NOW, 52, 5)).split("\n")) == 5


def test_the_chosen_template_shows_its_stages() -> None:
    text = said(templatetable.paint(LIVE, NOW, 90, 20, templatetable.TemplateTableLook(cursor=1)))
    assert "template of 3 nodes" in text
    assert " s2   layers 2" in text


def test_stages_say_what_is_computed_again_where_anything_is() -> None:
    chosen = templatetable.TemplateTableLook(cursor=1)
    assert "again" not in said(templatetable.paint(LIVE, NOW, 90, 20, chosen))
    modes: tuple[Recompute, ...] = ("blocks", "selective", "none")
    again = [
        msgspec.structs.replace(each, recompute=modes if each.num_nodes == 3 else ())
        for each in LIVE.templates
    ]
    found = templatetable.paint(msgspec.structs.replace(LIVE, templates=again), NOW, 90, 20, chosen)
    lines = [line for line in said(found).split("\n") if line.startswith(" s")]
    assert [("blocks again" in line, "selective again" in line) for line in lines[:3]] == [
        (True, False), (False, True), (False, False),
    ]  # fmt: skip
    assert all(len(line) <= 90 for line in lines)


def test_phases_beside_the_median_of_earlier_ones_and_a_budget() -> None:
    slow = tuple(PhaseView(part.phase, part.start_s, 3 * part.duration_s) for part in incident().phases)
    three = (
        incident(id="inc-1", at=NOW - 90.0),
        incident(id="inc-2", at=NOW - 60.0, phases=slow),
        incident(id="inc-3", at=NOW - 30.0, total_s=12.0),
    )
    view = fold(LIVE, [fetched(incidents=three)])
    text = said(recovery.paint(view, NOW, 100, 12)).split("\n")
    assert "total 12,000 ms (budget 10 s), 0 steps lost" in text[0]
    assert text[1].endswith("200 ms  p50 400 ms")
    assert "p50" not in said(recovery.one(view, three[0], NOW, 100, 12))


def test_choices_with_their_costs() -> None:
    chosen = incident(
        cost_s=4.0,
        rejected=(RejectedView("restart", 90.0, "loses 12 steps"), RejectedView("wait", 8.0, "idle")),
    )
    text = said(choices(chosen, 90, 20)).split("\n")
    assert text[0].startswith("copied 3 MiB at 7.5 MiB/s")
    order = [line for line in text if "✓" in line or "✗" in line]
    assert [line.split()[-1] for line in order] == ["one", "idle", "steps"]
    assert "90 s" not in order[0]
    assert "✗ restart: loses 12 steps" in order[2]


def test_incidents_newest_first_and_filtered() -> None:
    view = fold(LIVE, [fetched(incidents=(incident(), incident(id="inc-2", nodes=("node-9",), open=True)))])
    assert [each.id for each in incidents.selected(view, incidents.IncidentsLook())] == ["inc-2", "inc-1"]
    assert [each.id for each in incidents.selected(view, incidents.IncidentsLook(words="node-9"))] == [
        "inc-2"
    ]
    assert "✗ inc-2" in said(incidents.paint(view, NOW, 90, 5, incidents.IncidentsLook(cursor=1)))


def test_goodput_by_cause_the_largest_first() -> None:
    text = said(goodput.paint(LIVE, NOW, 100, 12)).split("\n")
    assert text[0].startswith(
        "goodput 95.0% of 16 min 40 s of device time   now 80.0% of the best throughput"
    )
    assert [line.split()[0] for line in text[1:5]] == ["useful", "bubbles", "copying", "noticing"]
    assert set(goodput.WORDS) == set(goodput.CAUSES)


def test_measured_stands_beside_measured_and_the_plan_beside_the_best_plan() -> None:
    text = said(training.paint(LIVE, NOW, 80, 10)).split("\n")
    best = f"best 30.0 at {minute(NOW - 3600.0, NOW)}"
    assert text[0].startswith(f"24.0 samples/s, {best}   0 to 30.0")
    assert said(training.paint(LIVE, NOW, 60, 10)).startswith("24.0 samples/s   0 to 30.0, ")
    head = said(verdict.paint(LIVE, NOW, 160))
    assert f"24.0 samples/s, {best}" in head
    assert "plan 50% of the best of 6 nodes" in head
    assert " = " not in head, "what is measured is no share of what is modelled"


def test_the_best_of_another_day_bears_its_date() -> None:
    days_ago = NOW - 3 * 86_400.0
    view = fold(LIVE, [Watched(NOW, goodput=watching.goodput(best_at=days_ago))])
    assert f"best 30.0 at {minute(days_ago, NOW)}" in said(verdict.paint(view, NOW, 160))
    assert len(minute(days_ago, NOW)) == len("1970-01-09 13:46")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.94, 0.95, 1.0])
@pytest.mark.parametrize("gone", [0, 1, 4])
def test_with_nodes_gone_nothing_of_the_headline_is_green(share: float, gone: int) -> None:
    nodes = tuple(node_view(f"node-{n}", state="lost" if n < gone else "active") for n in range(6))
    seen = watching.goodput(plan_step_s=1.0, best_plan_step_s=share, best_plan_nodes=6)
    view = fold(LIVE, [fetched(nodes=nodes), Watched(NOW, goodput=seen)])
    [field] = verdict.plan_field(view)
    assert ("good" in {role for _, role in field}) == (share >= 0.95 and not gone)
    forgotten = fold(view, [fetched(nodes=nodes[gone:])])  # as after a restart that knows of fewer
    [field] = verdict.plan_field(forgotten)
    assert gone == 0 or "good" not in {role for _, role in field}


def test_without_a_figure_of_the_plan_none_is_told() -> None:
    view = fold(LIVE, [Watched(NOW, goodput=watching.goodput(best_plan_step_s=0.0, best_step_s=0.0))])
    assert verdict.plan_field(view) == []
    assert "best" not in said(verdict.paint(view, NOW, 160))


def test_the_axis_ends_at_a_measured_figure() -> None:
    for now_s in (0.1, 0.5, 2.0):
        view = fold(LIVE, [Watched(NOW, goodput=watching.goodput(step_s=now_s, best_plan_step_s=0.01))])
        assert "0 to 30.0" in said(training.paint(view, NOW, 80, 10)), "the most that was measured"


@pytest.mark.parametrize("width", [80, 120, 200])
def test_no_magnitude_of_a_time_moves_its_row(width: int) -> None:
    ages = [digit * 10.0**power for power in range(-6, 8) for digit in (1.0, 8.96, 9.996)]
    nodes = tuple(node_view(f"node-{n}", heartbeat_age_s=age, zone="r1") for n, age in enumerate(ages))
    table = said(nodetable.paint(fold(LIVE, [fetched(nodes=nodes)]), NOW, width, 99)).split("\n")[1:]
    assert len(table) == len(ages)
    assert len({len(line.rstrip()) for line in table}) == 1
    told = tuple(incident(id=f"inc-{n}", total_s=age, at=NOW - age) for n, age in enumerate(ages))
    rows = said(incidents.paint(fold(LIVE, [fetched(incidents=told)]), NOW, 200, 99)).split("\n")
    assert len({line.index("node-") for line in rows[1:]}) == 1


def test_incidents_are_marked_under_the_curve() -> None:
    recent = fold(LIVE, [fetched(incidents=(incident(at=NOW - 5.0),))])
    assert "▲" in said(training.paint(recent, NOW, 60, 10))


def test_the_loss_of_a_long_run_is_drawn_from_its_first_step_on() -> None:
    newest = fleet_points(1_000_000)
    whole = msgspec.structs.replace(LIVE, points=newest, curve=watching.curve(150))
    for width, height in ((120, 20), (60, 10), (200, 8), (70, 5)):
        text = said(training.paint(whole, NOW, width, height))
        assert "steps 1 to 1,000,000" in text
        assert "░" in text
    head = next(line for line in said(training.paint(whole, NOW, 120, 20)).split("\n") if "loss" in line)
    assert "least 1.0000" in head
    assert "✗" not in said(training.paint(whole, NOW, 120, 20))
    skipped = watching.curve(150, skipped=3)
    drawn = said(training.paint(msgspec.structs.replace(whole, curve=skipped), NOW, 150, 20))
    assert "✗ 3 skipped" in drawn


def test_evaluations_are_dots_in_the_curve_of_the_loss() -> None:
    first, last = LIVE.points[0].step, LIVE.points[-1].step
    told = [
        msgspec.structs.replace(each, step=step)
        for each, step in zip(watching.EVALUATIONS, (first, last), strict=True)
    ]
    view = msgspec.structs.replace(LIVE, evaluations=tuple(told))
    for width, height in ((120, 20), (60, 10), (40, 8)):
        drawn = said(training.paint(view, NOW, width, height)).split("\n")
        assert max(map(len, drawn)) <= width
        rows = [at for at, line in enumerate(drawn) if "●" in line and "evaluation" not in line]
        assert len(rows) in {1, 2}, "one in the first column, and a lower one in the last"
    head = next(line for line in said(training.paint(view, NOW, 120, 20)).split("\n") if "evaluation" in line)
    assert f"● evaluation 4.2500 after step {last:,}" in head
    later = msgspec.structs.replace(told[1], step=last + 1)
    after_rollback = msgspec.structs.replace(LIVE, evaluations=(told[0], later))
    assert f"after step {first:,}" in said(training.paint(after_rollback, NOW, 120, 20))
    none = msgspec.structs.replace(told[1], loss=None)
    broken = msgspec.structs.replace(LIVE, evaluations=(told[0], none))
    assert "● evaluation NaN" in said(training.paint(broken, NOW, 120, 20))


def test_of_a_run_that_went_back_nothing_is_drawn_that_was_taken_back() -> None:
    first = LIVE.points[0].step
    ahead = msgspec.structs.replace(LIVE, curve=watching.curve(10, first=first))
    run = curves.run_of(ahead)
    assert run.bins[-1].first <= LIVE.points[-1].step


def test_steps_since_the_answer_go_on_where_it_ended() -> None:
    told = Fleet((4, 4)).curve(900)
    later = tuple(StepPoint(step, NOW, 2.0) for step in range(500, 1_001))
    run = curves.run_of(msgspec.structs.replace(LIVE, points=later, curve=told))
    assert [each.first for each in run.bins][: len(told.bins)] == [each.first for each in told.bins]
    newer = run.bins[len(told.bins) :]
    assert (newer[0].first, newer[-1].last) == (901, 1_000)
    assert all(one.last + 1 == two.first for one, two in itertools.pairwise(run.bins))
    assert 2 <= len(newer) <= 6, "as wide as those before would go on"
    assert [text for _, text in run.ticks] == ["1", "10", "100", "1k"]


@pytest.mark.parametrize(
    ("width", "height"), [(76, 7), (76, 26), (116, 14), (196, 26), (30, 3), (8, 1), (1, 1)]
)
def test_more_room_shows_more_curves_and_all_of_them_fit(width: int, height: int) -> None:
    view = msgspec.structs.replace(
        LIVE, points=fleet_points(20_000), curve=Fleet((4, 4)).curve(20_000, evaluated=True)
    )
    lines = curves.paint(view, NOW, width, height)
    assert len(lines) <= height
    assert max(map(length, lines)) <= width
    text = said(lines)
    if width > 8:
        assert f"loss 1.5000   ● {'evaluation' if width > 30 else 'eval'} " in text
        assert "…" not in text, "what has no room is left out and not cut"
    assert ("gradient norm" in text) == (height >= 14)
    assert ("learning rate" in text) == (height >= 26 and width >= 110)
    if height >= 7:
        assert "┤" in text
        assert "10k" in text
        assert "▲" in text


def test_curves_are_drawn_in_letters_too() -> None:
    view = msgspec.structs.replace(LIVE, points=fleet_points(20_000), curve=Fleet((4, 4)).curve(20_000))
    lines = [ascii_line(line) for line in curves.paint(view, NOW, 120, 20)]
    text = said(lines)
    assert text.isascii()
    assert "?" not in text


def test_what_no_step_told_is_said_in_the_place_of_its_curve() -> None:
    lines = said(curves.paint(LIVE, NOW, 160, 26)).split("\n")
    assert sum("not known" in line for line in lines) == 3


def fleet_points(last: int) -> tuple[StepPoint, ...]:
    return tuple(StepPoint(step, NOW - (last - step), 1.5) for step in range(last - 599, last + 1))


def test_the_exactness_tick() -> None:
    assert "exact ✓ no step lost in 1 incident" in said(jobfacts.paint(LIVE, NOW, 120, 6))
    back = fold(LIVE, [fetched(jobs=(build.job(steps_lost=4),))])
    assert "exact ! went back 4 steps" in said(jobfacts.paint(back, NOW, 120, 6))


def test_the_load_of_experts_has_a_line_where_there_are_any() -> None:
    routers = tuple(RouterView(layer, 20, 1.25, 0.0, 1.0 + layer, 0) for layer in range(1, 4))
    mixture = fold(LIVE, [fetched(jobs=(build.job(routers=routers),))])
    lines = jobfacts.paint(mixture, NOW, 100, jobfacts.rows(mixture))
    assert "experts ▃▆█ load 4 at most (layer 3), aux loss 1.25" in said(lines)
    assert "submitted" in said(lines)
    assert jobfacts.rows(mixture) == jobfacts.rows(LIVE) + 1
    assert "experts" not in said(jobfacts.paint(LIVE, NOW, 100, 6))
    many = tuple(RouterView(layer, 20, None, 0.0, 1.0, 0) for layer in range(1, 95))
    narrow = fold(LIVE, [fetched(jobs=(build.job(routers=many),))])
    assert all(len(plain(line)) <= 60 for line in jobfacts.paint(narrow, NOW, 60, 9))


# --------------------------------------------------------------------------- what would follow


def test_what_would_follow_in_full() -> None:
    text = said(impact.paint(LIVE, NOW, 100, 12, ("node-2",)))
    for part in ("no step is lost", "75.0% of the throughput stays", "stall 2 s", "copies 5 MiB in 500 ms",
                 "could still lose 0", "P0", "wait, 30 s: too long"):  # fmt: skip
        assert part in text
    back = fold(LIVE, [Watched(NOW, impact=watching.impact("node-2", steps_back=3, lost_layers=(9,)))])
    assert "throughput then 75.0%" in said(impact.paint(back, NOW, 100, 12, ("node-2",)))
    assert "thinking" in said(impact.paint(LIVE, NOW, 100, 12, ("node-1",)))
    assert "could still lose 0 nodes" in text
    assert "mark nodes" in said(impact.paint(LIVE, NOW, 100, 12))


def test_the_worst_is_said_first() -> None:
    def verdict_of(**changes: object) -> str:
        return plain(impact.verdict(watching.impact("node-2", **changes)))

    assert verdict_of(stops=True).startswith(" the job stops")
    assert (
        verdict_of(lost_layers=(9,), steps_back=12) == " back 12 steps  the last copies of 1 layer are lost"
    )
    assert impact.harmful(None)
    assert impact.harmful(watching.impact("a", steps_back=1, lost_layers=(1,)))
    assert not impact.harmful(watching.impact("a"))


def test_a_failure_now_would_cost() -> None:
    assert impact.candidates(LIVE) == (("node-2",), ("node-5",), ("node-1",))
    assert (
        plain(impact.line(LIVE, 100, impact.candidates(LIVE)))
        == "a failure now would cost  node-2: 2 s, then 25.0% slower"
    )
    sole = fold(LIVE, [Watched(NOW, impact=watching.impact("node-2", steps_back=3, lost_layers=(9,)))])
    assert "node-2: 3 steps (sole copy)" in plain(impact.line(sole, 100, impact.candidates(sole)))
    assert impact.line(View(), 100, ()) == ()


# --------------------------------------------------------------------------- events, states


def test_events_by_level_words_and_place() -> None:
    assert len(log.selected(LIVE, log.LogLook())) == 3
    assert [change.seq for change in log.selected(LIVE, log.LogLook(level="warn"))] == [1]
    assert [change.seq for change in log.selected(LIVE, log.LogLook(words="shrink"))] == [2]
    newest, chosen = (
        log.at_cursor(LIVE, log.LogLook()),
        log.at_cursor(LIVE, log.LogLook(cursor=1, follow=False)),
    )
    assert newest is not None
    assert chosen is not None
    assert (newest.seq, chosen.seq) == (3, 2)
    assert log.at_cursor(View(), log.LogLook()) is None


def test_a_daemon_that_answers_otherwise_is_not_away() -> None:
    odd = fold(LIVE, [Away(NOW + 1, "the answer cannot be read", answers=True)])
    assert "the daemon answers what this console cannot read" in said(verdict.paint(odd, NOW + 2, 160))
    gone = fold(odd, [Away(NOW + 1, "nobody there")])
    assert "daemon away, training does not need it" in said(verdict.paint(gone, NOW + 2, 160))


def test_how_many_jobs_wait_is_said_beside_the_one_at_work() -> None:
    assert "queued" not in said(verdict.paint(LIVE, NOW, 160))
    behind = fold(LIVE, [fetched(jobs=(build.job(), build.job(id="job-9", state="queued")))])
    assert "running, 1 queued" in said(verdict.paint(behind, NOW, 160))


def test_a_daemon_of_another_version_is_said() -> None:
    assert LIVE.status is not None
    newer = fold(LIVE, [fetched(status=msgspec.structs.replace(LIVE.status, version="9.0"))])
    assert "! this console is" in said(verdict.paint(newer, NOW, 160))


def test_the_past_is_said_with_its_reach() -> None:
    from oobleckd.console.past import Walk

    view = fold(View(), [Walk(watching.past(), NOW - 60).begin(NOW - 39, playing=False)])
    text = said(verdict.paint(view, NOW, 160))
    for part in ("◀ PAST", "standing still, known from", "inc-2 open: node-5: signal 9"):
        assert part in text
