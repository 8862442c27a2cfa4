"""The verb ``data``: makes the tokens of a job's text, counts them, and shows the samples of a step.

Owns what is printed while that goes on. How tokens are made is ``oobleckd.prepare``'s; which samples a step
has the worker knows.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from oobleckd.ctl.jobfiles import read_job
from oobleckd.ctl.options import output_option, wants_json
from oobleckd.ctl.output import (
    USAGE,
    emit_fields,
    emit_item,
    emit_line,
    emit_page,
    emit_table,
    fail,
    note,
)
from oobleckd.ctl.preparedjob import translated, with_prepared
from oobleckd.prepare.build import MadeFolder, PrepareProgress, prepare
from oobleckd.prepare.pace import Pace
from oobleckd.prepare.stats import DataStats, MixtureStats, mixture_stats, stats_of
from oobleckd.protocol.job import Job
from oobleckd.protocol.jobdata import Data
from oobleckd.protocol.jobparts import is_prepared, parts_of
from oobleckd.tokens.manifest import BadRow
from oobleckd.tokens.packing import rule_of
from oobleckd.words import count, noun, seconds, short, size

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

_LINE_EVERY_S = 10.0
_MAX_NAMED = 5
_PHASES = {"read": "reading", "tokenize": "tokenizing", "join": "joining", "pack": "packing"}
_LONG = {"cut": "cut into rows", "skip": "left out", "fail": "refused"}


class PreparedData(msgspec.Struct, frozen=True):
    """What ``-o json`` prints. ``new``: it was made just now; ``source``: of several, its name; ``rows``:
    packed or padded ones, with ``padding``, the share of their positions that hold no token; ``asked``: of
    chats and completions, tokens that the loss asks for. ``held_out_rows``: packed or padded rows of what is
    held out of training.
    """

    folder: str
    digest: str
    new: bool
    documents: int
    tokens: int
    dtype: str
    largest: int
    vocabulary: int
    eos: int
    bos: int
    files: int
    num_bad_rows: int
    bad_rows: tuple[BadRow, ...]
    source: str = ""
    rows: int = 0
    padding: float = 0.0
    asked: int = 0
    held_out_rows: int = 0


@click.group()
def data() -> None:
    """Prepare the text of a job, count it, and show its samples."""


_job_file = click.argument("file", type=click.Path(path_type=Path))


@data.command("prepare")
@_job_file
@click.option(
    "--jobs",
    "num_jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Processes; one for each core if not given.",
)
@output_option
def prepare_command(file: Path, num_jobs: int | None) -> None:
    """Make the tokens of the text of FILE, a job.toml. Prints the folder with them.

    What is done stays, whatever ends this: run it again, and it goes on. Text, tokenizer and settings name
    the folder: where they are those of before, nothing is left to do. Of several sources each is prepared by
    itself.
    """
    for table, name, part in parts_of(_of_prepared(file)):
        if not part.data.is_prepared:
            continue
        with translated(file, name, table), _shown() as told:
            try:
                made = prepare(part, num_jobs or len(os.sched_getaffinity(0)), told)
            except KeyboardInterrupt:
                note("what is done stays: run it again, and it goes on")
                raise
        _say(name, made)


@data.command()
@_job_file
@output_option
def stats(file: Path) -> None:
    """Count what FILE, a job.toml, trains on: documents, tokens, and how often the job reads them."""
    job = with_prepared(read_job(file), file)
    if job.data.is_bytes:
        fail(
            f"{file}: {_source_words(job.data)} is trained on as bytes: there are no tokens to count",
            "name a data.tokenizer, or a source of tokens",
            USAGE,
        )
    if job.data.sources:
        with translated(file):
            mixed = mixture_stats(job)
        _say_mixture(mixed)
        return
    with translated(file):
        told = stats_of(job)
    if wants_json():
        emit_item("DataStats", told)
    else:
        emit_fields(_words_of(job, told))


@data.command()
@_job_file
@click.option("--step", type=click.IntRange(min=1), default=0, metavar="N", help="Of the job, from 1 on.")
@click.option("--evaluation", is_flag=True, help="In place of a step: what the model is evaluated on.")
@click.option("--source", default="", metavar="NAME", help="Of an evaluation; all if not given.")
@click.option(
    "--micro-batch",
    type=click.IntRange(min=0),
    metavar="N",
    help="Of the step, or of each source of an evaluation, from 0 on; all if not given.",
)
@output_option
def show(file: Path, step: int, source: str, micro_batch: int | None, *, evaluation: bool) -> None:
    """Show the samples of a step, or of every evaluation, of FILE, a job.toml, as a device reads them.

    Each row with its tokens as text, the documents that they are of, and what the loss asks for. Any kind of
    data has them; text is decoded by the job's tokenizer, bytes as UTF-8, and other tokens stay numbers.
    """
    if bool(step) == evaluation:
        fail(f"{file}: name a step, or --evaluation", "`--step 1`, for example", USAGE)
    if source and not evaluation:
        fail(f"{file}: --source is of an evaluation", "add --evaluation, or leave it out", USAGE)
    from oobleckd.ctl.samples import decoder_of, lines_of, samples_of  # `prepare` starts no program of a node

    job = with_prepared(read_job(file), file)
    if step > job.train.steps:
        fail(f"{file}: the job has {count(job.train.steps, 'step')}, and no step {step:,}", "", USAGE)
    names = _evaluated(job, file, source) if evaluation else ("",)
    number = job.eval_micro_batches if evaluation else job.batch_sizes.micro_batches(step - 1)
    if micro_batch is not None and micro_batch >= number:
        what = "a source of an evaluation" if evaluation else f"step {step:,}"
        problem = f"{what} has {count(number, 'micro-batch')}, and no number {micro_batch}"
        fail(f"{file}: {problem}", "they are counted from 0", USAGE)
    decode, chats = decoder_of(job, file), any(part.job.data.has_chats for part in parts_of(job))
    for name in names:
        for which in range(number) if micro_batch is None else (micro_batch,):
            told = samples_of(job, file, step, which, name)
            if wants_json():
                emit_item("SampleRows", told)
                continue
            for index in range(len(told.rows)):
                emit_page("\n".join(lines_of(told, index, decode, is_chat=chats)))


def _evaluated(job: Job, file: Path, source: str) -> tuple[str, ...]:
    """The sources of an evaluation that are to be shown."""
    names = job.eval_sources
    if not names:
        hint = "set eval.held_out = 0.01, or write an [[eval.source]] table"
        fail(f"{file}: the job is evaluated on nothing", hint, USAGE)
    if source and source not in names:
        fail(f"{file}: the job is not evaluated on {source!r}", f"it is on {', '.join(names)}", USAGE)
    return (source,) if source else names


def _of_prepared(file: Path) -> Job:
    job = read_job(file)
    if not is_prepared(job):
        text = ", or name a data.tokenizer" if job.data.source == "text" else ""
        fail(
            f"{file}: {_source_words(job.data)} is trained on as it is: there is nothing to prepare",
            f'submit it; or set data.source = "jsonl", "parquet" or "arrow"{text}',
            USAGE,
        )
    return job


# --------------------------------------------------------------------------- what is printed


def _source_words(data: Data) -> str:
    return "every data.source" if data.sources else f"data.source = {data.source!r}"


def _say(source: str, made: MadeFolder) -> None:
    folder, manifest, plans, bad = made.folder, made.manifest, made.plans, made.manifest.bad_rows
    for row in bad[:_MAX_NAMED]:
        note(f"left out: {row.file}{f':{row.line}' if row.line else ''}: {row.why}")
    if manifest.num_bad_rows > _MAX_NAMED:
        note(f"left out: {count(manifest.num_bad_rows, 'row')} in all; {folder}/manifest.json names more")
    if wants_json():
        emit_item(
            "PreparedData",
            PreparedData(
                str(folder), manifest.digest, made.new, manifest.documents, manifest.tokens, manifest.dtype,
                manifest.largest, manifest.vocabulary, manifest.eos, manifest.bos, len(manifest.sources),
                manifest.num_bad_rows, bad, source, plans[0].rows if plans else 0,
                plans[0].padding if plans else 0.0, manifest.asked, plans[1].rows if plans[1:] else 0,
            ),
        )  # fmt: skip
        return
    emit_line(str(folder))
    how = f"{f'{source}: ' if source else ''}{'' if made.new else 'was prepared before: '}"
    note(
        f"{how}{count(manifest.documents, 'document')}, {count(manifest.tokens, 'token')} of {manifest.dtype}"
        f"{f', of which the loss asks for {manifest.asked:,}' if manifest.has_loss else ''}"
    )
    for plan, side in zip(plans, ("", "held out of training, and "), strict=False):
        rows = f"{count(plan.rows, 'row')} of {count(plan.rule.sequence, 'token')}"
        note(f"{side}{plan.rule.kind} into {rows}, with {_percent(plan.padding)} padding")


def _words_of(job: Job, told: DataStats) -> dict[str, str]:
    largest = f", the largest {told.largest:,}" if told.largest >= 0 else ""
    left = (
        f"; {count(told.left_over, 'token')} {noun(told.left_over, 'is')} in none" if told.left_over else ""
    )
    rule, weighs = rule_of(job), job.data.weighs_targets
    return {
        "path": told.path,
        "documents": f"{told.documents:,}; their lengths: {short(told.mean)} on average, half of them "
        f"{short(told.median)} or less, the longest {told.longest:,}"
        if told.documents
        else "",
        "tokens": f"{told.tokens:,} of {told.dtype}{largest}",
        "vocabulary": f"{told.vocabulary:,}" if told.vocabulary else "",
        "sequences": f"{told.sequences:,} of {count(job.train.sequence, 'token')}, {told.rows}{left}",
        "longer documents": f"{told.long:,}, {_LONG[rule.on_long]}" if rule is not None and told.long else "",
        "epochs": f"{short(told.epochs)} in {count(job.train.steps, 'step')} of "
        f"{'up to ' if job.batch_sizes.ramp_steps else ''}{count(job.train.global_batch, 'sequence')}",
        "padding": f"{short(100 * told.padding)} %",
        "targets": f"{told.targets:,} in a pass, of a model that names the next token" if weighs else "",
        "left out": count(told.bad_rows, "row") if told.bad_rows else "",
    }


def _say_mixture(told: MixtureStats) -> None:
    if wants_json():
        emit_item("MixtureStats", told)
        return
    # A share of rows is one of what is learnt from only where all rows are asked for equally many tokens.
    weighs = any(each.data.rows != "windows" for each in told.sources)
    rows = [
        (
            each.name,
            f"{each.data.documents:,}" if each.data.documents else "",
            f"{each.data.tokens:,}",
            f"{each.data.sequences:,}",
            *((_percent(each.data.padding),) if weighs else ()),
            f"{each.samples:,}",
            _percent(each.share),
            *((_percent(each.target_share),) if weighs else ()),
            short(each.epochs),
            f"in step {each.limit_step:,}" if each.limit_step else "",
        )
        for each in told.sources
    ]
    padding, targets = (("PADDING",), ("TARGETS",)) if weighs else ((), ())
    heads = ("SOURCE", "DOCUMENTS", "TOKENS", "SEQUENCES", *padding, "SAMPLES", "SHARE", *targets, "EPOCHS")
    emit_table((*heads, "LIMIT"), rows)
    if len(told.stages) == 1 and not any(each.limit_step for each in told.sources):
        return
    emit_line()
    names = [each.name for each in told.sources]
    emit_table(
        ("STEPS", *(name.upper() for name in names)),
        [
            (
                f"{stage.first:,} to {stage.last:,}",
                *(_share_words(stage.wanted[name], stage.shares[name]) for name in names),
            )
            for stage in told.stages
        ],
    )


def _share_words(wanted: float, share: float) -> str:
    """What a source has; and where that shows, what its weight asks for."""
    told, asked = _percent(share), _percent(wanted)
    return told if told == asked else f"{told} of {asked}"


def _percent(share: float) -> str:
    return f"{short(100 * share)} %"


@contextmanager
def _shown() -> Iterator[Callable[[PrepareProgress], None]]:
    """A bar on a terminal; elsewhere a line now and then."""
    pace = _Shown()
    if not sys.stderr.isatty() or wants_json():
        yield pace.line
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description:<10}"), BarColumn(), TextColumn("{task.fields[said]}"))
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        yield pace.bar_of(bars)


class _Shown:
    """How fast a phase goes, for people."""

    def __init__(self) -> None:
        self._pace, self._rate = Pace(), 0.0
        self._told = time.monotonic()

    def line(self, now: PrepareProgress) -> None:
        """Say it, unless it was said a moment ago."""
        self._heard(now)
        if time.monotonic() - self._told >= _LINE_EVERY_S:
            self._told = time.monotonic()
            note(f"{_PHASES[now.phase]}: {self._words(now)}")

    def bar_of(self, bars: Bars) -> Callable[[PrepareProgress], None]:
        """What moves a bar."""
        task = bars.add_task("", total=None, said="")

        def told(now: PrepareProgress) -> None:
            self._heard(now)
            said = self._words(now)
            bars.update(
                task, description=_PHASES[now.phase], completed=now.done, total=max(1, now.total), said=said
            )

        return told

    def _heard(self, now: PrepareProgress) -> None:
        self._rate = self._pace.heard(now, time.monotonic())

    def _words(self, now: PrepareProgress) -> str:
        said = f"{size(now.done)} of {size(now.total)}"
        if not self._rate:
            return said
        return f"{said}, {size(self._rate)}/s, {seconds((now.total - now.done) / self._rate)} left"
