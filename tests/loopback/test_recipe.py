"""A recipe on a real cluster: a poisoned sample is skipped, whoever dies in that very step, and the job is
branched with a decay; the batch is ramped up under the rule of an installed package. All of it is to the bit
what one process makes of it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from oobleckd.protocol.changes import StepCommitted
from oobleckd.protocol.job import Job
from oobleckd.unixhttp import ApiProblem
from tests.helpers.cluster import Cluster, tiny_job
from tests.helpers.optimizers import installed

SEQUENCE, STEPS, BRANCHED, BAD = 32, 24, 20, 22
"""``BAD``: the round, from 0, of the step that has the poison."""
RECIPE = {"lr": 0.003, "warmup_steps": 4, "schedule": "wsd"}
LOOK = {"on_spike": "skip", "spike_factor": 1.5, "spike_window": 4}
RAMP, RAMPED, GROWS = {"start": 4, "increment": 4, "samples": 96}, 24, 12
"""``GROWS``: the first step, from 0, that is larger than the one before."""
SIGN_SGD = """
import torch
from oobleckd.protocol.optimizers import Slot


class SignSgd:
    def slots(self, shape, knobs):
        return (Slot("momentum", shape, narrow=True),)

    def update_(self, params, grads, slots, step):
        for param, grad, momentum in zip(params, grads, slots["momentum"], strict=True):
            momentum.lerp_(grad, 1 - step.knobs.momentum)
            param.mul_(1 - step.lr * step.weight_decay)
            param.sub_(torch.sign(momentum), alpha=step.lr)
"""


def poisoned(tmp_path: Path) -> Job:
    """The same token everywhere, which is learnt at once, and in one place noise of others."""
    tokens = np.full(SEQUENCE * 8 * STEPS + 1, 7)
    tokens[SEQUENCE * 40 : SEQUENCE * 41] = np.random.default_rng(0).integers(128, 256, SEQUENCE)
    tokens.astype("<u2").tofile(tmp_path / "tokens.bin")
    return tiny_job(
        "recipe",
        data={"source": "tokens", "path": str(tmp_path / "tokens.bin")},
        train={"steps": STEPS, "global_batch": 8, "seed": 38, **LOOK},
        optimizer=RECIPE,
        checkpoint={"every": 10, "keep": 4},
        resources={"device_memory": "12MiB"},
    )


def ramped() -> Job:
    """Under the rule that the package has."""
    return tiny_job(
        "ramped",
        train={"steps": RAMPED, "global_batch": 12, "micro_batch": 2, "batch_ramp": RAMP},
        optimizer={"name": "sign-sgd", "momentum": 0.9, "lr": 0.001, "state": "bf16"},
        resources={"device_memory": "14MiB", "min_pipeline_nodes": 2},
    )


def ramps_up_under_a_rule_of_its_own(cluster: Cluster) -> None:
    """A node dies in the first step that is larger than the one before, and is back."""
    before = len(cluster.fired())
    job = cluster.client.submit(ramped()).id
    view = cluster.at_step(job, 1)
    assert len(view.pipelines) == 2
    dealt = [pipeline.micro_batches for pipeline in view.pipelines]
    assert sorted(dealt) == [(0, 2, 4), (1, 3, 5)]
    cluster.client.kill(view.nodes[0], "device", at="backward", round=GROWS)
    done = cluster.job_in(job, "done")
    assert [hit["round"] for hit in cluster.fired()[before:]] == [GROWS]
    cluster.usable(4)
    sizes = [step.samples for step in cluster.client.steps(job)]
    assert sizes == [4] * GROWS + [8] * 6 + [12] * 6
    assert (done.steps_lost, done.incidents) == (0, 1)
    assert done.progress is not None
    assert done.progress.tokens == done.progress.total_tokens == sum(sizes) * done.spec.train.sequence
    cluster.verify(job)


def poison_is_skipped_and_a_branch_decays(cluster: Cluster, tmp_path: Path) -> None:
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
    steps = [each for each in cluster.client.events(0, follow=False) if isinstance(each.data, StepCommitted)]
    spikes = [each for each in steps if each.data.cause == "loss-spike"]
    assert [(each.data.job, each.level) for each in spikes] == [(job, "warn"), (branch, "warn")]
    # By the API alone the daemon finds the checkpoint.
    with pytest.raises(ApiProblem, match=f"{job} has no checkpoint after 3 steps, only after 10, "):
        cluster.client.submit(found.spec, resume=f"{job}@3")
    again = cluster.job_in(cluster.client.submit(found.spec, resume=f"{job}@{BRANCHED}").id, "done")
    assert (again.start_step, again.loss) == (BRANCHED, found.loss)


def test_recipes_on_a_cluster(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "signs.py").write_text(SIGN_SGD, encoding="utf-8")
    installed(package, "signs", **{"sign-sgd": "SignSgd"})
    with Cluster(tmp_path / "state", 4, env={"PYTHONPATH": str(package)}) as cluster:
        poison_is_skipped_and_a_branch_decays(cluster, tmp_path)
        ramps_up_under_a_rule_of_its_own(cluster)
