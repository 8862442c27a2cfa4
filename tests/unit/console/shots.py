"""Which scenes are drawn on which screens in which sizes, and how one is drawn: for snapshots and pictures
alike.

Local times are those of UTC while one is drawn, so that a drawing is the same everywhere.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

from textual.widgets import Input

from oobleckd.console.keys import SCREENS, ScreenName
from oobleckd.console.tui import ConsoleApp, Options
from tests.unit.console.drawing import Drawing, drawn
from tests.unit.console.piloted import Asker, Console
from tests.unit.console.scenery import MARKED
from tests.unit.console.scenes import SCENES, Scene
from tests.unit.console.test_tui import Told

Size = tuple[int, int]
WIDE, MEDIUM, SMALL = (160, 46), (120, 36), (80, 24)
SIZES: tuple[Size, ...] = (WIDE, MEDIUM, SMALL)


class Shot(NamedTuple):
    """One application that is walked through ``screens``, and then has ``keys`` pressed.

    ``look``: how it was started, or what the keys open, in a word.
    """

    scene: str
    size: Size
    screens: tuple[ScreenName, ...] = ("overview",)
    look: str = ""
    keys: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """For a test."""
        return "-".join(filter(None, (self.scene, f"{self.size[0]}x{self.size[1]}", self.look)))

    @property
    def names(self) -> tuple[str, ...]:
        """Of its drawings."""
        if self.keys:
            return (f"{self.look}-{self.scene}-{self.size[0]}x{self.size[1]}",)
        return tuple(f"{screen}-{self.name}" for screen in self.screens)


# How an application is started, and what is in its environment.
LOOKS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "": ({}, {}),
    "light": ({"theme": "light"}, {}),
    "colour-blind": ({"theme": "colour-blind"}, {}),
    "ascii": ({"ascii_only": True}, {}),
    "plain": ({}, {"NO_COLOR": "1"}),
}
_AFTER: tuple[ScreenName, ...] = ("overview", "templates", "incidents", "job", "events", "whatif")
SHOTS: tuple[Shot, ...] = (
    *(Shot("recovered", size, _AFTER) for size in SIZES),
    *(Shot("failing", size, ("overview", "nodes", "pipelines")) for size in SIZES),
    *(Shot("calm", size, ("overview", "jobs")) for size in SIZES),
    *(Shot(scene, size) for scene in ("degraded", "waiting", "stale", "replay") for size in SIZES),
    Shot("absent", MEDIUM),
    Shot("fleet", WIDE, ("overview", "nodes", "pipelines")),
    *(Shot("failing", MEDIUM, look=look) for look in ("light", "colour-blind", "ascii", "plain")),
    Shot("recovered", MEDIUM, (), "help", ("question_mark",)),
    Shot("recovered", MEDIUM, ("whatif",), "inject", ("i",)),
)  # fmt: skip


@cache
def _scene(name: str) -> Scene:
    return SCENES[name]()


@contextmanager
def _environment(**changes: str) -> Iterator[None]:
    """With these variables, and in UTC."""
    before = {name: os.environ.get(name) for name in ("TZ", "NO_COLOR")}
    os.environ.pop("NO_COLOR", None)
    os.environ.update({"TZ": "UTC", **changes})
    time.tzset()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        time.tzset()


async def taken(shot: Shot) -> dict[str, Drawing]:
    """The drawings of a shot by name."""
    options, environment = LOOKS.get(shot.look, LOOKS[""])
    scene, source, client = _scene(shot.scene), Told(), Asker()
    found: dict[str, Drawing] = {}
    with _environment(**environment):
        app = ConsoleApp(source.open, lambda: scene.now, Options(client=client, **options))
        app.animation_level = "none"
        async with app.run_test(size=shot.size) as pilot:
            console = Console(pilot, app, source, client)
            for name in MARKED:
                app.marks.toggle(name)
            await console.tell(*scene.told)
            for screen, name in itertools.zip_longest(shot.screens, () if shot.keys else shot.names):
                app.goto(screen)
                await console.settle()
                if name:
                    found[name] = drawn(app)
            if shot.keys:
                await console.press(*shot.keys)
                for line in app.screen.query(Input):
                    line.cursor_blink = False
                await console.settle()
                found[shot.names[0]] = drawn(app)
    return found


def complete() -> bool:
    """Whether every screen is drawn in every size."""
    seen = {(screen, shot.size) for shot in SHOTS if not shot.look for screen in shot.screens}
    return seen >= {(screen, size) for screen in SCREENS for size in SIZES}
