// A session's proposals, verdicts and rollbacks over time: what drafters sent, the link, what the verifier took from the
// text itself (n-grams) and what it computed, and below each forward the tokens that it decided.
//
// Proposals and verdicts stand at the instants at which they reached the orchestrator. When a draft began is told by the
// drafter; how long a forward took, and how far it was from the one before, by the verifier.

import { element } from "./charts.js";
import { endedUs } from "./session.js";

const TICKS = 14, DRAFTER = 26, LANE = 26, OWN = 104, OWN_LANE = 14, VERIFIER = 122, DECIDED = VERIFIER + LANE + 6, CELL = 6, RIGHT = 24;
// As tall as the session's widest window and the token behind it, within bounds; higher ones are cut.
const LEAST_CELLS = 6, MOST_CELLS = 17;
const heightOf = (tokens) => DECIDED + Math.min(MOST_CELLS, Math.max(LEAST_CELLS, tokens)) * CELL + 4;
// While text comes so much is drawn anew again and again; at the end there is time for all of it.
const MOST_RUNNING = 150, MOST = 600;

export function draw(box, session, zoom, current) {
  const most = session.finished ? MOST : MOST_RUNNING;
  const judged = session.judged.slice(-most), proposed = session.proposed.slice(-most);
  const starts = [...judged.map((one) => endedUs(one) - one.forward_us), ...proposed.map((one) => one.at_us - one.draft_us)];
  const began = Math.min(...starts), ended = Math.max(judged.at(-1)?.at_us ?? 0, proposed.at(-1)?.at_us ?? 0);
  if (!(ended > began)) return box.replaceChildren();
  // In the middle of its range the zoom shows all, but no more than a second and a half.
  const fitting = Math.max(1, box.clientWidth - RIGHT) / Math.min(1.5e6, ended - began);
  const scale = fitting * 10 ** ((zoom - 50) / 25), x = (us) => (us - began) * scale;
  const width = Math.max(box.clientWidth, x(ended) + RIGHT), height = heightOf(session.most);
  const svg = element("svg", { width, height, viewBox: `0 0 ${width} ${height}` });
  ground(svg, width, height, began - (session.startedUs ?? began), scale);
  if (!proposed.length) svg.append(element("text", { class: "silent", x: 4, y: DRAFTER + LANE - 9 }, silence(judged.at(-1))));
  for (const one of proposed) svg.append(...proposal(one, x, judged.at(-1)?.round_trip_us ?? 0));
  judged.forEach((one, i) => {
    const next = judged[i + 1];
    const room = next ? x(endedUs(next)) - x(endedUs(one)) : 10;
    svg.append(...verdict(one, x, room, one === current));
  });
  const follow = box.scrollLeft + box.clientWidth >= box.scrollWidth - 40;
  box.replaceChildren(svg);
  if (session.finished && current && judged.includes(current)) reveal(box, x(endedUs(current)));
  else if (follow) box.scrollLeft = box.scrollWidth;
}

function reveal(box, at) {
  if (at < box.scrollLeft + 20 || at > box.scrollLeft + box.clientWidth - 20) box.scrollLeft = at - box.clientWidth / 2;
}

function ground(svg, width, height, offset, scale) {
  const step = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000].find((ms) => ms * 1000 * scale > 64) ?? 10000;
  const first = Math.ceil(offset / 1000 / step), last = Math.floor((width - RIGHT) / scale / 1000 / step + offset / 1000 / step);
  for (let i = first; i <= last; i++) {
    const at = (i * step * 1000 - offset) * scale;
    svg.append(element("line", { class: "tick", x1: at, x2: at, y1: TICKS + 4, y2: height - 4 }));
    svg.append(element("text", { x: at + 3, y: TICKS }, `${i * step} ms`));
  }
  for (const y of [DRAFTER + LANE, OWN, VERIFIER]) svg.append(element("line", { class: "lane", x1: 0, x2: width, y1: y, y2: y }));
}

const MEANINGS = { accepted: "held", refused: "refused", late: "right or wrong, too late to be tested", pending: "not tested yet", waiting: "the correction, found waiting", pruned: "pruned: another token was decided" };

// A block, divided by its tokens, and its way up to the verifier. Of a tree the second, third, ... guesses of a place stand
// lower; each tells where it stands.
function proposal(one, x, roundTrip) {
  const end = x(one.at_us), begin = Math.min(end - 3, x(one.at_us - one.draft_us)), cell = (end - begin) / one.tokens.length;
  const block = element("g", { class: "proposal" });
  one.fates.forEach((fate, i) => {
    const low = one.ranks[i] ? LANE / 2 : 0;
    block.append(element("rect", { class: `draft ${fate}`, x: begin + i * cell, y: DRAFTER + low, width: Math.max(1, cell - 0.5), height: LANE - low, rx: Math.min(2, cell / 3) }));
  });
  const branches = one.ranks.some((rank) => rank > 0), stands = (i) => (branches ? `${one.positions[i]}${one.ranks[i] ? `, guess ${one.ranks[i] + 1}` : ""}: ` : "");
  const fates = one.texts.map((text, i) => `${stands(i)}${JSON.stringify(text)} ${MEANINGS[one.fates[i]]}`).join("\n");
  block.append(element("title", {}, `drafter ${one.source}, chain ${one.chain}, from position ${one.positions[0] ?? one.base}, ${(one.draft_us / 1000).toFixed(1)} ms\n${fates}`));
  const made = [block, element("line", { class: "up", x1: end, y1: DRAFTER + LANE, x2: x(one.at_us + roundTrip / 2), y2: OWN })];
  if (one.offset === 0 && one.chain > 0) made.push(rollback(begin, DRAFTER, `the drafter rolled back to ${one.base}`));
  return made;
}

// A forward, its verdict's way down, and what it decided. room: pixels until the next one.
function verdict(one, x, room, isCurrent) {
  const ended = endedUs(one), end = x(ended), begin = x(ended - one.forward_us);
  const block = element("g", { class: isCurrent ? "verdict current" : "verdict" });
  block.append(element("rect", { class: "forward", x: begin, y: VERIFIER, width: Math.max(2, end - begin), height: LANE, rx: 3 }));
  const wide = Math.max(2, Math.min(10, room - 1, Math.max(4, end - begin)));
  one.outcomes.slice(0, MOST_CELLS).forEach((outcome, i) => {
    block.append(element("rect", { class: `decided ${outcome}`, x: end - wide, y: DECIDED + i * CELL, width: wide, height: CELL - 1, rx: 1 }));
  });
  const tokens = one.texts.map((text, i) => `${JSON.stringify(text)} ${one.outcomes[i]}`).join("\n");
  const before = one.drafted_us ? `, behind ${(one.drafted_us / 1000).toFixed(1)} ms of a head` : "";
  block.append(element("title", {}, `forward of ${(one.forward_us / 1000).toFixed(1)} ms${before}, window of ${one.tested}${one.tested ? ` from ${KINDS[one.kind] ?? one.kind}` : ""}\n${tokens}`));
  const made = [block, element("line", { class: "down", x1: end, y1: OWN, x2: x(one.at_us), y2: DRAFTER + LANE })];
  if (one.tested && one.kind !== "DRAFTER") made.push(own(one, begin, Math.max(2, end - begin)));
  if (one.outcomes.includes("recovered")) {
    made.push(rollback(end, VERIFIER, `the verifier rolled back to ${one.position + one.outcomes.indexOf("recovered")}`));
  }
  return made;
}

// What the verifier itself proposed for a forward, which stands below it: a cell for each token.
function own(one, begin, width) {
  const block = element("g", { class: "own" }), cell = width / one.tested;
  for (let i = 0; i < one.tested; i++) {
    const fate = i < one.accepted ? "accepted" : i < one.reached ? "refused" : "late";
    block.append(element("rect", { class: `draft ${fate}`, x: begin + i * cell, y: OWN + 2, width: Math.max(1, cell - 0.5), height: OWN_LANE, rx: Math.min(2, cell / 3) }));
  }
  block.append(element("title", {}, `${one.tested} tokens from ${KINDS[one.kind] ?? one.kind}: ${one.accepted} of ${one.reached} tested accepted`));
  return block;
}

// Why no drafter has sent anything.
export function silence(last) {
  if (!last) return "";
  return last.plan ? `drafters ${last.plan}` : "nothing drafts";
}

const KINDS = { DRAFTER: "a drafter", NGRAM: "the text itself", PREDICTION: "the request's prediction", HEAD: "a head" };

function rollback(x, y, what) {
  const mark = element("path", { class: "rollback", d: `M${x + 3} ${y - 3} h-9 m3 -3 l-3 3 l3 3` });
  mark.append(element("title", {}, what));
  return mark;
}

// The lanes' names, which stay where they are while the rest is scrolled.
export function names(svg) {
  svg.setAttribute("viewBox", `0 0 62 ${heightOf(0)}`);
  const lanes = [["drafter", DRAFTER + LANE / 2], ["link", (DRAFTER + LANE + OWN) / 2], ["n-grams", OWN + 7], ["verifier", VERIFIER + LANE / 2], ["decided", DECIDED + 12]];
  svg.replaceChildren(...lanes.map(([name, y]) => element("text", { class: "name", x: 0, y: y + 4 }, name)));
}
