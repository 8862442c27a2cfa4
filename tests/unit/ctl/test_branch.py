"""``submit --resume JOB[@STEP]``: which checkpoint, what is told, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from oobleckd.protocol.job import Job, parse_job
from oobleckd.protocol.jobviews import KeptView
from oobleckd.protocol.requests import Accepted
from tests.helpers.api_server import job_spec, job_view
from tests.unit.ctl.conftest import Ctl

KEPT = (KeptView(100, "/c/step-00000100"), KeptView(200, "/c/step-00000200"))


def spec(**train: Any) -> Job:
    table = msgspec.to_builtins(job_spec())
    return parse_job(table | {"train": table["train"] | {"steps": 200} | train})


@pytest.fixture
def cluster(ctl: Ctl) -> Ctl:
    ctl.api.jobs = [job_view(id="small-1", spec=spec(), kept=KEPT, finished_at=1.0)]
    ctl.api.on_act = lambda _path, _body: Accepted("small-2", "small-2 starts now")
    return ctl


def submitted(ctl: Ctl) -> tuple[Job, str]:
    (_, body) = ctl.api.asked[-1]
    return parse_job(body["job"]), body["resume"]


def go(ctl: Ctl, *words: str) -> str:
    """Hand it in; all that a person is told."""
    result = ctl("submit", *words, "--no-wait")
    assert (result.exit_code, result.stdout) == (0, "small-2\n"), result.stderr
    return result.stderr


@pytest.mark.parametrize(("named", "place"), [("small-1", 1), ("small-1@200", 1), ("small-1@100", 0)])
def test_a_job_goes_on_without_a_file(cluster: Ctl, named: str, place: int) -> None:
    told = go(cluster, "--resume", named, "--set", "train.steps=300")
    job, resume = submitted(cluster)
    assert (job, resume) == (spec(steps=300), KEPT[place].directory)
    assert f"step {KEPT[place].step:,}" in told
    assert f"train.steps 200 -> 300: changes the bits from step {KEPT[place].step + 1} on" in told


def test_whether_it_is_a_run_of_its_own(cluster: Ctl) -> None:
    """Half a cosine over other steps had other rates before; a stable rate had not."""
    cosine = go(cluster, "--resume", "small-1", "--set", "train.steps=300")
    stable = parse_job(msgspec.to_builtins(spec()) | {"optimizer": {"schedule": "wsd"}})
    cluster.api.jobs = [job_view(id="small-1", spec=stable, kept=KEPT)]
    said = ("--set", "train.steps=300", "--set", "optimizer.decay_steps=100")
    wsd = go(cluster, "--resume", "small-1", *said)
    cluster.api.jobs = [job_view(id="small-1", spec=stable, kept=KEPT, start_step=50)]
    branched = go(cluster, "--resume", "small-1", *said)
    assert [text.count("the same bits as a run") for text in (cosine, wsd, branched)] == [0, 1, 0]
    assert submitted(cluster)[0].optimizer.decay_steps == 100


def test_a_file_says_what_the_job_is(cluster: Ctl, job_file: Callable[[str], Path]) -> None:
    told = go(
        cluster, str(job_file("[optimizer]\nlr = 0.5\n")), "--resume", "small-1", "--set", "train.steps=250"
    )
    assert submitted(cluster)[0].optimizer.lr == 0.5
    assert "train.steps 200 -> 250, optimizer.lr" in told


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--resume", "nobody"), ["nobody is no job"]),
        (("--resume", "small-1@150"), ["after 150 steps", "100, 200", "the newest 2 stay (checkpoint.keep)"]),
        (("--resume", "small-1"), ["train.steps = 200", "200 steps already", "--set train.steps="]),
        (("--resume", "small-1", "--set", "model.config.n_embd=8"), ["model.config.n_embd", "another model"]),
        (("--resume", "small-1", "--set", "train.steps=x"), ["--set train.steps=x"]),
        ((), ["Missing argument 'FILE'"]),
    ],
)
def test_what_cannot_go_on_is_refused(cluster: Ctl, words: tuple[str, ...], says: list[str]) -> None:
    result = cluster("submit", *words)
    assert result.exit_code == 2
    assert not cluster.api.asked
    assert [text for text in says if text not in result.stderr] == []


def test_other_samples_are_to_be_meant(cluster: Ctl, job_file: Callable[[str], Path]) -> None:
    """A file that says another seed may be another file; who writes it behind --set has said so."""
    file = job_file('[data]\nsource = "stdlib"\n[eval]\nheld_out = 0.1\nsequences = 2\nevery = 1\n')
    words = (str(file), "--resume", "small-1@100", "--set", "train.steps=300")
    refused = cluster("submit", *words)
    assert refused.exit_code == 2
    assert "eval.held_out" in refused.stderr
    assert "--set eval.held_out=" in refused.stderr
    told = go(cluster, *words, "--set", "eval.held_out=0.1")
    assert "other samples from step 101 on" in told


def test_a_job_without_a_checkpoint_says_how_it_gets_one(cluster: Ctl) -> None:
    cluster.api.jobs = [job_view(id="small-1", spec=spec(), state="running", finished_at=None)]
    result = cluster("submit", "--resume", "small-1")
    assert result.exit_code == 2
    assert "oobleckctl checkpoint small-1 --wait" in result.stderr


def test_a_folder_of_that_name_is_a_folder(
    cluster: Ctl, job_file: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small-1").mkdir()
    monkeypatch.chdir(tmp_path)
    cluster("submit", str(job_file("")), "--resume", "small-1", "--no-wait")
    assert submitted(cluster)[1] == str(tmp_path / "small-1")
