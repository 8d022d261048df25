// What the owner does from the page: hold the run up, let it go on, end it, keep a worker out. The word that allows it stands in the
// address that `shoal watch` printed, behind the #, and is sent in a header.

import { make } from "./words.js";

export class Owner {
  constructor(word, say) {
    this.word = word;
    this.say = say;
    this.may = false;
  }

  /** Ask whether this browser may give orders. */
  async knock() {
    if (!this.word) return;
    const response = await fetch("api/owner", { headers: this.headers(), cache: "no-store" }).catch(() => null);
    this.may = Boolean(response?.ok);
  }

  headers() {
    const token = sessionStorage.getItem("token");
    return { "x-shoal-owner": this.word, ...(token ? { authorization: `Bearer ${token}` } : {}) };
  }

  async order(action, name = null) {
    const headers = { ...this.headers(), "content-type": "application/json" };
    const response = await fetch("api/runs/0/orders", { method: "POST", headers, body: JSON.stringify({ action, name }) }).catch(() => null);
    const told = await response?.json().catch(() => null);
    this.say(told?.text ?? told?.error ?? "the dashboard's server does not answer", !response?.ok);
  }

  /** Ask first where it cannot be undone by another click. */
  stop() {
    if (confirm("Save the run and end it? It can go on later, with --resume.")) this.order("stop");
  }

  evict(name) {
    if (confirm(`Keep ${name} out of the run? What it contributed stays.`)) this.order("evict", name);
  }

  /** A button that shows a worker out, for those who may. */
  door(name) {
    const button = make("button", "small", "evict");
    button.type = "button";
    button.dataset.evict = name;
    button.setAttribute("aria-label", `Evict ${name}`);
    return button;
  }
}
