// Runs the script of an explorer page on a document just good enough for it: node page_driver.js PAGE
// Goes through every step in every way of showing it; prints what was shown as one JSON object.
"use strict";
const fs = require("fs");
const vm = require("vm");

class Element {
  constructor(tag) {
    Object.assign(this, { tag, children: [], attributes: {}, style: {}, dataset: {}, text: "", listeners: {} });
    const classes = new Set();
    this.classList = { add: c => classes.add(c), remove: c => classes.delete(c), has: c => classes.has(c), contains: c => classes.has(c) };
  }
  set textContent(text) { this.text = String(text); this.children = []; }
  get textContent() { return this.text + this.children.map(c => (typeof c === "string" ? c : c.textContent)).join(""); }
  set innerHTML(text) { this.html = text; }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  append(...more) { for (const m of more) { if (m instanceof Element) m.parent = this; this.children.push(m); } }
  replaceChildren(...more) { this.children = []; this.text = ""; this.append(...more); }
  replaceWith(...more) {
    const at = this.parent.children.indexOf(this);
    for (const m of more) m.parent = this.parent;
    this.parent.children.splice(at, 1, ...more);
  }
  get parentElement() { return this.parent || new Element("none"); }
  addEventListener(name, listener) { this.listeners[name] = listener; }
  insertRow() { const row = new Element("tr"); this.append(row); return row; }
  insertCell() { const cell = new Element("td"); this.append(cell); return cell; }
  getBoundingClientRect() { return { width: 100, height: 40, top: 0 }; }
  scrollIntoView() {}
  click() { if (this.onclick) this.onclick({ shiftKey: false }); }
  focus() {}
  all() { return this.children.filter(c => c instanceof Element).flatMap(c => [c, ...c.all()]); }
  querySelectorAll(selector) {
    if (selector === "button") return this.all().filter(c => c.tag === "button");
    if (selector === ".fold") return this.all().filter(c => c.className === "fold");
    return [];
  }
  querySelector(selector) {
    if (selector === "[aria-current=true]") return this.all().find(c => c.attributes["aria-current"] === "true") || null;
    const line = selector.match(/^\[data-line="(\d+)"\]$/);
    if (!line) return null;
    const found = this.all().find(c => (c.html || "").includes(` data-line="${line[1]}"`));
    return found || null;
  }
}

const page = fs.readFileSync(process.argv[2], "utf8");
const known = Object.fromEntries([...page.matchAll(/ id="([\w-]+)"/g)].map(m => [m[1], new Element("div")]));
known.data.textContent = page.match(/<script type="application\/json" id="data">([\s\S]*?)<\/script>/)[1];
Object.assign(known.filter, { value: "" });
Object.assign(known.all, { checked: true });
Object.assign(known.zoom, { value: "52" });
const listeners = {};
const document = {
  documentElement: new Element("html"),
  getElementById: id => known[id] || (() => { throw new Error("no element " + id); })(),
  createElement: tag => new Element(tag),
  createElementNS: (_, tag) => new Element(tag),
  querySelectorAll: () => [],
};
const shown = [];
const world = {
  document, console, JSON, Math, Number, Set, Map, CSS: { escape: text => text }, requestAnimationFrame: done => done(), innerWidth: 1000, innerHeight: 800,
  matchMedia: () => ({ matches: true }), location: { hash: "" }, history: { replaceState: () => {} },
  addEventListener: (name, listener) => { listeners[name] = listener; },
};
vm.createContext(world);
vm.runInContext(page.match(/<script>\n([\s\S]*?)\n<\/script>/)[1], world);

const press = (key, shiftKey) => listeners.keydown({ key, shiftKey, target: {}, preventDefault() {} });
const htmlOf = element => element.all().map(c => c.html || "").join("");
const steps = JSON.parse(known.data.textContent).steps.length;
press("Home");
for (let i = 0; i < steps; i++) {
  const seen = { position: known.position.textContent, html: htmlOf(known.text) };
  const marks = known.scroll.all().filter(c => c.listeners.mouseenter);
  seen.boxes = known.scroll.all().filter(c => c.tag === "g" && (c.attributes.class || "").startsWith("box")).length;
  seen.wires = known.scroll.all().filter(c => c.attributes.class === "transfer").length;
  seen.lanes = known.lanes.children.map(c => c.textContent);
  seen.tips = marks.slice(0, 3).map(mark => {
    mark.listeners.mouseenter({ clientX: 1, clientY: 1 });
    const tip = known.tip.textContent;
    mark.listeners.mouseleave();
    return tip;
  });
  if (seen.html && marks.length) marks[0].listeners.click();
  if (seen.html) for (const key of ["s", "t", "u", "u", "t", "s", "w", "w", "d"]) press(key);
  for (const fold of known.text.querySelectorAll(".fold")) fold.click();
  seen.unfolded = htmlOf(known.text);
  for (const tab of known.functions.children) tab.click();
  shown.push(seen);
  press("ArrowRight", true);
}
for (let i = 0; i < steps; i++) press("ArrowLeft", false);
process.stdout.write(JSON.stringify({ shown, back: known.position.textContent, list: known.steps.all().length }));
