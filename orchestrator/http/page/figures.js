// The charts and numbers beside a session's text.

import { bars, columns, curves } from "./charts.js";
import { SOURCES, discipline } from "./session.js";

// Charts of forwards show so many of the newest; lines more than columns.
const NEWEST = 200;
const LEGEND = [
  ["accepted", "accepted: a draft token that passed"],
  ["recovered", "recovered: the target's own in place of a refused one"],
  ["bonus", "bonus: the target's own behind an accepted run"],
  ["direct", "direct: the target's own, nothing was proposed"],
];

// of: an element by its id. session: what the figures are of; shown, plain: with drafting, and without.
export function figures(of, session, shown, plain) {
  const last = session.judged.at(-1), judged = session.judged.slice(-NEWEST);
  of("rate").value = session.lastUs ? session.tokensPerSecond.toFixed(0) : "";
  const rates = [{ points: shown.rates(), kind: "main" }, ...(plain ? [{ points: plain.rates(), kind: "plain" }] : [])];
  curves(of("rates"), rates, "s");
  acceptance(of, session);
  plans(of, session, judged, last);
  delays(of, judged, last);
  batch(of, judged, last);
  of("per_forward").textContent = session.judged.length ? session.tokensPerForward.toFixed(2) : "–";
  of("saved").textContent = session.judged.length ? `${session.saved}` : "–";
  for (const kind of ["DRAFTER", "NGRAM", "HEAD"]) {
    const { tested, accepted } = session.sources[kind];
    of(`by_${kind.toLowerCase()}`).textContent = tested ? `${accepted} of ${tested}` : session.judged.length ? "none tested" : "–";
  }
  const corrections = [...session.corrections.values()];
  of("found").value = corrections.length ? `${corrections.filter(Boolean).length} of ${corrections.length}` : "";
  of("first").textContent = session.firstUs ? `${((session.firstUs - session.startedUs) / 1000).toFixed(0)} ms` : "–";
}

function acceptance(of, session) {
  const shares = session.places.map(({ tested, accepted }, i) => ({ label: `${i + 1}`, value: accepted / tested, title: `place ${i + 1}: ${accepted} of ${tested}` }));
  bars(of("places"), shares);
  const all = Object.values(session.sources);
  const tested = all.reduce((sum, one) => sum + one.tested, 0), held = all.reduce((sum, one) => sum + one.accepted, 0);
  of("acceptance").value = tested ? `${((100 * held) / tested).toFixed(0)} %` : "";
}

// The window that each forward tested, and how the drafters were told to draft then.
function plans(of, session, judged, last) {
  const items = judged.map((one) => ({
    parts: [{ value: one.accepted, kind: "held" }, { value: one.tested - one.accepted, kind: "unheld" }],
    ribbon: discipline(one),
    title: `window of ${one.tested}, ${one.accepted} accepted\n${one.plan || "nothing drafts"}`,
  }));
  columns(of("windows"), items, 4);
  of("plan").textContent = planned(session, last);
  of("plans").replaceChildren(...session.plans.slice(0, -1).reverse().slice(0, 20).map(earlier));

  function earlier({ atUs, plan }) {
    const item = document.createElement("li");
    item.textContent = `${((atUs - session.startedUs) / 1000).toFixed(0)} ms: ${plan}`;
    return item;
  }
}

function delays(of, judged, last) {
  const line = (name) => judged.map((one, i) => ({ x: i + 1, y: one[name] / 1000 }));
  curves(of("delays"), [{ points: line("forward_us"), kind: "took" }, { points: line("round_trip_us"), kind: "trip" }], "forwards");
  of("rtt").value = last ? (last.round_trip_us / 1000).toFixed(1) : "–";
  of("forward").value = last ? (last.forward_us / 1000).toFixed(1) : "–";
}

// A session's own rows are its window's and one more, or its prompt's; what is left is others'.
function batch(of, judged, last) {
  const items = judged.map((one) => {
    const own = one.sessions === 1 ? one.rows : Math.min(one.rows, one.tested + 1);
    const sessions = `${one.sessions} session${one.sessions === 1 ? "" : "s"}`;
    return { parts: [{ value: own, kind: "own" }, { value: one.rows - own, kind: "others" }], title: `${one.rows} rows of ${sessions}` };
  });
  columns(of("occupancy"), items, 4);
  of("batch").value = last ? `${last.sessions} session${last.sessions === 1 ? "" : "s"}` : "";
}

// What drafters are told, and what the verifier's own sources save beside them.
function planned(session, last) {
  const own = ["NGRAM", "PREDICTION", "HEAD"].filter((kind) => session.sources[kind].saved);
  const saved = own.map((kind) => `${SOURCES[kind]} saved ${forwards(session.sources[kind].saved)}`);
  if (!last) return "no session yet";
  const plan = session.plans.at(-1)?.plan;
  return [plan ? `drafters ${plan}` : "nothing drafts", ...saved].join("; ");
}

// Who saved the forwards, for a sentence.
export function savers(session) {
  const by = Object.keys(SOURCES).filter((kind) => session.sources[kind].saved);
  const told = by.map((kind) => `${session.sources[kind].saved} by ${SOURCES[kind]}`);
  return `${forwards(session.saved)} saved${told.length ? ` (${told.join(", ")})` : ""}`;
}

function forwards(count) {
  return `${count} forward${count === 1 ? "" : "s"}`;
}

export function legend(of, session) {
  of("legend").replaceChildren(
    ...LEGEND.map(([name, label]) => {
      const item = document.createElement("li"), mark = document.createElement("i"), count = document.createElement("b");
      item.className = name;
      count.textContent = session.counts[name] ?? "";
      item.append(mark, `${label} `, count);
      return item;
    }),
  );
}
