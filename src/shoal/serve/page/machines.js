// The machines as blocks: their layers, their memory, how fast they are.

let before = null;

function line(text) {
  const node = document.createElement("p");
  node.textContent = text;
  return node;
}

function block(machine) {
  const node = document.createElement("li");
  node.className = machine.alive ? "machine" : "machine dead";
  const name = document.createElement("strong");
  name.textContent = machine.name;
  const idle = machine.layers && machine.layers[1] < machine.layers[0];
  const layers = idle ? "no layers" : machine.layers ? `layers ${machine.layers[0]} to ${machine.layers[1]}` : "all layers";
  node.append(name, line(machine.alive ? layers : "cannot be reached"), line(`${(machine.parameters / 1e6).toFixed(1)} million weights`));
  return node;
}

/** Show what the server tells of its machines, and how many tokens went through them since it was asked last. */
export function show(list, status) {
  const now = performance.now();
  const speed = before ? ((status.tokens - before.tokens) * 1000) / (now - before.now) : 0;
  before = { tokens: status.tokens, now };
  list.replaceChildren(...status.machines.map(block));
  const total = document.createElement("li");
  total.append(line(`${speed.toFixed(1)} tokens a second; ${status.running} answers are written, ${status.waiting} wait`));
  list.append(total);
}

/** The server itself does not answer any more. */
export function showDead(list) {
  before = null;
  list.replaceChildren(block({ name: "the server", alive: false, parameters: 0 }));
}
