// Requests to the server: one stream of changes, and a few files. The token is sent in a header, never in an address.

const PAUSE_MS = 2000;

function headers(token) {
  return token ? { authorization: `Bearer ${token}` } : {};
}

export class Refused extends Error {}

/** Characters that no header can hold, so no token has them. */
const IMPOSSIBLE = /[^\x20-\xff]/;

/** Ask for something; Refused where the token is missing or wrong. */
export async function ask(path, token) {
  const response = IMPOSSIBLE.test(token) ? { status: 401 } : await fetch(path, { headers: headers(token), cache: "no-store" });
  if (response.status === 401) throw new Refused(token ? "the token is wrong" : "a token is needed");
  if (!response.ok) throw new Error(`the server answered ${response.status}`);
  return response;
}

/** Call `onMessage` with each message of the stream, for ever. `onTrouble` receives the reason for an interruption, or "" once the stream is back. */
export async function follow(token, onMessage, onTrouble) {
  for (;;) {
    try {
      const response = await ask("api/stream", token);
      onTrouble("");
      await read(response.body.getReader(), onMessage);
      onTrouble("the dashboard's server has ended");
    } catch (error) {
      if (error instanceof Refused) throw error;
      onTrouble("the dashboard's server does not answer; the page shows the last state it received");
    }
    await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
  }
}

async function read(reader, onMessage) {
  const decoder = new TextDecoder();
  const parts = [];
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const text = decoder.decode(value, { stream: true });
    parts.push(text);
    if (!text.includes("\n\n") && !text.endsWith("\n")) continue;
    const whole = parts.join("").split("\n\n");
    parts.length = 0;
    parts.push(whole.pop());
    for (const event of whole) if (event.startsWith("data: ")) onMessage(JSON.parse(event.slice(6)));
  }
}
