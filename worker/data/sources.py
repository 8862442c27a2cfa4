"""Opens a source of a job: its rows, and the files that they are mapped from, held open.

Owns which files and columns of numbers a source is, and what no device would take. Has no tokenizer: text
that was not prepared is trained on as bytes. Which rows a sample is of ``corpus`` says.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from oobleckd.protocol.job import Job
from oobleckd.protocol.jobdata import SourceTable, in_source
from oobleckd.tokens.errors import DataError
from oobleckd.tokens.files import Tokens, file_of, index_of, read_tokens
from oobleckd.tokens.index import Index, read_index
from oobleckd.tokens.packing import rule_of
from oobleckd.tokens.vocabulary import check_largest, check_vocabulary
from oobleckd.words import count
from oobleckd.worker.data.inputs import Opened, opened_while, together
from oobleckd.worker.data.masking import Masking
from oobleckd.worker.data.packed import Packed
from oobleckd.worker.data.prepared import Prepared, open_asked, open_index, open_plan, open_prepared
from oobleckd.worker.data.rows import Rows, of_job
from oobleckd.worker.data.textfiles import read_joined
from oobleckd.worker.data.windows import Windows
from oobleckd.worker.models import MASKED, load_config
from oobleckd.worker.runtime.errors import UserError

_T = TypeVar("_T")
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__"})


@contextmanager
def of_source(name: str, table: SourceTable = "data") -> Iterator[None]:
    """What is wrong with a source of several, or one to evaluate on, is said of that one."""
    try:
        yield
    except UserError as error:
        raise UserError(in_source(name, error.problem, table), error.hint) from error


def open_source(job: Job) -> tuple[Rows, Opened]:
    """Of a job on one source."""
    if job.data.is_prepared:
        return _open_prepared(job)
    name, index = job.data.path, None
    match job.data.kind:
        case "stdlib":
            name = "the standard library"
            inputs, tokens = read_joined(stdlib_files, name, Path(sysconfig.get_path("stdlib")))
        case "text" if Path(name).is_dir():
            inputs, tokens = read_joined(lambda: files_in(Path(name)), name, Path(name))
        case "text":
            inputs, tokens = _held(Path(name), lambda: _text(Path(name)))
        case _:
            inputs, tokens, index = _open_ready_made(job)
    check_length(job, name, len(tokens))
    vocab_size = load_config(job).vocab_size
    spare, text = spare_of(job), job.data.is_bytes
    checked = partial(check_vocabulary, name=name, vocab_size=vocab_size, spare=spare, text=text)
    if not inputs.small:  # to look at all of it takes minutes
        return Windows(tokens, job.train.sequence, partial(checked, part=True), index=index), inputs
    with of_job("data"):
        checked(tokens)
    return Windows(tokens, job.train.sequence, index=index), inputs


def _open_ready_made(job: Job) -> tuple[Opened, Tokens, Index | None]:
    """Tokens that somebody else made, and where their documents begin if these are kept apart."""
    data = job.data
    file = file_of(Path(data.path), data.kind)

    def read() -> Tokens:
        return read_tokens(file, data.dtype, data.kind)

    if not data.is_separate:
        return *_held(file, read), None
    with _readable("data.path", str(file)):
        index = index_of(file)
    if index is None:
        raise UserError(
            f"data.documents: 'separate' needs to know where documents begin, and {file} has no index",
            "leave it out, or name a Megatron data set, whose index says it",
        )
    inputs, (tokens, found) = _held(file, lambda: (read(), read_index(index)), index)
    return inputs, tokens, found


def _open_prepared(job: Job) -> tuple[Rows, Opened]:
    """Of what was prepared: what is to be known of its tokens its manifest says."""
    name = job.data.prepared
    if not name:
        raise UserError(
            f"data.path: {job.data.path} is not prepared", "run `oobleckctl data prepare` on the job first"
        )
    with of_job("data.prepared"), _readable("data.prepared", name):
        found = open_prepared(Path(name))
        rows, inputs = _rows_of(job, Path(name), found)
    if isinstance(rows, Windows):
        check_length(job, name, found.manifest.tokens)
    with of_job("data"):
        check_largest(found.manifest, name, load_config(job).vocab_size, spare_of(job))
    return rows, inputs


def _rows_of(job: Job, folder: Path, found: Prepared) -> tuple[Rows, Opened]:
    """Raises DataError, OSError."""
    rule = rule_of(job)
    if rule is not None:
        held, plan = open_plan(folder, found.manifest, rule)
        parts, asked = [("tokens", found.inputs), ("plan", held)], None
        if found.manifest.has_loss:
            held, asked = open_asked(folder, found.manifest)
            parts.append(("loss", held))
        return Packed(found.tokens, plan, found.first, asked), together(str(folder), parts)
    if found.manifest.has_loss:
        raise DataError(
            f"{folder} has chats, and data.format is {job.data.format!r}",
            'set data.format = "chat" or "completion", as it was prepared',
        )
    if not job.data.is_separate:
        return Windows(found.tokens, job.train.sequence, first=found.first), found.inputs
    held, index = open_index(folder, found.manifest)
    inputs = together(str(folder), [("tokens", found.inputs), ("index", held)])
    return Windows(found.tokens, job.train.sequence, first=found.first, index=index), inputs


@contextmanager
def _readable(key: str, name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{key}: {name}: {error.strerror or error}", "name a file or folder that every node can read"
        ) from error


def check_length(job: Job, name: str, num_tokens: int) -> None:
    """Whether ``num_tokens`` of ``name`` make a sequence. Raises UserError."""
    if num_tokens < job.train.sequence:
        raise UserError(
            f"data.path: {name} has {count(num_tokens, 'token')}, fewer than "
            f"train.sequence = {job.train.sequence}",
            "name a longer text, or make train.sequence smaller",
        )


def spare_of(job: Job) -> int:
    """How many numbers at the vocabulary's end are not for data: the mask token's."""
    return int(job.model.family in MASKED and job.data.mask_token < 0)


def _held(file: Path, read: Callable[[], _T], index: Path | None = None) -> tuple[Opened, _T]:
    """``file``, and the ``index`` of its documents, held open, and what is read of them."""
    with of_job("data.path"), _readable("data.path", str(file)):
        return opened_while(file if index is None else [file, index], str(file), read)


def masking_of(job: Job, vocab_size: int) -> Masking | None:
    """What hides tokens of ``job``; None where it names the next one. Raises UserError."""
    if job.model.family not in MASKED:
        return None
    _check_masked(job)
    mask_token = job.data.mask_token if job.data.mask_token >= 0 else vocab_size - 1
    if mask_token >= vocab_size:
        raise UserError(
            f"data.mask_token: {mask_token} is not in the model's vocabulary of {vocab_size}",
            "set it to the mask token's number, or leave it out for the last of the vocabulary",
        )
    return Masking(job.train.seed, mask_token, vocab_size)


def _check_masked(job: Job) -> None:
    data, family = job.data, job.model.family
    if data.row_kind != "windows" and not data.is_separate:
        raise UserError(
            f"data.documents: is 'joined', and {family} would see what fills a row up",
            "leave it out: documents of packed and padded rows are kept apart",
        )
    if data.has_chats:
        raise UserError(
            f"data.format: a chat asks for answers, and {family} names what is hidden",
            "choose a causal family (docs/models.md)",
        )


def files_in(path: Path) -> list[Path]:
    """All files of a folder, in the order in which they are read. Raises UserError where there is none."""
    files = sorted((file for file in path.rglob("*") if file.is_file()), key=Path.as_posix)
    if not files:
        raise UserError(f"data.path: {path} has no files", "name a folder with text, or a file")
    return files


def _text(path: Path) -> Tokens:
    return np.memmap(path, np.uint8, mode="r") if path.stat().st_size else np.zeros(0, np.uint8)


def stdlib_files() -> list[Path]:
    """The source files of Python's standard library, in the order in which they are read."""
    root = sysconfig.get_path("stdlib")
    found: list[str] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _NOT_STDLIB]
        found += [f"{folder}/{name}" for name in names if name.endswith(".py")]
    return [Path(file) for file in sorted(found, key=lambda file: file[len(root) + 1 :])]
