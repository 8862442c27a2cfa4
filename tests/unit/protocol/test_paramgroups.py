"""Which rule, decay and rate a parameter has: a function of its name, shape and layers."""

from __future__ import annotations

from typing import Any

import pytest

from oobleckd.protocol.canonical import canonical
from oobleckd.protocol.job import Job, parse_job
from oobleckd.protocol.joboptimizer import Optimizer, OptimizerGroup
from oobleckd.protocol.jobtable import JobError
from oobleckd.protocol.optimizers import RULES
from oobleckd.protocol.paramgroups import ParamRecipe, knobs_of, recipe_of

NUM_LAYERS = 4
PARAMS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "wte.weight": ((64, 16), (0, 3)),
    "wpe.weight": ((8, 16), (0,)),
    "h.0.ln_1.weight": ((16,), (1,)),
    "h.0.mlp.c_fc.weight": ((16, 64), (1,)),
    "h.1.experts.up": ((4, 16, 64), (2,)),
    "h.1.experts.up_bias": ((4, 64), (2,)),
    "ln_f.weight": ((16,), (3,)),
    "lm_head.weight": ((64, 16), (3,)),
}


def job_of(**optimizer: Any) -> Job:
    train = {"steps": 9, "global_batch": 4, "micro_batch": 2, "sequence": 8}
    return parse_job({"name": "j", "train": train, "optimizer": optimizer})


def recipes(**optimizer: Any) -> dict[str, ParamRecipe]:
    table = Optimizer(weight_decay=0.1, **optimizer)
    return {name: recipe_of(table, name, *param, NUM_LAYERS) for name, param in PARAMS.items()}


def test_a_job_that_says_nothing_has_one_recipe() -> None:
    assert set(recipes().values()) == {ParamRecipe("adamw", 0.1)}


def test_matrices_decay_and_norms_and_embeddings_do_not() -> None:
    decaying = {name for name, recipe in recipes(decay="matrices").items() if recipe.weight_decay}
    assert decaying == {"h.0.mlp.c_fc.weight", "h.1.experts.up", "lm_head.weight"}


def test_muon_takes_hidden_matrices_and_adamw_the_rest() -> None:
    rules = {name: recipe.rule for name, recipe in recipes(name="muon").items()}
    assert {name for name, rule in rules.items() if rule == "muon"} == {"h.0.mlp.c_fc.weight"}
    assert set(rules.values()) == {"muon", "adamw"}


def test_the_first_group_that_fits_decides() -> None:
    groups = (
        OptimizerGroup(match="*.ln_?.*", lr_scale=2.0),
        OptimizerGroup(match="h.*", weight_decay=0.5),
        OptimizerGroup(match="wte.weight", frozen=True, weight_decay=0.0),
    )
    found = recipes(group=groups, decay="matrices")
    assert found["h.0.ln_1.weight"] == ParamRecipe("adamw", 0.0, 2.0, group=0)
    assert found["h.0.mlp.c_fc.weight"] == ParamRecipe("adamw", 0.5, group=1)
    assert found["wte.weight"] == ParamRecipe("adamw", 0.0, frozen=True, group=2)
    assert found["ln_f.weight"] == ParamRecipe("adamw", 0.0)


def test_a_pattern_is_no_regular_expression() -> None:
    table = Optimizer(group=(OptimizerGroup(match="h.0"), OptimizerGroup(match="[a]+*")))
    found = [
        recipe_of(table, name, (2,), (1,), NUM_LAYERS).group for name in ("h.0", "hx0", "h.0.a", "[a]+b")
    ]
    assert found == [0, -1, -1, 1]


def test_what_is_usual_depends_on_the_rule() -> None:
    assert knobs_of(Optimizer(), "muon")[2:4] == (0.95, True)
    assert knobs_of(Optimizer(), "sgd")[2:4] == (0.0, False)
    assert knobs_of(Optimizer(momentum=0.5, nesterov=False), "muon")[2:4] == (0.5, False)


@pytest.mark.parametrize(
    ("optimizer", "problem", "hint"),
    [
        ({"name": "sgd", "betas": [0.9, 0.95]}, "sgd takes no betas: it goes with adamw, adam, lion and muon",
         "leave betas out"),
        ({"momentum": 0.9}, "adamw takes no momentum: it goes with sgd and muon", "leave momentum out"),
        ({"options": {"a": 1}}, "adamw takes no options: it goes with a rule of one's own",
         "leave options out"),
        ({"name": "adafactor", "state": "bf16"}, "adafactor keeps nothing that could be bf16",
         "leave state out, or choose another rule"),
        ({"name": "sgd", "nesterov": True}, "needs a momentum", "set optimizer.momentum, such as 0.9"),
    ],
)  # fmt: skip
def test_what_a_rule_does_not_take_is_refused(optimizer: dict[str, Any], problem: str, hint: str) -> None:
    with pytest.raises(JobError, match=problem) as raised:
        job_of(**optimizer)
    assert raised.value.hint == hint


def test_what_a_job_does_not_say_leaves_no_trace() -> None:
    plain = canonical(job_of(), ("optimizer",))
    assert b"group" not in plain
    assert b"name" not in plain
    said = [
        job_of(name="adam"), job_of(decay="matrices"), job_of(state="bf16"), job_of(name="muon"),
        job_of(name="muon", momentum=0.95), job_of(group=[{"match": "a"}]), job_of(name="own"),
        job_of(name="own", options={"a": 1}),
    ]  # fmt: skip
    assert len({plain, *(canonical(job, ("optimizer",)) for job in said)}) == 1 + len(said)


def test_profiles_are_shared_where_as_much_is_kept() -> None:
    plain = job_of()
    assert job_of(lr=0.1, decay="matrices").costs_depend_on == plain.costs_depend_on
    assert job_of(group=[{"match": "a", "lr_scale": 2}]).costs_depend_on == plain.costs_depend_on
    for optimizer in ({"name": name} for name in RULES if name != "adamw"):
        assert job_of(**optimizer).costs_depend_on != plain.costs_depend_on
    assert job_of(group=[{"match": "a", "frozen": True}]).costs_depend_on != plain.costs_depend_on
