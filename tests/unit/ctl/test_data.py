"""``oobleckctl data``: what it prints, and what ``submit`` makes of a job by whether its text is prepared."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer

from oobleckd.ctl import data, jobs, look, samples
from oobleckd.host.jobfile import load_job
from oobleckd.prepare import build
from oobleckd.prepare.build import PrepareProgress
from oobleckd.protocol.jobviews import PreparingView
from oobleckd.protocol.samplerows import FILL, Border, SampleRow, SampleRows
from tests.helpers import chat_templates
from tests.helpers.api_server import job_view
from tests.helpers.chats import chat, chat_tokenizer, write_lines
from tests.helpers.corpora import DOCUMENTS, make_tokenizer
from tests.helpers.one_process import OneProcess
from tests.helpers.prepared import prepared
from tests.unit.ctl.conftest import Ctl

JobFile = Callable[[str], Path]


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "Pool", OneProcess)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "t.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    return file


@pytest.fixture
def rows_job(job_file: JobFile, text: Path, tmp_path: Path) -> Path:
    make_tokenizer(tmp_path / "tokenizer")
    return job_file(f'[data]\nsource = "jsonl"\npath = "{text}"\ntokenizer = "{tmp_path}/tokenizer"\n')


def test_prepare_prints_the_folder_and_then_finds_it(ctl: Ctl, rows_job: Path, tmp_path: Path) -> None:
    first = ctl("data", "prepare", str(rows_job))
    assert first.exit_code == 0
    folder = Path(first.stdout.strip())
    assert folder.parent == tmp_path / "prepared"
    told = ctl.json("data", "prepare", str(rows_job))
    assert (told["kind"], told["folder"], told["new"]) == ("PreparedData", str(folder), False)
    assert (told["documents"], told["num_bad_rows"], told["eos"]) == (len(DOCUMENTS), 0, 0)
    assert not ctl.api.asked


def test_rows_that_are_left_out_are_named(ctl: Ctl, rows_job: Path, text: Path) -> None:
    with text.open("a") as file:
        file.write("no JSON\n" * 7)
    refused = ctl("data", "prepare", str(rows_job))
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert f"error: {text}:{len(DOCUMENTS) + 1}: not JSON" in refused.stderr
    rows_job.write_text(rows_job.read_text() + 'on_bad_row = "skip"\n')
    done = ctl("data", "prepare", str(rows_job))
    assert done.exit_code == 0
    assert done.stderr.count(f"left out: {text}:") == 5
    assert "7 rows in all" in done.stderr


def test_stats_count_what_the_job_reads(ctl: Ctl, rows_job: Path) -> None:
    assert ctl("data", "stats", str(rows_job)).exit_code == 2
    made = json.loads(ctl("data", "prepare", str(rows_job), "-o", "json").stdout)
    told = ctl.json("data", "stats", str(rows_job))
    assert told["documents"] == len(DOCUMENTS)
    assert (told["sequences"], told["left_over"]) == divmod(made["tokens"], 8)
    assert told["epochs"] == 12 / told["sequences"]
    assert told["median"] <= told["longest"] < made["tokens"]
    shown = ctl("data", "stats", str(rows_job)).stdout
    assert f"{made['tokens']:,} of uint16" in shown


def test_samples_of_a_job_that_is_not_prepared_are_refused(ctl: Ctl, rows_job: Path) -> None:
    result = ctl("data", "show", "--step=1", str(rows_job))
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"`oobleckctl data prepare {rows_job}`" in result.stderr


def test_submit_leaves_to_a_node_what_is_not_prepared(
    ctl: Ctl, rows_job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(look, "run_worker", lambda *words: asked.append(words) or "{}")
    dry = ctl("submit", "--dry-run", str(rows_job))
    assert (dry.exit_code, ctl.api.asked) == (0, [])
    assert "a node does that first" in dry.stdout
    far = PreparingView("n1", "tokenize", "", 1 << 20, 1 << 30, float(1 << 20), 1023.0)
    monkeypatch.setattr("oobleckd.ctl.waiting._SURE_S", 0.0)
    ctl.api.jobs = [job_view(state="preparing", reason="n1 tokenizes", preparing=far)]
    done = ctl("submit", str(rows_job))
    assert done.exit_code == 0
    assert "n1 tokenizes" in done.stderr
    assert [words[-1] for words in asked] == ["--no-data"] * 2
    (handed,) = [body for body in ctl.api.asked if str(rows_job.parent) in str(body)]
    assert "'prepared': ''" in str(handed)


def test_submit_waits_for_data_that_is_prepared_soon(
    ctl: Ctl, rows_job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look, "run_worker", lambda *_words: "{}")
    far = PreparingView("n1", "tokenize", "", 1 << 20, 3 << 20, float(1 << 20), 2.0)
    views = iter(
        [
            job_view(state="preparing", preparing=PreparingView("n1", "look")),
            job_view(state="preparing", preparing=far),
            job_view(state="failed", reason="t.jsonl:3: no JSON", cause="data-unprepared"),
        ]
    )
    monkeypatch.setattr("oobleckd.client.Client.job", lambda *_words: next(views))
    monkeypatch.setattr("oobleckd.ctl.waiting._LOOK_EVERY_S", 0.0)
    done = ctl("submit", str(rows_job))
    assert done.exit_code == 2
    assert "t.jsonl:3: no JSON" in done.stderr


def test_the_same_job_is_found_while_one_of_them_lacks_its_folder(
    ctl: Ctl, rows_job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look, "run_worker", lambda *_words: "{}")
    job = load_job(rows_job)
    for folder in ("", "/prepared/by/a/node"):
        spec = msgspec.structs.replace(job, data=msgspec.structs.replace(job.data, prepared=folder))
        ctl.api.jobs = [job_view(state="running", spec=spec)]
        done = ctl("submit", "--if-new", str(rows_job))
        assert (done.exit_code, done.stdout.strip()) == (0, ctl.api.jobs[0].id)
    others = msgspec.structs.replace(job, data=msgspec.structs.replace(job.data, column="body"))
    assert not jobs._alike(job, others)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("column", "txt", "data.column: {text} has no column 'txt'; it has text"),
        ("path", "{text}.gone", "data.path: {text}.gone does not exist"),
        ("path", "{text}/*.none", "data.path: {text}/*.none matches no file"),
        ("tokenizer", "/none", "data.tokenizer: /none does not exist"),
        ("dtype", "uint8", "data.dtype: uint8 has no room for a tokenizer of 300 tokens"),
    ],
)
def test_what_cannot_be_prepared_is_found_before_a_node_is_asked(
    ctl: Ctl, rows_job: Path, text: Path, key: str, value: str, problem: str
) -> None:
    lines = [line for line in rows_job.read_text().splitlines() if not line.startswith(f"{key} =")]
    rows_job.write_text("\n".join([*lines, f'{key} = "{value.format(text=text)}"']) + "\n")
    for words in (("submit", "--dry-run"), ("data", "prepare")):
        result = ctl(*words, str(rows_job))
        assert result.exit_code == 2
        assert result.stderr.startswith(f"error: {rows_job}: {problem.format(text=text)}")


def test_submit_hands_in_the_folder(
    ctl: Ctl, rows_job: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ctl("data", "prepare", str(rows_job)).stdout.strip()
    asked = []
    monkeypatch.setattr(
        look, "run_worker", lambda *words: asked.append(load_job(Path(words[2])).data.prepared) or "{}"
    )
    ctl.api.jobs = [job_view(state="deploying")]
    assert ctl("submit", str(rows_job)).exit_code == 0
    assert asked == [folder]
    (handed,) = [body for body in ctl.api.asked if "submit" in str(body) or folder in str(body)]
    assert folder in str(handed)
    text.write_text('{"text": "other"}\n')
    ctl("submit", str(rows_job))
    assert folder not in str(ctl.api.asked[-1])


def test_plan_looks_at_the_model_where_the_text_is_not_prepared(
    ctl: Ctl, rows_job: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(look, "run_worker", lambda *words: asked.append(words[-1]) or "{}")
    for _ in range(2):
        result = ctl("plan", str(rows_job), "--nodes=3")
        assert result.exit_code == 0
        assert "nobody has looked at it" in result.stderr
        text.unlink(missing_ok=True)
    assert asked == ["--no-data"] * 2


def test_what_needs_no_preparing_says_so(ctl: Ctl, job_file: JobFile) -> None:
    for verb, said in (("prepare", "nothing to prepare"), ("stats", "no tokens to count")):
        result = ctl("data", verb, str(job_file("")))
        assert result.exit_code == 2
        assert f"there {'is' if verb == 'prepare' else 'are'} {said}" in result.stderr


def test_stats_count_the_tokens_of_others_too(ctl: Ctl, job_file: JobFile, tmp_path: Path) -> None:
    (tmp_path / "t.bin").write_bytes(bytes(range(1, 101)))
    told = ctl.json(
        "data",
        "stats",
        str(job_file(f'[data]\nsource = "bin"\npath = "{tmp_path}/t.bin"\ndtype = "uint8"\n')),
    )
    assert (told["tokens"], told["sequences"], told["left_over"], told["documents"]) == (100, 12, 4, 0)
    other = make_folder(tmp_path / ("1" * 32))
    told = ctl.json("data", "stats", str(job_file(f'[data]\nsource = "megatron"\npath = "{other}/tokens"\n')))
    assert (told["documents"], told["longest"], told["mean"]) == (2, 30, 20.0)


def make_folder(folder: Path) -> Path:
    return prepared(folder, [np.arange(10), np.arange(30)], "uint16")


# --------------------------------------------------------------------------- show

ROW = SampleRow(
    7, 0, 56, (5, 6, 7, 0, 8, 9, 10, 11), (5, 6, 7, 0, 8, 9, 10, 11), (1, 2, 3, 4, 5, 6, 7),
    (Border(0, 3, 12), Border(4, 4)),
)  # fmt: skip


def _shown(ctl: Ctl, file: Path, row: SampleRow, monkeypatch: pytest.MonkeyPatch, *more: str) -> Any:
    def run_worker(module: str, *words: str) -> str:
        assert module == "oobleckd.worker.tools.samples"
        assert words[2:4] == ("--step", "2")
        return msgspec.json.encode(SampleRows(2, int(words[5]), (row,))).decode()

    monkeypatch.setattr(samples, "run_worker", run_worker)
    return ctl("data", "show", str(file), "--step=2", *more)


def test_show_has_a_line_for_each_document_of_a_row(
    ctl: Ctl, rows_job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctl("data", "prepare", str(rows_job))
    lines = _shown(ctl, rows_job, ROW, monkeypatch, "--micro-batch=1").stdout.splitlines()
    assert lines[0].startswith("step 2, micro-batch 1, row 0: sample 7 (pass 1, from token 56 on)")
    assert lines[1] == "  [0, 4) document 3, from its token 12 on"
    assert lines[2].endswith("<|endoftext|>")
    assert lines[3] == "  [4, 8) document 4"
    documents = _shown(ctl, rows_job, ROW, monkeypatch, "-o", "json").stdout.splitlines()
    assert [json.loads(each)["micro_batch"] for each in documents] == [0, 1]


def test_show_says_what_fills_a_row_up(ctl: Ctl, rows_job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ctl("data", "prepare", str(rows_job))
    row = msgspec.structs.replace(ROW, borders=(Border(0, 3), Border(6, FILL)))
    lines = _shown(ctl, rows_job, row, monkeypatch, "--micro-batch=1").stdout.splitlines()
    assert (lines[1], lines[3:]) == ("  [0, 6) document 3", ["  [6, 8) fill"])


def test_rows_are_packed_where_a_job_wants_it(ctl: Ctl, rows_job: Path, tmp_path: Path) -> None:
    folder = ctl("data", "prepare", str(rows_job)).stdout.strip()
    rows_job.write_text(rows_job.read_text() + 'sequences = "packed"\n')
    assert "a node does that first" in ctl("submit", "--dry-run", str(rows_job)).stdout
    without = rows_job.read_text()
    for words, named in ((("data", "stats"), ""), (("submit", "--dry-run"), f'prepared = "{folder}"\n')):
        rows_job.write_text(without + named)
        refused = ctl(*words, str(rows_job))
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert "is prepared, but not packed into rows of 8 tokens" in refused.stderr
        assert f"`oobleckctl data prepare {rows_job}`" in refused.stderr
    rows_job.write_text(without)
    packed = ctl("data", "prepare", str(rows_job))
    assert packed.stdout.strip() == folder
    assert "packed into" in packed.stderr
    told = ctl.json("data", "prepare", str(rows_job))
    stats = ctl.json("data", "stats", str(rows_job))
    assert (stats["rows"], stats["sequences"]) == ("packed", told["rows"])
    assert stats["padding"] == told["padding"] > 0
    assert f"{stats['targets']:,} in a pass" in ctl("data", "stats", str(rows_job)).stdout
    rows_job.write_text(rows_job.read_text() + f'prepared = "{folder}"\non_long_document = "skip"\n')
    assert "not packed" in ctl("data", "stats", str(rows_job)).stderr
    assert ctl("data", "prepare", str(rows_job)).exit_code == 2  # all are longer
    (tmp_path / "t.jsonl").unlink()
    rows_job.write_text(rows_job.read_text().replace("sequence = 8", "sequence = 64"))
    assert ctl("data", "prepare", str(rows_job)).stdout.strip() == folder


def test_show_decodes_bytes_and_lets_nothing_out(
    ctl: Ctl, job_file: JobFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = msgspec.structs.replace(ROW, tokens=tuple(b"a\x1b[2Jb\n\xff"), borders=())
    shown = _shown(ctl, job_file(""), row, monkeypatch, "--micro-batch=0").stdout
    assert shown.splitlines()[1:] == ["  a\\x1b[2Jb\\n\N{REPLACEMENT CHARACTER}"]


def test_show_leaves_numbers_where_there_is_no_tokenizer(
    ctl: Ctl, job_file: JobFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.bin").write_bytes(bytes(64))
    file = job_file(f'[data]\nsource = "tokens"\npath = "{tmp_path}/t.bin"\n')
    shown = _shown(ctl, file, ROW, monkeypatch, "--micro-batch=0").stdout
    assert shown.splitlines()[2] == "  5 6 7 0"


@pytest.mark.parametrize("words", [("--step=4",), ("--step=1", "--micro-batch=2"), ("--step=0",), ()])
def test_show_refuses_what_the_job_has_not(ctl: Ctl, job_file: JobFile, words: tuple[str, ...]) -> None:
    assert ctl("data", "show", str(job_file("")), *words).exit_code == 2


def test_a_ramped_step_has_fewer_micro_batches_and_the_ramp_is_said(ctl: Ctl, tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(
        """name = "ramped"
        [train]
        steps = 9
        global_batch = 8
        micro_batch = 2
        sequence = 8
        batch_ramp = { start = 2, increment = 2, samples = 9 }
        """,
        encoding="utf-8",
    )
    shown = ctl("data", "show", str(file), "--step=3", "--micro-batch=2")
    assert (shown.exit_code, "step 3 has 2 micro-batches, and no number 2" in shown.stderr) == (2, True)
    said = ctl("submit", "--dry-run", str(file)).stdout
    assert "2 sequences at first, 2 more at a time, all 8 from step 5 on" in said
    short = ctl("submit", "--dry-run", str(file), "--set", "train.steps=4").stdout
    assert "2 more at a time, and 6 in the last step, before the ramp is over" in short


# --------------------------------------------------------------------------- progress


def test_progress_is_said_in_lines_with_rate_and_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(data.time, "monotonic", lambda: now)
    pace = data._Shown()
    for second in range(0, 41, 4):
        now = float(second)
        pace.line(PrepareProgress("tokenize", (10 + second) << 20, 110 << 20))
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "tokenizing: 22 MiB of 110 MiB, 1 MiB/s, 1 min 28 s left",
        "tokenizing: 34 MiB of 110 MiB, 1 MiB/s, 1 min 16 s left",
        "tokenizing: 46 MiB of 110 MiB, 1 MiB/s, 1 min 4 s left",
    ]


def test_one_process_a_core_unless_somebody_says_otherwise(
    ctl: Ctl, rows_job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def prepare(job: object, num_processes: int, told: object) -> build.MadeFolder:
        asked.append(num_processes)
        return real(job, num_processes, told)  # type: ignore[arg-type]

    real = build.prepare
    monkeypatch.setattr(data, "prepare", prepare)
    ctl("data", "prepare", str(rows_job))
    ctl("data", "prepare", str(rows_job), "--jobs=3")
    assert asked == [len(os.sched_getaffinity(0)), 3]


# --------------------------------------------------------------------------- several sources


@pytest.fixture
def mixed_job(job_file: JobFile, text: Path, tmp_path: Path) -> Path:
    """Two sources of text, and a file of tokens."""
    make_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "more.jsonl").write_text(text.read_text() * 2)
    np.full(800, 7, "<u2").tofile(tmp_path / "c.bin")
    tables = "".join(
        f'[[data.source]]\nname = "{name}"\nkind = "{kind}"\npath = "{tmp_path}/{path}"\nweight = {weight}\n'
        for name, kind, path, weight in (
            ("a", "jsonl", "t.jsonl", 0.5), ("b", "jsonl", "more.jsonl", 0.25), ("c", "bin", "c.bin", 0.25)
        )
    )  # fmt: skip
    stage = "[[data.stage]]\nfrom_step = 3\nweights = { b = 1, c = 1 }\n"
    return job_file(f'[data]\ntokenizer = "{tmp_path}/tokenizer"\n{tables}{stage}')


def test_each_source_is_prepared_by_itself(ctl: Ctl, mixed_job: Path, tmp_path: Path) -> None:
    refused = ctl("data", "stats", str(mixed_job))
    assert refused.exit_code == 2
    assert f"data.source 'a': {tmp_path}/t.jsonl is not prepared" in refused.stderr
    folders = ctl("data", "prepare", str(mixed_job)).stdout.split()
    again = ctl("data", "prepare", str(mixed_job), "-o", "json").stdout.splitlines()
    told = [json.loads(each) for each in again]
    assert [(each["source"], each["folder"], each["new"]) for each in told] == [
        ("a", folders[0], False), ("b", folders[1], False)
    ]  # fmt: skip
    assert told[1]["documents"] == 2 * told[0]["documents"]


def test_stats_tell_of_each_source_what_the_job_makes_of_it(ctl: Ctl, mixed_job: Path) -> None:
    ctl("data", "prepare", str(mixed_job))
    told = ctl.json("data", "stats", str(mixed_job))
    assert [(each["name"], each["samples"]) for each in told["sources"]] == [("a", 4), ("b", 4), ("c", 4)]
    assert told["sources"][2]["epochs"] == 4 / 100
    assert [(each["first"], each["last"], each["shares"]) for each in told["stages"]] == [
        (1, 2, {"a": 0.5, "b": 0.25, "c": 0.25}),
        (3, 3, {"a": 0.0, "b": 0.5, "c": 0.5}),
    ]
    shown = ctl("data", "stats", str(mixed_job)).stdout.splitlines()
    assert [line.split()[0] for line in shown if line] == ["SOURCE", "a", "b", "c", "STEPS", "1", "3"]
    mixed_job.write_text(mixed_job.read_text().replace("weight = 0.5\n", "weight = 0.5\nepochs = 0.01\n"))
    assert ctl.json("data", "stats", str(mixed_job))["sources"][0]["limit_step"] == 1


def test_submit_hands_in_the_folder_of_each_source(
    ctl: Ctl, mixed_job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = ctl("data", "prepare", str(mixed_job)).stdout.split()
    asked: list[list[str]] = []
    monkeypatch.setattr(
        look,
        "run_worker",
        lambda *words: (
            asked.append([each.prepared for each in load_job(Path(words[2])).data.sources]) or "{}"
        ),
    )
    done = ctl("submit", "--dry-run", str(mixed_job))
    assert done.exit_code == 0
    assert asked == [[*folders, ""]]
    assert "3 sources: a, b, c" in done.stdout


def test_what_is_wrong_with_a_source_is_said_of_it(ctl: Ctl, mixed_job: Path, tmp_path: Path) -> None:
    (tmp_path / "more.jsonl").write_text('{"body": "x"}\n')
    result = ctl("data", "prepare", str(mixed_job))
    assert result.exit_code == 2
    assert (
        f"{mixed_job}: data.source 'b': column: {tmp_path}/more.jsonl has no column 'text'" in result.stderr
    )
    (tmp_path / "c.bin").unlink()
    result = ctl("submit", "--dry-run", str(mixed_job))
    assert f"{mixed_job}: data.source[2].path: {tmp_path}/c.bin does not exist" in result.stderr


def test_show_says_of_which_source_a_row_is(
    ctl: Ctl, rows_job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctl("data", "prepare", str(rows_job))
    row = msgspec.structs.replace(ROW, source="web")
    shown = _shown(ctl, rows_job, row, monkeypatch, "--micro-batch=1").stdout
    assert "sample 7 (of web, pass 1, from token 56 on)" in shown.splitlines()[0]


def test_what_is_asked_for_of_a_chat_is_underlined(
    ctl: Ctl, job_file: JobFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = chat_tokenizer(tmp_path / "tokenizer", chat_templates.ALPACA)
    lines = write_lines(tmp_path / "t.jsonl", {"messages": chat("Hi", "Yes.")})
    file = job_file(
        f'[data]\nsource = "jsonl"\npath = "{lines}"\ntokenizer = "{tokenizer}"\nformat = "chat"\n'
    )
    file.write_text(file.read_text().replace("sequence = 8", "sequence = 64"))
    assert 0 < ctl.json("data", "prepare", str(file))["asked"] < 20
    said: list[str] = []

    def style(text: str, *, underline: bool = False, **_more: object) -> str:
        if underline:
            said.append(text)
        return text

    monkeypatch.setattr(samples.click, "style", style)
    row = SampleRow(0, 0, 0, tuple(b"ab-cd"), tuple(b"ab-cd"), (1, 2, 4), (Border(0, 0), Border(3, 1)))
    shown = _shown(ctl, file, row, monkeypatch, "--micro-batch=0")
    assert shown.exit_code == 0, shown.stderr
    loaded = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    assert said == [loaded.decode(list(b"b-")), loaded.decode(list(b"d"))]
