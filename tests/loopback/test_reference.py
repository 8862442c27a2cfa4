"""The reference run in one process, for real: what it leaves can be compared, and it is the same
every time.
"""

from __future__ import annotations

from pathlib import Path

from oobleckd.ctl import reference
from oobleckd.ctl.compare import compare
from oobleckd.protocol.job import parse_job

STEPS = 3


def test_two_reference_runs_are_identical(tmp_path: Path) -> None:
    job = parse_job({
        "name": "tiny",
        "model": {"family": "gpt2", "config": {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16,
        "vocab_size": 256}},
        "train": {"steps": STEPS, "global_batch": 4, "micro_batch": 2, "sequence": 16},
    })  # fmt: skip
    runs = []
    for name in ("one", "other"):
        kept = reference.run_single(job, tmp_path / name)
        assert ", torch " in kept.kinds[0]
        assert kept.kinds[0].endswith(", 1 thread")  # as a device of a cluster says
        runs.append(reference.evidence(job, kept.steps, Path(kept.checkpoint)))
    verdict = compare(*runs)
    assert verdict.identical, verdict.findings
    assert (verdict.losses, verdict.num_losses) == (STEPS, STEPS)
    assert verdict.weights == verdict.num_weights == 2 + 2 * 12 + 2
    assert verdict.samples == STEPS * job.train.global_batch
