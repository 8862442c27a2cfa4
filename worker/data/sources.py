"""Opens a source of a job: its rows, and the files that they are mapped from, held open.

Owns which files and columns of numbers a source is, and what no device would take. Has no tokenizer: text
that was not prepared is trained on as bytes. Which rows a sample is of ``corpus`` says.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from oobleckd.protocol.job import Job
from oobleckd.protocol.jobdata import SourceTable, in_source
from oobleckd.tokens.errors import DataError
from oobleckd.tokens.files import Tokens, file_of, index_of, read_tokens
from oobleckd.tokens.heldout import KeptTokens, nothing_held_out, side_of
from oobleckd.tokens.index import Index, read_index
from oobleckd.tokens.packing import rules_of
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


class OpenedSource(NamedTuple):
    """``held``: rows of what is held out of training; None where nothing is."""

    rows: Rows
    held: Rows | None
    inputs: Opened


def open_source(job: Job) -> OpenedSource:
    """Of a job on one source. Raises UserError."""
    if job.data.is_prepared:
        return _open_prepared(job)
    name, index = job.data.path, None
    borders: Borders | None = None
    match job.data.kind:
        case "stdlib":
            name = "the standard library"
            inputs, tokens, borders = read_joined(stdlib_files, name, Path(sysconfig.get_path("stdlib")))
        case "text" if Path(name).is_dir():
            inputs, tokens, borders = read_joined(lambda: files_in(Path(name)), name, Path(name))
        case "text":
            inputs, tokens = _held(Path(name), lambda: _text(Path(name)))
        case _:
            inputs, tokens, index = _open_ready_made(job)
            borders = index
    vocab_size = load_config(job).vocab_size
    kept = both_sides(job, name, len(tokens), borders)
    spare, text = spare_of(job), job.data.is_bytes
    checked = partial(check_vocabulary, name=name, vocab_size=vocab_size, spare=spare, text=text)
    if inputs.small:
        with of_job("data"):
            checked(tokens)
    look = None if inputs.small else partial(checked, part=True)  # to look at all of it takes minutes
    windows = partial(
        Windows, tokens, job.train.sequence, look, index=index if job.data.is_separate else None
    )
    return OpenedSource(windows(kept=kept.trained), windows(kept=kept.held) if kept.held else None, inputs)


class BothSides(NamedTuple):
    """Tokens that windows are cut out of. ``trained``: None: all; ``held``: None: none are held out."""

    trained: KeptTokens | None = None
    held: KeptTokens | None = None


def both_sides(job: Job, name: str, num_tokens: int, borders: Borders | None) -> BothSides:
    """Of ``num_tokens`` of ``name``. ``borders``: None where nobody knows them. Raises UserError where they
    make no window to train on, or none is held out.
    """
    trained, held = side_of(job), side_of(job, held=True)
    if trained is None or held is None:
        check_length(job, name, num_tokens)
        return BothSides()
    if borders is None:
        found, documents = BothSides(trained.cut(num_tokens), held.cut(num_tokens)), 0
    else:
        found = BothSides(trained.of_documents(borders.borders()), held.of_documents(borders.borders()))
        documents = borders.num_documents
    if not found.held:
        wrong = nothing_held_out(name, documents)
        raise UserError(wrong.problem, wrong.hint)
    check_length(job, name, len(found.trained or ()))
    return found


class Borders(Protocol):
    """Where documents begin."""

    @property
    def num_documents(self) -> int:
        """How many there are."""
        ...

    def borders(self) -> Iterable[npt.NDArray[np.int64]]:
        """As an ``Index`` has them."""
        ...


def _open_ready_made(job: Job) -> tuple[Opened, Tokens, Index | None]:
    """Tokens that somebody else made, and where their documents begin if these are kept apart, or some of
    them are held out.
    """
    data = job.data
    file = file_of(Path(data.path), data.kind)

    def read() -> Tokens:
        return read_tokens(file, data.dtype, data.kind)

    holds_out = job.eval.held_out > 0 and data.kind != "bin"
    if not data.is_separate and not holds_out:
        return *_held(file, read), None
    with _readable("data.path", str(file)):
        index = index_of(file)
    if index is None:
        if not data.is_separate:
            return *_held(file, read), None
        raise UserError(
            f"data.documents: 'separate' needs to know where documents begin, and {file} has no index",
            "leave it out, or name a Megatron data set, whose index says it",
        )
    inputs, (tokens, found) = _held(file, lambda: (read(), read_index(index)), index)
    return inputs, tokens, found


def _open_prepared(job: Job) -> OpenedSource:
    """Of what was prepared: what is to be known of its tokens its manifest says."""
    name = job.data.prepared
    if not name:
        raise UserError(
            f"data.path: {job.data.path} is not prepared", "run `oobleckctl data prepare` on the job first"
        )
    with of_job("data.prepared"), _readable("data.prepared", name):
        found = open_prepared(Path(name))
        opened = _packed(job, Path(name), found) or _prepared_windows(job, Path(name), found)
    with of_job("data"):
        check_largest(found.manifest, name, load_config(job).vocab_size, spare_of(job))
    return opened


def _packed(job: Job, folder: Path, found: Prepared) -> OpenedSource | None:
    """None where rows are windows. Raises DataError, OSError."""
    plans = [open_plan(folder, found.manifest, rule) for rule in rules_of(job)]
    if not plans:
        return None
    parts, asked = [("tokens", found.inputs), ("plan", plans[0][0])], None
    parts += [("held-out plan", inputs) for inputs, _ in plans[1:]]
    if found.manifest.has_loss:
        inputs, asked = open_asked(folder, found.manifest)
        parts.append(("loss", inputs))
    rows = [Packed(found.tokens, plan, found.first, asked) for _, plan in plans]
    return OpenedSource(rows[0], rows[1] if rows[1:] else None, together(str(folder), parts))


def _prepared_windows(job: Job, folder: Path, found: Prepared) -> OpenedSource:
    """Raises DataError, OSError, UserError."""
    if found.manifest.has_loss:
        raise DataError(
            f"{folder} has chats, and data.format is {job.data.format!r}",
            'set data.format = "chat" or "completion", as it was prepared',
        )
    inputs, index = found.inputs, None
    if job.data.is_separate or job.eval.held_out:
        of_index, index = open_index(folder, found.manifest)
        inputs = together(str(folder), [("tokens", inputs), ("index", of_index)])
    kept = both_sides(job, str(folder), found.manifest.tokens, index)
    windows = partial(
        Windows, found.tokens, job.train.sequence, first=found.first,
        index=index if job.data.is_separate else None,
    )  # fmt: skip
    return OpenedSource(windows(kept=kept.trained), windows(kept=kept.held) if kept.held else None, inputs)


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
    if data.has_chats:
        raise UserError(
            f"data.format: a chat asks for answers, and {family} names what is hidden",
            "choose a causal family (docs/models.md)",
        )
    if data.row_kind != "windows" and not data.is_separate:
        raise UserError(
            f"data.documents: is 'joined', and {family} would see what fills a row up",
            "leave it out: documents of packed and padded rows are kept apart",
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
