"""The job's state table."""

from pathlib import Path

import pytest

from oobleckd.core.states import ACTIVE, FINAL, TABLE, after, mermaid


def test_every_state_can_be_reached_and_left():
    reached, edge = {"queued"}, ["queued"]
    while edge:
        state = edge.pop()
        for (source, _), target in TABLE.items():
            if source == state and target not in reached:
                reached.add(target)
                edge.append(target)
    assert reached == set(ACTIVE) | FINAL
    assert {source for source, _ in TABLE} == set(ACTIVE)


def test_a_move_that_is_not_in_the_table_is_a_bug():
    with pytest.raises(AssertionError, match="done has no move 'loss'"):
        after("done", "loss")


def test_the_diagram_names_every_move():
    diagram = mermaid()
    assert diagram.startswith("stateDiagram-v2\n    [*] --> queued\n")
    assert diagram.count("-->") == len(TABLE) + 1 + len(FINAL)
    assert "    running --> recovering: loss\n" in diagram


def test_the_page_shows_the_table_as_it_is():
    page = Path(__file__).parents[3] / "docs" / "states.md"
    assert f"```mermaid\n{mermaid()}```" in page.read_text()
