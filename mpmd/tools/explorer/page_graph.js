// What runs on which mesh, and what is sent, over time.

const SVG = "http://www.w3.org/2000/svg";
const LANE = 58, BOX = 32, TOP = 10, SMALL = 0.4, FLIGHT = 0.35;

function svg(name, attributes, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  made.append(...children);
  return made;
}

// With `isNew` the graph is of this step, not of one before.
function nodesOf(graph, isNew) {
  return graph.nodes.map(([id, line, fresh, ...back], i) => {
    const [mesh, source, kind, label, short, facts] = data.nodes[id];
    return { i, mesh, source, kind, label, short, facts, line, fresh: fresh && isNew, sources: back.map(b => i - b) };
  });
}

// When everything starts if named work takes one unit, unnamed work less, and each mesh does one thing at a time.
function layOut(nodes, lanes) {
  const free = new Map(lanes.map(lane => [lane, 0]));
  let end = 1;
  for (const node of nodes) {
    const ready = Math.max(0, ...node.sources.map(s => nodes[s].end));
    if (node.kind === "transfer") {
      node.start = ready;
      node.end = ready + FLIGHT;
    } else {
      node.start = Math.max(ready, free.get(node.mesh));
      node.end = node.start + (node.kind === "unnamed" ? SMALL : node.kind === "both" ? 2 : 1);
      free.set(node.mesh, node.end);
    }
    end = Math.max(end, node.end);
  }
  return end;
}

function showGraph(step) {
  const graphs = step.drawn;
  el("graph").hidden = !graphs.length;
  if (!graphs.length) return;
  const graph = graphs.find(g => g.name === state.func) || graphs[0];
  el("functions").replaceChildren(...graphs.map(g => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "@" + g.name;
    button.setAttribute("role", "tab");
    button.setAttribute("aria-selected", g === graph);
    button.onclick = () => { state.func = g.name; showGraph(step); };
    return button;
  }));
  const nodes = nodesOf(graph, Boolean(step.graphs));
  const lanes = graph.meshes.slice();
  if (nodes.some(n => n.mesh === "")) lanes.push("");
  const end = layOut(nodes, lanes);
  el("lanes").replaceChildren(...lanes.map(name => {
    const div = document.createElement("div");
    div.style.height = LANE + "px";
    div.textContent = div.title = name || "no mesh yet";
    return div;
  }));
  el("scroll").replaceChildren(picture(nodes, lanes, end, step));
  const parts = [];
  if (graph.plain) parts.push(`${graph.plain} more ops are on no mesh yet`);
  if (graph.left) parts.push(`${graph.left} nodes are left out`);
  parts.push("each mesh does one thing after the other, as soon as what it needs is there; click for the text");
  el("note").textContent = parts.join(" · ");
}

function picture(nodes, lanes, end, step) {
  const unit = state.unit, x = t => 8 + t * unit;
  const y = lane => TOP + lanes.indexOf(lane) * LANE + LANE / 2;
  const width = x(end) + 24, height = TOP + lanes.length * LANE + 8;
  const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}` });
  const gradient = svg("linearGradient", { id: "both", x2: 0, y2: 1 });
  for (const [offset, color] of [[".3", "forward"], [".3", "backward"]]) {
    gradient.append(svg("stop", { offset, style: `stop-color: var(--${color})` }));
  }
  root.append(svg("defs", {}, gradient));
  lanes.forEach((lane, i) => {
    if (i % 2 === 0) root.append(svg("rect", { class: "lane", x: 0, y: TOP + i * LANE, width, height: LANE }));
  });
  const users = nodes.map(() => []);
  for (const node of nodes) for (const s of node.sources) users[s].push(node.i);
  const marks = [];
  const wires = svg("g", {}), boxes = svg("g", {});
  root.append(wires, boxes);
  for (const node of nodes) {
    const mark = node.kind === "transfer"
      ? wire(node, nodes, users[node.i], x, y, unit, lanes) : box(node, x, y, unit);
    marks[node.i] = mark;
    (node.kind === "transfer" ? wires : boxes).append(mark);
    mark.addEventListener("mouseenter", event => look(root, nodes, users, marks, node, event));
    mark.addEventListener("mousemove", moveTip);
    mark.addEventListener("mouseleave", () => lookAway(root, marks));
    mark.addEventListener("click", () => {
      const called = node.facts.find(([word]) => word === "calls");
      if (called) { state.fragment = called[1].slice(1); showKernels(step); }
      if (step && node.line >= 0) goTo(node.line);
    });
  }
  return root;
}

function box(node, x, y, unit) {
  const width = Math.max(3, (node.end - node.start) * unit - 2), left = x(node.start);
  const group = svg("g", { class: `box ${node.kind}${node.fresh ? " fresh" : ""}` });
  group.append(svg("rect", { x: left, y: y(node.mesh) - BOX / 2, width, height: BOX }));
  const room = Math.floor(width / 7);
  const text = node.short.length <= room ? node.short : room >= 4 ? node.short.slice(0, room - 1) + "…" : "";
  if (text) group.append(svg("text", { x: left + width / 2, y: y(node.mesh) + 4 }, text));
  return group;
}

// From the end of what computes a value to the start of the first that uses it.
function wire(node, nodes, users, x, y, unit, lanes) {
  const from = Math.max(0, ...node.sources.map(s => nodes[s].end));
  const used = users.map(u => nodes[u]).filter(u => u.kind !== "transfer" || u.source === node.mesh);
  const to = used.length ? Math.min(...used.map(u => u.start)) : node.end;
  const away = lanes.indexOf(node.mesh) - lanes.indexOf(node.source);
  const sign = Math.sign(away);
  const x1 = x(from) - 2, x2 = x(Math.max(to, from + 0.1));
  const y1 = y(node.source) + sign * 6, y2 = y(node.mesh) - sign * 6;
  const bend = Math.max(10, Math.min(60, (x2 - x1) / 2));
  const path = away
    ? `M${x1},${y1} C${x1 + bend},${y1} ${x2 - bend},${y2} ${x2},${y2}`
    : `M${x1},${y1 - BOX / 2} C${x1},${y1 - BOX} ${x2},${y1 - BOX} ${x2},${y1 - BOX / 2}`;
  const kind = away > 0 ? "down" : away < 0 ? "up" : "";
  const group = svg("g", { class: "transfer" });
  group.append(svg("path", { class: `wire ${kind}${node.fresh ? " fresh" : ""}`, d: path }));
  if (away) {
    const tip = `M${x2 - 5},${y2 - 3.5} L${x2},${y2} L${x2 - 5},${y2 + 3.5}`;
    group.append(svg("path", { class: `wire ${kind}${node.fresh ? " fresh" : ""}`, d: tip }));
  }
  group.append(svg("path", { class: "catch", d: path }));
  return group;
}

function look(root, nodes, users, marks, node, event) {
  root.classList.add("looking");
  const near = new Set([node.i, ...node.sources, ...users[node.i]]);
  // What a transfer brings is as near as the transfer.
  for (const i of [...node.sources]) if (nodes[i].kind === "transfer") nodes[i].sources.forEach(s => near.add(s));
  for (const i of users[node.i]) if (nodes[i].kind === "transfer") users[i].forEach(u => near.add(u));
  for (const i of near) marks[i].classList.add("near");
  showTip(node.label, node.facts, event);
}

function showTip(label, facts, event) {
  const table = document.createElement("table");
  for (const [word, text] of facts) {
    const row = table.insertRow();
    row.insertCell().textContent = word;
    row.insertCell().textContent = text;
  }
  const title = document.createElement("b");
  title.textContent = label;
  el("tip").replaceChildren(title, table);
  el("tip").hidden = false;
  moveTip(event);
}

function moveTip(event) {
  const tip = el("tip"), { width, height } = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8)) + "px";
  tip.style.top = (event.clientY + height + 24 > innerHeight ? event.clientY - height - 12 : event.clientY + 16) + "px";
}

function lookAway(root, marks) {
  root.classList.remove("looking");
  for (const mark of marks) mark.classList.remove("near");
  el("tip").hidden = true;
}
