"""The processes that tokenize pieces, as many as are asked for.

Owns starting, feeding and ending them. A process that dies ends the preparation; so does the end of this one
for them, also by kill -9: their stdin ends.
"""

from __future__ import annotations

import selectors
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import msgspec

from oobleckd.host.interpreter import command
from oobleckd.prepare.piece import PieceReport, PieceSetup
from oobleckd.prepare.sources import TextPiece
from oobleckd.prepare.worker import Answer, PieceMade, PieceProblem, PieceProgress
from oobleckd.tokens.errors import DataError
from oobleckd.words import count

_READ_BYTES = 1 << 20
_END_S = 5.0


class PieceRefused(Exception):
    """What a process said of a piece that it cannot make."""

    def __init__(self, refused: PieceProblem) -> None:
        super().__init__(refused.problem)
        self.refused = refused


@dataclass(slots=True)
class _Tokenizing:
    """A process, the piece that it is at, how much of that is done, and what came of its next answer."""

    process: subprocess.Popen[bytes]
    piece: TextPiece | None = None
    done: int = 0
    said: bytearray = field(default_factory=bytearray)


class Pool:
    """``with Pool(setup, 2) as pool: for report in pool.made(pieces, told): …``."""

    def __init__(self, setup: PieceSetup, num_processes: int) -> None:
        self._setup, self._num = setup, num_processes
        self._all: list[_Tokenizing] = []

    # Processes of multiprocessing outlive the one that started them when that is killed. (D-data-013)
    def __enter__(self) -> Self:
        for _ in range(self._num):
            process = subprocess.Popen(
                command("oobleckd.prepare.worker"), stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            self._all.append(_Tokenizing(process))
            self._ask(self._all[-1], self._setup)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in self._all:
            if kind is not None:
                each.process.kill()
            assert each.process.stdin is not None
            assert each.process.stdout is not None
            with suppress(BrokenPipeError):  # what a dead one was not told
                each.process.stdin.close()
            each.process.stdout.close()
        for each in self._all:
            each.process.wait(_END_S)

    def made(self, pieces: Iterable[TextPiece], told: Callable[[int], None]) -> Iterator[PieceReport]:
        """The pieces, as they become whole. ``told``: called with how much is done of those that are not.
        Raises PieceRefused, and DataError where a process dies.
        """
        left = iter(pieces)
        with selectors.DefaultSelector() as selector:
            for each in self._all:
                assert each.process.stdout is not None
                selector.register(each.process.stdout, selectors.EVENT_READ, each)
                self._next(each, left)
            while any(each.piece for each in self._all):
                for key, _ in selector.select():
                    for answer in self._heard(key.data):
                        match answer:
                            case PieceProgress(done):
                                key.data.done = done
                            case PieceMade(report):
                                yield report
                                self._next(key.data, left)
                            case PieceProblem():
                                raise PieceRefused(answer)
                told(sum(each.done for each in self._all))

    def _next(self, each: _Tokenizing, left: Iterator[TextPiece]) -> None:
        each.piece, each.done = next(left, None), 0
        if each.piece is not None:
            self._ask(each, each.piece)

    def _ask(self, each: _Tokenizing, said: PieceSetup | TextPiece) -> None:
        assert each.process.stdin is not None
        try:
            each.process.stdin.write(msgspec.json.encode(said) + b"\n")
            each.process.stdin.flush()
        except BrokenPipeError:
            raise self._dead(each) from None

    def _heard(self, each: _Tokenizing) -> Iterator[Answer]:
        assert each.process.stdout is not None
        data = each.process.stdout.read1(_READ_BYTES)  # type: ignore[attr-defined]
        if not data:
            raise self._dead(each)
        each.said += data
        *lines, rest = bytes(each.said).split(b"\n")
        each.said = bytearray(rest)
        for line in lines:
            yield msgspec.json.decode(line, type=Answer)

    def _dead(self, each: _Tokenizing) -> DataError:
        code = each.process.wait(_END_S)
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        where = f" while it read {each.piece.parts[0].path}" if each.piece is not None else ""
        return DataError(
            f"one of {count(self._num, 'process')} that tokenize ended {how}{where}",
            "run it again: what is done stays; with fewer processes (--jobs) it takes less memory",
        )
