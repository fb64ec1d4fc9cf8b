"use strict";
// Draws what `crossbow.monitor.figures` says. All text goes through textContent or attributes: what
// comes from files can never become markup.

const MARKERS = [
  "M-3.6 0a3.6 3.6 0 1 0 7.2 0a3.6 3.6 0 1 0-7.2 0Z", "M-3.3-3.3h6.6v6.6h-6.6Z", "M0-4.4 4.2 3.2h-8.4Z",
  "M0-4.6 4.4 0 0 4.6-4.4 0Z", "M0 4.4-4.2-3.2h8.4Z", "M-1.5-4.2h3v2.7h2.7v3h-2.7v2.7h-3v-2.7h-2.7v-3h2.7Z",
];
const AXES = { samples: "Samples", epochs: "Epochs", seconds: "Time" };
const PARTS = ["compute", "averaging", "waiting", "data"];
const HEIGHT = 250, LEFT = 54, RIGHT = 14, TOP = 8, BOTTOM = 26, MOST_MARKERS = 60;

let page = JSON.parse(document.getElementById("figures").textContent);
const seen = { axis: "samples", hidden: new Set(), logs: new Set(), closeUps: new Set(), cursor: null };
const plots = new Map();

// ---- elements, numbers

function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function draw(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "run") element.style.setProperty("--colour", `var(--run${value % MARKERS.length})`);
    else if (name === "part") element.style.setProperty("--colour", `var(--${value})`);
    else if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

function grouped(value, digits = 0) {
  return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

function plain(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2);
  if (size >= 1000) return grouped(value);
  return Number(value.toPrecision(4)).toString();
}

function shown(value, unit) {
  if (value === null || value === undefined) return "–";
  if (unit === "share") return `${(100 * value).toFixed(2)} %`;
  if (unit === "count") return value >= 100 ? grouped(value) : plain(value);
  return plain(value);
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds > 0 && seconds < 0.1) return `${+(1000 * seconds).toPrecision(3)} ms`;
  if (seconds < 10) return `${seconds.toFixed(2)} s`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds), two = (n) => String(n).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)}:${two(whole % 60)} min`;
  return `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)} h`;
}

function placed(x) {
  if (seen.axis === "seconds") return duration(x);
  if (seen.axis === "epochs") return `${x.toFixed(2)} epochs`;
  return `${grouped(Math.round(x))} samples`;
}

function short(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return `${+(value / 1e9).toPrecision(4)}G`;
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(4)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(4)}k`;
  if (size && size < 1e-3) return Number(value.toPrecision(3)).toExponential();
  return `${+value.toPrecision(4)}`;
}

function tickText(value, unit, step) {
  if (unit !== "share") return short(value);
  const isWhole = Math.abs(100 * step - Math.round(100 * step)) < 1e-9;
  return `${(100 * value).toFixed(isWhole ? 0 : step < 0.001 ? 2 : 1)} %`;
}

function steps(low, high, wanted, sizes = [1, 2, 2.5, 5, 10]) {
  const rough = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * sizes.find((size) => size * power >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return { step, found };
}

function timeSteps(high, wanted) {
  const nice = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];
  const step = nice.find((size) => high / size <= wanted);
  if (high < 4 || !step) return steps(0, high, wanted).found;
  return Array.from({ length: Math.floor(high / step) + 1 }, (_, i) => i * step);
}

function timeTick(seconds, high) {
  if (high < 120) return `${+seconds.toPrecision(3)} s`;
  if (high < 7200) return `${Math.floor(seconds / 60)}:${String(Math.round(seconds % 60)).padStart(2, "0")}`;
  return `${+(seconds / 3600).toPrecision(3)} h`;
}

// ---- what is drawn

function abscissa(line) {
  if (seen.axis === "seconds") return line.points.map((point) => point[1]);
  const size = seen.axis === "epochs" ? page.runs[line.run].epoch_samples || 1 : 1;
  return line.points.map((point) => point[0] / size);
}

function visible(things) {
  return things.filter((thing) => !seen.hidden.has(thing.run));
}

function nameOf(line, chart) {
  const labels = new Set(chart.lines.map((other) => other.label));
  const parts = [page.runs.length > 1 ? page.runs[line.run].name : "", labels.size > 1 ? line.label : ""];
  return parts.filter(Boolean).join(" · ") || line.label;
}

function verticalRange(lines, chart, isLog, from) {
  const levels = from ? [] : visible(chart.levels).map((level) => level.value);
  const values = [...lines.flatMap((line) => line.points.filter((_, i) => line.x[i] >= from).map((point) => point[2])), ...levels];
  const most = values.reduce((a, b) => Math.max(a, b), 0);
  const errors = lines.flatMap((line) => line.points.filter((point) => point[3] !== null));
  values.push(...errors.map((point) => Math.min(point[2] + point[3], 1.5 * most)));  // bands may go far
  const usable = isLog ? values.filter((value) => value > 0) : values;
  if (!usable.length) return [isLog ? 0.1 : 0, 1];
  let low = usable.reduce((a, b) => Math.min(a, b)), high = usable.reduce((a, b) => Math.max(a, b));
  if (isLog) return low === high ? [low / 2, high * 2] : [low / 1.1, high * 1.1];
  if (chart.has_zero) low = Math.min(0, low);
  const room = (high - low) * 0.05 || Math.abs(high) * 0.1 || 1;
  const top = chart.unit === "share" && high <= 1 ? Math.min(1, high + room) : high + room;
  return [low >= 0 ? Math.max(0, low - room) : low - room, top];
}

class Plot {
  constructor(chart) {
    this.svg = draw("svg", { "aria-hidden": "true" });
    this.readout = make("div", { class: "readout", hidden: "" });
    this.frame = make("div", {
      class: "plot", tabindex: 0, role: "slider", "aria-label": `${chart.title}: read values with the arrow keys`,
      "aria-valuemin": 0, "aria-valuemax": 0, "aria-valuenow": 0, "aria-valuetext": "",
      onpointermove: (event) => this.point(event), onpointerdown: (event) => this.point(event),
      onpointerleave: () => moveCursor(null, null), onkeydown: (event) => this.press(event),
      onblur: () => moveCursor(null, null),
    }, this.svg, this.readout);
    this.log = make("button", { type: "button", onclick: () => this.toggle(seen.logs) }, "log");
    this.closeUp = make("button", { type: "button", onclick: () => this.toggle(seen.closeUps) }, "close-up");
    const buttons = make("span", { class: "buttons" }, chart.has_close_up ? this.closeUp : null, chart.is_log ? this.log : null);
    this.key = make("ul", { class: "key" });
    this.values = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `${chart.title}: values` });
    this.table = make("details", { ontoggle: () => this.tabulate() }, make("summary", {}, "Values"), this.values);
    this.figure = make("figure", { id: `chart-${chart.key}` },
      make("figcaption", {}, make("h2", {}, chart.title), buttons, make("p", {}, chart.about)),
      this.frame, this.key, this.table);
    this.update(chart);
  }

  update(chart) {
    this.chart = chart;
    const styles = new Map(chart.lines.map((line) => [line.label, line.style]));
    this.key.replaceChildren(...(styles.size < 2 ? [] : [...styles].map(([label, style]) => make("li", {},
      draw("svg", { viewBox: "0 0 26 8", "aria-hidden": "true" }, draw("path", { class: `trace ${style}`, d: "M1 4H25" })), label))));
    this.redraw();
    this.tabulate();
  }

  toggle(those) {
    if (!those.delete(this.chart.key)) those.add(this.chart.key);
    this.redraw();
  }

  redraw() {
    const width = this.frame.clientWidth || 560, chart = this.chart;
    const isLog = seen.logs.has(chart.key), isCloseUp = seen.closeUps.has(chart.key);
    this.log.setAttribute("aria-pressed", isLog);
    this.closeUp.setAttribute("aria-pressed", isCloseUp);
    this.lines = visible(chart.lines).map((line) => ({ ...line, x: abscissa(line) }));
    this.end = this.lines.reduce((most, line) => Math.max(most, line.x[line.x.length - 1]), 0) || 1;
    const [low, high] = verticalRange(this.lines, chart, isLog, isCloseUp ? this.end / 3 : 0);
    const scale = isLog ? Math.log : (value) => value;
    const bottom = HEIGHT - BOTTOM, inner = width - LEFT - RIGHT;
    this.x = (value) => LEFT + (value / this.end) * inner;
    this.inverse = (place) => ((place - LEFT) / inner) * this.end;
    this.y = (value) => {
      if (isLog && value <= 0) return bottom;
      return bottom - ((scale(value) - scale(low)) / (scale(high) - scale(low))) * (bottom - TOP);
    };
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.cursor = draw("g");
    const clip = `inside-${chart.key}`;
    const inside = draw("g", { "clip-path": `url(#${clip})` }, ...this.lines.map((line) => this.trace(line)));
    this.svg.replaceChildren(
      draw("clipPath", { id: clip }, draw("rect", { x: LEFT - 6, y: 0, width: inner + 12, height: bottom + 6 })),
      this.axes(width, low, high, isLog), this.happenings(), this.levels(width), inside, this.cursor);
    this.frame.setAttribute("aria-valuemax", this.end);
    this.showCursor();
  }

  axes(width, low, high, isLog) {
    const group = draw("g"), bottom = HEIGHT - BOTTOM;
    const ticks = isLog ? logTicks(low, high) : steps(low, high, 6);
    for (const value of ticks.found) {
      const y = this.y(value);
      group.append(draw("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }),
        draw("text", { x: LEFT - 8, y: y + 4, "text-anchor": "end" }, tickText(value, this.chart.unit, ticks.step)));
    }
    const wanted = Math.max(2, Math.floor(width / 95)), isTime = seen.axis === "seconds";
    for (const value of isTime ? timeSteps(this.end, wanted) : steps(0, this.end, wanted).found) {
      const text = isTime ? timeTick(value, this.end) : short(value);
      const x = this.x(value), anchor = x > width - 30 ? "end" : "middle";
      group.append(draw("line", { class: "axis", x1: x, x2: x, y1: bottom, y2: bottom + 4 }),
        draw("text", { x, y: HEIGHT - 7, "text-anchor": anchor }, text));
    }
    group.append(draw("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: bottom, y2: bottom }));
    return group;
  }

  happenings() {
    const group = draw("g");
    for (const event of visible(page.events)) {
      if (event.samples === null || event.event === "end") continue;
      const x = this.x(abscissa({ run: event.run, points: [[event.samples, event.seconds]] })[0]);
      group.append(draw("line", { class: "happening", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM },
        draw("title", {}, `${event.event}: ${event.said}`)));
    }
    return group;
  }

  levels(width) {
    const group = draw("g"), told = [];
    for (const level of visible(this.chart.levels)) {
      const y = this.y(level.value), run = page.runs.length > 1 ? level.run : null;
      if (y < TOP || y > HEIGHT - BOTTOM || told.some((other) => Math.abs(other - y) < 13)) continue;
      told.push(y);
      group.append(draw("line", { class: "level", run: level.run, x1: LEFT, x2: width - RIGHT, y1: y, y2: y }),
        draw("text", { class: "levelname", ...(run === null ? {} : { run }), x: width - RIGHT - 4, y: y < TOP + 18 ? y + 14 : y - 5, "text-anchor": "end" },
          `${level.label} ${shown(level.value, this.chart.unit)}`));
    }
    return group;
  }

  trace(line) {
    const group = draw("g", { run: line.run, "data-run": line.run, "data-label": line.label });
    const places = line.points.map((point, i) => [this.x(line.x[i]), this.y(point[2])]);
    const errors = line.points.map((point, i) => ({ x: places[i][0], value: point[2], error: point[3] })).filter((p) => p.error !== null);
    if (errors.length > 1) {
      const floor = HEIGHT - BOTTOM, clip = (y) => Math.min(floor, Math.max(TOP, y));
      const upper = errors.map((p) => `${p.x.toFixed(1)} ${clip(this.y(p.value + p.error)).toFixed(1)}`);
      const lower = errors.map((p) => `${p.x.toFixed(1)} ${clip(this.y(Math.max(0, p.value - p.error))).toFixed(1)}`).reverse();
      group.append(draw("path", { class: "band", d: `M${upper.join("L")}L${lower.join("L")}Z` }));
    }
    let path = "";
    places.forEach(([x, y], i) => {
      if (i && line.style === "steps") path += `H${x.toFixed(1)}V${y.toFixed(1)}`;
      else path += `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
    });
    group.append(draw("path", { class: `trace ${line.style}`, d: path }));
    const isSparse = places.length <= MOST_MARKERS;
    if ((line.style === "solid" && isSparse) || places.length === 1) {
      for (const [x, y] of places) group.append(draw("path", { class: "marker", d: MARKERS[line.run % MARKERS.length], transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})` }));
    }
    return group;
  }

  point(event) {
    const place = event.clientX - this.frame.getBoundingClientRect().left;
    moveCursor(Math.min(this.end, Math.max(0, this.inverse(place))), this);
  }

  press(event) {
    const places = [...new Set(this.lines.flatMap((line) => line.x))].sort((a, b) => a - b);
    if (event.key === "Escape") return moveCursor(null, null);
    if (!places.length || !["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key)) return;
    event.preventDefault();
    const now = seen.cursor ? seen.cursor.at : -1;
    let next = { Home: places[0], End: places[places.length - 1] }[event.key];
    if (event.key === "ArrowRight") next = places.find((x) => x > now + 1e-9);
    if (event.key === "ArrowLeft") next = places.findLast((x) => x < now - 1e-9);
    moveCursor(next ?? now, this);
  }

  showCursor() {
    this.cursor.replaceChildren();
    this.readout.hidden = true;
    if (!seen.cursor || seen.cursor.at > this.end) return;
    const { at, plot } = seen.cursor, x = this.x(at), rows = [];
    this.cursor.append(draw("line", { class: "cursor", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }));
    for (const line of this.lines) {
      const point = line.points[nearest(line.x, at)];
      const place = `translate(${this.x(line.x[nearest(line.x, at)])} ${this.y(point[2])})`;
      this.cursor.append(draw("path", { class: "here", run: line.run, d: MARKERS[line.run % MARKERS.length], transform: place }));
      rows.push({ line, point });
    }
    if (plot === this) this.read(at, x, rows);
  }

  read(at, x, rows) {
    const said = rows.map(({ line, point }) => {
      const error = point[3] === null ? "" : ` ± ${shown(point[3], this.chart.unit)}`;
      return { run: line.run, name: nameOf(line, this.chart), value: shown(point[2], this.chart.unit) + error };
    });
    const body = said.map((row) => make("tr", {}, make("td", {}, dot(row.run), ` ${row.name}`), make("td", {}, row.value)));
    this.readout.replaceChildren(make("strong", {}, placed(at)), make("table", {}, make("tbody", {}, ...body)));
    this.readout.hidden = false;
    const isRight = x > this.frame.clientWidth / 2;
    this.readout.style.left = isRight ? "auto" : `${x + 14}px`;
    this.readout.style.right = isRight ? `${this.frame.clientWidth - x + 14}px` : "auto";
    this.frame.setAttribute("aria-valuenow", at);
    this.frame.setAttribute("aria-valuetext", `${placed(at)}: ${said.map((row) => `${row.name} ${row.value}`).join(", ")}`);
  }

  tabulate() {
    if (!this.table.open) return;
    const heads = ["Run", "Series", "Samples", "Seconds", "Value", "± Error"];
    const hasErrors = this.chart.lines.some((line) => line.points.some((point) => point[3] !== null));
    const rows = this.chart.lines.flatMap((line) => line.points.map(([samples, seconds, value, error]) => make("tr", {},
      make("td", {}, page.runs[line.run].name), make("td", {}, line.label),
      ...[grouped(samples), seconds.toFixed(2), String(value), ...(hasErrors ? [error === null ? "–" : String(error)] : [])]
        .map((text) => make("td", { class: "number" }, text)))));
    const head = heads.slice(0, hasErrors ? 6 : 5).map((name, i) => make("th", { scope: "col", class: i > 1 ? "number" : null }, name));
    this.values.replaceChildren(make("table", { class: "values" },
      make("caption", { class: "hidden" }, this.chart.title), make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows)));
  }
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const digit of [1, 2, 5]) found.push(digit * 10 ** power);
  }
  const inside = found.filter((value) => value >= low && value <= high);
  const powers = inside.filter((value) => Math.abs(Math.log10(value) % 1) < 1e-9);
  if (inside.length > 8 && powers.length > 1) return { step: 1, found: powers };
  return inside.length > 1 ? { step: 1, found: inside } : steps(low, high, 4);
}

function nearest(places, at) {
  let low = 0, high = places.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (places[middle] < at) low = middle + 1; else high = middle;
  }
  return low && at - places[low - 1] < places[low] - at ? low - 1 : low;
}

function moveCursor(at, plot) {
  seen.cursor = at === null ? null : { at, plot };
  for (const other of plots.values()) other.showCursor();
}

function dot(run) {
  return draw("svg", { class: "dot", viewBox: "-5 -5 10 10", "aria-hidden": "true", run }, draw("path", { d: MARKERS[run % MARKERS.length] }));
}

// ---- the page

function header() {
  const tasks = [...new Set(page.runs.map((run) => run.task))];
  document.getElementById("title").textContent = tasks.join(", ");
  const count = page.runs.length;
  const size = page.runs[0].parameters;
  const detail = tasks.length === 1 && size ? `${grouped(size)} parameters` : "";
  document.getElementById("subtitle").textContent = [count > 1 ? `${count} runs side by side` : "", detail].filter(Boolean).join(" · ");
  document.getElementById("cards").replaceChildren(...page.runs.map(card));
}

function card(run, number) {
  const unit = run.metric_name === "accuracy" ? "share" : "number";
  const crew = run.learners === null ? "–" : `${run.learners} on ${run.ranks ?? "?"} rank${run.ranks === 1 ? "" : "s"}`;
  const facts = [
    ["best on the way", run.best === null ? null : shown(run.best, unit)],
    ...Object.entries(run.final).map(([name, value]) => [name, plain(value)]),
    ["test loss", run.loss === null ? null : plain(run.loss)],
    ["target", run.target === null ? null : `${shown(run.target, unit)}, ${run.target_seconds === null ? "not reached" : `after ${duration(run.target_seconds)}`}`],
    ["time", duration(run.seconds)],
    ["trained", run.samples === null ? null : `${+(run.epochs ?? 0).toFixed(2)} epochs, ${grouped(run.samples)} samples`],
    ["speed", run.samples_per_second === null ? null : `${grouped(run.samples_per_second)} samples/s`],
    ["learners", crew],
    ["state", run.status],
  ];
  return make("li", { class: "card", run: number },
    make("p", { class: "name" }, dot(number), run.name),
    make("p", { class: "big" }, shown(run.metric, unit), make("small", {}, `test ${run.metric_name}`)),
    make("dl", {}, ...facts.filter(([, value]) => value !== null).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)))));
}

function tools() {
  const axes = Object.entries(AXES).map(([axis, label]) => make("button", {
    type: "button", "aria-pressed": seen.axis === axis, onclick: () => { seen.axis = axis; seen.cursor = null; tools(); redraw(); },
  }, label));
  const runs = page.runs.map((run, number) => make("button", {
    type: "button", class: "run", run: number, "aria-pressed": !seen.hidden.has(number),
    onclick: () => { if (!seen.hidden.delete(number)) seen.hidden.add(number); tools(); redraw(); },
  }, dot(number), run.name));
  const bar = document.getElementById("tools");
  const focused = [...bar.querySelectorAll("button")].indexOf(document.activeElement);
  bar.replaceChildren(make("fieldset", {}, make("legend", {}, "Against"), ...axes),
    ...(runs.length > 1 ? [make("fieldset", {}, make("legend", {}, "Show"), ...runs)] : []));
  if (focused >= 0) bar.querySelectorAll("button")[focused].focus();
}

function redraw() {
  for (const plot of plots.values()) plot.redraw();
}

function charts() {
  const place = document.getElementById("charts");
  page.charts.forEach((chart, i) => {
    let plot = plots.get(chart.key);
    if (plot) return plot.update(chart);
    plot = new Plot(chart);
    plots.set(chart.key, plot);
    place.insertBefore(plot.figure, place.children[i] ?? null);
    plot.redraw();
  });
}

function parts() {
  const section = document.getElementById("parts");
  section.hidden = !page.parts.length;
  const names = PARTS.filter((name) => page.parts.some((row) => row.seconds[name]));
  const bars = page.parts.flatMap((row) => {
    const total = names.reduce((sum, name) => sum + (row.seconds[name] ?? 0), 0);
    const share = (name) => (row.seconds[name] ?? 0) / total;
    const blocks = names.filter((name) => share(name) > 0).map((name) => {
      const text = `${+(100 * share(name)).toPrecision(2)} %`;
      const block = make("span", { part: name, title: `${name}: ${text}` }, share(name) > 0.045 ? text : "");
      block.style.flexGrow = share(name);
      return block;
    });
    return [make("p", { class: "barname" }, make("span", {}, page.runs.length > 1 ? dot(row.run) : "", ` ${page.runs[row.run].name}`),
      make("span", { class: "soft" }, `${duration(total)} a step`)), make("div", { class: "bar", "aria-hidden": "true" }, ...blocks)];
  });
  const heads = ["Run", ...names].map((name, i) => make("th", { scope: "col", class: i ? "number" : null }, name));
  const rows = page.parts.map((row) => make("tr", {}, make("td", {}, page.runs[row.run].name),
    ...names.map((name) => make("td", { class: "number" }, row.seconds[name] === undefined ? "–" : duration(row.seconds[name])))));
  document.getElementById("bars").replaceChildren(...bars,
    make("ul", { class: "key" }, ...names.map((name) => make("li", {}, make("span", { class: "block", part: name }), name))));
  document.getElementById("partvalues").replaceChildren(make("table", { class: "values" },
    make("caption", { class: "hidden" }, "Where the time of a step goes"),
    make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...rows)));
}

function sheet({ title, rows }) {
  const heads = ["", ...page.runs.map((run) => run.name)].map((name) => make("th", { scope: "col" }, name));
  const body = rows.map((row) => make("tr", { class: row.differs ? "differs" : null },
    make("th", { scope: "row" }, row.name), ...row.values.map((value) => make("td", {}, value))));
  return make("div", {}, make("h2", {}, title), make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": title },
    make("table", { class: "values" }, make("caption", { class: "hidden" }, title),
      make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...body))));
}

function sheets() {
  document.getElementById("sheets").replaceChildren(...page.tables.filter((table) => table.rows.length).map(sheet));
  const section = document.getElementById("events");
  section.hidden = !page.events.length;
  const rows = page.events.map((event) => make("tr", {}, make("td", {}, page.runs[event.run].name), make("td", {}, event.event),
    make("td", { class: "number" }, event.samples === null ? "–" : grouped(event.samples)),
    make("td", { class: "number" }, duration(event.seconds)), make("td", {}, event.said)));
  const heads = ["Run", "Event", "Samples", "Time", "Said"].map((name, i) => make("th", { scope: "col", class: i === 2 || i === 3 ? "number" : null }, name));
  document.getElementById("told").replaceChildren(make("table", { class: "values" }, make("caption", { class: "hidden" }, "Events"),
    make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...rows)));
}

function show() {
  header();
  tools();
  charts();
  parts();
  sheets();
}

// ---- while training goes on

async function follow(interval) {
  const badge = document.getElementById("live");
  let version = "";
  const wait = (time) => new Promise((done) => setTimeout(done, time));
  for (;;) {
    const asked = performance.now();
    try {
      const answer = await fetch(`figures.json?known=${version}`, { cache: "no-store" });
      if (answer.status === 200) {
        version = answer.headers.get("X-Version") ?? "";
        page = await answer.json();
        show();
      }
      badge.textContent = "live";
      badge.classList.remove("lost");
    } catch {
      badge.textContent = "no longer served";
      badge.classList.add("lost");
    }
    await wait(Math.max(interval, 20 * (performance.now() - asked))); // a long log takes long to read
  }
}

show();
new ResizeObserver(redraw).observe(document.getElementById("charts"));
if (document.documentElement.dataset.live) follow(Number(document.documentElement.dataset.live));
