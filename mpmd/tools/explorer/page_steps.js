"use strict";
// What the page shows, and what became of the lines in each step.

const data = JSON.parse(document.getElementById("data").textContent);
const el = id => document.getElementById(id);
const state = {
  step: 0, func: "", unit: 52, all: false, wanted: "", hit: null, fragment: "",
  split: false, short: true, wrap: true,
};

// Each step has the text that it left, as numbers of lines, and the rows that tell what became of each line.
(function unpack() {
  let lines = [], graphs = [], sources = [];
  for (const step of data.steps) {
    step.changed = Boolean(step.lines) && step.outcome === "ran" && lines.length > 0 && !isInput(step);
    if (!step.lines) {
      step.rows = null;
    } else {
      if (isInput(step)) { lines = []; sources = []; }
      [step.rows, lines] = rowsOf(step.lines, lines);
      sources = sourcesOf(step, sources);
      step.count = countOf(step.rows);
    }
    step.after = lines;
    step.from = sources;
    if (step.graphs) graphs = step.graphs;
    else if (isInput(step)) graphs = [];
    step.drawn = graphs;
  }
})();

function isInput(step) { return step.title === "input" || step.title === "traced"; }

// Rows are [kind, number of the old line or -1, of the new line or -1, its old place, its new place, scope].
function rowsOf(runs, before) {
  const rows = [], after = [];
  let i = 0;
  const came = (kind, id) => { after.push(id); rows.push([kind, -1, id, 0, after.length]); };
  for (const [sign, ...rest] of runs) {
    if (sign === "=") {
      for (let k = 0; k < rest[0]; k++) {
        const id = before[i++];
        after.push(id);
        rows.push(["=", id, id, i, after.length]);
      }
    } else if (sign === "-" || sign === "<") {
      for (let k = 0; k < rest[0]; k++) rows.push([sign, before[i], -1, ++i, 0]);
    } else if (sign === "~") {
      for (const id of rest) {
        const old = before[i++];
        after.push(id);
        rows.push(["~", old, id, i, after.length]);
      }
    } else {
      for (const id of rest) came(sign, id);
    }
  }
  return [rows, after];
}

// For each line of the text after a step the number of its source: the line's before, or what the step says.
function sourcesOf(step, before) {
  const after = [];
  for (const [kind, , , oldPlace, newPlace] of step.rows) {
    if (newPlace) after[newPlace - 1] = kind === "=" || kind === "~" ? before[oldPlace - 1] : -1;
  }
  for (let k = 0; k < step.sources.length; k += 2) after[step.sources[k]] = step.sources[k + 1];
  return after;
}

function countOf(rows) {
  const count = { new: 0, gone: 0, moved: 0 };
  for (const [kind] of rows) {
    if (kind === "+" || kind === "~") count.new++;
    if (kind === "-" || kind === "~") count.gone++;
    if (kind === ">") count.moved++;
  }
  return count;
}
