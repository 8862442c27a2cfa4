"""A look at a job before it is submitted, or planned: whether a node would take its model and its text.

Owns the question alone, and the process that answers it: what is wrong with a job, and what is to be said of
it, the worker knows (``oobleckd.worker.tools.look``).
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from oobleckd.ctl.output import USAGE, Failure, note
from oobleckd.ctl.programs import run_worker
from oobleckd.prepare.objects import is_url
from oobleckd.protocol.job import Job, table_of
from oobleckd.protocol.jobdata import FROM_CHECKPOINT, Data, in_source
from oobleckd.protocol.jobparts import JobPart, is_prepared, parts_of, with_data_of
from oobleckd.protocol.modelnotes import Looked, data_words, words

_NEEDED = ("torch", "transformers")


def look(job: Job, source: Path, *, folder: bool = True, attention: bool = False) -> Looked:
    """Say what is to be said of ``job``, a job of the file ``source``; ``folder``: of the folder that its
    model starts from, too. Returns what was found; with ``attention``, what computes that, too. Nothing can
    be said where there is no torch.

    Raises Failure with exit code 2 where no device would take it.
    """
    if not all(importlib.util.find_spec(name) for name in _NEEDED):
        note("the nodes look at model and data: there is no torch here")
        return Looked()
    from oobleckd.ctl.reference import to_toml  # no other verb needs what comes with it

    job = _from_here(job)
    if is_prepared(job):
        job, here = _with_prepared(job, source)
    else:
        here = not _say_gone([part for part in parts_of(job) if not _is_there(part.job.data)])
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "job.toml"
        file.write_text(to_toml(table_of(job)), encoding="utf-8")
        try:
            # torch is not loaded here: it takes seconds and 200 MB, and a node's own program is what
            # decides. (D-service-017)
            told = run_worker(
                "oobleckd.worker.tools.look",
                "--job",
                str(file),
                *(("--attention",) if attention else ()),
                *(() if here else ("--no-data",)),
            )
        except Failure as failure:
            raise Failure(f"{source}: {failure}", failure.hint, USAGE) from failure
    looked = msgspec.json.decode(told, type=Looked)
    for each in looked.notes if folder else ():
        note(f"{job.model.checkpoint}: {words(each)}")
    for remark in looked.data:
        note(f"data.path: {data_words(remark)}")
    return looked


def _with_prepared(job: Job, source: Path) -> tuple[Job, bool]:
    """With the folder of its prepared data, and whether that is here to be looked at. Raises Failure where
    its text cannot be prepared.
    """
    from oobleckd.ctl.preparedjob import as_found, is_here  # no other job needs what comes with it

    data = [(part, part.job.data) for part in parts_of(job)]
    if _say_gone([part for part, of in data if not (is_here(of) if of.is_prepared else _is_there(of))]):
        return job, False
    found = as_found(job, source)
    lacks = [part for part in parts_of(found) if part.job.data.lacks_folder]
    if lacks:
        where = in_source(lacks[0].name, "data.path: is not prepared yet", lacks[0].table)
        note(f"{where}, so nobody has looked at its tokens")
        return job, False
    return found, True


def _say_gone(parts: Sequence[JobPart]) -> bool:
    """Whether some of a job's text is not here; the first of it is named."""
    if not parts:
        return False
    table, name, job = parts[0]
    there = job.data.prepared or job.data.path
    note(
        f"{in_source(name, f'data.path: {there} is not on this machine', table)}, so nobody has looked at it"
    )
    return True


def _from_here(job: Job) -> Job:
    """With paths that mean the same in any folder."""
    parts, model = [_data_from_here(part.job.data) for part in parts_of(job)], job.model
    job = with_data_of(job, _data_from_here(job.data), parts)
    if model.checkpoint:
        model = msgspec.structs.replace(model, checkpoint=str(Path(model.checkpoint).expanduser().absolute()))
    return msgspec.structs.replace(job, model=model)


def _data_from_here(data: Data) -> Data:
    changed = {
        key: str(Path(text).expanduser().absolute())
        for key in ("path", "tokenizer", "cache", "prepared")
        if (text := getattr(data, key)) and text != FROM_CHECKPOINT and not is_url(text)
    }
    return msgspec.structs.replace(data, **changed)


def _is_there(data: Data) -> bool:
    """Whether the files of a source that is not prepared lie on this machine."""
    return data.source == "stdlib" or Path(data.path).exists()
