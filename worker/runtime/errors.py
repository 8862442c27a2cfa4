"""Errors of the worker: those that a user must mend, and the end of a process that has another.

Owns no recovery: failures are not errors, they are daily work.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from oobleckd.protocol.parts import JobCause

LastWords = Callable[[Exception, str], bool]
"""Called with the error that ends the process, and what was being done ("": not said); whether nobody needs
to see where it came from.
"""
_told: list[LastWords] = []


class UserError(Exception):
    """Something outside the program is wrong: ``problem`` says what and where, ``hint`` what to do next,
    ``cause`` what a program should know of it.
    """

    def __init__(self, problem: str, hint: str = "", cause: JobCause = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.hint = hint
        self.cause = cause


def at_the_end(say: LastWords) -> None:
    """Whom this process tells why it ends, from now on."""
    _told[:] = [say]


@contextmanager
def ends_the_process(phase: str = "", only: Callable[[Exception], bool] = lambda _: True) -> Iterator[None]:
    """The boundary of every thread that a device cannot do without: a failed device is a dead device.
    ``phase``: what the thread does; ``only``: the errors that end it, where others are somebody else's.
    """
    try:
        yield
    except UserError as error:
        print(f"error: {error.problem}\nhint: {error.hint}", file=sys.stderr, flush=True)
        _say(error, phase)
        os._exit(1)
    except Exception as error:
        if not only(error):
            raise
        try:
            if not _say(error, phase):
                traceback.print_exc()
                sys.stderr.flush()
        finally:
            os._exit(1)


def _say(error: Exception, phase: str) -> bool:
    with suppress(Exception):  # whatever else goes wrong now, the process ends
        return bool(_told) and _told[0](error, phase)
    return False
