"use strict";
// The data as the page draws it, and how numbers are written.

const DATA = JSON.parse(document.getElementById("data").textContent);
const CAUSES = DATA.causes;
const PANELS = ["predicted", "measured"];

/** The run's panels: for each stage the passes and gaps in order of time. */
function panels(run) {
  return Object.fromEntries(PANELS.map((panel) => [panel, run.stages.map((stage, index) => ({
    passes: stage.passes.map(([kind, microbatch, chunk], i) => {
      const times = stage[panel][i];
      const held = times.at(-1);
      const [start, end] = panel === "measured" ? times.slice(1) : times;
      return { kind, microbatch, chunk, start, end, held, stage: index, index: i,
        begin: panel === "measured" ? times[0] : start };
    }),
    gaps: stage[panel === "measured" ? "gaps" : "predicted_gaps"].map(
      ([cause, start, end, source, before, phase]) =>
        ({ cause: CAUSES[cause], start, end, source, before, phase, stage: index })),
  }))]));
}

/** Each pass by kind, place in the model and microbatch: where messages come from. */
function passIndex(run, rows) {
  const found = new Map();
  for (const row of rows) {
    for (const one of row.passes) {
      const kind = one.kind === "BW" ? "B" : one.kind;
      const position = run.positions[one.stage][one.chunk];
      found.set(`${kind} ${position} ${one.microbatch}`, one);
    }
  }
  return found;
}

/** The pass whose result another one reads: of F the one before in the model, of B the one after. */
function sourceOf(run, index, one) {
  if (one.kind === "W") return undefined;
  const forward = one.kind === "F";
  const position = run.positions[one.stage][one.chunk] + (forward ? -1 : 1);
  return index.get(`${forward ? "F" : "B"} ${position} ${one.microbatch}`);
}

/** The last of a sorted list that starts at or before a time; -1 if none does. */
function lastBefore(items, time) {
  let low = 0, high = items.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (items[middle].start <= time) low = middle + 1; else high = middle;
  }
  return low - 1;
}

/** The items of a sorted list that overlap a stretch of time. */
function visible(items, view) {
  const first = Math.max(lastBefore(items, view.begin), 0);
  const last = lastBefore(items, view.end);
  return items.slice(first, last + 1).filter((one) => one.end >= view.begin);
}

const percent = (rate) => `${(rate * 100).toFixed(2)} %`;

/** Milliseconds, to a microsecond where they are few. */
function ms(time) {
  const digits = Math.abs(time) >= 1000 ? 1 : Math.abs(time) >= 10 ? 2 : 3;
  return time.toFixed(digits);
}

/** Milliseconds of a column: as many digits in each row. */
const amount = (time) => time.toFixed(2);

/** Ranks as people write them: 0 to 31, or 0, 4, ..., 28. */
function rankList(ranks) {
  const step = ranks[1] - ranks[0];
  const isEven = ranks.every((rank, i) => rank === ranks[0] + i * step);
  if (ranks.length < 5) return ranks.join(", ");
  if (!isEven) return ranks.length > 8 ? `${ranks.slice(0, 8).join(", ")}, ...` : ranks.join(", ");
  return step === 1 ? `${ranks[0]} to ${ranks.at(-1)}`
    : `${ranks[0]}, ${ranks[1]}, ..., ${ranks.at(-1)}`;
}

function bytes(amount) {
  if (amount === null || amount === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0, value = amount;
  while (Math.abs(value) >= 1024 && unit + 1 < units.length) { value /= 1024; unit += 1; }
  return `${unit && value < 100 ? value.toFixed(value < 10 ? 2 : 1) : value.toFixed(0)} ` +
    units[unit];
}

const passName = (one) => `${one.kind} ${one.microbatch} c${one.chunk}`;

function escaped(text) {
  const names = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
  return String(text).replace(/[&<>"]/g, (sign) => names[sign]);
}

const sum = (numbers) => numbers.reduce((total, one) => total + one, 0);
