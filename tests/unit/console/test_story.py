"""What belongs to an incident or to an event, beside the lists: its story, and a change in full."""

from __future__ import annotations

import pytest

from oobleckd.console.model import View, fold
from oobleckd.console.widgets import choices, recovery, story
from oobleckd.draw.lines import Line, as_fits, length, plain
from oobleckd.protocol.changes import Change
from oobleckd.protocol.incidentviews import RejectedView
from tests.unit.console.build import NOW, change, facts, fetched, heard, incident
from tests.unit.console.piloted import shown


def _of(*keys: str, seq: int = 1, text: str = "a change") -> Change:
    return Change(seq, NOW - 5.0 + seq, "node", "info", text, keys)


def _view(*changes: Change) -> View:
    return fold(View(), [fetched(), *map(heard, changes)])


def _said(lines: list[Line]) -> str:
    return "\n".join(map(plain, lines))


def test_the_nearest_key_is_the_incidents_then_the_nodes_then_the_jobs() -> None:
    assert story.nearest(_of("job:job-1", "node:node-4", "incident:inc-1")) == "incident:inc-1"
    assert story.nearest(_of("job:job-1", "node:node-4")) == "node:node-4"
    assert story.nearest(_of("job:job-1")) == "job:job-1"
    assert story.nearest(_of("audit:4")) == ""


def test_a_story_has_what_bears_one_of_its_keys_and_the_newest_where_there_is_no_room() -> None:
    told = [
        _of("node:node-4", seq=1, text="node-4 joined"),
        _of("node:node-5", seq=2, text="node-5 joined"),
        _of("incident:inc-1", "node:node-4", seq=3, text="node-4 lost"),
    ]
    keys = ("incident:inc-1", "node:node-4")
    text = _said(story.paint(_view(*told), NOW, 60, 9, keys))
    assert "node-4 joined" in text
    assert "node-4 lost" in text
    assert "node-5" not in text
    assert _said(story.paint(_view(*told), NOW, 60, 1, keys)).endswith("node-4 lost")
    more = _view(*told, _of("node:node-4", seq=4, text="node-4 is back"))
    assert "is back" in _said(story.paint(more, NOW, 60, 9, keys)), "of other events it is found anew"
    long = _view(_of("node:node-4", text="a sentence that does not end in sixty cells but goes on " * 2))
    text = " ".join(_said(story.paint(long, NOW, 60, 9, keys)).split())
    assert text.count("goes on") == 2, "to the end"
    assert len(story.paint(long, NOW, 60, 1, keys)) == 1
    assert "nothing of it" in _said(story.paint(_view(), NOW, 60, 9, keys))


def test_a_change_in_full_has_its_time_its_keys_and_its_fields() -> None:
    (one,) = [each for each in fold(View(), facts()).events if each.kind == "node"]
    fields = {"type": "node-lost", "node": "node-9", "cause": "signal 9"}
    told = change(7, "node", "node-9 is away", level="warn", **fields)
    text = _said(story.one(one, NOW, 60, 12))
    assert text.startswith("node, warn")
    assert "number 1" in text
    assert "node-4 lost: signal 9" in text
    text = _said(story.one(told, NOW, 60, 12))
    assert "node node-9   cause signal 9" in text, "as -o json names them"
    assert "type" not in text
    assert len(story.one(one, NOW, 60, 1)) == 1


def test_beside_its_choices_an_incident_has_its_phases_alone_and_they_use_the_room() -> None:
    view = fold(View(), [fetched()])
    one = incident()
    lines = recovery.one(view, one, NOW, 80, 16, priced=False)
    assert len(lines) == 1 + 3 * len(recovery.PHASES)
    assert "committed" not in _said(lines)
    assert plain(lines[2]).strip("█ ▏▎▍▌▋▊▉") == "", "the second row of a bar says nothing"
    assert "committed" in _said(recovery.one(view, one, NOW, 80, 16))


def test_ways_that_were_not_taken_are_said_to_the_end_where_there_is_room() -> None:
    why = "peers of stage 2 would be 19% slower until the next loss is expected"
    one = incident(rejected=(RejectedView("stay re-routed", 262.0, why),), cost_s=41.0)
    text = " ".join(" ".join(map(plain, choices.lines(one, 58, 16))).split())
    assert why in text
    assert len(choices.lines(one, 58, 7)) <= 7


def test_of_one_node_the_cause_is_said_without_its_name() -> None:
    assert recovery.cause_of(incident(cause="node-4: signal 9", nodes=("node-4",))) == "signal 9"
    both = "node-4: signal 9; node-5: signal 9"
    assert recovery.cause_of(incident(cause=both, nodes=("node-4", "node-5"))) == both


def test_what_has_no_room_is_left_out_and_not_cut() -> None:
    fields: list[Line] = [(("loss 2.5", ""),), (("evaluation 2.25", ""),)]
    assert plain(as_fits(fields, 40)) == "loss 2.5   evaluation 2.25"
    assert plain(as_fits(fields, 20)) == "loss 2.5"
    assert length(as_fits(fields, 5)) == 5, "but the first one is there"


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [(120, 40), (200, 50)])
async def test_incidents_and_events_have_the_story_in_sight(size: tuple[int, int]) -> None:
    async with shown(size) as console:
        await console.tell(heard(Change(9, NOW, "incident", "info", "inc-1: recovered", ("incident:inc-1",))))
        for screen in ("5", "7"):
            await console.press(screen)
            assert "inc-1: recovered" in console.panel("story").text()
