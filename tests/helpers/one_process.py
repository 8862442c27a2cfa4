"""Tokenizes in this process, where a test is about other things than processes, or ends them all with one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Self

from oobleckd.prepare.opening import opened
from oobleckd.prepare.piece import Bad, PieceReport, PieceSetup, make
from oobleckd.prepare.pool import PieceRefused
from oobleckd.prepare.sources import TextPiece
from oobleckd.prepare.worker import PieceProblem


class OneProcess:
    """As ``oobleckd.prepare.pool.Pool``."""

    def __init__(self, setup: PieceSetup, _num_processes: int) -> None:
        self._setup = setup

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def made(self, pieces: Iterable[TextPiece], told: Callable[[int], None]) -> Iterator[PieceReport]:
        tokenizer = opened(Path(self._setup.tokenizer))
        for piece in pieces:
            try:
                yield make(piece, self._setup, tokenizer, told)
            except Bad as bad:
                raise PieceRefused(PieceProblem(bad.row.why, bad=bad.row)) from bad
            except FileNotFoundError as error:
                raise PieceRefused(PieceProblem(str(error), gone=True)) from error
