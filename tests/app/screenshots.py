"""Pictures of the explorer's first page for the README: python -m tests.app.screenshots

A wide and a narrow screen, light and dark. The clone's agents play the task of the committed recording. The explorer is started where no run lies,
as a newcomer sees it.
"""

import re
import shutil
import tempfile
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, expect, sync_playwright

from etude.recording import TASK
from kit.disk import atomic_write
from tests.app.serving import PROGRAMS, served

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "results"
SIZES = {"wide": (1280, 1000), "narrow": (390, 1000)}
"""Name → width and height of the screen, CSS pixels."""
SCHEMES = ("light", "dark")
MOST = 150_000
"""Bytes of a picture."""
SLOW = 120_000
"""Milliseconds to wait at most."""


def shot(browser: Browser, address: str, size: tuple[int, int], scheme: str) -> bytes:
    """The first page as PNG, once both agents have played: from the docstring down, and on a narrow screen what the agent after RL did."""
    width, height = size
    look = "dark" if scheme == "dark" else "light"
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=look, reduced_motion="reduce")
    context.set_default_timeout(SLOW)
    expect.set_options(timeout=SLOW)
    tab = context.new_page()
    tab.goto(f"{address}/watch?task={TASK}")
    expect(tab.locator(".rollout > .said:last-child").last).to_contain_text("verdict")
    expect(tab.locator('[data-testid="stApp"][data-test-script-state="notRunning"]')).to_be_attached()
    expect(tab.locator('[data-testid="stVegaLiteChart"] svg.marks').first).to_be_visible()
    begin = tab.locator(".rollout").last if width < 800 else tab.get_by_role("textbox", name=re.compile("Docstring of"))
    begin.evaluate("e => { e.style.scrollMarginTop = '110px'; e.scrollIntoView({block: 'start'}); }")
    tab.wait_for_timeout(500)
    picture = tab.screenshot()
    context.close()
    return picture


def small(picture: bytes) -> bytes:
    """The same picture, with all of its colours or with as many of a palette as fit into `MOST` bytes."""
    image = Image.open(BytesIO(picture)).convert("RGB")
    for colours in (None, 256, 128, 64):
        buffer = BytesIO()
        (image if colours is None else image.quantize(colours, dither=Image.Dither.NONE)).save(buffer, "PNG", optimize=True)
        if buffer.tell() <= MOST:
            return buffer.getvalue()
    raise SystemExit(f"a picture takes {buffer.tell():,} bytes, more than {MOST:,}")


def main() -> None:
    """Writes all four."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        raise SystemExit(f"none of {', '.join(PROGRAMS)} is installed; on Debian and Ubuntu: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-dev-shm-usage"])
        for name, size in SIZES.items():
            for scheme in SCHEMES:
                path = OUT / f"watch-{name}-{scheme}.png"
                atomic_write(path, data := small(shot(browser, address, size, scheme)))
                print(f"{path.relative_to(ROOT)}: {len(data):,} bytes", flush=True)
        browser.close()


if __name__ == "__main__":
    main()
