"use strict";
// Charts (uPlot), tables that sort, the threshold slider, and buttons that copy. No request leaves the page.
const dataOf = id => { const node = document.getElementById(id); return node ? JSON.parse(node.textContent) : null; };
const colour = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

// ---------------------------------------------------------------- charts
const drawn = [];
function shade(plot, bands) {
  const { ctx, bbox } = plot;
  ctx.save(); ctx.fillStyle = colour("band");
  for (const [from, to] of bands) {
    const left = plot.valToPos(from, "x", true), right = plot.valToPos(to, "x", true);
    ctx.fillRect(Math.max(left, bbox.left), bbox.top, Math.max(Math.min(right, bbox.left + bbox.width) - Math.max(left, bbox.left), 0), bbox.height);
  }
  ctx.restore();
}
function draw(node, chart) {
  const number = value => value == null ? "" : String(+value.toPrecision(4));
  const series = chart.series.map(one => ({
    label: one.label, stroke: colour(one.colour), width: one.points ? 0 : one.thin ? 1 : 2, dash: one.dash ? [6, 4] : undefined,
    spanGaps: true, value: (_, value) => number(value), points: one.rival ? { show: false } : { show: one.points || !one.thin, size: one.points ? 9 : 5, fill: colour(one.colour) },
  }));
  const axis = { stroke: colour("soft"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line"), width: 1 }, font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif", labelSize: 22 };
  const range = chart.range ? { range: chart.range } : {};
  const plot = new uPlot({
    width: node.clientWidth, height: 230, legend: { live: true }, cursor: { y: false }, scales: { x: { time: false, ...(chart.xrange ? { range: chart.xrange } : {}) }, y: range },
    axes: [{ ...axis, label: chart.x }, { ...axis, size: 52, label: chart.y }], series: [{ label: chart.x, value: (_, value) => number(value) }, ...series],
    hooks: { drawClear: [one => shade(one, chart.bands || [])] },
  }, chart.data, node);
  drawn.push([node, chart, plot]);
}
function redraw() {
  for (const [node, chart, plot] of drawn.splice(0)) { plot.destroy(); draw(node, chart); }
}
for (const chart of dataOf("charts") || []) draw(document.getElementById(chart.id), chart);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
matchMedia("print").addEventListener("change", redraw);
let late;
addEventListener("resize", () => { clearTimeout(late); late = setTimeout(() => drawn.forEach(([node, , plot]) => plot.setSize({ width: node.clientWidth, height: 230 })), 100); });
addEventListener("beforeprint", () => document.querySelectorAll("details.print").forEach(each => { each.open = true; }));

// ---------------------------------------------------------------- tables that sort
for (const table of document.querySelectorAll("table.sort")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.append(...head.childNodes); head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending", number = head.classList.contains("number");
      const key = row => { const text = row.cells[column].textContent.trim().replaceAll(",", ""); return number ? (text === "" ? NaN : parseFloat(text)) : text; };
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        const [left, right] = [key(a), key(b)];
        if (number && (isNaN(left) || isNaN(right))) return isNaN(left) - isNaN(right);
        const order = number ? left - right : left.localeCompare(right);
        return down ? -order : order;
      });
      heads.forEach(each => each.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      table.tBodies[0].append(...rows);
    });
  });
}

// ---------------------------------------------------------------- threshold
const slider = document.getElementById("threshold"), curve = dataOf("thresholds");
function show(threshold) {  // null: each label's own
  for (const label of document.querySelectorAll(".label[data-p]")) {
    const below = !(parseFloat(label.dataset.p) > (threshold ?? parseFloat(label.dataset.own))), given = label.dataset.given === "1";
    label.classList.toggle("below", below && !given);
    label.classList.toggle("missed", below && given && !label.classList.contains("first"));
    label.dataset.mark = below && given ? (label.classList.contains("first") ? "✓" : "○") : label.dataset.kind;
  }
  const words = document.getElementById("threshold-words");
  if (threshold === null) { words.textContent = words.dataset.own; return; }
  const at = curve.at.reduce((best, value, place) => Math.abs(value - threshold) < Math.abs(curve.at[best] - threshold) ? place : best, 0);
  words.textContent = `${threshold.toFixed(2)}: ` + curve.rows.map(row => `${row.name} ${row.values[at].toFixed(row.digits)}${row.unit}`).join(", ");
}
if (slider) {
  slider.addEventListener("input", () => show(parseFloat(slider.value)));
  document.getElementById("threshold-own").addEventListener("click", () => { slider.value = slider.dataset.own; show(null); });
}

// ---------------------------------------------------------------- copy
for (const button of document.querySelectorAll("button.copy")) button.addEventListener("click", async () => {
  const source = button.previousElementSibling;
  try { await navigator.clipboard.writeText(source.textContent); }
  catch { const range = document.createRange(); range.selectNodeContents(source); const chosen = getSelection(); chosen.removeAllRanges(); chosen.addRange(range); document.execCommand("copy"); }
  button.textContent = "copied"; setTimeout(() => { button.textContent = "copy"; }, 1500);
});
