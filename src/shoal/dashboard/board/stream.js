// What the server tells: one stream of what changes, and a few files. The token is sent in a header, and never stands in an address.

const PAUSE_MS = 2000;

function headers(token) {
  return token ? { authorization: `Bearer ${token}` } : {};
}

export class Refused extends Error {}

/** Ask for something; Refused where the token is missing or wrong. */
export async function ask(path, token) {
  const response = await fetch(path, { headers: headers(token), cache: "no-store" });
  if (response.status === 401) throw new Refused("the token is missing or wrong");
  if (!response.ok) throw new Error(`the server answered ${response.status}`);
  return response;
}

/** Call `hear` with each message of the stream, for ever. `trouble` hears why nothing comes, and nothing where all is well again. */
export async function follow(token, hear, trouble) {
  for (;;) {
    try {
      const response = await ask("api/stream", token);
      trouble("");
      await read(response.body.getReader(), hear);
      trouble("the dashboard's server has ended");
    } catch (error) {
      if (error instanceof Refused) throw error;
      trouble("the dashboard's server does not answer; this is what it said last");
    }
    await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
  }
}

async function read(reader, hear) {
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
    for (const event of whole) if (event.startsWith("data: ")) hear(JSON.parse(event.slice(6)));
  }
}
