// What the owner does from the page: pause the run, resume it, end it, keep a worker out, see how to join. The password for this is in the
// address that `shoal watch` printed, behind the #, and is sent in a header.

import { make } from "./words.js";

export class Owner {
  constructor(password, say) {
    this.password = password;
    this.say = say;
    this.allowed = false;
  }

  /** Ask the server whether this browser has the owner's password. */
  async checkAccess() {
    if (!this.password) return;
    const response = await fetch("api/owner", { headers: this.headers(), cache: "no-store" }).catch(() => null);
    this.allowed = Boolean(response?.ok);
  }

  headers() {
    const token = sessionStorage.getItem("token");
    return { "x-shoal-owner": this.password, ...(token ? { authorization: `Bearer ${token}` } : {}) };
  }

  /** The command with which workers join; null for others than the owner. */
  async invitation() {
    if (!this.allowed) return null;
    const response = await fetch("api/runs/0/invitation", { headers: this.headers(), cache: "no-store" }).catch(() => null);
    return response?.ok ? response.json() : null;
  }

  async send(action, name = null) {
    const headers = { ...this.headers(), "content-type": "application/json" };
    const response = await fetch("api/runs/0/orders", { method: "POST", headers, body: JSON.stringify({ action, name }) }).catch(() => null);
    const answer = await response?.json().catch(() => null);
    this.say(answer?.text ?? answer?.error ?? "the dashboard's server does not answer", !response?.ok);
  }

  /** Ask for confirmation, because another click cannot undo this. */
  stop() {
    if (confirm("Save the run and end it? It can go on later, with --resume.")) this.send("stop");
  }

  evict(name) {
    if (confirm(`Keep ${name} out of the run? What it contributed stays.`)) this.send("evict", name);
  }

  /** A button that evicts a worker. */
  evictButton(name) {
    const button = make("button", "small", "evict");
    button.type = "button";
    button.dataset.evict = name;
    button.setAttribute("aria-label", `Evict ${name}`);
    return button;
  }
}
