"""What a job is evaluated on: the same micro-batches in every evaluation, a pure function of the job and its
files, whatever the step.

Owns which rows of each evaluation source they have. Which micro-batches a round has is
``oobleckd.protocol.evalrounds``'s; how a source is opened is ``sources``'.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from oobleckd.protocol.job import Job
from oobleckd.tokens.permutation import Permutation
from oobleckd.words import count, noun
from oobleckd.worker.data.collate import causal_batch, joined_batch, masked_batch, without_tokens
from oobleckd.worker.data.masking import OF_EVALUATION, Masking, num_chosen
from oobleckd.worker.data.rows import Rows
from oobleckd.worker.models import Batch
from oobleckd.worker.runtime.errors import UserError


class EvalRows(NamedTuple):
    """A source to evaluate on. ``weighs``: whether its rows may be asked for different numbers of tokens, so
    that labels say of each whether it is.
    """

    name: str
    rows: Rows
    weighs: bool


class EvalCorpus:
    """The first rows of each source in an order of its own, none of them twice; micro-batches of the first
    source come first. Raises UserError where one of ``sources`` has too few.
    """

    def __init__(self, sources: Sequence[EvalRows], job: Job, masking: Masking | None = None) -> None:
        self.sources, self._masking = tuple(sources), masking
        self._sequence, self._micro_batch = job.train.sequence, job.train.micro_batch
        self._per_source = job.eval_micro_batches
        for source in sources:
            check_enough(job, source.name, source.rows.count)
        # By its name, so that a source more, or less, changes none of the others' numbers. (D-data-025)
        self._orders = [
            Permutation(source.rows.count, f"eval:{job.train.seed}:{source.name}") for source in sources
        ]
        self.targets = tuple(map(self._num_targets, range(self._per_source * len(sources))))

    def source_of(self, number: int) -> str:
        """The name of the source that micro-batch ``number`` of an evaluation is of."""
        return self.sources[number // self._per_source].name

    def batch(self, number: int, *, tokens: bool = True) -> Batch:
        """Micro-batch ``number`` of an evaluation as the model is asked for it; ``tokens`` as of a corpus.
        Raises Misread, UserError.
        """
        source, rows = self._of(number)
        if not tokens:
            return without_tokens([source.rows.starts(row) for row in rows], self._sequence)
        drawn = [source.rows.row(row) for row in rows]
        if self._masking is None:
            return causal_batch(drawn) if source.weighs else joined_batch(drawn)
        hide = partial(self._masking, step=OF_EVALUATION, micro_batch=number)
        return masked_batch(drawn, hide, weighs=source.weighs)

    def rows_of(self, number: int) -> tuple[int, ...]:
        """The rows of a micro-batch, by their numbers in its source."""
        return tuple(self._of(number)[1])

    def _of(self, number: int) -> tuple[EvalRows, list[int]]:
        which, nth = divmod(number, self._per_source)
        first = nth * self._micro_batch
        order = self._orders[which]
        return self.sources[which], [order(first + place) for place in range(self._micro_batch)]

    def _num_targets(self, number: int) -> int:
        source, rows = self._of(number)
        if self._masking is None:
            return sum(map(source.rows.num_targets, rows))
        return sum(num_chosen(source.rows.num_tokens(row)) for row in rows)


def check_enough(job: Job, name: str, rows: int) -> None:
    """Whether the ``rows`` of an evaluation source are as many as ``job`` asks for. Raises UserError."""
    wanted = job.eval_micro_batches * job.train.micro_batch
    if rows < wanted:
        fits = rows >= job.train.micro_batch
        raise UserError(
            f"eval.sequences: {wanted:,} {noun(wanted, 'is')} asked for, and {name!r} has "
            f"{count(rows, 'sequence')}",
            f"make it {rows:,} or less" if fits else "name more text, or hold out more",
        )
