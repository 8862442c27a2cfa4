"""W&B: rows as its files have them, and what is sent online, against a stand-in for its package."""

from __future__ import annotations

import sys
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from wandb.proto.wandb_internal_pb2 import AlertRecord, HistoryItem, HistoryRecord
from wandb.proto.wandb_internal_pb2 import Record as WandbRecord

from oobleckd.sinks import wandbfiles
from oobleckd.sinks.wandbrun import WandbSink, is_online
from tests.helpers.committed import Committed, catch_up, run_of

BLOCK = 32 * 1024


def encoded(*records: WandbRecord) -> bytes:
    """A file as the package writes it, in blocks of 32 KiB."""
    data = b":W&B\xe1\xbe\0"
    for record in records:
        rest, kind = record.SerializeToString(), 1
        while True:
            room = BLOCK - len(data) % BLOCK - 7
            if room < 0:
                data += b"\0" * (room + 7)
                continue
            piece, rest = rest[:room], rest[room:]
            kind = (1 if not rest else 2) if kind == 1 else (4 if not rest else 3)
            data += zlib.crc32(bytes([kind]) + piece).to_bytes(4, "little")
            data += len(piece).to_bytes(2, "little") + bytes([kind]) + piece
            if not rest:
                break
    return data


def row(step: int, at: float, **more: str) -> WandbRecord:
    items = {"train/loss": "0.5", "_step": str(step), "_timestamp": repr(at), **more}
    history = HistoryRecord(item=[HistoryItem(nested_key=[k], value_json=v) for k, v in items.items()])
    return WandbRecord(history=history)


def folder_of(root: Path, began: str, *records: WandbRecord, cut: int = 0) -> None:
    folder = root / "wandb" / f"{began}-tiny-1"
    folder.mkdir(parents=True)
    data = encoded(*records)
    (folder / "run-tiny-1.wandb").write_bytes(data[: len(data) - cut])


def steps_in(root: Path) -> list[tuple[int, float]]:
    marks = wandbfiles.read(wandbfiles.folders_of(root)).steps
    return [marks[index] for index in range(len(marks))]


def test_rows_of_all_folders_in_their_order(tmp_path: Path) -> None:
    folder_of(tmp_path, "offline-run-20261129_040000", row(1, 10.5), row(2, 11.5), row(3, 12.5), cut=9)
    later = WandbRecord(alert=AlertRecord(title="tiny-1: inc-3 at step 3", text="gone"))
    folder_of(tmp_path, "run-20261129_050000", row(3, 13.5), later, row(4, 14.5, **{"eval/at": "14.75"}))
    assert steps_in(tmp_path) == [(1, 10.5), (2, 11.5), (3, 13.5), (4, 14.5)]
    written = wandbfiles.read(wandbfiles.folders_of(tmp_path))
    assert written.evaluations[0] == (4, 14.75)
    assert written.incidents == {"inc-3": 3}


def test_records_over_several_blocks(tmp_path: Path) -> None:
    rows = [row(step, 10.0 + step, text=f'"{"x" * (step * 997 % 40_000)}"') for step in range(1, 60)]
    folder_of(tmp_path, "run-20261129_050000", *rows)
    assert [step for step, _ in steps_in(tmp_path)] == list(range(1, 60))


@dataclass
class Server:
    """Runs by their ids: what was logged, by step, as W&B merges it; a step behind the newest is dropped."""

    rows: dict[str, dict[int, dict[str, Any]]] = field(default_factory=dict)
    alerts: list[str] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)

    def init(self, **asked: Any) -> ServerRun:
        self.asked.append(asked)
        return ServerRun(self, self.rows.setdefault(asked["id"], {}))

    def Settings(self, **settings: Any) -> dict[str, Any]:  # noqa: N802 - as the package has it
        return settings


@dataclass
class ServerRun:
    server: Server
    rows: dict[int, dict[str, Any]]

    @property
    def step(self) -> int:
        return max(self.rows, default=-1) + 1

    def log(self, data: dict[str, Any], step: int) -> None:
        if step >= self.step - 1:
            self.rows.setdefault(step, {}).update(data)

    def alert(self, title: str, text: str) -> None:
        self.server.alerts.append(title)

    def finish(self, exit_code: int | None = None) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    found = Server()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=found.init, Settings=found.Settings))
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return found


def test_online_the_server_says_what_it_has(server: Server, tmp_path: Path) -> None:
    """What is in the files here, and was not sent when the process was killed, is sent again."""
    history = Committed("wandb")
    history.commit(9)
    files = [row(each.step, each.at) for each in history.all_steps[:6]]
    folder_of(tmp_path, "run-20261129_050000", *files)
    server.rows["tiny-1"] = {step: {"train/loss": 1.0 / step} for step in range(1, 5)}
    catch_up(WandbSink(run_of(history, "wandb", tmp_path)), history)
    assert {step: data["train/loss"] for step, data in server.rows["tiny-1"].items()} == {
        each.step: each.loss for each in history.all_steps
    }
    assert server.rows["tiny-1"][8]["eval/held/loss"] == 0.25
    (asked,) = server.asked
    assert (asked["mode"], asked["resume"], asked["project"]) == ("online", "allow", "oobleckd")
    assert asked["config"]["train"]["steps"] == 24


def test_after_a_rollback_a_run_is_begun_anew(server: Server, tmp_path: Path) -> None:
    history = Committed("wandb")
    history.commit(6)
    sink = WandbSink(run_of(history, "wandb", tmp_path))
    written = catch_up(sink, history)
    for number, back in ((1, 4), (2, 1)):
        history.roll_back(back)
        history.commit(7)
        written = catch_up(sink, history, written)
        again = server.rows[f"tiny-1-again-{number}"]
        assert list(again) == [each.step for each in history.all_steps]
        assert all(again[each.step]["_timestamp"] == each.at for each in history.all_steps)
    assert {asked["group"] for asked in server.asked} == {"tiny-1"}
    assert server.alerts[-2:] == ["tiny-1: inc-1 at step 7", "tiny-1: inc-2 at step 12"]


def test_offline_unless_there_is_a_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert not is_online()
    netrc = tmp_path / ".netrc"
    netrc.write_text("machine api.wandb.ai login user password key\n", encoding="utf-8")
    netrc.chmod(0o600)
    assert is_online()
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert not is_online()
