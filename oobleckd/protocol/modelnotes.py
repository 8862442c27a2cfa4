"""What is to be said of a folder of a model that a job starts from: what of it is not used, and what it
lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

_MAX_NAMES = 4


class FolderNote(msgspec.Struct, frozen=True):
    """``count`` tensors of a folder, of which ``names`` are the first few. unread: nothing uses them. fresh:
    the model has them and the folder has not, so they begin as in a job without a folder. apart: the
    configuration ties them, but they are stored with different values, so they are trained as two.
    """

    kind: Literal["unread", "fresh", "apart"]
    count: int
    names: tuple[str, ...]


def note_of(kind: Literal["unread", "fresh", "apart"], names: Sequence[str]) -> FolderNote:
    """A note about all of ``names``."""
    return FolderNote(kind, len(names), tuple(names[:_MAX_NAMES]))


def words(note: FolderNote) -> str:
    """A note for people, on one line."""
    one = note.count == 1
    what = {
        "unread": f"{note.count:,} tensor{'' if one else 's'} of the folder {'is' if one else 'are'} used by "
        "nothing",
        "fresh": f"{note.count:,} tensor{'' if one else 's'} {'is' if one else 'are'} not in the folder and "
        f"begin{'s' if one else ''} fresh",
        "apart": "tied by the configuration, but stored with different values, and so trained apart",
    }[note.kind]
    more = note.count - len(note.names)
    return f"{what}: {', '.join(note.names)}{f' and {more:,} more' if more else ''}"
