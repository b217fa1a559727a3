// Small charts in SVG, drawn anew from data, in the pixels that they have.

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 92, LEFT = 34, BOTTOM = 15, TOP = 5, RIBBON = 5;
// Columns of a chart of forwards.
const COLUMNS = 48;

export function element(name, attributes = {}, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  return made;
}

// series: [{points: [{x, y}], kind}]; the space under a "main" one is filled.
export function curves(svg, series, unit, least = 0) {
  const width = frame(svg), points = series.flatMap((one) => one.points);
  if (!points.length) return;
  const right = Math.max(...points.map((p) => p.x)) || 1, top = Math.max(least, 1.1 * Math.max(...points.map((p) => p.y))) || 1;
  const floor = HEIGHT - BOTTOM;
  const x = (p) => (LEFT + ((width - LEFT) * p.x) / right).toFixed(1), y = (p) => (floor - ((floor - TOP) * p.y) / top).toFixed(1);
  scale(svg, width, top, `${right < 10 ? right.toFixed(1) : Math.round(right)} ${unit}`);
  for (const { points, kind } of series) {
    if (!points.length) continue;
    const line = points.map((p) => `${x(p)},${y(p)}`).join(" ");
    if (kind === "main") svg.append(element("polygon", { class: "area", points: `${x(points[0])},${floor} ${line} ${x(points.at(-1))},${floor}` }));
    svg.append(element("polyline", { class: `curve ${kind}`, points: line }));
  }
}

// shares: [{label, value 0..1, title}].
export function bars(svg, shares) {
  const drawn = frame(svg), floor = HEIGHT - BOTTOM;
  scale(svg, drawn, 1, "");
  const width = (drawn - LEFT) / Math.max(8, shares.length);
  shares.forEach(({ label, value, title }, i) => {
    const left = LEFT + i * width + 1.5, high = (floor - TOP) * value;
    svg.append(element("rect", { class: "bar back", x: left, y: TOP, width: width - 3, height: floor - TOP, rx: 2 }));
    const bar = element("rect", { class: "bar", x: left, y: floor - high, width: width - 3, height: high, rx: 2 });
    bar.append(element("title", {}, title));
    svg.append(bar, element("text", { x: left + width / 2 - 1.5, y: HEIGHT - 3, "text-anchor": "middle" }, label));
  });
}

// items: the newest forwards, [{parts: [{value, kind}], ribbon, title}], a column for each, its parts one on the other.
export function columns(svg, items, least) {
  const drawn = frame(svg), shown = items.slice(-COLUMNS), floor = HEIGHT - BOTTOM;
  if (!shown.length) return;
  const top = Math.max(least, ...shown.map(({ parts }) => parts.reduce((sum, part) => sum + part.value, 0)));
  scale(svg, drawn, top, `latest ${shown.length} forward${shown.length === 1 ? "" : "s"}`);
  const width = (drawn - LEFT) / COLUMNS, high = (floor - TOP - RIBBON) / top;
  shown.forEach(({ parts, ribbon, title }, i) => {
    const column = element("g"), x = LEFT + i * width;
    let y = floor;
    for (const { value, kind } of parts) {
      y -= value * high;
      if (value) column.append(element("rect", { class: `part ${kind}`, x: x + 0.5, y, width: Math.max(1, width - 1), height: value * high }));
    }
    if (ribbon) column.append(element("rect", { class: `ribbon ${ribbon}`, x, y: 0, width: width + 0.3, height: 3 }));
    column.append(element("title", {}, title));
    svg.append(column);
  });
}

function frame(svg) {
  const width = Math.max(120, svg.clientWidth || 300);
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  svg.replaceChildren(element("line", { class: "axis", x1: LEFT, y1: HEIGHT - BOTTOM, x2: width, y2: HEIGHT - BOTTOM }));
  return width;
}

function scale(svg, width, top, right) {
  svg.append(element("text", { x: LEFT - 6, y: TOP + 7, "text-anchor": "end" }, top >= 10 || Number.isInteger(top) ? Math.round(top) : top.toFixed(1)));
  svg.append(element("text", { x: LEFT - 6, y: HEIGHT - BOTTOM, "text-anchor": "end" }, "0"));
  if (right) svg.append(element("text", { x: width, y: HEIGHT - 3, "text-anchor": "end" }, right));
}
