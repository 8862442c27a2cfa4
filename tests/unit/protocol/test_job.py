"""What job.toml may say in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from oobleckd.core.jobs import as_linked, exchange_of
from oobleckd.ctl.reference import to_toml
from oobleckd.host.jobfile import load_job
from oobleckd.planner.policy import GradientExchange, Setup
from oobleckd.planner.profile import Profile
from oobleckd.protocol.job import Job, parse_job, reads_the_same, table_of
from oobleckd.protocol.jobdata import Data, same_data
from oobleckd.protocol.jobtable import JobError
from oobleckd.protocol.units import parse_rate

TRAIN = {"steps": 1, "global_batch": 1, "micro_batch": 1, "sequence": 2}


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [("25Gbit/s", 3.125e9), ("2.5 GB/s", 2.5e9), ("1MiB/s", 2**20), (4096, 4096), (" 10Mbit/s ", 1.25e6)],
)
def test_rates(text: str | int, bytes_per_s: float) -> None:
    assert parse_rate(text) == bytes_per_s


@pytest.mark.parametrize(
    "text", ["", "fast", "25Gbit", "25 /s", "1GB", "-1GB/s", "1e9B/s", "٣GB/s", "1" * 40 + "GB/s"]
)
def test_no_rates(text: str) -> None:
    with pytest.raises(ValueError, match="is no bandwidth"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("link", "says"), [("25", "is no bandwidth"), (25, "less than a kilobyte"), (-1, "less than a kilobyte")]
)
def test_wrong_links(link: str | int, says: str) -> None:
    with pytest.raises(JobError, match=says) as caught:
        parse_job({"name": "a", "train": TRAIN, "resources": {"link": link}})
    assert (caught.value.path, "Gbit/s" in caught.value.hint) == ("resources.link", True)


def test_what_the_job_says_of_its_links_is_what_is_planned_with() -> None:
    measured = Profile("", "", ())
    said = parse_job({"name": "a", "train": TRAIN, "resources": {"link": "400Gbit/s"}})
    assert as_linked(measured, said).link_bytes_per_s == 50e9
    silent = parse_job({"name": "a", "train": TRAIN})
    assert as_linked(measured, silent) == measured


def test_the_exchange_is_planned_with_the_link_that_a_job_says_and_no_other() -> None:
    said = {"name": "a", "train": TRAIN, "resources": {"link": "400Gbit/s"}}
    assert exchange_of(parse_job(said)) == GradientExchange(8, 1, 50e9)
    assert not exchange_of(parse_job({"name": "a", "train": TRAIN})).is_known
    floats = {**said, "train": {**TRAIN, "exact": False}, "fault_tolerance": {"check_every": 4}}
    assert exchange_of(parse_job(floats)) == GradientExchange(4, 4, 50e9)


def test_a_setup_of_an_earlier_version_plans_as_it_did() -> None:
    setup = Setup(Profile("", "", ()), 8, 1, 0, 1, 4)
    written = msgspec.to_builtins(setup)
    del written["exchange"]
    assert msgspec.convert(written, Setup) == setup
    assert not setup.exchange.is_known


def test_a_file_with_a_key_by_its_first_name_is_refused_with_the_new_one(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text("[train]\nsteps = 1\n[schedule]\nshadow_memory = 0\n", encoding="utf-8")
    with pytest.raises(JobError) as caught:
        load_job(file)
    assert str(caught.value) == "schedule.shadow_memory: this key has a new name"
    assert caught.value.hint == "write schedule.redundant_memory instead"


@pytest.mark.parametrize("name", ["redundant_memory", "shadow_memory"])
def test_a_job_of_the_api_may_have_either_name(name: str) -> None:
    job = parse_job({"name": "small", "train": TRAIN, "schedule": {name: "16MiB"}})
    assert job.schedule.redundant_bytes == 2**24
    assert table_of(job)["schedule"]["redundant_memory"] == "16MiB"
    assert parse_job(table_of(job)) == job


def test_what_is_kept_and_sent_has_the_first_name() -> None:
    job = parse_job({"name": "small", "train": TRAIN, "schedule": {"redundant_memory": 7}})
    stored = msgspec.json.encode(job)
    assert b'"shadow_memory":7' in stored
    assert b"redundant_memory" not in stored
    assert msgspec.json.decode(stored, type=Job) == job


@pytest.mark.parametrize(
    ("schedule", "path", "problem"),
    [
        ({"redundant_memory": 1, "shadow_memory": 1}, "schedule.shadow_memory", "is the same key"),
        ({"redundant_memory": []}, "schedule.redundant_memory", "a list of 0"),
        ({"redundant_memory": "much"}, "schedule.redundant_memory", "is no size"),
        ({"redundent_memory": 1}, "schedule.redundent_memory", "unknown key"),
    ],
)
def test_errors_have_the_name_of_the_file(schedule: dict[str, object], path: str, problem: str) -> None:
    with pytest.raises(JobError) as caught:
        parse_job({"name": "small", "train": TRAIN, "schedule": schedule})
    assert caught.value.path == path
    assert problem in caught.value.problem
    assert "shadow" not in caught.value.hint or path == "schedule.shadow_memory"


# --------------------------------------------------------------------------- data


def data_of(*, checkpoint: str = "", **data: object) -> Data:
    return parse_job({"name": "a", "train": TRAIN, "model": {"checkpoint": checkpoint}, "data": data}).data


@pytest.mark.parametrize(
    ("data", "prepared", "is_bytes"),
    [
        ({}, False, True),
        ({"source": "text", "path": "/t"}, False, True),
        ({"source": "text", "path": "/t", "tokenizer": "/tok"}, True, False),
        ({"source": "text", "path": "/t", "prepared": "/p"}, True, False),
        ({"source": "jsonl", "path": "/t", "tokenizer": "/tok", "column": "body"}, True, False),
        ({"source": "parquet", "path": "/t", "checkpoint": "/m"}, True, False),
        ({"source": "arrow", "path": "/t", "prepared": "/p", "dtype": "int32"}, True, False),
        ({"source": "text", "path": "/t", "checkpoint": "/m"}, False, True),
        ({"source": "text", "path": "/t", "checkpoint": "/m", "tokenizer": "model.checkpoint"}, True, False),
        ({"source": "tokens", "path": "/t", "dtype": "int64"}, False, False),
        ({"source": "bin", "path": "/t", "dtype": "uint8"}, False, False),
        ({"source": "megatron", "path": "/t"}, False, False),
    ],
)
def test_what_is_prepared_and_what_is_bytes(data: dict[str, str], prepared: bool, is_bytes: bool) -> None:
    found = data_of(**data)
    assert (found.is_prepared, found.is_bytes) == (prepared, is_bytes)
    assert found.is_ready_made == (not prepared and not is_bytes)


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"source": "jsonl"}, "data.path"),
        ({"source": "jsonl", "path": "/t"}, "data.tokenizer"),
        ({"source": "jsonl", "path": "/t", "tokenizer": "model.checkpoint"}, "data.tokenizer"),
        ({"source": "jsonl", "path": "/t", "tokenizer": "/t", "dtype": "uint32"}, "data.dtype"),
        ({"source": "jsonl", "path": "/t", "tokenizer": "/t", "column": ""}, "data.column"),
        ({"source": "text", "path": "/t", "tokenizer": "/t", "column": "body"}, "data.column"),
        ({"source": "text", "path": "/t", "bos": True}, "data.bos"),
        ({"source": "text", "path": "/t", "dtype": "uint16"}, "data.dtype"),
        ({"source": "tokens", "path": "/t", "tokenizer": "/t"}, "data.tokenizer"),
        ({"source": "npy", "path": "/t", "prepared": "/p"}, "data.prepared"),
        ({"source": "stdlib", "on_bad_row": "skip"}, "data.on_bad_row"),
        ({"source": "csv", "path": "/t"}, "data.source"),
        ({"sequences": "packed"}, "data.sequences"),
        ({"source": "text", "path": "/t", "sequences": "padded"}, "data.sequences"),
        ({"source": "megatron", "path": "/t", "sequences": "packed"}, "data.sequences"),
        ({"documents": "separate"}, "data.documents"),
        ({"source": "bin", "path": "/t", "documents": "separate"}, "data.documents"),
        ({"on_long_document": "cut"}, "data.on_long_document"),
    ],
)
def test_what_does_not_go_together_is_refused(data: dict[str, object], key: str) -> None:
    with pytest.raises(JobError) as caught:
        data_of(**data)
    assert caught.value.path == key


def test_which_data_is_the_same_the_place_of_what_was_prepared_does_not_say() -> None:
    one = data_of(source="jsonl", path="/t", tokenizer="/a", prepared="/p")
    assert same_data(one, data_of(source="jsonl", path="/t", tokenizer="/a", prepared="/q", cache="/c"))
    assert not same_data(one, data_of(source="jsonl", path="/t", tokenizer="/b", prepared="/p"))
    assert not same_data(one, data_of(source="jsonl", path="/t", tokenizer="/a", eos=False))


def test_a_plan_is_of_one_length_and_read_by_jobs_of_that() -> None:
    def job(sequence: int, **data: str) -> Job:
        table = {"source": "jsonl", "path": "/t", "tokenizer": "/a", **data}
        return parse_job({"name": "a", "train": TRAIN | {"sequence": sequence}, "data": table})

    assert reads_the_same(job(16), job(32))
    assert reads_the_same(job(16, sequences="packed"), job(16, sequences="packed", documents="separate"))
    for one, other in (
        (job(16, sequences="packed"), job(32, sequences="packed")),
        (job(16, sequences="packed"), job(16, sequences="padded")),
        (job(16, sequences="packed"), job(16, sequences="packed", documents="joined")),
        (job(16), job(16, documents="separate")),
    ):
        assert not reads_the_same(one, other)


# --------------------------------------------------------------------------- several sources

ONE: dict[str, object] = {"name": "web", "kind": "bin", "path": "/w", "weight": 0.7}
TWO: dict[str, object] = {"name": "code", "kind": "bin", "path": "/c", "weight": 0.3}
STAGE: dict[str, object] = {"from_step": 2, "weights": {"web": 1, "code": 3}}


def mixed(*changed: dict[str, object], stage: dict[str, object] | None = None, **more: object) -> Data:
    """Two sources, with what is ``changed`` of each; and of their ``stage``."""
    tables = [usual | change for usual, change in zip((ONE, TWO), changed, strict=True)]
    stages = [] if stage is None else [STAGE | stage]
    return parse_job({
        "name": "a", "train": TRAIN | {"steps": 9}, "data": {"source": tables, "stage": stages, **more}
    }).data  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "more", "key"),
    [
        (({}, {"name": "web"}), {}, "data.source[1].name"),
        (({}, {"name": "Web"}), {}, "data.source[1].name"),
        (({}, {"weight": -0.1}), {}, "data.source[1].weight"),
        (({}, {"weight": 0}), {}, "data.source[1].weight"),
        (({}, {"weight": 0}), {"stage": {"weights": {"web": 1}}}, "data.source[1].weight"),
        (({}, {"weight": 1 / 3}), {}, "data.source[1].weight"),
        (({}, {"weight": 1e10}), {}, "data.source[1].weight"),
        (({"weight": 999_999}, {"weight": 2}), {}, "data.source"),
        (({"weight": 0}, {"weight": 0}), {"stage": {}}, "data.source"),
        (({}, {"epochs": -1}), {}, "data.source[1].epochs"),
        (({}, {"path": ""}), {}, "data.source[1].path"),
        (({}, {"colum": "x"}), {}, "data.source[1].colum"),
        (({}, {"kind": "csv"}), {}, "data.source[1].kind"),
        (({}, {"kind": "jsonl"}), {}, "data.tokenizer"),
        (({}, {"column": "body"}), {}, "data.source[1].column"),
        (({}, {"kind": "stdlib", "path": ""}), {}, "data.source"),
        (({}, {}), {"path": "/x"}, "data.path"),
        (({}, {}), {"dtype": "uint16"}, "data.dtype"),
        (({}, {}), {"sequences": "packed"}, "data.sequences"),
        (({}, {"kind": "megatron"}), {"documents": "separate"}, "data.documents"),
        (({}, {}), {"on_long_document": "skip"}, "data.on_long_document"),
        (({}, {}), {"tokenizer": "/x"}, "data.tokenizer"),
        (({}, {}), {"stage": {"from_step": 1}}, "data.stage[0].from_step"),
        (({}, {}), {"stage": {"from_step": 10}}, "data.stage[0].from_step"),
        (({}, {}), {"stage": {"weights": {"wiki": 1}}}, "data.stage[0].weights.wiki"),
        (({}, {}), {"stage": {"weights": {"web": -1}}}, "data.stage[0].weights.web"),
        (({}, {}), {"stage": {"weights": {}}}, "data.stage[0].weights"),
        (({}, {}), {"stage": {"wieghts": {}}}, "data.stage[0].wieghts"),
    ],
)
def test_what_cannot_be_mixed_is_refused(changed: Any, more: dict[str, Any], key: str) -> None:
    with pytest.raises(JobError) as raised:
        mixed(*changed, **more)
    assert raised.value.path == key
    assert raised.value.hint


def test_stages_are_of_several_sources_and_one_follows_the_other() -> None:
    for data, key in (
        ({"stage": [STAGE]}, "data.stage"),
        ({"source": []}, "data.source"),
        ({"source": [ONE, TWO], "stage": [STAGE, STAGE]}, "data.stage[1].from_step"),
    ):
        with pytest.raises(JobError) as raised:
            parse_job({"name": "a", "train": TRAIN | {"steps": 9}, "data": data})
        assert raised.value.path == key


def test_a_mixture_is_what_it_was_wherever_it_has_been(tmp_path: Path) -> None:
    job = parse_job({
        "name": "a", "train": TRAIN | {"steps": 9},
        "data": {"source": [ONE | {"epochs": 1.5}, TWO], "stage": [STAGE]},
    })  # fmt: skip
    file = tmp_path / "job.toml"
    file.write_text(to_toml(table_of(job)))
    assert load_job(file) == job
    assert parse_job(msgspec.to_builtins(job)) == job
    assert msgspec.json.decode(msgspec.json.encode(job), type=Job) == job


def test_the_same_data_may_be_mixed_in_another_way() -> None:
    both = mixed({}, {"prepared": ""})
    assert same_data(both, mixed({"weight": 0.1, "epochs": 2}, {}, stage={}))
    assert not same_data(both, mixed({}, {"path": "/other"}))
    assert not same_data(both, data_of(source="bin", path="/w"))


def test_what_a_source_has_of_the_whole_table() -> None:
    data = parse_job({
        "name": "a", "train": TRAIN,
        "data": {
            "source": [TWO, {"name": "web", "kind": "parquet", "path": "/w", "weight": 1, "column": "body"}],
            "tokenizer": "/t", "eos": False, "cache": "/c",
        },
    }).data  # fmt: skip
    code, web = (data.only(source) for source in data.sources)
    rows = {"sequences": "windows", "documents": "joined"}
    assert code == Data(source="bin", path="/c", **rows)
    assert web == Data(
        source="parquet", path="/w", column="body", tokenizer="/t", eos=False, cache="/c", **rows
    )
    assert (data.is_prepared, data.is_bytes, data.is_ready_made) == (True, False, False)


def test_a_decoupled_backward_is_not_compiled() -> None:
    train = TRAIN | {"compile": True}
    assert parse_job({"name": "a", "train": train}).train.compile
    with pytest.raises(JobError, match=r"does not go with schedule\.backward") as caught:
        parse_job({"name": "a", "train": train, "schedule": {"backward": "decoupled"}})
    assert caught.value.path == "train.compile"
    assert "fused" in caught.value.hint


def test_of_a_compiled_block_all_is_computed_again_or_nothing() -> None:
    train = TRAIN | {"compile": True}
    for recompute in ("none", "blocks", "auto"):
        parsed = parse_job({"name": "a", "train": train, "schedule": {"recompute": recompute}})
        assert not parsed.measures_selective
    with pytest.raises(JobError, match=r"does not go with train\.compile") as caught:
        parse_job({"name": "a", "train": train, "schedule": {"recompute": "selective"}})
    assert caught.value.path == "schedule.recompute"
    assert "blocks" in caught.value.hint
