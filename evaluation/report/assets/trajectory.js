/* One trajectory: its chunk is inflated when it is first opened, then drawn as turns of messages and tokens. */

const chunks = new Map();

function inflate(number) {
  if (!chunks.has(number)) {
    const text = document.querySelectorAll("script.chunk")[number].textContent.trim();
    const bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    chunks.set(number, new Response(stream).json());
  }
  return chunks.get(number);
}

async function openRow(row) {
  current = row;
  for (const button of document.querySelectorAll(".row")) {
    if (button.dataset.id === row.id) button.setAttribute("aria-current", "true");
    else button.removeAttribute("aria-current");
  }
  const detail = byId("detail");
  try {
    const view = (await inflate(row.chunk))[row.place];
    if (current !== row) return;
    detail.replaceChildren(heading(row), siblings(row), stats(row, view), verdict(row, view), ...turns(row, view));
  } catch (error) {
    detail.replaceChildren(make("p", "empty", `This trajectory cannot be read: ${error.message}`));
  }
  detail.dataset.id = row.id;
  detail.scrollTop = 0;
}

function heading(row) {
  const header = make("header", row.tone);
  header.append(
    make("span", `pill ${row.outcome}`, row.outcome[0].toUpperCase() + row.outcome.slice(1)),
    make("h3", "", row.task),
    make("span", "tone", row.title),
    make("small", "", `${row.family} · trial ${row.trial}`),
  );
  return header;
}

function siblings(row) {
  const line = make("div", "siblings");
  const same = ROWS.filter((other) => other.task === row.task);
  if (same.length < 2) return line;
  line.append("Same task:");
  for (const label of new Set(same.map((other) => other.label))) {
    const group = make("span");
    const trials = same.filter((other) => other.label === label);
    group.append(trials[0].title);
    for (const other of trials.slice(0, 12)) {
      const pip = makeButton(`pip ${other.outcome}`, GLYPHS[other.outcome], () => openRow(other));
      pip.title = `${other.title}, trial ${other.trial}: ${other.outcome}`;
      if (other === row) pip.setAttribute("aria-current", "true");
      group.append(pip);
    }
    line.append(group);
  }
  return line;
}

function stat(name, value) {
  const span = make("span", "", `${name} `);
  span.append(make("b", "", value));
  return span;
}

function stats(row, view) {
  const line = make("div", "stats");
  const logprobs = view.turns.flatMap((turn) => turn.tokens.map((token) => token[1])).filter((p) => p !== null);
  line.append(stat("calls", row.calls), stat("tokens", row.tokens));
  if (logprobs.length) {
    const mean = logprobs.reduce((sum, p) => sum + p, 0) / logprobs.length;
    line.append(stat("mean logprob", signed(mean)));
  }
  if (view.seconds !== null) line.append(stat("seconds", view.seconds.toFixed(1)));
  line.append(stat("ended by", view.end_reason || "the agent"));
  return line;
}

function verdict(row, view) {
  const box = make("div", `verdict ${row.outcome}`);
  const reward = view.reward === null ? "No verdict" : `Reward ${view.reward}`;
  box.append(make("b", "", reward), make("span", "", ` ${view.failure || view.explanation}`));
  if (view.criteria.length) {
    const list = make("ul", "criteria");
    for (const [name, value] of view.criteria) list.append(make("li", "", `${value >= 1 ? "✓" : "✕"} ${name} ${value}`));
    box.append(list);
  }
  return box;
}

function turns(row, view) {
  const box = make("div", `turns ${row.tone}`);
  for (const turn of view.turns) {
    for (const message of turn.messages) box.append(messageNode(message, message.role, view));
    box.append(answerNode(turn));
  }
  if (view.calls_left_out) box.append(make("p", "note", `${view.calls_left_out} more calls are in the store.`));
  if (!view.turns.length) box.append(make("p", "empty", "No model call was recorded."));
  return view.turns.some((turn) => turn.tokens.length) ? [legend(), box] : [box];
}

function legend() {
  const line = make("div", "legend");
  line.append("sampled tokens: certain", make("i"), "unlikely");
  return line;
}

function frame(name, role) {
  const node = make("div", `msg ${name}`);
  const body = make("div", "body");
  node.append(make("div", "role", role), body);
  return [node, body];
}

function messageNode(message, role, view) {
  const known = ["system", "user", "assistant", "tool"].includes(role) ? role : "user";
  const [node, body] = frame(known, role);
  const text = make("div", "text", role === "tool" ? pretty(message.text) : message.text);
  if (role === "system") {
    const details = make("details");
    details.append(make("summary", "", `System prompt and ${view.tools.length} tools`), text, toolList(view.tools));
    body.append(details);
  } else {
    body.append(text);
  }
  if (message.cut) body.append(make("div", "under", `${message.cut} more characters are in the store`));
  body.append(...message.calls.map(callNode));
  return node;
}

function toolList(tools) {
  const list = make("ul", "tools");
  for (const [name, description] of tools) {
    const item = make("li");
    item.append(make("b", "", name), ` ${description}`);
    list.append(item);
  }
  return list;
}

function answerNode(turn) {
  const [node, body] = frame("assistant", "assistant");
  if (turn.tokens.length) {
    const line = make("div", "tokens");
    line.append(...turn.tokens.map(tokenNode));
    body.append(line);
  } else if (turn.answer && turn.answer.text) {
    body.append(make("div", "text", turn.answer.text));
  }
  if (turn.answer) {
    for (const call of turn.answer.calls) {
      const row = make("div");
      row.append(callNode(call));
      body.append(row);
    }
  }
  const under = make("div", "under", facts(turn).join(" · "));
  for (const note of turn.notes) under.append(make("span", "warn", ` · ${note}`));
  body.append(under);
  return node;
}

function facts(turn) {
  const out = [];
  if (turn.tokens.length) out.push(`${turn.tokens.length} tokens`);
  if (turn.seconds) out.push(`${turn.seconds.toFixed(2)} s`);
  if (turn.finish) out.push(`finish: ${turn.finish}`);
  if (turn.version) out.push(`weights v${turn.version}`);
  return out;
}

function tokenNode([text, logprob, id]) {
  const control = /^<\|.*\|>$|^<\/?(tool_call|tool_response|think)>$/.test(text);
  const node = make("span", control ? "control" : "", text === "" ? "▯" : text.replace(/^\n+$/, (all) => `↵${all}`));
  if (logprob !== null) {
    const chance = Math.exp(logprob);
    node.style.backgroundColor = `color-mix(in srgb, var(--heat) ${(78 * (1 - chance)).toFixed(1)}%, transparent)`;
    node.dataset.tip = `${(100 * chance).toFixed(chance < 0.01 ? 3 : 1)} % · logprob ${signed(logprob)} · id ${id}`;
  } else {
    node.dataset.tip = `id ${id}`;
  }
  return node;
}

function callNode(call) {
  const node = make("div", "call");
  node.append(make("b", "", call.name), make("span", "", call.arguments));
  return node;
}

function pretty(text) {
  if (!/^\s*[[{]/.test(text) || text.length > 4000) return text;
  try {
    return JSON.stringify(JSON.parse(text), null, 1).replace(/\n\s*/g, " ");
  } catch {
    return text; // not JSON: shown as it came
  }
}

function signed(value) {
  return value.toFixed(3).replace("-", "−");
}

if (ROWS.length) startList();
