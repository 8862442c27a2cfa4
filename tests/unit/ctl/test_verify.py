"""The verb ``verify``: which runs it compares, when it refuses to, what it keeps."""

from __future__ import annotations

import math
import threading
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from oobleckd.ctl import reference
from oobleckd.ctl.compare import CompareError, StepFact
from oobleckd.protocol.job import Job, parse_job, table_of
from oobleckd.protocol.jobviews import JobView, StepView
from oobleckd.protocol.requests import Accepted
from tests.helpers.api_server import job_spec, job_view, node_view
from tests.helpers.runs import facts, flip_bit, seal, write_checkpoint
from tests.unit.ctl.conftest import Ctl


def step_views(steps: tuple[StepFact, ...]) -> list[StepView]:
    return [
        StepView(s.step, s.loss, s.loss_hex, 1.0, 1e-3, s.samples, s.ledger, "applied", 1, 0.0) for s in steps
    ]


@pytest.fixture
def cluster(ctl: Ctl, tmp_path: Path) -> Ctl:
    """A job that is done, on a cluster that runs every further job well."""
    ctl.api.jobs = [job_view(checkpoint=str(write_checkpoint(tmp_path / "ours")), incidents=2)]
    ctl.api.steps["job-1"] = step_views(facts())
    ctl.api.nodes = [node_view("node-1")]
    ctl.api.on_act = lambda _path, body: run_reference(ctl, tmp_path, body)
    return ctl


def run_reference(ctl: Ctl, folder: Path, body: dict[str, Any], **changes: Any) -> Accepted:
    """Run a job to its end at once, as a cluster would in an hour."""
    number = len(ctl.api.jobs) + 1
    spec = parse_job(body["job"])
    checkpoint = write_checkpoint(folder / f"reference-{number}")
    usual: dict[str, Any] = {"id": f"job-{number}", "spec": spec, "checkpoint": str(checkpoint)}
    ctl.api.jobs.append(job_view(**(usual | changes)))
    ctl.api.steps[f"job-{number}"] = step_views(facts())
    return Accepted(f"job-{number}", "queued")


def test_identical(cluster: Ctl) -> None:
    result = cluster("verify", "small")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("ledger: 12 samples in 3 steps")
    assert result.stderr.startswith("verify trains small again, 3 steps, without failures: about 1 s\n")
    assert lines[-1].startswith("verified: 3 of 3 losses and 4 of 4 weight tensors are bit-identical")
    submitted = parse_job(cluster.api.asked[0][1]["job"])
    assert submitted.name == "small-reference"
    assert submitted.train == job_spec().train


def test_a_job_that_stopped_at_skipped_steps_is_judged(cluster: Ctl, tmp_path: Path) -> None:
    end: dict[str, Any] = {"state": "failed", "cause": "not-finite", "step": 3, "checkpoint": ""}
    steps = [
        StepView(n, math.nan, "nan", 0.0, 0.0, 4, f"samples-of-{n}", "skipped", 1, 0.0) for n in (1, 2, 3)
    ]
    cluster.api.jobs = [job_view(**end)]
    cluster.api.steps["job-1"] = cluster.api.steps["job-2"] = steps

    def run(_path: str, body: dict[str, Any]) -> Accepted:
        answer = run_reference(cluster, tmp_path, body, **end)
        cluster.api.steps[answer.id] = steps
        return answer

    cluster.api.on_act = run
    for _ in range(2):  # the second time the reference run is the one that was kept
        result = cluster("verify", "small")
        assert result.exit_code == 0, result.stderr
        assert "verified: 3 of 3 losses are bit-identical" in result.stdout
    assert len(cluster.api.asked) == 1


def test_a_job_that_failed_otherwise_is_not(cluster: Ctl) -> None:
    cluster.api.jobs = [job_view(state="failed", cause="out-of-memory")]
    assert cluster("verify", "small").exit_code == 5


def test_the_reference_run_is_kept(cluster: Ctl) -> None:
    assert cluster("verify", "job-1").exit_code == 0
    assert cluster("verify", "job-1").exit_code == 0
    assert len(cluster.api.asked) == 1
    assert cluster("verify", "job-1", "--fresh").exit_code == 0
    assert len(cluster.api.asked) == 2


def test_a_reference_run_of_one_process_serves_every_job_that_trains_the_same(
    cluster: Ctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def run(job: Job, _out: Path) -> reference.ReferenceRun:
        ran.append(job.name)
        return reference.ReferenceRun(
            str(write_checkpoint(tmp_path / f"single-{len(ran)}")), facts(), ("cpu",)
        )

    monkeypatch.setattr(reference, "run_single", run)
    usual = msgspec.to_builtins(job_spec())
    rerouted = {"fault_tolerance": {"policy": "slipstream"}, "schedule": {"backward": "decoupled"}}
    seeded = {"train": usual["train"] | {"seed": 1}}
    for number, changed in enumerate((rerouted, seeded), 2):
        spec = parse_job(usual | changed | {"name": f"other-{number}"})
        checkpoint = write_checkpoint(tmp_path / f"other-{number}")
        cluster.api.jobs.append(job_view(id=f"job-{number}", spec=spec, checkpoint=str(checkpoint)))
        cluster.api.steps[f"job-{number}"] = step_views(facts())
    results = [cluster("verify", f"job-{number}", "--single") for number in (1, 2, 3)]
    assert [result.exit_code for result in results] == [0, 0, 0]
    assert ran == ["small", "other-3"]
    assert "kept from before" in results[1].stderr


def test_who_wants_a_reference_run_that_is_being_made_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "verify" / "one.json"
    held, waited_for = threading.Event(), threading.Event()

    def make() -> None:
        with reference.made_once(file):
            held.set()
            waited_for.wait()
            reference.keep(
                file, reference.ReferenceRun(str(write_checkpoint(tmp_path / "theirs")), facts(), ("cpu",))
            )

    def noted(text: str) -> None:
        assert "waiting for another verify" in text
        waited_for.set()

    monkeypatch.setattr(reference, "note", noted)
    other = threading.Thread(target=make)
    other.start()
    held.wait()
    with reference.made_once(file):
        assert reference.recall(file) is not None
    other.join()


def test_a_kept_reference_run_without_its_checkpoint_is_run_again(cluster: Ctl) -> None:
    assert cluster("verify", "job-1").exit_code == 0
    (Path(cluster.api.jobs[-1].checkpoint) / "manifest.json").unlink()
    assert cluster("verify", "job-1").exit_code == 0
    assert len(cluster.api.asked) == 2


def test_a_difference_is_exit_1_and_named(cluster: Ctl) -> None:
    folder = Path(cluster.api.jobs[0].checkpoint)
    flip_bit(sorted(folder.glob("*.safetensors"))[2])
    seal(folder)
    result = cluster("verify", "job-1")
    assert result.exit_code == 1
    assert "3 of 4 weight tensors" in result.stdout
    assert "param/h.0.bias" in result.stdout.splitlines()[-1]
    assert cluster("verify", "job-1", "-o", "json").exit_code == 1


def test_damage_on_disk_is_exit_1(cluster: Ctl) -> None:
    flip_bit(sorted(Path(cluster.api.jobs[0].checkpoint).glob("*.safetensors"))[2])
    result = cluster("verify", "job-1")
    assert result.exit_code == 1
    assert "is not what was written" in result.stderr
    assert not result.stdout


def test_json(cluster: Ctl) -> None:
    found = cluster.json("verify", "job-1")
    assert (found["kind"], found["identical"], found["num_weights"]) == ("Verdict", True, 4)


def test_a_reference_run_with_failures_is_run_again(cluster: Ctl, tmp_path: Path) -> None:
    unlucky = iter([2, 1, 0])
    cluster.api.on_act = lambda _path, body: run_reference(cluster, tmp_path, body, incidents=next(unlucky))
    assert cluster("verify", "job-1").exit_code == 0
    assert len(cluster.api.asked) == 3


def test_a_reference_run_that_never_comes_through(cluster: Ctl, tmp_path: Path) -> None:
    cluster.api.on_act = lambda _path, body: run_reference(cluster, tmp_path, body, incidents=1)
    result = cluster("verify", "job-1")
    assert result.exit_code == 1
    assert "met failures 3 times" in result.stderr


def test_a_reference_run_that_fails(cluster: Ctl, tmp_path: Path) -> None:
    cluster.api.on_act = lambda _path, body: run_reference(
        cluster, tmp_path, body, state="failed", reason="disk"
    )
    result = cluster("verify", "job-1")
    assert result.exit_code == 1
    assert result.stderr.endswith("error: small-reference failed at step 3\nhint: disk\n")


def test_other_texts_are_not_comparable(cluster: Ctl) -> None:
    seal(Path(cluster.api.jobs[0].checkpoint), extra={"corpus": "another"})
    result = cluster("verify", "job-1")
    assert result.exit_code == 1
    assert "not comparable: different texts" in result.stderr


def test_a_daemon_that_knows_no_node_any_more(cluster: Ctl) -> None:
    assert cluster("verify", "job-1").exit_code == 0
    cluster.api.nodes = []
    assert "bit-identical" in cluster("verify", "job-1").stdout


def test_mixed_kinds_of_devices_are_not_comparable(cluster: Ctl) -> None:
    cluster.api.nodes.append(node_view("node-2", kinds=("cuda",)))
    result = cluster("verify", "job-1")
    assert result.exit_code == 1
    assert "not comparable: different kinds of devices: cpu and cuda here" in result.stderr


def test_what_devices_come_to_counts_and_not_what_they_are_called(cluster: Ctl) -> None:
    """Nodes of other versions trained it, whose canaries are the same; then one whose canary is not."""
    here, there = ({"device": "cpu", "torch": torch, "canary": "1f of 5b"} for torch in ("2.12", "2.13"))
    cluster.api.nodes = [node_view("node-1", traits=(here,)), node_view("node-2", traits=(there,))]
    assert cluster("verify", "job-1").exit_code == 0
    cluster.api.nodes = [
        node_view("node-1", traits=(here,)),
        node_view("node-2", traits=({**here, "canary": "2e of 5b"},)),
    ]
    result = cluster("verify", "job-1", "--fresh")
    assert result.exit_code == 1
    assert "canary 1f of 5b and canary 2e of 5b here" in result.stderr


def test_a_reference_run_of_another_kind_is_not_comparable(cluster: Ctl) -> None:
    assert cluster("verify", "job-1").exit_code == 0
    cluster.api.nodes = [node_view("node-1", kinds=("cuda",))]
    assert "cuda here, cpu without failures" in cluster("verify", "job-1").stderr


H200 = {"device": "NVIDIA H200", "transformers": "5.23.0", "driver": "580.65"}


def test_what_differs_is_named(cluster: Ctl) -> None:
    cluster.api.jobs[0] = job_view(checkpoint=cluster.api.jobs[0].checkpoint, kinds=(H200,))
    cluster.api.nodes = [node_view("node-1", traits=(H200 | {"driver": "575.51", "transformers": "5.1"},))]
    result = cluster("verify", "job-1")
    assert result.exit_code == 1
    said = (
        "different kinds of devices: driver 580.65, transformers 5.23.0 here, driver 575.51, "
        "transformers "
        "5.1 without failures"
    )
    assert said in result.stderr


def test_who_trained_the_job_counts_and_not_who_is_here_now(cluster: Ctl) -> None:
    mixed = (H200, H200 | {"driver": "575.51"})
    cluster.api.nodes = [node_view("node-1", traits=(H200,))]
    cluster.api.jobs[0] = job_view(checkpoint=cluster.api.jobs[0].checkpoint, kinds=mixed)
    result = cluster("verify", "job-1")
    assert result.exit_code == 1
    assert "kinds of devices: driver 580.65 and driver 575.51 here, driver 580.65 without" in result.stderr
    assert (
        "not comparable: trained by devices that differ: driver 575.51 != 580.65"
        in cluster("describe", "job", "job-1").stdout
    )
    cluster.api.jobs[0] = job_view(checkpoint=cluster.api.jobs[0].checkpoint, kinds=mixed[:1])
    assert "bit-identical" in cluster("verify", "job-1").stdout


def test_a_job_without_exact_sums(cluster: Ctl) -> None:
    raw = msgspec.to_builtins(job_spec())
    raw["train"]["exact"] = False
    cluster.api.jobs[0] = job_view(spec=parse_job(raw))
    result = cluster("verify", "job-1")
    assert result.exit_code == 1
    assert "not comparable: train.exact is false" in result.stderr


def test_a_job_that_still_runs(cluster: Ctl) -> None:
    cluster.api.jobs[0] = job_view(state="running", step=2)
    result = cluster("verify", "job-1")
    assert result.exit_code == 5
    assert "hint: oobleckctl wait job-1 --for state=done" in result.stderr


def test_a_checkpoint_of_another_step(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "early", step=2)
    with pytest.raises(CompareError, match="not the checkpoint after the last step"):
        reference.evidence(job_spec(), facts(), folder)


def test_a_job_without_checkpoint() -> None:
    view: JobView = job_view()
    with pytest.raises(CompareError, match="no checkpoint"):
        reference.run_of(view, [])


def test_toml_round_trips() -> None:
    job = parse_job({
        "name": "odd",
        "train": {"steps": 3, "global_batch": 4, "micro_batch": 2, "sequence": 8, "exact": False},
        "model": {"config": {"n_embd": 8, "resid_pdrop": 1e-05, "text": 'a "quote"\n\\ ü', "flag": True,
        "a.b": 1}},
        "optimizer": {"betas": [0.9, 0.95], "lr": 1e20},
    })  # fmt: skip
    assert parse_job(tomllib.loads(reference.to_toml(table_of(job)))) == job
