"""The parameters of a job's model, and what its optimizer does with each:
``python -m oobleckd.worker.tools.parameters``.

Builds the model without weights, as every node does, and prints a list of ``ParameterRow`` as JSON. Owns no
rule of its own (``oobleckd.worker.optimizers``).
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import click
import msgspec

from oobleckd.host.jobfile import load_job
from oobleckd.protocol.job import Job
from oobleckd.protocol.jobtable import JobError
from oobleckd.protocol.paramgroups import ParameterRow
from oobleckd.worker.models import load_spec
from oobleckd.worker.optimizers.plan import plan_updates
from oobleckd.worker.runtime.errors import UserError
from oobleckd.worker.state.optimizer import parameters_of

_FLOAT_BYTES = 4


def rows_of(job: Job) -> list[ParameterRow]:
    """In the order of the layers, tied weights behind them. A group may have none of them. Raises
    UserError for a model or a rule that a node would refuse.
    """
    spec = load_spec(job)
    params = parameters_of(spec, range(len(spec.buckets)))
    plan = plan_updates(job.optimizer, params)
    bf16 = job.optimizer.state == "bf16"
    return [
        ParameterRow(
            name,
            shape,
            job.optimizer.group[recipe.group].match if recipe.group >= 0 else "",
            "" if recipe.frozen else recipe.rule,
            recipe.lr_scale,
            recipe.weight_decay,
            recipe.frozen,
            _FLOAT_BYTES * math.prod(shape) + sum(slot.num_bytes(bf16=bf16) for slot in slots),
        )
        for name, shape, recipe, slots in zip(
            params.names, params.shapes, plan.recipes, plan.slots, strict=True
        )
    ]


@click.command()
@click.option("--job", "job_file", type=click.Path(path_type=Path), required=True)
def main(job_file: Path) -> None:
    """List the parameters of a job.toml."""
    try:
        rows = rows_of(load_job(job_file))
    except (JobError, UserError) as error:
        print(f"error: {error}\nhint: {error.hint}", file=sys.stderr)
        sys.exit(1)
    print(msgspec.json.encode(rows).decode())


if __name__ == "__main__":
    main()
