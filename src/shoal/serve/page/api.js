// Requests of the page to the server.

const NUMBERS = ["temperature", "top_k", "top_p", "max_tokens", "seed"];

function headers(key) {
  if (/[^\x20-\xff]/.test(key)) throw new Error("the key is wrong: it has characters that no key can have");
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

/** The server refuses the key, or the lack of one. */
export class KeyError extends Error {
  constructor(message) {
    super(`${message.split(":")[0]}: type it into the field Key, the last of the settings`);
  }
}

/** The server refuses the request as it stands, for example a question that is too long for the model. */
export class RefusedError extends Error {}

async function failure(response) {
  const body = await response.json().catch(() => ({}));
  const message = body.error?.message ?? `the server answered ${response.status}`;
  if (response.status === 401) return new KeyError(message);
  return response.status < 500 ? new RefusedError(message) : new Error(message);
}

/** Of a model, or of the first where the name is empty. */
export async function status(key, model) {
  const query = model ? `?model=${encodeURIComponent(model)}` : "";
  const response = await fetch(`v1/status${query}`, { headers: headers(key) });
  if (!response.ok) throw await failure(response);
  return response.json();
}

function body(model, turns, settings) {
  const asked = { model, stream: true, messages: turns.map(({ role, content }) => ({ role, content })) };
  if (settings.system) asked.messages.unshift({ role: "system", content: settings.system });
  if (settings.strategy) asked.strategy = settings.strategy;
  for (const name of NUMBERS) if (settings[name]) asked[name] = Number(settings[name]);
  return JSON.stringify(asked);
}

/** The pieces of an answer as they come: its next letters, and in the last piece why it ends. `signal` ends it. */
export async function* answer(model, turns, settings, signal) {
  const request = { method: "POST", headers: headers(settings.key), body: body(model, turns, settings), signal };
  const response = await fetch("v1/chat/completions", request);
  if (!response.ok) throw await failure(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (waiting + value).split("\n\n");
    waiting = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const message = JSON.parse(data);
      if (message.error) throw new Error(message.error.message);
      yield { text: message.choices[0]?.delta.content ?? "", reason: message.choices[0]?.finish_reason };
    }
  }
}
