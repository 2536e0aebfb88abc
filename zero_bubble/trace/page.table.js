// The figures above the picture, its legends, and the table below it.

const KINDS = [["F", "F forward"], ["B", "B gradient of the input"],
  ["W", "W gradient of the weights"], ["BW", "fused backward"]];
const DEFINITIONS = "Times in ms. Work is what a stage computes; its idle time adds up with it to " +
  "the iteration's length. Cost is the longest time from a stage's first pass, its message being " +
  "there, to its last end. Bubble rate is (cost − work) / cost; of the pipeline, with the work of " +
  "its busiest stage. The prediction simulates the same order with the median times measured here.";

function swatch(fill) {
  return `<svg width="22" height="16" aria-hidden="true">` +
    `<rect width="22" height="16" rx="2" ${fill}/></svg>`;
}

function drawKinds(run) {
  const passes = run.panels.measured.flatMap((row) => row.passes);
  const kinds = KINDS.filter(([kind]) => passes.some((one) => one.kind === kind));
  const chunks = passes.some((one) => one.chunk);
  return kinds.map(([kind, label]) => `<span>${swatch(`class="pass ${kind}"`)}` +
    (chunks ? swatch(`class="pass ${kind} other"`) : "") + `${label}</span>`).join("") +
    (chunks ? "<span>(second colour: later chunks)</span>" : "");
}

/** A button a cause, with its mean over the stages. */
function drawCauses(run, chosen) {
  return CAUSES.map(({ key, label }, index) => {
    const mean = sum(run.stages.map((stage) => stage.idle[index])) / run.stages.length;
    return `<button type="button" data-cause="${key}" aria-pressed="${key === chosen}">` +
      `${swatch(`class="gap ${key}"`)}${label} <span class="ms">${amount(mean)}</span></button>`;
  }).join("") + "<span>ms, mean of the stages</span>";
}

function figure(name, value, note) {
  return `<div><h2>${name}</h2><div class="big">${value}</div><div class="note">${note}</div>` +
    "</div>";
}

function drawFigures(run) {
  const { predicted, stages } = run;
  const busiest = stages.reduce((most, stage, i) => (stage.work > stages[most].work ? i : most), 0);
  // Without work before and after its passes a stage idles in every schedule.
  const causes = CAUSES.map(({ key, label }, i) =>
    ({ key, label, ms: sum(stages.map((stage) => stage.idle[i])) / stages.length }))
    .filter(({ key }) => key !== "no_work").sort((a, b) => b.ms - a.ms);
  const longer = ((run.cost / predicted.cost - 1) * 100).toFixed(1).replace("-0.0", "0.0");
  const peaks = stages.map((stage) => stage.peak ?? -1);
  const peak = Math.max(...peaks);
  return [
    figure("Bubble rate, measured", percent(run.bubble_rate),
      `predicted ${percent(predicted.bubble_rate)}`),
    figure("Cost, measured", `${ms(run.cost)} ms`,
      `predicted <span>${ms(predicted.cost)} ms</span> ` +
      `<span>(${longer.startsWith("-") ? "" : "+"}${longer} %)</span>`),
    figure("Work of the busiest stage", `${ms(stages[busiest].work)} ms`, `stage ${busiest}`),
    figure("Most time lost", `${ms(causes[0].ms)} ms`, `a stage, ${causes[0].label}`),
    ...(peak < 0 ? [] : [figure("Peak of activations", bytes(peak),
      `stage ${peaks.indexOf(peak)}`)]),
  ].join("");
}

function drawTable(run) {
  const { stages, predicted } = run;
  const head = ["stage", "work", ...CAUSES.map(({ label }) => label), "idle", "cost",
    "bubble rate", "peak memory", "predicted peak"];
  const rows = stages.map((stage, index) => tableRow(`data-stage="${index}"`, [
    `stage ${index} <span class="from">rank ${run.pipeline[index]}</span>`,
    cell(stage.work),
    ...stage.idle.map((time, cause) => cell(time, from(stage, cause))),
    cell(sum(stage.idle)), cell(stage.cost), rateCell(stage.bubble_rate),
    `<td>${bytes(stage.peak)}</td>`, `<td>${bytes(stage.predicted_peak)}</td>`,
  ]));
  const peak = (name) => Math.max(...stages.map((stage) => stage[name] ?? -1));
  const memory = (name) => `<td>${bytes(peak(name) < 0 ? null : peak(name))}</td>`;
  const mean = (name, cause) => sum(stages.map((stage) => stage[name][cause])) / stages.length;
  const total = (name, idle, figures, work) => tableRow(
    `class="total${name === "measured" ? " first" : ""}" data-panel="${name}"`, [
      `pipeline, ${name}`, cell(work),
      ...CAUSES.map((_, cause) => cell(mean(idle, cause))),
      cell(sum(CAUSES.map((_, cause) => mean(idle, cause)))), cell(figures.cost),
      rateCell(figures.bubble_rate),
      name === "measured" ? memory("peak") : memory("predicted_peak"), "<td></td>",
    ]);
  return `<thead><tr>${head.map((name) => `<th scope="col">${name}</th>`).join("")}</tr></thead>` +
    `<tbody>${rows.join("")}` +
    total("measured", "idle", run, Math.max(...stages.map((stage) => stage.work))) +
    total("predicted", "predicted_idle", predicted, Math.max(...predicted.work)) + "</tbody>";
}

function tableRow(attributes, [name, ...cells]) {
  return `<tr ${attributes}><td>${name}</td>${cells.join("")}</tr>`;
}

function cell(time, note = "") {
  const none = Math.abs(time) < 5e-3;
  return `<td${none ? ' class="none"' : ""}>${none ? "0" : note + amount(time)}</td>`;
}

const rateCell = (rate) => `<td class="rate" data-rate="${rate}">${percent(rate)}</td>`;

/** From which stages the messages of a cause come, most waited for first. */
function from(stage, cause) {
  const waits = stage.waits.filter(([which]) => which === cause).sort((a, b) => b[2] - a[2]);
  const total = waits.map(([, source, time]) => `${ms(time)} ms for stage ${source}`).join(", ");
  return waits.length ? `<span class="from" title="${total}">from ` +
    `${waits.map(([, source]) => source).join(", ")}</span>` : "";
}
