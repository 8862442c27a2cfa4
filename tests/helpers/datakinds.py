"""The kinds of data that jobs of a real cluster train on; as nobody remembers which sample comes next, none
of them may show in what a failure does.

Owns their names, and the files of each, which are made once under a cluster's folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from tests.helpers.mixture import three_sources

KINDS = ("bytes", "mixture")
MIXES_AT = 6
"""The step in which a mixture changes."""


def data_of(kind: str, folder: Path) -> dict[str, Any]:
    """`[data]` of a job on such data, whose files lie under ``folder``."""
    if kind == "bytes":
        return {}
    place = folder / f"data-{kind}"
    noted = place / "data.json"
    if not noted.exists():
        place.mkdir()
        noted.write_bytes(msgspec.json.encode(_MADE[kind](place)))
    return msgspec.json.decode(noted.read_bytes(), type=dict[str, Any])


def _mixture(place: Path) -> dict[str, Any]:
    return three_sources(place, MIXES_AT)


_MADE = {"mixture": _mixture}
