"""When a device may read the memory of the others of its shard group."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from oobleckd.worker.runtime.card_memory import CardMemoryError
from oobleckd.worker.runtime.deaths import is_broken_card, is_out_of_memory
from oobleckd.worker.runtime.errors import UserError
from oobleckd.worker.sharding import group as group_module
from oobleckd.worker.sharding.group import UPDATED, ShardGroup, ShownBuckets
from oobleckd.worker.state.window import Handle, OpenedWindow
from oobleckd.worker.transport.mailbox import TensorMessage
from tests.helpers.cards import CUDA
from tests.helpers.engine import World
from tests.helpers.engine_jobs import job

GONE = Handle(2**22 + 7, 3, 4096)
"""Of a process that there cannot be."""


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(job(tmp_path), {"a": [(0, 4)]}, 0, tmp_path, devices_per_stage=2)
    while world.late:
        world.deliver_late()
    return world


def group_of(world: World, device: str) -> ShardGroup:
    return world.nodes[device].executor.group


def say(world: World, device: str, epoch: int, round_: int, handle: Handle | None = None) -> None:
    """What ``device`` says to the other one."""
    other = next(name for name in world.nodes if name != device)
    memory = world.nodes[device].executor.store.memory
    assert memory is not None
    handles = dict.fromkeys(memory.handles, handle) if handle is not None else memory.handles
    meta = msgspec.msgpack.encode(ShownBuckets(handles))
    key = (UPDATED, epoch, round_, device)
    world.nodes[other].messenger.put(TensorMessage(key, device, meta, []))
    group_of(world, other).hear(key)


def test_it_is_ready_when_the_other_one_has_the_weights_of_the_round(world: World) -> None:
    group = group_of(world, "a0/0")
    world.nodes["a0/0"].messenger.purge(lambda _: True)
    assert not group.is_ready(0)
    say(world, "a0/1", 1, 0)
    assert group.is_ready(0)
    assert not group.is_ready(1)
    say(world, "a0/1", 1, 1)
    say(world, "a0/1", 1, 0)  # a word that was overtaken
    assert group.is_ready(1)


def test_words_of_other_layouts_count_for_nothing_and_those_to_come_wait(world: World) -> None:
    group, messenger = group_of(world, "a0/0"), world.nodes["a0/0"].messenger
    messenger.purge(lambda _: True)
    say(world, "a0/1", 0, 5)
    say(world, "a0/1", 2, 5)
    assert not group.is_ready(0)
    assert messenger.has((UPDATED, 2, 5, "a0/1"))
    assert not messenger.has((UPDATED, 0, 5, "a0/1"))


def test_one_who_is_dead_by_then_is_not_waited_for_by_a_crash(world: World) -> None:
    group = group_of(world, "a0/0")
    world.nodes["a0/0"].messenger.purge(lambda _: True)
    say(world, "a0/1", 1, 0, GONE)
    assert not group.is_ready(0)


def test_what_the_system_forbids_is_said(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(_handle: Handle, _device: torch.device) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(group_module, "opened", forbidden)
    world.nodes["a0/0"].messenger.purge(lambda _: True)
    with pytest.raises(UserError, match=r"a0/0 may not read the memory of a0/1: Permission denied") as said:
        say(world, "a0/1", 1, 0)
    assert "/proc" in said.value.hint
    group_of(world, "a0/0").store.device = CUDA
    with pytest.raises(UserError) as said:
        say(world, "a0/1", 1, 0)
    assert "nvidia-smi topo -p2p r" in said.value.hint


def test_one_who_does_not_answer_is_asked_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, right = iter((TimeoutError(), TimeoutError(), None)), group_module.opened
    asked = []

    def slow(handle: Handle, device: torch.device) -> OpenedWindow:
        if (error := next(answers, None)) is not None:
            asked.append(handle.pid)
            raise error
        return right(handle, device)

    monkeypatch.setattr(group_module, "opened", slow)
    world.nodes["a0/0"].messenger.purge(lambda _: True)
    say(world, "a0/1", 1, 0)
    group = group_of(world, "a0/0")
    assert not group.is_ready(0)
    assert world.nodes["a0/0"].executor._open_late(), "there is something to do yet"
    assert not group.is_ready(0)
    assert not group.open_late()
    assert group.is_ready(0)
    assert len(asked) == 2


def test_one_who_died_while_he_did_not_answer_is_forgotten(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(_handle: Handle, _device: torch.device) -> None:
        raise TimeoutError

    monkeypatch.setattr(group_module, "opened", silent)
    world.nodes["a0/0"].messenger.purge(lambda _: True)
    say(world, "a0/1", 1, 0, GONE)
    group = group_of(world, "a0/0")
    assert [*group.unopened] == ["a0/1"]
    monkeypatch.undo()
    assert not group.open_late()
    assert not group.is_ready(0)
    assert group.unopened == {}


def test_a_full_or_a_broken_card_is_no_matter_of_the_job_s(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is wrong is said by the error itself."""
    for result in (2, 719):

        def fails(_handle: Handle, _device: torch.device, result: int = result) -> None:
            raise CardMemoryError("cuMemMap", result, "went wrong")

        monkeypatch.setattr(group_module, "opened", fails)
        world.nodes["a0/0"].messenger.purge(lambda _: True)
        with pytest.raises(CardMemoryError) as said:
            say(world, "a0/1", 1, 0)
        assert (is_out_of_memory(said.value), is_broken_card(said.value)) == (result == 2, result == 719)
