"""Samples: which tokens micro-batch i of step t has, a pure function of (seed, step, micro-batch).

Each source of a job has rows, and an ``order`` says which row of which source a sample is. Owns how sources
are opened, and no tokenizer: text that was not prepared is trained on as bytes.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from oobleckd.protocol.inputs import Input
from oobleckd.protocol.job import Job, jobs_of_sources
from oobleckd.protocol.jobdata import in_source
from oobleckd.tokens.errors import DataError
from oobleckd.tokens.files import Tokens, file_of, index_of, read_tokens
from oobleckd.tokens.index import Index, read_index
from oobleckd.tokens.mixture import mixture_of
from oobleckd.tokens.packing import rule_of
from oobleckd.tokens.vocabulary import check_largest, check_vocabulary
from oobleckd.words import count
from oobleckd.worker.data.collate import (
    causal_batch,
    joined_batch,
    masked_batch,
    tokens_of,
    without_tokens,
)
from oobleckd.worker.data.inputs import Opened, opened_while, together
from oobleckd.worker.data.masking import Masking, num_chosen
from oobleckd.worker.data.order import Place, SampleOrder
from oobleckd.worker.data.packed import Packed
from oobleckd.worker.data.prepared import Prepared, open_asked, open_index, open_plan, open_prepared
from oobleckd.worker.data.rows import Misread, Rows, of_job
from oobleckd.worker.data.textfiles import read_joined
from oobleckd.worker.data.windows import Windows
from oobleckd.worker.models import MASKED, Batch, load_config
from oobleckd.worker.runtime.errors import UserError

_T = TypeVar("_T")
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__"})
NOTHING = Opened(Input("data", "", 0, 0))
"""Of a corpus that was not read from files."""


class Drawn(NamedTuple):
    """What is drawn of a step, of each of its micro-batches: the numbers of its samples, and how many tokens
    it is asked for (0 in a job all of whose micro-batches are asked for equally many).
    """

    samples: tuple[tuple[int, ...], ...]
    targets: tuple[int, ...]


class Corpus:
    """The rows of a job's sources, in an ``order``. ``inputs``: the files that they are mapped from.

    ``num_waits``: how often somebody needed a step's samples that had not been drawn ahead.
    """

    def __init__(
        self, sources: Sequence[Rows], order: SampleOrder, job: Job, masking: Masking | None = None,
        inputs: Opened = NOTHING,
    ) -> None:  # fmt: skip
        self.inputs, self.sources, self._order, self._masking = inputs, tuple(sources), order, masking
        self._micro_batch, self._global_batch = job.train.micro_batch, job.train.global_batch
        self._sequence, self._weighs = job.train.sequence, job.data.weighs_targets
        self._drawn: dict[int, Drawn] = {}
        self.num_waits = 0

    def batch(self, step: int, micro_batch: int, *, tokens: bool = True) -> Batch:
        """A micro-batch as the model is trained on it: with tokens hidden for a masked language model. Raises
        Misread, UserError.

        ``tokens``: without them it has positions and documents alone, where these are kept apart, for who
        neither embeds it nor computes its loss; nothing but a plan or an index is read then.
        """
        places = self._places(step, micro_batch)
        if not tokens:
            return without_tokens([rows.starts(number) for rows, number in places], self._sequence)
        drawn = [rows.row(number) for rows, number in places]
        if self._masking is None:
            return causal_batch(drawn) if self._weighs else joined_batch(drawn)
        hide = partial(self._masking, step=step, micro_batch=micro_batch)
        return masked_batch(drawn, hide, weighs=self._weighs)

    def tokens(self, step: int, micro_batch: int) -> Tensor:
        """Tokens of a micro-batch, int64 (micro_batch_size, sequence). Raises Misread, UserError."""
        return tokens_of([rows.row(number) for rows, number in self._places(step, micro_batch)])

    def targets_of(self, step: int) -> tuple[int, ...]:
        """How many tokens each micro-batch of ``step`` is asked for, without reading one; 0s in a job all of
        whose micro-batches are asked for equally many. Raises Misread.
        """
        return self._of(step).targets

    def place(self, sample: int) -> Place:
        """Where the sample of that number lies."""
        return self._order.place(sample)

    def sample_ids(self, step: int, micro_batch: int) -> tuple[int, ...]:
        """The samples of a micro-batch, by numbers that come once in a whole run."""
        return self.of_step(step)[micro_batch]

    def of_step(self, step: int) -> tuple[tuple[int, ...], ...]:
        """The samples of every micro-batch of ``step``."""
        return self._of(step).samples

    def draw_ahead(self, step: int) -> None:
        """Whoever asks for samples and targets of ``step`` has them at once then. They are remembered for
        this step and the one before. What is wrong with a plan is said to who asks.
        """
        if step not in self._drawn:
            with suppress(Misread):
                self._draw(step)

    def _of(self, step: int) -> Drawn:
        if step not in self._drawn:
            self.num_waits += 1
            self._draw(step)
        return self._drawn[step]

    def _draw(self, step: int) -> None:
        firsts = range(step * self._global_batch, (step + 1) * self._global_batch, self._micro_batch)
        samples = tuple(tuple(self._order(first + i) for i in range(self._micro_batch)) for first in firsts)
        targets = tuple(sum(map(self._num_targets, each)) for each in samples)
        kept = {number: drawn for number, drawn in self._drawn.items() if number == step - 1}
        self._drawn = {**kept, step: Drawn(samples, targets)}

    def _places(self, step: int, micro_batch: int) -> list[tuple[Rows, int]]:
        return [self._row_of(sample) for sample in self.sample_ids(step, micro_batch)]

    def _row_of(self, sample: int) -> tuple[Rows, int]:
        place = self.place(sample)
        return self.sources[place.source], place.row

    def _num_targets(self, sample: int) -> int:
        if not self._weighs:
            return 0
        rows, number = self._row_of(sample)
        return rows.num_targets(number) if self._masking is None else num_chosen(rows.num_tokens(number))

    @property
    def digest(self) -> str:
        """Size and SHA-256 of the bytes that were read: equal on two nodes exactly if their corpora are. ""
        until all have been read.
        """
        return self.inputs.part.whole


def open_corpus(job: Job) -> Corpus:
    """The corpus of ``job``, mapped into memory. Raises UserError when it is missing or does not fit."""
    found = []
    for name, part in jobs_of_sources(job):
        with of_source(name):
            found.append(_open(part))
    order, inputs = order_of(job, [rows.count for rows, _ in found]), found[0][1]
    if names := [source.name for source in job.data.sources]:
        inputs = together(job.name, list(zip(names, (held for _, held in found), strict=True)))
    masking = masking_of(job, load_config(job).vocab_size)
    return Corpus([rows for rows, _ in found], order, job, masking, inputs)


def order_of(job: Job, rows: Sequence[int]) -> SampleOrder:
    """The order of a job whose sources have so many ``rows``. Raises UserError where they do not last."""
    if not job.data.sources:
        return SampleOrder(job.train.seed, rows)
    try:
        mixture = mixture_of(job, rows)
    except DataError as error:
        raise UserError(error.problem, error.hint) from error
    return SampleOrder(job.train.seed, rows, [source.name for source in job.data.sources], mixture)


@contextmanager
def of_source(name: str) -> Iterator[None]:
    """What is wrong with a source of several is said of that one."""
    try:
        yield
    except UserError as error:
        raise UserError(in_source(name, error.problem), error.hint) from error


def _open(job: Job) -> tuple[Rows, Opened]:
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
