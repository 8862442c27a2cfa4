"""Looks whether a rule keeps what every rule promises: ``python -m oobleckd.worker.optimizers NAME``."""

from __future__ import annotations

import sys

import click
import torch

from oobleckd.protocol.joboptimizer import Optimizer
from oobleckd.protocol.optimizers import RULES, takes
from oobleckd.protocol.paramgroups import knobs_of
from oobleckd.worker.optimizers.kit import problems_of
from oobleckd.worker.optimizers.registry import rule_of
from oobleckd.worker.runtime.errors import UserError

_MOMENTUM = 0.9


@click.command()
@click.argument("name")
def main(name: str) -> None:
    """Try the rule NAME, one of ours or of an installed package, on small tensors of this machine's CPU.

    Exit code 0: nothing was found; 1: something was, and is listed; 2: there is no such rule.
    """
    torch.set_num_threads(1)
    try:
        rule = rule_of(name)
    except UserError as error:
        print(f"error: {error}\nhint: {error.hint}", file=sys.stderr)
        sys.exit(2)
    knobs = knobs_of(Optimizer(name=name), name)
    if "momentum" in takes(name) and not knobs.momentum:
        knobs = knobs._replace(momentum=_MOMENTUM)
    matrices_only = name in RULES and bool(RULES[name].rest)
    found = problems_of(type(rule) if name not in RULES else lambda: rule, knobs, matrices_only=matrices_only)
    for problem in found:
        print(f"{name}: {problem}")
    if found:
        sys.exit(1)
    print(f"{name}: nothing was found; see docs/optimizers.md for what was looked at")


if __name__ == "__main__":
    main()
