"""What ``oobleckctl eval --source NAME=PATH`` says of text: the tables of `[[eval.source]]` that it stands
for.

Owns the words of the option, and which kind a file is of by its name. What is in it the nodes look at.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec

from oobleckd.ctl.output import USAGE, fail
from oobleckd.prepare.objects import is_url
from oobleckd.prepare.sources import root_of
from oobleckd.protocol.job import Job, parse_job, table_of
from oobleckd.protocol.jobdata import Data
from oobleckd.protocol.jobeval import Eval
from oobleckd.protocol.jobtable import JobError
from oobleckd.protocol.mixtures import SourceKind

_ENDINGS: dict[str, SourceKind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".npy": "tokens",
    ".bin": "tokens",
    ".idx": "tokens",
}
_PACKED = (".gz", ".zst")
_FORM = "write NAME=PATH, such as --source wiki=/data/wiki.jsonl, or NAME=KIND:PATH"


def with_sources(job: Job, sources: Sequence[str], sequences: int) -> Job:
    """``job`` with `[eval]` of ``sources``, texts such as ``wiki=/data/wiki.jsonl``, or its own where there
    are none; ``sequences`` of each (0: as it has them). Raises Failure with exit code 2.
    """
    table = msgspec.to_builtins(job.eval if job.eval.wanted else Eval())
    if sources:
        table |= {"held_out": 0.0, "source": [_table(text) for text in sources]}
    elif not job.eval.wanted:
        fail("the job has no [eval], so nothing says on what to evaluate it", _FORM, USAGE)
    if sequences:
        table["sequences"] = sequences
    table |= {"every": 0, "at_start": False, "at_end": True}
    try:
        return parse_job(table_of(job) | {"eval": table})
    except JobError as error:
        fail(str(error), error.hint, USAGE)


def _table(text: str) -> dict[str, Any]:
    """An `[[eval.source]]`."""
    name, equals, where = text.partition("=")
    if not (name and equals and where):
        fail(f"--source {text}: has no {'path' if equals else 'name'}", _FORM, USAGE)
    said, colon, rest = where.partition(":")
    kind, path = (said, rest) if colon and said in get_args(SourceKind) else (kind_of(where), where)
    return {"name": name, "kind": kind, "path": _existing(name, path) if kind != "stdlib" else ""}


def kind_of(path: str) -> SourceKind:
    """By the ending of its name, without that of a compressed file; text where that says nothing."""
    name = Path(path)
    ending = name.with_suffix("").suffix if name.suffix in _PACKED else name.suffix
    return _ENDINGS.get(ending, "text")


def _existing(name: str, text: str) -> str:
    """Nodes and daemon run elsewhere: a path that means the same there."""
    if is_url(text):
        return text
    path = Path(text).expanduser().absolute()
    if not (root_of(str(path)).exists() or Path(f"{path}.bin").exists()):
        hint = "relative paths start at the current folder"
        fail(f"--source {name}: {path} does not exist", hint, USAGE)
    return str(path)


def untied(data: Data) -> Data:
    """`[data]` of a job that trains no step: without what only its steps give a meaning."""
    if not isinstance(data.source, tuple):
        return data
    tables = tuple(
        msgspec.structs.replace(source, weight=1.0, epochs=0.0, tokens=0) for source in data.source
    )
    return msgspec.structs.replace(data, source=tables, stage=())
