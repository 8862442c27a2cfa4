"""The plan of a job's packed or padded rows in its prepared folder: found, or made of the folder's index.

Owns that it is there whole or not at all, whoever is at it, and what is said where nobody can make it. What a
plan has ``oobleckd.tokens.plan`` says.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from oobleckd.host.durable import sync_directory, write_whole
from oobleckd.protocol.job import Job
from oobleckd.tokens.asked import AskedTokens
from oobleckd.tokens.errors import DataError
from oobleckd.tokens.heldout import nothing_held_out
from oobleckd.tokens.index import read_index
from oobleckd.tokens.manifest import INDEX, LOSS, Manifest, again_hint, checksums
from oobleckd.tokens.packing import PackRule, RowBlock, pack, rules_of
from oobleckd.tokens.plan import ARRAYS, PLAN, PlanManifest, file_of, plan_folder, read_plan
from oobleckd.words import count, noun

_NOT_OURS = (
    "let its owner run `oobleckctl data prepare` on this job once, or set data.cache to a folder of your own"
)


def has_plan(job: Job, folder: Path, manifest: Manifest) -> bool:
    """Whether ``folder`` has what ``job``, on one source, needs besides the tokens."""
    try:
        for rule in rules_of(job):
            read_plan(plan_folder(folder, manifest, rule), manifest, rule)
    except (DataError, OSError):
        return False
    return True


def plans_of(
    job: Job, folder: Path, manifest: Manifest, told: Callable[[int], None] = lambda _tokens: None
) -> tuple[PlanManifest, ...]:
    """The plans of ``job``, on one source, made where they are not there, or are torn: of what it trains on,
    and of what is held out of that; none where its rows are windows. ``told``: how many tokens are in rows.
    Raises DataError.
    """
    found: list[PlanManifest] = []
    for rule in rules_of(job):
        before = sum(plan.filled for plan in found)
        found.append(_plan_of(rule, folder, manifest, partial(_told_behind, told, before)))
    return tuple(found)


def _told_behind(told: Callable[[int], None], before: int, tokens: int) -> None:
    told(before + tokens)


def _plan_of(rule: PackRule, folder: Path, manifest: Manifest, told: Callable[[int], None]) -> PlanManifest:
    place = plan_folder(folder, manifest, rule)
    with suppress(FileNotFoundError, DataError):
        return read_plan(place, manifest, rule)
    try:
        found = _made(place, folder, manifest, rule, told)
    except OSError as error:
        with suppress(OSError, DataError):  # somebody else was faster
            return read_plan(place, manifest, rule)
        raise DataError(f"{error.filename or folder}: {error.strerror}", _NOT_OURS) from error
    for left in folder.glob(f".{place.name}.*"):  # of those who were killed while they made it
        shutil.rmtree(left, ignore_errors=True)
    return found


def _made(
    place: Path, folder: Path, manifest: Manifest, rule: PackRule, told: Callable[[int], None]
) -> PlanManifest:
    sums = {INDEX: manifest.idx_sha256, **({LOSS: manifest.loss_sha256} if manifest.has_loss else {})}
    for name, sha256 in sums.items():
        if checksums(folder / name)[0] != sha256:
            raise DataError(f"{folder / name} is not what its manifest says", again_hint(folder))
    asked = AskedTokens(np.memmap(folder / LOSS, np.uint8, mode="r")) if manifest.has_loss else None
    rows = pack(read_index(folder / INDEX).document_starts(), rule, asked)
    shutil.rmtree(place, ignore_errors=True)
    return _write(place, manifest, rule, rows, told)


def _write(
    folder: Path, manifest: Manifest, rule: PackRule, blocks: Iterable[RowBlock], told: Callable[[int], None]
) -> PlanManifest:
    """Write the plan whose rows come in ``blocks`` to ``folder``: it is there whole, or not at all. ``told``:
    how many tokens it has, again and again. Raises OSError, and DataError where there is no row.
    """
    making = folder.with_name(f".{folder.name}.{socket.gethostname()}.{os.getpid()}.making")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir()
    try:
        found = _written(making, manifest, rule, blocks, told)
        if not found.rows:
            raise _no_row(found, manifest)
        write_whole(making / PLAN, msgspec.json.format(msgspec.json.encode(found), indent=1))
        making.rename(folder)
        sync_directory(folder.parent)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return found


def _written(
    making: Path, manifest: Manifest, rule: PackRule, blocks: Iterable[RowBlock], told: Callable[[int], None]
) -> PlanManifest:
    rows = pieces = filled = targets = long = idle = 0
    with ExitStack() as stack:
        files = {name: stack.enter_context((making / file_of(name)).open("xb")) for name in ARRAYS}
        for block in blocks:
            parts = {
                "row_starts": block.row_starts[:-1] + pieces,
                "tokens": block.tokens,
                "lengths": block.lengths,
                "targets": block.targets,
            }
            for name, numbers in parts.items():
                files[name].write(numbers.astype(ARRAYS[name]).data)
            rows, pieces = rows + len(block.targets), pieces + len(block.tokens)
            filled, targets = filled + int(block.lengths.sum()), targets + int(block.targets.sum())
            long, idle = long + block.long, idle + block.idle
            told(filled)
        files["row_starts"].write(np.array([pieces], ARRAYS["row_starts"]).data)
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    whole = hashlib.sha256()
    sums = {name: checksums(making / file_of(name), whole)[1] for name in ARRAYS}
    return PlanManifest(
        index=manifest.idx_sha256, asked=manifest.loss_sha256, rule=rule, rows=rows, pieces=pieces,
        filled=filled, targets=targets, long=long, idle=idle, sha256=whole.hexdigest(), crcs=sums,
    )  # fmt: skip


def _no_row(found: PlanManifest, manifest: Manifest) -> DataError:
    side = found.rule.side
    if side is not None and side.held and not found.long and not found.idle:
        return nothing_held_out("the data", manifest.documents)
    why = [
        f"{count(found.long, 'document')} {noun(found.long, 'is')} longer" if found.long else "",
        f"in {count(found.idle, 'row')} nothing is asked for" if found.idle else "",
    ]
    return DataError(
        f"data: makes no row of {count(found.rule.sequence, 'token')}: "
        f"{' and '.join(filter(None, why)) or 'its documents are empty'}",
        'set data.on_long_document = "cut", or make train.sequence longer'
        if found.long
        else "name more text: a token is asked for where another one stands before it in its row",
    )
