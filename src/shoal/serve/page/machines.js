// The machines as blocks: their layers, their memory, how fast they are.

let before = null;

function line(text) {
  const node = document.createElement("p");
  node.textContent = text;
  return node;
}

/** 1234567 → "1.2 MB" */
function bytes(count) {
  const power = Math.max(0, Math.min(4, Math.floor(Math.log10(Math.max(count, 1)) / 3)));
  return `${(count / 1000 ** power).toFixed(power > 1 ? 1 : 0)} ${["bytes", "kB", "MB", "GB", "TB"][power]}`;
}

function block(machine, moved) {
  const node = document.createElement("li");
  node.className = `machine${machine.alive ? "" : " dead"}${moved ? " busy" : ""}`;
  const name = document.createElement("strong");
  name.textContent = machine.name;
  node.append(name, line(machine.alive ? layers(machine) : machine.problem ?? "cannot be reached"));
  if (machine.alive) node.append(line(weights(machine)), line(speed(machine)));
  return node;
}

function layers(machine) {
  if (!machine.layers) return "all layers";
  const [first, last] = machine.layers;
  if (last < first) return machine.has_ends ? "embedding and output matrix" : "no layers: a spare";
  return `${first === last ? `layer ${first}` : `layers ${first} to ${last}`}${machine.has_ends ? ", embedding and output matrix" : ""}`;
}

function weights(machine) {
  const free = machine.memory_bytes ? `, ${bytes(machine.memory_bytes)} free when it came` : "";
  return `${(machine.parameters / 1e6).toFixed(1)} million weights, ${bytes(machine.weight_bytes)}${free}`;
}

function speed(machine) {
  return machine.token_s ? `${(1000 * machine.token_s).toFixed(1)} ms a token, ${machine.tokens.toLocaleString("en")} so far` : "no token yet";
}

/** Show the machines that the server reports, and the tokens that went through them since the last request. */
export function show(list, status) {
  if (before?.model !== status.model) before = null;
  const now = performance.now();
  const rate = before ? ((status.tokens - before.tokens) * 1000) / (now - before.now) : 0;
  const moved = (machine) => before !== null && machine.tokens > (before.of[machine.name] ?? machine.tokens);
  list.replaceChildren(...status.machines.map((machine) => block(machine, moved(machine))));
  before = { model: status.model, tokens: status.tokens, now, of: Object.fromEntries(status.machines.map((machine) => [machine.name, machine.tokens])) };
  const total = document.createElement("li");
  if (!status.machines.length) total.append(line("Not loaded: the first question loads this model."));
  const written = status.running === 1 ? "1 answer is written" : `${status.running} answers are written`;
  total.append(line(`${rate.toFixed(1)} tokens a second; ${written}, ${status.waiting} ${status.waiting === 1 ? "waits" : "wait"}`));
  list.append(total);
}

/** The server does not answer any more, or not without a key. */
export function showDead(list, problem) {
  before = null;
  list.replaceChildren(block({ name: "the server", alive: false, problem }, false));
}
