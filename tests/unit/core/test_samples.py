"""Op times as devices tell them: what is kept, and the picture that they make."""

from __future__ import annotations

import msgspec
import pytest

from oobleckd.core import samples
from oobleckd.core.samples import Sample, Samples, every
from oobleckd.core.schedules import sampled_view, share_waited
from oobleckd.core.state import JobRecord
from oobleckd.planner.plan import Layout, Pipeline, Plan, Range, Segment, holdings_of
from oobleckd.protocol.messages import OpTimes
from oobleckd.protocol.parts import Counters, OpTime
from tests.helpers.simjobs import make_job

FIRST = (Segment("a/0", Range(0, 2)), Segment("b/0", Range(2, 4)))
SECOND = (Segment("c/0", Range(0, 3)), Segment("d/0", Range(3, 4)))
PLAN = Plan((Pipeline(("a", "b"), FIRST, (0, 1)), Pipeline(("c", "d"), SECOND, (2, 3))))
LAYOUT = Layout(1, 4, holdings_of((*FIRST, *SECOND)), ())


def told(device: str, round_: int, *ops: OpTime, at: float = 1000.0, job: str = "job-1") -> OpTimes:
    return OpTimes(device, job, 1, 1, Counters(round_, round_, round_), at, msgspec.msgpack.encode(ops))


def sample(round_: int = 0, *gone: str, job: str = "job-1") -> Sample:
    return Sample(job, Counters(round_, round_, round_), 1, LAYOUT, PLAN, None, gone, 5.0)


def forward(stage: int, micro_batch: int, layer: int, start_s: float, **more: bool) -> OpTime:
    return OpTime("F", stage, micro_batch, layer, start_s, start_s + 1.0, **more)


def test_lanes_are_laid_side_by_side_by_the_clocks_of_their_hosts() -> None:
    kept = Samples()
    kept.add(told("a/0", 0, forward(0, 0, 0, 50.0)), sample())
    kept.add(told("b/0", 0, forward(1, 0, 2, 1.5), at=1050.0), sample())
    (found,) = kept.of("job-1")
    assert not found.complete
    view = sampled_view(found)
    assert (view.step, view.at, view.span_s, view.measured) == (1, 1050.0, 2.5, True)
    lanes = {lane.device: lane for lane in view.lanes}
    assert list(lanes) == ["a/0", "b/0", "c/0", "d/0"]
    assert [(op.start_s, op.stop_s) for op in lanes["a/0"].ops] == [(0.0, 1.0)]
    assert [(op.start_s, op.stop_s) for op in lanes["b/0"].ops] == [(1.5, 2.5)]
    assert (lanes["b/0"].pipeline, lanes["b/0"].stages, lanes["c/0"].pipeline) == (0, (1,), 1)
    assert lanes["a/0"].bubble == pytest.approx(0.6)
    assert lanes["c/0"].bubble == 1.0


def test_what_all_waited_is_computed_once_for_so_many_as_have_told() -> None:
    kept = Samples()
    kept.add(told("a/0", 0, forward(0, 0, 0, 50.0)), sample())
    (found,) = kept.of("job-1")
    assert share_waited(found) == 0.0
    kept.add(told("b/0", 0, forward(1, 0, 2, 1.5), at=1050.0), sample())
    waited = [lane.bubble for lane in sampled_view(found).lanes if lane.ops]
    assert share_waited(found) == pytest.approx(sum(waited) / len(waited)) == pytest.approx(0.6)
    found.told.clear()
    found.told.update(dict.fromkeys(("x", "y")))  # type: ignore[arg-type] - nobody looks at them again
    assert share_waited(found) == pytest.approx(0.6)


def test_what_is_re_routed_says_whose_it_was() -> None:
    kept = Samples()
    ops = [
        forward(0, 2, 0, 0.0),
        forward(1, 0, 2, 1.0, again=True),
        OpTime("U", -1, -1, -1, 2.0, 2.5, early=True),
    ]
    kept.add(told("c/0", 3, *ops), sample(3, "b/0"))
    (found,) = kept.of("job-1")
    lanes = {lane.device: lane for lane in sampled_view(found).lanes}
    assert [op.origin for op in lanes["c/0"].ops] == ["", "b/0", ""]
    assert [(op.again, op.early) for op in lanes["c/0"].ops] == [(False, False), (True, False), (False, True)]
    assert lanes["b/0"].dead
    assert lanes["b/0"].ops == ()


def test_the_last_round_of_a_step_and_the_newest_that_all_told_of() -> None:
    kept = Samples()
    for device in LAYOUT.holdings:
        kept.add(told(device, 10), sample(10))
    kept.add(told("a/0", 20), sample(20))
    newest = kept.step("job-1", 0)
    assert newest is not None
    assert newest.counters.round == 10
    only = kept.step("job-1", 21)
    assert only is not None
    assert only.counters.round == 20
    assert kept.step("job-1", 12) is None
    assert kept.step("job-2", 0) is None


def test_they_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "MAX_STEPS", 5)
    monkeypatch.setattr(samples, "MAX_BYTES", 3000)
    kept = Samples()
    for round_ in range(20):
        kept.add(told("a/0", round_), sample(round_))
    assert [each.counters.round for each in kept.of("job-1")] == [15, 16, 17, 18, 19]
    long = [forward(0, mb, 0, float(mb)) for mb in range(20)]
    for round_ in range(10):
        kept.add(told("a/0", round_, *long, job="job-2"), sample(round_, job="job-2"))
    assert kept.num_bytes <= 3000
    assert kept.num_bytes == sum(each.num_bytes for job in kept.by_job for each in kept.of(job))
    assert kept.of("job-2")[-1].counters.round == 9


def test_what_cannot_be_read_is_an_empty_lane() -> None:
    kept = Samples()
    kept.add(msgspec.structs.replace(told("a/0", 0), ops=b"\xc1nonsense"), sample())
    (found,) = kept.of("job-1")
    view = sampled_view(found)
    assert (view.span_s, view.at) == (0.0, 5.0)
    assert not any(lane.ops for lane in view.lanes)


@pytest.mark.parametrize(
    ("step_s", "wanted"), [(0.0, 10), (0.01, 10), (0.1, 10), (0.3, 4), (0.5, 2), (1.0, 1), (60.0, 1)]
)
def test_steps_are_sampled_a_second_apart_but_each_tenth_at_least(step_s: float, wanted: int) -> None:
    job = JobRecord("job-1", make_job(), 0.0, "init", Counters(), Counters())
    assert every(job, step_s, 4) == wanted
    job.step_s.extend([0.5, 0.5, 9.0])
    assert every(job, step_s, 4) == 2
