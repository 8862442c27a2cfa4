"""The registry of keys: complete, without contradictions, and what footer, help and docs say."""

from __future__ import annotations

from pathlib import Path

import pytest

from oobleckd.console import keys
from oobleckd.console.docs import page
from oobleckd.console.keys import KEYS, SCREENS, ScreenName
from oobleckd.console.screens import help as help_screen
from oobleckd.console.screens.events import EventsPage
from oobleckd.console.screens.incidents import Incidents
from oobleckd.console.screens.job import JobPage
from oobleckd.console.screens.jobs import JobsPage
from oobleckd.console.screens.nodelog import NodeLog
from oobleckd.console.screens.nodes import NodesPage
from oobleckd.console.screens.overview import Overview
from oobleckd.console.screens.page import Page
from oobleckd.console.screens.pipelines import Pipelines
from oobleckd.console.screens.prompt import Confirm
from oobleckd.console.screens.templates import Templates
from oobleckd.console.screens.whatif import WhatIf
from oobleckd.console.tui import ConsoleApp
from oobleckd.console.widgets import footer
from oobleckd.ctl.main import main as ctl
from oobleckd.draw.lines import length, plain

ROOT = Path(__file__).resolve().parents[3]
PAGES: tuple[type[Page], ...] = (
    Overview,
    NodesPage,
    Pipelines,
    Templates,
    Incidents,
    JobPage,
    EventsPage,
    WhatIf,
    JobsPage,
)


def test_every_key_has_help_and_each_screen_its_class() -> None:
    assert all(key.help and key.keys for key in KEYS)
    assert tuple(page.TAG for page in PAGES) == SCREENS


@pytest.mark.parametrize("screen", SCREENS)
def test_no_key_of_a_screen_does_two_things(screen: ScreenName) -> None:
    own = [name for key in (*keys.of(screen), *keys.of("list")) for name in key.keys]
    assert len(own) == len(set(own))
    everywhere = {name for key in keys.of("everywhere") for name in key.keys}
    assert not everywhere & set(own)


@pytest.mark.parametrize("page", PAGES)
def test_every_action_is_there(page: type[Page]) -> None:
    for _, action, _ in keys.bound(keys.on(page.TAG)):
        name = action.partition("(")[0]
        where: type = ConsoleApp if name.startswith("app.") else page
        assert callable(getattr(where, f"action_{name.removeprefix('app.')}", None)), action
    bound = {binding.key for binding in page._merged_bindings or () for binding in [binding[1]]}
    assert {name for key in keys.of(page.TAG) for name in key.keys} <= bound


def test_the_keys_of_a_confirmation_are_bound() -> None:
    assert {"escape", "ctrl+y"} <= {key for key, _ in Confirm._merged_bindings or ()}


def test_the_keys_of_a_log_are_bound_and_do_something() -> None:
    for key, action, _ in keys.bound(keys.of("log")):
        assert key in {name for name, _ in NodeLog._merged_bindings or ()}
        assert callable(getattr(NodeLog, f"action_{action.partition('(')[0]}", None)), action


def test_every_act_names_a_verb_of_oobleckctl() -> None:
    for key in KEYS:
        if key.command:
            program, verb, *_ = key.command.split()
            assert program == "oobleckctl"
            assert verb in ctl.list_commands(None)  # type: ignore[arg-type, attr-defined]


def in_footer(action: str, screen: ScreenName, width: int) -> bool:
    """Whether the footer shows the key of ``action``."""
    (key,) = [key for key in KEYS if key.action == action]
    return f"{key.shown} {key.label}" in plain(footer.paint(screen, keys.footer(screen), width))


@pytest.mark.parametrize("screen", SCREENS)
def test_the_footer_has_nine_items_at_most_and_fits(screen: ScreenName) -> None:
    assert 0 < len(keys.footer(screen)) <= keys.MAX_IN_FOOTER
    for width in (1, 20, 80, 120, 160):
        assert length(footer.paint(screen, keys.footer(screen), width)) <= width
    assert in_footer("app.help", screen, 80)


@pytest.mark.parametrize("screen", SCREENS)
def test_help_says_every_key_of_the_screen_and_its_command(screen: ScreenName) -> None:
    text = help_screen.text(screen)
    for key in keys.on(screen):
        assert key.help in text
        assert key.shown in text
        assert key.command in text


@pytest.mark.parametrize("screen", SCREENS)
def test_the_filter_is_named_where_there_is_something_to_filter(screen: ScreenName) -> None:
    filtered = screen not in {"overview", "pipelines", "job"}
    assert in_footer("app.filter", screen, 200) == filtered
    assert any(key.action == "app.filter" for key in keys.on(screen)) == filtered
    (found,) = [key for key in KEYS if key.action == "app.filter"]
    assert (found.help in help_screen.text(screen)) == filtered


def test_keys_are_shown_as_people_read_them() -> None:
    assert [keys.shown(name) for name in ("question_mark", "left", "ctrl+p", "f")] == ["?", "←", "^p", "f"]


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs/console.md").read_text(encoding="utf-8") == page(), "run `make docs`"
