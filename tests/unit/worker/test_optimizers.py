"""Every rule is torch's own, whatever is updated together; and the kit finds rules that are not as they
promise.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from oobleckd.protocol.joboptimizer import Optimizer, OptimizerGroup
from oobleckd.protocol.optimizers import RULES, Knobs
from oobleckd.protocol.paramgroups import knobs_of
from oobleckd.worker.optimizers import registry
from oobleckd.worker.optimizers.kit import problems_of
from oobleckd.worker.optimizers.plan import check_groups
from oobleckd.worker.optimizers.registry import rule_of
from oobleckd.worker.runtime.errors import UserError
from oobleckd.worker.state.bucket_state import BucketState
from tests.helpers import optimizers as bad
from tests.helpers.optimizers import drawn, shape_of, trained

VECTORS: list[tuple[int, ...]] = [(3,), (1,), (257,)]
MATRICES: list[tuple[int, ...]] = [(17, 5), (32, 64)]
SHAPES = VECTORS + MATRICES
STEPS, LR = 20, 1e-2
MOMENTUM: dict[str, Any] = {"momentum": 0.9}
CASES: dict[str, tuple[Optimizer, list[tuple[int, ...]]]] = {
    "adamw": (Optimizer(betas=(0.9, 0.99)), SHAPES),
    "adam": (Optimizer(name="adam"), SHAPES),
    "sgd": (Optimizer(name="sgd"), SHAPES),
    "momentum": (Optimizer(name="sgd", **MOMENTUM), SHAPES),
    "nesterov": (Optimizer(name="sgd", nesterov=True, **MOMENTUM), SHAPES),
    "muon": (Optimizer(name="muon"), MATRICES),
    "adafactor": (Optimizer(name="adafactor"), SHAPES),
    "lion": (Optimizer(name="lion", betas=(0.9, 0.99)), SHAPES),
}
EQUAL = {"adamw", "adam", "sgd", "momentum", "nesterov", "muon", "adafactor"}
"""Rules whose bits are those of torch's own."""


def torchs(name: str, params: list[Tensor]) -> torch.optim.Optimizer:
    plain = torch.optim
    match name:
        case "adamw":
            return plain.AdamW(params, LR, (0.9, 0.99), fused=True)
        case "adam":
            return plain.Adam(params, LR, weight_decay=0.01, fused=True)
        case "sgd":
            return plain.SGD(params, LR, weight_decay=0.01, fused=True)
        case "momentum" | "nesterov":
            return plain.SGD(params, LR, 0.9, weight_decay=0.01, nesterov=name == "nesterov", fused=True)
        case "muon":
            return plain.Muon(params, LR, 0.01, adjust_lr_fn="match_rms_adamw")
        case _:
            return plain.Adafactor(params, LR, weight_decay=0.01, foreach=False)


def plain_loop(name: str, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """torch's own, or the published formula of what torch does not have."""
    params = [param.requires_grad_() for param in drawn(shapes, 0)]
    optimizer = torchs(name, params) if name != "lion" else None
    moments = [torch.zeros(shape) for shape in shapes]
    for step in range(STEPS):
        grads = drawn(shapes, step + 1)
        for param, grad, moment in zip(params, grads, moments, strict=True):
            param.grad = grad
            if optimizer is None:
                with torch.no_grad():
                    direction = torch.sign(0.9 * moment + 0.1 * grad)
                    param.sub_(LR * (direction + 0.01 * param))
                    moment.copy_(0.99 * moment + 0.01 * grad)
        if optimizer is not None:
            optimizer.step()
    return [param.detach() for param in params]


@pytest.mark.parametrize("name", CASES)
def test_twenty_steps_are_those_of_a_plain_loop(name: str) -> None:
    optimizer, shapes = CASES[name]
    found = trained(shapes, optimizer, STEPS, LR).params
    wanted = plain_loop(name, shapes)
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.equal(mine, theirs) or name not in EQUAL
        torch.testing.assert_close(mine.detach(), theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "adam", "momentum"])
def test_that_is_torchs_plain_kernel_within_float_noise(name: str) -> None:
    found = trained(SHAPES, CASES[name][0], 1, LR).params
    params = [param.requires_grad_() for param in drawn(SHAPES, 0)]
    plain = torchs(name, params)
    plain.param_groups[0]["fused"] = False
    for param, grad in zip(params, drawn(SHAPES, 1), strict=True):
        param.grad = grad
    plain.step()
    for mine, theirs in zip(found, params, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=3e-7, atol=1e-8)


@pytest.mark.parametrize("name", ["adamw", "momentum", "lion", "muon"])
def test_narrow_moments_stay_near_and_second_ones_wide(name: str) -> None:
    optimizer, shapes = CASES[name]
    narrow = trained(shapes, bad.narrowed(optimizer), STEPS, LR)
    wide = trained(shapes, optimizer, STEPS, LR)
    dtypes = {slot.name: slot.dtype for slot in narrow.shape.slots}
    assert torch.bfloat16 in dtypes.values()
    assert dtypes["param"] == dtypes.get("exp_avg_sq", torch.float32) == torch.float32
    assert not all(map(torch.equal, narrow.params, wide.params)) or name == "lion"  # of which a sign is seen
    for mine, theirs in zip(narrow.params, wide.params, strict=True):
        assert float((mine - theirs).detach().abs().mean()) < STEPS * LR / 10


def test_an_empty_bucket_needs_no_update() -> None:
    state = BucketState.fresh(shape_of([]), [])
    state.update_([], applied=0, lr=1.0)
    assert state.tensors() == state.storages() == []


def test_a_frozen_parameter_stays_and_nothing_is_kept_of_it() -> None:
    group = OptimizerGroup(match="block.0", frozen=True)
    optimizer = Optimizer(group=(group, OptimizerGroup(match="block.*", lr_scale=0.5, weight_decay=0.0)))
    state = trained(SHAPES, optimizer, 3, LR)
    assert torch.equal(state.params[0], drawn(SHAPES, 0)[0])
    assert 0 not in state.views("exp_avg")
    begin = BucketState.fresh(shape_of(SHAPES[1:], Optimizer(weight_decay=0.0)), drawn(SHAPES, 0)[1:])
    for step in range(3):
        begin.update_(drawn(SHAPES, step + 1)[1:], applied=step, lr=LR / 2)
    assert all(map(torch.equal, state.params[1:], begin.params))


# --------------------------------------------------------------------------- what rules promise


@pytest.mark.parametrize("name", RULES)
def test_the_kit_finds_nothing_in_our_rules(name: str) -> None:
    told = {"momentum": 0.9} if name == "sgd" else {}
    knobs = knobs_of(Optimizer(name=name, **told), name)
    assert problems_of(lambda: rule_of(name), knobs, matrices_only=bool(RULES[name].rest)) == []


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        (bad.ReadsAnother, "numbers of another"),
        (bad.UsesTheClock, "the clock"),
        (bad.DependsOnGrouping, "updated together with it"),
        (bad.Draws, "draws from a generator"),
        (bad.Remembers, "it made before"),
        (bad.WritesIntoGradients, "writes into gradients"),
    ],
)
def test_the_kit_finds_planted_bad_rules(rule: Any, problem: str) -> None:
    knobs = Knobs((0.9, 0.999), 1e-8, 0.0, nesterov=False)
    assert problems_of(bad.Good, knobs) == []
    found = problems_of(rule, knobs)
    assert any(problem in each for each in found), found


# --------------------------------------------------------------------------- rules of packages


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package with two rules, as pip leaves it."""
    monkeypatch.syspath_prepend(str(bad.installed(tmp_path, good="Good", broken="NoSuch")))
    registry._installed.cache_clear()
    return tmp_path


def test_a_rule_of_an_installed_package_is_found(package: Path) -> None:
    state = trained(SHAPES, Optimizer(name="good"), 2, LR)
    assert [slot.name for slot in state.shape.slots] == ["param", "last"]
    assert torch.equal(state.views("last")[0], drawn(SHAPES, 2)[0])


def test_what_is_not_installed_or_broken_is_named(package: Path) -> None:
    with pytest.raises(UserError, match=r"there is no rule 'goood'.*no package on this machine") as raised:
        rule_of("goood")
    assert raised.value.hint == "did you mean 'good'?"
    with pytest.raises(UserError, match=r"'broken' of tests\.helpers\.optimizers:NoSuch cannot be loaded"):
        rule_of("broken")


def test_the_kit_is_a_program() -> None:
    def told(name: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "oobleckd.worker.optimizers", name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    assert told("lion") == (0, "lion: nothing was found; see docs/optimizers.md for what was looked at\n")
    assert told("lian")[0] == 2


# --------------------------------------------------------------------------- groups


def test_groups_must_have_parameters_of_the_model() -> None:
    def check(*patterns: str, frozen: bool = False) -> None:
        groups = tuple(OptimizerGroup(match=pattern, frozen=frozen) for pattern in patterns)
        check_groups(Optimizer(group=groups), ["a.weight", "b.weight"])

    check("a.*", "*.weight")
    with pytest.raises(UserError, match=r"optimizer\.group\[1\]\.match: 'b': fits no parameter") as raised:
        check("a.*", "b")
    assert "--parameters" in raised.value.hint
    with pytest.raises(UserError, match="all that it fits are of groups before it"):
        check("*", "a.*")
    with pytest.raises(UserError, match="all parameters are frozen"):
        check("*", frozen=True)
