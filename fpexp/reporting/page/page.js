"use strict";

// Draws every chart of the page from the numbers beside it. A curve is switched by its button in the legend; a point is
// read by pointing at it, or with the arrow keys while its panel has the focus.

const DASHES = ["", "8 3", "3 3"];
const SHAPES = [
  "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",
  "M-3.5 -3.5h7v7h-7z",
  "M0 -4.5l4.5 8h-9z",
  "M0 -5l4 5l-4 5l-4 -5z",
  "M0 4.5l4.5 -8h-9z",
  "M-1.5 -4.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z",
  "M-4 -2.5l1.5 -1.5l2.5 2.5l2.5 -2.5l1.5 1.5l-2.5 2.5l2.5 2.5l-1.5 1.5l-2.5 -2.5l-2.5 2.5l-1.5 -1.5l2.5 -2.5z",
  "M0 -5l1.5 3.2l3.5 .4l-2.6 2.3l.7 3.5l-3.1 -1.7l-3.1 1.7l.7 -3.5l-2.6 -2.3l3.5 -.4z",
  "M-4.5 0l8 -4.5v9z",
];
const MARGIN = { left: 52, right: 12, top: 20, bottom: 40 };
const REACH = 40; // pixels between a pointer and the point that it reads
const MANY = 40; // points from which on a line has no markers

function make(name, attributes = {}, text = null) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  return node;
}

function element(name, className = "", text = null) {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text !== null) node.textContent = text;
  return node;
}

function shown(value) {
  if (Number.isInteger(value)) return String(value);
  return Math.abs(value) < 10 ? value.toFixed(3) : value.toPrecision(4);
}

function forward(scale, value) {
  return scale === "linear" ? value : Math.log2(value);
}

// The range of an axis: its limits, or that of its values with some room.
function range(axis, values) {
  if (axis.limits) return axis.limits;
  const usable = axis.scale === "linear" ? values : values.filter((value) => value > 0);
  if (usable.length === 0) return axis.scale === "linear" ? [0, 1] : [1, 2];
  const low = Math.min(...usable), high = Math.max(...usable);
  if (axis.scale !== "linear") return [low / 1.08, high * 1.08];
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return [low - room, high + room];
}

function ticks(axis, [low, high], count) {
  if (axis.scale === "log2") {
    const first = Math.ceil(Math.log2(low)), last = Math.floor(Math.log2(high));
    const step = Math.max(1, Math.ceil((last - first + 1) / count));
    return Array.from({ length: Math.floor((last - first) / step) + 1 }, (_, i) => 2 ** (first + i * step));
  }
  if (axis.scale === "log") {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
      for (const digit of [1, 2, 5]) found.push(digit * 10 ** power);
    }
    const inside = found.filter((value) => value >= low && value <= high);
    return inside.length >= 2 ? inside : [low, high];
  }
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((width) => width >= raw);
  const first = Math.ceil(low / step - 1e-9);
  const length = Math.floor(high / step + 1e-9) - first + 1;
  return Array.from({ length }, (_, i) => (first + i) * step);
}

function tickText(value) {
  return String(Number(value.toPrecision(6)));
}

class Panel {
  constructor(panel, off) {
    this.panel = panel;
    this.off = off; // labels that are switched off
    this.at = null; // [line, point] that is read
    this.node = element("div", "panel");
    if (panel.title) this.node.append(element("h4", "", panel.title));
    this.svg = make("svg", { tabindex: "0", role: "group", "aria-roledescription": "chart" });
    const name = [panel.title, `${panel.y.label} by ${panel.x.label}`].filter(Boolean).join(": ");
    this.svg.setAttribute("aria-label", `${name}. Arrow keys read the points.`);
    this.tip = element("div", "tip");
    this.tip.setAttribute("role", "status");
    this.tip.hidden = true;
    this.node.append(this.svg, this.tip);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerdown", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.read(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
    this.svg.addEventListener("blur", () => this.read(null));
  }

  lines() {
    return this.panel.lines.filter((line) => !this.off.has(line.label));
  }

  draw() {
    const { panel, svg } = this;
    const width = Math.max(this.node.clientWidth, 200);
    const height = Math.round(Math.min(Math.max(width * 0.62, 220), 340));
    this.width = width;
    const all = panel.lines.flatMap((line) => line.points);
    const ends = all.flatMap((p) => [p.y - (p.spread ?? 0), p.y + (p.spread ?? 0)]);
    const marked = panel.marks.map(([value]) => value);
    const xs = range(panel.x, [...all.map((p) => p.x), ...marked]);
    const ys = range(panel.y, [...ends, ...panel.levels.map(([value]) => value)]);
    const place = (axis, [low, high], from, to) => (value) => {
      const [a, b] = [forward(axis.scale, low), forward(axis.scale, high)];
      const share = (forward(axis.scale, Math.max(value, axis.scale === "linear" ? value : low)) - a) / (b - a || 1);
      return from + (to - from) * share;
    };
    const right = width - MARGIN.right, bottom = height - MARGIN.bottom;
    this.x = place(panel.x, xs, MARGIN.left, right);
    this.y = place(panel.y, ys, bottom, MARGIN.top);
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);
    for (const value of ticks(panel.x, xs, Math.floor(width / 60))) {
      const x = this.x(value);
      svg.append(make("line", { class: "grid", x1: x, x2: x, y1: MARGIN.top, y2: bottom }));
      svg.append(make("text", { x, y: bottom + 16, "text-anchor": "middle" }, tickText(value)));
    }
    for (const value of ticks(panel.y, ys, 6)) {
      const y = this.y(value);
      svg.append(make("line", { class: "grid", x1: MARGIN.left, x2: right, y1: y, y2: y }));
      svg.append(make("text", { x: MARGIN.left - 6, y: y + 4, "text-anchor": "end" }, tickText(value)));
    }
    const middle = (MARGIN.left + right) / 2, centre = (MARGIN.top + bottom) / 2;
    svg.append(make("text", { x: middle, y: height - 6, "text-anchor": "middle" }, panel.x.label));
    const turned = { x: 0, y: 0, "text-anchor": "middle", transform: `translate(12 ${centre}) rotate(-90)` };
    svg.append(make("text", turned, panel.y.label));
    for (const [value, name] of panel.levels) {
      const y = this.y(value);
      svg.append(make("line", { class: "level", x1: MARGIN.left, x2: right, y1: y, y2: y }));
      svg.append(make("text", { x: MARGIN.left + 4, y: y - 4 }, name));
    }
    for (const [value, name] of panel.marks) {
      const x = this.x(value);
      svg.append(make("line", { class: "mark", x1: x, x2: x, y1: MARGIN.top, y2: bottom }));
      svg.append(make("text", { x, y: MARGIN.top - 6, "text-anchor": "middle" }, name));
    }
    for (const line of this.lines()) this.drawLine(line);
    this.here = make("circle", { class: "here", r: 7, visibility: "hidden" });
    svg.append(this.here);
    this.read(null);
  }

  drawLine(line) {
    const colour = line.colour;
    const points = line.points.map((p) => [this.x(p.x), this.y(p.y)]);
    if (line.points.some((p) => p.spread)) {
      const upper = line.points.map((p) => [this.x(p.x), this.y(p.y + (p.spread ?? 0))]);
      const lower = line.points.map((p) => [this.x(p.x), this.y(p.y - (p.spread ?? 0))]).reverse();
      this.svg.append(make("path", { class: `band fill-${colour}`, d: `M${[...upper, ...lower].join("L")}z` }));
    }
    const dash = DASHES[line.dash];
    const path = make("path", { class: `line line-${colour}`, d: `M${points.join("L")}` });
    if (dash) path.setAttribute("stroke-dasharray", dash);
    this.svg.append(path);
    if (points.length > MANY) return;
    const d = SHAPES[line.marker];
    for (const [x, y] of points) {
      this.svg.append(make("path", { class: `point fill-${colour}`, d, transform: `translate(${x} ${y})` }));
    }
  }

  point(event) {
    const box = this.svg.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    let nearest = null, least = REACH;
    this.lines().forEach((line, i) =>
      line.points.forEach((p, j) => {
        const distance = Math.hypot(this.x(p.x) - x, this.y(p.y) - y);
        if (distance < least) [nearest, least] = [[i, j], distance];
      }),
    );
    this.read(nearest);
  }

  key(event) {
    const lines = this.lines();
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (event.key === "Escape") this.read(null);
    if (!steps || lines.length === 0) return;
    event.preventDefault();
    if (!this.at) return this.read([0, 0]);
    const line = (this.at[0] + steps[0] + lines.length) % lines.length;
    const last = lines[line].points.length - 1;
    this.read([line, Math.min(Math.max(this.at[1] + steps[1], 0), last)]);
  }

  read(at) {
    this.at = at;
    this.tip.hidden = at === null;
    this.here.setAttribute("visibility", at === null ? "hidden" : "visible");
    if (at === null) return;
    const line = this.lines()[at[0]], p = line.points[at[1]];
    const [x, y] = [this.x(p.x), this.y(p.y)];
    this.here.setAttribute("cx", x);
    this.here.setAttribute("cy", y);
    const spread = p.spread === null ? "" : ` ± ${shown(p.spread)} (n=${p.runs.length})`;
    this.tip.replaceChildren(
      element("strong", "", line.label),
      element("span", "", `${this.panel.x.label} ${shown(p.x)}: ${shown(p.y)}${spread}`),
      ...p.runs.map(([id, value]) => element("span", "faint", p.runs.length > 1 ? `${id}: ${shown(value)}` : id)),
    );
    const room = this.width - this.tip.offsetWidth;
    this.tip.style.left = `${Math.min(Math.max(x + 12, 0), Math.max(room, 0))}px`;
    const top = this.svg.getBoundingClientRect().top - this.node.getBoundingClientRect().top + y;
    const above = top - this.tip.offsetHeight - 12;
    this.tip.style.top = `${above >= 0 ? above : top + 14}px`;
  }
}

function sample(line) {
  const svg = make("svg", { width: 26, height: 12, viewBox: "-13 -6 26 12", "aria-hidden": "true" });
  const colour = line.colour;
  const path = make("path", { class: `line line-${colour}`, d: "M-13 0H13" });
  const dash = DASHES[line.dash];
  if (dash) path.setAttribute("stroke-dasharray", dash);
  svg.append(path, make("path", { class: `fill-${colour}`, d: SHAPES[line.marker] }));
  return svg;
}

function drawChart(figure) {
  const chart = JSON.parse(figure.querySelector("script").textContent);
  const off = new Set();
  const panels = chart.panels.map((panel) => new Panel(panel, off));
  const redraw = () => panels.forEach((panel) => panel.draw());
  const lines = new Map(chart.panels.flatMap((panel) => panel.lines).map((line) => [line.label, line]));
  const sorted = [...lines.values()].sort((a, b) => a.index - b.index);
  const legend = element("ul", "legend");
  legend.setAttribute("aria-label", "Curves, on or off");
  const buttons = sorted.map((line) => {
    const button = element("button");
    button.type = "button";
    button.append(sample(line), line.label);
    button.addEventListener("click", () => {
      if (!off.delete(line.label)) off.add(line.label);
      update();
    });
    return button;
  });
  const every = element("button", "", "all");
  every.type = "button";
  every.addEventListener("click", () => {
    if (off.size === 0) sorted.forEach((line) => off.add(line.label));
    else off.clear();
    update();
  });
  const update = () => {
    sorted.forEach((line, i) => buttons[i].setAttribute("aria-pressed", String(!off.has(line.label))));
    every.textContent = off.size === 0 ? "none" : "all";
    redraw();
  };
  for (const button of sorted.length > 1 ? [...buttons, every] : buttons) {
    const item = element("li");
    item.append(button);
    legend.append(item);
  }
  const grid = element("div", "panels");
  grid.append(...panels.map((panel) => panel.node));
  figure.prepend(legend, grid);
  update();
  let width = grid.clientWidth;
  new ResizeObserver(() => {
    if (grid.clientWidth !== width) {
      width = grid.clientWidth;
      redraw();
    }
  }).observe(grid);
}

document.querySelectorAll("figure.chart").forEach(drawChart);
