"""Draws live views that have ended as PNGs, for pages that draw no widget; a real browser runs the view itself."""

from __future__ import annotations

import io
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WEB = Path(__file__).resolve().parents[1] / "ddpkit" / "display" / "web"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTH = 820
# Notebooks stay small: lanes a little lower, and as many colours as anti-aliased text needs.
VIEW_COLOURS, FIGURE_COLOURS = 32, 64
MAX_COVERAGE = 1  # Pillow's name for the way that keeps rare colours: a red rule, an amber word
# A picture has nothing to press or to open.
CSS = """
.ddpkit { --ddp-head: #ffffff; }
.ddpkit :is(.ddp-actions, .ddp-more) { display: none !important; }
.ddpkit .ddp-turn { visibility: hidden; }
.ddpkit .ddp-log.ddp-log { min-height: 40px; max-height: 170px; }
"""
DRAW = """state => {
  const model = { get: name => state[name], on() {}, off() {}, send() {} }
  document.body.replaceChildren()
  view.render({ model, el: document.body })
}"""


def pictures(states: Sequence[dict[str, Any]]) -> list[bytes]:
    """A PNG for each state of a view: its traits `job` and `final`."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 600})
        page.add_style_tag(content=(WEB / "view.css").read_text(encoding="utf-8") + CSS)
        script = "".join((WEB / name).read_text(encoding="utf-8") for name in ("view.js", "evidence.js"))
        page.add_script_tag(content=script.replace("export default", "window.view ="), type="module")
        page.wait_for_function("window.view")
        drawn = []
        for state in states:
            page.evaluate(DRAW, state)
            drawn.append(few_colours(page.locator(".ddpkit").screenshot(), VIEW_COLOURS))
        browser.close()
    return drawn


def few_colours(png: bytes, colours: int = FIGURE_COLOURS) -> bytes:
    """The same picture with a small palette, at a third of the size."""
    from PIL import Image

    small = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(colours, MAX_COVERAGE, dither=Image.Dither.NONE).save(
        small, format="png", optimize=True
    )
    return small.getvalue()
