"""The console in a real browser, against a whole stack."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page
from playwright.sync_api import TimeoutError as PlaywrightTimeoutError

from orchestrator.session.stats import TracedVerdict
from scripts.screenshots import browser, chromium
from specwire.client import Client
from specwire.core.messages import Outcome, SourceKind, Verdict
from specwire.v1 import verify_pb2
from tests.integration.stack_process import END_LIMIT, running
from tests.wait import asked_blocking

pytestmark = pytest.mark.skipif(chromium() is None, reason="needs Chromium (`chromium` on PATH)")

PROMPT = "1 2 3"
LIMIT_MS = 120_000
# Of what is seen only while a text is made.
SOON_MS = 10_000
# Until what a token is told of is drawn.
SHOWN_MS = 1_000
# Four draft tokens at a time, whatever pays: what there is to see does not hang on how busy the machine is.
AT_WORK = ("--draft", "scripted:7:agree=0.8:delay_ms=2", "--plan", "lockstep:4", "--no-ngram")
PAIR = ("--target", "scripted:7:delay_ms=40", *AT_WORK)
# Its text repeats itself.
COPYING = "scripted:7:vocab=64:memory=1:delay_ms=20"
KINDS = ("accepted", "recovered", "bonus", "direct")
# The W3C's least contrast of text (WCAG 2.2, 1.4.3), and how it is computed.
LEAST_CONTRAST = 4.5
CONTRAST = """(selector) => {
  const element = document.querySelector(selector);
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => parts(colour).slice(0, 3).map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (one) => {
    const colour = getComputedStyle(one).backgroundColor;
    return parts(colour)[3] === 0 ? behind(one.parentElement) : colour;
  };
  const [low, high] = [light(getComputedStyle(element).color), light(behind(element))].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}"""

CELLS = "(table) => Array.from(table.rows, (row) => Array.from(row.cells, (cell) => cell.textContent))"


@pytest.fixture(scope="module")
def ready() -> Iterator[dict[str, str]]:
    with running("up", "--json", "--listen", "127.0.0.1:0", *PAIR) as stack:
        yield stack.ready()
        stack.process.send_signal(signal.SIGINT)
        assert stack.wait(END_LIMIT) == 0, stack.said()


@pytest.fixture(scope="module")
def opened() -> Iterator[Browser]:
    """One browser for all tests: its start is slow."""
    with browser() as running_browser:
        yield running_browser


@pytest.fixture(scope="module")
def page(opened: Browser, ready: dict[str, str]) -> Iterator[Page]:
    """One page for all tests. What it complains of fails them, and so does whatever it asks of anybody else."""
    complaints: list[str] = []
    asked: list[str] = []
    page = opened.new_page()
    page.set_default_timeout(LIMIT_MS)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
    page.on("request", lambda request: asked.append(request.url))
    page.goto(ready["http"])
    yield page
    assert complaints == []
    assert [url for url in asked if not url.startswith(ready["http"])] == []


def ask(page: Page, tokens: int) -> None:
    page.fill("#prompt", "")
    page.locator("#prompt").press_sequentially(PROMPT)
    page.fill("#max_tokens", str(tokens))
    page.keyboard.press("Control+Enter")


def ask_until(page: Page, tokens: int, *shown: str) -> None:
    """Ask again until all of this is shown of a text: a drafter may be late for one, or a guess not pay."""

    def text() -> bool:
        ask(page, tokens)
        state(page, "done")
        return all(page.locator(each).count() for each in shown)

    asked_blocking(text, bool)


def state(page: Page, text: str) -> None:
    page.locator("#state").get_by_text(text, exact=True).wait_for()


def told(page: Page) -> str:
    return page.locator("#inspector").text_content() or ""


def test_who_comes_first_is_told_what_this_is(page: Page) -> None:
    state(page, "ready")
    assert "the target, decides every token" in (page.locator("#about").text_content() or "")
    legend = page.locator("#legend li").all_text_contents()
    assert [line.split(":")[0] for line in legend] == list(KINDS)
    assert all(page.locator(f"#legend .{kind}").is_visible() for kind in KINDS)


def test_a_prompt_becomes_the_text_that_grpc_has(page: Page, ready: dict[str, str]) -> None:
    state(page, "ready")
    with Client(ready["address"]) as client:
        done = client.complete(PROMPT, max_tokens=60)
    ask_until(page, 60, "#on .tokens span.accepted")
    assert page.locator("#on .tokens").text_content() == done.text
    assert page.locator("#on .tokens span").count() == len(done.tokens)
    kinds = {name: page.locator(f"#on .tokens span.{name}").count() for name in KINDS}
    assert sum(kinds.values()) == len(done.tokens)
    assert page.locator("#legend .accepted b").text_content() == str(kinds["accepted"])
    assert page.locator("#timeline .decided").count() == len(done.tokens)
    assert page.locator("#timeline .decided.accepted").count() == kinds["accepted"]
    assert page.locator("#about").is_hidden()
    tested = kinds["accepted"] + kinds["recovered"]
    assert page.locator("#by_drafter").text_content() == f"{kinds['accepted']} of {tested}"
    assert page.locator("#by_ngram").text_content() == "none tested"
    forwards = page.locator("#timeline .forward").count()
    assert page.locator("#saved").text_content() == str(len(done.tokens) - forwards)


def test_charts_and_timeline_show_what_happened(page: Page) -> None:
    ask_until(page, 40, "#timeline .draft.accepted", "#timeline .rollback")
    assert page.locator("#rates polyline").count() == 1
    assert page.locator("#places rect.bar:not(.back)").count() > 0
    assert page.locator("#windows .part.held").count() > 0
    assert page.locator("#windows .ribbon").count() > 0
    assert "lockstep" in (page.locator("#plan").text_content() or "")
    assert page.locator("#delays polyline").count() == 2
    assert float(page.locator("#rtt").text_content() or "0") > 0
    assert page.locator("#occupancy .part.own").count() > 0
    assert page.locator("#batch").text_content() == "1 session"
    before = page.locator("#timeline svg").get_attribute("width")
    page.locator("#zoom").fill("80")
    page.locator(f'#timeline svg:not([width="{before}"])').wait_for()


# Of a session of one source, whose trees begin behind position 2, in the page's own words.
SESSION = """
  const { Session } = await import("/console/session.js"), { grown } = await import("/console/tree.js");
  const session = new Session(), text = (tokens) => tokens.map(String);
  const told = { kind: "DRAFTER", source: 1, plan: "", draft_us: 1, at_us: 2, ended_us: 2 };
  const propose = (offset, tokens, parents, chain = 0, base = 3) =>
    session.take({ ...told, type: "proposed", chain, base, offset, tokens, parents, texts: text(tokens) });
  const judge = (position, tokens, outcomes, tested) =>
    session.take({ ...told, type: "judged", position, tokens, outcomes, tested, texts: text(tokens) });
  const tree = (first, last) => grown(session, first, last).map(
    ({ text, kind, found, parent, row }) => [text, kind, found, parent.text ?? "", row ?? null]);
"""


def test_what_becomes_of_a_tree_is_told_by_what_was_decided(page: Page) -> None:
    """5 - 6 - 7, beside 6 an 8 with 9 behind it; 5 is accepted, 8 decided for 6, and a late child of 6 is void."""
    fates = page.evaluate(f"""async () => {{{SESSION}
      propose(0, [5, 6, 7], []);
      propose(3, [8, 9, 1], [0, 3, 0]);
      judge(3, [5, 8], ["accepted", "recovered"], 3);
      const of = (name) => session.proposed.map((one) => one[name]);
      return [of("fates"), of("positions"), session.judged[0].chain];
    }}""")
    assert fates == [[["accepted", "refused", "refused"], ["waiting", "pending", "pruned"]], [[3, 4, 5], [4, 5, 4]], 0]


def test_a_tree_grows_and_is_pruned(page: Page) -> None:
    """Behind 5: 6 - 7, beside 6 an 8 with 9 behind it, and a 4. 8 is decided for 6; then 9, and 3 which nobody drafted.

    Behind the pruned 7 a 2 arrives when it is too late.
    """
    grown, pruned, begun_anew, corrections = page.evaluate(f"""async () => {{{SESSION}
      judge(3, [5], ["direct"], 0);
      propose(0, [6, 7], [], 0, 4);
      propose(2, [8, 9, 4], [-1, 2, -1]);
      const before = tree(3, 9);
      judge(4, [8], ["recovered"], 2);
      propose(5, [2, 8], [1, 2]);
      const after = tree(3, 9);
      judge(5, [9, 3], ["accepted", "bonus"], 1);
      propose(0, [1, 2], [], 1, 7);
      return [before, after, tree(5, 9), [...session.corrections.values()]];
    }}""")
    root = ["5", "direct", False, "", 0]
    drafted = [("6", "5", 0), ("8", "5", 1), ("4", "5", 2), ("7", "6", 0), ("9", "8", 1)]
    assert grown == [root, *([text, "pending", False, parent, row] for text, parent, row in drafted)]
    assert pruned == [
        root,
        ["8", "recovered", True, "5", 0],
        ["6", "refused", False, "5", 2],
        ["4", "pruned", False, "5", 3],
        ["9", "pending", False, "8", 0],
        ["8", "pending", False, "8", 1],
        ["7", "refused", False, "6", 2],
        ["2", "refused", False, "7", 2],
    ]
    assert begun_anew == [
        ["9", "accepted", False, "8", 0],
        ["3", "bonus", False, "9", 0],
        ["1", "pending", False, "3", 0],
        ["2", "pending", False, "1", 0],
    ]
    assert corrections == [True]


def test_no_two_lines_of_a_tree_cross(page: Page) -> None:
    """A random tree, all pending: none stands on another one, and no edge goes down through a third one's line."""
    nodes = page.evaluate(f"""async () => {{{SESSION}
      judge(3, [0], ["direct"], 0);
      const random = ((seed) => () => (seed = (seed * 16807) % 2147483647) / 2147483647)(7);
      const parents = Array.from({{ length: 60 }}, (_, i) => (i % 3 ? i - 1 : Math.floor(random() * (i + 1)) - 1));
      propose(0, parents.map((_, i) => i + 1), parents, 0, 4);
      return grown(session, 3, 40).filter((one) => one.row !== undefined).map((one) => [
        one.position, one.row, one.parent.position, one.parent.row ?? 0]);
    }}""")
    assert len(nodes) > 20
    assert len({(position, row) for position, row, *_ in nodes}) == len(nodes)
    lines = {(parent, above) for position, row, parent, above in nodes[1:] if row == above}
    for _, row, parent, above in nodes[1:]:
        assert not {(parent, between) for between in range(above + 1, row)} & lines


def judged(at_us: int, verdict: Verdict, **step: int) -> dict[str, Any]:
    """As the console is told it."""
    traced = TracedVerdict.of(verdict, verify_pb2.StepTimings(forward_ended_ns=at_us * 1000, **step), 100.0, "")
    told = {name: getattr(traced, name) for name in TracedVerdict.__slots__}
    texts, outcomes = ["x"] * len(verdict.tokens), [outcome.name.lower() for outcome in verdict.outcomes]
    return {"type": "judged", **told, "texts": texts, "outcomes": outcomes, "at_us": at_us + 500}


def test_what_a_head_saved_is_told_beside_the_others(page: Page) -> None:
    guessed = Verdict(3, (7, 8), (Outcome.ACCEPTED, Outcome.RECOVERED), 3, kind=SourceKind.HEAD)
    events = [
        {"type": "started", "at_us": 0, "prompt_tokens": 3},
        judged(9_000, guessed, forward_us=3_000, drafted_us=1_200, sessions=1, rows=4),
        judged(19_000, Verdict(5, (9,), (Outcome.DIRECT,), 0), forward_us=2_000, sessions=1, rows=1),
    ]
    texts, saved, titles = page.evaluate(
        """async (events) => {
          const { Session } = await import("/console/session.js"), { draw } = await import("/console/timeline.js");
          const { figures, savers } = await import("/console/figures.js");
          const session = new Session(), elements = {}, box = document.createElement("div");
          const of = (id) => (elements[id] ??= document.createElement("div"));
          for (const event of events) session.take(event);
          figures(of, session, session, null);
          draw(box, session, 1, null);
          const texts = Object.fromEntries(Object.entries(elements).map(([id, one]) => [id, one.textContent]));
          return [texts, savers(session), Array.from(box.querySelectorAll("title"), (one) => one.textContent)];
        }""",
        events,
    )
    assert texts["by_head"] == "1 of 2"
    assert texts["by_ngram"] == texts["by_drafter"] == "none tested"
    assert texts["plan"] == "nothing drafts; heads saved 1 forward"
    assert saved == "1 forward saved (1 by heads)"
    assert [title.partition("\n")[0] for title in titles if title.startswith("forward")] == [
        "forward of 3.0 ms, behind 1.2 ms of a head, window of 3 from a head",
        "forward of 2.0 ms, window of 0",
    ]


def test_a_drafter_elsewhere_is_seen_to_find_corrections_waiting(opened: Browser, tmp_path: Path) -> None:
    """Every third guess is wrong, and the right token is the one after it: from their parents to nodes go lines."""
    ranks, place = tmp_path / "ranks", ("--listen", "127.0.0.1:0", "--json")
    ranks.write_text(json.dumps({"prompt": 3, "right": [0, 0, 1], "scores": [[0.0, -0.5, -2.0]] * 3}))
    drafter = f"scripted:7:ranks={ranks}:delay_ms=2"
    with ExitStack() as owned:
        verify, draft = (
            owned.enter_context(running(*words, *place)).ready()["address"]
            for words in (("verify", "scripted:7:delay_ms=40"), ("draft", drafter))
        )
        words = ("--verifier", verify, "--drafter", draft, "--plan", "stream:1,16,0,4", "--http", "127.0.0.1:0")
        address = owned.enter_context(running("orchestrate", *words, *place)).ready()["http"]
        page = owned.enter_context(opened.new_context()).new_page()
        page.set_default_timeout(LIMIT_MS)
        page.goto(address)
        grew = False

        def corrections() -> tuple[int, int]:
            """How many were found waiting, and of how many: on a busy machine each may come too late."""
            nonlocal grew
            ask(page, 150)
            with suppress(PlaywrightTimeoutError):
                page.locator("#tree .edge.pending").nth(3).wait_for(timeout=SOON_MS)
                grew = True
            state(page, "done")
            found, _, of_all = (page.locator("#found").text_content() or "").partition(" of ")
            return int(found or 0), int(of_all or 0)

        found, of_all = asked_blocking(corrections, lambda told: grew and told[0])
        assert found <= of_all <= int(page.locator("#legend .recovered b").text_content() or "")
        recovered = page.locator("#on .tokens span.recovered")
        for index in range(recovered.count()):
            recovered.nth(index).hover()
            with suppress(PlaywrightTimeoutError):
                page.locator("#tree .node.found").first.wait_for(timeout=SHOWN_MS)
                break
        else:
            pytest.fail("no correction that was found waiting is drawn")
        page.locator("#tree .node.pruned").first.wait_for()
        tokens = page.locator("#on .tokens span")
        tokens.first.hover()
        before = page.locator("#tree").inner_text()
        tokens.last.hover()
        asked_blocking(lambda: page.locator("#tree").inner_text(), lambda now: now != before)


def test_forwards_stand_one_behind_the_other(page: Page) -> None:
    """As in a verifier, however long their verdicts took: in a batch of one no two of them overlap."""
    page.locator("#zoom").fill("50")
    ask(page, 40)
    state(page, "done")
    forwards = page.locator("#timeline .forward")
    boxes = forwards.evaluate_all("all => all.map((one) => [one.x.baseVal.value, one.width.baseVal.value])")
    assert len(boxes) > 5
    assert all(begin + width <= following + 1 for (begin, width), (following, _) in pairwise(boxes))


def test_a_token_tells_its_story(page: Page) -> None:
    ask(page, 20)
    state(page, "done")
    page.locator("#on .tokens span").nth(3).hover()
    assert "position 6" in told(page)
    assert "probability" in told(page)
    assert page.locator("#timeline .verdict.current").count() == 1
    accepted = page.locator("#on .tokens span.accepted")
    chains = set()
    for index in range(accepted.count()):
        accepted.nth(index).hover()
        chains |= set(re.findall(r"chain (\d+) of drafter 1verdict \d+ of \d+ tested accepted", told(page)))
    assert chains
    page.focus("#on .tokens")
    page.keyboard.press("End")
    assert "position 22" in told(page)
    page.keyboard.press("ArrowLeft")
    assert "position 21" in told(page)


def test_beside_drafting_off_the_text_is_the_same(page: Page) -> None:
    page.check("#compare")
    ask(page, 30)
    state(page, "done")
    assert "the texts are identical" in (page.locator("#versus").text_content() or "")
    assert page.locator("#off .tokens").text_content() == page.locator("#on .tokens").text_content()
    assert page.locator("#off .tokens span.accepted").count() == 0
    assert page.locator("#rates polyline").count() == 2
    page.uncheck("#compare")


def test_what_is_copied_from_the_text_has_a_lane_and_a_sentence(opened: Browser) -> None:
    """Where no drafter has a part in it, the page tells who had."""
    words = ("up", "--json", "--listen", "127.0.0.1:0", "--target", COPYING, "--no-draft")
    with running(*words) as stack, opened.new_context() as context:
        page = context.new_page()
        page.set_default_timeout(LIMIT_MS)
        page.goto(stack.ready()["http"])
        page.check("#compare")
        ask_until(page, 200, "#timeline .own .draft.accepted")
        accepted, tested = (page.locator("#by_ngram").text_content() or "").split(" of ")
        assert 0 < int(accepted) <= int(tested)
        assert page.locator("#by_drafter").text_content() == "none tested"
        saved = int(page.locator("#saved").text_content() or "")
        assert f"{saved} forwards saved ({saved} by n-grams) of 200" in (page.locator("#versus").text_content() or "")
        assert page.locator("#plan").text_content() == f"nothing drafts; n-grams saved {saved} forwards"
        assert page.locator("#timeline .own .draft.accepted").count() == int(accepted)
        assert page.locator("#timeline .silent").text_content() == "nothing drafts"
        stack.process.send_signal(signal.SIGINT)
        assert stack.wait(END_LIMIT) == 0, stack.said()


def test_charts_move_while_text_comes_and_a_key_cancels(page: Page) -> None:
    ask(page, 2000)
    page.locator("#on .tokens span").nth(10).wait_for()
    before = page.locator("#rates polyline").get_attribute("points")
    page.locator(f'#rates polyline:not([points="{before}"])').wait_for()
    state(page, "generating")
    assert page.locator("#sessions tr").count() <= 1
    page.locator("#sessions td").get_by_text("running", exact=True).wait_for()
    page.keyboard.press("Escape")
    state(page, "cancelled")
    assert 10 < page.locator("#on .tokens span").count() < 2000
    page.locator("#sessions:not(:has(tr))").wait_for(state="attached")


def test_services_stand_there_with_their_state(page: Page) -> None:
    page.locator("#parts tr").nth(2).wait_for()
    services = page.locator("#parts").evaluate(CELLS)
    assert [(name, state) for name, state, *_ in services[:2]] == [("verifier", "up"), ("drafter scripted:7", "up")]
    assert all(sessions.endswith(" of 16") and trip.endswith(" ms") for _, _, sessions, trip, _ in services[:2])
    assert services[2][:2] == ["session log", "redis"]


def test_a_button_cancels_too(page: Page) -> None:
    ask(page, 2000)
    page.locator("#on .tokens span").nth(3).wait_for()
    page.click("#stop")
    state(page, "cancelled")
    page.locator("#sessions:not(:has(tr))").wait_for(state="attached")


def test_a_key_goes_with_what_is_asked(page: Page) -> None:
    page.click("#access summary")
    page.fill("#key", "a-token")
    page.keyboard.press("Tab")
    with page.expect_request("**/console/generate") as asked:
        ask(page, 5)
    with page.expect_request("**/console/status") as looked:
        state(page, "done")
    assert [each.value.headers["authorization"] for each in (asked, looked)] == ["Bearer a-token"] * 2
    page.fill("#key", "")
    page.click("#access summary")


def test_what_is_refused_is_said(page: Page) -> None:
    page.select_option("#rule", "rejection")
    ask(page, 20)
    page.locator("#state.bad").wait_for()
    assert "rule" in (page.locator("#state").text_content() or "")
    page.select_option("#rule", "")


def test_everything_is_reached_by_keyboard(page: Page) -> None:
    page.focus("#prompt")
    seen = []
    for _ in range(13):
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.parentElement.id"))
        page.keyboard.press("Tab")
    wanted = "prompt max_tokens temperature top_p seed rule drafting compare go on zoom timeline"
    assert [each for each in seen if each in wanted.split()] == wanted.split()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_can_be_read(scheme: str, page: Page) -> None:
    page.emulate_media(color_scheme="dark" if scheme == "dark" else "light", reduced_motion="reduce")
    ask(page, 40)
    state(page, "done")
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper)[:3])) > 384) == (scheme == "light")
    texts = ["#state", "#plan", "#legend li", "#inspector p", "#ask label", "figcaption", "#parts td", "th", "#go"]
    texts += [f"#on .tokens .{kind}" for kind in KINDS if page.locator(f"#on .tokens .{kind}").count()]
    low = {each: page.evaluate(CONTRAST, each) for each in texts}  # at once: tables are drawn anew all the time
    assert {each: ratio for each, ratio in low.items() if ratio < LEAST_CONTRAST} == {}


def test_on_a_phone(opened: Browser, ready: dict[str, str]) -> None:
    """Nothing is wider than the screen, and fingers do all of it."""
    with opened.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True) as context:
        phone = context.new_page()
        phone.set_default_timeout(LIMIT_MS)
        phone.goto(ready["http"])
        phone.fill("#prompt", PROMPT)
        phone.fill("#max_tokens", "40")
        phone.tap("#go")
        state(phone, "done")
        phone.locator("#on .tokens span").nth(3).tap()
        assert "position 6" in told(phone)
        assert phone.evaluate("document.documentElement.scrollWidth") == 390
        go, stop = phone.locator("#go").bounding_box(), phone.locator("#stop").bounding_box()
        assert go is not None
        assert stop is not None
        assert min(go["height"], stop["height"]) >= 40
