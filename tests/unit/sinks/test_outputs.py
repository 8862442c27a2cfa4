"""Files: each committed step once, whatever is torn, killed, or given up by a rollback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from oobleckd.sinks.base import Sink
from oobleckd.sinks.kinds import sink_class
from tests.helpers.committed import (
    Committed,
    catch_up,
    read_evaluations,
    read_steps,
    run_of,
    wanted_evaluations,
    wanted_steps,
)
from tests.helpers.tfevents import texts

KINDS = ("csv", "jsonl", "tensorboard")


def check(kind: str, folder: Path, history: Committed) -> None:
    """The output has the history, and nothing else."""
    close = 1e-7 if kind == "tensorboard" else 0.0
    for found, wanted in (
        (read_steps(kind, folder), wanted_steps(history)),
        (read_evaluations(kind, folder), wanted_evaluations(history)),
    ):
        assert [step for step, _ in found] == [step for step, _ in wanted]
        assert [value for _, value in found] == pytest.approx([v for _, v in wanted], rel=close, abs=0)


Start = Callable[[str, Committed, Path], Sink]


@pytest.fixture
def start() -> Iterator[Start]:
    """Makes sinks, which are let go of at the end: to whom comes after one it looks as if that was killed."""
    begun: list[Sink] = []

    def make(kind: str, history: Committed, folder: Path) -> Sink:
        begun.append(sink_class(kind)(run_of(history, kind, folder)))
        return begun[-1]

    yield make
    for sink in begun:
        sink.close(over=False)


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_lacks_is_added_and_nothing_twice(start: Start, kind: str, tmp_path: Path) -> None:
    history = Committed(kind)
    sink = start(kind, history, tmp_path)
    history.commit(5)
    written = catch_up(sink, history)
    history.commit(6)
    written = catch_up(sink, history, written)
    catch_up(sink, history, written)
    check(kind, tmp_path, history)
    again = start(kind, history, tmp_path)  # the first one was killed: it never closed anything
    history.commit(3)
    catch_up(again, history)
    check(kind, tmp_path, history)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tail_that_is_torn_anywhere_is_mended(start: Start, kind: str, tmp_path: Path) -> None:
    history = Committed(kind)
    history.commit(4)
    catch_up(start(kind, history, tmp_path), history)
    name = "events.out*" if kind == "tensorboard" else f"steps.{kind}"
    (file,) = tmp_path.glob(name)
    whole = file.read_bytes()
    history.commit(1)
    catch_up(start(kind, history, tmp_path), history)
    longer = file.read_bytes()
    for size in (*range(0, len(whole), 150), *range(len(whole) - 2, len(longer), 19), len(longer) - 1):
        file.write_bytes(longer[:size])
        sink = start(kind, history, tmp_path)
        catch_up(sink, history)
        sink.close(over=False)
        check(kind, tmp_path, history)
    file.write_bytes(whole + b"\0" * 100)  # a loss of power: what was not synced may be zeros
    catch_up(start(kind, history, tmp_path), history)
    check(kind, tmp_path, history)


@pytest.mark.parametrize("seen", [0, 6, 11], ids=["alive", "past-the-rollback", "past-all"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rollback_leaves_no_double_points(start: Start, kind: str, seen: int, tmp_path: Path) -> None:
    """``seen``: steps trained anew before the sink asks again; with eleven the job is past where it was."""
    history = Committed(kind)
    history.commit(10)
    sink = start(kind, history, tmp_path)
    written = catch_up(sink, history)
    before = [(each.step, each.at) for each in history.all_steps]
    history.roll_back(7)
    history.commit(seen)
    if seen == 6:  # it was killed, and is started anew
        sink, written = start(kind, history, tmp_path), None
    written = catch_up(sink, history, written)
    check(kind, tmp_path, history)
    assert [written.steps[i] for i in range(7)] == before[:7]
    history.commit(3)
    catch_up(sink, history, written)
    check(kind, tmp_path, history)
    assert list(written.incidents) == ["inc-1"]


def test_two_rollbacks_and_a_restart_in_one_event_file(start: Start, tmp_path: Path) -> None:
    history = Committed("tensorboard")
    history.commit(9)
    written = catch_up(start("tensorboard", history, tmp_path), history)
    for back in (8, 3):
        history.roll_back(back)
        history.commit(2)
        written = catch_up(start("tensorboard", history, tmp_path), history)
        check("tensorboard", tmp_path, history)
    assert sorted(written.incidents) == ["inc-1", "inc-2"]
    for name in ("inc-1", "inc-2"):
        (text,) = texts(tmp_path, f"incidents/{name}")
        assert text.startswith("node-2 lost; recovered in 1.5 s")
    assert '"name": "tiny"' in texts(tmp_path, "job")[0]


def test_an_evaluation_comes_with_its_step_and_not_before(start: Start, tmp_path: Path) -> None:
    """The daemon may tell of one between the two questions."""
    history = Committed("csv")
    history.commit(8)
    late = history.all_steps.pop()
    sink = start("csv", history, tmp_path)
    written = catch_up(sink, history)
    assert [step for step, _ in read_evaluations("csv", tmp_path)] == [4]
    history.all_steps.append(late)
    catch_up(sink, history, written)
    check("csv", tmp_path, history)


def test_steps_that_the_daemon_keeps_no_more_stay(start: Start, tmp_path: Path) -> None:
    history = Committed("csv")
    history.commit(8)
    catch_up(start("csv", history, tmp_path), history)
    wanted = wanted_steps(history)
    history.state = "done"
    del history.all_steps[:-1], history.all_evaluations[:]
    catch_up(start("csv", history, tmp_path), history)
    assert read_steps("csv", tmp_path) == wanted


def test_losses_of_routers_have_columns_where_the_job_asks_for_them(start: Start, tmp_path: Path) -> None:
    for folder, coefficient in (("without", 0.0), ("with", 0.01)):
        history = Committed("csv")
        train = msgspec.structs.replace(history.spec.train, router_aux_loss_coef=coefficient)
        history.spec = msgspec.structs.replace(history.spec, train=train)
        history.commit(2)
        routed = {"router_aux_loss": 1.25, "router_z_loss": None, "expert_load": 2.5}
        history.all_steps = [msgspec.structs.replace(each, **routed) for each in history.all_steps]
        catch_up(start("csv", history, tmp_path / folder), history)
        header, first, _ = (tmp_path / folder / "steps.csv").read_text().splitlines()
        said = dict(zip(header.split(","), first.split(","), strict=True))
        wanted = {"router_aux_loss": "1.25", "router_z_loss": "nan", "expert_load": "2.5"}
        assert {key: said[key] for key in wanted if key in said} == (wanted if coefficient else {})


def test_incidents_in_csv_are_quoted(start: Start, tmp_path: Path) -> None:
    history = Committed("csv")
    history.commit(3)
    history.roll_back(2)
    catch_up(start("csv", history, tmp_path), history)
    assert (
        (tmp_path / "incidents.csv")
        .read_text(encoding="utf-8")
        .splitlines()[1]
        .endswith('"node-2 lost; recovered in 1.5 s, 1 step lost: its ""last"" copy, gone"')
    )


def test_numbers_that_are_not_finite(start: Start, tmp_path: Path) -> None:
    history = Committed("csv", "jsonl")
    history.commit(1)
    nan = float("nan")
    history.all_steps[0] = type(history.all_steps[0])(
        1, nan, nan.hex(), nan, 1e-3, 12, "", "skipped", 1, 1000.5, 0.0
    )
    for kind in ("csv", "jsonl"):
        catch_up(start(kind, history, tmp_path), history)
        catch_up(start(kind, history, tmp_path), history)
    assert (tmp_path / "steps.csv").read_text(encoding="utf-8").splitlines()[1:] == [
        "1,1000.5,nan,0.001,nan,,,,1,1"
    ]
    assert (tmp_path / "steps.jsonl").read_text(encoding="utf-8") == (
        '{"step":1,"at":1000.5,"loss":null,"lr":0.001,"grad_norm":null,"skipped":1,"generation":1}\n'
    )
