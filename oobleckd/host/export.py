"""An exported model: what the worker's program tells oobleckctl, and which folder it may write.

Owns the names of the files and the answer to "may this folder be written"; both programs ask it. What is in
the files is the matter of ``oobleckd.worker.tools.export``.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from pathlib import Path

import msgspec

from oobleckd.protocol.unreadable import UNREADABLE

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
COMPANIONS = (
    "added_tokens.json", "chat_template.jinja", "generation_config.json", "merges.txt",
    "special_tokens_map.json",
    "spiece.model", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt",
)  # fmt: skip
"""What else lies in a folder of transformers; copied from the one that the job started from."""

MARK = "oobleck-export.json"
"""What an export leaves beside the model: by it, and nothing else, a folder is known as one that may be
replaced.
"""


# By size and time of change: the SHA-256 of large weights would be read once more for each export. A folder
# that was copied has other times, and is refused. (D-models-004)
class WrittenExport(msgspec.Struct, frozen=True):
    """A file as export left it."""

    num_bytes: int
    mtime_ns: int


class ExportMark(msgspec.Struct, frozen=True):
    """Whose model it is: of ``job`` ("": not told) after ``step`` steps, from the checkpoint whose manifest
    has the SHA-256 ``digest``; and all ``files`` that export wrote.
    """

    job: str
    step: int
    digest: str
    files: dict[str, WrittenExport]


class Exported(msgspec.Struct, frozen=True):
    """A finished export. ``architecture``: the class in transformers. ``num_bytes``: of the weights in
    ``files``. ``skipped``: of the steps, those that made no update; ``not_finite``: tensors with a NaN or an
    infinity in them. ``left``: where the folder is that was replaced, if somebody put a file into it
    meanwhile.
    """

    path: str
    step: int
    architecture: str
    dtype: str
    num_bytes: int
    files: tuple[str, ...]
    skipped: int = 0
    not_finite: tuple[str, ...] = ()
    left: str = ""


def shard_name(index: int, count: int) -> str:
    """Name of file ``index`` of ``count`` files of weights, as transformers looks for it."""
    return WEIGHTS if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def why_not(folder: Path, *, overwrite: bool) -> tuple[str, str] | None:
    """Problem and hint when ``folder`` must not be written; None when it may.

    It may when it is empty or absent, or with ``overwrite`` when it holds what an export wrote there,
    unchanged, and nothing else: it is replaced as a whole.
    """
    if folder.is_symlink():
        return f"{folder} is a symbolic link", "name the folder that it leads to, or another one"
    if folder.exists() and not folder.is_dir():
        return f"{folder} is not a folder", "name a folder that is empty or does not exist yet"
    names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    if names and not overwrite:
        return f"{folder} is not empty", "name another folder, or replace the model in it with --overwrite"
    return _why_foreign(folder, names) if names else None


def _why_foreign(folder: Path, names: Sequence[str]) -> tuple[str, str] | None:
    """The same of a folder that is to be replaced, and has ``names`` in it."""
    hint = (
        "name another folder, or move that one away: --overwrite replaces what export wrote, and nothing else"
    )
    mark = mark_of(folder)
    if mark is None:
        return f"{folder} holds {names[0]} and no {MARK}, so it was not written by export", hint
    if foreign := [name for name in names if name not in {MARK, *mark.files}]:
        return f"{folder} holds {foreign[0]}, which was not written by export", hint
    if changed := [name for name in names if name != MARK and written(folder / name) != mark.files[name]]:
        return f"{folder} holds {changed[0]}, which is not as export wrote it", hint
    return None


def mark_of(folder: Path) -> ExportMark | None:
    """What the export that wrote ``folder`` said of it; None where none did, or nobody can read it."""
    path = folder / MARK
    try:
        return None if path.is_symlink() else msgspec.json.decode(path.read_bytes(), type=ExportMark)
    except (OSError, *UNREADABLE):
        return None


def written(path: Path) -> WrittenExport | None:
    """The file ``path`` as it is; None where it is none. Raises OSError."""
    found = path.lstat()
    return WrittenExport(found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None
