"""The console in a real browser, against a whole stack."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page

from scripts.screenshots import browser, chromium
from specwire.client import Client
from tests.integration.stack_process import END_LIMIT, running

pytestmark = pytest.mark.skipif(chromium() is None, reason="needs Chromium (`chromium` on PATH)")

PROMPT = "1 2 3"
LIMIT_MS = 60_000
PAIR = ("--target", "scripted:7:delay_ms=20", "--draft", "scripted:7:agree=0.8:delay_ms=2")


@pytest.fixture(scope="module")
def ready() -> Iterator[dict[str, str]]:
    with running("up", "--no-ray", "--json", "--listen", "127.0.0.1:0", *PAIR) as stack:
        yield json.loads(stack.line())
        stack.process.send_signal(signal.SIGINT)
        assert stack.wait(END_LIMIT) == 0, stack.said()


@pytest.fixture(scope="module")
def page(ready: dict[str, str]) -> Iterator[Page]:
    """One page for all tests: a browser's start is slow. What it complains of fails them."""
    complaints: list[str] = []
    with browser() as opened:
        page = opened.new_page()
        page.set_default_timeout(LIMIT_MS)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
        page.goto(ready["http"])
        yield page
        assert complaints == []


def ask(page: Page, tokens: int) -> None:
    page.fill("#prompt", PROMPT)
    page.fill("#max_tokens", str(tokens))
    page.keyboard.press("Control+Enter")


def state(page: Page, text: str) -> None:
    page.locator("#state").get_by_text(text, exact=True).wait_for()


def test_a_prompt_becomes_the_text_that_grpc_has(page: Page, ready: dict[str, str]) -> None:
    with Client(ready["address"]) as client:
        done = client.complete(PROMPT, max_tokens=60)
    ask(page, 60)
    state(page, "done")
    assert page.locator("#on .tokens").text_content() == done.text
    spans = page.locator("#on .tokens span")
    assert spans.count() == len(done.tokens)
    kinds = {name: page.locator(f"#on .tokens span.{name}").count() for name in ("accepted", "recovered", "bonus")}
    assert sum(kinds.values()) + page.locator("#on .tokens span.direct").count() == len(done.tokens)
    assert kinds["accepted"] > 0
    assert page.locator("#legend .accepted b").text_content() == str(kinds["accepted"])


def test_charts_and_timeline_show_what_happened(page: Page) -> None:
    ask(page, 40)
    state(page, "done")
    assert page.locator("#rates polyline").count() == 1
    assert page.locator("#places rect.bar:not(.back)").count() > 0
    assert "window" in (page.locator("#plan").text_content() or "")
    assert page.locator("#timeline rect.draft").count() > 0
    assert page.locator("#timeline rect.forward").count() > 0
    assert page.locator("#timeline .rollback").count() > 0
    before = page.locator("#timeline svg").get_attribute("width")
    page.locator("#zoom").fill("80")
    page.locator(f'#timeline svg:not([width="{before}"])').wait_for()


def test_a_token_tells_its_story(page: Page) -> None:
    ask(page, 20)
    state(page, "done")
    page.locator("#on .tokens span").nth(3).hover()
    told = page.locator("#inspector").text_content() or ""
    assert "position 6" in told
    assert "probability" in told
    page.focus("#on .tokens")
    page.keyboard.press("End")
    assert "position 22" in (page.locator("#inspector").text_content() or "")


def test_beside_drafting_off_the_text_is_the_same(page: Page) -> None:
    page.check("#compare")
    ask(page, 30)
    state(page, "done")
    assert "the texts are identical" in (page.locator("#versus").text_content() or "")
    assert page.locator("#off .tokens").text_content() == page.locator("#on .tokens").text_content()
    page.uncheck("#compare")


def test_escape_cancels_the_session(page: Page) -> None:
    ask(page, 2000)
    page.locator("#on .tokens span").nth(10).wait_for()
    page.keyboard.press("Escape")
    state(page, "cancelled")
    count = page.locator("#on .tokens span").count()
    assert 10 < count < 2000
    page.locator("#sessions:not(:has(tr))").wait_for(state="attached")


def test_what_is_refused_is_said(page: Page) -> None:
    page.select_option("#rule", "rejection")
    ask(page, 20)
    page.locator("#state.bad").wait_for()
    assert "rule" in (page.locator("#state").text_content() or "")
    page.select_option("#rule", "")
