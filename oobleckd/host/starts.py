"""Starts of devices that came to nothing, as an agent notes them in its folder and whoever waits for the node
reads them.

A leaf for agents and ``oobleckctl``. What follows is theirs: an agent tries again, as the cause may pass;
who waits in front of a terminal need not, once devices have died alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from oobleckd.protocol.unreadable import UNREADABLE

_FILE = "failed-starts"
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")


class FailedStart(msgspec.Struct, frozen=True):
    """A device that ended before it was up: what it died of, in its own words where it had some (``said``),
    and what to do.
    """

    device: str
    words: str
    said: bool = False
    hint: str = ""


def alike(words: str) -> str:
    """Words of which this is the same are of one kind of death: numbers (of processes, ports, addresses) are
    others each time. A signal's is not.
    """
    return words if words.startswith(("signal ", "exit code ")) else _NUMBERS.sub("#", words)


def note_failed(folder: Path, failed: FailedStart) -> None:
    """Add to the starts that failed since all devices of this folder's agent were up last."""
    with suppress(OSError), (folder / _FILE).open("ab") as file:  # it is a help and no more
        file.write(msgspec.json.encode(failed) + b"\n")


def failed_starts(folder: Path) -> list[FailedStart]:
    """The starts that failed, oldest first."""
    try:
        lines = (folder / _FILE).read_bytes().split(b"\n")
    except OSError:
        return []
    found = []
    for line in lines[:-1]:  # behind the last line break is what is being written
        with suppress(*UNREADABLE):
            found.append(msgspec.json.decode(line, type=FailedStart))
    return found


def forget_failed(folder: Path) -> None:
    """All are up, or nobody has tried yet."""
    with suppress(OSError):
        (folder / _FILE).unlink()


def repeated(failed: Iterable[FailedStart]) -> FailedStart | None:
    """The first start that failed as one before it did: there is no use in waiting for the next. Words are
    compared across nodes; what was killed and said nothing may have met a chance of its machine, so that has
    to be twice in the same node.
    """
    seen = set()
    for each in failed:
        kind = (alike(each.words), "" if each.said else each.device.partition("/")[0])
        if kind in seen:
            return each
        seen.add(kind)
    return None
