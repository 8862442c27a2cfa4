"""A report: what is in it, that it needs nothing else, and that nobody's name does anything in it."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest
from msgspec.structs import replace

from oobleckd.report.page import page
from oobleckd.report.tables import MOST_ROWS
from tests.unit.report.material import CURVE, INCIDENT, bare, material, with_everywhere

VOID = {"meta", "link", "br"}
EVIL = "<script>alert(1)</script>\"'&{{ 7*7 }}"


class Outline(HTMLParser):
    """The elements of a page, each closed where it should be, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}>"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text.append(data)

    def all(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.seen if tag == name]


def said(text: str) -> str:
    return " ".join(" ".join(Outline(text).text).split())


def test_a_report_says_what_became_of_the_job() -> None:
    text = said(page(material()))
    for part in (
        "job-1 is done at step 10 of 10; 1 incident, 3 steps lost.",
        "inc-1 1970-01-02 00:00:00Z 6 node-2 signal 9 shrink pipeline 0 2 s 3 3 MiB",  # the incident
        "inc-1 250 ms 500 ms 0 s 0 s 1.25 s 2 s 100 ms",  # its phases
        "inc-1 taken shrink pipeline 0 4.5 s",
        "inc-1 not taken roll back at least 1 min 0 s every layer has a copy",
        "1 1970-01-01 23:53:21Z node-1 + node-2; node-3 - start",  # plans
        "2 1970-01-01 23:53:23Z node-1 1 MiB -",
        "useful 1 min 20 s 80.00%", "bubble 13 s 13.00%", "all 1 min 40 s 100%",
        "10 1970-01-02 01:00:00Z held-out 2.7500 2.0000 376 250 ms",
        "6 to 10 3.0000 2.5000 to 4.0000 0.001 2.0000 4,000 0",  # a bin
        'name = "small"',
        "torch 2.13.0",
        "data /data/text 3 1 MiB 1048576-abc",
        "Checkpoint of step 10: /ckpt/step-10",
        "bucket-0.st 2 KiB 5ha256",
        "SHA-256: d1",
    ):  # fmt: skip
        assert part in text, part
    assert "copy 0" not in text, "no time went to copies"


def test_it_needs_nothing_but_itself_and_runs_nothing() -> None:
    made = Outline(page(material()))
    assert made.all("script") == []
    assert [link["href"] for link in made.all("link")] == ["data:,"]
    addresses = [
        value for _, attributes in made.seen for name, value in attributes.items() if name in {"src", "href"}
    ]
    assert all((address and address[0] == "#") or address == "data:," for address in addresses)
    assert not [name for _, attributes in made.seen for name in attributes if name.startswith("on")]
    policy = [each["content"] for each in made.all("meta") if each.get("http-equiv")]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]


@pytest.mark.parametrize("state", ["queued", "running", "failed", "cancelled"])
def test_a_job_that_never_made_a_step_has_a_report(state: str) -> None:
    text = said(page(bare(state)))
    for part in (
        "No step has been committed yet.",
        "nothing was lost",
        "No plan has been in force.",
        "step 0 of 3",
    ):
        assert part in text, part
    assert "<svg" not in page(bare(state))


def test_an_open_incident_and_a_step_alone_are_shown() -> None:
    found = material(
        incidents=(replace(INCIDENT, open=True, committed_s=0.0, rejected=()),),
        curve=replace(
            CURVE, step=1, bins=(replace(CURVE.bins[0], last=1, count=1),), marks=(), evaluations=()
        ),
    )
    text = said(page(found))
    assert "shrink pipeline 0 open 3" in text
    assert "1 4.5000" not in text
    assert 'class="dot"' in page(found)


def test_whoever_named_a_job_does_nothing_in_its_report() -> None:
    text = page(with_everywhere(EVIL))
    made = Outline(text)
    assert made.all("script") == []
    assert {tag for tag, _ in made.seen} == {tag for tag, _ in Outline(page(material())).seen}
    assert {name for _, attributes in made.seen for name in attributes} == {
        name for _, attributes in Outline(page(material())).seen for name in attributes
    }
    assert "49" not in said(text).replace("1049", ""), "a template in a name is text"
    assert said(text).count(EVIL) > 20


def test_only_the_newest_of_many_are_listed() -> None:
    many = tuple(replace(INCIDENT, id=f"inc-{number}") for number in range(1, MOST_ROWS + 51))
    text = said(page(material(incidents=many)))
    assert f"(the newest {MOST_ROWS} of 250 incidents)" in text
    assert "inc-250" in text
    assert "inc-50 " not in text


# ---------------------------------------------------------------------- for everybody


def test_headings_tables_and_pictures_say_what_they_are() -> None:
    text = page(material())
    made = Outline(text)
    assert [tag for tag, _ in made.seen if re.fullmatch("h[1-6]", tag)] == ["h1", *["h2"] * 9]
    assert len(made.all("table")) == len(made.all("caption")) == 10
    assert {each.get("scope") for each in made.all("th")} == {"row", "col"}
    ids = [value for _, attributes in made.seen for name, value in attributes.items() if name == "id"]
    assert len(ids) == len(set(ids))
    regions = [
        value for _, attributes in made.seen for name, value in attributes.items() if name == "aria-label"
    ]
    assert len(regions) == len(set(regions))
    assert {link["href"] for link in made.all("a")} <= {f"#{name}" for name in ids}
    for reference in [each for attributes in made.all("svg") if (each := attributes.get("aria-labelledby"))]:
        assert set(reference.split()) <= set(ids)


def test_pictures_are_svg_with_a_title_and_a_description() -> None:
    found = [
        ET.fromstring(svg)
        for svg in re.findall(r"<svg viewBox=\"[^\"]+\" role.*?</svg>", page(material()), re.DOTALL)
    ]
    assert ["".join(svg[0].itertext()) for svg in found] == [
        "Loss", "Learning rate", "Gradient norm", "Throughput", "Incidents by phase",
        "Where the devices' time went",
    ]  # fmt: skip
    assert "".join(found[0][1].itertext()) == (
        "Loss (nats per token) over steps, from 5.0000 to 3.0000, between 3.0000 and 5.0000. 2 evaluations "
        "are marked. Marked: inc-1 (node-2) after step 5, took 2 s; "
        "inc-1: back to step 2, 3 before where it was."
    )
    numbers = [
        float(value)
        for svg in found
        for each in svg.iter()
        for value in (each.get("x"), each.get("y"))
        if value
    ]
    assert all(0.0 <= value <= 1000.0 for value in numbers)


def luminance(colour: str) -> float:
    digits = colour.lstrip("#")
    digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits[:6]
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (
        part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_colours_can_be_told_apart_in_light_dark_and_on_paper() -> None:
    blocks = re.findall(r":root \{(.*?)\}", page(bare()), re.DOTALL)
    assert len(blocks) == 3
    usual = dict(re.findall(r"--([a-z]+): (#[0-9a-f]+)", blocks[0]))
    for block in blocks:
        colours = usual | dict(re.findall(r"--([a-z]+): (#[0-9a-f]+)", block))
        for ground in ("ground", "panel"):
            for text in ("text", "dim", "link"):
                assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground, block)
        for sign in ("line", "point", "incident", "rollback"):
            assert contrast(colours[sign], colours["ground"]) >= 3.0, (sign, block)
