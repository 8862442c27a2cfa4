"""The verb ``eval``: which checkpoint and which text it takes, the job that it hands in, and its refusals."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from oobleckd.protocol.api import Problem
from oobleckd.protocol.evalviews import EvaluationView, SourceLoss
from oobleckd.protocol.job import Job, parse_job
from oobleckd.protocol.requests import Accepted
from tests.helpers.api_server import job_spec, job_view
from tests.helpers.runs import write_checkpoint
from tests.unit.ctl.conftest import Ctl

LOSS = 2.0794415416798357


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "wiki.txt"
    file.write_text("text " * 1000, encoding="utf-8")
    return file


@pytest.fixture
def cluster(ctl: Ctl, tmp_path: Path) -> Ctl:
    """A job with a checkpoint, on a cluster that is through with every further job at once."""
    place = write_checkpoint(tmp_path / "step-00000003", extra={"spec": spec_table()})
    ctl.api.jobs = [job_view(checkpoint=str(place), checkpoint_step=3)]
    ctl.api.on_act = lambda _path, body: ended(ctl, body)
    return ctl


def spec_table() -> dict[str, Any]:
    table: dict[str, Any] = msgspec.to_builtins(job_spec())
    return table


def ended(ctl: Ctl, body: dict[str, Any], **changes: Any) -> Accepted:
    spec = parse_job(body["job"])
    ctl.api.jobs.append(job_view(id=f"{spec.name}-2", spec=spec, step=spec.train.steps, **changes))
    found = tuple(
        SourceLoss(name, loss, loss.hex(), 8.0, 64)
        if math.isfinite(loss)
        else SourceLoss(name, None, "nan", None, 64)
        for name, loss in zip(spec.eval_sources, (LOSS, math.nan), strict=False)
    )
    ctl.api.evaluations[f"{spec.name}-2"] = [EvaluationView(3, LOSS, found, 1, 0.0, 1.0)]
    return Accepted(f"{spec.name}-2", f"{spec.name}-2 is queued: waits for job-1 to end")


def submitted(ctl: Ctl) -> tuple[Job, str]:
    (_, body) = ctl.api.asked[-1]
    return parse_job(body["job"]), body["resume"]


def test_a_job_with_only_its_evaluation_left(cluster: Ctl, text: Path) -> None:
    result = cluster("eval", "small", "--source", f"wiki={text}", "--source", f"web=text:{text}")
    assert result.exit_code == 0, result.stderr
    assert [line.split() for line in result.stdout.splitlines()] == [
        ["SOURCE", "LOSS", "PERPLEXITY", "TOKENS"],
        ["wiki", "2.0794", "8", "64"],
        ["web", "-", "-", "64"],
    ]
    job, resume = submitted(cluster)
    before = cluster.api.jobs[0]
    assert (job.name, job.train, resume) == ("small-eval", before.spec.train, before.checkpoint)
    assert (job.eval.every, job.eval.at_start, job.eval.at_end) == (0, False, True)
    assert [(each.name, each.kind, each.path) for each in job.eval.source] == [
        ("wiki", "text", str(text)), ("web", "text", str(text)),
    ]  # fmt: skip
    assert "queued: waits for job-1 to end" in result.stderr
    assert f"evaluates step 3 in {before.checkpoint}" in result.stderr


def test_the_jobs_own_text_is_the_default(cluster: Ctl, text: Path) -> None:
    own = job_spec(eval={"every": 2, "sequences": 4, "held_out": 0.1, "at_start": True})
    cluster.api.jobs[0] = msgspec.structs.replace(cluster.api.jobs[0], spec=own)
    assert cluster("eval", "small").exit_code == 0
    assert submitted(cluster)[0].eval == msgspec.structs.replace(own.eval, every=0, at_start=False)
    assert cluster("eval", "job-1", "--source", f"a={text}", "--sequences", "8").exit_code == 0
    table = submitted(cluster)[0].eval
    assert (table.held_out, table.sequences, len(table.source)) == (0.0, 8, 1)


def test_text_of_a_job_file(cluster: Ctl, text: Path, job_file: Callable[[str], Path]) -> None:
    file = job_file(f'[eval]\nsequences = 6\n[[eval.source]]\nname = "a"\nkind = "text"\npath = "{text}"\n')
    assert cluster("eval", "small", "--from", str(file)).exit_code == 0
    assert submitted(cluster)[0].eval.sequences == 6


def test_a_folder(cluster: Ctl, text: Path) -> None:
    place = cluster.api.jobs.pop().checkpoint
    document = cluster.json("eval", place, "--source", f"a={text}")
    assert document["items"] == [
        {"source": "a", "loss": LOSS, "loss_hex": LOSS.hex(), "perplexity": 8.0, "targets": 64}
    ]
    job, resume = submitted(cluster)
    assert (job.train.steps, resume) == (3, place)


def test_where_a_manifest_would_have_checkpoints_written_is_left_out(cluster: Ctl, text: Path) -> None:
    spec = job_spec(checkpoint={"dir": "/etc", "every": 1})
    cluster.api.jobs[0] = msgspec.structs.replace(cluster.api.jobs[0], spec=spec)
    assert cluster("eval", "small", "--source", f"a={text}").exit_code == 0
    assert submitted(cluster)[0].checkpoint.dir == ""


def test_a_mixture_that_changes_later(cluster: Ctl, text: Path) -> None:
    sources = [
        {"name": name, "kind": "text", "path": str(text), "weight": float(name == "a")} for name in "ab"
    ]
    stage = [{"from_step": 3, "weights": {"b": 1.0}}]
    spec = job_spec(data={"source": sources, "stage": stage}, eval={"held_out": 0.1, "sequences": 2})
    cluster.api.jobs[0] = msgspec.structs.replace(cluster.api.jobs[0], spec=spec, checkpoint_step=2)
    result = cluster("eval", "small")
    assert result.exit_code == 0, result.stderr
    assert submitted(cluster)[0].train.steps == 2


def test_without_waiting(cluster: Ctl, text: Path) -> None:
    result = cluster("eval", "small", "--source", f"a={text}", "--no-wait")
    assert (result.exit_code, result.stdout) == (0, "small-eval-2\n")
    document = cluster.json("eval", "small", "--source", f"a={text}", "--no-wait")
    assert (document["kind"], document["id"]) == ("Submitted", "small-eval-2")


@pytest.mark.parametrize(("cause", "code"), [("", 1), ("data-changed", 7), ("out-of-memory", 8)])
def test_it_ends_as_its_job_does(cluster: Ctl, text: Path, cause: str, code: int) -> None:
    cluster.api.on_act = lambda _path, body: ended(cluster, body, state="failed", cause=cause, reason="why")
    result = cluster("eval", "small", "--source", f"a={text}")
    assert (result.exit_code, result.stdout) == (code, "")
    assert "small-eval failed" in result.stderr


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("nobody",), "nobody is no job, and no folder"),
        (("./nowhere",), "nowhere: is no folder"),
        (("small",), "the job has no [eval], so nothing says on what to evaluate it"),
        (("small", "--source", "TEXT"), "has no name"),
        (("small", "--source", "a="), "has no path"),
        (("small", "--source", "a=/no/such"), "--source a: /no/such does not exist"),
        (
            ("small", "--source", "a=TEXT", "--source", "a=TEXT"),
            "eval.source[1].name: 'a' is another one's name",
        ),
        (("small", "--source", "A=TEXT"), "eval.source[0].name"),
        (
            ("small", "--source", "a=TEXT", "--sequences", "1"),
            "eval.sequences: 1 are less than a micro-batch",
        ),
        (("small", "--source", "a=TEXT", "--from", "TEXT"), "both say on what to evaluate"),
    ],
)
def test_mistakes_are_one_sentence(
    cluster: Ctl, text: Path, words: tuple[str, ...], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(text.parent)
    result = cluster("eval", *(word.replace("TEXT", str(text)) for word in words))
    assert (result.exit_code, result.stdout) == (2, "")
    assert problem in result.stderr.splitlines()[0]
    assert cluster.api.asked == []


def test_what_has_no_checkpoint(cluster: Ctl) -> None:
    cluster.api.jobs[0] = job_view(state="running", step=2)
    result = cluster("eval", "small")
    assert result.exit_code == 2
    assert "job-1 is running at step 2 and has no checkpoint yet" in result.stderr
    assert "hint: `oobleckctl checkpoint job-1 --wait` has it write one" in result.stderr


def test_folders_that_are_no_checkpoints(cluster: Ctl, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "step-00000001.partial").mkdir()
    (tmp_path / "empty").mkdir()
    early = write_checkpoint(tmp_path / "early", step=0, extra={"spec": spec_table()})
    other = write_checkpoint(tmp_path / "other")
    for name, problem in {
        "model": "has a model of transformers",
        "step-00000001.partial": "is no complete checkpoint",
        "empty": "it has no manifest.json",
        early.name: "is from before the first step",
        other.name: "manifest.json: cannot be read",
    }.items():
        result = cluster("eval", str(tmp_path / name))
        assert result.exit_code == 2, (name, result.stderr)
        assert problem in result.stderr


def test_a_refusal_is_passed_on(cluster: Ctl, text: Path) -> None:
    cluster.api.on_act = lambda _path, _body: Problem("forbidden", 403, "not by you")
    result = cluster("eval", "small", "--source", f"a={text}", "-o", "json")
    assert result.exit_code == 5
    assert json.loads(result.stderr.splitlines()[-1])["problem"] == "not by you"
