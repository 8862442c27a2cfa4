"""What the routers of a job's layers came to in its newest step, in memory: losses, and tokens by expert.

Owns putting together what devices tell of one step, each of some layers. Not durable, as it is told anew with
every step; what is kept with a step of all layers together is ``steps``'.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from oobleckd.protocol.messages import StepDone
from oobleckd.protocol.parts import RouterFigures

MAX_EXPERTS = 1 << 14
"""Of a layer: who says more is not believed."""


@dataclass(slots=True)
class RoutersOfStep:
    """Of ``step`` in generation ``epoch``: by layer what its router came to, and the tokens of its experts,
    as far as somebody told.
    """

    epoch: int
    step: int
    figures: dict[int, RouterFigures]
    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether all layers are there."""
        return self.tokens.keys() >= self.figures.keys()


@dataclass(slots=True)
class RoutersTold:
    """Of all jobs. ``newest``: the step that devices tell of; ``whole``: the newest that all have told of."""

    newest: dict[str, RoutersOfStep] = field(default_factory=dict)
    whole: dict[str, RoutersOfStep] = field(default_factory=dict)

    def take(self, message: StepDone, num_layers: int) -> None:
        """A device tells of a step of a job with so many layers; what is of an older one is passed over."""
        figures = {layer: message.routers[layer] for layer in range(num_layers) if layer in message.routers}
        if not figures or message.outcome not in {"applied", "skipped"}:
            return
        found = self.newest.get(message.job)
        at = message.epoch, message.counters.step
        if found is not None and at < (found.epoch, found.step):
            return
        if found is None or at > (found.epoch, found.step):
            found = self.newest[message.job] = RoutersOfStep(*at, figures)
        for layer, tokens in message.experts.items():
            if layer in found.figures and len(tokens) <= MAX_EXPERTS:
                found.tokens[layer] = tokens
        if found.complete:
            self.whole[message.job] = found

    def of(self, job: str) -> RoutersOfStep | None:
        """The newest step of ``job`` of which all is known; where there is none, the newest."""
        return self.whole.get(job) or self.newest.get(job)
