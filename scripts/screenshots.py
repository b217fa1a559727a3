"""Pictures of the console for docs/: python -m scripts.screenshots. Needs Chromium (`chromium` on PATH)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
START_LIMIT_S = 120
RUN_LIMIT_MS = 60_000
SEED = "7"
# Without these it asks hosts of its maker's at every start; as root there is no sandbox.
QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def chromium() -> str | None:
    """The browser's path, or None where there is none."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@contextmanager
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium(), args=list(QUIET))
        try:
            yield running
        finally:
            running.close()


@contextmanager
def stack(*words: str) -> Iterator[str]:
    """`specwire up` on free ports; the console's address."""
    command = [sys.executable, "-m", "deploy", "up", "--no-ray", "--json", "--listen", "127.0.0.1:0", *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
        try:
            line = running.stdout.readline() if running.stdout is not None else ""
            yield str(json.loads(line)["http"])
        finally:
            running.terminate()
            running.wait(START_LIMIT_S)


def generated(page: Page, address: str, beside: bool = False, temperature: str = "0") -> None:
    """The page after a completion of the prompt that it begins with, a token pointed at."""
    page.goto(address)
    page.fill("#temperature", temperature)
    page.fill("#seed", SEED)
    if beside:
        page.check("#compare")
    page.click("#go")
    page.locator("#state").get_by_text("done", exact=True).wait_for(timeout=RUN_LIMIT_MS)
    page.locator("#on .tokens span.accepted").nth(6).click()
    page.mouse.move(0, 0)


def main() -> int:
    if chromium() is None:
        print("screenshots: needs Chromium on PATH", file=sys.stderr)
        return 1
    IMAGES.mkdir(parents=True, exist_ok=True)
    with stack() as address, browser() as opened:
        wide = opened.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
        generated(wide, address, beside=True)
        wide.screenshot(path=IMAGES / "console.png", full_page=True)
        dark = opened.new_page(viewport={"width": 1280, "height": 900}, color_scheme="dark")
        generated(dark, address, temperature="0.7")
        dark.screenshot(path=IMAGES / "console-dark.png", full_page=True)
        phone = opened.new_page(viewport={"width": 390, "height": 844}, color_scheme="light", has_touch=True)
        generated(phone, address)
        phone.screenshot(path=IMAGES / "console-phone.png", full_page=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
