"""A report in a real browser: nothing that a job's owner wrote runs, and nothing is asked of anybody."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from oobleckd.report.page import page
from tests.helpers.browser import Page, browsing, install
from tests.unit.report.material import with_everywhere

pytestmark = pytest.mark.skipif(
    os.environ.get("OOBLECK_NO_BROWSER_TESTS") == "1", reason="OOBLECK_NO_BROWSER_TESTS is 1"
)
EVIL = """"'><script>document.title = "taken"</script><img src=x onerror='document.title = "taken"'>"""
SHOWN = """
new Promise(done => {
  const found = () => done(JSON.stringify({
    title: document.title, heading: document.querySelector("h1").textContent,
    scripts: document.scripts.length, images: document.images.length,
    svgs: document.querySelectorAll("svg[role]").length,
    beside: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    asked: performance.getEntriesByType("resource").length,
  }));
  document.readyState === "complete" ? found() : addEventListener("load", found);
})
"""


async def shown(page_: Page) -> dict[str, Any]:
    found = await page_.call("Runtime.evaluate", expression=SHOWN, awaitPromise=True, returnByValue=True)
    return dict(json.loads(found["result"]["value"]))


def test_what_others_wrote_is_text_and_the_console_is_silent(tmp_path: Path) -> None:
    assert not (why := install()), why
    file = tmp_path / "report.html"
    file.write_text(page(with_everywhere(EVIL)), encoding="utf-8")

    async def look() -> tuple[dict[str, Any], list[str]]:
        async with browsing(tmp_path, 390, 800) as there:
            await there.open(file.as_uri())
            return await shown(there), there.logged

    found, logged = asyncio.run(look())
    assert found == {
        "title": f"{EVIL}: report", "heading": EVIL, "scripts": 0, "images": 0, "svgs": 6,
        "beside": 0, "asked": 0,
    }  # fmt: skip
    assert logged == []
