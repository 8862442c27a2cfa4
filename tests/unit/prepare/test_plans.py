"""The plan of packed and padded rows is made by whoever prepares, whatever is there already, and whoever
else is at it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oobleckd.prepare import build, plans
from oobleckd.prepare.build import PrepareProgress, prepare
from oobleckd.prepare.plans import has_plan, plans_of
from oobleckd.prepare.stats import mixture_stats, stats_of
from oobleckd.protocol.job import Job, parse_job
from oobleckd.tokens import packing
from oobleckd.tokens.errors import DataError
from oobleckd.tokens.manifest import INDEX, read_manifest
from oobleckd.tokens.packing import RowBlock
from oobleckd.tokens.plan import PlanManifest
from tests.helpers.corpora import job_of
from tests.helpers.one_process import OneProcess
from tests.helpers.prepared import prepared

LENGTHS = (5, 1, 30, 8, 20, 3, 2, 16, 0, 11)


def table_of(folder: Path, **data: Any) -> dict[str, Any]:
    return {"source": "jsonl", "path": "/nowhere.jsonl", "prepared": str(folder), **data}


def job_on(folder: Path, *, sequence: int = 16, **data: Any) -> Job:
    train = {"steps": 3, "global_batch": 4, "micro_batch": 2, "sequence": sequence}
    return parse_job({"name": "a", "train": train, "data": table_of(folder, **data)})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    documents = [np.arange(size) for size in LENGTHS]
    return prepared(tmp_path / ("0" * 32), documents, "uint16")


def made(job: Job) -> PlanManifest:
    folder = Path(job.data.prepared)
    return plans_of(job, folder, read_manifest(folder))[0]


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_preparing_makes_the_plan_and_finds_it(
    corpora: dict[str, tuple[str, Path]], tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a folder that was prepared before there were plans, or for windows; without the text, too."""
    monkeypatch.setattr(build, "Pool", OneProcess)
    source, path = corpora["jsonl"]
    first = prepare(job_of(source, path, tokenizer, cache=str(tmp_path)), 1, lambda _progress: None)
    assert (first.new, first.plans) == (True, ())
    told: list[PrepareProgress] = []
    packed = job_of(source, path, tokenizer, cache=str(tmp_path), sequences="packed")
    second = prepare(packed, 1, told.append)
    assert (second.folder, second.new) == (first.folder, False)
    assert second.plans[0].filled == first.manifest.tokens
    assert [each.phase for each in told[-1:]] == ["pack"]
    assert told[-1].done == told[-1].total
    before = files_in(first.folder)
    assert prepare(packed, 1, lambda _progress: None) == second
    named = job_of(
        "jsonl", Path("/gone.jsonl"), Path("/gone"), prepared=str(first.folder), sequences="packed"
    )
    assert prepare(named, 1, lambda _progress: None) == second
    assert files_in(first.folder) == before


def test_there_is_a_plan_for_each_way_of_making_rows(folder: Path) -> None:
    jobs = [
        job_on(folder, sequences="packed"),
        job_on(folder, sequences="packed", documents="joined"),
        job_on(folder, sequences="packed", sequence=8),
        job_on(folder, sequences="padded"),
        job_on(folder, sequences="padded", on_long_document="skip"),
    ]
    manifest = read_manifest(folder)
    for number, job in enumerate(jobs):
        assert [has_plan(each, folder, manifest) for each in jobs] == [at < number for at in range(len(jobs))]
        made(job)
    assert len([path for path in folder.iterdir() if path.is_dir()]) == len(jobs)
    assert plans_of(job_on(folder), folder, manifest) == ()


@pytest.mark.parametrize("block", [1, 3, 1000])
def test_what_was_made_is_the_same_bytes_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(packing, "_BLOCK", block)
    job = job_on(folder, sequences="packed")
    plan = made(job)
    before = files_in(folder)
    for path in [path for path in folder.iterdir() if path.is_dir()]:
        shutil.rmtree(path)
    assert made(job) == plan
    assert files_in(folder) == before


def test_two_that_make_it_at_once_do_no_harm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one is done, and has tidied up, when this one has half of it."""
    job, real, others = job_on(folder, sequences="packed"), plans.pack, []

    def slow(*words: Any) -> Iterable[RowBlock]:
        monkeypatch.setattr(plans, "pack", real)
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: 7)
            others.append(made(job))
        return real(*words)

    monkeypatch.setattr(plans, "pack", slow)
    assert made(job) == others[0]
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_what_a_killed_one_left_is_removed(folder: Path) -> None:
    job = job_on(folder, sequences="packed")
    plan = made(job)
    left = next(path for path in folder.iterdir() if path.is_dir())
    shutil.copytree(left, folder / f".{left.name}.elsewhere.7.making")
    shutil.rmtree(left)
    assert made(job) == plan
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_a_folder_of_another_owner_is_read_and_not_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_on(folder, sequences="packed")
    real = Path.mkdir

    def mkdir(path: Path, *words: Any, **more: Any) -> None:
        if path.parent == folder:  # root may write anywhere
            raise PermissionError(13, "Permission denied", str(path))
        real(path, *words, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", mkdir)
        with pytest.raises(DataError) as raised:
            made(job)
        assert raised.value.problem.endswith("Permission denied")
        assert "data.cache" in raised.value.hint
    plan = made(job)
    monkeypatch.setattr(Path, "mkdir", mkdir)
    assert made(job) == plan


def test_an_index_that_was_changed_makes_no_plan(folder: Path) -> None:
    data = bytearray((folder / INDEX).read_bytes())
    data[-8] ^= 1
    (folder / INDEX).write_bytes(data)
    with pytest.raises(DataError, match="is not what its manifest says"):
        made(job_on(folder, sequences="packed"))


@pytest.mark.parametrize(
    ("lengths", "data", "says"),
    [
        ((20, 30), {"on_long_document": "skip"}, "2 documents are longer"),
        ((1, 1, 1), {}, "in 1 row nothing is asked for"),
        ((1, 20), {"sequences": "padded", "on_long_document": "skip"}, "1 document is longer and in 1 row"),
        ((0,), {}, "its documents are empty"),
        ((), {}, "its documents are empty"),
        ((20, 3), {"on_long_document": "fail"}, "document 0 (from 0) has 20 tokens"),
    ],
)
def test_a_text_that_makes_no_row_is_refused(
    tmp_path: Path, lengths: tuple[int, ...], data: dict[str, str], says: str
) -> None:
    folder = prepared(tmp_path / "x", [np.arange(size) for size in lengths], "uint16")
    with pytest.raises(DataError) as raised:
        made(job_on(folder, **{"sequences": "packed", **data}))
    assert says in raised.value.problem
    assert raised.value.hint
    assert not [path for path in folder.iterdir() if path.is_dir()]


# --------------------------------------------------------------------------- what there is to say of it


def test_stats_of_rows_are_the_plans(folder: Path) -> None:
    job = job_on(folder, sequences="padded", on_long_document="skip")
    with pytest.raises(DataError):
        stats_of(job)
    made(job)
    told = stats_of(job)
    kept = [size for size in LENGTHS if 1 < size <= 16]
    assert (told.rows, told.sequences, told.long) == ("padded", len(kept), 2)
    assert (told.left_over, told.targets) == (sum(LENGTHS) - sum(kept), sum(kept) - len(kept))
    assert told.padding == pytest.approx(1 - sum(kept) / (16 * len(kept)))
    assert told.epochs == 12 / len(kept)


def test_targets_of_windows_are_fewer_where_documents_are_separate(folder: Path) -> None:
    joined, separate = stats_of(job_on(folder)), stats_of(job_on(folder, documents="separate"))
    assert (joined.targets, joined.padding) == (6 * 15, 0.0)
    begins = {int(start) for start in np.cumsum([0, *LENGTHS]) if start < 96} | set(range(0, 96, 16))
    assert separate.targets == 96 - len(begins)


def test_a_source_of_a_mixture_has_a_plan_and_a_share_of_targets(folder: Path, tmp_path: Path) -> None:
    short = prepared(tmp_path / "x", [np.arange(4)] * 8, "uint16")
    sources = [
        {"name": name, "kind": "jsonl", "path": "/t", "weight": 1, "prepared": str(place)}
        for name, place in (("long", folder), ("short", short))
    ]
    train = {"steps": 3, "global_batch": 4, "micro_batch": 2, "sequence": 16}
    job = parse_job(
        {"name": "a", "train": train, "data": {"source": sources, "sequences": "padded", "tokenizer": "/t"}}
    )
    for source in job.data.sources:
        made(job_on(Path(source.prepared), sequences="padded"))
    told = mixture_stats(job).sources
    assert [each.share for each in told] == [0.5, 0.5]
    assert sum(each.target_share for each in told) == pytest.approx(1)
    assert told[1].target_share == pytest.approx(3 / (3 + told[0].data.targets / told[0].data.sequences))
    assert told[1].data.padding == 0.75
