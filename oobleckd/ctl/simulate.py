"""The verb ``simulate``: what would become of a job on a cluster that loses nodes, under each policy.

Owns the options, and what is wrong with them. The runs are the simulator's, which loads scipy by way of the
planner, so it is imported when there is something to simulate.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from oobleckd.ctl.jobfiles import loaded
from oobleckd.ctl.look import look
from oobleckd.ctl.options import output_option, wants_json
from oobleckd.ctl.output import (
    FAILED,
    USAGE,
    Failure,
    emit_item,
    emit_line,
    emit_page,
    emit_table,
    fail,
    note,
)
from oobleckd.protocol.text import visible
from oobleckd.protocol.units import parse_seconds
from oobleckd.words import count, short

if TYPE_CHECKING:
    from oobleckd.protocol.job import Job
    from oobleckd.simulator.outcome import Outcome, Question, Unable
    from oobleckd.simulator.prices import Price
    from oobleckd.simulator.report import Simulation
    from oobleckd.simulator.traces import Trace

_ALL = "all"
_DEFAULT = "cpu"


def _seconds(ctx: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    """A time such as 10m, 2h or 30d, in seconds."""
    if value is None:
        return None
    try:
        seconds = parse_seconds(value)
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise click.BadParameter(f"{value!r} is no time; write 30s, 10m, 2h or 30d", ctx, parameter)
    return seconds


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--nodes", "num_nodes", type=click.IntRange(min=1), metavar="N", help="Nodes at the beginning.")
@click.option(
    "--devices", "devices_per_node", type=click.IntRange(min=1), default=1, show_default=True, metavar="D",
    help="Devices of each node.",
)  # fmt: skip
@click.option(
    "--device", default="", metavar="NAME|FILE",
    help=f"Data sheet: a40, a100, h100, h200, cpu, or a file with a [device] table (default: {_DEFAULT}).",
)  # fmt: skip
@click.option(
    "--profile", type=click.Path(path_type=Path), metavar="FILE",
    help="Measured costs instead: a profile as JSON, or a daemon's journal.sqlite.",
)  # fmt: skip
@click.option("--trace", type=click.Path(path_type=Path), metavar="FILE", help="What happens to the nodes.")
@click.option(
    "--mtbf",
    callback=_seconds,
    metavar="TIME",
    help="Instead: the time from one failure of a node to the next, of the whole cluster, on average.",
)
@click.option(
    "--repair",
    callback=_seconds,
    metavar="TIME",
    help="And is back after so long on average (default: never).",
)
@click.option(
    "--duration", callback=_seconds, metavar="TIME", help="For how long (default: the trace, or a day)."
)
@click.option(
    "--policy",
    default="",
    metavar="NAMES|all",
    help="Policies, with commas between them (default: the job's).",
)
@click.option(
    "--seeds", "num_seeds", type=click.IntRange(min=1), default=1, show_default=True, help="Runs of each."
)
@click.option(
    "--seed", "first_seed", type=click.IntRange(min=0), default=0, show_default=True, help="The first seed."
)
@click.option(
    "--costs", default="ours", show_default=True, metavar="NAME|FILE",
    help="What an engine takes: ours, silent, as-published, one system's, or a TOML file.",
)  # fmt: skip
@click.option("--instance", default="", metavar="NAME", help="Whose price (default: one with such devices).")
@click.option("--price", type=click.FloatRange(min=0), metavar="DOLLARS", help="For a node hour on demand.")
@click.option(
    "--spot-price",
    type=click.FloatRange(min=0),
    metavar="DOLLARS",
    help="For a node hour on the spot market.",
)
@click.option(
    "--jobs", "num_jobs", type=click.IntRange(min=1), metavar="J", help="Processes (default: one a core)."
)
@click.option(
    "--plot", type=click.Path(path_type=Path), metavar="FILE", help="Draw it, as .png, .svg or .pdf."
)
@output_option
def simulate(
    file: Path,
    num_nodes: int | None,
    devices_per_node: int,
    device: str,
    profile: Path | None,
    trace: Path | None,
    mtbf: float | None,
    repair: float | None,
    duration: float | None,
    policy: str,
    num_seeds: int,
    first_seed: int,
    costs: str,
    instance: str,
    price: float | None,
    spot_price: float | None,
    num_jobs: int | None,
    plot: Path | None,
) -> None:
    """Simulate the job of FILE, a job.toml, on nodes that fail: the daemon's own core and policies on a
    virtual clock.

    Failures come from a trace or are drawn; all policies meet the same ones. Prints what was committed,
    against the live devices' ideal and against the best plans at no cost, where the time went, and what it
    costs. A policy that cannot run the job there is said to, with the reason.
    """
    from oobleckd.simulator.report import Simulation, lines_of

    job = loaded(file)
    if plot is not None:
        _check_plot(plot)
    traces = _traces(trace, num_nodes, mtbf, repair, duration, range(first_seed, first_seed + num_seeds))
    look(job, file)
    questions = _questions(job, devices_per_node, device, profile, traces, _policies(job, policy), costs)
    found_price = _price(
        instance, price, spot_price, device or ("" if profile else _DEFAULT), devices_per_node
    )
    outcomes, unable = _run(file, questions, num_jobs or os.cpu_count() or 1)
    lines = lines_of(outcomes, found_price)
    first = questions[0]
    answer = Simulation(
        job=job.name,
        device=first.profile.device,
        measured=profile is not None,
        num_nodes=max(each.max_nodes for each in traces),
        devices_per_node=devices_per_node,
        failures=_failures(trace, mtbf, repair),
        duration_s=first.trace.duration_s,
        seeds=len(traces),
        price=found_price,
        policies=lines,
        unable=unable,
    )
    if wants_json():
        emit_item("Simulation", answer)
    else:
        _show(answer)
    if plot is not None:  # last: whatever is wrong with the file, what was computed has been said
        _draw(plot, answer, [outcome for outcome in outcomes if outcome.seed == first_seed])


# ---------------------------------------------------------------------- what is asked


def _traces(
    path: Path | None,
    num_nodes: int | None,
    mtbf_s: float | None,
    repair_s: float | None,
    duration_s: float | None,
    seeds: Sequence[int],
) -> list[Trace]:
    """The failures: of a file one trace, else one a seed."""
    from oobleckd.simulator.failures import memoryless, usual_duration_s
    from oobleckd.simulator.traces import TraceError, read_trace

    if path is None and mtbf_s is None:
        fail(
            "say what fails, with --trace or with --mtbf",
            "--mtbf 1h: the cluster loses a node an hour",
            USAGE,
        )
    if path is not None:
        if mtbf_s is not None or repair_s is not None or list(seeds) != [0]:
            fail(
                "a trace says by itself who fails and who comes back, and it is one",
                "leave --mtbf, --repair, --seeds and --seed away, or --trace",
                USAGE,
            )
        try:
            trace = read_trace(path, num_nodes=num_nodes or 0, duration_s=duration_s or 0.0)
        except TraceError as error:
            raise Failure(error.problem, error.hint, USAGE) from error
        if num_nodes is not None and num_nodes != len(trace.nodes):
            note(f"{path} begins with nodes of its own, {len(trace.nodes)} of them: --nodes is not used")
        return [trace]
    assert mtbf_s is not None
    if num_nodes is None:
        fail("--mtbf needs --nodes", "say how many nodes the cluster has", USAGE)
    until_s = duration_s or usual_duration_s(num_nodes, mtbf_s, repair_s or 0.0)
    return [memoryless(num_nodes, mtbf_s, repair_s or 0.0, until_s, seed) for seed in seeds]


def _policies(job: Job, names: str) -> tuple[str, ...]:
    """The policies that are meant."""
    from typing import get_args

    from oobleckd.protocol.job import PolicyName

    known: tuple[str, ...] = get_args(PolicyName)
    if not names:
        return (job.fault_tolerance.policy,)
    if names == _ALL:
        return known
    wanted = tuple(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    for name in wanted:
        if name not in known:
            fail(f"--policy: no policy {name!r}", f"there are {', '.join(known)}, or all", USAGE)
    if not wanted:
        fail("--policy: no name", f"there are {', '.join(known)}, or all", USAGE)
    return wanted


def _questions(
    job: Job,
    devices_per_node: int,
    device: str,
    profile: Path | None,
    traces: Sequence[Trace],
    policies: Sequence[str],
    costs_name: str,
) -> list[Question]:
    """One for each policy and trace."""
    from oobleckd.ctl.profiles import analytic, device_sheet, limit_bytes, measured
    from oobleckd.simulator.costs import CostsError, costs_named
    from oobleckd.simulator.outcome import Question

    sheet = device_sheet(device or _DEFAULT) if device or profile is None else None
    if profile is not None:
        found = measured(profile, job)
    else:
        assert sheet is not None
        found = analytic(job, sheet)
    limit = limit_bytes(job, found, sheet)
    try:
        costs = {name: costs_named(costs_name, name) for name in policies}
    except CostsError as error:
        raise Failure(error.problem, error.hint, USAGE) from error
    return [
        Question(job, name, found, limit, devices_per_node, trace, costs[name], costs_name, trace.seed)
        for name in policies
        for trace in traces
    ]


def _price(
    instance: str, price: float | None, spot_price: float | None, device: str, devices_per_node: int
) -> Price | None:
    from oobleckd.simulator.prices import Price, instances, price_of

    if instance and instance not in instances():
        fail(
            f"--instance: no price of {instance!r}",
            f"known are {', '.join(instances())}; or say --price",
            USAGE,
        )
    known = price_of(instance, device.lower(), devices_per_node)
    if price is None and spot_price is None:
        return known
    if price is not None and spot_price is not None:
        return Price(price, spot_price, "as given")
    if known is None:
        return Price(price, spot_price, "as given; nobody knows the other one")
    if price is None:
        return Price(known.on_demand, spot_price, f"{known.source} on demand, spot as given")
    return Price(price, known.spot, f"on demand as given, {known.source} on the spot market")


def _failures(path: Path | None, mtbf_s: float | None, repair_s: float | None) -> str:
    if path is not None:
        return path.stem
    back = f", each back after {_time(repair_s)} on average" if repair_s else ", none comes back"
    return f"a node fails every {_time(mtbf_s or 0.0)} on average{back}"


def _time(seconds: float) -> str:
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{short(seconds / size)} {unit}"
    return f"{short(seconds)} s"


# ---------------------------------------------------------------------- the runs


def _run(
    file: Path, questions: Sequence[Question], num_jobs: int
) -> tuple[tuple[Outcome, ...], tuple[Unable, ...]]:
    """The runs, and who cannot run. Fails where that is everybody."""
    from oobleckd.simulator.runs import apart, run_all

    with _progress(len(questions)) as told:
        outcomes, unable = apart(run_all(questions, num_jobs, told))
    if not outcomes:
        raise Failure(f"{file}: {unable[0].problem}", unable[0].hint, FAILED)
    return outcomes, unable


@contextmanager
def _progress(total: int) -> Iterator[Callable[[float], None]]:
    """A bar for a person who watches."""
    if not sys.stderr.isatty():
        yield lambda _done: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("simulating", total=total)
        yield lambda done: bar.update(task, completed=done)


# ---------------------------------------------------------------------- what is said


def _show(answer: Simulation) -> None:
    from oobleckd.simulator import report

    devices = f" of {count(answer.devices_per_node, 'device')}" if answer.devices_per_node > 1 else ""
    how = "as measured" if answer.measured else "estimated from its data sheet"
    emit_line(f"{answer.job} on {count(answer.num_nodes, 'node')}{devices}, {answer.device} {how}")
    runs = f"{answer.seeds} runs" if answer.seeds > 1 else "one run"
    emit_page(f"{answer.failures}; {runs} of {_time(answer.duration_s)} for each policy\n")
    rows = [*map(report.row, answer.policies), *map(report.unable_row, answer.unable)]
    emit_table(report.COLUMNS, rows)
    for line in answer.unable:
        emit_page(f"\n{report.name_of(line)} cannot run: {visible(line.problem)}")
    emit_page("\nOf the live devices' time:")
    emit_table(report.LOST_COLUMNS, [report.lost_row(line) for line in answer.policies])
    if answer.price is not None:
        on_demand, spot = map(_dollars, (answer.price.on_demand, answer.price.spot))
        emit_page(f"\nAt {on_demand} on demand and {spot} spot for a node hour ({answer.price.source}):")
        emit_table(report.COST_COLUMNS, [report.cost_row(line) for line in answer.policies])


def _dollars(price: float | None) -> str:
    return "-" if price is None else f"${price:.3f}"


def _check_plot(path: Path) -> None:
    """What can be wrong with the picture is said before anything is computed."""
    from importlib.util import find_spec

    from oobleckd.simulator.plot import FORMATS

    if path.suffix.lower() not in FORMATS:
        fail(
            f"--plot: {path} is no {', '.join(FORMATS)}", "the ending says what kind of picture it is", USAGE
        )
    # Before the runs: a folder that was not there threw all of them away. (D-simulator-013)
    if not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        fail(f"--plot: cannot write {path}", "name a file in a folder that is there and yours", USAGE)
    if find_spec("matplotlib") is None:
        fail("--plot needs matplotlib", "install the extra: pip install 'oobleckd[plot]'", FAILED)


def _draw(path: Path, answer: Simulation, runs: Sequence[Outcome]) -> None:
    from oobleckd.simulator.plot import draw, left_out

    title = f"{answer.job} on {count(answer.num_nodes, 'node')}; {answer.failures}"
    try:
        draw(path, title, answer.policies, runs, answer.unable)
    except OSError as error:
        raise Failure(
            f"--plot: {path}: {error.strerror}", "the tables above are whole; draw to another place", FAILED
        ) from error
    note(f"drawn: {path}" + (f", {left_out(answer.unable)}" if answer.unable else ""))
