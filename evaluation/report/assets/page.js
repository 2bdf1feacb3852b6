"use strict";
/* The page: theme, tooltips, filters and the list of trajectories. What models wrote is only ever put into
   textContent; nothing is parsed as HTML. */

const byId = (id) => document.getElementById(id);

function make(tag, name, text) {
  const node = document.createElement(tag);
  if (name) node.className = name;
  if (text !== undefined) node.textContent = text;
  return node;
}

function makeButton(name, text, onClick) {
  const button = make("button", name, text);
  button.type = "button";
  button.addEventListener("click", onClick);
  return button;
}

/* -- theme and tooltips */

byId("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});

const tip = byId("tip");

function showTip(event) {
  const target = event.target instanceof Element ? event.target.closest("[data-tip]") : null;
  tip.hidden = !target;
  if (!target) return;
  tip.textContent = target.dataset.tip;
  const box = tip.getBoundingClientRect();
  const left = Math.min(event.clientX + 14, innerWidth - box.width - 8);
  const below = event.clientY + 18;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${below + box.height > innerHeight ? event.clientY - box.height - 12 : below}px`;
}

document.addEventListener("pointermove", showTip);
document.addEventListener("pointerleave", () => { tip.hidden = true; });

/* -- trajectories: index, filters, list */

const ROWS = JSON.parse(byId("index").textContent);
const GLYPHS = { passed: "✓", failed: "✕", dropped: "–" };
const PAGE = 200;
const filter = { label: "", outcome: "", family: "", task: "" };
let shown = PAGE;
let current = null;

function matches(row) {
  return (!filter.label || row.label === filter.label)
    && (!filter.outcome || row.outcome === filter.outcome)
    && (!filter.family || row.family === filter.family)
    && (!filter.task || row.task.toLowerCase().includes(filter.task.toLowerCase()));
}

function rowButton(row) {
  const button = makeButton(`row ${row.tone}`, undefined, () => openRow(row));
  button.dataset.id = row.id;
  button.dataset.label = row.label;
  button.dataset.family = row.family;
  button.dataset.outcome = row.outcome;
  if (row === current) button.setAttribute("aria-current", "true");
  button.append(
    make("span", `glyph ${row.outcome}`, GLYPHS[row.outcome]),
    make("span", "task", row.task),
    make("span", "who", row.title),
    make("span", "meta", `${row.family} · trial ${row.trial}`),
    make("span", "len", `${row.calls} ${row.calls === 1 ? "call" : "calls"} · ${row.tokens} tok`),
  );
  button.setAttribute("aria-label", `${row.task}, ${row.title}, trial ${row.trial}, ${row.outcome}`);
  return button;
}

function renderList() {
  const found = ROWS.filter(matches);
  const list = byId("list");
  list.replaceChildren(...found.slice(0, shown).map(rowButton));
  if (found.length > shown) {
    list.append(makeButton("more", `${found.length - shown} more`, () => { shown += PAGE; renderList(); }));
  }
  if (!found.length) list.append(make("p", "empty", "No trajectory fits these filters."));
  byId("count").textContent = `${found.length} of ${ROWS.length}`;
  byId("clear").hidden = !Object.values(filter).some(Boolean);
  for (const key of ["label", "outcome"]) {
    for (const button of document.querySelectorAll(`.seg[data-key="${key}"]`)) {
      button.setAttribute("aria-pressed", String(button.dataset.value === filter[key]));
    }
  }
  byId("filter-family").value = filter.family;
  if (byId("filter-task").value !== filter.task) byId("filter-task").value = filter.task;
}

function setFilter(changes) {
  Object.assign(filter, changes);
  shown = PAGE;
  renderList();
  byId("list").scrollTop = 0;
}

function segment(fieldset, key, options) {
  for (const [value, text, tone] of [["", "All", ""], ...options]) {
    const button = makeButton(`seg ${tone}`, undefined, () => setFilter({ [key]: value }));
    button.dataset.key = key;
    button.dataset.value = value;
    if (tone) button.append(make("i", "swatch"));
    button.append(text);
    fieldset.append(button);
  }
}

function startList() {
  const models = new Map(ROWS.map((row) => [row.label, [row.label, row.title, row.tone]]));
  const order = ["base", "sft", "rl"].filter((label) => models.has(label));
  const labels = [...order, ...[...models.keys()].filter((label) => !order.includes(label))];
  segment(byId("filter-model"), "label", labels.map((label) => models.get(label)));
  const outcomes = ["passed", "failed", "dropped"].filter((o) => ROWS.some((row) => row.outcome === o));
  segment(byId("filter-outcome"), "outcome", outcomes.map((o) => [o, o[0].toUpperCase() + o.slice(1), ""]));
  const select = byId("filter-family");
  for (const family of ["", ...[...new Set(ROWS.map((row) => row.family))].sort()]) {
    const option = make("option", "", family || "All");
    option.value = family;
    select.append(option);
  }
  select.addEventListener("change", () => setFilter({ family: select.value }));
  byId("filter-task").addEventListener("input", (event) => setFilter({ task: event.target.value }));
  byId("clear").addEventListener("click", () => setFilter({ label: "", outcome: "", family: "", task: "" }));
  byId("list").addEventListener("keydown", moveByKey);
  for (const cell of document.querySelectorAll("button.cell")) {
    cell.addEventListener("click", () => {
      setFilter({ label: "", outcome: "", family: "", task: cell.dataset.task });
      const row = ROWS.find((r) => r.task === cell.dataset.task && r.label === cell.dataset.label);
      if (row) openRow(row);
      byId("trajectories").scrollIntoView();
    });
  }
  renderList();
  const teachers = labels.filter((label) => label !== "teacher");
  const best = teachers[teachers.length - 1];
  const first = ROWS.find((row) => row.label === best && row.outcome === "passed") || ROWS[0];
  if (first) openRow(first);
}

function moveByKey(event) {
  const step = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1 }[event.key];
  if (!step) return;
  const rows = [...byId("list").querySelectorAll(".row")];
  const next = rows[rows.indexOf(document.activeElement) + step];
  if (next) {
    event.preventDefault();
    next.focus();
    next.click();
  }
}
