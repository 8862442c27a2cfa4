"""What is wrong with a file of tokens."""

from __future__ import annotations


class DataError(ValueError):
    """``problem`` says what and where, ``hint`` what to do next."""

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.hint = hint


class MissingPackage(DataError):
    """What it takes to read the data is not installed on this machine."""
