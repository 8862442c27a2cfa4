"""The table `[optimizer]` of a job.toml: how gradients become updates, and at which rate.

Owns its fields, and what is wrong with a rule and what it is told. Which rules there are is ``optimizers``'s;
whether rates go with the steps of a job, that job's (``job``).
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType

from oobleckd.protocol.jobtable import JobError, JobTable, fields_of
from oobleckd.protocol.optimizers import KEYED, RULES, takes

ScheduleName = Literal["cosine", "linear", "constant", "inverse-sqrt", "wsd"]
DecayType = Literal["linear", "cosine", "1-sqrt"]


class OptimizerGroup(JobTable, frozen=True):
    """Parameters that are updated in another way; each belongs to the first group that it matches."""

    match: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=256,
            description="Which parameters, by name as transformers has it: * is any characters, dots among "
            "them, and ? one, such as `*.mlp.*`.",
        ),
    ]
    lr_scale: Annotated[float, Meta(ge=0, description="Their share of the learning rate.")] = 1.0
    weight_decay: Annotated[
        Annotated[float, Meta(ge=0)] | UnsetType,
        Meta(description="Their weight decay; left out: as without the group."),
    ] = UNSET
    frozen: Annotated[
        bool,
        Meta(
            description="They stay as they are, with nothing kept of them but their weights. Their gradients "
            "are computed and summed all the same, and do not count in the norm."
        ),
    ] = False


class Optimizer(JobTable, frozen=True):
    """How gradients become updates (docs/optimizers.md), clipped by their global norm, and at which rate."""

    lr: Annotated[float, Meta(gt=0, description="Peak learning rate.")] = 3e-4
    betas: Annotated[tuple[float, float], Meta(description="Decay of the moments, each in [0, 1).")] = (
        0.9,
        0.999,
    )
    eps: Annotated[float, Meta(gt=0, description="Added to the root of the second moment.")] = 1e-8
    weight_decay: Annotated[
        float,
        Meta(
            ge=0,
            description="Of weights, in each step: decoupled, or with adam and sgd added to the gradient.",
        ),
    ] = 0.01
    warmup_steps: Annotated[int, Meta(ge=0, description="Steps of linear warm-up from 0.")] = 0
    min_lr_ratio: Annotated[
        float, Meta(ge=0, le=1, description="lr at the last step as a share of the peak.")
    ] = 0.1
    clip_norm: Annotated[
        float, Meta(ge=0, description="Largest global gradient norm; 0 switches clipping off.")
    ] = 1.0
    schedule: Annotated[
        ScheduleName,
        Meta(
            description="What the learning rate does behind the warm-up (docs/recipe.md). cosine, linear: it "
            "falls to min_lr_ratio at the last step. constant: it stays. inverse-sqrt: it falls with the "
            "root of the step, to min_lr_ratio at least. wsd: it stays, and falls in the last decay_steps."
        ),
    ] = "cosine"
    warmup_tokens: Annotated[
        int,
        Meta(ge=0, description="The warm-up in tokens instead of steps, rounded up to whole steps."),
    ] = 0
    decay_steps: Annotated[
        int, Meta(ge=0, description="Steps at the end in which wsd falls to min_lr_ratio; 0: none yet.")
    ] = 0
    decay_type: Annotated[
        DecayType,
        Meta(description="How wsd falls: in a line, as half a cosine, or as one less the root of the way."),
    ] = "linear"
    name: Annotated[
        str,
        Meta(
            pattern=r"^[a-z][a-z0-9_-]{0,62}$(?!\n)",
            description="The rule: adamw, adam, sgd, lion, muon, adafactor, or one of a package that is "
            "installed on the nodes (docs/optimizers.md).",
        ),
    ] = "adamw"
    momentum: Annotated[
        Annotated[float, Meta(ge=0, lt=1)] | UnsetType,
        Meta(description="Of sgd (left out: 0) and muon (left out: 0.95)."),
    ] = UNSET
    nesterov: Annotated[
        bool | UnsetType,
        Meta(description="Whether momentum looks ahead, of sgd (left out: false) and muon (left out: true)."),
    ] = UNSET
    state: Annotated[
        Literal["fp32", "bf16"],
        Meta(
            description="How first moments and momentum are kept; second moments are float32 always. bf16 "
            "shows in the bits of the result."
        ),
    ] = "fp32"
    decay: Annotated[
        Literal["all", "matrices"],
        Meta(
            description="Which parameters decay. matrices: none of norms, biases and embeddings, a head that "
            "is tied to them among these."
        ),
    ] = "all"
    options: Annotated[
        dict[str, bool | int | float | str],
        Meta(description="What a rule of one's own is told besides."),
    ] = {}  # noqa: RUF012 - msgspec gives every struct one of its own
    group: Annotated[
        tuple[OptimizerGroup, ...], Meta(description="Parameters that are updated in another way.")
    ] = ()

    @property
    def kept(self) -> tuple[object, ...]:
        """What decides how much is kept of each parameter, and how long an update takes; empty for what a job
        has that says nothing.
        """
        groups = tuple((group.match, group.frozen) for group in self.group)
        momentum = None if self.momentum is UNSET else self.momentum
        if self.name == "adamw" and self.state == "fp32" and not any(frozen for _, frozen in groups):
            return ()
        return self.name, momentum, self.state, groups, self.options


def check_rule(optimizer: Optimizer) -> None:
    """Raises JobError for what its rule does not take."""
    defaults = {field.name: field.default for field in fields_of(Optimizer)} | {"options": {}}
    taken = takes(optimizer.name)
    for key in KEYED:
        if key not in taken and getattr(optimizer, key) != defaults[key]:
            having = [name for name, sheet in RULES.items() if key in sheet.keys]
            which = f"goes with {_listed(having)}" if having else "goes with a rule of one's own"
            raise JobError(
                f"optimizer.{key}", f"{optimizer.name} takes no {key}: it {which}", f"leave {key} out"
            )
    sheet = RULES.get(optimizer.name)
    if sheet is not None and optimizer.state == "bf16" and not sheet.narrows:
        raise JobError(
            "optimizer.state",
            f"{optimizer.name} keeps nothing that could be bf16",
            "leave state out, or choose another rule",
        )
    if optimizer.name == "sgd" and optimizer.nesterov is True and not optimizer.momentum:
        raise JobError("optimizer.nesterov", "needs a momentum", "set optimizer.momentum, such as 0.9")


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
