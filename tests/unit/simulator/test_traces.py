"""Files of events: three kinds of them, and what is said of lines that are none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from oobleckd.simulator.failures import memoryless, usual_duration_s
from oobleckd.simulator.traces import TraceError, TraceEvent, read_trace, written

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def to(text: str) -> Path:
        path = tmp_path / "trace.csv"
        path.write_text(text, encoding="utf-8")
        return path

    return to


def test_that_of_bamboo_and_oobleck(write: Write) -> None:
    path = write("480000,add,node1\n480000,add,node2\n540000,remove,node1\n600500,add,node1\n")
    found = read_trace(path)
    assert (found.name, found.nodes, found.duration_s) == ("trace", ("node1", "node2"), 120.5)
    assert found.events == (TraceEvent(60.0, "fail", "node1"), TraceEvent(120.5, "join", "node1"))
    assert found.max_nodes == 2
    assert read_trace(path, duration_s=100.0).events == found.events[:1]


def test_ours_with_a_header_and_without(write: Write) -> None:
    lines = "0,join,a\n0,join,b,0\n# a comment\n\n60,leave,a,120\n200,join,c\n300.5,fail,b,\n"
    names = "t_seconds,event,node,notice_seconds\n"
    for header in ("", names, "\ufeff" + names, "# whose it is\n\n" + names):
        found = read_trace(write(header + lines), duration_s=400.0)
        assert found.nodes == ("a", "b")
        assert found.events == (
            TraceEvent(60.0, "leave", "a", 120.0), TraceEvent(200.0, "join", "c"),
            TraceEvent(300.5, "fail", "b"),
        )  # fmt: skip


def test_ours_with_nodes_that_are_there(write: Write) -> None:
    found = read_trace(write("60,fail,node-2\n"), num_nodes=3)
    assert found.nodes == ("node-1", "node-2", "node-3")
    assert found.events == (TraceEvent(60.0, "fail", "node-2"),)


def test_what_is_written_reads_back(write: Write) -> None:
    drawn = memoryless(5, 60.0, 30.0, 600.0, seed=1)
    rounded = read_trace(write(written(drawn)), duration_s=600.0)
    assert rounded.nodes == drawn.nodes
    assert [(e.kind, e.node) for e in rounded.events] == [(e.kind, e.node) for e in drawn.events]


def test_zones_are_said_where_nodes_join(write: Write) -> None:
    names = "t_seconds,event,node,notice_seconds,zone\n"
    lines = "0,join,a,0,east\n0,join,b,,west\n0,join,c\n5,leave,b,10\n20,join,b\n30,join,d,0,east\n"
    found = read_trace(write(names + lines))
    assert found.zones == {"a": "east", "b": "west", "d": "east"}
    assert found.nodes == ("a", "b", "c")
    assert read_trace(write(written(found))) == found
    assert written(found).splitlines()[:4] == [
        names.strip(),
        "0,join,a,0,east",
        "0,join,b,0,west",
        "0,join,c,0",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no events"),
        ("0,join,a\nnonsense\n", "line 2: 'nonsense' is no event"),
        ("0,join,a\n1,explode,a\n", "line 2: no event 'explode'"),
        ("x,join,a\n", "line 1: 'x' is no number"),
        ("-1,join,a\n", "line 1: '-1' is no time"),
        ("nan,join,a\n", "line 1: 'nan' is no time"),
        ("0,join,a\n1,fail,a,60\n", "line 2: a fail has no notice"),
        ("0,join,a\n1,fail,a,,east\n", "line 2: a fail has no zone"),
        (
            "0,join,a,0,east\n1,fail,a\n2,join,a,0,west\n",
            "line 3: a is in zone 'east' before, and in 'west' now",
        ),
        ("0,join,a,0,east,west\n", "line 1: '0,join,a,0,east,west' is no event"),
        ("0,join,a\n5,join,b\n4,fail,a\n", "times decrease"),
        ("0,join,a\n1,fail,b\n", "b is not there to fail"),
        ("0,join,a\n1,join,a\n", "a joins and is there"),
        ("0,join,a\n1,leave,a,120\n60,join,a\n", "a joins, and is there until its notice is over, at 121 s"),
        ("0,join,a\n0,join,a\n1,fail,a\n", "joins twice at the first instant"),
        ("5,fail,a\n", "nobody joins at its first instant"),
        ("0,join,a\n", "nothing happens after its first instant"),
    ],
)
def test_lines_that_are_none(write: Write, text: str, problem: str) -> None:
    path = write(text)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert problem in caught.value.problem
    assert str(path) in caught.value.problem
    assert caught.value.hint


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "none.csv")


# --------------------------------------------------------------------------- drawn


def test_the_cluster_fails_as_often_as_is_asked() -> None:
    found = memoryless(32, 600.0, 60.0, 3_000_000.0, seed=3)
    fails = sum(event.kind == "fail" for event in found.events)
    assert 0.95 * 5000 < fails < 1.05 * 5000
    assert found == memoryless(32, 600.0, 60.0, 3_000_000.0, seed=3)
    assert found.events != memoryless(32, 600.0, 60.0, 3_000_000.0, seed=4).events


def test_without_repair_nobody_comes_back() -> None:
    found = memoryless(8, 60.0, 0.0, 1e9, seed=0)
    assert [event.kind for event in found.events] == ["fail"] * 8
    assert len({event.node for event in found.events}) == 8
    assert usual_duration_s(32, 600.0, 0.0) == 9600.0
    assert usual_duration_s(32, 600.0, 60.0) == 86400.0
