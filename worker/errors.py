"""Errors of the worker that a user must mend. Owns no recovery: those are not errors, they are daily work."""

from __future__ import annotations


class UserError(Exception):
    """Something outside the program is wrong: ``problem`` says what and where, ``hint`` what to do next."""

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.hint = hint
