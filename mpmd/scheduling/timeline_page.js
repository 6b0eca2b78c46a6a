"use strict";
// Zoom, ticks, labels that fit, and what is under the pointer.

const el = id => document.getElementById(id);
const scroll = el("scroll"), wide = el("wide"), tip = el("tip");
const span = Number(wide.dataset.span), unit = wide.dataset.unit;   // of the whole axis
const LETTER = 6, WIDEST = 2e6, LEGIBLE = 400;   // pixels
const tasks = [...wide.querySelectorAll("i[data-labels]")].map(task =>
  ({ task, part: parseFloat(task.style.width) / 100, labels: task.dataset.labels.split("|"), shown: "" }));
let zoom = 1;

const plot = () => el("ticks").clientWidth;   // pixels of the axis
const margin = () => el("ticks").offsetLeft;
const shortest = Math.min(...tasks.map(t => t.part).filter(part => part > 0), 1);
const most = () => Math.max(64, Math.min(LEGIBLE / shortest, WIDEST) / Math.max(100, scroll.clientWidth - margin()));

function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map(digit => digit * power).find(step => step >= least * 0.999999);
}

const SMALLER = { s: "ms", ms: "µs", µs: "ns" };

// A time in the unit of the axis; in a smaller one if all that is seen is short.
function timeText(value, step) {
  const digits = Math.max(0, Math.min(9, Math.ceil(-Math.log10(step) - 1e-9)));
  if (value !== 0 && Math.abs(value) < 1 && digits > 1 && SMALLER[unit]) {
    return `${Number((value * 1000).toFixed(Math.max(0, digits - 3)))} ${SMALLER[unit]}`;
  }
  return `${value.toFixed(digits)} ${unit}`;
}

function drawTicks() {
  const width = plot(), least = Math.max(60, Math.min(90, (scroll.clientWidth - margin()) / 6));
  const step = roundStep(span * least / width);   // up to 2.5 times as much: so two are always seen
  const from = Math.floor(span * scroll.scrollLeft / width / step);
  const until = Math.min(span, span * (scroll.scrollLeft + scroll.clientWidth) / width);
  const made = [];
  for (let k = Math.max(0, from); k * step <= until * (1 + 1e-9); k++) {
    const tick = document.createElement("span");
    tick.style.left = 100 * k * step / span + "%";
    tick.textContent = timeText(k * step, step);
    made.push(tick);
  }
  el("ticks").replaceChildren(...made);
}

// The longest label of each task for which it is wide enough, and whether it has an edge.
function drawLabels() {
  const width = plot();
  for (const task of tasks) {
    const label = task.labels.find(text => text.length * LETTER + 3 <= task.part * width) || "";
    if (label !== task.shown) task.task.textContent = task.shown = label;
    const narrow = task.part * width < 4;   // an edge would hide it
    if (narrow !== task.narrow) task.task.classList.toggle("narrow", task.narrow = narrow);
  }
}

// `at` are the pixels from the left of what scrolls at which the time stays.
function zoomTo(factor, at = scroll.clientWidth / 2) {
  const before = plot(), time = (scroll.scrollLeft + at - margin()) / before;
  zoom = Math.max(1, Math.min(most(), factor));
  wide.style.width = `calc(${zoom} * (100% - ${margin()}px) + ${margin()}px)`;
  scroll.scrollLeft = time * plot() + margin() - at;
  el("zoom").max = Math.log2(most());
  el("zoom").value = Math.log2(zoom);
  el("factor").textContent = `${zoom < 10 ? zoom.toFixed(1) : Math.round(zoom)} ×`;
  drawLabels();
  drawTicks();
}

function showTip(text, event) {
  tip.style.display = text ? "block" : "none";
  if (!text) return;
  tip.textContent = text;
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 6)) + "px";
  const below = event.clientY + 16;
  tip.style.top = (below + tip.offsetHeight > innerHeight ? Math.max(4, event.clientY - tip.offsetHeight - 10) : below) + "px";
}

function bytesText(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let k = 0;
  while (count >= 1024 && k < units.length - 1) { count /= 1024; k++; }
  return `${Number(count.toFixed(1))} ${units[k]}`;
}

// What holds bytes at the time under the pointer.
function memoryText(target, event) {
  const known = target.memory ||= JSON.parse(target.dataset.memory);
  const box = target.getBoundingClientRect(), time = span * (event.clientX - box.left) / box.width;
  let k = 0;
  while (k + 1 < known.at.length && known.at[k + 1] <= time) k++;
  const held = known.held[k] || [];
  const rows = known.names.map((name, i) => [name, held[i]]).filter(([, size]) => size)
    .map(([name, size]) => `${name} ${bytesText(size)}`);
  const sum = held.reduce((all, size) => all + size, 0);
  return [known.note, `${Number(time.toPrecision(4))} ${unit}: ${bytesText(sum)}`, ...rows].join("\n");
}

function point(event) {
  const memory = event.target.closest && event.target.closest("[data-memory]");
  showTip(memory ? memoryText(memory, event) : event.target.dataset && event.target.dataset.tip, event);
}

document.addEventListener("pointermove", point);
document.addEventListener("pointerdown", point);
el("zoom").addEventListener("input", event => zoomTo(2 ** event.target.value));
scroll.addEventListener("scroll", drawTicks);
scroll.addEventListener("wheel", event => {
  if (!event.ctrlKey) return;
  event.preventDefault();
  zoomTo(zoom * 2 ** (-event.deltaY / (event.deltaMode ? 10 : 200)), event.clientX - scroll.getBoundingClientRect().left);
}, { passive: false });
scroll.addEventListener("keydown", event => {
  if (event.key === "+" || event.key === "=") zoomTo(zoom * 1.5);
  else if (event.key === "-") zoomTo(zoom / 1.5);
  else if (event.key === "0") zoomTo(1);
});
for (const name of ["transfers", "memory"]) {
  el(name).addEventListener("change", event => document.body.classList.toggle(`no-${name}`, !event.target.checked));
}
el("path").addEventListener("change", event => document.body.classList.toggle("path", event.target.checked));
document.body.classList.add("path");
for (const [name, shown] of [["transfers", ".transfer"], ["memory", "[data-memory]"], ["path", ".critical"]]) {
  if (!wide.querySelector(shown)) el(name).parentElement.style.display = "none";
}
addEventListener("resize", () => zoomTo(zoom));
zoomTo(1);
