"""What a node wrote last: follow, search, and one clear line where there is nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from oobleckd.client import Client
from oobleckd.console.asked import PERIODS_S, ConsoleQueries
from oobleckd.console.facts import QueryRefused, Wants, Watched
from oobleckd.console.model import View, fold
from oobleckd.console.screens.nodelog import NodeLog
from oobleckd.console.widgets import nodelog
from oobleckd.console.widgets.nodelog import NodeLogLook
from oobleckd.draw.lines import plain
from oobleckd.protocol.nodeviews import NodeLogView
from tests.helpers.api_server import serving
from tests.unit.console.build import NOW
from tests.unit.console.piloted import shown
from tests.unit.console.test_feed import api

LINES = tuple(f"line {number}" + (" error" if number % 10 == 3 else "") for number in range(50))
LOG = NodeLogView("node-1", LINES, complete=True)
TOLD = Watched(NOW, log=LOG)


def rows(view: View, look: NodeLogLook, height: int = 10) -> list[str]:
    return [plain(line) for line in nodelog.paint(view, NOW, 40, height, look)]


def test_the_newest_lines_are_at_the_bottom() -> None:
    view = fold(View(), [TOLD])
    assert rows(view, NodeLogLook("node-1")) == list(LINES[-10:])
    above = rows(view, NodeLogLook("node-1", cursor=20, follow=False))
    assert "line 20" in above
    assert len(above) == 10
    assert rows(view, NodeLogLook("node-1"), 99) == list(LINES)


def test_words_are_found_and_the_next_one_before_or_after() -> None:
    view = fold(View(), [TOLD])
    look = NodeLogLook("node-1", words="ERROR")
    assert nodelog.found(view, look) == [3, 13, 23, 33, 43]
    roles = {plain((span,)): span[1] for line in nodelog.paint(view, NOW, 40, 10, look) for span in line}
    assert roles["line 43 error"] == "warn"
    places = nodelog.found(view, look)
    assert [nodelog.following(places, 20, by) for by in (-1, 1)] == [13, 23]
    assert nodelog.following(places, 3, -1) == 3


def test_without_any_line_it_is_said_why() -> None:
    look = NodeLogLook("node-1")
    assert rows(View(), look) == ["asking for what node-1 wrote …"]
    refused = fold(View(), [QueryRefused(NOW, "log", "nobody keeps it")])
    assert rows(refused, look) == ["not known: nobody keeps it"]
    empty = fold(refused, [Watched(NOW, log=NodeLogView("node-1", (), complete=True))])
    assert rows(empty, look) == ["node-1 has written nothing"]
    assert rows(fold(View(), [TOLD]), NodeLogLook("node-2")) == ["asking for what node-2 wrote …"]


def test_it_is_asked_for_once_a_second_while_it_is_wanted(tmp_path: Path) -> None:
    served = api(tmp_path)
    served.watched["log"] = LOG
    with serving(tmp_path / "s", served):
        asked = ConsoleQueries(Client(tmp_path / "s"))
        assert list(asked.answers(None, NOW)) == []
        asked.want(Wants(log="node-1"))
        (fact,) = asked.answers(None, NOW)
        assert isinstance(fact, Watched)
        assert fact.log == LOG
        assert served.queries == [("/v1/nodes/node-1/log", {"lines": ["200"]})]
        assert list(asked.answers(None, NOW)) == []
        assert asked.due_at() == NOW + PERIODS_S["log"]
        del served.watched["log"]
        asked.want(Wants(log="node-9"))
        (fact,) = asked.answers(None, NOW + 2)
        assert isinstance(fact, QueryRefused)


@pytest.mark.asyncio
async def test_l_on_a_node_opens_it_and_keys_go_through_it() -> None:
    async with shown() as console:
        await console.press("2", "l")
        log = console.app.screen
        assert isinstance(log, NodeLog)
        assert console.source.wanted.log == "node-1"
        await console.tell(TOLD)
        assert "line 49" in console.drawn()
        await console.press("up", "up")
        assert (log.follow, log.cursor) == (False, 47)
        await console.press("slash")
        await console.write("error")
        assert log.cursor == 43
        assert '5 lines with "error"' in console.drawn()
        await console.press("n")
        assert log.cursor == 33
        await console.press("N", "end")
        assert log.follow
        await console.press("f", "home")
        assert log.cursor == 0
        await console.press("escape")
        assert console.here == "nodes"
        await console.settle()
        assert console.source.wanted.log == ""
