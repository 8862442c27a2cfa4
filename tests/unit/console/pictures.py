"""``make pictures``: every drawing of the snapshots as a PNG in docs/images, and a page that shows them all.

Those that README and docs show are of full size, the others half as wide. Not a test: pictures are looked at.
"""

from __future__ import annotations

import asyncio
import io
import re
import tempfile
from pathlib import Path

from PIL import Image

from tests.helpers.browser import NO_BROWSER, browsing, find
from tests.loopback.test_console_web import served
from tests.unit.console.drawing import picture
from tests.unit.console.scenes import SCENES
from tests.unit.console.shots import SHOTS, taken

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "docs/images"
GALLERY = FOLDER / "README.md"
PREFIX = "console-"
_SMALL = 0.5
_SHOWN = re.compile(rf"images/{PREFIX}([\w-]+)\.png")
_WEB = FOLDER / f"{PREFIX}web.png"


def shown() -> set[str]:
    """Names of the drawings that README and docs show."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    return {name for page in pages for name in _SHOWN.findall(page.read_text(encoding="utf-8"))}


async def write() -> None:
    """All pictures, and the page; pictures of drawings that are no more go."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    full, made = shown(), set[str]()
    for shot in SHOTS:
        for name, drawing in (await taken(shot)).items():
            path = FOLDER / f"{PREFIX}{name}.png"
            picture(drawing, 1.0 if name in full else _SMALL).save(path, optimize=True)
            made.add(path.stem)
    for path in FOLDER.glob(f"{PREFIX}*.png"):
        if path.stem not in {*made, _WEB.stem}:
            path.unlink()
    GALLERY.write_text(gallery(), encoding="utf-8")
    await write_web()


async def write_web() -> None:
    """The console in a browser, where there is one."""
    if find() is None:
        print(f"{_WEB.name} stays as it is: {NO_BROWSER}")
        return
    with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as url:
        async with browsing(Path(folder)) as page:
            await page.open(url)
            await page.until("● live")
            await page.until(" forward ")
            taken = Image.open(io.BytesIO(await page.picture()))
            taken.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(_WEB, optimize=True)


def gallery() -> str:
    """The page."""
    lines = [
        "# Pictures of the console",
        "",
        "Made by `make pictures`; do not edit. What happens in each of them:",
        "",
    ]
    lines += [f"- *{name}*: {make().says}" for name, make in SCENES.items()]
    for shot in SHOTS:
        lines += [
            "",
            f"## {shot.scene}, {shot.size[0]} x {shot.size[1]}{f', {shot.look}' if shot.look else ''}",
        ]
        lines += [f"![{name}]({PREFIX}{name}.png)" for name in shot.names]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    asyncio.run(write())
