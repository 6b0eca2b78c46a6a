// The list of steps, buttons and keys.

const LONG_OPTIONS = 80;    // characters of options shown unasked

function titleOf(step) {
  const [, name, options] = step.title.match(/^([^{]*)(\{[\s\S]*)?$/) || [, step.title, ""];
  return [name, options || ""];
}

function listSteps() {
  const target = el("steps"), wanted = el("filter").value.toLowerCase(), all = el("all").checked;
  target.replaceChildren();
  let phase = "";
  data.steps.forEach((step, i) => {
    if (!step.title.toLowerCase().includes(wanted)) return;
    if (!all && quiet(step) && step.outcome === "ran" && i !== state.step) return;
    if (step.phase && step.phase !== phase) {
      const head = document.createElement("h2");
      head.textContent = step.phase.replace(/^mpmd-/, "").replace(/-pipeline$/, "");
      target.append(head);
    }
    phase = step.phase || phase;
    const button = document.createElement("button"), name = document.createElement("span"), small = document.createElement("small");
    button.type = "button";
    button.title = step.title;
    button.className = step.outcome !== "ran" ? step.outcome : step.changed || isInput(step) ? "changed" : "";
    name.className = "name";
    name.textContent = titleOf(step)[0].replace(/^mpmd-/, "");
    if (step.changed) {
      small.innerHTML = `<span class="plus">+${step.count.new}</span> <span class="minus">−${step.count.gone}</span>`
        + (step.count.moved ? ` <span class="turn">↳${step.count.moved}</span>` : "");
    }
    if (step.ms !== undefined) small.append(` ${step.ms} ms`);
    if (step.outcome === "failed") small.textContent = "failed";
    button.append(name, small);
    button.setAttribute("aria-current", i === state.step);
    button.onclick = () => show(i);
    button.step = i;
    target.append(button);
  });
}

// Options that would take several lines are folded.
function showTitle(name, options) {
  const rest = document.createElement("i");
  rest.textContent = options;
  el("title").replaceChildren(name, rest);
  if (options.length <= LONG_OPTIONS) return;
  const button = document.createElement("button");
  const fold = folded => {
    rest.textContent = folded ? "{…}" : options;
    button.textContent = folded ? `${options.match(/=/g).length} options` : "fold";
    button.setAttribute("aria-expanded", !folded);
    button.onclick = () => fold(!folded);
  };
  button.type = "button";
  fold(true);
  el("title").append(button);
}

// Shows the next pass that the filter leaves in the list, or the one before; from the last, the first.
function nextListed(by) {
  const listed = [...el("steps").querySelectorAll("button")].map(button => button.step);
  if (!listed.length) return;
  const after = by > 0 ? listed.find(i => i > state.step) : listed.findLast(i => i < state.step);
  show(after ?? (by > 0 ? listed[0] : listed[listed.length - 1]));
}

function show(i) {
  state.step = Math.max(0, Math.min(data.steps.length - 1, i));
  state.all = false;
  state.wanted = "";
  const step = data.steps[state.step];
  const [name, options] = titleOf(step);
  showTitle(name, options);
  const about = data.abouts[step.about];
  el("summary").textContent = about.split("\n", 1)[0];
  el("why").textContent = step.why || "";
  el("about").textContent = about;
  el("about").parentElement.hidden = !about.includes("\n");
  el("position").textContent = `step ${state.step} of ${data.steps.length - 1}`;
  el("back").disabled = state.step === 0;
  el("next").disabled = state.step === data.steps.length - 1;
  let seen = null;
  for (const button of el("steps").querySelectorAll("button")) {
    const here = button.step === state.step;
    button.setAttribute("aria-current", here);
    if (here) seen = button;
  }
  if (!seen) { listSteps(); seen = el("steps").querySelector("[aria-current=true]"); }
  if (seen) seen.scrollIntoView({ block: "nearest" });
  showGraph(step);
  showKernels(step);
  showText(step);
  el("main").scrollTop = 0;
  history.replaceState(null, "", "#" + state.step);
}

// To the next step in a direction that changed something, failed, or is a new input; or to any.
function walk(by, any) {
  let i = state.step + by;
  while (!any && data.steps[i] && quiet(data.steps[i]) && data.steps[i].outcome !== "failed") i += by;
  if (data.steps[i]) show(i);
}

function toggle(name) {
  state[name] = !state[name];
  el(name).setAttribute("aria-pressed", state[name]);
  showText(data.steps[state.step]);
}

function theme() {
  const root = document.documentElement;
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
}

function openGap(button) {
  button.nextElementSibling.hidden = false;
  button.remove();
}

// With Ctrl; the time under the pointer stays there.
function zoomByWheel(event) {
  if (!event.ctrlKey) return;
  event.preventDefault();
  const slider = el("zoom"), scroll = el("scroll");
  const at = event.clientX - scroll.getBoundingClientRect().left, before = state.unit;
  slider.value = state.unit * 2 ** (-event.deltaY / (event.deltaMode ? 10 : 200));
  slider.oninput();
  scroll.scrollLeft = (scroll.scrollLeft + at) * state.unit / before - at;
}

function searchKey(event) {
  const by = event.shiftKey ? -1 : 1;
  if (event.key === "Escape") event.target.blur();
  else if (event.key === "Enter" && event.target.id === "filter") nextListed(by);
  else if (event.key === "Enter") findText(event.target.value, by);
  else return;
  event.preventDefault();
}

const KEYS = {
  s: () => toggle("split"), t: () => toggle("short"), w: () => toggle("wrap"), d: theme, u: () => el("unfold").click(),
  "/": () => el("filter").focus(), f: () => el("find").focus(), Home: () => show(0), End: () => show(data.steps.length - 1),
};

function begin() {
  el("file").textContent = data.title;
  document.title = `${data.title} · mpmd explorer`;
  if (matchMedia("(prefers-color-scheme: dark)").matches) document.documentElement.dataset.theme = "dark";
  const findings = el("findings");
  findings.hidden = !data.findings.length;
  if (data.findings.length) {
    const summary = document.createElement("summary"), pre = document.createElement("pre");
    summary.textContent = `${data.findings.length} finding${data.findings.length > 1 ? "s" : ""}`;
    pre.textContent = data.findings.join("\n");
    findings.append(summary, pre);
    findings.open = data.findings.some(text => /\berror\b/.test(text));
  }
  for (const name of ["split", "short", "wrap"]) {
    el(name).setAttribute("aria-pressed", state[name]);
    el(name).onclick = () => toggle(name);
  }
  el("theme").onclick = theme;
  el("back").onclick = event => walk(-1, event.shiftKey);
  el("next").onclick = event => walk(1, event.shiftKey);
  el("filter").oninput = el("all").onchange = listSteps;
  el("find").oninput = () => findText(el("find").value, 0);
  el("unfold").onclick = () => { state.all = !state.all; showText(data.steps[state.step]); };
  el("zoom").oninput = () => { state.unit = Number(el("zoom").value); showGraph(data.steps[state.step]); };
  el("text").onclick = event => {
    if (event.target.className === "gap") openGap(event.target);
    else sameName(event.target);
  };
  el("text").addEventListener("mouseover", showSource);
  el("text").addEventListener("mouseleave", () => { el("tip").hidden = true; });
  el("scroll").addEventListener("wheel", zoomByWheel, { passive: false });
  addEventListener("keydown", event => {
    if (event.target.type === "search") { searchKey(event); return; }
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.type === "range") return;
    if (event.key === "ArrowRight") walk(1, event.shiftKey);
    else if (event.key === "ArrowLeft") walk(-1, event.shiftKey);
    else if (KEYS[event.key]) KEYS[event.key]();
    else return;
    event.preventDefault();
  });
  addEventListener("hashchange", () => show(Number(location.hash.slice(1)) || 0));
  listSteps();
  show(Number(location.hash.slice(1)) || 0);
}

begin();
