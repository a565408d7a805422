"use strict";
/* Elements with text as children: what a run wrote never becomes markup. */
const make = (tag, attributes, ...children) => {
  const svg = /^(svg|g|path|line|rect|circle|text|clipPath|defs|title)$/.test(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {}))
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
};

const writeNumber = (value, style) => {
  if (style === "percent" && value >= 0 && value <= 1) return `${+(100 * value).toFixed(1)}%`;
  if (style === "seconds") return value >= 60 ? `${+(value / 60).toFixed(1)} min` : `${+value.toPrecision(3)} s`;
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-3)) return Number(value.toPrecision(3)).toExponential().replace("e+", "e");
  return size >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(4));
};

(() => {
  const { charts, marks } = JSON.parse(document.getElementById("data").textContent);
  const figures = [...document.querySelectorAll("[data-chart]")];
  const every = charts.flatMap((chart) => chart.lines.flatMap((line) => [line.x[0], line.x.at(-1)]));
  const whole = [Math.min(...every), Math.max(...every)];
  const unzoom = document.getElementById("unzoom");
  const colour = (number) => `var(--series-${(number % 8) + 1})`;
  let range = null;

  const ticks = (low, high, count, integers) => {
    const rough = (high - low) / count || 1;
    const power = 10 ** Math.floor(Math.log10(rough));
    let step = [1, 2, 2.5, 5, 10].find((nice) => nice * power >= rough * 0.999) * power;
    if (integers) step = Math.max(1, Math.ceil(step));
    const found = [];
    for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9 && found.length < 20; at++) found.push(at * step + 0);
    return found;
  };
  const smooth = (values) => {
    const half = Math.max(1, Math.floor(values.length / 16));
    const sums = [0];
    for (const value of values) sums.push(sums.at(-1) + value);
    return values.map((_, at) => {
      const [start, end] = [Math.max(0, at - half), Math.min(values.length, at + half + 1)];
      return (sums[end] - sums[start]) / (end - start);
    });
  };
  const stacked = (lines) => {
    const below = lines[0].x.map(() => 0);
    return lines.map((line) => {
      const low = [...below];
      line.y.forEach((value, at) => (below[at] += value));
      return { ...line, low, high: [...below] };
    });
  };
  const nearest = (xs, step) => {
    let best = 0;
    xs.forEach((x, at) => { if (Math.abs(x - step) < Math.abs(xs[best] - step)) best = at; });
    return best;
  };

  const draw = (figure) => {
    const chart = charts[figure.dataset.chart], plot = figure.querySelector(".plot");
    const width = Math.max(240, plot.clientWidth), height = 200, top = 8, bottom = 24, right = 10;
    let [first, last] = range ?? whole;
    if (first === last) [first, last] = [first - 1, last + 1];
    const lines = chart.stacked ? stacked(chart.lines) : chart.lines;
    const seen = [];
    for (const line of lines)
      line.x.forEach((x, at) => {
        if (x < first || x > last) return;
        if (!chart.stacked) seen.push(line.y[at]);
        for (const ends of [line.low, line.high]) if (ends) seen.push(ends[at]);
      });
    if (!seen.length) seen.push(0);
    seen.sort((a, b) => a - b);
    let [low, high] = [seen[0], seen.at(-1)];
    let note = "";
    const [usualLow, usualHigh] = [0.03, 0.97].map((share) => seen[Math.floor(share * (seen.length - 1))]);
    const limit = 20 * (usualHigh - usualLow);
    if (seen.length > 30 && limit > 0 && !chart.stacked) {
      /* A few values that would flatten all others are beyond the axis. */
      if (high > usualHigh + limit) { note = `up to ${writeNumber(high, chart.style)} above the axis`; high = usualHigh + limit / 40; }
      if (low < usualLow - limit) { note = `down to ${writeNumber(low, chart.style)} below the axis`; low = usualLow - limit / 40; }
    }
    if (chart.stacked) low = 0;
    if (low === high && chart.style === "percent") [low, high] = [Math.max(0, low - 0.05), Math.min(1.05, low + 0.05)];
    if (low === high) [low, high] = [low - (Math.abs(low) / 10 || 1), high + (Math.abs(high) / 10 || 1)];
    const margin = chart.stacked ? 0 : 0.06 * (high - low);
    low = chart.style === "percent" && low >= 0 ? Math.max(-0.02 * (high - low), low - margin) : low - margin;
    high += margin;
    const yTicks = ticks(low, high, 5);
    const labels = yTicks.map((value) => writeNumber(value, chart.style));
    const left = 12 + 6.6 * Math.max(...labels.map((label) => label.length));
    const toX = (step) => left + ((step - first) / (last - first)) * (width - left - right);
    const toY = (value) => Math.max(-1e4, Math.min(1e4, top + ((high - value) / (high - low)) * (height - top - bottom)));
    const path = (xs, ys) => xs.map((x, at) => `${at ? "L" : "M"}${toX(x).toFixed(1)} ${toY(ys[at]).toFixed(1)}`).join("");
    const area = (line) => path(line.x, line.high) + path([...line.x].reverse(), [...line.low].reverse()).replace("M", "L") + "Z";
    const clip = `clip-${figure.dataset.chart}`;
    const inside = make("g", { "clip-path": `url(#${clip})` });
    lines.forEach((line, number) => {
      const stroke = colour(chart.stacked && number === lines.length - 1 ? 7 : number);
      if (chart.stacked) {
        inside.append(make("path", { d: area(line), fill: stroke }));
        return;
      }
      if (line.low && line.x.length > 1) inside.append(make("path", { d: area(line), fill: stroke, opacity: 0.16 }));
      const smoothed = line.y.length >= 40 && !chart.markers;
      inside.append(make("path", { d: path(line.x, line.y), fill: "none", stroke, "stroke-width": smoothed ? 1 : 1.8, opacity: smoothed ? 0.4 : 1, "stroke-linejoin": "round" }));
      if (smoothed) inside.append(make("path", { d: path(line.x, smooth(line.y)), fill: "none", stroke, "stroke-width": 2 }));
      if (chart.markers || line.x.length === 1)
        line.x.forEach((x, at) => inside.append(make("circle", { cx: toX(x), cy: toY(line.y[at]), r: 3, fill: stroke })));
    });
    for (const mark of marks)
      if (mark.step >= first && mark.step <= last)
        inside.append(make("line", { class: `mark ${mark.kind}`, x1: toX(mark.step), x2: toX(mark.step), y1: top, y2: height - bottom }));
    const hair = make("line", { class: "hair", y1: top, y2: height - bottom, visibility: "hidden" });
    const band = make("rect", { class: "chosen", y: top, height: height - top - bottom, visibility: "hidden" });
    const svg = make("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": chart.title },
      make("defs", {}, make("clipPath", { id: clip }, make("rect", { x: left - 4, y: 0, width: width - left - right + 8, height: height - bottom + 4 }))),
      ...yTicks.map((value) => make("line", { class: "grid", x1: left, x2: width - right, y1: toY(value), y2: toY(value) })),
      ...yTicks.map((value, at) => make("text", { x: left - 6, y: toY(value) + 4, "text-anchor": "end" }, labels[at])),
      ...ticks(Math.max(first, whole[0]), Math.min(last, whole[1]), Math.max(2, width / 90), true).map((step) =>
        make("text", { x: toX(step), y: height - 6, "text-anchor": "middle" }, step.toLocaleString("en"))),
      inside, band, hair);
    const tip = make("div", { class: "tip", hidden: "" });
    plot.replaceChildren(svg, tip, ...(note ? [make("p", { class: "label" }, note)] : []));

    const stepAt = (event) => {
      const at = event.clientX - svg.getBoundingClientRect().left;
      return Math.max(first, Math.min(last, first + ((at - left) / (width - left - right)) * (last - first)));
    };
    let began = null;
    svg.addEventListener("pointerdown", (event) => { began = stepAt(event); });
    svg.addEventListener("pointerleave", () => {
      tip.hidden = true;
      began = null;
      for (const one of [hair, band]) one.setAttribute("visibility", "hidden");
    });
    svg.addEventListener("pointermove", (event) => {
      const step = stepAt(event), at = lines.map((line) => nearest(line.x, step));
      const here = lines[0].x[at[0]];
      hair.setAttribute("visibility", "visible");
      for (const end of ["x1", "x2"]) hair.setAttribute(end, toX(here));
      const rows = lines.map((line, number) => {
        const value = writeNumber(line.y[at[number]], chart.style);
        const ends = line.low && !chart.stacked ? ` (${writeNumber(line.low[at[number]], chart.style)} to ${writeNumber(line.high[at[number]], chart.style)})` : "";
        return make("div", {}, `${line.name ? `${line.name} ` : ""}${value}${ends}`);
      });
      const near = marks.filter((mark) => Math.abs(toX(mark.step) - toX(step)) < 6).slice(0, 3);
      tip.replaceChildren(make("b", {}, `step ${Math.round(here).toLocaleString("en")}`), ...rows, ...near.map((mark) => make("div", { class: mark.kind }, `${mark.step}: ${mark.text}`)));
      tip.hidden = false;
      tip.style.left = `${Math.min(Math.max(0, toX(here) + 12), width - tip.offsetWidth)}px`;
      if (began === null) return;
      band.setAttribute("visibility", "visible");
      band.setAttribute("x", Math.min(toX(began), toX(step)));
      band.setAttribute("width", Math.abs(toX(began) - toX(step)));
    });
    svg.addEventListener("pointerup", (event) => {
      if (began === null) return;
      const ended = stepAt(event), moved = Math.abs(toX(began) - toX(ended));
      if (moved > 8) zoom([Math.min(began, ended), Math.max(began, ended)]);
      else if (window.showStep) window.showStep(ended);
      began = null;
    });
    svg.addEventListener("dblclick", () => zoom(null));
  };
  const zoom = (chosen) => {
    if (chosen && chosen[1] - chosen[0] < 1) chosen = [chosen[0] - 0.5, chosen[1] + 0.5];
    range = chosen && [Math.max(whole[0], chosen[0]), Math.min(whole[1], chosen[1])];
    if (range && (range[1] - range[0] >= whole[1] - whole[0] || range[0] >= range[1])) range = null;
    unzoom.hidden = !range;
    if (range) unzoom.textContent = `Steps ${Math.ceil(range[0])} to ${Math.floor(range[1])}: show all`;
    figures.forEach(draw);
  };
  unzoom.addEventListener("click", () => zoom(null));
  for (const figure of figures)
    figure.addEventListener("keydown", (event) => {
      const [first, last] = range ?? whole, quarter = (last - first) / 4;
      const moves = { "+": [quarter, -quarter], "-": [-quarter * 2, quarter * 2], ArrowLeft: [-quarter, -quarter], ArrowRight: [quarter, quarter] };
      if (event.key === "0" || event.key === "Escape") zoom(null);
      else if (moves[event.key]) zoom([first + moves[event.key][0], last + moves[event.key][1]]);
      else return;
      event.preventDefault();
    });
  let width = 0;
  const fit = () => {
    if (document.body.clientWidth !== width) { width = document.body.clientWidth; figures.forEach(draw); }
  };
  fit(); /* at once: an observer is first called when a frame is shown, which a page that nobody looks at may never do */
  new ResizeObserver(fit).observe(document.body);
})();
