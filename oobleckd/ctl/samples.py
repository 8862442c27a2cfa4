"""The samples of a step for people: what `data show` prints.

Owns how rows are decoded and marked. Which rows a step has the worker knows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path

import click
import msgspec

from oobleckd.ctl.output import USAGE, Failure, note
from oobleckd.ctl.programs import run_worker
from oobleckd.prepare.opening import opened
from oobleckd.prepare.tokenizer import file_of
from oobleckd.protocol.job import Job, table_of
from oobleckd.protocol.samplerows import Border, SampleRow, SampleRows
from oobleckd.protocol.text import visible
from oobleckd.tokens.errors import DataError
from oobleckd.words import count


def samples_of(job: Job, source: Path, step: int, micro_batch: int, of: str = "") -> SampleRows:
    """Of a job whose data is prepared, as ``source`` has it; asked of the worker. ``of``: an evaluation's
    source, in place of a step. Raises Failure.
    """
    from oobleckd.ctl.reference import to_toml  # no other verb of this needs what comes with it

    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "job.toml"
        file.write_text(to_toml(table_of(job)), encoding="utf-8")
        words = ("--job", str(file), "--step", str(step), "--micro-batch", str(micro_batch))
        asked = ("--source", of) if of else ()
        try:
            return msgspec.json.decode(
                run_worker("oobleckd.worker.tools.samples", *words, *asked), type=SampleRows
            )
        except Failure as failure:
            raise Failure(f"{source}: {failure}", failure.hint, USAGE) from failure


def decoder_of(job: Job, source: Path) -> Callable[[Sequence[int]], str]:
    """What makes text of tokens."""
    if job.data.is_bytes:
        return lambda tokens: bytes(tokens).decode(errors="replace")
    try:
        tokenizer = opened(file_of(job))
    except DataError as error:
        if job.data.is_prepared:
            note(f"{source}: {error}: tokens are shown as numbers")
        return lambda tokens: " ".join(map(str, tokens))

    def decode(tokens: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    return decode


def lines_of(
    told: SampleRows, index: int, decode: Callable[[Sequence[int]], str], *, is_chat: bool
) -> Iterator[str]:
    """A row for people: a head, and a line for each stretch of one document. What the loss asks for is
    underlined where that is not simply all of a text.
    """
    row = told.rows[index]
    of = f"of {row.source}, " if row.source else ""
    asked = f"the loss asks for {count(len(row.asked), 'token')} of {len(row.tokens):,}"
    if told.step:
        head = f"step {told.step}, micro-batch {told.micro_batch}, row {index}: sample {row.sample} "
        place = f"({of}pass {row.epoch + 1}, from token {row.start:,} on)"
    else:
        head = f"evaluation, micro-batch {told.micro_batch}, row {index}: row {row.sample} "
        place = f"({of}from token {row.start:,} on)"
    yield click.style(f"{head}{place}; {asked}", bold=True)
    underlined = set(row.asked) if is_chat or row.inputs != row.tokens else set()
    for border, following in pairwise([*(row.borders or (Border(0, -1),)), Border(len(row.tokens), -1)]):
        stretch = range(border.at, following.at)
        if border.is_fill:
            yield click.style(f"  [{border.at}, {following.at}) fill", dim=True)
            continue
        if border.document >= 0:
            into = f", from its token {border.into:,} on" if border.into else ""
            yield click.style(f"  [{border.at}, {following.at}) document {border.document}{into}", dim=True)
        yield "  " + "".join(_marked(stretch, row, underlined, decode))


def _marked(
    stretch: range, row: SampleRow, underlined: set[int], decode: Callable[[Sequence[int]], str]
) -> Iterator[str]:
    """The text of a stretch."""
    for is_asked, positions in groupby(stretch, underlined.__contains__):
        text = visible(decode([row.tokens[position] for position in positions]))
        yield click.style(text, underline=True) if is_asked else text
