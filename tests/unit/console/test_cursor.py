"""The cursor of a list stays on what it is on, whatever comes before it."""

from __future__ import annotations

import pytest

from tests.helpers.api_server import node_view
from tests.unit.console import build
from tests.unit.console.build import NOW, change, fetched, heard
from tests.unit.console.piloted import Console, shown


def _here(console: Console, panel: str) -> str:
    """The text of the cursor's row."""
    (line,) = [
        "".join(text for text, _ in line)
        for line in console.panel(panel)._lines
        if any(role == "cursor" for _, role in line)
    ]
    return line


@pytest.mark.asyncio
async def test_on_an_event_while_others_come() -> None:
    async with shown() as console:
        await console.press("7", "up")
        assert "shrink" in _here(console, "list")
        await console.tell(*(heard(change(seq, "node", f"event {seq}")) for seq in range(4, 600)))
        assert "shrink" in _here(console, "list")
        assert "number 2\n" in console.panel("one").text()
        await console.press("down")
        assert "recovered" in _here(console, "list")
        await console.press("l")
        assert "node-4 lost" in _here(console, "list"), "the only one that is left"
        await console.press("l", "l", "home")
        await console.tell(*(heard(change(seq, "node", f"event {seq}")) for seq in range(600, 9000)))
        assert "node-4 lost" in _here(console, "list"), "a warning, which stays"


@pytest.mark.asyncio
async def test_on_one_of_several_notices_of_the_same_number() -> None:
    async with shown() as console:
        notices = [change(3, "daemon", f"notice {number}", level="warn") for number in range(3)]
        await console.tell(*map(heard, notices))
        await console.press("7", "up", "up")
        assert "notice 0" in _here(console, "list")
        await console.tell(heard(change(4, "node", "node-9 is here")))
        assert "notice 0" in _here(console, "list")
        await console.press("down")
        assert "notice 1" in _here(console, "list")


@pytest.mark.asyncio
async def test_on_an_event_that_is_kept_no_more_it_goes_to_the_next_one() -> None:
    async with shown() as console:
        await console.press("7", "up")
        await console.tell(*(heard(change(seq, "node", f"event {seq}")) for seq in range(4, 9000)))
        assert int(_here(console, "list").split("event")[1]) < 5500
        assert not _here(console, "list").endswith("8999")


@pytest.mark.asyncio
async def test_on_an_incident_while_another_begins() -> None:
    three = tuple(build.incident(id=f"inc-{number}", at=NOW - 60.0 + number) for number in range(1, 5))
    async with shown() as console:
        await console.tell(fetched(incidents=three[:3]))
        await console.press("5")
        assert "inc-3" in _here(console, "list")
        await console.tell(fetched(incidents=three))
        assert "inc-3" in _here(console, "list")
        assert console.panel("phases").text().startswith("inc-3")
        await console.press("up")
        assert "inc-4" in _here(console, "list")


@pytest.mark.asyncio
async def test_on_a_node_while_the_order_changes() -> None:
    ages = {f"node-{number}": float(number) for number in range(1, 6)}

    def told(**changes: float) -> object:
        return fetched(
            nodes=tuple(node_view(name, heartbeat_age_s=age) for name, age in (ages | changes).items())
        )

    async with shown() as console:
        await console.tell(told())  # type: ignore[arg-type]
        await console.press("2", "s", "s", "down")
        assert "node-4" in _here(console, "table")
        await console.tell(told(**{"node-1": 99.0}))  # type: ignore[arg-type]
        assert "node-4" in _here(console, "table")
        await console.press("s")
        assert "node-1" in _here(console, "table"), "another order begins with its first row"
        await console.press("8", "down")
        assert "node-2" in _here(console, "table")
        await console.tell(told(**{"node-0": 1.0}))  # type: ignore[arg-type]
        assert "node-2" in _here(console, "table")


@pytest.mark.asyncio
async def test_a_row_that_is_gone_leaves_its_place_to_another() -> None:
    async with shown() as console:
        await console.press("2", "down")
        assert "node-2" in _here(console, "table")
        await console.tell(fetched(nodes=tuple(node_view(f"node-{number}") for number in (1, 3, 5))))
        assert "node-3" in _here(console, "table")
        await console.tell(fetched(nodes=()))
        await console.tell(fetched())
        assert "node-3" in _here(console, "table"), "a list that was empty for a while moved nothing"
