// What drafters have drafted around one place of the text, as a tree: the decided tokens in the first row, and from them
// down and to the right what was drafted beside and beyond them. A column is a position, a line leads from parent to child.
//
// A node is the path of tokens that leads to it: two drafters, or two chains, that guess the same share it.

import { element } from "./charts.js";
import { endOf } from "./session.js";
import { silence } from "./timeline.js";

const COLUMN = 64, GAP = 12, ROW = 22, BOX = 17, TOP = 18, ROWS = 9, BOTTOM = 14;
// As tall as a session's tree ever was, so that what is below does not jump.
const tallest = new WeakMap();
// Of the columns so many are of decided tokens.
const BEHIND = 0.4, LETTERS = 6;

// The decided token at `first` and all that stands behind it up to `last`, parents before children: {position, text, kind,
// found, trunk, parent, row}. kind: how it was decided, or else what became of it. found: it was decided while it waited
// as another one's sibling. trunk: it is decided. row: none where there is no room for it.
export function grown(session, first, last) {
  const root = { position: session.judged[0].position - 1, children: new Map(), parent: null };
  const trunk = decided(session, root), places = new Map();
  for (const one of session.proposed) {
    const chain = `${one.source} ${one.chain}`;
    if (!places.has(chain)) places.set(chain, new Map([[-1, trunk.get(one.base - 1)]]));
    const known = places.get(chain);
    one.tokens.forEach((token, i) => {
      const parent = known.get(one.parents[i]);
      if (!parent) return; // what it stands behind was not told
      const node = child(parent, token, one.texts[i], one.fates[i]);
      node.found ||= one.fates[i] === "waiting";
      known.set(one.offset + i, node);
    });
  }
  const seen = [trunk.get(first)];
  for (const node of seen) seen.push(...[...node.children.values()].filter((one) => one.position < last));
  place(seen);
  return seen;
}

// Nodes of the decided text, by position; the root stands before it.
function decided(session, root) {
  const told = new Map();
  for (const verdict of session.judged) {
    verdict.tokens.forEach((token, i) => told.set(verdict.position + i, { token, text: verdict.texts[i], kind: verdict.outcomes[i] }));
  }
  const trunk = new Map([[root.position, root]]);
  for (let above = root, next; (next = told.get(above.position + 1)); trunk.set(above.position, above)) {
    above = child(above, next.token, next.text, next.kind);
    above.trunk = true;
  }
  return trunk;
}

// The node that stands behind another one for a token; made where there is none yet.
function child(parent, token, text, kind) {
  if (!parent.children.has(token)) {
    parent.children.set(token, { position: parent.position + 1, text, kind, found: false, trunk: false, parent, children: new Map() });
  }
  return parent.children.get(token);
}

// Gives nodes their rows. A line goes on with its first children; the others begin lines of their own below it, those that
// stand farthest back first, so that no two lines cross.
function place(nodes) {
  const seen = new Set(nodes), taken = Array.from({ length: ROWS }, () => []);
  const childrenOf = (node) => [...node.children.values()].filter((one) => seen.has(one));
  line(nodes[0], 0);

  function line(node, least) {
    const all = [node];
    for (const one of all) all.push(...childrenOf(one).slice(0, 1));
    const from = node.position - 1, to = all.at(-1).position;
    const row = taken.findIndex((others, i) => i >= least && others.every((other) => to < other.from || from > other.to));
    if (row < 0) return;
    taken[row].push({ from, to });
    for (const one of all) one.row = row;
    for (const one of all.toReversed()) for (const next of childrenOf(one).slice(1)) line(next, row + 1);
  }
}

const MEANINGS = {
  pending: "drafted, not tested yet", refused: "refused", pruned: "pruned: another token was decided", late: "pruned: it came too late",
  accepted: "decided: accepted", recovered: "decided: the target's own", bonus: "decided: the target's own", direct: "decided: the target's own",
};

// Around the verdict that is pointed at, or else where the text ends now.
export function draw(box, session, current) {
  if (!session.judged.length) return box.replaceChildren();
  const width = Math.max(COLUMN, box.clientWidth), columns = Math.floor(width / COLUMN);
  const focus = current ? current.position : endOf(session.judged.at(-1));
  const first = Math.max(session.judged[0].position, focus - Math.max(1, Math.floor(BEHIND * columns)));
  const nodes = grown(session, first, first + columns), placed = nodes.filter((node) => node.row !== undefined);
  const rows = Math.max(tallest.get(session) ?? 1, ...placed.map((node) => node.row + 1)), height = TOP + rows * ROW + BOTTOM;
  tallest.set(session, rows);
  const svg = element("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Draft tokens as a tree behind the decided text" });
  const x = (node) => (node.position - first) * COLUMN, y = (node) => TOP + node.row * ROW;
  for (let position = first; position < first + columns; position++) {
    svg.append(element("text", { x: (position - first) * COLUMN, y: TOP - 7 }, `${position}`));
  }
  for (const node of placed.slice(1)) svg.append(edge(node, x, y));
  for (const node of placed) svg.append(cell(node, x, y));
  const more = nodes.length > placed.length ? `and ${nodes.length - placed.length} more` : "";
  const said = session.proposed.length ? more : silence(session.judged.at(-1));
  if (said) svg.append(element("text", { class: "more", x: 0, y: height - 3 }, said));
  box.replaceChildren(svg);
}

function edge(node, x, y) {
  const half = BOX / 2, from = x(node.parent) + COLUMN - GAP;
  const kind = node.trunk ? "decided" : node.kind;
  return element("path", { class: `edge ${kind}`, d: `M${from} ${y(node.parent) + half} h${GAP / 2} V${y(node) + half} H${x(node)}` });
}

function cell(node, x, y) {
  const made = element("g", { class: `node ${node.kind}${node.found ? " found" : ""}` }), letters = JSON.stringify(node.text).slice(1, -1);
  made.append(element("rect", { x: x(node) + 0.8, y: y(node), width: COLUMN - GAP - 0.8, height: BOX, rx: 3 }));
  made.append(element("text", { x: x(node) + 5, y: y(node) + 12.5 }, letters.length > LETTERS ? `${letters.slice(0, LETTERS - 1)}…` : letters));
  const found = node.found ? ", found waiting among the drafter's other guesses" : "";
  made.append(element("title", {}, `position ${node.position}: ${JSON.stringify(node.text)}\n${MEANINGS[node.kind]}${found}`));
  return made;
}
