"""A recipe on a real cluster: a poisoned sample is skipped, whoever dies in that very step, and the job is
branched with a decay; both are to the bit what one process makes of them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from oobleckd.protocol.changes import StepCommitted
from oobleckd.protocol.job import Job
from tests.helpers.cluster import Cluster, tiny_job

SEQUENCE, STEPS, BRANCHED, BAD = 32, 24, 20, 22
"""``BAD``: the round, from 0, of the step that has the poison."""
RECIPE = {"lr": 0.003, "warmup_steps": 4, "schedule": "wsd"}
LOOK = {"on_spike": "skip", "spike_factor": 1.5, "spike_window": 4}


def poisoned(tmp_path: Path) -> Job:
    """The same token everywhere, which is learnt at once, and in one place noise of others."""
    tokens = np.full(SEQUENCE * 12 * STEPS + 1, 7)
    tokens[SEQUENCE * 40 : SEQUENCE * 41] = np.random.default_rng(0).integers(128, 256, SEQUENCE)
    tokens.astype("<u2").tofile(tmp_path / "tokens.bin")
    return tiny_job(
        "recipe",
        data={"source": "tokens", "path": str(tmp_path / "tokens.bin")},
        train={"steps": STEPS, "seed": 2, **LOOK},
        optimizer=RECIPE,
        checkpoint={"every": 10, "keep": 4},
        resources={"device_memory": "12MiB"},
    )


def test_a_poisoned_sample_is_skipped_and_a_branch_decays(tmp_path: Path) -> None:
    with Cluster(tmp_path / "state", 4) as cluster:
        job = cluster.client.submit(poisoned(tmp_path)).id
        view = cluster.at_step(job, 4)
        cluster.client.kill(view.nodes[0], "device", at="reduce", round=BAD)
        done = cluster.job_in(job, "done")
        assert [hit["round"] for hit in cluster.fired()] == [BAD]
        assert (done.steps_skipped, done.steps_spiked, done.skipped_in_row) == (1, 1, 0)
        assert [step.step for step in cluster.client.steps(job) if step.cause == "loss-spike"] == [BAD + 1]
        assert [kept.step for kept in done.kept] == [10, BRANCHED, STEPS]
        cluster.verify(job)
        # Half of the losses before the bad step are in the checkpoint that it goes on from.
        said = ("--set", f"optimizer.decay_steps={STEPS - BRANCHED}")
        branch = cluster.ctl("submit", "--resume", f"{job}@{BRANCHED}", *said, "--wait").stdout.strip()
        found = cluster.client.job(branch)
        assert (found.start_step, found.steps_spiked, found.spec.optimizer.decay_steps) == (BRANCHED, 1, 4)
        rates = {step.step: step.lr for step in cluster.client.steps(branch)}
        assert rates[STEPS] == 0.003 * 0.1
        cluster.verify(branch)
        steps = [
            each for each in cluster.client.events(0, follow=False) if isinstance(each.data, StepCommitted)
        ]
        spikes = [each for each in steps if each.data.cause == "loss-spike"]
        assert [(each.data.job, each.level) for each in spikes] == [(job, "warn"), (branch, "warn")]
