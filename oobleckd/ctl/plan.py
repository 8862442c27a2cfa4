"""The verb ``plan``: what a job would do on so many nodes, without a cluster.

Owns the options and what is wrong with them. Answers are ``forecast``'s, words ``planwords``'; both load
numpy, so they are imported when there is something to plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from click.shell_completion import CompletionItem

from oobleckd.ctl.jobfiles import loaded, set_option
from oobleckd.ctl.look import look
from oobleckd.ctl.options import output_option, wants_json
from oobleckd.ctl.output import FAILED, USAGE, Failure, emit_item, fail, note
from oobleckd.ctl.ownrule import knowable
from oobleckd.ctl.parameters import show_parameters
from oobleckd.planner.costs.sharded import DEVICES_PER_STAGE

if TYPE_CHECKING:
    from oobleckd.ctl.forecast import ForecastQuestion
    from oobleckd.protocol.job import Job

# What runs out of the box is a process on a CPU, as up starts it; the answer says so in its third line.
# (D-service-004)
_DEFAULT = "cpu"
_NO_CAP = "plan for a --device of more memory"  # of a job without a cap, where the limit is the device's own


def _devices(_ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Known devices, and else a file."""
    from oobleckd.planner.costs.devices import SHEETS

    known = [
        CompletionItem(key, help=each.name) for key, each in SHEETS.items() if key.startswith(incomplete)
    ]
    return known or [CompletionItem(incomplete, type="file")]


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--nodes",
    "num_nodes",
    type=click.IntRange(min=1),
    metavar="N",
    help="Nodes; not with --parameters.",
)
@click.option(
    "--devices", "devices_per_node", type=click.IntRange(min=1), default=1, show_default=True, metavar="D",
    help="Devices of each node.",
)  # fmt: skip
@click.option(
    "--devices-per-stage", type=click.Choice(("auto", *map(str, DEVICES_PER_STAGE))),
    help="Devices of a node that share a stage, in place of the job's; auto: the fastest of those that fit.",
)  # fmt: skip
@click.option(
    "--device", default="", metavar="NAME|FILE", shell_complete=_devices,
    help=f"Data sheet: a40, a100, h100, h200, cpu, or a file with a [device] table (default: {_DEFAULT}).",
)  # fmt: skip
@click.option(
    "--profile", type=click.Path(path_type=Path), metavar="FILE",
    help="Measured costs instead: a profile as JSON, or a daemon's journal.sqlite.",
)  # fmt: skip
@click.option(
    "--without", multiple=True, metavar="NODE", help="Plan after the loss of this node (repeat for more)."
)
@click.option(
    "--parameters", is_flag=True,
    help="List each parameter's group, rule and bytes instead (docs/optimizers.md).",
)  # fmt: skip
@click.option(
    "-v", "--verbose", is_flag=True,
    help="Say what computes attention (it is in the JSON always), and what recomputation would change, too.",
)  # fmt: skip
@set_option
@output_option
def plan(
    file: Path,
    num_nodes: int | None,
    devices_per_node: int,
    devices_per_stage: str | None,
    device: str,
    profile: Path | None,
    without: tuple[str, ...],
    parameters: bool,
    verbose: bool,
    changes: tuple[str, ...],
) -> None:
    """Plan the job of FILE, a job.toml (-: stdin), for nodes that need not be there. Asks no daemon.

    Prints templates, the plan, the guarantee, what follows after each possible loss, and the schedule. Nodes
    are called node-1, node-2, ... Times are modelled. A process of its own looks at model and data
    first, as a node would.
    """
    from oobleckd.ctl.forecast import forecast
    from oobleckd.ctl.planwords import show
    from oobleckd.planner.policy import PlanError

    if devices_per_stage is not None:
        changes = (*changes, f"resources.devices_per_stage={devices_per_stage}")
    job = loaded(file, changes)
    if parameters:
        show_parameters(job, file, as_json=wants_json())
        return
    if num_nodes is None:
        fail("--nodes is missing", "write --nodes 8, or --parameters", USAGE)
    lost = _known(without, num_nodes)
    found = look(knowable(job), file, attention=verbose or wants_json())
    question = _question(job, num_nodes, devices_per_node, device, profile, lost)
    compares = verbose or job.schedule.recompute != "none"
    question = replace(question, compares=compares)
    try:
        answer = forecast(question)
    except PlanError as error:
        capped = job.resources.device_memory_bytes or not error.memory
        hint = error.hint if capped else error.hint.replace(error.memory, _NO_CAP)
        raise Failure(f"{file}: {error.problem}", hint, FAILED) from error
    if smaller := min(job.batch_sizes.ramp_steps, job.train.steps):
        note(f"planned is a whole step; the first {smaller:,} of {job.train.steps:,} are smaller: batch_ramp")
    kind = "cuda" if question.profile.reserve_bytes else "cpu"  # of its runtime, which a CPU has none of
    answer = msgspec.structs.replace(answer, attention=found.attention.get(kind, ()))
    if wants_json():
        emit_item("Forecast", answer)
    else:
        show(answer)


def _question(
    job: Job,
    num_nodes: int,
    devices_per_node: int,
    device: str,
    profile: Path | None,
    without: tuple[str, ...],
) -> ForecastQuestion:
    from oobleckd.ctl.forecast import ForecastQuestion
    from oobleckd.ctl.profiles import analytic, device_sheet, limit_bytes, measured, node_link
    from oobleckd.planner.costs import flops
    from oobleckd.planner.costs.devices import has_peak, sheet_of

    sheet = device_sheet(device or _DEFAULT) if device or profile is None else None
    if profile is not None:
        costs = measured(profile, job)
    else:
        assert sheet is not None
        costs = analytic(job, sheet)
    limit = limit_bytes(job, costs, sheet)
    made_of = sheet or sheet_of(costs.device)
    return ForecastQuestion(
        job, costs, profile is not None, limit, num_nodes, devices_per_node, without,
        flops_per_token=flops.of_profile(costs),
        sheet=made_of if made_of is not None and has_peak(made_of) else None,
        node_link=node_link(costs, sheet), devices_per_stage=job.resources.devices_per_stage,
    )  # fmt: skip


def _known(without: Sequence[str], num_nodes: int) -> tuple[str, ...]:
    """``without`` in order and each once; a plain number is that node's."""
    numbers = set()
    for name in without:
        digits = name.removeprefix("node-")
        if not digits.isdecimal() or not 1 <= int(digits) <= num_nodes:
            fail(f"--without: no node {name!r}", f"there are node-1 to node-{num_nodes}", USAGE)
        numbers.add(int(digits))
    return tuple(f"node-{number}" for number in sorted(numbers))
