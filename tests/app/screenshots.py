"""Pictures of the explorer for README.md and docs/explorer.md: python -m tests.app.screenshots [NAME ...]

The first page on a wide and a narrow screen, light and dark, as it opens; and of the wide, light one the page of
advantages and a lesson. The clone's agents play the task of the committed recording. The explorer is started where no
run lies, as a newcomer sees it."""

import sys
import tempfile
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, expect, sync_playwright

from etude.play.recording import TASK
from kit.disk import atomic_write
from tests.app.serving import NO_BROWSER, find_browser, served

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "results"
SIZES = {"wide": (1280, 1000), "narrow": (390, 1000)}
"""Name → width and height of the screen, CSS pixels."""
WATCHED = f"watch?task={TASK}"
SHOTS = {f"watch-{size}-{scheme}": (WATCHED, size, scheme) for size in SIZES for scheme in ("light", "dark")} | {
    "explorer": ("advantages", "wide", "light"),
    "lesson": ("lesson?n=4", "wide", "light"),
}
"""Name of a picture → what its address ends with, size and colours of the screen."""
MOST = 150_000
"""Bytes of a picture."""
SLOW = 120_000
"""Milliseconds to wait at most."""


def shot(browser: Browser, address: str, place: str, size: str, scheme: str) -> bytes:
    """A page as PNG, once it is drawn: the first one with both agents' verdicts, a lesson at its first picture, others
    from the top."""
    width, height = SIZES[size]
    look = "dark" if scheme == "dark" else "light"
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=look, reduced_motion="reduce"
    )
    context.set_default_timeout(SLOW)
    expect.set_options(timeout=SLOW)
    tab = context.new_page()
    tab.goto(f"{address}/{place}")
    if place == WATCHED:
        expect(tab.locator(".rollout > .said:last-child").last).to_contain_text("verdict")
    expect(tab.locator('[data-testid="stApp"][data-test-script-state="notRunning"]')).to_be_attached()
    if place.startswith("lesson"):
        drawn = tab.locator('[data-testid="stImage"] img').first
        drawn.evaluate("e => e.scrollIntoView({block: 'center'})")
    else:
        drawn = tab.locator('[data-testid="stVegaLiteChart"] svg.marks').first
    expect(drawn).to_be_visible()
    tab.wait_for_timeout(500)
    picture = tab.screenshot()
    context.close()
    return picture


def small(picture: bytes) -> bytes:
    """The same picture, with all of its colours or with as many of a palette as fit into `MOST` bytes."""
    image = Image.open(BytesIO(picture)).convert("RGB")
    for colours in (None, 256, 128, 64):
        buffer = BytesIO()
        (image if colours is None else image.quantize(colours, dither=Image.Dither.NONE)).save(
            buffer, "PNG", optimize=True
        )
        if buffer.tell() <= MOST:
            return buffer.getvalue()
    raise SystemExit(f"a picture takes {buffer.tell():,} bytes, more than {MOST:,}")


def main(names: Sequence[str]) -> None:
    """Writes the pictures of these names, or all."""
    if strange := set(names) - set(SHOTS):
        raise SystemExit(f"there is no picture {', '.join(sorted(strange))}; there are {', '.join(SHOTS)}")
    with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as address, sync_playwright() as playwright:
        if (program := find_browser(playwright)) is None:
            raise SystemExit(NO_BROWSER)
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-dev-shm-usage"])
        for name in names or SHOTS:
            path = OUT / f"{name}.png"
            atomic_write(path, data := small(shot(browser, address, *SHOTS[name])))
            print(f"{path.relative_to(ROOT)}: {len(data):,} bytes", flush=True)
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1:])
