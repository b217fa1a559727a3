// The page: takes what is asked, runs sessions, shows them while they come.

import { bars, curves } from "./charts.js";
import { Session } from "./session.js";
import { Refused, follow, status } from "./stream.js";
import { TokenText, explained } from "./text.js";
import { draw } from "./timeline.js";

const of = (id) => document.getElementById(id);
const LEGEND = [
  ["accepted", "accepted draft tokens"],
  ["recovered", "recovered"],
  ["bonus", "bonus"],
  ["direct", "direct"],
];
const STATUS_MS = 2000;

const inspect = (session, index, text) => (of("inspector").textContent = explained(session, index, text));
const texts = { on: new TokenText(of("on"), inspect), off: new TokenText(of("off"), inspect) };
let shown = new Session(), plain = null, running = null, drawing = false;

// Asking

function request(drafting) {
  const asked = { prompt: of("prompt").value, drafting };
  for (const name of ["max_tokens", "temperature", "top_p", "seed"]) if (of(name).value !== "") asked[name] = Number(of(name).value);
  if (of("rule").value) asked.rule = of("rule").value;
  if (of("provisional").checked && drafting !== "off") asked.provisional = true;
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
    else say(error instanceof Refused ? error.message : `the page failed: ${error.message}`, true);
  } finally {
    running = null;
    of("go").disabled = false;
    of("stop").disabled = true;
    later();
  }
}

function begin(beside) {
  shown = new Session();
  plain = null;
  texts.on.clear();
  texts.off.clear();
  of("off").hidden = !beside;
  of("texts").classList.toggle("two", beside);
  of("versus").textContent = "";
  of("plans").replaceChildren();
  of("go").disabled = true;
  of("stop").disabled = false;
  say("generating");
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
  of("versus").textContent = `${times.toFixed(2)} times the speed without drafting; the texts are ${same ? "identical" : "different"}.`;
}

// Showing

function later() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    for (const text of Object.values(texts)) {
      if (text.dirty) text.show(text.dirty);
      text.dirty = null;
    }
    figures();
  });
}

function figures() {
  const session = shown.startedUs || !plain ? shown : plain, last = session.judged.at(-1);
  of("rate").value = session.lastUs ? session.tokensPerSecond.toFixed(0) : "";
  curves(of("rates"), [{ points: shown.rates() }, ...(plain ? [{ points: plain.rates(), plain: true }] : [])], "s");
  bars(of("places"), session.places.map(({ tested, accepted }, i) => ({ label: `${i + 1}`, value: accepted / tested, title: `${accepted} of ${tested}` })));
  const judged = session.judged.slice(-200);
  curves(of("occupancy"), [{ points: judged.map((one, i) => ({ x: i + 1, y: one.sessions })) }], "steps");
  of("batch").value = last ? last.sessions : "";
  of("plan").textContent = session.plans.at(-1)?.plan ?? (last ? "nothing drafts" : "no session yet");
  of("plans").replaceChildren(...session.plans.slice(0, -1).reverse().slice(0, 20).map(earlier));
  of("rtt").textContent = last ? `${(last.round_trip_us / 1000).toFixed(1)} ms` : "–";
  of("forward").textContent = last ? `${(last.forward_us / 1000).toFixed(1)} ms` : "–";
  of("per_forward").textContent = session.forwards ? session.tokensPerForward.toFixed(2) : "–";
  of("first").textContent = session.firstUs ? `${((session.firstUs - session.startedUs) / 1000).toFixed(0)} ms` : "–";
  legend(session);
  draw(of("timeline"), session, Number(of("zoom").value));

  function earlier({ atUs, plan }) {
    const item = document.createElement("li");
    item.textContent = `${((atUs - session.startedUs) / 1000).toFixed(0)} ms: ${plan}`;
    return item;
  }
}

function legend(session) {
  of("legend").replaceChildren(
    ...[...LEGEND, ...(session.guess ? [["guess", "a drafter's guess"]] : [])].map(([name, label]) => {
      const item = document.createElement("li"), mark = document.createElement("i"), count = document.createElement("b");
      item.className = name;
      count.textContent = session.counts[name] ?? "";
      item.append(mark, `${label} `, count);
      return item;
    }),
  );
}

function say(message, bad = false) {
  of("state").textContent = message;
  of("state").classList.toggle("bad", bad);
}

// Services and sessions

async function look() {
  if (!document.hidden) {
    try {
      services(await status(of("key").value));
    } catch (error) {
      if (!running) say(error instanceof Refused ? error.message : "the orchestrator does not answer", true);
    }
  }
  setTimeout(look, STATUS_MS);
}

function services(known) {
  const up = known.drafters.filter((one) => one.up).length;
  const bad = of("state").classList.contains("bad") || of("state").textContent === "connecting";
  if (!running && bad) say(`${known.target.model}, ${up} of ${known.drafters.length} drafters, log: ${known.durability}`);
  of("parts").replaceChildren(
    ...known.verifiers.map((one) => part(one, `verifier: ${one.up ? (one.draining ? "draining" : "up") : "down"}, ${one.sessions} sessions, round trip ${(one.round_trip_us / 1000).toFixed(1)} ms, forward ${(one.forward_us / 1000).toFixed(1)} ms`)),
    ...known.drafters.map((one) => part(one, `drafter ${one.model}: ${one.up ? "up" : "down"}, ${one.sessions} sessions`)),
    part({ up: true }, `session log: ${known.durability}`),
  );
  of("sessions").replaceChildren(...known.sessions.map(row));
}

function part(one, text) {
  const item = document.createElement("li");
  item.textContent = text;
  if (!one.up) item.className = "down";
  return item;
}

function row(one) {
  const made = document.createElement("tr");
  for (const value of [one.id, one.state, `${one.tokens}`, one.plan]) made.insertCell().textContent = value;
  return made;
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
later();
look();
