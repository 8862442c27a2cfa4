"""What devices say of themselves: columns where they are known, bars, and rows that stay aligned."""

from __future__ import annotations

import msgspec
import pytest

from oobleckd.console.letters import ascii_line
from oobleckd.console.model import View, fold
from oobleckd.console.widgets import figures, grid, nodetable
from oobleckd.console.widgets.nodetable import NodeTableLook
from oobleckd.draw.lines import length, plain
from oobleckd.protocol.nodeviews import DeviceFigures, NodeView
from tests.unit.console import watching
from tests.unit.console.build import NOW

GIB = 1 << 30
CARD = DeviceFigures(
    "node-1/0", NOW, rss_bytes=9 * GIB, used_bytes=70 * GIB, planned_bytes=60 * GIB, total_bytes=80 * GIB,
    card="a card", utilisation=0.93, power_w=650.4, power_limit_w=700.0, temperature_c=74, clock_mhz=1_410,
    clock_max_mhz=1_980, throttled=("thermal", "power"), ecc_corrected=3, ecc_uncorrected=0, xids=(13, 63),
)  # fmt: skip
PLAIN = DeviceFigures("node-2/0", NOW, rss_bytes=3 * GIB)
LIVE = fold(View(), watching.facts())


def of(**told: DeviceFigures) -> View:
    nodes = tuple(
        msgspec.structs.replace(
            node, figures=tuple(each for each in told.values() if each.device == f"{node.name}/0")
        )
        for node in LIVE.nodes
    )
    return msgspec.structs.replace(LIVE, nodes=nodes)


def table(view: View, width: int) -> list[str]:
    return [plain(line) for line in nodetable.paint(view, NOW, width, 20, NodeTableLook(cursor=9))]


def node(view: View, name: str) -> NodeView:
    return next(each for each in view.nodes if each.name == name)


def test_a_figure_has_a_column_only_where_some_node_knows_it() -> None:
    head = table(LIVE, 250)[0]
    assert not {"memory", "busy", "power", "errors", "RSS", "rack"} & set(head.split())
    view = of(one=PLAIN)
    assert {"RSS"} == {"memory", "busy", "power", "errors", "RSS"} & set(table(view, 250)[0].split())
    both = table(of(one=CARD, two=PLAIN), 250)
    assert {"memory", "busy", "power", "temp", "clock", "errors", "RSS"} <= set(both[0].split())
    (row,) = [line for line in both if "node-1" in line]
    for said in ("88%", "93%", "650 W", "74 °C", "XID 63", "! 1,410", "9 GiB"):
        assert said in row
    (other,) = [line for line in both if "node-2" in line]
    assert "3 GiB" in other
    assert "%" not in other


@pytest.mark.parametrize("width", [20, 54, 76, 96, 116, 156, 196, 250])
def test_columns_come_as_the_width_allows_and_rows_stay_aligned(width: int) -> None:
    view = of(one=CARD, two=PLAIN)
    names = {"node-1": "a-node-whose-name-is-longer-than-its-column", "node-2": "n"}
    wide = tuple(
        msgspec.structs.replace(each, name=names.get(each.name, each.name), heartbeat_age_s=10.0**number)
        for number, each in enumerate(view.nodes)
    )
    lines = nodetable.paint(
        msgspec.structs.replace(view, nodes=wide), NOW, width, 20, NodeTableLook(cursor=9)
    )
    assert max(map(length, lines)) <= width
    head, *rows = map(plain, lines)
    if "state" in head:
        at = head.index("state")
        assert all(row[at - 1] == " " and row[at] != " " for row in rows)
    assert ("memory" in head) == (width >= 76)
    assert ("host" in head) == (width >= 196)


@pytest.mark.parametrize(
    ("used", "role"), [(30, "bar"), (65, "warn"), (78, "bad")]
)  # fmt: skip
def test_memory_warns_over_the_plan_and_where_it_is_about_to_run_out(used: int, role: str) -> None:
    view = of(one=msgspec.structs.replace(CARD, used_bytes=used * GIB))
    (drawn, is_of), _ = figures.columns()[0].said(node(view, "node-1"))
    assert is_of == role
    assert "█" in drawn


def test_device_by_device_the_one_of_the_cursor_first() -> None:
    view = of(one=CARD, two=PLAIN)
    found = nodetable.selected(view, NodeTableLook())
    lines = [plain(line) for line in figures.paint(view, 150, 20, found, 1)]
    assert lines[0].startswith("node-2/0")
    assert "RSS 3 GiB" in lines[0]
    text = "\n".join(lines)
    for said in (
        "70 GiB of 80 GiB, planned 60 GiB",
        "busy  93%",
        "650 of 700 W",
        "1,410 of 1,980 MHz",
        "! held down: thermal, power",
        "ECC 3 corrected",
        "✗ XID 13, 63",
        "a card",
    ):
        assert said in text
    assert "signal 9" in text, "why a lost node says nothing"
    assert "tells nothing of its devices" in text


def test_the_bar_of_memory_shows_where_the_plan_ends() -> None:
    view = of(one=msgspec.structs.replace(CARD, used_bytes=40 * GIB))
    (line, *_) = figures.paint(view, 150, 20, [node(view, "node-1")], 0)
    drawn = plain(line)[9:33]
    assert drawn == "█" * 12 + "·" * 6 + "┊" + "·" * 5
    assert plain(ascii_line(line)).isascii()


def test_without_any_node_it_is_said() -> None:
    assert [plain(line) for line in figures.paint(View(), 80, 5, [], 0)] == ["no node is chosen"]


@pytest.mark.parametrize(("rows", "said"), [(6, "by rack"), (3, "all together, for lack of room")])
def test_the_title_of_the_grid_says_by_what_it_is_grouped_in_this_much_room(rows: int, said: str) -> None:
    nodes = tuple(msgspec.structs.replace(node, zone=f"r{at % 3}") for at, node in enumerate(LIVE.nodes))
    view = msgspec.structs.replace(LIVE, nodes=nodes)
    assert grid.grouping(view, "rack", 80, rows) == said
    assert ("r2" in "\n".join(map(plain, grid.paint(view, NOW, 80, rows)))) == (said == "by rack")
    assert grid.grouping(LIVE, "rack", 80, rows) == "all together"


def test_a_process_on_the_host_may_hold_more_than_what_is_planned_of_it() -> None:
    host = DeviceFigures(
        "node-2/0", NOW, rss_bytes=GIB, used_bytes=GIB, planned_bytes=10 << 20, total_bytes=24 * GIB
    )
    (drawn, role), (percent, _) = figures.columns()[0].said(node(of(two=host), "node-2"))
    assert (role, percent.strip()) == ("bar", "4%")
    (line,) = figures.paint(View(), 150, 5, [node(of(two=host), "node-2")], 0)
    assert "1 GiB of 24 GiB, planned 10 MiB" in plain(line)
    assert "RSS" not in plain(line), "it is the same"
    assert drawn.strip()
