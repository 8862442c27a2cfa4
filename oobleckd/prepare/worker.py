"""A process that tokenizes: ``python -m oobleckd.prepare.worker``. Reads a ``PieceSetup`` and then pieces
from its stdin, a JSON document a line, and answers on its stdout; it ends when nobody asks any more.

Owns that conversation on its side (``pool`` has the other), and nothing of how a piece is made.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import msgspec

from oobleckd.prepare.opening import opened
from oobleckd.prepare.piece import Bad, PieceReport, PieceSetup, UnusableRow, make
from oobleckd.prepare.sources import TextPiece
from oobleckd.tokens.errors import DataError

NO_ROOM = "make room there, or set data.cache to another folder; what is done stays"


class PieceProgress(msgspec.Struct, frozen=True, tag=True):
    """So much of a piece is done."""

    done: int


class PieceMade(msgspec.Struct, frozen=True, tag=True):
    """A piece is whole."""

    report: PieceReport


class PieceProblem(msgspec.Struct, frozen=True, tag=True):
    """A piece cannot be made. ``bad``: where a row is what is wrong; ``gone``: the folder of the pieces is
    not there any more.
    """

    problem: str
    hint: str = ""
    bad: UnusableRow | None = None
    gone: bool = False


Answer = PieceProgress | PieceMade | PieceProblem


def main() -> None:
    """Until stdin ends. Ctrl-C at a terminal is for who asks: this ends when that does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever a library prints is no answer
    asked = sys.stdin.buffer
    setup = msgspec.json.decode(asked.readline(), type=PieceSetup)

    def answer(said: Answer) -> None:
        answers.write(msgspec.json.encode(said) + b"\n")

    try:
        tokenizer = opened(Path(setup.tokenizer))
        for line in asked:
            piece = msgspec.json.decode(line, type=TextPiece)
            answer(PieceMade(make(piece, setup, tokenizer, lambda done: answer(PieceProgress(done)))))
    except Bad as bad:
        answer(PieceProblem(bad.row.why, bad=bad.row))
    except DataError as error:
        answer(PieceProblem(error.problem, error.hint))
    except BrokenPipeError:
        pass  # nobody waits for it
    except OSError as error:
        gone = isinstance(error, FileNotFoundError) and not Path(setup.folder).is_dir()
        answer(PieceProblem(f"{error.filename or setup.folder}: {error.strerror}", NO_ROOM, gone=gone))


if __name__ == "__main__":
    main()
