"""Samples: which tokens micro-batch i of step t has, a pure function of (seed, step, micro-batch).

Each source of a job has rows, and an ``order`` says which row of which source a sample is. How sources are
opened is ``sources``'; what a job is evaluated on is beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from torch import Tensor

from oobleckd.protocol.inputs import Input
from oobleckd.protocol.job import Job, jobs_of_sources
from oobleckd.protocol.jobparts import jobs_of_evaluation
from oobleckd.tokens.errors import DataError
from oobleckd.tokens.mixture import mixture_of
from oobleckd.worker.data.collate import (
    causal_batch,
    joined_batch,
    masked_batch,
    tokens_of,
    without_tokens,
)
from oobleckd.worker.data.evaluation import EvalCorpus, EvalRows
from oobleckd.worker.data.inputs import Opened, together
from oobleckd.worker.data.masking import Masking, num_chosen
from oobleckd.worker.data.order import Place, SampleOrder
from oobleckd.worker.data.rows import Misread, Rows
from oobleckd.worker.data.sources import masking_of, of_source, open_source
from oobleckd.worker.models import Batch, load_config
from oobleckd.worker.runtime.errors import UserError

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
    ``evaluation``: what the job is evaluated on; None where that is nothing.

    ``num_waits``: how often somebody needed a step's samples that had not been drawn ahead.
    """

    def __init__(
        self, sources: Sequence[Rows], order: SampleOrder, job: Job, masking: Masking | None = None,
        inputs: Opened = NOTHING, evaluation: EvalCorpus | None = None,
    ) -> None:  # fmt: skip
        self.evaluation = evaluation
        self.inputs, self.sources, self._order, self._masking = inputs, tuple(sources), order, masking
        self._micro_batch, self._sizes = job.train.micro_batch, job.batch_sizes
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
        firsts = range(self._sizes.before(step), self._sizes.before(step + 1), self._micro_batch)
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
    def num_tokens(self) -> int:
        """Of all rows of all sources, what fills them up included: of so many is a pass."""
        return self._sequence * sum(rows.count for rows in self.sources)

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
            found.append(open_source(part))
    names = [source.name for source in job.data.sources] or ["data"]
    files = [(name, each.inputs) for name, each in zip(names, found, strict=True)]
    held = [each.held for each in found if each.held is not None]
    evaluated = [
        EvalRows(name, rows, job.data.weighs_targets) for name, rows in zip(job.held_out, held, strict=True)
    ]
    for name, part in jobs_of_evaluation(job):
        with of_source(name, "eval"):
            masking_of(part, load_config(job).vocab_size)
            opened = open_source(part)
        evaluated.append(EvalRows(name, opened.rows, part.data.weighs_targets))
        files.append((f"eval.source {name!r}", opened.inputs))
    masking = masking_of(job, load_config(job).vocab_size)
    evaluation = EvalCorpus(evaluated, job, masking) if evaluated else None
    order = order_of(job, [each.rows.count for each in found])
    inputs = together(job.name, files) if job.data.sources or len(files) > 1 else found[0].inputs
    return Corpus([each.rows for each in found], order, job, masking, inputs, evaluation)


def order_of(job: Job, rows: Sequence[int]) -> SampleOrder:
    """The order of a job whose sources have so many ``rows``. Raises UserError where they do not last."""
    if not job.data.sources:
        return SampleOrder(job.train.seed, rows)
    try:
        mixture = mixture_of(job, rows)
    except DataError as error:
        raise UserError(error.problem, error.hint) from error
    return SampleOrder(job.train.seed, rows, [source.name for source in job.data.sources], mixture)
