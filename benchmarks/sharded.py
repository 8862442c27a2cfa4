"""Large models on nodes of eight devices, planned with 1, 2, 4 and 8 devices a stage: results as JSON, and
tables of docs/sharded-stages.md made of them.

    python benchmarks/sharded.py run > benchmarks/sharded-results.json
    python benchmarks/sharded.py page

Nothing is run: costs follow from shapes and data sheets, as in ``oobleckctl plan``. Jobs are those of
``examples/``.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from oobleckd.ctl.forecast import ForecastQuestion
from oobleckd.ctl.profiles import analytic, limit_bytes, node_link
from oobleckd.ctl.stagesize import SizedWorld
from oobleckd.host.jobfile import load_job
from oobleckd.planner.costs.devices import SHEETS
from oobleckd.planner.costs.recompute import in_mode
from oobleckd.planner.costs.sharded import NodeLink, StageOption
from oobleckd.planner.plan import Plan, Stage
from oobleckd.words import count, seconds, size

HERE = Path(__file__).resolve().parent
RESULTS, EXAMPLES = HERE / "sharded-results.json", HERE.parent / "examples"
PAGE = HERE.parent / "docs" / "sharded-stages.md"
DEVICES_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class Case:
    """A job of ``examples/`` on ``num_nodes`` nodes; 0: as few as hold it ``copies`` times."""

    job: str
    title: str
    device: str
    num_nodes: int = 0
    copies: int = 1


CASES = (
    Case("llama-2-7b", "Llama-2 7B", "a100", 1),
    Case("llama-2-70b", "Llama-2 70B", "h100", 4),
    Case("llama-2-70b", "Llama-2 70B", "h100", 8),
    Case("llama-3.1-405b", "Llama-3.1 405B", "h100"),
    Case("llama-3.1-405b", "Llama-3.1 405B", "h100", copies=2),
)


class Held(msgspec.Struct, frozen=True):
    """Bytes of the fullest device: its part of the state, what there is of one layer at a time (gathered
    weights, gradients, what it is computed again with), activations, and the runtime's.
    """

    state: int
    passing: int
    activations: int
    reserve: int


class Row(msgspec.Struct, frozen=True):
    """A case as planned, and the ``options`` that were compared. ``shows``: share of the step that gathers
    and exchanges take beyond what is hidden. ``pipelines``: nodes of each.
    """

    title: str
    device: str
    num_nodes: int
    params: int
    micro_batches: int
    sequence: int
    options: tuple[StageOption, ...]
    devices_per_stage: int
    pipelines: tuple[int, ...]
    step_s: float
    tokens_per_s: float
    mfu: float
    held: Held
    shows: float


def question(case: Case, num_nodes: int, devices_per_stage: int = 0) -> ForecastQuestion:
    """What is asked of a case; 0 devices a stage: the best number."""
    job, sheet = load_job(EXAMPLES / f"{case.job}.toml"), SHEETS[case.device]
    profile = analytic(job, sheet)
    return ForecastQuestion(
        job, profile, False, limit_bytes(job, profile, sheet), num_nodes, DEVICES_PER_NODE,
        flops_per_token=profile.flops_per_token, sheet=sheet, node_link=node_link(profile, sheet),
        devices_per_stage=devices_per_stage or "auto",
    )  # fmt: skip


def row(case: Case, devices_per_stage: int = 0) -> Row:
    """``case`` as planned."""
    num_nodes = case.num_nodes or case.copies * _fewest(case)
    asked = question(case, num_nodes, devices_per_stage)
    sized = asked.sized()
    plan, train = sized.world.start(), asked.job.train
    tokens_per_s = train.global_batch * train.sequence / plan.step_s
    peak = SHEETS[case.device].peak(train.precision) * num_nodes * DEVICES_PER_NODE
    return Row(
        case.title, asked.profile.device, num_nodes, asked.profile.params, asked.job.num_micro_batches,
        train.sequence, sized.options, sized.devices_per_stage, tuple(len(p.nodes) for p in plan.pipelines),
        plan.step_s, tokens_per_s, asked.flops_per_token * tokens_per_s / peak, _held(sized, plan),
        1 - _hidden_s(asked, sized) / plan.step_s,
    )  # fmt: skip


def rows() -> Iterator[Row]:
    """All cases."""
    return (row(case) for case in CASES)


def _fewest(case: Case) -> int:
    """Nodes that hold the model with as many devices a stage as there are."""
    asked = question(case, 1, DEVICES_PER_NODE)
    return asked.sized().world.n0


def _hidden_s(asked: ForecastQuestion, sized: SizedWorld) -> float:
    """A step of the same stages where gathers and exchanges take no time."""
    free = replace(asked, node_link=NodeLink(inf), devices_per_stage=sized.devices_per_stage)
    return free.sized().world.start().step_s


def _held(sized: SizedWorld, plan: Plan) -> Held:
    """What the fullest device of ``plan`` holds."""
    world = sized.world
    sizes = {len(pipeline.nodes) for pipeline in plan.pipelines}
    stage = max((s for n in sizes for s in world.by_size[n].stages), key=lambda s: s.memory_bytes)
    return _parts(sized, stage)


def _parts(sized: SizedWorld, stage: Stage) -> Held:
    profile = sized.world.setup.profile
    layers = stage.layers.layers()
    state = sum(profile.layers[layer].state_bytes for layer in layers) // profile.devices_per_stage
    passing = in_mode(sized.world.setup, stage.recompute).once_bytes(layers)
    reserve = profile.reserve_bytes
    return Held(state, passing, stage.memory_bytes - state - passing - reserve, reserve)


# ---------------------------------------------------------------------- the page

_HEADING = "## What fits, and how fast"
"""Of the part of the page that is made here: what stands before it is written by hand."""
_ABOUT = """\
`benchmarks/sharded.py` makes this part of what `oobleckctl plan` says of jobs in `examples/` with
`resources.devices_per_stage = "auto"`. **None of these models was run**: there are [costs from shapes and
data sheets](planner.md#without-a-cluster-oobleckctl-plan), of GPUs, on which no such stage has run
yet. All nodes have eight devices of 80 GB, precision is bf16, micro-batches have one sequence of
4,096 tokens, and blocks are computed again where memory asks for it (`schedule.recompute = "auto"`). Steps
are modelled without the exchange of sums between pipelines and without the update."""

_HELD = """\
The fullest device of each plan, in parts. *One layer at a time*: weights of two layers and the gradients
of one, gathered, and what a block is computed again with. *Shows*: the share of the step that gathers and
exchanges take beyond what computing hides."""

_BOUND = """\
Activations are not divided: each device of a stage computes micro-batches of its own. In 1F1B the first
of *s* stages holds those of *s* turns, of layers that are *s* times fewer. So with the inputs of blocks
alone it holds one for every block of the model, however many nodes there are: for 405B 32 GiB at 4,096
tokens, and 63 at 8,192. Beside that it has room for the state of two or three blocks, which is why this
model takes so many nodes."""

_OPTIONS = "| devices a stage | fewest nodes | step | memory of a device | nodes it can lose |"


def page(found: Sequence[Row], written: str) -> str:
    """docs/sharded-stages.md, which is ``written`` so far."""
    before, _, _ = written.partition(_HEADING)
    parts = [before + _HEADING, _ABOUT]
    parts += [_section(each) for each in found]
    parts += ["### Where the memory goes", _HELD, _table_of_held(found), _BOUND]
    return "\n\n".join(parts) + "\n"


def _section(found: Row) -> str:
    title = f"### {found.title} on {_where(found)}"
    sizes = " and ".join(
        f"{count(number, 'pipeline')} of {count(nodes, 'node')}"
        for nodes, number in sorted(Counter(found.pipelines).items())
    )
    said = (
        f"{found.device}; {count(found.micro_batches, 'micro-batch')} a step. "
        f"Chosen are {count(found.devices_per_stage, 'device')} a stage: {sizes},\n"
        f"{found.tokens_per_s:,.0f} tokens/s, MFU {found.mfu:.1%}."
    )
    return "\n".join([title, "", said, "", _OPTIONS, "|---|---|---|---|---|", *map(_option, found.options)])


def _where(found: Row) -> str:
    return count(found.num_nodes, "node")


def _option(option: StageOption) -> str:
    if not option.n0:
        return f"| {option.devices_per_stage} | no number holds it | | | |"
    if not option.step_s:
        return f"| {option.devices_per_stage} | {option.n0} | | | |"
    held, lost = size(option.memory_bytes), option.can_lose
    return f"| {option.devices_per_stage} | {option.n0} | {seconds(option.step_s)} | {held} | {lost} |"


def _table_of_held(found: Sequence[Row]) -> str:
    head = "| | state | one layer at a time | activations | runtime | shows |\n|---|---|---|---|---|---|"
    lines = [
        f"| {each.title}, {_where(each)} | {size(each.held.state)} | {size(each.held.passing)} | "
        f"{size(each.held.activations)} | {size(each.held.reserve)} | {each.shows:.1%} |"
        for each in found
    ]
    return "\n".join([head, *lines])


def read() -> tuple[Row, ...]:
    """The results that are kept."""
    return msgspec.json.decode(RESULTS.read_bytes(), type=tuple[Row, ...])


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "page"))
    if parser.parse_args(words).what == "page":
        PAGE.write_text(page(read(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(msgspec.json.format(msgspec.json.encode(tuple(rows())), indent=1).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
