// The picture: two timelines, their axis and the memory of each stage, as SVG text.

const LEFT = 84, RIGHT = 18;
/** With more passes in sight than this, those of a kind become one shape a stage. */
const MOST_ELEMENTS = 6000;
const DIGIT = 7.2;

/** Where everything is, for a run, a width in pixels and a stretch of time. */
function layout(run, width, view) {
  const stages = run.stages.length;
  const row = stages <= 4 ? 38 : stages <= 8 ? 28 : stages <= 16 ? 20 : 14;
  const gap = stages <= 16 ? 4 : 2;
  const curve = stages <= 8 ? 44 : stages <= 16 ? 32 : 22;
  const block = stages * (row + gap);
  const tops = { predicted: 36, measured: 36 + block + 46 };
  const axis = tops.measured + block + 4;
  const hasMemory = run.stages.some((stage) => stage.peak !== null);
  const memory = axis + 66;
  return {
    width, view, row, gap, curve, tops, axis, memory, hasMemory, stages,
    height: hasMemory ? memory + stages * (curve + 6) + 4 : axis + 30,
    bottom: hasMemory ? memory + stages * (curve + 6) : axis,
    plot: width - LEFT - RIGHT,
    x(time) { return LEFT + (time - view.begin) / (view.end - view.begin) * this.plot; },
    time(x) { return view.begin + (x - LEFT) / this.plot * (view.end - view.begin); },
    y(panel, stage) { return tops[panel] + stage * (row + gap); },
  };
}

/** Left edge and width in pixels of what is in sight of a stretch of time. */
function extent(place, one, hair) {
  const left = Math.max(place.x(one.start), LEFT);
  const right = Math.min(place.x(one.end), LEFT + place.plot);
  return [left, Math.max(right - left - hair, 0.4)];
}

function patterns(run) {
  const turns = { activation: 45, gradient: -45, between: 0, no_work: 45, finalize: 90,
    optimizer: 20 };
  const width = { no_work: 1.2, between: 2.2 };
  const hatches = CAUSES.map(({ key }) =>
    `<pattern id="hatch-${key}" width="6" height="6" patternUnits="userSpaceOnUse"` +
    ` patternTransform="rotate(${turns[key]})">` +
    `<rect width="6" height="6" fill="var(--${key})" opacity="0.14"/>` +
    `<rect width="${width[key] ?? 2.4}" height="6" fill="var(--${key})"/></pattern>`);
  const fused = ["", "-other"].map((other) =>
    `<linearGradient id="fused${other}">` +
    `<stop offset="0.5" stop-color="var(--B${other})"/>` +
    `<stop offset="0.5" stop-color="var(--W${other})"/></linearGradient>`);
  return `<defs>${hatches.join("")}${fused.join("")}<clipPath id="plot">` +
    `<rect x="${LEFT}" y="0" width="${run.place.plot}" height="${run.place.height}"/>` +
    "</clipPath></defs>";
}

function drawPanel(run, panel, chosen) {
  const { place } = run;
  const rows = run.panels[panel].map((row) => ({
    passes: visible(row.passes, place.view), gaps: visible(row.gaps, place.view) }));
  const isCrowded = sum(PANELS.map((one) => sum(run.panels[one].map(
    (row) => visible(row.passes, place.view).length)))) > MOST_ELEMENTS;
  const figures = panel === "measured" ? run : run.predicted;
  const top = place.tops[panel];
  const parts = [
    `<text class="panel" x="${LEFT}" y="${top - 12}">${panel[0].toUpperCase()}` +
    `${panel.slice(1)}</text>`,
    `<text class="figure" x="${place.width - RIGHT}" y="${top - 12}">bubble ` +
    `${percent(figures.bubble_rate)} · cost ${ms(figures.cost)} ms</text>`,
  ];
  rows.forEach(({ passes, gaps }, stage) => {
    const y = place.y(panel, stage);
    parts.push(
      `<text class="name" x="${LEFT - 10}" y="${y + place.row / 2 + 5}">stage ${stage}</text>`,
      `<rect class="track" x="${LEFT}" y="${y}" width="${place.plot}" height="${place.row}"/>`,
      isCrowded ? merged(place, y, gaps, (one) => gapClass(one, chosen), stage)
        : gaps.map((one) => drawGap(place, y, one, chosen)).join(""),
      isCrowded ? merged(place, y, passes, passClass, stage)
        : passes.map((one) => drawPass(place, y, one)).join(""));
  });
  return `<g data-panel="${panel}">${parts.join("")}</g>`;
}

const passClass = (one) => `pass ${one.kind}${one.chunk ? " other" : ""}`;
const gapClass = (one, chosen) => `gap ${one.cause.key}` +
  (one.cause.key === chosen ? " chosen" : "");

function drawPass(place, y, one) {
  const [x, width] = extent(place, one, 0.8);
  const box = `<rect class="${passClass(one)}" data-stage="${one.stage}" ` +
    `data-chunk="${one.chunk}" data-microbatch="${one.microbatch}" x="${x.toFixed(2)}" ` +
    `y="${y}" width="${width.toFixed(2)}" height="${place.row}" rx="1.5"/>`;
  const label = String(one.microbatch);
  if (place.row < 14 || width < label.length * DIGIT + 3) return box;
  const dark = one.kind === "W" ? " dark" : "";
  const size = place.row < 18 ? ' style="font-size:11px"' : "";
  return `${box}<text class="mb${dark}" x="${(x + width / 2).toFixed(2)}" ` +
    `y="${y + place.row / 2 + 4.2}"${size}>${label}</text>`;
}

function drawGap(place, y, one, chosen) {
  const [x, width] = extent(place, one, 0);
  return `<rect class="${gapClass(one, chosen)}" data-stage="${one.stage}" x="${x.toFixed(2)}" ` +
    `y="${y}" width="${width.toFixed(2)}" height="${place.row}"/>`;
}

/** One shape for all of a class: neighbours less than a third of a pixel apart become one. */
function merged(place, y, items, classOf, stage) {
  const shapes = new Map();
  for (const one of items) {
    const [x, width] = extent(place, one, 0);
    const name = classOf(one);
    const boxes = shapes.get(name) ?? shapes.set(name, []).get(name);
    const last = boxes.at(-1);
    if (last && x - last[1] < 0.34) last[1] = Math.max(last[1], x + width);
    else boxes.push([x, x + width]);
  }
  return [...shapes].map(([name, boxes]) => {
    const lines = boxes.map(([left, right]) =>
      `M${left.toFixed(1)} ${y}H${right.toFixed(1)}v${place.row}H${left.toFixed(1)}z`);
    return `<path class="${name}" data-stage="${stage}" d="${lines.join("")}"/>`;
  }).join("");
}

/** A round distance between ticks: 1, 2 or 5 times a power of ten. */
function tickStep(length, most) {
  const power = 10 ** Math.floor(Math.log10(length / most));
  return power * [1, 2, 5, 10].find((factor) => length / (power * factor) <= most);
}

function drawAxis(place) {
  const { begin, end } = place.view;
  const step = tickStep(end - begin, Math.max(place.plot / 110, 2));
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const lines = [];
  for (let n = Math.ceil(begin / step - 1e-9); n * step <= end + step * 1e-9; n += 1) {
    const x = place.x(n * step).toFixed(2);
    lines.push(
      `<line class="grid" x1="${x}" x2="${x}" y1="${place.tops.predicted - 4}" ` +
      `y2="${place.bottom}"/>`,
      `<text class="tick" x="${x}" y="${place.axis + 20}">` +
      `${(n * step).toFixed(digits)}</text>`);
  }
  return `<g class="axis">${lines.join("")}<text class="name" x="${LEFT - 10}" ` +
    `y="${place.axis + 20}">ms</text></g>`;
}

function drawMemory(run) {
  const { place } = run;
  if (!place.hasMemory) return "";
  const peaks = run.stages.flatMap((stage) => [stage.peak ?? 0, stage.predicted_peak ?? 0]);
  const most = Math.max(...peaks, 1);
  const parts = [
    `<text class="panel" x="${LEFT}" y="${place.memory - 14}">Memory of activations</text>`,
    `<text class="figure" x="${place.width - RIGHT}" y="${place.memory - 14}">` +
    `scale to ${bytes(most)} · line measured, dashed predicted</text>`,
  ];
  run.stages.forEach((stage, index) => {
    const top = place.memory + index * (place.curve + 6);
    const y = (held) => (top + place.curve - held / most * (place.curve - 2)).toFixed(1);
    parts.push(
      `<text class="name" x="${LEFT - 10}" y="${top + place.curve / 2 + 5}">stage ${index}` +
      "</text>",
      `<rect class="track" x="${LEFT}" y="${top}" width="${place.plot}" ` +
      `height="${place.curve}"/>`);
    if (stage.peak === null) return;
    const measured = curve(place, run.panels.measured[index].passes, y);
    parts.push(
      `<path class="area" clip-path="url(#plot)" d="${measured}V${y(0)}H${LEFT}z"/>`,
      `<path class="measured" clip-path="url(#plot)" d="${measured}"/>`,
      `<path class="predicted" clip-path="url(#plot)" ` +
      `d="${curve(place, run.panels.predicted[index].passes, y)}"/>`);
  });
  return `<g class="memory">${parts.join("")}</g>`;
}

/** What is held, known after each pass and drawn straight while one runs. */
function curve(place, passes, y) {
  let before = 0, line = `M${LEFT} ${y(0)}`, column = -Infinity;
  for (const one of passes) {
    const held = one.held ?? before;
    const [left, right] = [place.x(one.start), place.x(one.end)];
    if (right >= LEFT && left <= LEFT + place.plot) {
      // Of passes within a pixel only the first draws its way up; what is held stays exact.
      if (left - column > 0.6) line += `L${left.toFixed(1)} ${y(before)}`;
      if (right - column > 0.6 || held > before) {
        line += `L${right.toFixed(1)} ${y(held)}`;
        column = right;
      }
    } else {
      const x = Math.max(LEFT - 2, Math.min(right, LEFT + place.plot + 2));
      if (right < LEFT) line = `M${LEFT - 2} ${y(held)}`;
      else { line += `L${Math.min(left, x)} ${y(before)}`; break; }
    }
    before = held;
  }
  return line + `H${Math.min(place.x(passes.at(-1).end), LEFT + place.plot)}`;
}

/** A pass that the pointer is at, in both panels, with an arrow from where its message came. */
function drawMarks(run, one) {
  return PANELS.map((panel) => {
    const same = run.index[panel].get(
      `${one.kind === "BW" ? "B" : one.kind} ${run.positions[one.stage][one.chunk]} ` +
      one.microbatch);
    const source = sourceOf(run, run.index[panel], same);
    return outline(run.place, panel, same) +
      (source && source.stage !== same.stage ? arrow(run.place, panel, source, same) : "");
  }).join("");
}

function inSight(place, one) {
  return one.end >= place.view.begin && one.start <= place.view.end;
}

function outline(place, panel, one) {
  if (!inSight(place, one)) return "";
  const [x, width] = extent(place, one, 0.8);
  return `<rect class="outline" x="${x - 1}" y="${place.y(panel, one.stage) - 1}" ` +
    `width="${width + 2}" height="${place.row + 2}" rx="2.5"/>`;
}

function arrow(place, panel, source, target) {
  const [x, y] = [place.x(source.end), place.y(panel, source.stage) + place.row / 2];
  const [toX, toY] = [place.x(target.start), place.y(panel, target.stage) + place.row / 2];
  const bend = Math.max(Math.abs(toX - x) / 2, 14);
  return `<g clip-path="url(#plot)"><path class="arrow" d="M${x} ${y}C${x + bend} ${y} ` +
    `${toX - bend} ${toY} ${toX - 5} ${toY}"/>` +
    `<path class="head" d="M${toX} ${toY}l-8 -4.5v9z"/></g>`;
}
