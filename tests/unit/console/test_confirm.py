"""What an act asks for while what would follow from it changes, and of which picture it speaks."""

from __future__ import annotations

import asyncio

import pytest
from textual.widgets import Input, Static

from oobleckd.console.acts import ConsoleAct
from oobleckd.console.facts import Away
from oobleckd.console.model import View, fold
from oobleckd.console.screens import prompt
from oobleckd.console.screens.prompt import Confirm, word
from oobleckd.console.widgets import impact
from oobleckd.draw.lines import plain
from tests.helpers.api_server import node_view
from tests.unit.console import build, watching
from tests.unit.console.build import NOW, fetched
from tests.unit.console.piloted import Console, shown
from tests.unit.console.test_feed import WAIT_S

HARMLESS = watching.impact("node-2")
STOPS = watching.watched(impact=watching.impact("node-2", stops=True))


def asked(console: Console) -> Confirm:
    assert isinstance(console.app.screen, Confirm)
    return console.app.screen


def shows_what_follows(console: Console, *, stops: bool) -> bool:
    """Whether the act's nodes would stop the job as far as is known now, and the modal tells of it."""
    confirm, view = asked(console), console.app.newest()
    known = view.impact(confirm._about)
    painted = impact.paint(view, 0.0, prompt._PREVIEW_WIDTH, prompt._PREVIEW_ROWS, confirm._about)
    return known is not None and known.stops is stops and "\n".join(map(plain, painted)) in console.modal()


def refused(console: Console) -> bool:
    """Whether what was typed was said to be wrong."""
    return bool(str(asked(console).query_one("#wrong", Static).render()))


async def done(console: Console, what: str) -> None:
    async with asyncio.timeout(WAIT_S):
        while not console.client.done:
            await console.settle()
    assert console.client.done == [what]


@pytest.mark.asyncio
async def test_what_gets_worse_meanwhile_wants_the_name() -> None:
    async with shown() as console:
        await console.press("8", "down", "m", "i")
        assert asked(console).wanted == ""
        await console.tell(STOPS)
        assert shows_what_follows(console, stops=True)
        assert asked(console).wanted == "small"
        assert "small" in console.modal()
        assert "small" in console.app.screen.query_one(Input).placeholder
        await console.press("enter")
        assert refused(console)
        assert not console.client.done
        await console.write("small")
        await done(console, "/v1/nodes/node-2/kill sigkill")


@pytest.mark.asyncio
async def test_what_arrives_with_the_last_key_counts() -> None:
    async with shown() as console:
        await console.press("8", "down", "m", "i")
        console.source.deliver(STOPS)  # no frame since
        confirm = asked(console)
        confirm.on_input_submitted(Input.Submitted(confirm.query_one(Input), ""))
        await console.settle()
        assert asked(console).wanted == "small"
        assert not console.client.done


@pytest.mark.asyncio
async def test_what_gets_better_meanwhile_wants_the_name_all_the_same() -> None:
    async with shown() as console:
        await console.tell(STOPS)
        await console.press("8", "down", "m", "i")
        assert asked(console).wanted == "small"
        await console.tell(watching.watched(impact=HARMLESS))
        assert shows_what_follows(console, stops=False)
        await console.press("enter")
        assert refused(console)
        await console.tell(fetched(jobs=()))
        assert asked(console).wanted == "small"


@pytest.mark.asyncio
async def test_a_name_that_looks_like_markup_is_a_name() -> None:
    async with shown() as console:
        await console.tell(fetched(nodes=(node_view("[/]"),)))
        await console.press("2", "u")
        assert "─ undrain [/] ─" in console.drawn()


def test_of_a_job_that_is_not_in_sight_the_id_is_wanted() -> None:
    other = fold(View(), [fetched(jobs=(build.job(id="job-2"),))])
    for view in (View(), other):
        assert word(ConsoleAct("cancel", ("job-1",)), view) == "job-1"


# --------------------------------------------------------------------------- while the picture is frozen


@pytest.mark.asyncio
async def test_of_a_frozen_picture_what_follows_is_of_now() -> None:
    async with shown() as console:
        await console.press("8", "m", "space", "i")
        assert console.app.newest().impact(("node-1",)) is None
        assert console.source.wanted.impacts[0] == ("node-1",)
        await console.tell(watching.watched(impact=watching.impact("node-1")))
        assert shows_what_follows(console, stops=False)
        assert console.app.frozen_at == NOW


@pytest.mark.asyncio
async def test_of_a_frozen_picture_the_word_is_of_now() -> None:
    async with shown() as console:
        await console.press("8", "down", "m", "space")
        await console.tell(STOPS)
        await console.press("i", "enter")
        assert asked(console).wanted == "small"
        assert not console.client.done


@pytest.mark.asyncio
async def test_of_a_frozen_picture_the_refusal_is_of_now() -> None:
    async with shown() as console:
        await console.press("6", "space")
        await console.tell(Away(NOW + 2, "gone"))
        await console.press("c")
        assert "the daemon does not answer" in console.said()
        await console.tell(fetched(at=NOW + 3))
        await console.press("c", "enter")
        await done(console, "/v1/jobs/job-1/checkpoint")
