"""What is wrong with the sources that a job is evaluated on, before anything is read: as with those of
`[data]`, whose rows theirs are made like.
"""

from __future__ import annotations

from collections.abc import Sequence

from oobleckd.protocol.jobdata import OF_SOURCE, Data, check_rows, check_source
from oobleckd.protocol.jobeval import EvalSource
from oobleckd.protocol.jobtable import JobError


def check_evaluated(data: Data, sources: Sequence[EvalSource], *, has_folder: bool) -> None:
    """Of a job that trains on ``data``; ``has_folder``: it starts from `model.checkpoint`. Raises
    JobError.
    """
    for index, source in enumerate(sources):
        part = data.evaluated(source)
        try:
            check_source(part, has_folder=has_folder)
            check_rows(part, f"eval source {source.name!r} is of kind {source.kind!r}")
        except JobError as error:
            path = error.path
            if path in OF_SOURCE:
                path = f"eval.source[{index}].{path.removeprefix('data.')}"
            raise JobError(path, error.problem, error.hint) from error
        if part.is_bytes != data.is_bytes:
            one, other = ("bytes", "tokens") if part.is_bytes else ("tokens", "bytes")
            raise JobError(
                f"eval.source[{index}].kind",
                f"{source.name!r} is read as {one}, and [data] as {other}, which are other numbers",
                "name a data.tokenizer, and no source of kind stdlib"
                if part.is_bytes
                else 'set kind = "text", or train on tokens, too',
            )
