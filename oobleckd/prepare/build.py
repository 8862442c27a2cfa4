"""Prepared data: a folder with tokens, index and manifest, named by the digest of all that decides them.

Owns what is done again after a kill (pieces that are not whole, and the joining), and that the folder is
there whole or not at all. Two at once, on one node or two, do no harm: they make the same bytes, and whoever
is later finds the folder there.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import socket
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from oobleckd import __version__
from oobleckd.host.durable import sync_directory
from oobleckd.prepare.piece import PieceReport, PieceSetup, done_of, loss_of, report_of, tokens_of
from oobleckd.prepare.plans import plans_of
from oobleckd.prepare.pool import PieceRefused, Pool
from oobleckd.prepare.rows import lines_before, place_of
from oobleckd.prepare.sources import TextPiece
from oobleckd.prepare.wanted import BAD_ROW, Stat, WantedData, digest_of, find, look_at, wanted_of
from oobleckd.prepare.worker import NO_ROOM
from oobleckd.protocol.job import Job
from oobleckd.tokens.asked import AskedTokens, AskedWriter
from oobleckd.tokens.dtypes import NAMED
from oobleckd.tokens.errors import DataError
from oobleckd.tokens.index import write_index
from oobleckd.tokens.manifest import (
    FORMAT_OF_CHATS,
    INDEX,
    LOSS,
    MAX_BAD_ROWS,
    TOKENS,
    BadRow,
    Manifest,
    SourceFile,
    checksums,
    read_manifest,
    write_manifest,
)
from oobleckd.tokens.plan import PlanManifest
from oobleckd.words import size

_READ_BYTES = 1 << 20
_TWICE = 2  # pieces, and what they are joined to
_THERE = (errno.EEXIST, errno.ENOTEMPTY)


class PrepareProgress(NamedTuple):
    """So many bytes of the sources are read or tokenized, or of their tokens joined or packed, of all."""

    phase: Literal["read", "tokenize", "join", "pack"]
    done: int
    total: int


class MadeFolder(NamedTuple):
    """``new``: it was made just now; ``plans``: of the job's rows, where they are packed or padded: of those
    that it trains on, and of those that are held out.
    """

    folder: Path
    manifest: Manifest
    new: bool
    plans: tuple[PlanManifest, ...] = ()


def check_cache(cache: Path) -> None:
    """Whether folders can be made in ``cache``, which is made where it is not there. Raises DataError."""
    with _words_for(cache):
        cache.mkdir(parents=True, exist_ok=True)
        try:
            tempfile.TemporaryFile(dir=cache).close()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(cache)) from error


class _Gone(Exception):
    """The pieces are not there any more: another one has made the folder of them."""


def prepare(job: Job, num_processes: int, told: Callable[[PrepareProgress], None]) -> MadeFolder:
    """The folder of prepared data that ``job`` trains on, with the plan of its rows: what of it is not there
    is made. Raises DataError.
    """
    named = Path(job.data.prepared) if job.data.prepared else None
    if named is not None and named.is_dir():  # the text may be gone
        made = MadeFolder(named, read_manifest(named), new=False)
    else:
        made = _prepared(job, num_processes, told)
    manifest = made.manifest

    def packed(tokens: int) -> None:
        told(PrepareProgress("pack", tokens * manifest.kind.itemsize, manifest.bin_bytes))

    return made._replace(plans=plans_of(job, made.folder, manifest, packed))


def _prepared(job: Job, num_processes: int, told: Callable[[PrepareProgress], None]) -> MadeFolder:
    wanted = wanted_of(job)
    if found := find(wanted):
        _tidy(found.folder)
        return MadeFolder(*found, new=False)
    look_at(wanted)
    check_cache(wanted.cache)
    sources = _hashed(wanted, num_processes, told)
    folder = wanted.cache / digest_of(wanted.settings, sources)
    if folder.is_dir():
        return _of_others(folder, sources)
    building = folder.with_name(f".{folder.name}.building")
    with _words_for(wanted.cache):
        building.mkdir(parents=True, exist_ok=True)
        try:
            reports = _tokenized(wanted, building, num_processes, told)
            return _finish(wanted, sources, building, reports, told)
        except (_Gone, FileNotFoundError) as error:
            if not folder.is_dir():
                raise DataError(f"{building} was removed", "run it again") from error
            return _of_others(folder, sources)


# --------------------------------------------------------------------------- sources


def _hashed(
    wanted: WantedData, num_processes: int, told: Callable[[PrepareProgress], None]
) -> list[SourceFile]:
    """All files with the SHA-256 of their bytes, where no store knows what they are. Raises DataError."""
    sources, done = [], 0
    total = sum(stat.size for stat in wanted.files if not stat.etag)
    with ThreadPoolExecutor(num_processes) as pool:
        for stat, sha256 in zip(wanted.files, pool.map(_sha256, wanted.files), strict=True):
            sources.append(SourceFile(stat.path, stat.size, stat.mtime_ns, sha256, stat.etag))
            if not stat.etag:
                done += stat.size
                told(PrepareProgress("read", done, total))
    return sources


def _sha256(stat: Stat) -> str:
    if stat.etag:
        return ""
    path = Path(stat.path)
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            _check_same(stat, os.fstat(file.fileno()))
    except OSError as error:
        raise DataError(f"data.path: {path}: {error.strerror}", "make it readable for this user") from error
    return digest


def _check_same(stat: Stat, now: os.stat_result) -> None:
    if (now.st_size, now.st_mtime_ns) != (stat.size, stat.mtime_ns):
        raise _changed(stat.path)


def _changed(path: str) -> DataError:
    return DataError(f"{path} was changed while it was prepared", "run it again once nobody writes into it")


# --------------------------------------------------------------------------- pieces


def _tokenized(
    wanted: WantedData, building: Path, num_processes: int, told: Callable[[PrepareProgress], None]
) -> list[PieceReport]:
    """Reports of all pieces, in order: of those that were made before, and those that are made now. Raises
    DataError, _Gone.
    """
    pieces = wanted.pieces()
    if not pieces:
        raise DataError(f"data.path: {wanted.data.path} has no document", "name files that have some")
    setup = _setup(wanted, building)
    stats = {file.path: (file.size, file.mtime_ns) for file in wanted.files}
    reports = {
        piece.number: report
        for piece in pieces
        if (report := report_of(piece, setup)) is not None
        and report.seen == tuple(stats[part.path] for part in piece.parts)
    }
    left = [piece for piece in pieces if piece.number not in reports]
    total = sum(piece.num_bytes for piece in pieces)
    done = total - sum(piece.num_bytes for piece in left)
    told(PrepareProgress("tokenize", done, total))
    if not left:
        return [reports[piece.number] for piece in pieces]
    with Pool(setup, min(num_processes, len(left))) as pool:
        try:
            made = pool.made(
                left, lambda more: told(PrepareProgress("tokenize", min(done + more, total), total))
            )
            for report in made:
                piece = pieces[report.number]
                for part, seen in zip(piece.parts, report.seen, strict=True):
                    if seen != stats[part.path]:
                        done_of(building, report.number).unlink(missing_ok=True)
                        raise _changed(part.path)
                reports[report.number] = report
                done += piece.num_bytes
                told(PrepareProgress("tokenize", done, total))
                _check_room(building, [*reports.values()], NAMED[wanted.dtype].itemsize, done / total)
        except PieceRefused as error:
            raise _refused(wanted, pieces, error) from error
    return [reports[piece.number] for piece in pieces]


def _setup(wanted: WantedData, building: Path) -> PieceSetup:
    tokenizer, data = wanted.tokenizer, wanted.data
    return PieceSetup(
        wanted.kind, data.column, str(tokenizer.file), tokenizer.eos, tokenizer.bos, wanted.dtype,
        data.on_bad_row == "skip", str(building), wanted.chat,
    )  # fmt: skip


def _check_room(building: Path, reports: Sequence[PieceReport], itemsize: int, share: float) -> None:
    """Whether what is left fits the disk, going by what is done. Raises DataError."""
    written = sum(report.tokens for report in reports) * itemsize
    needed = int(written / share * _TWICE) - written
    free = shutil.disk_usage(building).free
    if needed > free:
        raise DataError(
            f"{building.parent}: {size(needed)} more are needed, {size(free)} are free",
            "make room, or set data.cache to a folder on another disk; what is done stays",
        )


def _refused(wanted: WantedData, pieces: Sequence[TextPiece], error: PieceRefused) -> Exception:
    refused = error.refused
    if refused.bad is not None:
        part = pieces[refused.bad.piece].parts[refused.bad.part]
        before = lines_before(part) if wanted.kind == "jsonl" else 0
        file, line = place_of(wanted.kind, part, refused.bad.row, before)
        return DataError(
            f"{file}{f':{line}' if line else ''}: {refused.problem}",
            refused.bad.hint or BAD_ROW,
        )
    return _Gone(refused.problem) if refused.gone else DataError(refused.problem, refused.hint)


# --------------------------------------------------------------------------- the folder


def _finish(
    wanted: WantedData,
    sources: Sequence[SourceFile],
    building: Path,
    reports: Sequence[PieceReport],
    told: Callable[[PrepareProgress], None],
) -> MadeFolder:
    """Join the pieces into the folder. Raises DataError, OSError."""
    documents = sum(report.num_documents for report in reports)
    if not documents:
        raise DataError(f"data.path: {wanted.data.path} has no document", "name files that have some")
    folder = wanted.cache / digest_of(wanted.settings, sources)
    making = folder.with_name(f".{folder.name}.{socket.gethostname()}.{os.getpid()}.making")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir()
    try:
        _join(building, reports, making / TOKENS, told)
        if wanted.chat is not None:
            _join_loss(building, reports, making / LOSS)
        lengths = np.frombuffer(b"".join(report.lengths for report in reports), "<i4")
        write_index(making / INDEX, NAMED[wanted.dtype], lengths)
        manifest = _manifest(wanted, sources, reports, making)
        write_manifest(making, manifest)
        try:
            making.rename(folder)
        except OSError as error:
            if error.errno not in _THERE:
                raise
            return _of_others(folder, sources)
        sync_directory(wanted.cache)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    _tidy(folder)
    return MadeFolder(folder, manifest, new=True)


def _tidy(folder: Path) -> None:
    """Remove what it was made of, and what was left by those who were killed while they made it."""
    for left in folder.parent.glob(f".{folder.name}.*"):
        shutil.rmtree(left, ignore_errors=True)


def _join(
    building: Path, reports: Sequence[PieceReport], target: Path, told: Callable[[PrepareProgress], None]
) -> None:
    total = sum(tokens_of(building, report.number).stat().st_size for report in reports)
    done = 0
    # Pieces stay until the whole is there, whoever else is joining them. (D-data-015)
    with target.open("xb") as file:
        for report in reports:
            path, crc = tokens_of(building, report.number), 0
            with path.open("rb") as piece:
                while data := piece.read(_READ_BYTES):
                    crc = zlib.crc32(data, crc)
                    file.write(data)
                    done += len(data)
            if crc != report.crc:
                raise _damaged(path, building, report)
            told(PrepareProgress("join", done, total))
        file.flush()
        os.fsync(file.fileno())


def _join_loss(building: Path, reports: Sequence[PieceReport], target: Path) -> None:
    with target.open("xb") as file:
        writer = AskedWriter(file)
        for report in reports:
            path = loss_of(building, report.number)
            data = path.read_bytes()
            if zlib.crc32(data) != report.loss_crc:
                raise _damaged(path, building, report)
            writer.add(AskedTokens(np.frombuffer(data, np.uint8)).mask(0, report.tokens))
        writer.end()
        file.flush()
        os.fsync(file.fileno())


def _damaged(path: Path, building: Path, report: PieceReport) -> DataError:
    done_of(building, report.number).unlink(missing_ok=True)
    return DataError(f"{path} is damaged", "run it again: that piece alone is made anew")


def _manifest(
    wanted: WantedData, sources: Sequence[SourceFile], reports: Sequence[PieceReport], making: Path
) -> Manifest:
    import tokenizers

    bin_sha256, crcs = checksums(making / TOKENS)
    return Manifest(
        digest=digest_of(wanted.settings, sources),
        settings=wanted.settings,
        dtype=wanted.dtype,
        tokens=sum(report.tokens for report in reports),
        documents=sum(report.num_documents for report in reports),
        largest=max(report.largest for report in reports),
        bin_sha256=bin_sha256,
        idx_sha256=checksums(making / INDEX)[0],
        idx_bytes=(making / INDEX).stat().st_size,
        crcs=crcs,
        sources=tuple(sources),
        bad_rows=tuple(_bad_rows(wanted, reports)),
        num_bad_rows=sum(report.num_bad for report in reports),
        vocabulary=wanted.tokenizer.size,
        eos=wanted.tokenizer.eos,
        bos=wanted.tokenizer.bos,
        versions={"oobleckd": __version__, "tokenizers": tokenizers.__version__},
        **_loss_fields(reports, making),
    )


def _loss_fields(reports: Sequence[PieceReport], making: Path) -> dict[str, Any]:
    """What a manifest has of chats alone."""
    if not (making / LOSS).is_file():
        return {}
    loss_sha256, loss_crcs = checksums(making / LOSS)
    asked = sum(report.asked for report in reports)
    return {"format": FORMAT_OF_CHATS, "asked": asked, "loss_crcs": loss_crcs, "loss_sha256": loss_sha256}


def _bad_rows(wanted: WantedData, reports: Sequence[PieceReport]) -> Iterator[BadRow]:
    """The first of those that were left out, with their lines."""
    left, lines, path = MAX_BAD_ROWS, 0, ""
    for piece, report in zip(wanted.pieces(), reports, strict=True):
        for number, part in enumerate(piece.parts):
            if part.path != path:
                lines, path = 0, part.path
            for bad in report.bad:
                if bad.part == number and left:
                    yield BadRow(*place_of(wanted.kind, part, bad.row, lines), bad.why)
                    left -= 1
            lines += report.rows[number]


def _of_others(folder: Path, sources: Sequence[SourceFile]) -> MadeFolder:
    """The folder as somebody made it, who may have read the same bytes in other files: those that were read
    now are found by their paths the next time. Raises DataError.
    """
    manifest = read_manifest(folder)
    if manifest.sources != tuple(sources):
        manifest = msgspec.structs.replace(manifest, sources=tuple(sources))
        with suppress(OSError):  # where it is not ours to write, it is as good
            write_manifest(folder, manifest)
    _tidy(folder)
    return MadeFolder(folder, manifest, new=False)


@contextmanager
def _words_for(cache: Path) -> Iterator[None]:
    """What the system says of the cache, in a sentence."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{error.filename or cache}: {error.strerror}", NO_ROOM) from error
