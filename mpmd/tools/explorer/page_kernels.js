// The kernels inside of a fragment: a box each, as wide as it is long, from what it reads to what reads it.

const KERNEL = 24, KERNEL_GAP = 14, LEVEL_GAP = 34, WIDEST = 260, NARROWEST = 10;

const micro = seconds => `${(seconds * 1e6).toPrecision(3)} µs`;
const amount = count => (count >= 1e6 ? `${(count / 1e6).toPrecision(3)} M` : count >= 1e3 ? `${(count / 1e3).toPrecision(3)} k` : `${count}`);

function kernelNodes(fragment) {
  return data.kernels[fragment].map(([name, line, limit, seconds, flops, bytes, reads, writes, sources], i) =>
    ({ i, name, line, limit, seconds, flops, bytes, reads, writes, sources }));
}

// The fragments that the nodes of a step call.
function calledBy(step) {
  const names = new Set();
  for (const graph of step.drawn) for (const [id] of graph.nodes) {
    for (const [word, text] of data.nodes[id][5]) if (word === "calls") names.add(text.slice(1));
  }
  return [...names].filter(name => name in data.kernels);
}

function showKernels(step) {
  const names = calledBy(step);
  el("kernels").hidden = !names.length;
  if (!names.length) return;
  if (!names.includes(state.fragment)) state.fragment = names[0];
  el("fragment").replaceChildren(...names.map(name => {
    const option = document.createElement("option");
    option.textContent = option.value = name;
    option.selected = name === state.fragment;
    return option;
  }));
  el("fragment").onchange = () => { state.fragment = el("fragment").value; showKernels(step); };
  const known = data.kernels[state.fragment];
  if (typeof known === "string") {
    el("cost").textContent = known;
    el("kernel-scroll").replaceChildren();
    return;
  }
  const nodes = kernelNodes(state.fragment);
  const sum = nodes.reduce((all, node) => all + node.seconds, 0);
  el("cost").textContent = `${nodes.length} kernels, ${micro(sum)} projected for native code; as wide as they are long`;
  el("kernel-scroll").replaceChildren(kernelPicture(nodes, sum));
}

// A column for each depth, in it a row for each kernel: that of a source, if it is free.
function layOutKernels(nodes) {
  const longest = Math.max(...nodes.map(node => node.seconds), 1e-12), columns = [];
  for (const node of nodes) {
    node.level = Math.max(-1, ...node.sources.map(s => nodes[s].level)) + 1;
    node.width = Math.max(NARROWEST, WIDEST * node.seconds / longest);
    const column = columns[node.level] ||= { width: 0, taken: new Set() };
    const wished = node.sources.map(s => nodes[s].row).find(row => !column.taken.has(row));
    node.row = wished ?? 0;
    while (column.taken.has(node.row)) node.row++;
    column.taken.add(node.row);
    column.width = Math.max(column.width, node.width);
  }
  let x = 12;
  for (const column of columns) { column.x = x; x += column.width + LEVEL_GAP; }
  for (const node of nodes) {
    node.x = columns[node.level].x;
    node.y = TOP + node.row * (KERNEL + KERNEL_GAP);
  }
  return [x, TOP + (Math.max(0, ...nodes.map(node => node.row)) + 1) * (KERNEL + KERNEL_GAP)];
}

function kernelPicture(nodes, sum) {
  const [width, height] = layOutKernels(nodes);
  const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}` });
  const wires = svg("g", {}), boxes = svg("g", {}), marks = [], edges = [];
  root.append(wires, boxes);
  for (const node of nodes) {
    for (const s of node.sources) {
      const from = nodes[s], x1 = from.x + from.width, y1 = from.y + KERNEL / 2, x2 = node.x, y2 = node.y + KERNEL / 2;
      const bend = Math.max(12, (x2 - x1) / 2);
      const edge = svg("path", { class: "wire", d: `M${x1},${y1} C${x1 + bend},${y1} ${x2 - bend},${y2} ${x2},${y2}` });
      edges.push([s, node.i, edge]);
      wires.append(edge);
    }
    const group = svg("g", { class: `box ${node.limit}` });
    group.append(svg("rect", { x: node.x, y: node.y, width: node.width, height: KERNEL }));
    const room = Math.floor(node.width / 7);
    if (room >= 4) {
      const text = node.name.length <= room ? node.name : node.name.slice(0, room - 1) + "…";
      group.append(svg("text", { x: node.x + node.width / 2, y: node.y + KERNEL / 2 + 4 }, text));
    }
    marks.push(group);
    boxes.append(group);
    group.addEventListener("mouseenter", event => {
      for (const [from, to, edge] of edges) if (from === node.i || to === node.i) { edge.classList.add("near"); marks[from].classList.add("near"); marks[to].classList.add("near"); }
      showTip(node.name, kernelFacts(node, sum), event);
    });
    group.addEventListener("mousemove", moveTip);
    group.addEventListener("mouseleave", () => {
      for (const [, , edge] of edges) edge.classList.remove("near");
      lookAway(root, marks);
    });
  }
  return root;
}

function kernelFacts(node, sum) {
  const buffers = (word, found) => found.map(([name, bytes]) => [word, `${name}: ${bytes.toLocaleString("en")} bytes`]);
  return [
    ["kernel", node.line],
    ["cost", `${micro(node.seconds)}, ${(100 * node.seconds / sum).toFixed(1)} %, bound by ${node.limit}`],
    ["work", `${amount(node.flops)}FLOP, at least ${amount(node.bytes)}B`],
    ...buffers("reads", node.reads),
    ...buffers("writes", node.writes),
  ];
}
