"""What is said of keys is what the models say, and the schema for editors takes what ``submit`` takes."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner, Result

from oobleckd.ctl import jobschema
from oobleckd.ctl.docs import page
from oobleckd.ctl.explain import job_keys, looked_up
from oobleckd.ctl.main import main
from oobleckd.ctl.settingsdocs import rows_of_program

ROOT = Path(__file__).resolve().parents[3]
JOBS = sorted(file for file in ROOT.glob("examples/*.toml") if file.name != "drill.toml")


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["explain", *words], catch_exceptions=False)


def test_a_key_is_explained() -> None:
    assert run("train.steps").stdout == (
        "key:      train.steps\ntype:     integer\ndefault:  required\nlimits:   >= 1\n\nOptimizer steps.\n"
    )
    found = json.loads(run("train.seed", "-o", "json").stdout)
    assert (found["kind"], found["path"], found["default"], found["limits"]) == (
        "Explanation", "train.seed", "0", ">= 0",
    )  # fmt: skip


def test_every_key_of_the_page_is_known() -> None:
    table, keys = "", []
    for line in page().splitlines():
        if heading := re.match(r"## (?:`\[+([\w.]+)\]+`|Top level)", line):
            table = heading[1] or ""
        elif row := re.match(r"\| `(\w+)` \|", line):
            keys.append(f"{table}.{row[1]}".strip("."))
    assert len(keys) > 60
    for key in keys:
        assert looked_up(key).path == key


@pytest.mark.parametrize("program", ["ctl", "daemon"])
def test_every_setting_is_known(program: str) -> None:
    for row in rows_of_program(program):
        found = looked_up(f"{program}.{row.key}")
        assert found.text == row.meaning.replace("`", "")
        assert found.variable == (f"OOBLECK_{row.key.upper()}" if row.flags else "")


def test_tables_are_listed() -> None:
    assert [line.split()[0] for line in run().stdout.splitlines()[1:4]] == ["name", "train", "model"]
    assert run("[train]").stdout == run("train").stdout
    shallow = [line.split()[0] for line in run("data").stdout.splitlines() if line]
    deep = [line.split()[0] for line in run("data", "--recursive").stdout.splitlines() if line]
    assert "source.path" in deep
    assert "source.path" not in shallow
    assert len(json.loads(run("-o", "json", "--recursive").stdout)["fields"]) == len(job_keys().fields) + 3


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("train.stps", "error: [train] has no key 'stps'; did you mean 'steps'?\nhint: there are steps, "),
        ("trian", "error: there is no key or table 'trian'; did you mean 'train'?"),
        ("train.steps.more", "train.steps is a key of its own"),
        ("model.config.n_layer", "fields of [model.config] are those of the family's configuration class"),
    ],
)
def test_what_is_no_key(key: str, said: str) -> None:
    result = run(key)
    assert (result.exit_code, result.stdout) == (3, "")
    assert said in result.stderr


# --------------------------------------------------------------------------- schema


def test_the_schema_is_up_to_date() -> None:
    assert (ROOT / "docs/job.schema.json").read_text(encoding="utf-8") == jobschema.page(), "run `make docs`"
    assert run("--schema").stdout == jobschema.page()
    assert run("--schema", "train").exit_code == 2


@pytest.fixture(scope="module")
def checker() -> jsonschema.Draft202012Validator:
    schema = jobschema.schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("file", JOBS, ids=lambda file: file.name)
def test_the_schema_takes_what_submit_takes(file: Path, checker: jsonschema.Draft202012Validator) -> None:
    checker.validate(tomllib.loads(file.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("table", "key", "value", "fits"),
    [
        ("schedule", "redundant_memory", "2GiB", True),
        ("schedule", "shadow_memory", "2GiB", False),
        ("checkpoint", "every", "auto", True),
        ("checkpoint", "every", "often", False),
        ("train", "stps", 3, False),
        ("train", "steps", 0, False),
    ],
)
def test_the_schema_refuses_what_submit_refuses(
    table: str, key: str, value: Any, fits: bool, checker: jsonschema.Draft202012Validator
) -> None:
    job: dict[str, Any] = {
        "name": "small",
        "train": {"steps": 3, "global_batch": 4, "micro_batch": 2, "sequence": 8},
    }
    job.setdefault(table, {})[key] = value
    assert checker.is_valid(job) == fits
