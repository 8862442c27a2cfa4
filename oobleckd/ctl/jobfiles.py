"""The job that a command line names: a job.toml, or stdin, and what ``--set`` changes in it.

Owns how such a file is read here and what its relative paths mean; what may be in it is ``protocol.job``'s.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from oobleckd.ctl.output import USAGE, Failure, fail
from oobleckd.host.jobfile import changed_job, load_job
from oobleckd.prepare.objects import is_url
from oobleckd.protocol.job import Job
from oobleckd.protocol.jobdata import FROM_CHECKPOINT, Data
from oobleckd.protocol.jobparts import is_prepared, parts_of, with_data_of
from oobleckd.protocol.jobtable import JobError

Verb = TypeVar("Verb", bound=Callable[..., Any])
_key = re.compile(r"[\w-]+")


def set_option(verb: Verb) -> Verb:
    """Give a verb ``--set``, as its argument ``changes``: see ``loaded``."""
    return click.option(
        "--set", "changes", multiple=True, metavar="KEY=VALUE",
        help="Another value than the file has, such as train.steps=10 (repeat for more).",
    )(verb)  # fmt: skip


def read_job(path: Path, changes: Sequence[str] = ()) -> Job:
    """The job of a file, with paths made absolute and found to exist; ``changes``: as of ``loaded``. Raises
    Failure with exit code 2.
    """
    return _with_paths(loaded(path, changes), path)


def loaded(path: Path, changes: Sequence[str] = ()) -> Job:
    """The job of a file as it is, or with ``-`` that of stdin, but for ``changes``: texts such as
    ``train.steps=10``, of which the last of a key counts. Raises Failure with exit code 2.
    """
    return _with_changes(path, changes, lambda values: load_job(path, values))


def changed(job: Job, changes: Sequence[str], label: Path) -> Job:
    """``job`` but for ``changes``, as of ``loaded``; ``label``: what an error calls it. Raises Failure with
    exit code 2.
    """
    return _with_paths(_with_changes(label, changes, lambda values: changed_job(job, values)), label)


def _with_changes(path: Path, changes: Sequence[str], make: Callable[[dict[str, Any]], Job]) -> Job:
    values = dict(map(_change, changes))
    try:
        return make(values)
    except JobError as error:
        problem = str(error)
        where = "" if problem.startswith(f"{path}: ") else f"{path}: "
        changed = next((key for key in values if _is_of(error.path, key)), None)
        if changed is not None:
            where = f"--set {changed}={_as_typed(changes, changed)}: "
        # What is wrong is what was typed, and nothing was asked of the daemon. (D-service-003)
        raise Failure(f"{where}{problem}", error.hint, USAGE) from error


def _change(text: str) -> tuple[str, Any]:
    """Key and value of a ``--set``. The value is one of TOML; what is none is a string without its quotes."""
    key, equals, value = text.partition("=")
    if not equals or not all(part and _key.fullmatch(part) for part in key.split(".")):
        fail(
            f"--set {text}: is no KEY=VALUE", "write a key with its table, as in --set train.steps=10", USAGE
        )
    try:
        found = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):
        return key, value
    return key, found["value"] if len(found) == 1 else value


def _is_of(path: str, key: str) -> bool:
    """Whether what is wrong at ``path`` lies in what was set at ``key``."""
    return bool(path) and (path == key or path.startswith((f"{key}.", f"{key}[")))


def _as_typed(changes: Sequence[str], key: str) -> str:
    return [text.partition("=")[2] for text in changes if text.partition("=")[0] == key][-1]


def _with_paths(job: Job, source: Path) -> Job:
    """Relative paths mean: from here. The daemon and the nodes run elsewhere."""
    job = _data_with_paths(job, source)
    model, checkpoint = job.model, job.checkpoint
    if model.checkpoint:
        model = msgspec.structs.replace(
            model, checkpoint=existing("model.checkpoint", model.checkpoint, source)
        )
    if checkpoint.dir:
        checkpoint = msgspec.structs.replace(
            checkpoint, dir=str(Path(checkpoint.dir).expanduser().absolute())
        )
    return msgspec.structs.replace(job, model=model, checkpoint=checkpoint)


def _data_with_paths(job: Job, source: Path) -> Job:
    job = msgspec.structs.replace(job, data=_with_folders(job.data))
    keys = [f"data.source[{index}].path" for index in range(len(job.data.sources))] or ["data.path"]
    keys += [f"eval.source[{index}].path" for index in range(len(job.eval.source))]
    parts = [_with_path(part.job.data, source, key) for part, key in zip(parts_of(job), keys, strict=True)]
    return with_data_of(job, job.data, parts)


def _with_folders(data: Data) -> Data:
    changed = {
        key: str(Path(text).expanduser().absolute())
        for key in ("tokenizer", "cache", "prepared")
        if (text := getattr(data, key)) and text != FROM_CHECKPOINT
    }
    chat = data.chat
    if chat.template:
        chat = msgspec.structs.replace(chat, template=str(Path(chat.template).expanduser().absolute()))
    return msgspec.structs.replace(data, chat=chat, **changed)


def _with_path(data: Data, source: Path, key: str) -> Data:
    changed = {}
    if data.prepared:
        changed["prepared"] = str(Path(data.prepared).expanduser().absolute())
    if is_url(data.path):
        if not data.is_prepared:
            fail(
                f"{source}: {key}: {data.path} is in a store, and {data.source!r} is trained on as it is",
                "copy it into a folder that every node sees; `data prepare` alone reads from stores",
                USAGE,
            )
    elif data.path and data.is_prepared:  # may name many files by a pattern
        changed["path"] = str(Path(data.path).expanduser().absolute())
    elif data.path and not (data.source == "megatron" and Path(f"{data.path}.bin").expanduser().exists()):
        changed["path"] = existing(key, data.path, source)
    elif data.path:
        changed["path"] = str(Path(f"{data.path}.bin").expanduser().absolute())
    return msgspec.structs.replace(data, **changed)


def as_found(job: Job, source: Path) -> Job:
    """With its prepared folders that are here. Raises Failure where a look tells that the others
    cannot be prepared.
    """
    if not is_prepared(job):
        return job
    from oobleckd.ctl import preparedjob  # no other job needs numpy here

    return preparedjob.as_found(job, source)


def existing(key: str, text: str, source: Path) -> str:
    """``text`` as an absolute path that is there. Raises Failure with exit code 2."""
    path = Path(text).expanduser().absolute()
    if not path.exists():
        fail(f"{source}: {key}: {path} does not exist", "relative paths start at the current folder", USAGE)
    return str(path)
