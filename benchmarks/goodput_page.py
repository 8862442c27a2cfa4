"""The page of the goodput table, docs/goodput.md.

python benchmarks/goodput.py --traces DIR -o json > RESULTS.json
python benchmarks/goodput_page.py RESULTS.json > docs/goodput.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.goodput import BEST, DEVICE, NUM_NODES, PUBLISHED, Result, Row, compared, missed, standings
from oobleckd.simulator.report import percent

ADAPTIVE = "adaptive"
_ABOUT = f"""\
Made by `benchmarks/goodput_page.py` of what `benchmarks/goodput.py --traces` found ([how](../benchmarks/README.md#goodputpy)). Nothing here is live: the
[simulator](simulator.md) runs the core and the policies as they are on a virtual clock. {NUM_NODES} nodes of one {DEVICE.upper()} each; failures are drawn, one in the cluster every so often on
average (five seeds, the same ones for every policy), or those of a trace, as it was published with Bamboo or Oobleck. *Best* is a policy on our engine, with the better of two schedules. *As published* is the mechanism of its
paper with **seconds that we assume**, so it says nothing of anybody's program."""
_COLUMNS = """\
Policies are in percent of the samples that `adaptive` committed with the same failures. *Of the ideal*: of what the live devices would commit if each did its share of what the whole
cluster does; *of the oracle*: of what the best plan for whoever is alive would, at once and at no cost ([more](simulator.md#how-to-read-the-tables))."""


class Document(msgspec.Struct, frozen=True):
    """What ``goodput.py -o json`` prints."""

    cells: tuple[Result, ...]


def page(results: Sequence[Result]) -> str:
    """Of all ``results``, which have ``adaptive`` in every cell and rows of the same policies."""
    parts = ["# Goodput: every policy on traces and drawn failures", _ABOUT, _in_short(results), _COLUMNS]
    for job in dict.fromkeys(result.job for result in results):
        parts += _section(job, [result for result in results if result.job == job])
    return "\n\n".join(parts) + "\n"


def _in_short(results: Sequence[Result]) -> str:
    lines = [f"{compared(results)}.".replace(ADAPTIVE, f"`{ADAPTIVE}`", 1)]
    behind = [
        f"{each.where} ({100 * each.share:.3f} % of {each.best.policy})" for each in standings(results) if each.share < 1
    ]  # fmt: skip
    if behind:
        lines.append(f"It is behind in: {'; '.join(behind)}.")
    goals = missed(results)
    lines.append("Its goals are all met." if not goals else f"Goals that are missed: {'; '.join(goals)}.")
    return "\n".join(lines)


def _section(job: str, results: Sequence[Result]) -> Iterator[str]:
    yield f"## {job}"
    others = [(row.setting, row.policy) for row in results[0].rows if row.policy != ADAPTIVE]
    header = ["failures", "`adaptive`, samples/s", "of the ideal", "of the oracle"]
    header += [f"{policy}{', as published' if setting == PUBLISHED else ''}" for setting, policy in others]
    rows = [
        [result.failures, *_own(result), *(_share(result, *each) for each in others)] for result in results
    ]
    rows.append(["*median*", "", "", "", *(_median(results, *each) for each in others)])
    yield "\n".join([_row(header), _row(["---"] * len(header)), *map(_row, rows)])
    yield from dict.fromkeys(
        f"{row.policy.capitalize()} cannot run it: {row.problem}."
        for result in results
        for row in result.rows
        if row.problem
    )


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _found(result: Result, setting: str, policy: str) -> Row:
    return next(row for row in result.rows if (row.setting, row.policy) == (setting, policy))


def _own(result: Result) -> tuple[str, str, str]:
    line = _found(result, BEST, ADAPTIVE).line
    assert line is not None, result
    return f"{line.samples_per_s:.2f}", percent(line.of_ideal), percent(line.of_oracle)


def _shares(results: Sequence[Result], setting: str, policy: str) -> Iterator[float]:
    """Of ``adaptive``'s samples, where the policy can run."""
    for result in results:
        own, line = _found(result, BEST, ADAPTIVE).line, _found(result, setting, policy).line
        if own is not None and line is not None:
            yield line.samples / own.samples


def _share(result: Result, setting: str, policy: str) -> str:
    return next(map(percent, _shares([result], setting, policy)), "-")


def _median(results: Sequence[Result], setting: str, policy: str) -> str:
    shares = list(_shares(results, setting, policy))
    return percent(median(shares)) if shares else "-"


def main(words: Sequence[str]) -> int:
    if len(words) != 1 or words[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    file = Path(words[0])
    try:
        document = msgspec.json.decode(file.read_bytes(), type=Document)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        print(f"error: {file}: {error}\nhint: name a file that goodput.py -o json printed", file=sys.stderr)
        return 2
    print(page(document.cells), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
