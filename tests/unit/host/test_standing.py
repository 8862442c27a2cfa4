"""What a fork cannot take on is compared; what it can be given is not."""

from __future__ import annotations

import os

import pytest

from oobleckd.host.standing import ENVIRONMENT, difference, standing


def test_the_same_process_has_the_same_standing() -> None:
    assert difference(standing(os.environ), standing(os.environ)) == ""


@pytest.mark.parametrize(
    "name",
    ["OMP_PROC_BIND", "MKL_CBWR", "GLIBC_TUNABLES", "LD_PRELOAD", "PYTHONPATH", "HF_HOME", "TORCH_LOGS"],
)
def test_what_is_read_at_the_import_counts(name: str) -> None:
    assert difference(standing({}), standing({name: "x"})) == "environment"


@pytest.mark.parametrize("name", ["OOBLECK_STATE", "PATH", "PYTEST_CURRENT_TEST", "SSH_CLIENT"])
def test_what_a_fork_is_given_does_not(name: str) -> None:
    assert difference(standing({}), standing({name: "x"})) == ""


def test_what_a_device_has_anyway_is_no_difference() -> None:
    assert difference(standing({}), standing(ENVIRONMENT)) == ""


def test_differences_are_named() -> None:
    ours = standing({})
    assert difference(ours, {**ours, "limits": "", "umask": "0077"}) == "limits, umask"


def test_a_stricter_mask_of_files_is_a_difference() -> None:
    before = os.umask(0o077)
    try:
        other = standing({})
    finally:
        os.umask(before)
    assert difference(standing({}), other) == "umask"
