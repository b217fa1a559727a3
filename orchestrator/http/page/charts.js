// Small charts in SVG, drawn anew from data.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 300, HEIGHT = 92, LEFT = 30, BOTTOM = 14;

export function element(name, attributes = {}, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  return made;
}

// series: [{points: [{x, y}], plain}], the first one filled.
export function curves(svg, series, unit) {
  const points = series.flatMap((one) => one.points);
  frame(svg);
  if (!points.length) return;
  const right = Math.max(...points.map((p) => p.x)) || 1, top = 1.1 * Math.max(...points.map((p) => p.y)) || 1;
  const x = (p) => LEFT + ((WIDTH - LEFT) * p.x) / right, y = (p) => (HEIGHT - BOTTOM) * (1 - p.y / top);
  scale(svg, top, `${right.toFixed(1)} ${unit}`);
  series.forEach(({ points, plain }) => {
    if (!points.length) return;
    const line = points.map((p) => `${x(p).toFixed(1)},${y(p).toFixed(1)}`).join(" ");
    const area = `${x(points[0]).toFixed(1)},${HEIGHT - BOTTOM} ${line} ${x(points.at(-1)).toFixed(1)},${HEIGHT - BOTTOM}`;
    if (!plain) svg.append(element("polygon", { class: "area", points: area }));
    svg.append(element("polyline", { class: plain ? "curve plain" : "curve", points: line }));
  });
}

// shares: [{label, value 0..1, title}].
export function bars(svg, shares) {
  frame(svg);
  scale(svg, 1, "");
  const width = (WIDTH - LEFT) / Math.max(8, shares.length), height = HEIGHT - BOTTOM;
  shares.forEach(({ label, value, title }, i) => {
    const left = LEFT + i * width + 2, high = height * value;
    svg.append(element("rect", { class: "bar back", x: left, y: 0, width: width - 4, height, rx: 2 }));
    const bar = element("rect", { class: "bar", x: left, y: height - high, width: width - 4, height: high, rx: 2 });
    bar.append(element("title", {}, title));
    svg.append(bar, element("text", { x: left + width / 2 - 2, y: HEIGHT - 2, "text-anchor": "middle" }, label));
  });
}

function frame(svg) {
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.replaceChildren(element("line", { class: "axis", x1: LEFT, y1: HEIGHT - BOTTOM, x2: WIDTH, y2: HEIGHT - BOTTOM }));
}

function scale(svg, top, right) {
  const label = top >= 10 ? Math.round(top) : top.toFixed(1);
  svg.append(element("text", { x: LEFT - 5, y: 9, "text-anchor": "end" }, label));
  svg.append(element("text", { x: LEFT - 5, y: HEIGHT - BOTTOM, "text-anchor": "end" }, "0"));
  if (right) svg.append(element("text", { x: WIDTH, y: HEIGHT - 2, "text-anchor": "end" }, right));
}
