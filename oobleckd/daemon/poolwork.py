"""What the processes of the planning pool do. Large arguments and results travel as msgpack.

Pickle takes some fifty times as long (0.2 s for the templates of 128 blocks on up to 64 nodes of 8 devices),
and both of its ends are in the daemon's process, where the event loop waits meanwhile.

That process imports this module, too, to name what is to be done: what does it (with scipy 50 MB) is imported
where it is done, and ``load`` does so before anybody waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import msgspec

from oobleckd.core.questions import LossQuestion, StepQuestion
from oobleckd.core.samples import Sample
from oobleckd.daemon.past import PastText, past_text
from oobleckd.planner.plan import Template
from oobleckd.planner.policy import Proposal, Setup, Situation
from oobleckd.planner.sizing.catalogue import CatalogueEntry
from oobleckd.protocol.text import shown_json
from oobleckd.protocol.watch import ImpactView

_setup_of = lru_cache(4)(msgspec.msgpack.Decoder(Setup).decode)
templates_of = lru_cache(4)(msgspec.msgpack.Decoder(tuple[Template, ...]).decode)
_situation_of = msgspec.msgpack.Decoder(Situation).decode
proposal_of = msgspec.msgpack.Decoder(Proposal).decode
_loss_of = msgspec.msgpack.Decoder(LossQuestion).decode
_sample_of = msgspec.msgpack.Decoder(Sample).decode
_step_of = msgspec.msgpack.Decoder(StepQuestion).decode
impact_of = msgspec.msgpack.Decoder(ImpactView).decode
# Not pickle, both ends of which run in the daemon's process: 0.2 s for the templates of 128 blocks, a few
# ms as msgpack. (D-daemon-003)
pack = msgspec.msgpack.encode


def load() -> None:
    """Import everything that the others need."""
    from oobleckd.core import impact, modelled, schedules
    from oobleckd.planner import policies
    from oobleckd.planner.policies import stagesize
    from oobleckd.planner.sizing import catalogue, exchanged

    assert all((impact, modelled, schedules, catalogue, exchanged, policies, stagesize))


def chosen(policy: str, setups: Sequence[bytes], num_nodes: int) -> int:
    """Which of ``setups`` plans best. Raises PlanError."""
    from oobleckd.planner.policies import stagesize

    return stagesize.chosen(policy, tuple(map(_setup_of, setups)), num_nodes)


def prepare(policy: str, setup: bytes) -> bytes:
    """The templates. Raises PlanError."""
    from oobleckd.planner import policies

    return pack(policies.prepare(policy, _setup_of(setup)))


def adapt(policy: str, setup: bytes, templates: bytes, situation: bytes, sizes: tuple[int, ...]) -> bytes:
    """The proposal. Raises PlanError."""
    from oobleckd.planner import policies

    asked, moment = _setup_of(setup), _situation_of(situation)
    return pack(policies.deployable(policy, asked, templates_of(templates), moment, sizes))


def ahead(setup: bytes, templates: bytes, numbers: Sequence[int]) -> tuple[CatalogueEntry, ...]:
    """Entries of the catalogue."""
    from oobleckd.planner.sizing import catalogue, exchanged

    asked, made = _setup_of(setup), templates_of(templates)
    reduce_s = exchanged.reduce_s_of(asked, made, max(numbers))
    return catalogue.entries(made, numbers, asked.f, asked.num_micro_batches, reduce_s)


def impact(setup: bytes, templates: bytes, question: bytes, sizes: tuple[int, ...]) -> bytes:
    """What would follow. Raises PlanError."""
    from oobleckd.core.impact import impact_view

    return pack(impact_view(_loss_of(question), _setup_of(setup), templates_of(templates), sizes))


def best_s(policy: str, setup: bytes, templates: bytes, situation: bytes, sizes: tuple[int, ...]) -> float:
    """Seconds of a step of the plan that ``policy`` makes from nothing. Raises PlanError."""
    from oobleckd.planner import policies

    moment = _situation_of(situation)
    return policies.proposed(policy, _setup_of(setup), templates_of(templates), moment, sizes).plan.step_s


def sampled(sample: bytes) -> bytes:
    """A step as devices told of it, as JSON."""
    from oobleckd.core.schedules import sampled_view

    return shown_json(msgspec.json.encode(sampled_view(_sample_of(sample))))


def past(path: Path, at: float, span_s: float) -> PastText:
    """A moment, as JSON. Raises PastError."""
    return past_text(path, at, span_s)


def schedule(question: bytes) -> bytes:
    """A step as modelled, as JSON. Raises PlanError, ScheduleError."""
    from oobleckd.core.modelled import modelled_view

    return shown_json(msgspec.json.encode(modelled_view(_step_of(question))))


__all__ = [
    "adapt",
    "ahead",
    "best_s",
    "chosen",
    "impact",
    "impact_of",
    "load",
    "pack",
    "past",
    "prepare",
    "proposal_of",
    "sampled",
    "schedule",
    "templates_of",
]
