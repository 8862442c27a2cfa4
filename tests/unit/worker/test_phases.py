"""The table of a device's phases, and the page that shows it."""

from __future__ import annotations

from pathlib import Path

from oobleckd.worker.round_machine.phases import PHASES

PAGE = Path(__file__).parents[3] / "docs" / "recovery.md"


def drawn() -> str:
    """The table as the page has it."""
    yes = {True: "yes", False: "no"}
    rows = [
        f"| `{phase}` | {yes[may.computes]} | {yes[may.commits]} | {', '.join(f'`{n}`' for n in may.then)} |"
        for phase, may in PHASES.items()
    ]
    head = ["| Phase | Runs tasks | Contributes, votes, commits | Then |", "|---|---|---|---|"]
    return "\n".join([*head, *rows]) + "\n"


def test_the_page_shows_the_table_as_it_is() -> None:
    assert f"\n\n{drawn()}\n" in PAGE.read_text()


def test_every_phase_can_be_reached_and_left() -> None:
    reached, edge = {"held"}, ["held"]
    while edge:
        for following in PHASES[edge.pop()].then:
            if following not in reached:
                reached.add(following)
                edge.append(following)
    assert reached == set(PHASES)
    assert all(set(may.then) - {phase} for phase, may in PHASES.items())


def test_who_has_answered_a_report_commits_nothing_and_only_they_are_asked() -> None:
    """A device that is held computes nothing, so it has nothing to commit."""
    assert {phase for phase, may in PHASES.items() if may.commits} == {"computing", "voted", "early"}
    assert {phase for phase, may in PHASES.items() if may.computes and not may.commits} == {"asked"}
