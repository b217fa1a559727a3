// A session's proposals, verdicts and rollbacks over time, in three lanes: drafter, link, verifier.
//
// Instants are those at which messages reached the orchestrator. When a draft began is told by the drafter, how long a
// forward took by the verifier; that a message takes half of the round trip is assumed.

import { element } from "./charts.js";

const HEIGHT = 176, TOP = 10, LANE = 34, DRAFTER = 30, VERIFIER = 128, LEFT = 70, MOST = 700;

export function draw(box, session, zoom) {
  const judged = session.judged.slice(-MOST), proposed = session.proposed.slice(-MOST);
  const starts = [...judged.map((one) => one.at_us - one.round_trip_us - one.forward_us), ...proposed.map((one) => one.at_us - one.draft_us)];
  const began = Math.min(...starts), ended = Math.max(judged.at(-1)?.at_us ?? 0, proposed.at(-1)?.at_us ?? 0);
  if (!(ended > began)) return box.replaceChildren();
  // In the middle of its range the zoom shows all, but no more than a second and a half.
  const fitting = (box.clientWidth - LEFT - 40) / Math.min(1.5e6, ended - began);
  const scale = fitting * 10 ** ((zoom - 50) / 25), x = (us) => LEFT + (us - began) * scale;
  const svg = element("svg", { width: Math.max(box.clientWidth, x(ended) + 30), height: HEIGHT });
  lanes(svg, svg.getAttribute("width"), began, ended, scale);
  for (const one of proposed) proposal(svg, one, x, judged.at(-1)?.round_trip_us ?? 0);
  for (const one of judged) verdict(svg, one, x);
  const follow = box.scrollLeft + box.clientWidth >= box.scrollWidth - 40;
  box.replaceChildren(svg);
  if (follow) box.scrollLeft = box.scrollWidth;
}

function lanes(svg, width, began, ended, scale) {
  for (const [name, y] of [["drafter", DRAFTER], ["link", (DRAFTER + VERIFIER + LANE) / 2 - LANE / 2 + 6], ["verifier", VERIFIER]]) {
    svg.append(element("text", { class: "name", x: 4, y: y + LANE / 2 + 4 }, name));
  }
  for (const y of [DRAFTER + LANE, VERIFIER]) svg.append(element("line", { class: "lane", x1: LEFT, x2: width, y1: y, y2: y }));
  const step = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000].find((ms) => ms * 1000 * scale > 60) ?? 10000;
  for (let ms = 0; ms * 1000 <= ended - began; ms += step) {
    svg.append(element("text", { x: LEFT + ms * 1000 * scale, y: TOP + 2 }, `${ms} ms`));
  }
}

function proposal(svg, one, x, roundTrip) {
  const end = x(one.at_us), begin = x(one.at_us - one.draft_us), fate = one.fate === "late" ? "pending" : one.fate;
  const block = element("rect", { class: `draft ${fate}`, x: begin, y: DRAFTER, width: Math.max(2, end - begin), height: LANE, rx: 3 });
  const what = `${one.texts.map((text) => JSON.stringify(text)).join(" ")}\nproposed by drafter ${one.source}, chain ${one.chain}, at ${one.base + one.offset}: ${one.fate}`;
  block.append(element("title", {}, what));
  svg.append(block, element("line", { class: "up", x1: end, y1: DRAFTER + LANE, x2: x(one.at_us + roundTrip / 2), y2: VERIFIER }));
  if (one.offset === 0 && one.chain > 0) rollback(svg, begin, DRAFTER, `the drafter rolled back to ${one.base}`);
}

function verdict(svg, one, x) {
  const ended = one.at_us - one.round_trip_us / 2, end = x(ended), begin = x(ended - one.forward_us);
  const block = element("rect", { class: "forward", x: begin, y: VERIFIER, width: Math.max(2, end - begin), height: LANE, rx: 3 });
  const what = `${one.texts.map((text) => JSON.stringify(text)).join(" ")}\n${one.outcomes.join(", ")}\nwindow of ${one.tested}, ${one.rows} rows of ${one.sessions} session${one.sessions === 1 ? "" : "s"}`;
  block.append(element("title", {}, what));
  svg.append(block, element("line", { class: "down", x1: end, y1: VERIFIER, x2: x(one.at_us), y2: DRAFTER + LANE }));
  if (one.outcomes.includes("recovered")) {
    rollback(svg, end, VERIFIER, `the verifier rolled back to ${one.position + one.outcomes.indexOf("recovered")}`);
  }
}

function rollback(svg, x, y, what) {
  const mark = element("path", { class: "rollback", d: `M${x + 3} ${y - 3} h-9 m3 -3 l-3 3 l3 3` });
  mark.append(element("title", {}, what));
  svg.append(mark);
}
