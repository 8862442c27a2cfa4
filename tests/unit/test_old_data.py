"""What earlier versions wrote is opened, and comes to the same bits (tests/data/README.md)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import AbstractContextManager, closing
from pathlib import Path

import pytest

from oobleckd.client import Client
from oobleckd.console.bundle import read
from oobleckd.console.once import past
from oobleckd.core.config import CoreConfig
from oobleckd.core.entries import AnyEntry, NodeDrained
from oobleckd.core.machine import Machine
from oobleckd.core.state import JobRecord
from oobleckd.daemon import stepstore
from oobleckd.daemon.journal import Journal
from oobleckd.daemon.service import step_row
from oobleckd.host.jobfile import load_job
from oobleckd.protocol.changes import IncidentBegan, NodeLost
from oobleckd.worker.models import load_spec
from oobleckd.worker.state.bucket_files import read_manifest
from oobleckd.worker.state.store import Store
from tests.helpers.old_data import DATA, DIGESTS, PORTABLE, digest_of, inputs, job_text, state_folder

ALONE = (
    "gpt2-fp32", "llama-bf16", "bert-masked", "qwen2-folder", "gpt2-float-sums", "llama-mixture",
    "bert-padded",
)  # fmt: skip
STATES = [f"state-{format_}-{name}" for format_ in (3, 4) for name in ("running", "paused")]
_NOW = 1.8e9
_TRAIN = """
import sys
from pathlib import Path
import torch
from oobleckd.worker.tools.reference import main
torch.set_num_threads(1)
for name in sys.argv[2:]:
    folder = Path(sys.argv[1], name)
    main(["--job", str(folder / "job.toml"), "--out", str(folder)], standalone_mode=False)
"""


def test_small_jobs_come_to_the_same_bits(tmp_path: Path) -> None:
    inputs(tmp_path)
    for name in ALONE:
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.toml").write_text(job_text(name, tmp_path), encoding="utf-8")
    env = {**os.environ, **PORTABLE}
    done = subprocess.run(
        [sys.executable, "-c", _TRAIN, str(tmp_path), *ALONE],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {name: _result(tmp_path / name) for name in ALONE} == {name: DIGESTS[name] for name in ALONE}


def _result(folder: Path) -> dict[str, str]:
    lines = (folder / "steps.jsonl").read_text(encoding="utf-8").splitlines()
    (checkpoint,) = folder.glob("step-*")
    return digest_of([json.loads(line)["loss_hex"] for line in lines], checkpoint)


@pytest.mark.parametrize("name", STATES)
def test_a_journal_is_opened_and_its_jobs_are_where_they_were(tmp_path: Path, name: str) -> None:
    folder = state_folder(name, tmp_path)
    core = restored(folder).core
    done, long = core.state.jobs["done-1"], core.state.jobs["long-2"]
    assert (done.state, done.counters.step) == ("done", 20)
    assert DIGESTS["done"] == digest_of(_losses(folder, done), Path(done.checkpoint))
    assert long.paused == name.endswith("paused")
    assert 50 <= long.counters.step < 200
    assert long.checkpoint_counters.step >= 40
    assert Path(long.checkpoint).is_dir()
    assert core.run is not None, "it goes on"


def test_a_checkpoint_of_format_1_is_read(tmp_path: Path) -> None:
    inputs(tmp_path)
    folder = state_folder("state-4-running", tmp_path) / "checkpoints/done-1/step-00000020"
    manifest = read_manifest(folder)
    assert manifest.format == 1
    (tmp_path / "job.toml").write_text(job_text("done", tmp_path), encoding="utf-8")
    spec = load_spec(load_job(tmp_path / "job.toml"))
    import torch

    store = Store(spec, torch.device("cpu"))
    loaded = store.loaded(folder, range(len(spec.buckets))).values()
    assert sum(len(each.params) for each in loaded) == len({key for b in spec.buckets for key in b.keys})


def test_a_bundle_is_shown(tmp_path: Path) -> None:
    file = DATA / "incident.json"
    assert read(file).incident.steps_lost == 0
    assert "node-2" in past(Client(tmp_path / "nobody"), None, file, 100)


def test_changes_that_had_some_of_it_in_words_alone_are_read_as_data() -> None:
    told = [change.data for change in read(DATA / "incident.json").past.changes]
    (lost,) = [data for data in told if isinstance(data, NodeLost)]
    (began,) = [data for data in told if isinstance(data, IncidentBegan)]
    assert lost == NodeLost("node-2", "its link closed and node-1/0 lost it too")
    assert (began.nodes, began.cause) == (("node-2",), f"node-2: {lost.cause}")


def test_a_quarantine_that_only_the_reason_of_a_drain_told_of_is_one() -> None:
    assert NodeDrained("n", "quarantined: n/0: its weights differ", undo=False, at=_NOW).quarantines
    assert not NodeDrained("n", "quarantined: by hand", undo=False, at=_NOW, cause="operator").quarantines


def restored(folder: Path) -> Machine:
    """The core of a daemon that starts on ``folder``."""
    with journal_in(folder) as journal:
        return Machine.restore(journal.read(AnyEntry), _NOW, CoreConfig(daemon="d"))


def journal_in(folder: Path) -> AbstractContextManager[Journal]:
    return closing(Journal(folder, step_of=step_row, on_trouble=lambda _text: None))


def _losses(folder: Path, job: JobRecord) -> list[str]:
    """Of all steps: memory has not those of a job that is over."""
    with journal_in(folder) as journal:
        steps = stepstore.in_journal(journal, job.id, 0, job.counters.step, job.counters.step)
    return [step.loss.hex() for step in steps]
