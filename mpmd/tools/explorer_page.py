"""The page of `mpmd-opt -html`, which holds its data and needs nothing else."""

from __future__ import annotations

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>mpmd passes</title>
<style>
  :root { --line: #ccc; --paper: #fff; --ink: #222; --soft: #777; --new: #d8f5d8; --gone: #fbdcdc; }
  @media (prefers-color-scheme: dark) {
    :root { --line: #444; --paper: #1b1b1b; --ink: #ddd; --soft: #999; --new: #1d3f1d; --gone: #4a2020; }
  }
  body { margin: 0; display: grid; grid-template: auto 1fr / 20rem 1fr; height: 100vh;
         font: 14px system-ui, sans-serif; color: var(--ink); background: var(--paper); }
  header { grid-column: 1 / 3; padding: .5rem 1rem; border-bottom: 1px solid var(--line); }
  header h1 { font-size: 1rem; margin: 0 0 .2rem; }
  header p { margin: 0; color: var(--soft); }
  header pre { margin: .3rem 0 0; white-space: pre-wrap; color: #b33; }
  nav { overflow: auto; border-right: 1px solid var(--line); }
  nav button { display: block; width: 100%; padding: .25rem .6rem; border: 0; text-align: left;
               cursor: pointer; background: none; color: var(--soft); font: inherit;
               overflow-wrap: anywhere; }
  nav button.changed { color: var(--ink); font-weight: 600; }
  nav button[aria-current=true] { background: var(--new); }
  nav small { float: right; color: var(--soft); font-weight: 400; }
  main { overflow: auto; display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1.3fr); }
  section { overflow: auto; padding: .5rem; }
  section + section { border-left: 1px solid var(--line); }
  pre.text { margin: 0; font: 12px/1.35 ui-monospace, monospace; }
  pre.text div { white-space: pre; min-height: 1.35em; }
  .new { background: var(--new); } .gone { background: var(--gone); }
  .skip { color: var(--soft); cursor: pointer; }
  svg text { font: 11px system-ui, sans-serif; fill: var(--ink); }
  svg .head { font-weight: 600; }
  svg rect { stroke: #8888; rx: 4; }
  svg rect.forward { fill: #9cc4ef66; } svg rect.backward { fill: #f2c18d66; }
  svg rect.unnamed { fill: #bbb5; } svg rect.named, svg rect.call { fill: #c9b3ea55; }
  svg rect.transfer { fill: none; stroke-dasharray: 3 2; }
  svg rect.fresh { stroke: #2a9d2a; stroke-width: 2; }
  svg path { fill: none; stroke: #8888; } svg path.across { stroke: #d07020; }
</style>
<header><h1 id="title"></h1><p id="about"></p><pre id="findings"></pre></header>
<nav id="steps"></nav>
<main><section id="graph"></section><section><pre class="text" id="text"></pre></section></main>
<script>
const data = /*DATA*/null;
const el = id => document.getElementById(id);
const CONTEXT = 3;
let current = 0;

// A step whose text did not change has none of its own.
data.steps.forEach((s, i) => { if (!s.lines) s.lines = data.steps[i - 1].lines; });

function line(text, kind) {
  const div = document.createElement("div");
  div.textContent = (kind === "new" ? "+ " : kind === "gone" ? "- " : "  ") + text;
  if (kind) div.className = kind;
  return div;
}

function skipped(lines) {
  const div = document.createElement("div");
  div.className = "skip";
  div.textContent = `… ${lines.length} lines`;
  div.onclick = () => div.replaceWith(...lines.map(l => line(l, "")));
  return div;
}

function showText(step) {
  const before = current ? data.steps[current - 1].lines : step.lines, out = [];
  let i = 0, j = 0;
  const changed = step.runs.some(([sign]) => sign);
  step.runs.forEach(([sign, n], r) => {
    if (sign < 0) { for (let k = 0; k < n; k++) out.push(line(data.lines[before[i++]], "gone")); return; }
    if (sign > 0) { for (let k = 0; k < n; k++) out.push(line(data.lines[step.lines[j++]], "new")); return; }
    const kept = step.lines.slice(j, j + n).map(x => data.lines[x]);
    i += n; j += n;
    const head = r === 0 ? 0 : CONTEXT, tail = r === step.runs.length - 1 ? 0 : CONTEXT;
    if (!changed || n <= head + tail + 3) { out.push(...kept.map(l => line(l, ""))); return; }
    out.push(...kept.slice(0, head).map(l => line(l, "")));
    out.push(skipped(kept.slice(head, n - tail)));
    out.push(...kept.slice(n - tail).map(l => line(l, "")));
  });
  el("text").replaceChildren(...out);
}

function svg(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (text !== undefined) made.textContent = text;
  return made;
}

function showGraph(step) {
  const W = 190, H = 24, GAP = 9, TOP = 26;
  const used = step.meshes.map((_, m) => step.nodes.some(n => n[0] === m));
  const lane = []; let count = 0;
  step.meshes.forEach((_, m) => { lane[m] = used[m] || step.meshes[m] ? count++ : -1; });
  const at = (n, i) => [lane[n[0]] * (W + 30) + 4, TOP + i * (H + GAP)];
  const root = svg("svg", { width: count * (W + 30), height: TOP + step.nodes.length * (H + GAP) + 8 });
  step.meshes.forEach((mesh, m) => {
    if (lane[m] < 0) return;
    root.append(svg("text", { x: lane[m] * (W + 30) + 8, y: 16, class: "head" }, mesh || "on no mesh"));
  });
  step.nodes.forEach((node, i) => {
    const [x, y] = at(node, i);
    for (const source of node[3]) {
      const from = step.nodes[source], [fx, fy] = at(from, source);
      const side = x > fx ? W : 0, same = x === fx;
      const a = same ? [fx + W, fy + H / 2] : [fx + side, fy + H / 2];
      const b = same ? [x + W, y + H / 2] : [x + W - side, y + H / 2];
      const bend = same ? 22 : (b[0] - a[0]) / 2;
      const path = `M${a} C${a[0] + bend},${a[1]} ${same ? b[0] + bend : b[0] - bend},${b[1]} ${b}`;
      root.append(svg("path", { d: path, class: same ? "" : "across" }));
    }
  });
  step.nodes.forEach((node, i) => {
    const [x, y] = at(node, i), [, label, kind, , fresh] = node;
    const group = svg("g", {});
    group.append(svg("title", {}, label));
    group.append(svg("rect", { x, y, width: W, height: H, class: kind + (fresh ? " fresh" : "") }));
    group.append(svg("text", { x: x + 6, y: y + 16 }, label.length > 30 ? label.slice(0, 29) + "…" : label));
    root.append(group);
  });
  el("graph").replaceChildren(root);
}

function show(i) {
  current = Math.max(0, Math.min(data.steps.length - 1, i));
  const step = data.steps[current];
  el("title").textContent = `${current}. ${step.title}`;
  el("about").textContent = step.about + (step.changed || !current ? "" : "  (changed nothing)");
  [...el("steps").children].forEach((b, k) => b.setAttribute("aria-current", k === current));
  el("steps").children[current].scrollIntoView({ block: "nearest" });
  showText(step);
  showGraph(step);
  history.replaceState(null, "", "#" + current);
}

data.steps.forEach((step, i) => {
  const button = document.createElement("button"), time = document.createElement("small");
  button.textContent = step.title;
  time.textContent = i ? `${step.ms} ms` : "";
  button.prepend(time);
  if (step.changed) button.className = "changed";
  button.onclick = () => show(i);
  el("steps").append(button);
});
el("findings").textContent = data.findings.join("\\n");
addEventListener("keydown", e => {
  const next = (from, by) => {
    let k = from + by;
    while (data.steps[k] && !data.steps[k].changed) k += by;
    return k;
  };
  if (e.key === "ArrowRight" || e.key === "j") show(e.shiftKey ? next(current, 1) : current + 1);
  if (e.key === "ArrowLeft" || e.key === "k") show(e.shiftKey ? next(current, -1) : current - 1);
});
show(Number(location.hash.slice(1)) || 0);
</script>
</html>
"""
