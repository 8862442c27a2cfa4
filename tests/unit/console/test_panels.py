"""Painters: what each panel says, and that it says it inside its frame."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import pytest

from oobleckd.console.facts import Away
from oobleckd.console.model import StepPoint, View, fold
from oobleckd.console.themes import COLOURED, PLAIN
from oobleckd.console.widgets import events, nodes, pipelines, recovery, templates, training, verdict
from oobleckd.console.widgets.panel import Painter
from oobleckd.draw.lines import Line, framed, length, plain
from oobleckd.protocol.batchramp import sizes_of
from oobleckd.protocol.incidentviews import PhaseView
from tests.helpers.api_server import node_view
from tests.unit.console import build
from tests.unit.console.build import NOW, change, facts, fetched, heard, incident, job

LIVE = fold(View(), facts())
PAINTERS = (
    verdict.paint,
    nodes.paint,
    pipelines.paint,
    templates.paint,
    training.paint,
    recovery.paint,
    events.paint,
)
MANY = fold(
    LIVE,
    [
        fetched(
            nodes=tuple(
                node_view(f"node-{i}", state="lost" if i == 700 else "active") for i in range(1, 1001)
            ),
            pipelines=tuple(
                build.pipeline(i, tuple(f"node-{4 * i + j}" for j in range(1, 5)), (i,)) for i in range(250)
            ),
            templates=build.templates(40),
            incidents=(incident(open=True, cause="\x1b[2J" * 40, reason="because " * 80),),
        ),
        heard(change(9, "node", "漢字\n" * 50, level="error")),
    ],
)


def said(painted: Sequence[Line]) -> str:
    return "\n".join(map(plain, painted))


@pytest.mark.parametrize(
    "view", [View(), LIVE, MANY, fold(MANY, [Away(NOW, "x" * 300)])], ids=["none", "live", "many", "stale"]
)
@pytest.mark.parametrize("paint", PAINTERS)
def test_every_panel_stays_in_its_frame_at_any_size(paint: Painter, view: View) -> None:
    for width, height in itertools.product((1, 8, 30, 52, 158), (1, 2, 3, 6, 27)):
        painted = framed(paint(view, NOW + 1, width, height), width, height)
        assert len(painted) <= height
        assert all(length(line) <= width for line in painted), (width, height, said(painted))
        assert said(painted).replace("\n", "").isprintable()
        assert {role for line in painted for _, role in line} <= COLOURED["dark"].keys() == PLAIN.keys()


# --------------------------------------------------------------------------- verdict


def test_the_verdict_says_it_all() -> None:
    text = said(verdict.paint(LIVE, NOW, 160))
    for part in ("● live", "gen 3", "job small running", "step 20/500", "policy oobleck",
        "can still lose 1 of 1 node",
                 "4 of 5 nodes here", "2 pipelines", "24.0 samples/s",
                 "1 incident, 0 steps lost"):  # fmt: skip
        assert part in text


def test_a_silent_node_is_not_counted_as_here() -> None:
    """Before its lease is over; of one that was not heard since the daemon's restart there is none."""
    found = [node_view(f"node-{i}", heartbeat_age_s=0.1) for i in (1, 2)]
    silent = node_view("node-3", state="disconnected", heartbeat_age_s=2.0)
    unheard = node_view("node-4", state="disconnected", heartbeat_age_s=0.0)
    text = said(verdict.paint(fold(LIVE, [fetched(nodes=(*found, silent))]), NOW, 160))
    assert "2 of 3 nodes here " in text
    assert "1 not heard of for 2 s" in text
    text = said(verdict.paint(fold(LIVE, [fetched(nodes=(*found, unheard))]), NOW, 160))
    assert "2 of 3 nodes here" in text
    assert "not heard of" not in text


def test_in_80_columns_the_verdict_still_says_what_counts() -> None:
    text = said(verdict.paint(LIVE, NOW, 80))
    for part in (
        "● live",
        "gen 3",
        "job small running",
        "step 20/500",
        "policy oobleck",
        "can still lose 1 of 1 node",
    ):
        assert part in text


def test_banners() -> None:
    def banner(view: View, now: float = NOW) -> str:
        return plain(verdict.paint(view, now, 160)[-1])

    assert "looking for the daemon" in banner(View())
    assert "no daemon yet  no socket" in banner(fold(View(), [Away(NOW, "no socket", "start it")]))
    assert "start it" in said(verdict.paint(fold(View(), [Away(NOW, "no socket", "start it")]), NOW, 80))
    stale = fold(LIVE, [Away(NOW + 1, "no socket")])
    assert "daemon away, training does not need it  last word 12 s ago" in banner(stale, NOW + 12)
    is_open = fold(LIVE, [fetched(incidents=(incident(open=True, at=NOW - 0.5),))])
    assert "inc-1 open  resume, 500 ms so far: node-4: signal 9" in banner(is_open)
    waiting = fold(
        LIVE, [fetched(jobs=(job(state="waiting", reason="needs 2 nodes and has 1", tolerance=-1),))]
    )
    assert "waiting  needs 2 nodes and has 1" in banner(waiting)
    assert "not deployed" in said(verdict.paint(waiting, NOW, 160))
    far = job(state="preparing", reason="n1 tokenizes the data: 1 GiB of 2 GiB", tolerance=-1)
    assert "preparing  n1 tokenizes the data" in banner(fold(LIVE, [fetched(jobs=(far,))]))
    assert "oobleckctl submit" in banner(fold(View(), [fetched(jobs=(), incidents=())]))


@pytest.mark.parametrize(
    "state", ["queued", "deploying", "recovering", "waiting", "paused", "done", "failed"]
)
def test_of_a_job_that_did_not_train_nothing_is_claimed_while_the_daemon_is_away(state: str) -> None:
    for jobs in ((job(state=state),), ()):
        gone = fold(LIVE, [fetched(jobs=jobs), Away(NOW + 1, "no socket")])
        text = plain(verdict.paint(gone, NOW + 12, 160)[-1])
        assert text.startswith(" daemon away  last word 12 s ago")


def test_one_pipeline_is_one() -> None:
    one = fold(LIVE, [fetched(pipelines=build.PIPELINES[:1])])
    assert "1 pipeline   " in said(verdict.paint(one, NOW, 160))


# --------------------------------------------------------------------------- nodes


def test_few_nodes_have_a_line_each_with_state_layers_and_reason() -> None:
    text = said(nodes.paint(LIVE, NOW, 60, 10)).split("\n")
    assert text[0].startswith("■ node-1  active  layers 0-4")
    assert text[3].startswith("✗ node-4  lost    signal 9")
    assert text[-1] == "✗ 1 lost  ■ 4 active"


def test_less_room_leaves_glyph_and_name_then_a_cell_then_a_cell_for_several() -> None:
    assert (
        said(nodes.paint(LIVE, NOW, 36, 3))
        == "■ node-1  ■ node-2  ■ node-3\n✗ node-4  ■ node-5\n✗ 1 lost  ■ 4 active"
    )
    cells = said(nodes.paint(MANY, NOW, 50, 22)).split("\n")
    assert "".join(cells[:-1]).index("✗") == 699
    assert len("".join(cells[:-1])) == 1000
    dense = said(nodes.paint(MANY, NOW, 50, 6)).split("\n")
    assert len("".join(dense[:-1])) == 250
    assert "".join(dense[:-1]).index("✗") == 699 // 4


def test_every_state_has_its_own_glyph() -> None:
    assert len({glyph for glyph, _ in nodes.STATES.values()}) == len(nodes.STATES)


# --------------------------------------------------------------------------- pipelines, templates


def test_pipelines_with_stages_layers_and_shares() -> None:
    text = said(pipelines.paint(LIVE, NOW, 80, 20))
    assert "P0  2 nodes, 2 stages   6 of 12 micro-batches   0-5" in text
    assert "s1  node-5/0  layers 5-9" in text


def test_a_dead_stage_is_struck_out_in_words_too() -> None:
    gone = fold(LIVE, [fetched(nodes=(node_view("node-2", state="lost"),))])
    (line,) = [line for line in said(pipelines.paint(gone, NOW, 80, 20)).split("\n") if "node-2" in line]
    assert "xxx" in line
    assert line.endswith("✗ lost")
    assert "✗node-2 5-9" in said(pipelines.paint(gone, NOW, 80, 3))


def test_a_vacant_place_is_named_though_its_node_is_not_known_any_more() -> None:
    first, second = build.PIPELINES
    hurt = msgspec.structs.replace(second, vacant=("node-5/0",))
    view = fold(LIVE, [fetched(pipelines=(first, hurt))])
    (line,) = [line for line in said(pipelines.paint(view, NOW, 80, 20)).split("\n") if "node-5/0" in line]
    assert "xxx" in line
    assert line.endswith("✗ vacant")
    assert "✗node-5 5-9" in said(pipelines.paint(view, NOW, 80, 3))
    assert said(pipelines.paint(view, NOW, 80, 1)).startswith("…")


def test_of_many_pipelines_those_with_a_loss_come_first() -> None:
    text = said(pipelines.paint(MANY, NOW, 100, 5)).split("\n")
    assert text[0].startswith("P174   1/250 micro-batches ")
    assert text[-1] == "… 246 more pipelines"


def test_templates_in_use_are_marked_and_stay() -> None:
    text = said(templates.paint(LIVE, NOW, 60, 9)).split("\n")
    assert text[1].split() == ["▸", "2", "2", "100", "ms", "0│1"]
    assert len(text) == 4
    assert said(templates.paint(MANY, NOW, 60, 4)).split("\n")[1].startswith("▸")
    assert said(templates.paint(MANY, NOW, 60, 4)).endswith("… 37 more templates")


# --------------------------------------------------------------------------- training


def test_throughput_counts_a_stall_as_a_dip_of_its_length() -> None:
    points = [StepPoint(step, at, 1.0) for step, at in enumerate([0.0, 1.0, 2.0, 6.0, 7.0, 8.0], 1)]
    assert training.rates(points, sizes_of(4, 1), 0.0, 8.0, 8) == pytest.approx(
        [4.0, 4.0, 1.0, 1.0, 1.0, 1.0, 4.0, 4.0]
    )
    before = training.rates(points, sizes_of(4, 1), -2.0, 2.0, 4)
    assert before[:2] == [None, None]
    assert sum(rate for rate in before if rate is not None) == pytest.approx(8.0)


def test_steps_told_together_are_all_counted() -> None:
    points = [StepPoint(step, at, 1.0) for step, at in enumerate([0.0, 4.0, 4.0, 4.0, 8.0], 1)]
    assert training.rates(points, sizes_of(1, 1), 0.0, 8.0, 2) == pytest.approx([0.75, 0.25])


def test_an_overdue_step_is_seen_as_a_gap_only_while_live() -> None:
    def last_column(view: View, now: float) -> str:
        return said(training.paint(view, now, 40, 8)).split("\n")[2].ljust(40)[-1]

    assert last_column(LIVE, NOW) == "█"
    assert last_column(LIVE, NOW + 20) == "▁"
    assert last_column(fold(LIVE, [Away(NOW + 1, "gone")]), NOW + 20) == "█"


def test_a_loss_that_is_no_number_is_said() -> None:
    view = fold(LIVE, [heard(build.step_change(4, 21, loss=float("nan")))])
    assert "loss NaN" in said(training.paint(view, NOW, 40, 8))
    assert "loss NaN" in said(training.paint(view, NOW, 40, 2))


def test_skipped_steps_are_counted_and_marked_under_the_loss() -> None:
    changes = [build.step_change(4 + n, 21 + n, loss=float("nan"), outcome="skipped") for n in range(2)]
    view = fold(LIVE, [heard(change) for change in changes])
    assert view.job is not None
    assert (view.job.steps_skipped, view.job.skipped_in_row) == (2, 2)
    text = said(training.paint(view, NOW, 40, 10)).split("\n")
    assert "✗ 2 skipped" in "".join(text)
    assert "✗✗" in text[-2]
    assert "✗ 2 skipped" in said(training.paint(view, NOW, 60, 2) + training.paint(view, NOW, 60, 3))
    assert "(2 skipped)" in said(verdict.paint(view, NOW, 120))
    on = fold(view, [heard(build.step_change(6, 23))])
    assert on.job is not None
    assert (on.job.steps_skipped, on.job.skipped_in_row) == (2, 0)


# --------------------------------------------------------------------------- incident, events


def test_the_incident_by_phase_with_its_reason() -> None:
    text = said(recovery.paint(LIVE, NOW, 90, 12))
    assert "inc-1 node-4 (signal 9) total 2,000 ms, 0 steps lost" in text
    for phase, value in [
        ("detect", "200 ms"),
        ("plan", "50 ms"),
        ("reconfigure", "750 ms"),
        ("copy", "400 ms"),
        ("resume", "600 ms"),
    ]:
        (line,) = [line for line in text.split("\n") if line.startswith(f" {phase} ")]
        assert line.endswith(value)
    assert "the step committed after 500 ms, 46 of 120 layer gradients computed again, 3 MiB copied" in text
    assert text.endswith(build.REASON)


def test_many_nodes_leave_room_for_what_an_incident_cost() -> None:
    many = tuple(f"n{number:03}" for number in range(40))
    view = fold(LIVE, [fetched(incidents=(incident(nodes=many, steps_lost=12),))])

    def headline(width: int) -> str:
        return said(recovery.paint(view, NOW, width, 9)).split("\n")[0]

    assert headline(90).startswith("inc-1 40 nodes: n000, n001")
    assert " … " in headline(90)
    for width in (44, 60, 90, 158):
        assert headline(width).endswith(
            " total 2,000 ms, 12 steps lost" if width < 100 else " (budget 10 s), 12 steps lost"
        )
        assert "40 nodes" in headline(width)
    assert "(node-4: signal 9)" in headline(120)
    assert headline(43).split() == ["inc-1", "total", "2,000", "ms,", "12", "steps", "lost"]
    few = fold(LIVE, [fetched(incidents=(incident(nodes=("node-4", "node-5")),))])
    assert said(recovery.paint(few, NOW, 90, 9)).startswith("inc-1 node-4, node-5 (node-4: signal 9) total")


def test_the_reason_stays_where_there_is_little_room() -> None:
    text = said(recovery.paint(LIVE, NOW, 44, 7)).split("\n")
    assert len(text) == 7
    assert text[-1].startswith("shrink: node-3")


def test_an_open_incident_grows_and_later_phases_wait() -> None:
    phases = (PhaseView("detect", 0.0, 0.2), PhaseView("plan", 0.2, 0.1))
    view = fold(
        LIVE, [fetched(incidents=(incident(open=True, at=NOW - 1.0, total_s=0.3, phases=phases, reason=""),))]
    )
    text = said(recovery.paint(view, NOW, 60, 9))
    assert "open for 1 s" in text
    assert "800 ms …" in text
    assert " copy        -" in text


def test_phases_that_came_twice_are_summed() -> None:
    phases = (
        PhaseView("detect", 0.0, 0.2),
        PhaseView("plan", 0.2, 0.1),
        PhaseView("detect", 0.3, 0.3),
        PhaseView("plan", 0.6, 0.4),
    )
    view = fold(LIVE, [fetched(incidents=(incident(phases=phases, total_s=1.0),))])
    text = said(recovery.paint(view, NOW, 60, 9))
    assert text.split("\n")[1].endswith("500 ms")
    assert text.split("\n")[2].endswith("500 ms")


def test_events_are_newest_last_and_marked_by_a_sign() -> None:
    rows = said(events.paint(LIVE, NOW, 70, 2)).split("\n")
    assert "shrink" in rows[0]
    assert rows[-1].endswith("inc-1: recovered in 2.000 s")
    assert " ! node " in said(events.paint(LIVE, NOW, 70, 3))
    assert " ! node-4 lost" in said(events.paint(LIVE, NOW, 34, 3))


def test_no_view_is_changed_by_being_painted() -> None:
    before = msgspec.json.encode(LIVE)
    for paint in PAINTERS:
        paint(LIVE, NOW, 80, 10)
    assert msgspec.json.encode(LIVE) == before
