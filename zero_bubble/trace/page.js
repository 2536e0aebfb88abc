// What is looked at, and what pointer and keys do to it.

const part = (id) => document.getElementById(id);
const chart = part("chart");
const state = { run: null, view: null, cause: null, pointer: null, drag: null, isDue: false };

function choose(run) {
  if (!run.panels) {
    run.panels = panels(run);
    run.index = Object.fromEntries(
      PANELS.map((panel) => [panel, passIndex(run, run.panels[panel])]));
  }
  state.run = run;
  const stages = run.stages.length;
  part("title").textContent = `${run.schedule || "schedule"}: ${stages} stage` +
    `${stages === 1 ? "" : "s"}, ${run.microbatches} microbatches`;
  part("subtitle").textContent = `Iteration ${run.iteration}, pipeline of ranks ` +
    `${rankList(run.pipeline)}, ${run.placement} placement`;
  part("figures").innerHTML = drawFigures(run);
  part("kinds").innerHTML = drawKinds(run);
  part("table").innerHTML = drawTable(run);
  showAll();
  drawLegend();
}

function drawLegend() {
  part("causes").innerHTML = drawCauses(state.run, state.cause);
}

function whole() {
  const { run } = state;
  const end = Math.max(run.length, run.predicted.shift + run.predicted.length);
  return { begin: 0, end: end || 1 };
}

function showAll() {
  state.view = whole();
  draw();
}

/** Ask for one drawing of the next frame, however much has changed until then. */
function draw() {
  if (state.isDue) return;
  state.isDue = true;
  requestAnimationFrame(() => {
    state.isDue = false;
    drawNow();
  });
}

function drawNow() {
  const { run, view } = state;
  const width = Math.max(chart.parentElement.clientWidth - 36, 480);
  run.place = layout(run, width, view);
  chart.setAttribute("viewBox", `0 0 ${width} ${run.place.height}`);
  chart.setAttribute("height", run.place.height);
  chart.classList.toggle("focused", state.cause !== null);
  chart.innerHTML = patterns(run) + drawAxis(run.place) +
    PANELS.map((panel) => drawPanel(run, panel, state.cause)).join("") + drawMemory(run) +
    '<g id="marks"></g>';
  point();
}

/** Keep a stretch of time within the picture, and not too short to see. */
function look(begin, length) {
  const all = whole();
  const span = Math.min(Math.max(length, all.end / 5000), all.end);
  const first = Math.min(Math.max(begin, 0), all.end - span);
  state.view = { begin: first, end: first + span };
  draw();
}

function zoom(factor, time) {
  const { begin, end } = state.view;
  const at = time ?? (begin + end) / 2;
  look(at - (at - begin) / factor, (end - begin) / factor);
}

function pan(share) {
  const { begin, end } = state.view;
  look(begin + share * (end - begin), end - begin);
}

/** Pointer's place in the picture's own units. */
function at(event) {
  const box = chart.getBoundingClientRect();
  return { x: (event.clientX - box.left) * state.run.place.width / box.width,
    y: event.clientY - box.top, clientX: event.clientX, clientY: event.clientY };
}

/** What is drawn under the pointer: {panel, stage, pass or gap}, or the memory of a stage. */
function find({ x, y }) {
  const { run } = state, { place } = run;
  if (x < LEFT || x > LEFT + place.plot) return null;
  const time = place.time(x);
  for (const panel of PANELS) {
    const stage = Math.floor((y - place.tops[panel]) / (place.row + place.gap));
    if (y < place.tops[panel] || stage >= place.stages) continue;
    const row = run.panels[panel][stage];
    const hit = (items) => {
      const one = items[lastBefore(items, time)];
      return one && one.end >= time ? one : undefined;
    };
    return { panel, stage, time, pass: hit(row.passes), gap: hit(row.gaps) };
  }
  const stage = Math.floor((y - place.memory) / (place.curve + 6));
  if (!place.hasMemory || y < place.memory || stage >= place.stages) return { time };
  const held = (panel) => {
    const passes = run.panels[panel][stage].passes;
    const ended = passes.filter((one) => one.end <= time).at(-1);
    return ended ? ended.held : 0;
  };
  return { stage, time, memory: [held("measured"), held("predicted")] };
}

/** Cursor, marks and tooltip for where the pointer is. */
function point() {
  const marks = part("marks"), tip = part("tip");
  const found = state.pointer && !state.drag ? find(state.pointer) : null;
  const text = found ? describe(found) : "";
  tip.hidden = !text;
  marks.innerHTML = "";
  if (!found) return;
  const { place } = state.run;
  marks.innerHTML = `<line class="cursor" x1="${state.pointer.x}" x2="${state.pointer.x}" ` +
    `y1="${place.tops.predicted - 4}" y2="${place.bottom}"/>` +
    (found.pass ? drawMarks(state.run, found.pass) : "");
  if (!text) return;
  tip.innerHTML = text;
  const { clientX, clientY } = state.pointer, box = tip.getBoundingClientRect();
  const left = clientX + 18 + box.width > innerWidth ? clientX - 18 - box.width : clientX + 18;
  tip.style.left = `${Math.max(left, 4)}px`;
  tip.style.top = `${Math.max(Math.min(clientY + 18, innerHeight - box.height - 8), 4)}px`;
}

function describe(found) {
  if (found.pass) return describePass(found);
  if (found.gap) return describeGap(found);
  if (!found.memory) return "";
  const [measured, predicted] = found.memory;
  return list(`Stage ${found.stage} at ${ms(found.time)} ms`,
    [["holds, measured", bytes(measured)], ["predicted", bytes(predicted)]]);
}

function describePass({ panel, pass }) {
  const { run } = state;
  const [measured, predicted] = ["measured", "predicted"].map(
    (one) => run.panels[one][pass.stage].passes[pass.index]);
  const wait = run.panels.measured[pass.stage].gaps.find((gap) => gap.source !== null &&
    gap.end === measured.start && gap.start === measured.begin);
  const times = (one) => [["start", `${ms(one.start)} ms`], ["end", `${ms(one.end)} ms`],
    ["duration", `${ms(one.end - one.start)} ms`]];
  const other = panel === "measured" ? predicted : measured;
  const shown = panel === "measured" ? measured : predicted;
  return list(passName(pass), [
    ["stage", `${pass.stage} (rank ${run.pipeline[pass.stage]})`],
    ...times(shown),
    ["waited", `${ms(measured.start - measured.begin)} ms` +
      (wait ? ` for stage ${wait.source}` : "")],
    ...(shown.held === null ? [] : [["held after it", bytes(shown.held)]]),
    [panel === "measured" ? "predicted" : "measured", `${ms(other.start)} to ${ms(other.end)} ms`,
      "rule"],
  ]);
}

function describeGap({ stage, gap }) {
  const source = gap.source === null ? "" :
    gap.cause.key === "no_work" ? "" : ` from stage ${gap.source}`;
  return list(`${gap.phase || gap.cause.label}${source}`, [
    ["stage", `${stage} (rank ${state.run.pipeline[stage]})`],
    ["start", `${ms(gap.start)} ms`], ["end", `${ms(gap.end)} ms`],
    ["duration", `${ms(gap.end - gap.start)} ms`],
    ...(gap.before ? [["before", gap.before]] : []),
  ]);
}

function list(title, entries) {
  return `<strong>${escaped(title)}</strong><dl>` + entries.map(([name, value, mark = ""]) =>
    `<dt class="${mark}">${escaped(name)}</dt>` +
    `<dd class="${mark}" data-figure="${escaped(name)}">${escaped(value)}</dd>`).join("") + "</dl>";
}

chart.addEventListener("wheel", (event) => {
  const point = at(event), { begin, end } = state.view, all = whole();
  if (point.x < LEFT) return;
  if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) {
    event.preventDefault();
    pan((event.deltaX || event.deltaY) / state.run.place.plot);
  } else if (event.deltaY < 0 || end - begin < all.end * 0.9999) {
    // Zoomed out as far as it goes, the wheel scrolls the page.
    event.preventDefault();
    zoom(Math.exp(-event.deltaY * 0.002), state.run.place.time(point.x));
  }
}, { passive: false });

chart.addEventListener("pointerdown", (event) => {
  if (event.button !== 0) return;
  state.drag = { x: at(event).x, begin: state.view.begin };
  chart.setPointerCapture(event.pointerId);
  chart.classList.add("dragging");
});
chart.addEventListener("pointermove", (event) => {
  state.pointer = at(event);
  if (!state.drag) { point(); return; }
  const { begin, end } = state.view;
  const moved = (state.drag.x - state.pointer.x) / state.run.place.plot * (end - begin);
  look(state.drag.begin + moved, end - begin);
});
for (const name of ["pointerup", "pointercancel"]) {
  chart.addEventListener(name, () => {
    state.drag = null;
    chart.classList.remove("dragging");
    point();
  });
}
chart.addEventListener("pointerleave", () => { state.pointer = null; point(); });
chart.addEventListener("dblclick", showAll);

const KEYS = { "+": () => zoom(1.5), "=": () => zoom(1.5), "-": () => zoom(1 / 1.5),
  ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15), 0: showAll, Escape: showAll };
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target instanceof HTMLSelectElement || !(event.key in KEYS)) return;
  event.preventDefault();
  KEYS[event.key]();
});
part("in").addEventListener("click", () => zoom(1.5));
part("out").addEventListener("click", () => zoom(1 / 1.5));
part("reset").addEventListener("click", showAll);
part("causes").addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  state.cause = state.cause === button.dataset.cause ? null : button.dataset.cause;
  drawLegend();
  draw();
});
part("theme").addEventListener("click", () => {
  const root = document.documentElement;
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
});
addEventListener("resize", draw);

const dark = matchMedia("(prefers-color-scheme: dark)");
const follow = () => { document.documentElement.dataset.theme = dark.matches ? "dark" : "light"; };
dark.addEventListener("change", follow);
follow();

/** The choice of pipeline and iteration, shown where there is one to make. */
function fillChoices() {
  const key = (run) => run.pipeline.join();
  const pipelines = new Map(DATA.runs.map((run) => [key(run), `ranks ${rankList(run.pipeline)}`]));
  const fill = (select, options) => {
    select.replaceChildren(...options.map(([value, name]) => new Option(name, value)));
    select.parentElement.hidden = options.length < 2;
  };
  const iterations = () => {
    const ours = [...DATA.runs.entries()].filter(([, run]) => key(run) === part("pipeline").value);
    fill(part("iteration"), ours.map(([index, run]) => [index, run.iteration]));
    choose(ours[0][1]);
  };
  fill(part("pipeline"), [...pipelines]);
  part("pipeline").addEventListener("change", iterations);
  part("iteration").addEventListener("change",
    () => choose(DATA.runs[Number(part("iteration").value)]));
  iterations();
}
part("definitions").textContent = DEFINITIONS;
fillChoices();
