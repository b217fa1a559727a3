"""Pictures of the console for docs/: python -m scripts.screenshots. Needs Chromium (`chromium` on PATH)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
START_LIMIT_S = 120
LIMIT_MS = 120_000
WIDTH, PHONE_WIDTH = 1280, 390
SEED = "7"
# A pair without weights that takes its time, so that turns can be told apart.
EMULATED = (
    *("--target", "scripted:7:delay_ms=60"),
    *("--draft", "scripted:7:agree=0.8:delay_ms=12", "--plan", "lockstep:4", "--no-ngram"),
)
# Where the target's token stands among the drafter's guesses, place by place.
RANKS = (0, 0, 1, 0, 0, 0, 1, 0, 0, None, 0, 2, 0, 0)
# Some of what is drafted is not tested yet, and a correction was found waiting.
SEEN = """() => document.querySelectorAll("#tree .edge.pending").length > 10
  && document.querySelector("#tree .found") && document.querySelector("#tree .pruned")"""
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
    with serving("up", *words) as ready:
        yield ready["http"]


@contextmanager
def serving(*words: str) -> Iterator[dict[str, str]]:
    """A command on a free port; what its ready line says."""
    command = [sys.executable, "-m", "deploy", *words, "--json", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
        try:
            line = running.stdout.readline() if running.stdout is not None else ""
            yield dict(json.loads(line))
        finally:
            running.terminate()
            running.wait(START_LIMIT_S)


def generated(page: Page, beside: bool = False, temperature: str = "0") -> None:
    """The page after a completion of the prompt that it has, a token pointed at."""
    page.fill("#temperature", temperature)
    page.fill("#seed", SEED)
    if beside:
        page.check("#compare")
    page.click("#go")
    page.locator("#state").get_by_text("done", exact=True).wait_for()
    tokens, accepted = page.locator("#on .tokens span"), page.locator("#on .tokens span.accepted")
    (accepted.nth(6) if accepted.count() > 6 else tokens.nth(12)).click()
    page.mouse.move(0, 0)


@contextmanager
def elsewhere(target: str, drafter: str, plan: str) -> Iterator[str]:
    """A verifier, a drafter and an orchestrator on their own, so that the drafter branches; the console's address."""
    with ExitStack() as owned:
        verify = owned.enter_context(serving("verify", target))["address"]
        draft = owned.enter_context(serving("draft", drafter))["address"]
        words = ("--verifier", verify, "--drafter", draft, "--plan", plan, "--http", "127.0.0.1:0")
        yield owned.enter_context(serving("orchestrate", *words))["http"]


@contextmanager
def page_at(opened: Browser, address: str, width: int = WIDTH, dark: bool = False) -> Iterator[Page]:
    page = opened.new_page(viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light")
    try:
        page.set_default_timeout(LIMIT_MS)
        page.goto(address)
        yield page
    finally:
        page.close()


def of_the_demo_pair(opened: Browser) -> None:
    with stack() as address:
        with page_at(opened, address) as page:
            generated(page, beside=True)
            page.screenshot(path=IMAGES / "console.png", full_page=True)
        with page_at(opened, address, dark=True) as page:
            generated(page, temperature="0.7")
            page.screenshot(path=IMAGES / "console-dark.png", full_page=True)
        with page_at(opened, address, PHONE_WIDTH) as page:
            generated(page)
            page.screenshot(path=IMAGES / "console-phone.png", full_page=True)


def of_turns(opened: Browser) -> None:
    with stack(*EMULATED) as address, page_at(opened, address) as page:
        page.fill("#prompt", "1 2 3")
        page.fill("#max_tokens", "40")
        generated(page)
        page.locator("#line").screenshot(path=IMAGES / "console-timeline.png")


def of_a_tree(opened: Browser) -> None:
    """Half way, so that some is decided, some pruned and some not tested yet."""
    with tempfile.NamedTemporaryFile("w", encoding="ascii") as file:
        scores = [[0.0, -0.4, -0.8, -1.5] if rank else [0.0, -1.5, -3.0, -4.0] for rank in RANKS]
        json.dump({"prompt": 3, "right": RANKS, "scores": scores}, file)
        file.flush()
        drafter = f"scripted:7:ranks={file.name}:delay_ms=20"
        with (
            elsewhere("scripted:7:delay_ms=60", drafter, "stream:1,10,0,4") as address,
            page_at(opened, address) as page,
        ):
            page.fill("#prompt", "1 2 3")
            page.fill("#max_tokens", "400")
            page.click("#go")
            page.wait_for_function(SEEN)
            page.locator("#branches").screenshot(path=IMAGES / "console-tree.png")


def main() -> int:
    if chromium() is None:
        print("screenshots: needs Chromium on PATH", file=sys.stderr)
        return 1
    IMAGES.mkdir(parents=True, exist_ok=True)
    with browser() as opened:
        of_turns(opened)
        of_a_tree(opened)
        of_the_demo_pair(opened)
    return 0


if __name__ == "__main__":
    sys.exit(main())
