"""What is to be said of the folder that a job's model starts from, before it is handed in:
``python -m oobleckd.worker.tools.look``.

Reads configuration and headers, as every device will; prints the notes as JSON. Owns no rule of its own
(``oobleckd.worker.models``).
"""

from __future__ import annotations

import sys
from pathlib import Path

import click
import msgspec

from oobleckd.host.jobfile import load_job
from oobleckd.protocol.job import JobError
from oobleckd.worker.models import load_spec
from oobleckd.worker.runtime.errors import UserError


@click.command()
@click.option("--job", "job_file", type=click.Path(path_type=Path), required=True)
def main(job_file: Path) -> None:
    """Look at the folder of the model of a job.toml."""
    try:
        notes = load_spec(load_job(job_file)).notes
    except (JobError, UserError) as error:
        print(f"error: {error}\nhint: {error.hint}", file=sys.stderr)
        sys.exit(1)
    print(msgspec.json.encode(notes).decode())


if __name__ == "__main__":
    main()
