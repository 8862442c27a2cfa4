"""A deployment with pre-copies that were made: what is still sent in the stop, and that a doubt costs a copy
and no bit.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from oobleckd.planner.plan import Layers, Layout, Range, Transfer
from oobleckd.protocol.messages import Deploy
from oobleckd.worker.reconfigure.deploy import SENT, STATE, WANTED, Deployment, expected, outgoing
from oobleckd.worker.reconfigure.precopy_source import STATE as AHEAD
from oobleckd.worker.reconfigure.precopy_source import UPDATE, PreCopySource
from oobleckd.worker.reconfigure.precopy_target import PreCopyTarget
from oobleckd.worker.runtime.errors import UserError
from oobleckd.worker.state.store import Store
from tests.helpers.engine import RaisingFaults, World
from tests.helpers.engine_jobs import STAGES
from tests.helpers.precopy import NUMBER, TARGET, PreCopyRig

SOURCE = "b1/0"
LAYERS = Layers((Range(1, 3),))
EPOCH = 9


class Stop:
    """The deployment at the source and at the target, once all hold."""

    def __init__(
        self,
        rig: PreCopyRig,
        tmp_path: Path,
        precopy_source: PreCopySource | None,
        precopy_target: PreCopyTarget | None,
    ) -> None:
        self.rig, executor = rig, rig.executor
        self.before = len(rig.sent)
        self.target_store = Store(rig.world.spec, torch.device("cpu"))
        self.source = Deployment(
            self.told(SOURCE),
            executor.store,
            executor.messenger,
            RaisingFaults(SOURCE, tmp_path),
            precopy_source,
            None,
        )
        self.target = Deployment(
            self.told(TARGET),
            self.target_store,
            rig.messenger,
            RaisingFaults(TARGET, tmp_path),
            None,
            precopy_target,
        )

    def told(self, device: str) -> Deploy:
        layout = Layout(EPOCH, 4, {SOURCE: LAYERS, TARGET: LAYERS}, ())
        transfers = tuple(Transfer(layer, SOURCE, TARGET, 1) for layer in LAYERS.layers())
        job, counters = self.rig.world.job, self.rig.executor.counters
        return Deploy(
            device, EPOCH, "job", job, layout, counters, "copy", transfers, {}, "", "", precopied=NUMBER
        )

    def run(self) -> list[str]:
        """To its end; the kinds of messages that were sent for it to the target."""
        self.source.start()
        self.target.start()
        arrived = self.before
        for _ in range(100):
            self.rig.arrive(self.rig.sent[arrived:])
            arrived = len(self.rig.sent)
            while self.target.advance() or self.source.advance():
                pass
            while self.rig.world.late:
                self.rig.world.deliver_late()
        assert not self.target.awaited
        return [str(message.key[0]) for message in self.rig.sent[self.before :]]

    def check(self) -> None:
        store = self.rig.executor.store
        assert self.target.incoming.keys() == store.buckets.keys()
        for bucket, state in self.target.incoming.items():
            own = store.buckets[bucket]
            assert state.exponents == own.exponents
            assert all(torch.equal(a, b) for a, b in zip(state.tensors(), own.tensors(), strict=True))
        self.target_store.adopt(LAYERS, self.target.incoming)
        assert tuple(self.target_store.layers) == tuple(LAYERS.layers())

    @property
    def num_bytes(self) -> int:
        states = self.rig.executor.store.buckets.values()
        return sum(tensor.nbytes for state in states for tensor in state.tensors())


@pytest.fixture
def rig(reference, tmp_path: Path) -> PreCopyRig:
    """Of which all was sent ahead by the end of a run."""
    world = World(reference[0], STAGES, 0, tmp_path)
    rig = PreCopyRig(world, SOURCE)
    rig.begin()
    world.run()
    return rig


def test_what_was_precopied_is_not_sent_again(rig: PreCopyRig, tmp_path: Path) -> None:
    rig.arrive(rig.sent)
    stop = Stop(rig, tmp_path, rig.executor.precopy_source, rig.precopy_target)
    assert stop.run() == [SENT]
    stop.check()
    assert (stop.target.copied_bytes, stop.target.staged_bytes) == (0, stop.num_bytes)
    assert stop.target.staged == set(rig.buckets)


def test_what_is_on_its_way_is_waited_for(rig: PreCopyRig, tmp_path: Path) -> None:
    """Tensor messages keep their order on a link: the word that all was sent comes behind it."""
    rig.arrive(rig.sent[:-2])
    rig.replay()
    stop = Stop(rig, tmp_path, rig.executor.precopy_source, rig.precopy_target)
    stop.before = len(rig.sent) - 2
    assert stop.run() == [UPDATE, UPDATE, SENT]
    stop.check()
    assert stop.target.copied_bytes == 0


def test_what_was_lost_is_asked_for(rig: PreCopyRig, tmp_path: Path) -> None:
    rig.arrive(rig.sent[:-1])
    stop = Stop(rig, tmp_path, rig.executor.precopy_source, rig.precopy_target)
    assert stop.run() == [SENT, *[STATE] * len(rig.buckets)]
    stop.check()
    assert (stop.target.copied_bytes, stop.target.staged_bytes) == (stop.num_bytes, 0)
    assert not stop.source.promised


def test_a_target_that_has_forgotten_asks_for_all(rig: PreCopyRig, tmp_path: Path) -> None:
    stop = Stop(rig, tmp_path, rig.executor.precopy_source, None)
    assert stop.run() == [SENT, *[STATE] * len(rig.buckets)]
    stop.check()
    assert stop.target.staged_bytes == 0


@pytest.mark.parametrize("how", ["forgotten", "broken", "not begun"])
def test_a_source_in_doubt_sends_all(rig: PreCopyRig, tmp_path: Path, how: str) -> None:
    rig.arrive(rig.sent)
    precopy_source = rig.executor.precopy_source
    assert precopy_source is not None
    if how == "broken":
        precopy_source.broken.add(TARGET)
    elif how == "not begun":
        precopy_source.copied = None
    stop = Stop(rig, tmp_path, None if how == "forgotten" else precopy_source, rig.precopy_target)
    assert stop.run() == [STATE] * len(rig.buckets)
    stop.check()
    assert (stop.target.copied_bytes, stop.target.staged_bytes) == (stop.num_bytes, 0)


def test_what_was_taken_back_is_sent_as_it_is(reference, tmp_path: Path) -> None:
    """All hold before the last bucket has left: that one is copied, the others are there."""
    world = World(reference[0], STAGES, 0, tmp_path)
    rig = PreCopyRig(world, SOURCE)
    precopy_source = rig.begin()
    (*there, last) = rig.buckets
    precopy_source.buckets[TARGET] = there
    world.run()
    rig.sent = [message for message in rig.sent if message.key != (AHEAD, NUMBER, last)]
    rig.arrive(rig.sent)
    stop = Stop(rig, tmp_path, precopy_source, rig.precopy_target)
    assert stop.run() == [STATE, SENT]
    stop.check()
    assert stop.target.staged == set(there)
    assert 0 < stop.target.copied_bytes < stop.num_bytes
    assert stop.target.copied_bytes + stop.target.staged_bytes == stop.num_bytes


def test_another_boundary_s_state_is_not_taken(rig: PreCopyRig, tmp_path: Path) -> None:
    """The source says that all was sent, and it was, of a state that is a round older than the stop."""
    last = max(int(message.key[3]) for message in rig.sent if message.key[0] == UPDATE)
    rig.arrive([message for message in rig.sent if message.key[0] != UPDATE or message.key[3] != last])
    rig.replay()
    assert rig.precopy_target.round == rig.executor.counters.round - 1
    stop = Stop(rig, tmp_path, rig.executor.precopy_source, rig.precopy_target)
    assert WANTED not in stop.run()  # that one goes the other way
    stop.check()
    assert stop.target.staged_bytes == 0


def test_source_and_target_agree_on_who_sends_a_tied_weight(rig: PreCopyRig) -> None:
    store = rig.executor.store
    transfers = (Transfer(0, "x/0", TARGET, 1), Transfer(3, "y/0", TARGET, 1))
    coming = expected(store, transfers, TARGET)
    assert set(store.spec.buckets_of(0)) & set(store.spec.buckets_of(3))  # the embedding
    for source in ("x/0", "y/0"):
        mine = [bucket for bucket, sender in coming.items() if sender == source]
        assert outgoing(store, transfers, source) == {TARGET: mine}


def test_a_model_of_another_depth_is_named(rig: PreCopyRig, tmp_path: Path) -> None:
    """The folder that it comes from was changed meanwhile, or is another one on this node."""
    stop = Stop(rig, tmp_path, None, None)
    layout = Layout(EPOCH, 5, {SOURCE: LAYERS}, ())
    stop.source.message = msgspec.structs.replace(stop.source.message, layout=layout)
    with pytest.raises(UserError, match="has 4 layers here, and had 5 where it was measured"):
        stop.source.start()
