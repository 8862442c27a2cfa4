"""``export`` on a real cluster: what transformers loads are the weights of the job, finished or still
running.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel

from oobleckd.protocol.job import Job
from tests.helpers.cluster import Cluster
from tests.helpers.models import small_config, small_job


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("export"), 2) as running:
        yield running


def job_of(family: str, steps: int) -> Job:
    return small_job(family, small_config(family, vocab_size=257), train={"steps": steps})


def exported(cluster: Cluster, job: str, folder: Path) -> tuple[dict[str, Any], Path]:
    """What the command said, and the checkpoint of that step (the job may have a newer one by now)."""
    said = json.loads(cluster.ctl("export", job, str(folder), "-o", "json").stdout)
    return said, Path(cluster.client.job(job).checkpoint).with_name(f"step-{said['step']:08d}")


def assert_equal(model: PreTrainedModel, checkpoint: Path) -> None:
    found = set()
    for path in checkpoint.glob("bucket-*.safetensors"):
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no dict
                kind, key = name.split("/", 1)
                if kind == "param":
                    found.add(id(model.get_parameter(key)))
                    assert torch.equal(model.get_parameter(key), file.get_tensor(name)), key
    assert found == {id(param) for param in model.parameters()}


def test_a_finished_job(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.client.submit(job_of("qwen3", 3)).id
    cluster.job_in(job, "done")
    said, checkpoint = exported(cluster, job, tmp_path / "out")
    assert (said["kind"], said["step"], said["path"]) == ("Export", 3, str(tmp_path / "out"))
    assert_equal(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), checkpoint)


def test_a_running_job_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.client.submit(job_of("bert", 1_000_000)).id
    cluster.at_step(job, 2)
    said, checkpoint = exported(cluster, job, tmp_path / "out")
    assert said["step"] >= 2
    assert_equal(AutoModelForMaskedLM.from_pretrained(tmp_path / "out"), checkpoint)
    assert cluster.client.job(job).state == "running"
    cluster.ctl("cancel", job)
