// The module's text: what changed, marked; what did not, folded.

const CONTEXT = 3;          // lines shown around a change
const CHUNK = 200;          // rows that the browser lays out together
const MOST_ROWS = 6000;     // rows shown before one has to ask for more
const MOST_CHANGED = 400;   // changed lines shown in one piece before one has to ask for more
const MOST_EDITS = 500;     // words that differ in a line; with more it is marked as a whole
const LONG_LINE = 90;       // words of a changed line from which on those that stayed are folded
const KEPT_WORDS = 14;      // of these, shown around a change

const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
const escaped = text => text.replace(/[&<>"]/g, c => ESCAPES[c]);

function shown(id) {
  const text = data.lines[id];
  if (!state.short) return text;
  return text
    .replace(/!mpmd\.mesh_tensor<"([^"]*)", tensor<([^<>]*)>(?:, sharding=<(@[^>]*)>)?(?:, memory_kind="([^"]*)")?>/g,
      (_, mesh, type, sharding, memory) =>
        `${mesh}·${type}${sharding ? "·" + sharding.replace(/^@[\w"$.-]+, /, "") : ""}${memory ? "·" + memory : ""}`)
    .replace(/tensor<([^<>]*)>/g, "$1");
}

const WORDS = /"(?:[^"\\]|\\.)*"|[%@#!^]?[\w$.]+(?:#\d+)?|\s+|./g;
const NUMBER = /^-?\d/;

function classOf(word) {
  const first = word[0];
  if (first === '"') return "s";
  if (first === "%") return "v";
  if (first === "@" || first === "^") return "a";
  if (first === "!" || first === "#") return "y";
  if (/^(?:[a-z_]+\.)+[a-z_.]+$/.test(word)) return "o";
  if (/^(?:\d+x)*(?:b?f\d+\w*|u?i\d+|i1|complex)$/.test(word) && !NUMBER.test(word.replace(/^(\d+x)+/, ""))) return "y";
  return "";
}

// The runs of words of a long line that are far from a change: pairs of their first and the one behind their last.
function farFrom(words, marked) {
  if (!marked || words.length < LONG_LINE) return [];
  const ends = [-1, ...[...marked].sort((a, b) => a - b), words.length + KEPT_WORDS], runs = [];
  for (let k = 0; k + 1 < ends.length; k++) {
    const from = ends[k] + 1 + (k ? KEPT_WORDS : 2 * KEPT_WORDS), to = ends[k + 1] - KEPT_WORDS;
    if (to - from > KEPT_WORDS) runs.push([from, Math.min(to, words.length)]);
  }
  return runs;
}

// A line as HTML; `marked` are the numbers of the words that differ, if lines are compared.
function html(words, marked) {
  let out = "", open = false;
  const far = new Map(farFrom(words, marked)), ends = new Set(far.values());
  words.forEach((word, i) => {
    const mark = Boolean(marked) && marked.has(i);
    if (mark !== open) { out += mark ? "<em>" : "</em>"; open = mark; }
    if (ends.has(i)) out += "</span>";
    if (far.has(i)) {
      const count = words.slice(i, far.get(i)).filter(text => /\S/.test(text) && text !== ",").length;
      out += `<button type="button" class="gap" title="show them">⋯ ${count} unchanged</button><span hidden>`;
    }
    const kind = classOf(word), text = escaped(word);
    if (kind === "v") out += `<span class="v" data-v="${escaped(word.replace(/#\d+$/, ""))}">${text}</span>`;
    else out += kind ? `<span class="${kind}">${text}</span>` : text;
  });
  return out + (open ? "</em>" : "") + (ends.has(words.length) ? "</span>" : "");
}

// Which words of two lines differ.  Source: An O(ND) difference algorithm (Myers, 1986).
function differing(a, b) {
  let head = 0, tail = 0;
  while (head < a.length && head < b.length && a[head] === b[head]) head++;
  while (tail < a.length - head && tail < b.length - head && a[a.length - 1 - tail] === b[b.length - 1 - tail]) tail++;
  const n = a.length - head - tail, m = b.length - head - tail;
  const left = new Set(), right = new Set(), furthest = new Map([[1, 0]]), trace = [];
  const step = (k, d) => (k === -d || (k !== d && furthest.get(k - 1) < furthest.get(k + 1)));
  for (let d = 0; d <= Math.min(n + m, MOST_EDITS); d++) {
    trace.push(new Map(furthest));
    for (let k = -d; k <= d; k += 2) {
      let x = step(k, d) ? furthest.get(k + 1) : furthest.get(k - 1) + 1, y = x - k;
      while (x < n && y < m && a[head + x] === b[head + y]) { x++; y++; }
      furthest.set(k, x);
      if (x >= n && y >= m) { walkBack(trace, n, m, head, left, right); return [left, right]; }
    }
  }
  for (let i = 0; i < n; i++) left.add(head + i);
  for (let j = 0; j < m; j++) right.add(head + j);
  return [left, right];
}

// From the end of both lines to their begin: what each round of the search added or left out.
function walkBack(trace, x, y, head, left, right) {
  for (let d = trace.length - 1; d > 0; d--) {
    const furthest = trace[d], k = x - y;
    const down = k === -d || (k !== d && furthest.get(k - 1) < furthest.get(k + 1));
    const before = down ? k + 1 : k - 1, start = furthest.get(before);
    if (down) right.add(head + start - before);
    else left.add(head + start);
    x = start;
    y = start - before;
  }
}

const indentOf = id => data.lines[id].match(/^ */)[0].length;
const place = n => `<span class="no">${n || ""}</span>`;

function cell(id, kind, marked) {
  const words = shown(id).match(WORDS) || [];
  return `<code class="${kind}" style="--in:${indentOf(id)}ch">${html(words, marked)}</code>`;
}

function unifiedRow(scope, kind, sign, id, oldPlace, newPlace, marked) {
  const at = ` data-scope="${scope}"${newPlace ? ` data-line="${newPlace - 1}"` : ""}`;
  return `<div class="row ${kind}"${at}>${place(oldPlace)}${place(newPlace)}<span class="sign">${sign}</span>`
    + `${cell(id, "", marked)}<span class="from">${newPlace ? escaped(shortSource(newPlace - 1)) : ""}</span></div>`;
}

// The calls of the user's code that led to a line of the text, innermost first: places and texts.
const sourceOf = line => data.sources[data.steps[state.step].from[line]] || [];

// `model.py:12`; nothing where the line above has the same.
function shortSource(line) {
  const nameOf = i => { const [frame] = sourceOf(i); return frame ? frame[0].replace(/, in .*$/, "").replace(/^.*\//, "") : ""; };
  const name = nameOf(line);
  return line > 0 && nameOf(line - 1) === name ? "" : name;
}

function showSource(event) {
  const row = event.target.closest && event.target.closest(".row");
  const wanted = row && event.target.closest(".no, .from, .o") && row.dataset.line !== undefined;
  if (!wanted) { el("tip").hidden = true; return; }
  const frames = sourceOf(Number(row.dataset.line));
  const facts = frames.flatMap(([place, code], i) => [[i ? "called from" : "from", place], ...(code ? [["", code]] : [])]);
  showTip(frames.length ? "in the model" : "made by a pass: no line of the model", facts, event);
}

const LOOKS = { "=": ["", " "], "-": ["gone", "−"], "+": ["new", "+"], "<": ["moved", "↱"], ">": ["moved", "↳"] };

function marksOf([, old, id]) {
  return differing(shown(old).match(WORDS) || [], shown(id).match(WORDS) || []);
}

function unified(rows) {
  const out = [];
  let waiting = [];
  const flush = () => { out.push(...waiting); waiting = []; };
  for (const row of rows) {
    const [kind, old, id, oldPlace, newPlace, scope] = row;
    if (kind === "~") {
      const [left, right] = marksOf(row);
      out.push(unifiedRow(scope, "gone", "−", old, oldPlace, 0, left));
      waiting.push(unifiedRow(scope, "new", "+", id, 0, newPlace, right));
      continue;
    }
    flush();
    const [look, sign] = LOOKS[kind];
    out.push(unifiedRow(scope, look, sign, id < 0 ? old : id, oldPlace, newPlace, kept(kind)));
  }
  flush();
  return out;
}

function side(id, number, kind, marked) {
  if (id < 0) return `<span class="no"></span><code class="void"></code>`;
  return place(number) + cell(id, kind, marked);
}

function sideBySide(rows) {
  const out = [];
  const pushRow = (scope, left, right, newPlace) => out.push(
    `<div class="row" data-scope="${scope}"${newPlace ? ` data-line="${newPlace - 1}"` : ""}>${left}${right}</div>`);
  let gone = [], came = [];
  const flush = () => {
    for (let k = 0; k < Math.max(gone.length, came.length); k++) {
      const g = gone[k], c = came[k];
      pushRow((c || g)[5], g ? side(g[1], g[3], LOOKS[g[0]][0]) : side(-1), c ? side(c[2], c[4], LOOKS[c[0]][0]) : side(-1), c && c[4]);
    }
    gone = []; came = [];
  };
  for (const row of rows) {
    const [kind, old, id, oldPlace, newPlace, scope] = row;
    if (kind === "-" || kind === "<") { if (came.length) flush(); gone.push(row); continue; }
    if (kind === "+" || kind === ">") { came.push(row); continue; }
    flush();
    const [left, right] = kind === "~" ? marksOf(row) : [kept(kind), kept(kind)];
    pushRow(scope, side(old, oldPlace, kind === "~" ? "gone" : "", left), side(id, newPlace, kind === "~" ? "new" : "", right), newPlace);
  }
  flush();
  return out;
}

// Of a changed module, lines that stayed are only there to say where a change is.
const kept = kind => (kind === "=" && data.steps[state.step].changed && !state.all ? new Set() : undefined);

const drawn = rows => (state.split ? sideBySide(rows) : unified(rows));

function chunks(rows) {
  const made = drawn(rows), out = [];
  for (let k = 0; k < made.length; k += CHUNK) {
    const div = document.createElement("div");
    div.className = "chunk";
    div.innerHTML = made.slice(k, k + CHUNK).join("");
    out.push(div);
  }
  return out;
}

// The line that opens what a row stands in: what a fold is said to be part of.
function around(rows, at) {
  const idOf = row => (row[2] < 0 ? row[1] : row[2]);
  const indent = indentOf(idOf(rows[at]));
  for (let k = at - 1; k >= 0; k--) {
    const id = idOf(rows[k]);
    if (indentOf(id) < indent) return shown(id).trim();
  }
  return "";
}

function fold(rows, from, to) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "fold";
  const where = to < rows.length ? around(rows, to) : "";
  button.textContent = `⋯ ${to - from} lines${where ? "   in " + where : ""}`;
  button.onclick = () => button.replaceWith(...chunks(rows.slice(from, to)));
  button.rows = [from, to];
  return button;
}

// Which rows to fold: those far from any change; and of a long text all but its begin.
function showText(step) {
  const target = el("text");
  target.className = (state.split ? "split " : "") + (state.wrap ? "wrapped" : "");
  const plain = !step.changed;
  const rows = step.rows && !plain ? step.rows : step.after.map((id, i) => ["=", id, id, i + 1, i + 1]);
  findScopes(rows);
  step.shownRows = rows;
  const stat = step.changed
    ? `<span class="plus">+${step.count.new}</span> <span class="minus">−${step.count.gone}</span>`
      + (step.count.moved ? ` <span class="turn">↳${step.count.moved} moved</span>` : "")
    : `${rows.length} lines`;
  el("stat").innerHTML = stat;
  el("unfold").hidden = plain && !quiet(step) && rows.length <= MOST_ROWS;
  el("unfold").textContent = state.all ? "fold what did not change" : "show all lines";
  target.replaceChildren();
  if (quiet(step) && !state.all) {
    const p = document.createElement("p");
    p.className = "nothing";
    p.textContent = step.outcome === "ran" ? "This pass changed nothing." : "This pass left no module: see above.";
    target.append(p);
    return;
  }
  if (plain || state.all) {
    const most = state.all ? rows.length : MOST_ROWS;
    target.append(...chunks(rows.slice(0, most)));
    if (rows.length > most) target.append(fold(rows, most, rows.length));
    return;
  }
  let k = 0;
  while (k < rows.length) {
    let end = k;
    const kept = rows[k][0] === "=";
    while (end < rows.length && (rows[end][0] === "=") === kept) end++;
    const head = kept && k > 0 ? CONTEXT : 0, tail = kept && end < rows.length ? CONTEXT : 0;
    if (kept && end - k > head + tail + 2) {
      if (head) target.append(...chunks(rows.slice(k, k + head)));
      target.append(fold(rows, k + head, end - tail));
      if (tail) target.append(...chunks(rows.slice(end - tail, end)));
    } else {
      const some = end - k > MOST_CHANGED ? MOST_CHANGED - 100 : end - k;
      target.append(...chunks(rows.slice(k, k + some)));
      if (k + some < end) target.append(fold(rows, k + some, end));
    }
    k = end;
  }
}

const quiet = step => !step.changed && !isInput(step);

// Shows a line of the module after the step, unfolding what hides it.
function goTo(line) {
  const step = data.steps[state.step];
  if (quiet(step) && !state.all) { state.all = true; showText(step); }
  const find = () => el("text").querySelector(`[data-line="${line}"]`);
  if (!find()) {
    for (const button of el("text").querySelectorAll(".fold")) {
      const [from, to] = button.rows;
      if (step.shownRows.slice(from, to).some(row => row[4] === line + 1)) { button.click(); break; }
    }
  }
  const row = find();
  if (!row) return;
  for (const other of document.querySelectorAll(".found")) other.classList.remove("found");
  row.classList.add("found");
  center(row);
}

// The height of a chunk that was never on the screen is an estimate, so a scroll lands near the row; drawing
// there replaces the estimates around it.  Repeated until the row stays, which ends in a few frames.
async function center(row) {
  const frame = () => new Promise(requestAnimationFrame);
  for (let tries = 0, last = NaN; tries < 30 && row.classList.contains("found"); tries++) {
    row.scrollIntoView({ block: "center" });
    await frame();
    await frame();
    const top = row.getBoundingClientRect().top;
    if (Math.abs(top - last) < 1) return;
    last = top;
  }
}

// Shows the next line that contains a text, or the one before.
function findText(wanted, by) {
  const step = data.steps[state.step], small = wanted.toLowerCase();
  const hits = [];
  if (small) step.after.forEach((id, i) => { if (shown(id).toLowerCase().includes(small)) hits.push(i); });
  if (state.wanted !== small) state.hit = null;
  state.wanted = small;
  el("hits").textContent = !small ? "" : hits.length ? `${hits.length} lines` : "not found";
  if (!by || !hits.length) return;
  state.hit = state.hit === null ? (by > 0 ? 0 : hits.length - 1) : (state.hit + by + hits.length) % hits.length;
  el("hits").textContent = `${state.hit + 1} of ${hits.length}`;
  goTo(hits[state.hit]);
}

// Sets which function or fragment each row stands in, as their names are their own; a head stands in two.
function findScopes(rows) {
  const open = [];
  let count = 0;
  for (const row of rows) {
    const line = data.lines[row[2] < 0 ? row[1] : row[2]], indent = line.search(/[^ ]|$/);
    while (open.length && open[open.length - 1][0] >= indent) open.pop();
    const around = open.length ? open[open.length - 1][1] : 0;
    row[5] = `${around}`;
    if (/\{$/.test(line) && /func\.func|mpmd\.(?:fragment|named_computation)</.test(line)) {
      open.push([indent, ++count]);
      row[5] += ` ${count}`;
    }
  }
}

// Marks a name wherever it means the same.
function sameName(span) {
  for (const other of document.querySelectorAll(".same")) other.classList.remove("same");
  const name = span.dataset && span.dataset.v;
  if (!name) return;
  for (const scope of span.closest(".row").dataset.scope.split(" ")) {
    const found = el("text").querySelectorAll(`[data-scope~="${scope}"] [data-v="${CSS.escape(name)}"]`);
    for (const other of found) other.classList.add("same");
  }
}
