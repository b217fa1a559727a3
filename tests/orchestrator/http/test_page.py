"""The console's figures of a session, without a browser: what its modules make of what was told (needs Node.js)."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import orchestrator.http
from orchestrator.session.stats import TracedVerdict
from specwire.core.messages import Outcome, SourceKind, Verdict
from specwire.v1 import verify_pb2

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js (`node` on PATH)")

# Just enough of a document for charts to be drawn into.
SCRIPT = """
class Element {
  constructor(name) { Object.assign(this, { name, children: [], attributes: {}, style: {}, textContent: "" }); }
  setAttribute(name, value) { this.attributes[name] = value; }
  append(...more) { this.children.push(...more); }
  replaceChildren(...more) { this.children = more; }
  get clientWidth() { return 400; }
  all(name) { return [...(this.name === name ? [this] : []), ...this.children.flatMap((one) => one.all(name))]; }
}
globalThis.document = { createElement: (name) => new Element(name), createElementNS: (_, name) => new Element(name) };
const { Session } = await import("./session.js"), { figures, savers } = await import("./figures.js");
const { draw } = await import("./timeline.js");
const session = new Session(), elements = {}, of = (id) => (elements[id] ??= new Element(id)), box = new Element("box");
for (const event of JSON.parse(process.argv[2])) session.take(event);
figures(of, session, session, null);
draw(box, session, 1, null);
const texts = Object.fromEntries(Object.entries(elements).map(([id, one]) => [id, one.textContent]));
console.log(JSON.stringify({ texts, savers: savers(session), titles: box.all("title").map((one) => one.textContent) }));
"""


def shown(folder: Path, events: list[dict[str, Any]]) -> Any:
    page = Path(orchestrator.http.__file__).parent / "page"
    for module in page.glob("*.js"):
        shutil.copy(module, folder)
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "script.js").write_text(SCRIPT)
    words = ["node", "script.js", json.dumps(events)]
    return json.loads(subprocess.run(words, cwd=folder, check=True, capture_output=True, text=True).stdout)


def judged(at_us: int, verdict: Verdict, **step: int) -> dict[str, Any]:
    """As the console is told it."""
    traced = TracedVerdict.of(verdict, verify_pb2.StepTimings(forward_ended_ns=at_us * 1000, **step), 100.0, "")
    told = {name: getattr(traced, name) for name in TracedVerdict.__slots__}
    texts, outcomes = ["x"] * len(verdict.tokens), [outcome.name.lower() for outcome in verdict.outcomes]
    return {"type": "judged", **told, "texts": texts, "outcomes": outcomes, "at_us": at_us + 500}


def test_what_a_head_saved_is_told_beside_the_others(tmp_path: Path) -> None:
    guessed = Verdict(3, (7, 8), (Outcome.ACCEPTED, Outcome.RECOVERED), 3, kind=SourceKind.HEAD)
    events = [
        {"type": "started", "at_us": 0, "prompt_tokens": 3},
        judged(9_000, guessed, forward_us=3_000, drafted_us=1_200, sessions=1, rows=4),
        judged(19_000, Verdict(5, (9,), (Outcome.DIRECT,), 0), forward_us=2_000, sessions=1, rows=1),
    ]
    told = shown(tmp_path, events)
    assert told["texts"]["by_head"] == "1 of 2"
    assert told["texts"]["by_ngram"] == told["texts"]["by_drafter"] == "none tested"
    assert told["texts"]["plan"] == "nothing drafts; heads saved 1 forward"
    assert told["savers"] == "1 forward saved (1 by heads)"
    forwards = [title.partition("\n")[0] for title in told["titles"] if title.startswith("forward")]
    assert forwards == [
        "forward of 3.0 ms, behind 1.2 ms of a head, window of 3 from a head",
        "forward of 2.0 ms, window of 0",
    ]
