"""Errors of the worker: those that a user must mend, and the end of a process that has another.

Owns no recovery: failures are not errors, they are daily work.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager


class UserError(Exception):
    """Something outside the program is wrong: ``problem`` says what and where, ``hint`` what to do next."""

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.hint = hint


@contextmanager
def ends_the_process() -> Iterator[None]:
    """The boundary of every thread that a device cannot do without: a failed device is a dead device."""
    try:
        yield
    except UserError as error:
        print(f"error: {error.problem}\nhint: {error.hint}", file=sys.stderr, flush=True)
        os._exit(1)
    except Exception:  # noqa: BLE001 - see above
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
