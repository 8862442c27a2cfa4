"""The example of a mixture of experts, as docs/experts.md has it: submitted, told of, and dead in between."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from oobleckd.host.jobfile import load_job
from oobleckd.worker.models import load_spec
from tests.helpers.cluster import Cluster

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "mixtral-stdlib.toml"
STEPS = 12


def test_the_page_has_the_examples_parameters() -> None:
    spec = load_spec(load_job(EXAMPLE))
    assert (spec.num_params, spec.num_active_params) == (5_086_848, 1_547_904)


@pytest.mark.slow
def test_the_example_survives_a_death(tmp_path: Path) -> None:
    with Cluster(tmp_path / "state", 3) as cluster:
        command = [sys.executable, "-P", "-m", "oobleckd.ctl.main"]

        def ctl(*words: str) -> str:
            done = subprocess.run(
                [*command, *words], cwd=tmp_path, env=cluster.env, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, (words, done.stdout, done.stderr)
            return done.stdout

        ctl("submit", str(EXAMPLE), "--set", f"train.steps={STEPS}", "--set", "checkpoint.every=0")
        cluster.at_step("mixtral-stdlib", 3)
        told = ctl("describe", "job", "mixtral-stdlib")
        assert re.search(r"^model: +5\.09 M parameters, 1\.55 M active$", told, re.MULTILINE)
        cluster.kill(cluster.client.job("mixtral-stdlib").nodes[0], "sigkill")
        assert cluster.job_in("mixtral-stdlib", "done", timeout_s=300.0).steps_lost == 0
        losses = [step["loss"] for step in json.loads(ctl("get", "steps", "-o", "json"))["items"]]
        assert len(losses) == STEPS
        assert losses[-1] < losses[0]
        cluster.verify("mixtral-stdlib")
