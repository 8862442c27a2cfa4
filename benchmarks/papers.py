"""The ratios in the papers' headlines, and where they come out in the simulator: results as JSON, and
docs/papers.md made of them.

    python benchmarks/papers.py run [--jobs J] > benchmarks/papers-results.json
    python benchmarks/papers.py dials            # anew in that file: what somebody's seconds must be for a ratio to come out
    python benchmarks/papers.py page > docs/papers.md

``papers.json`` has what the papers claim. A setting is a job of ``goodput``, costs (as published, or our
engine's), and an MTBF of the cluster of 32 nodes, each back after ten minutes on average. All policies of a
setting meet the same failures. A *dial* is the number of seconds that a ratio hangs on most, and that we
assume: it is turned up until the ratio comes out.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from math import inf, log
from pathlib import Path
from typing import Literal

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.goodput import DEVICE, NUM_NODES, OWN_SCHEDULE, SCHEDULES, SHAPES, Shape, job_of
from oobleckd.ctl.profiles import analytic
from oobleckd.planner.costs.devices import SHEETS
from oobleckd.simulator.costs import AS_PUBLISHED, costs_named
from oobleckd.simulator.failures import memoryless
from oobleckd.simulator.outcome import Outcome, Question
from oobleckd.simulator.prices import Price, price_of
from oobleckd.simulator.runs import apart, run_all
from oobleckd.simulator.traces import Trace

HERE = Path(__file__).resolve().parent
CLAIMS, RESULTS = HERE / "papers.json", HERE / "papers-results.json"
POLICIES = ("oobleck", "slipstream", "bamboo", "varuna")
COSTS = (AS_PUBLISHED, "ours")
JOBS = SHAPES[:2]  # the third takes an hour
MTBFS = {"90 s": 90.0, "10 min": 600.0, "1 h": 3600.0}
REPAIR_S = 600.0
LOSSES, MIN_S = 6, 1800.0  # a run has about so many, and is no shorter
NEAR = 0.05
DIALLED = SHAPES[0]
MAX_TURNS, HALVINGS = 8, 4


class Claim(msgspec.Struct, frozen=True):
    """``above`` over ``below``. ``dial``: the one of the costs of ``below`` that it hangs on most. ``up_to``:
    of the best case. ``on-demand`` is the job on nodes that never fail, and cost more.
    """

    above: str
    below: str
    measure: Literal["throughput", "cost"]
    ratio: float
    up_to: bool
    source: str
    dial: str = ""


class Ran(msgspec.Struct, frozen=True):
    """A policy in a setting."""

    samples: int
    node_hours: float


class Setting(msgspec.Struct, frozen=True):
    """``ran``, ``unable``: by policy, its numbers or why there are none. ``undisturbed``: without
    failures.
    """

    job: str
    costs: str
    failures: str
    duration_s: float
    undisturbed: Ran
    ran: dict[str, Ran]
    unable: dict[str, str]

    @property
    def name(self) -> str:
        return f"{self.job}, {'as published' if self.costs == AS_PUBLISHED else 'our costs'}, {self.failures}"


class Dialled(msgspec.Struct, frozen=True):
    """``ratio`` with ``value_s`` seconds of the dial of a claim (by its place among them), in the setting
    ``failures`` as published; ``assumed_s`` there.
    """

    claim: int
    failures: str
    assumed_s: float
    value_s: float
    ratio: float


class Results(msgspec.Struct, frozen=True):
    """Of all settings, and of dials that were turned."""

    price: Price
    settings: tuple[Setting, ...]
    dials: tuple[Dialled, ...] = ()


# ---------------------------------------------------------------------- runs


def questions(shape: Shape, costs: str, trace: Trace) -> list[Question]:
    """Each policy with the schedule that its system has; and at the end the job without failures."""
    quiet = Trace("none", trace.nodes, (), trace.duration_s)
    sheet, asked = SHEETS[DEVICE], []
    for policy, happens in [*((each, trace) for each in POLICIES), ("oobleck", quiet)]:
        job = job_of(shape, SCHEDULES[OWN_SCHEDULE.get(policy, "fused")])
        profile = analytic(job, sheet)
        asked.append(
            Question(job, policy, profile, sheet.memory_bytes, 1, happens, costs_named(costs, policy), costs)
        )
    return asked


def setting_of(shape: Shape, costs: str, mtbf: str, num_jobs: int) -> Setting:
    duration_s = max(MIN_S, LOSSES * MTBFS[mtbf])
    trace = memoryless(NUM_NODES, MTBFS[mtbf], REPAIR_S, duration_s, 0)
    *answers, quiet = run_all(questions(shape, costs, trace), num_jobs)
    assert isinstance(quiet, Outcome), "the job fits these nodes"
    runs, unable = apart(answers)
    return Setting(
        shape.name,
        costs,
        f"a loss every {mtbf}",
        duration_s,
        Ran(quiet.samples, quiet.node_hours),
        {run.policy: Ran(run.samples, run.node_hours) for run in runs},
        {each.policy: each.problem for each in unable},
    )


def settings(num_jobs: int) -> Iterator[Setting]:
    began = time.monotonic()
    for shape in JOBS:
        for costs in COSTS:
            for mtbf in MTBFS:
                found = setting_of(shape, costs, mtbf, num_jobs)
                print(f"{time.monotonic() - began:6.0f} s  {found.name}", file=sys.stderr)
                yield found


def dialled(place: int, claim: Claim, mtbf: str) -> Dialled:
    """The least seconds with which the claim comes out, or the most that were tried."""
    duration_s = max(MIN_S, LOSSES * MTBFS[mtbf])
    trace = memoryless(NUM_NODES, MTBFS[mtbf], REPAIR_S, duration_s, 0)
    asked = {each.policy: each for each in questions(DIALLED, AS_PUBLISHED, trace)[:-1]}
    above, below = asked[claim.above], asked[claim.below]
    assumed_s = float(getattr(below.costs, claim.dial))
    (most,) = run_all([above], 1)
    assert isinstance(most, Outcome), "the job fits these nodes"

    def tried(value_s: float) -> Dialled:
        costs = msgspec.structs.replace(below.costs, **{claim.dial: value_s})
        (found,) = run_all([msgspec.structs.replace(below, costs=costs)], 1)
        assert isinstance(found, Outcome), "the job fits these nodes"
        return Dialled(
            place, f"a loss every {mtbf}", assumed_s, value_s, most.samples / max(1, found.samples)
        )

    low, high = 0.0, tried(assumed_s)
    for _ in range(MAX_TURNS):
        if high.ratio >= claim.ratio:
            break
        low, high = high.value_s, tried(2 * high.value_s)
    if high.ratio < claim.ratio:
        return high
    for _ in range(HALVINGS):
        middle = tried((low + high.value_s) / 2)
        if middle.ratio >= claim.ratio:
            high = middle
        else:
            low = middle.value_s
    return high


def dials(claims: Sequence[Claim]) -> Iterator[Dialled]:
    """Every claim that has a dial, as often as losses come."""
    for place, claim in enumerate(claims):
        for mtbf in MTBFS if claim.dial else ():
            found = dialled(place, claim, mtbf)
            print(found, file=sys.stderr)
            yield found


# ---------------------------------------------------------------------- the page


def ratio_of(claim: Claim, setting: Setting, price: Price) -> float | None:
    """What the claim is about, in ``setting``; inf where ``below`` commits nothing, None where one of the two
    cannot run.
    """
    above = setting.ran.get(claim.above)
    below = setting.undisturbed if claim.below == "on-demand" else setting.ran.get(claim.below)
    if above is None or below is None:
        return None
    if claim.measure == "throughput":
        return above.samples / below.samples if below.samples else inf
    if not above.samples:
        return 0.0
    return (price.on_demand * below.node_hours / below.samples) / (
        price.spot * above.node_hours / above.samples
    )


_ABOUT = """\
`benchmarks/papers.py` makes this page from `benchmarks/papers.json` (the claims) and
`benchmarks/papers-results.json` (runs of the [simulator](simulator.md)). Both systems of a ratio are simulated
with the same failures, one run a setting, each with its own schedule. *As published* is the mechanism of the
paper with **seconds that we assume**: a ratio that comes out proves no paper right, and one that does not
proves none wrong. *Our costs* has both on our engine. The claims are as others quote them. We did not look up
where in a paper they stand, nor for which model and cluster."""


def page(claims: Sequence[Claim], results: Results) -> str:
    parts = ["# What the papers say, and what comes out here", _ABOUT]
    parts += [_section(place, claim, results) for place, claim in enumerate(claims)]
    return "\n\n".join(parts) + "\n"


def _section(place: int, claim: Claim, results: Results) -> str:
    what = "times the samples of" if claim.measure == "throughput" else "times cheaper a sample than"
    title = f"## {claim.above.capitalize()}: {'up to ' if claim.up_to else ''}{claim.ratio:g} {what} {claim.below}"
    ratios = {setting.name: ratio_of(claim, setting, results.price) for setting in results.settings}
    known = {name: ratio for name, ratio in ratios.items() if ratio is not None}
    lines = [title, f"{claim.source}.", _verdict(claim, known)]
    if turned := [dial for dial in results.dials if dial.claim == place]:
        lines.append(_turned(claim, turned))
    rows = [f"| {name} | {_shown(ratio)} |" for name, ratio in ratios.items()]
    return "\n\n".join([*lines, "\n".join(["| setting | ratio |", "|---|---|", *rows])])


def _verdict(claim: Claim, known: dict[str, float]) -> str:
    """The setting nearest to the claim, and the one that is farthest below."""
    if not known:
        return "No setting can run both."
    near = min(known, key=lambda name: abs(log(max(known[name], 1e-9) / claim.ratio)))
    least, most = min(known, key=lambda name: known[name]), max(known, key=lambda name: known[name])
    if known[most] >= claim.ratio * (1 - NEAR):
        said = f"A setting reaches it: {_shown(known[near])} with {near}."
    else:
        said = f"No setting reaches it: the highest ratio is {_shown(known[most])}, with {most}."
    return f"{said} The lowest is {_shown(known[least])}, with {least}."


def _turned(claim: Claim, turned: Sequence[Dialled]) -> str:
    """What somebody's seconds must be."""
    rows = [
        f"| {dial.failures} | {dial.value_s:.0f} s | {dial.ratio:.3g}{'' if dial.ratio >= claim.ratio else ', the most that was tried'} |"
        for dial in turned
    ]
    about = (
        f"The ratio depends on `{claim.dial}` of {claim.below}, which we assume to be {turned[0].assumed_s:g} s.\n"
        f"Raising it, with {DIALLED.name} as published, gives:"
    )
    return "\n".join([about, "", f"| failures | `{claim.dial}` | ratio |", "|---|---|---|", *rows])


def _shown(ratio: float | None) -> str:
    if ratio is None:
        return "one of the two cannot run"
    return "the other commits nothing" if ratio == inf else f"{ratio:.3g}"


def read() -> tuple[tuple[Claim, ...], Results]:
    claims = msgspec.json.decode(CLAIMS.read_bytes(), type=tuple[Claim, ...])
    return claims, msgspec.json.decode(RESULTS.read_bytes(), type=Results)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "dials", "page"))
    parser.add_argument("--jobs", type=int, default=1)
    asked = parser.parse_args(words)
    if asked.what == "page":
        print(page(*read()), end="")
        return 0
    if asked.what == "dials":
        claims, found = read()
        found = msgspec.structs.replace(found, dials=tuple(dials(claims)))
        RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
        return 0
    price = price_of("", DEVICE, 1)
    assert price is not None
    found = Results(price, tuple(settings(asked.jobs)))
    print(msgspec.json.format(msgspec.json.encode(found), indent=1).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
