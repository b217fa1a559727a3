// The page: takes what is asked, runs sessions, shows them while they come.

import { figures, legend, savers } from "./figures.js";
import { look } from "./services.js";
import { Session } from "./session.js";
import { Refused, follow } from "./stream.js";
import { TokenText, explained } from "./text.js";
import { draw, names } from "./timeline.js";
import { draw as drawTree } from "./tree.js";

const of = (id) => document.getElementById(id);
// Text is shown with the next frame, charts seldomer: they are drawn anew as a whole.
const CHARTS_MS = 80;

const hint = of("inspector").firstElementChild;
const texts = { on: new TokenText(of("on"), inspect), off: new TokenText(of("off"), inspect) };
let shown = new Session(), plain = null, running = null, current = null, drawing = false, waiting = 0, drawnMs = 0;

// Asking

function request(drafting) {
  const asked = { prompt: of("prompt").value, drafting };
  for (const name of ["max_tokens", "temperature", "top_p", "seed"]) if (of(name).value !== "") asked[name] = Number(of(name).value);
  if (of("rule").value) asked.rule = of("rule").value;
  return asked;
}

async function generate() {
  if (running) return;
  running = new AbortController();
  const beside = of("compare").checked && of("drafting").value !== "off";
  begin(beside);
  try {
    if (beside) {
      // One after the other, so that neither slows the other down.
      plain = new Session();
      await run(plain, "off", request("off"));
    }
    await run(shown, "on", request(of("drafting").value));
    if (beside) compare();
    say("done");
  } catch (error) {
    if (error.name === "AbortError") say("cancelled");
    else say(error instanceof Refused ? error.message : `the page failed: ${error.message}`, "bad");
  } finally {
    running = null;
    of("go").disabled = false;
    of("stop").disabled = true;
    later();
  }
}

function begin(beside) {
  shown = new Session();
  plain = current = null;
  texts.on.clear();
  texts.off.clear();
  of("about").hidden = true;
  of("off").hidden = !beside;
  of("texts").classList.toggle("two", beside);
  of("versus").textContent = "";
  of("inspector").replaceChildren(hint);
  of("go").disabled = true;
  of("stop").disabled = false;
  say("generating", "busy");
  later();
}

async function run(session, place, asked) {
  await follow(asked, of("key").value, running.signal, (event) => {
    session.take(event);
    texts[place].dirty = session;
    later();
  });
}

function compare() {
  const same = shown.points.join("") === plain.points.join("");
  const times = shown.tokensPerSecond / plain.tokensPerSecond;
  const ended = `${times.toFixed(2)} times the speed without drafting: ${savers(shown)} of ${shown.tokens.length}`;
  of("versus").textContent = `${ended}; the texts are ${same ? "identical" : "different"}.`;
}

// Showing

function later() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(show);
}

function show(nowMs) {
  drawing = false;
  for (const text of Object.values(texts)) {
    if (text.dirty) text.show(text.dirty);
    text.dirty = null;
  }
  const session = seen();
  legend(of, session);
  if (running && nowMs - drawnMs < CHARTS_MS) {
    waiting ||= setTimeout(again, CHARTS_MS);
    return;
  }
  drawnMs = nowMs;
  figures(of, session, shown, plain);
  draw(of("timeline"), session, Number(of("zoom").value), current);
  drawTree(of("tree"), session, current);
}

function again() {
  waiting = 0;
  later();
}

// What the figures are of: the session without drafting, until the other one begins.
function seen() {
  return shown.startedUs || !plain ? shown : plain;
}

function inspect(session, index, text) {
  const { text: quoted, outcome, why, facts } = explained(session, index, text);
  const head = made("p", [made("b", quoted, outcome), ` ${why}`]), list = made("dl");
  for (const [name, value] of facts) list.append(made("div", [made("dt", `${name} `), made("dd", value)]));
  of("inspector").replaceChildren(head, list);
  current = session === seen() ? session.tokens[index].verdict : null;
  later();
}

function made(name, content = [], kind = "") {
  const element = document.createElement(name);
  element.append(...[content].flat());
  if (kind) element.className = kind;
  return element;
}

function say(message, kind = "") {
  of("state").textContent = message;
  of("state").className = kind;
}

of("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  generate();
});
of("stop").addEventListener("click", () => running?.abort());
of("zoom").addEventListener("input", later);
of("key").value = sessionStorage.getItem("key") ?? "";
of("key").form.addEventListener("submit", (event) => event.preventDefault());
of("key").addEventListener("change", () => sessionStorage.setItem("key", of("key").value));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) of("ask").requestSubmit();
});
addEventListener("resize", later);
names(of("names"));
later();
look(of, () => running !== null, say);
