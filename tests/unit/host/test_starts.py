"""Starts of devices that came to nothing: which are alike, and what an agent leaves behind of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from oobleckd.host.starts import FailedStart, failed_starts, forget_failed, note_failed, repeated

LAST = FailedStart("b/0", "RuntimeError: port 5 is taken", said=True)
ONE, OTHER = "RuntimeError: port 41234 is taken", "RuntimeError: port 999 is taken"


@pytest.mark.parametrize(
    ("starts", "again"),
    [
        ([], None),
        ([FailedStart("a/0", "signal 9")], None),
        ([FailedStart("a/0", ONE, said=True)], None),
        ([FailedStart("a/0", ONE, said=True), FailedStart("a/0", "ImportError: x", said=True)], None),
        ([FailedStart("a/0", ONE, said=True), FailedStart("a/0", OTHER, said=True)], 1),
        ([FailedStart("a/0", ONE, said=True), FailedStart("b/0", OTHER, said=True)], 1),
        ([FailedStart("a/0", ONE, said=True), FailedStart("a/0", "y"), LAST], 2),
        ([FailedStart("a/0", "signal 9"), FailedStart("b/0", "signal 9")], None),  # chance, of one machine
        ([FailedStart("a/0", "signal 9"), FailedStart("a/0", "signal 11")], None),
        ([FailedStart("a/0", "signal 11"), FailedStart("a/0", "signal 11")], 1),
        ([FailedStart("a/0", "signal 11"), FailedStart("a/1", "signal 11")], 1),
        ([FailedStart("a/0", "exit code 1"), FailedStart("a/0", "exit code 1")], 1),
    ],
)
def test_two_that_are_alike(starts: list[FailedStart], again: int | None) -> None:
    assert repeated(starts) == (None if again is None else starts[again])


def test_what_is_noted(tmp_path: Path) -> None:
    assert failed_starts(tmp_path) == []
    first = FailedStart("a/0", "signal 9")
    second = FailedStart("a/0", "no memory\nat all", said=True, hint="end something")
    note_failed(tmp_path, first)
    note_failed(tmp_path, second)
    assert failed_starts(tmp_path) == [first, second]
    with (tmp_path / "failed-starts").open("ab") as file:
        file.write(b'what\xff\n{"device": "half wr')
    assert failed_starts(tmp_path) == [first, second]
    forget_failed(tmp_path)
    assert failed_starts(tmp_path) == []
    forget_failed(tmp_path)
    note_failed(tmp_path / "none", first)  # no help is no trouble
