"""Whether a job could be trained, and what is to be said of it, before it is submitted:
``python -m oobleckd.worker.tools.look``.

Reads configurations, headers and sizes, as every device will, and runs nothing that lies in them; prints what
it found as JSON. Owns no rule of its own (``oobleckd.worker.models``, ``oobleckd.worker.data``).
"""

from __future__ import annotations

import sys
from pathlib import Path

import click
import msgspec
import torch

from oobleckd.host.jobfile import load_job
from oobleckd.protocol.jobtable import JobError
from oobleckd.protocol.modelnotes import Looked
from oobleckd.worker.canary.attention import attention_of, note_for_cuda, note_on
from oobleckd.worker.data.look import look_at
from oobleckd.worker.models import load_spec
from oobleckd.worker.optimizers.plan import check_groups
from oobleckd.worker.runtime.errors import UserError


@click.command()
@click.option("--job", "job_file", type=click.Path(path_type=Path), required=True)
@click.option("--data/--no-data", default=True, help="Whether its text lies on this machine.")
@click.option("--attention", is_flag=True, help="Find out what computes attention, too.")
def main(job_file: Path, data: bool, attention: bool) -> None:
    """Look at the model and the text of a job.toml."""
    try:
        job = load_job(job_file)
        spec = load_spec(job)
        spec.try_blocks()
        check_groups(job.optimizer, [key for bucket in spec.buckets for key in bucket.keys])
        found = attention_of(spec) if attention else ()
        looked = Looked(
            spec.notes,
            look_at(job, spec.config.vocab_size) if data else (),
            {
                "cpu": tuple(note_on(call, blocks, torch.device("cpu")) for call, blocks in found),
                "cuda": tuple(note_for_cuda(call, blocks) for call, blocks in found),
            },
        )
    except (JobError, UserError) as error:
        print(f"error: {error}\nhint: {error.hint}", file=sys.stderr)
        sys.exit(1)
    print(msgspec.json.encode(looked).decode())


if __name__ == "__main__":
    main()
