"""What job.toml may say in words."""

from __future__ import annotations

import pytest

from oobleckd.core.jobs import as_linked
from oobleckd.planner.profile import Profile
from oobleckd.protocol.job import JobError, parse_job
from oobleckd.protocol.units import parse_rate

TRAIN = {"steps": 1, "global_batch": 1, "micro_batch": 1, "sequence": 2}


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [("25Gbit/s", 3.125e9), ("2.5 GB/s", 2.5e9), ("1MiB/s", 2**20), (4096, 4096), (" 10Mbit/s ", 1.25e6)],
)
def test_rates(text: str | int, bytes_per_s: float) -> None:
    assert parse_rate(text) == bytes_per_s


@pytest.mark.parametrize(
    "text", ["", "fast", "25Gbit", "25 /s", "1GB", "-1GB/s", "1e9B/s", "٣GB/s", "1" * 40 + "GB/s"]
)
def test_no_rates(text: str) -> None:
    with pytest.raises(ValueError, match="is no bandwidth"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("link", "says"), [("25", "is no bandwidth"), (25, "less than a kilobyte"), (-1, "less than a kilobyte")]
)
def test_wrong_links(link: str | int, says: str) -> None:
    with pytest.raises(JobError, match=says) as caught:
        parse_job({"name": "a", "train": TRAIN, "resources": {"link": link}})
    assert (caught.value.path, "Gbit/s" in caught.value.hint) == ("resources.link", True)


def test_what_the_job_says_of_its_links_is_what_is_planned_with() -> None:
    measured = Profile("", "", ())
    said = parse_job({"name": "a", "train": TRAIN, "resources": {"link": "400Gbit/s"}})
    assert as_linked(measured, said).link_bytes_per_s == 50e9
    silent = parse_job({"name": "a", "train": TRAIN})
    assert as_linked(measured, silent) == measured
