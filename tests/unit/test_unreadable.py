"""What msgspec says of what it cannot read reaches no user: it is translated in one place."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleckd.ctl.drillfile import Drill
from oobleckd.protocol.job import Job, parse_job
from oobleckd.protocol.jobtable import JobError
from oobleckd.protocol.messages import FromWorker
from oobleckd.protocol.unreadable import _PATTERNS, UNREADABLE, problem_of
from oobleckd.protocol.watch import Bundle

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ("oobleckd", "console", "planner", "worker")
RAW = ("`", "Expected", "Object", "Invalid", "malformed", "codec", "truncated")
"""What of msgspec's own words would give it away."""
ERRORS = frozenset({"UNREADABLE", "DecodeError", "ValidationError", "UnicodeDecodeError"})
JOB_NAME = next(iter(_PATTERNS))
TRAIN = {"steps": 3, "global_batch": 8, "micro_batch": 2, "sequence": 8}


def job(**tables: Any) -> dict[str, Any]:
    return {"name": "a", "train": TRAIN, **tables}


@pytest.mark.parametrize(
    ("raw", "path", "problem"),
    [
        (job(checkpoint={"every": "sometimes"}), "checkpoint.every",
         "is 'sometimes', and has to be a whole number of at least 0 or 'auto'"),
        (job(data={"on_bad_row": "stop"}), "data.on_bad_row",
         "is 'stop', and has to be 'fail' or 'skip'"),
        (job(train=TRAIN | {"steps": "many"}), "train.steps",
         "is 'many', and has to be a whole number of at least 1"),
        (job(train=TRAIN | {"steps": 1.5}), "train.steps",
         "is 1.5, and has to be a whole number of at least 1"),
        (job(train={"steps": 3}), "train.global_batch", "is missing"),
        (job(optimizer={"betas": [0.9]}), "optimizer.betas", "is a list of 1, and has to be a list of 2"),
        (job(optimizer={"betas": [0.9, True]}), "optimizer.betas[1]", "is true, and has to be a number"),
        (job(train=[1]), "train", "is a list of 1, and has to be a table"),
        ({"name": "X y", "train": TRAIN}, "name",
         f"is 'X y', and has to be {_PATTERNS[JOB_NAME]}"),
    ],
)  # fmt: skip
def test_a_job_says_what_is_there_and_what_has_to_be(raw: dict[str, Any], path: str, problem: str) -> None:
    with pytest.raises(JobError) as caught:
        parse_job(raw)
    assert (caught.value.path, caught.value.problem) == (path, problem)


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["name", "train", "steps", "fault", "type", "job", "version", "optimizer", "x"]),
            inner,
        )
    ),
    max_leaves=8,
)


@given(ANY)
def test_no_shape_that_does_not_fit_is_told_in_the_words_of_a_library(value: Any) -> None:
    for kind in (Job, Drill, FromWorker, Bundle, tuple[int, str]):
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            for told in (problem_of(error), problem_of(error, kind, value)):
                assert _is_plain(told, value), told


@given(st.binary(max_size=30))
def test_no_bytes_that_cannot_be_read_are(data: bytes) -> None:
    for decode in (msgspec.json.decode, msgspec.msgpack.decode, bytes.decode):
        if error := _raised(decode, data):
            told = problem_of(error)
            assert _is_plain(told, None), told
            assert told


def _raised(decode: Callable[[bytes], Any], data: bytes) -> Exception | None:
    try:
        decode(data)
    except UNREADABLE as error:
        return error
    return None


def _is_plain(told: str, value: Any) -> bool:
    return not any(word in told for word in RAW if word not in repr(value))


def test_every_error_of_msgspec_is_translated_where_it_is_caught() -> None:
    found = [
        f"{path.relative_to(ROOT).as_posix()}:{line}"
        for part in SHIPPED
        for path in sorted((ROOT / part).rglob("*.py"))
        if not any(folder.is_symlink() for folder in path.parents)
        for line in read(path.read_text(encoding="utf-8"))
    ]
    assert not found, "say problem_of(error):\n" + "\n".join(found)


@pytest.mark.parametrize(
    "handler",
    [
        "except UNREADABLE as error: raise Bad(f'{path}: {error}')",
        "except msgspec.ValidationError as error: raise Bad(str(error))",
        "except (OSError, *UNREADABLE) as error: raise Bad(f'{path}: {error}')",
    ],
)
def test_one_that_is_not_is_found(handler: str) -> None:
    assert list(read(f"try:\n    pass\n{handler}"))


@pytest.mark.parametrize(
    "handler",
    [
        "except UNREADABLE as error: raise Bad(f'{path}: {problem_of(error)}') from error",
        "except OSError as error: raise Bad(f'{error}')",
        "except UNREADABLE: return None",
    ],
)
def test_one_that_is_is_not(handler: str) -> None:
    assert not list(read(f"try:\n    pass\n{handler}"))


def read(source: str) -> Iterator[int]:
    """The lines of ``source`` that hand on an error of msgspec as it is."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.ExceptHandler)
            and node.name
            and node.type is not None
            and _is_of_msgspec(node.type)
        ):
            for part in ast.walk(node):
                match part:
                    case ast.FormattedValue(value=ast.Name(id=name)) if name == node.name:
                        yield part.lineno
                    case ast.Call(func=ast.Name(id="str"), args=[ast.Name(id=name)]) if name == node.name:
                        yield part.lineno
                    case _:
                        pass


def _is_of_msgspec(kind: ast.expr) -> bool:
    names = {part.id for part in ast.walk(kind) if isinstance(part, ast.Name)}
    return bool(ERRORS & (names | {part.attr for part in ast.walk(kind) if isinstance(part, ast.Attribute)}))
