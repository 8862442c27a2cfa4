"""Groups within one process: what each end keeps, when channels carry messages, and every moment in which
they break.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from oobleckd.worker.groups import gloo, group_messages, payload
from oobleckd.worker.groups.choose import choose
from oobleckd.worker.groups.gloo import GlooBackend
from oobleckd.worker.groups.group import ABORT_S
from oobleckd.worker.groups.ledger import Received, Sent
from oobleckd.worker.groups.manager import GroupManager
from oobleckd.worker.groups.nccl import shares_gpus
from oobleckd.worker.groups.store import ChannelOver, ChannelStore
from oobleckd.worker.runtime.errors import UserError
from oobleckd.worker.transport import wire
from oobleckd.worker.transport.mailbox import Key, Mailbox, TensorMessage
from tests.helpers.channels import TIMEOUT_S, Yard, YardBackend

# ---------------------------------------------------------------------- ledger


def header(number: int) -> group_messages.Header:
    return group_messages.Header(1, number, ("k", number), b"", (), ())


@given(st.integers(0, 8), st.lists(st.sampled_from(["write", "arrive", "acknowledge"]), max_size=30))
def test_every_message_arrives_once_wherever_the_channel_breaks(count: int, moves: list[str]) -> None:
    sent, received = Sent[int](), Received()
    on_channel: deque[int] = deque()
    got, acknowledgements = [], deque[int]()
    for message in range(count):
        sent.add(message)
    for move in moves:
        if move == "write" and sent.unwritten:
            number, message = sent.unwritten.popleft()
            received.announce(header(number))
            on_channel.append(message)
        elif move == "arrive" and on_channel:
            got.append(on_channel.popleft())
            acknowledgements.append(received.arrived().number)
        elif move == "acknowledge" and acknowledgements:
            sent.arrived(acknowledgements.popleft())
    got += sent.rest(received.number)
    assert got == list(range(count))
    assert not sent.kept
    assert not sent.unwritten


def test_numbers_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="message 1 is said to have arrived"):
        Sent[int]().arrived(1)
    received = Received()
    received.announce(header(2))
    with pytest.raises(ValueError, match="message 2 came after message 2"):
        received.announce(header(2))


# ---------------------------------------------------------------------- payload, group messages, store


@pytest.mark.parametrize(
    "tensors",
    [
        [torch.arange(12.0).view(3, 4).t()],
        [torch.tensor(2.5, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bool), torch.arange(5)],
        [torch.empty(0, 3), torch.randn(7, dtype=torch.float64)],
    ],
    ids=["one, not contiguous", "several dtypes", "an empty one"],
)
def test_a_payload_gives_the_same_tensors_in_memory_of_their_own(tensors: list[Tensor]) -> None:
    head = group_messages.header(1, 1, ("k",), b"", tensors)
    body = payload.pack(tensors)
    assert body.numel() == payload.num_bytes(head.dtypes, head.shapes)
    back = payload.unpack(body.clone(), head.dtypes, head.shapes)
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(tensors, back, strict=True))
    assert len({tensor.untyped_storage().data_ptr() for tensor in back if tensor.numel()}) == sum(
        tensor.numel() > 0 for tensor in back
    )


def test_words_come_back_and_others_are_refused() -> None:
    for message in (
        group_messages.Open(1, "GPU-1"),
        group_messages.Stored(1, True, "k", b"\0"),
        header(3),
        group_messages.Over(1, "why"),
    ):
        assert group_messages.decode(group_messages.encode(message)) == message
    with pytest.raises(wire.WireError, match="no group message"):
        group_messages.decode(b"\x80")


def stores() -> tuple[ChannelStore, ChannelStore]:
    """The two ends of a channel, joined."""

    def tell(key: str, value: bytes) -> None:
        other.put(key, value)

    one = ChannelStore(tell, wait_s=TIMEOUT_S)
    other = ChannelStore(one.put, wait_s=TIMEOUT_S)
    return one, other


def test_a_store_tells_the_other_end() -> None:
    one, other = stores()
    one.set("k", b"v")
    assert other.check(["k"])
    assert not other.check(["k", "l"])
    assert other.get("k") == one.get("k") == b"v"
    prefixed = dist.PrefixStore("p", other)  # c10d's own way in: every call goes through C++
    prefixed.set("text", "value")
    assert one.get("p/text") == b"value"
    prefixed.wait(["text"], timedelta(seconds=1))


def test_whoever_waits_in_a_store_hears_of_its_end() -> None:
    one, _ = stores()
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            dist.PrefixStore("p", one).get("never")
        except RuntimeError as error:
            caught.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    one.end("without b/0")
    waiting.join(TIMEOUT_S)
    assert "without b/0" in str(caught[0])
    with pytest.raises(ChannelOver, match="did not set"):
        stores()[0].wait(["never"], timedelta(seconds=0))


# ---------------------------------------------------------------------- managers


class World:
    """Group managers of several devices whose messages go from hand to hand, one link at a time, as the test
    says.
    """

    def __init__(self, *names: str, places: dict[str, str] | None = None, abort_s: float = TIMEOUT_S) -> None:
        self.yard = Yard()
        self.links: dict[tuple[str, str], deque[TensorMessage]] = {}
        self.held: set[tuple[str, str]] = set()
        self.stuck: list[str] = []
        self.mailboxes = {name: Mailbox() for name in names}
        self.managers = {
            name: GroupManager(
                name, self.mailboxes[name], YardBackend(self.yard, (places or {}).get(name, "")),
                self._sender(name), stuck=self.stuck.append, abort_s=abort_s,
            )
            for name in names
        }  # fmt: skip
        self._lock = threading.Lock()

    def _sender(self, source: str) -> Callable[[str, Key, Sequence[Tensor], bytes], bool]:
        def send(peer: str, key: Key, tensors: Sequence[Tensor], meta: bytes) -> bool:
            with self._lock:
                self.links.setdefault((source, peer), deque()).append(
                    TensorMessage(key, source, meta, [tensor.clone() for tensor in tensors])
                )
            return True

        return send

    def send(self, source: str, peer: str, index: int) -> bool:
        """One message; whether a channel took it."""
        tensors = [torch.full((4,), float(index))]
        if self.managers[source].offer(peer, ("F", index), tensors, b"m"):
            return True
        self._sender(source)(peer, ("F", index), tensors, b"m")
        return False

    def carry(self) -> None:
        """Bring everything on links that are not held to its receiver."""
        moved = True
        while moved:
            moved = False
            for link, messages in sorted(self.links.items()):
                while link not in self.held and messages:
                    self.managers[link[1]].put(messages.popleft())
                    moved = True

    def until(self, done: Callable[[], bool]) -> None:
        """Carry messages until ``done``: channels have threads of their own."""
        deadline = time.monotonic() + TIMEOUT_S
        tick = threading.Event()
        while not done():
            self.carry()
            assert time.monotonic() < deadline, "it did not come to pass"
            tick.wait(0.001)

    def open(self, source: str, peer: str, epoch: int = 1) -> None:
        """Open a channel with a first message, number -1, and let its probe through."""
        assert not self.send(source, peer, -1)
        self.yard.let(f"{epoch} {source} > {peer}")
        self.until(lambda: self.managers[source]._groups[epoch]._senders[peer].is_open)

    def numbers(self, name: str) -> list[int]:
        """What has arrived at ``name``, removed."""
        messages = self.mailboxes[name].take_all("F")
        assert all(torch.equal(x.tensors[0], torch.full((4,), float(x.key[1]))) for x in messages)
        return [int(x.key[1]) for x in messages]


@pytest.fixture
def world() -> World:
    made = World("a", "b", "c")
    for manager in made.managers.values():
        manager.enter(1, made.managers)
    return made


def close(world: World) -> None:
    assert all(manager.close(TIMEOUT_S) for manager in world.managers.values())


def test_messages_take_the_channel_once_it_is_open(world: World) -> None:
    world.open("a", "b")
    assert world.numbers("b") == [-1]
    assert all(world.send("a", "b", index) for index in range(5))
    world.carry()
    assert world.numbers("b") == [], "a message was given out before its payload had come"
    world.yard.let("1 a > b", 5)
    world.until(lambda: len(world.mailboxes["b"].keys()) == 5)
    assert world.numbers("b") == list(range(5))
    world.until(lambda: not world.managers["a"]._groups[1]._senders["b"].sent.kept)
    close(world)


@pytest.mark.parametrize("arrived", range(4))
@pytest.mark.parametrize("first", ["sender", "receiver"])
def test_what_a_broken_channel_held_comes_by_the_transport(world: World, arrived: int, first: str) -> None:
    world.open("a", "b")
    world.numbers("b")
    assert all(world.send("a", "b", index) for index in range(3))
    world.yard.let("1 a > b", arrived)
    world.until(lambda: world.managers["b"]._groups[1]._receivers["a"].received.number >= min(arrived, 3))
    world.held = {("a", "b"), ("b", "a")}
    order = ["a", "b"] if first == "sender" else ["b", "a"]
    for name in order:
        world.managers[name].forget(["c"])
    assert not world.send("a", "b", 3), "a group that is over took a message"
    world.held = set()
    world.until(lambda: len(world.mailboxes["b"].keys()) == 4)
    assert sorted(world.numbers("b")) == [0, 1, 2, 3]
    world.until(lambda: world.managers["a"]._groups[1].settled)
    world.carry()
    assert world.numbers("b") == []
    close(world)


def test_the_next_epoch_has_a_group_of_its_own(world: World) -> None:
    world.open("a", "b")
    assert world.send("a", "b", 0)
    for name in ("a", "b"):
        world.managers[name].enter(2, ("a", "b"))
    world.open("a", "b", epoch=2)
    assert world.send("a", "b", 1)
    world.yard.let("2 a > b")
    world.until(lambda: len(world.mailboxes["b"].keys()) == 3)
    assert sorted(world.numbers("b")) == [-1, -1, 0, 1]
    assert not world.send("a", "c", 2), "c is no member"
    close(world)


def test_a_member_that_hears_of_an_epoch_later_opens_its_channels_then(world: World) -> None:
    world.managers["a"].enter(2, ("a", "b"))
    assert not world.send("a", "b", 0)
    world.yard.let("2 a > b")
    world.carry()
    world.managers["b"].enter(2, ("a", "b"))
    world.until(lambda: world.managers["a"]._groups[2]._senders["b"].is_open)
    close(world)


def test_two_devices_in_one_place_have_no_channel_and_the_group_goes_on() -> None:
    world = World("a", "b", "c", places={"a": "GPU-1", "b": "GPU-1"})
    for manager in world.managers.values():
        manager.enter(1, world.managers)
    assert not world.send("a", "b", 0)
    world.until(lambda: "b" in world.managers["a"]._groups[1]._refused)
    assert not world.send("a", "b", 1)
    world.open("a", "c")
    assert world.send("a", "c", 2)
    close(world)


def test_a_message_whose_round_is_over_is_not_sent_again(world: World) -> None:
    world.open("a", "b")
    world.numbers("b")
    tensor = torch.zeros(4)
    assert world.managers["a"].offer("b", ("F", 0), [tensor], b"")
    assert world.send("a", "b", 1)
    world.until(lambda: bool(world.managers["b"]._groups[1]._receivers["a"].received.announced))
    tensor.add_(1)
    world.managers["b"].forget(["c"])
    world.until(lambda: world.managers["a"]._groups[1].settled)
    world.carry()
    assert world.numbers("b") == [1]
    close(world)


def test_a_dead_members_messages_are_not_kept(world: World) -> None:
    world.open("a", "b")
    assert world.send("a", "b", 0)
    world.held = {("a", "b"), ("b", "a")}
    world.managers["a"].forget(["b"])
    assert world.managers["a"]._groups[1].settled
    close(world)


def test_channels_that_do_not_end_are_reported() -> None:
    world = World("a", "b", abort_s=0.05)
    for manager in world.managers.values():
        manager.enter(1, world.managers)
    world.open("a", "b")
    assert world.send("a", "b", 0)
    world.until(lambda: bool(world.yard.payloads["1 a > b"]))
    world.yard.never_ends = True
    world.managers["a"].forget(["b"])
    world.until(lambda: bool(world.stuck))
    assert "channels of epoch 1 did not end in 50 ms: a > b" in world.stuck[0]
    world.yard.never_ends = False
    close(world)


def test_a_group_message_that_makes_no_sense_breaks_the_link(world: World) -> None:
    bad = [group_messages.encode(group_messages.Arrived(1, 7)), b"\x80"]
    world.open("a", "b")
    for meta in bad:
        with pytest.raises(wire.WireError):
            world.managers["a"].put(TensorMessage(group_messages.KEY, "b", meta, []))
    close(world)


# ---------------------------------------------------------------------- choice


def test_the_backend_and_why() -> None:
    cpu = torch.device("cpu")
    assert choose(cpu, {}) == (None, "the transport (it computes on a cpu)")
    assert choose(cpu, {"OOBLECK_BACKEND": "staged"}) == (None, "the transport (OOBLECK_BACKEND=staged)")
    backend, why = choose(cpu, {"OOBLECK_BACKEND": "gloo"})
    assert isinstance(backend, GlooBackend)
    assert "for a test" in why
    for wanted, problem in [("nccl", "computes on a cpu"), ("rail", "is no backend")]:
        with pytest.raises(UserError, match=problem):
            choose(cpu, {"OOBLECK_BACKEND": wanted})


def test_several_ranks_on_a_gpu_need_a_new_nccl_that_was_told() -> None:
    told = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    assert shares_gpus((2, 30, 4), told)
    assert not shares_gpus((2, 30, 4), {})
    assert not shares_gpus((2, 29, 7), told)


def test_gloo_gives_up_on_a_payload_before_a_group_gives_up_on_its_channels() -> None:
    """gloo can miss that a peer has died: then its own limit is all that ends the channel, and the process
    must outlive that.
    """
    assert gloo._STUCK.total_seconds() < 0.75 * ABORT_S
