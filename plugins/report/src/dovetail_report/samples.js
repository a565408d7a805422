"use strict";
/* The browser of samples. Files beside the page call `dovetail(name, packed)`, packed being gzipped JSON in base64. */
const arrived = {}, waiting = {};
const unpack = async (packed) => {
  const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
};
window.dovetail = (name, packed) => {
  arrived[name] ??= unpack(packed);
  waiting[name]?.(true);
};
const load = (name) => {
  if (arrived[name]) return arrived[name];
  return new Promise((done) => {
    const script = make("script", { src: `report/${name}.js` });
    waiting[name] = done;
    script.onerror = () => done(false);
    document.head.append(script);
  }).then((found) => (found ? arrived[name] : null));
};

const startBrowser = async () => {
  const root = document.getElementById("browser");
  if (!root) return;
  const part = (name) => root.querySelector(`.${name}`);
  const [list, detail, count, search, chips, sort, shade] = ["list", "detail", "count", "search", "chips", "sort", "shade"].map(part);
  let index = await load("index");
  if (!index) {
    index = await arrived.inline;
    part("missing").hidden = false;
  }
  const HEIGHT = 30, [STEP, PROMPT, SCORE, ADVANTAGE, LENGTH, RULES, FLAGS] = [0, 1, 2, 3, 4, 5, 6];
  const files = index.files, all = [];
  files.forEach((file, number) => file.rows.forEach((row, place) => all.push({ file: number, place, kind: file.kind, row: [file.step, ...row] })));
  const bit = (names, name, value) => Boolean((value >> names.indexOf(name)) & 1);
  const kept = (name) => (sample) => bit(index.rules, name, sample.row[RULES]);
  const is = (name) => (sample) => bit(index.flags, name, sample.row[FLAGS]);
  const filters = {
    all: () => true, suspect: is("suspect"), best: kept("best"), worst: kept("worst"), longest: kept("longest"),
    "largest advantage": kept("advantage"), failed: is("failed"), cut: is("cut"), "left out": is("left out"), episodes: is("episode"),
    "held out": (sample) => sample.kind === "validation",
  };
  const training = (sample) => Number(sample.kind === "step");
  const orders = {
    "latest step first": (a, b) => b.row[STEP] - a.row[STEP] || training(b) - training(a),
    "earliest step first": (a, b) => a.row[STEP] - b.row[STEP] || training(b) - training(a),
    "score, high first": (a, b) => (b.row[SCORE] ?? -Infinity) - (a.row[SCORE] ?? -Infinity),
    "score, low first": (a, b) => (a.row[SCORE] ?? Infinity) - (b.row[SCORE] ?? Infinity),
    "advantage, largest first": (a, b) => Math.abs(b.row[ADVANTAGE] ?? 0) - Math.abs(a.row[ADVANTAGE] ?? 0),
    "length, long first": (a, b) => (b.row[LENGTH] ?? 0) - (a.row[LENGTH] ?? 0),
  };
  const shades = {
    "log-probability": ["log_probs", null], "trainer's log-probability": ["old_log_probs", null],
    "trainer − rollout": ["old_log_probs", "log_probs"], "trainer − reference": ["old_log_probs", "ref_log_probs"],
    "rollout − reference": ["log_probs", "ref_log_probs"], "reference's log-probability": ["ref_log_probs", null], advantage: ["advantages", null], "no colour": [null, null],
  };
  let filter = "all", matches = all, at = 0, found = null, searching = 0, fromStep = null, chosenShade = null, wantedShade = null;

  const badge = (text, name = "") => make("span", { class: `score ${name}` }, text);
  const written = (value) => (value === null ? "none" : writeNumber(value));
  const line = (number) => {
    const { row, kind } = matches[number];
    const score = is("failed")(matches[number]) ? "failed" : written(row[SCORE]);
    return make("div", { class: `row${number === at ? " current" : ""}`, role: "option", "aria-selected": number === at, style: `top:${number * HEIGHT}px`, "data-number": number },
      make("span", {}, `${kind === "validation" ? "val " : ""}${row[STEP]}`), make("span", { class: is("suspect")(matches[number]) ? "warn" : "" }, score), make("span", {}, index.prompts[row[PROMPT]]));
  };
  const drawList = () => {
    const first = Math.max(0, Math.floor(list.scrollTop / HEIGHT) - 5), shown = Math.ceil(list.clientHeight / HEIGHT) + 10;
    const rows = [];
    for (let number = first; number < Math.min(matches.length, first + shown); number++) rows.push(line(number));
    const space = make("div", { class: "space", style: `height:${matches.length * HEIGHT}px` }, ...rows);
    const top = list.scrollTop;
    list.replaceChildren(space);
    list.scrollTop = top;
    count.textContent = `${matches.length ? at + 1 : 0} of ${matches.length.toLocaleString("en")}${searching ? `, searching ${searching}` : ""}`;
  };

  const colourOf = (value, difference) => {
    if (value === null || value === undefined || Number.isNaN(value)) return "";
    if (difference) return `color-mix(in srgb, var(--series-${value < 0 ? 2 : 1}) ${Math.min(75, Math.round(40 * Math.abs(value)))}%, transparent)`;
    return `color-mix(in srgb, var(--series-2) ${Math.min(75, Math.round(18 * -value))}%, transparent)`;
  };
  const tokenSpans = (tokens, start, stop) => {
    const [first, second] = shades[chosenShade] ?? [null, null];
    const names = ["log_probs", "old_log_probs", "ref_log_probs", "advantages"].filter((name) => tokens[name]);
    const spans = [];
    for (let t = start; t < Math.min(stop, tokens.text.length); t++) {
      const values = tokens[first], base = second ? tokens[second] : null;
      let value = values?.[t] ?? null;
      if (second) value = value === null || !base || base[t] === null ? null : value - base[t];
      const title = names.filter((name) => tokens[name][t] !== null).map((name) => `${name} ${tokens[name][t]}`).join(", ");
      const background = first && names.length ? colourOf(value, second !== null || first === "advantages") : "";
      spans.push(background || title ? make("span", { class: "token", title, style: background && `background:${background}` }, tokens.text[t]) : tokens.text[t]);
    }
    return spans;
  };
  const hasColours = (sample) => sample.tokens && ["log_probs", "old_log_probs", "ref_log_probs", "advantages"].some((name) => sample.tokens[name]);
  const turns = (sample) => sample.episode.turns.flatMap((turn, number) => {
    const [start, stop] = turn.tokens, tokens = sample.tokens;
    const text = tokens && tokens.text.length >= stop && stop > start ? tokenSpans(tokens, start, stop) : [turn.text];
    const parts = [];
    if (turn.sequence) parts.push(make("h4", {}, `Sequence ${turn.sequence}`), make("div", { class: "shown text" }, turn.prompt));
    parts.push(make("h4", {}, `Turn ${number + 1} `, make("span", { class: "label" }, turn.facts.join(" · "))),
      make("div", { class: "produced" }, make("div", { class: "text" }, ...text), ...turn.calls.map((call) => make("div", { class: "call" }, `→ ${call}`))));
    if (turn.observed.length || turn.shown)
      parts.push(make("div", { class: "shown" }, make("span", { class: "label" }, turn.seen ? "shown, not trained on" : "after the last turn: the policy did not see it"),
        ...turn.observed.map((message) => make("div", { class: "text" }, make("b", {}, message.role), ` ${message.content}`)),
        turn.shown ? make("details", {}, make("summary", {}, `${turn.shown_count} as the policy saw them`), make("div", { class: "text" }, turn.shown)) : null));
    return parts;
  });
  const response = (sample, current) => {
    const facts = [sample.length !== null ? `${sample.length} tokens` : "", sample.reason === "length" ? "cut at the length limit" : sample.reason, sample.side, sample.left_out].filter(Boolean);
    const body = sample.episode ? turns(sample) : [make("div", { class: "text response" }, ...(hasColours(sample) ? [...tokenSpans(sample.tokens, 0, Infinity), sample.tokens.more ? ` … (${sample.tokens.more} more tokens)` : null] : [sample.response]))];
    const untrained = sample.episode?.untrained;
    return make("article", { class: `card sample${current ? " current" : ""}`, "data-id": sample.id },
      make("header", {},
        sample.failure ? badge(sample.failure, "failed") : sample.score !== null ? badge(`score ${writeNumber(sample.score)}`, sample.score > 0 ? "good" : "") : null,
        sample.advantage !== null ? badge(`advantage ${writeNumber(sample.advantage)}`) : null,
        ...sample.kept.map((rule) => badge(rule === "advantage" ? "largest advantage" : rule, "rule"))),
      ...sample.suspect.map((sign) => make("p", { class: "note" }, `Suspect: ${sign}`)),
      untrained ? make("p", { class: "note" }, `Nothing of this episode is trained on: ${untrained}.`) : null,
      make("p", { class: "label" }, facts.join(" · ")),
      Object.keys(sample.components).length ? make("table", {}, ...Object.entries(sample.components).map(([name, value]) => make("tr", {}, make("td", {}, name), make("td", { class: "number" }, written(value))))) : null,
      sample.episode ? make("p", { class: "label" }, sample.episode.figures.map(([name, text]) => `${name} ${text}`).join(" · ")) : null,
      ...body);
  };
  let drawn = 0;
  const drawDetail = async () => {
    const mine = ++drawn, chosen = matches[at];
    if (!chosen) { detail.replaceChildren(make("p", { class: "nothing" }, "no sample matches")); return; }
    const file = files[chosen.file], samples = await load(file.name);
    if (mine !== drawn) return;
    if (!samples) { detail.replaceChildren(make("p", { class: "nothing" }, `report/${file.name}.js is not beside this page`)); return; }
    const sample = samples[chosen.place], group = samples.filter((other) => other.group === sample.group);
    const known = Object.keys(shades).filter((name) => shades[name].every((column) => !column || group.some((one) => one.tokens?.[column])));
    chosenShade = known.includes(wantedShade) ? wantedShade : known[0];
    shade.replaceChildren(...known.map((name) => make("option", { value: name, selected: name === chosenShade }, name)));
    shade.disabled = known.length < 2;
    const cards = group.map((one) => response(one, one === sample));
    const row = make("div", { class: "responses" }, ...cards);
    detail.replaceChildren(make("div", {},
      make("p", { class: "label" }, `${file.kind === "validation" ? "Validation after step" : "Step"} ${file.step} · ${sample.id} · ${group.length} response${group.length === 1 ? "" : "s"} to this prompt written`),
      make("div", { class: "text prompt" }, sample.prompt), sample.truth ? make("p", { class: "label" }, `expected ${sample.truth}`) : null, row));
    const current = cards[group.indexOf(sample)];
    row.scrollLeft = current.offsetLeft - row.offsetLeft;
  };
  const go = (number, scroll = true) => {
    at = Math.max(0, Math.min(matches.length - 1, number));
    if (scroll && (at * HEIGHT < list.scrollTop || (at + 1) * HEIGHT > list.scrollTop + list.clientHeight)) list.scrollTop = Math.max(0, at * HEIGHT - list.clientHeight / 2);
    drawList();
    return drawDetail();
  };
  const apply = (keep) => {
    const before = keep ? matches[at] : null;
    matches = all.filter((sample) => filters[filter](sample) && (!found || found.has(sample)) && (fromStep === null || files[sample.file].step === fromStep));
    matches.sort(orders[sort.value]);
    for (const chip of chips.children) chip.setAttribute("aria-pressed", chip.dataset.filter === filter);
    return go(Math.max(0, before ? matches.indexOf(before) : 0));
  };
  const look = async () => {
    const wanted = search.value.toLowerCase(), mine = (look.latest = {});
    found = wanted ? new Set() : null;
    await apply();
    for (let number = 0; wanted && number < files.length; number++) {
      const samples = await load(files[number].name);
      if (mine !== look.latest) return;
      for (const sample of all.filter((one) => one.file === number)) {
        const one = samples?.[sample.place];
        if (one && [one.prompt, one.response, one.failure, one.id, ...one.suspect].some((text) => text.toLowerCase().includes(wanted))) found.add(sample);
      }
      if (number % 25 === 0) { searching = `${number + 1} of ${files.length} files`; await apply(true); }
    }
    searching = 0;
    if (wanted) await apply(true);
  };
  window.showStep = (step) => {
    const steps = [...new Set(files.filter((file) => file.kind === "step").map((file) => file.step))];
    if (!steps.length) return;
    fromStep = steps.reduce((best, one) => (Math.abs(one - step) < Math.abs(best - step) ? one : best));
    part("step").hidden = false;
    part("step").textContent = `only step ${fromStep} ✕`;
    filter = "all";
    apply();
    root.scrollIntoView({ behavior: "smooth" });
  };

  for (const name of Object.keys(filters)) {
    const number = all.filter(filters[name]).length;
    if (number) chips.append(make("button", { "data-filter": name, type: "button" }, `${name} ${number.toLocaleString("en")}`));
  }
  sort.replaceChildren(...Object.keys(orders).map((name) => make("option", { value: name }, name)));
  chips.addEventListener("click", (event) => { if (event.target.dataset.filter) { filter = event.target.dataset.filter; apply(); } });
  sort.addEventListener("change", () => apply());
  shade.addEventListener("change", () => { wantedShade = shade.value; drawDetail(); });
  search.addEventListener("input", () => { clearTimeout(look.timer); look.timer = setTimeout(look, 250); });
  part("step").addEventListener("click", () => { fromStep = null; part("step").hidden = true; apply(); });
  list.addEventListener("scroll", () => requestAnimationFrame(drawList));
  list.addEventListener("click", (event) => { const row = event.target.closest("[data-number]"); if (row) go(Number(row.dataset.number), false); });
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) { if (event.key === "Escape") event.target.blur(); return; }
    const names = [...chips.children].map((chip) => chip.dataset.filter), inList = list.contains(event.target);
    if (event.key === "j" || (inList && event.key === "ArrowDown")) go(at + 1);
    else if (event.key === "k" || (inList && event.key === "ArrowUp")) go(at - 1);
    else if (event.key === "f") { filter = names[(names.indexOf(filter) + 1) % names.length]; apply(); }
    else if (event.key === "c" && !shade.disabled) { shade.selectedIndex = (shade.selectedIndex + 1) % shade.length; wantedShade = shade.value; drawDetail(); }
    else if (event.key === "/") search.focus();
    else return;
    event.preventDefault();
  });
  if (filters.suspect && all.some(filters.suspect)) filter = "suspect";
  await apply();
  root.dataset.ready = "true";
};
startBrowser();
