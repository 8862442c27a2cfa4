"""What an act asks for while what would follow from it changes, and of which picture it speaks."""

from __future__ import annotations

import asyncio

import pytest
from textual.widgets import Input

from oobleckd.console.acts import ConsoleAct
from oobleckd.console.facts import Away
from oobleckd.console.model import View, fold
from oobleckd.console.screens.prompt import Confirm, word
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
        assert "the job stops" in console.modal()
        assert "type its name, small" in console.modal()
        assert console.app.screen.query_one(Input).placeholder == "type small and enter"
        await console.press("enter")
        assert "that is not small" in console.modal()
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
        assert "no step is lost" in console.modal()
        await console.press("enter")
        assert "that is not small" in console.modal()
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
        assert "the daemon is thinking" in console.modal()
        assert console.source.wanted.impacts == (("node-1",),)
        await console.tell(watching.watched(impact=watching.impact("node-1")))
        assert "no step is lost" in console.modal()
        assert "FROZEN" in console.text()


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
