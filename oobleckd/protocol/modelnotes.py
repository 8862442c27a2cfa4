"""What is to be said of a job before it is submitted: of the folder that its model starts from (what of it is
not used, and what it lacks), and of its text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from oobleckd.words import count, noun

_MAX_NAMES = 4


FolderNoteKind = Literal["unread", "fresh", "apart", "router-loss"]


class FolderNote(msgspec.Struct, frozen=True):
    """``count`` tensors of a folder, of which ``names`` are the first few. unread: nothing uses them. fresh:
    the model has them and the folder has not, so they begin as in a job without a folder. apart: the
    configuration ties them, but they are stored with different values, so they are trained as two.
    router-loss: not of tensors, but of the configuration: a coefficient that is not used, where the job has
    none of its own.
    """

    kind: FolderNoteKind
    count: int
    names: tuple[str, ...]


class DataNote(msgspec.Struct, frozen=True):
    """``count`` of the ``files`` that are read as text are none, such as ``name``, which is ``what``."""

    count: int
    files: int
    name: str
    what: str


AttentionBackend = Literal["flash", "memory-efficient", "cudnn", "math", "eager"]
"""Kernels of torch's ``scaled_dot_product_attention``; eager: the model computes attention without it."""


class AttentionNote(msgspec.Struct, frozen=True):
    """So many ``blocks`` compute attention by ``backend``; ``why`` by no better one ("": there is none)."""

    blocks: int
    backend: AttentionBackend
    why: str = ""


class Looked(msgspec.Struct, frozen=True):
    """What came of a look at a job that can be trained. ``attention``: by kind of device."""

    notes: tuple[FolderNote, ...] = ()
    data: tuple[DataNote, ...] = ()
    attention: dict[str, tuple[AttentionNote, ...]] = {}


def note_of(kind: FolderNoteKind, names: Sequence[str]) -> FolderNote:
    """A note about all of ``names``."""
    return FolderNote(kind, len(names), tuple(names[:_MAX_NAMES]))


def words(note: FolderNote) -> str:
    """A note for people, on one line."""
    what = {
        "unread": f"{count(note.count, 'tensor')} of the folder {noun(note.count, 'is')} used by nothing",
        "fresh": f"{count(note.count, 'tensor')} {noun(note.count, 'is')} not in the folder and "
        f"{noun(note.count, 'begins')} fresh",
        "apart": "tied by the configuration, but stored with different values, and so trained apart",
        "router-loss": "of the configuration not used, and train.router_aux_loss_coef is 0",
    }[note.kind]
    more = note.count - len(note.names)
    return f"{what}: {', '.join(note.names)}{f' and {more:,} more' if more else ''}"


def attention_words(notes: Sequence[AttentionNote]) -> str:
    """What computes attention, for people, on one line."""
    return "; ".join(
        f"{note.backend} in {count(note.blocks, 'block')}{f' ({note.why})' if note.why else ''}"
        for note in notes
    )


def data_words(note: DataNote) -> str:
    """A note for people, on one line."""
    if note.files == 1:
        return f"{note.name} is {note.what}: it is trained on byte by byte"
    some = f"{note.count:,} of {count(note.files, 'file')} {noun(note.count, 'is')} no plain text"
    return f"{some}, and trained on byte by byte: {note.name} is {note.what}"
