"""The reference of job.toml is the model's, and links in the docs lead somewhere."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from oobleckd.ctl import apidocs
from oobleckd.ctl.docs import page
from oobleckd.host.jobfile import load_job
from oobleckd.protocol.job import Job, parse_job

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted(
    [
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("*.md"),
        *ROOT.glob("benchmarks/*.md"),
        *ROOT.glob("tests/*/*.md"),
    ]
)


def test_job_toml_is_up_to_date() -> None:
    written = (ROOT / "docs/job-toml.md").read_text(encoding="utf-8")
    assert written == page(), "run `make docs`"


def test_api_is_up_to_date() -> None:
    written = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    assert written == apidocs.page(), "run `make docs`"


def test_every_type_on_the_api_page_is_on_it() -> None:
    page = apidocs.page()
    named = set(re.findall(r"`([A-Z]\w+(?:View|Range|Steps|Body))`", page))
    assert named
    assert {name for name in named if f"\n## {name}\n" not in page} == set()


def test_every_key_has_a_meaning() -> None:
    rows = [line for line in page().splitlines() if line.startswith("| `")]
    assert len(rows) >= 27
    silent = [row for row in rows if row.split("|")[4].strip() == ""]
    assert not [
        row for row in silent if "betas" not in row and "eps" not in row and "weight_decay" not in row
    ]


def test_the_example_on_the_page_is_a_job() -> None:
    example = page().partition("```toml\n")[2].partition("```")[0]
    assert parse_job(tomllib.loads(example)).name == "gpt2-stdlib"


JOBS = sorted(file for file in ROOT.glob("examples/*.toml") if file.name != "drill.toml")


@pytest.mark.parametrize("file", JOBS, ids=lambda file: file.name)
def test_examples_are_jobs(file: Path) -> None:
    job = load_job(file)
    assert isinstance(job, Job)
    assert msgspec.json.decode(msgspec.json.encode(job), type=Job) == job


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.name)
def test_links_lead_somewhere(file: Path) -> None:
    text = re.sub(r"^```.*?^```", "", file.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"^\[[^]]+\]: (\S+)$", text, re.MULTILINE):
        if "://" not in link:
            path, _, anchor = link.partition("#")
            target = file.parent / path if path else file
            assert target.exists(), link
            assert not anchor or anchor in headings(target), link


def headings(page: Path) -> set[str]:
    """The anchors that a page of Markdown has."""
    found = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in found}


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.name)
def test_references_are_defined(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    defined = set(re.findall(r"^\[([^]]+)\]: ", text, re.MULTILINE))
    used = set(re.findall(r"\]\[([^]\s]+)\]", text))
    assert used - defined == set() or not defined
    assert defined <= used


DECISIONS = sorted(ROOT.glob("docs/decisions/*.md"))


@pytest.mark.parametrize("file", DECISIONS, ids=lambda file: file.stem)
def test_decisions_have_ids_in_a_row_and_a_status(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    ids = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert ids == [f"D-{file.stem}-{number:03d}" for number in range(1, len(ids) + 1)]
    assert len(re.findall(r"^20\d\d-\d\d-\d\d, (?:in force|superseded)", text, re.MULTILINE)) == len(ids)


def test_every_topic_of_decisions_is_in_the_index() -> None:
    index = (ROOT / "docs/decisions.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"\]\(decisions/(\w+)\.md\)", index)) == [file.stem for file in DECISIONS]
