// The choice of a model, where the server has several.

import { loadModel, saveModel } from "./store.js";

const list = document.getElementById("models");
let chosen = loadModel();

/** The name that the user has chosen; empty: none. */
export const chosenModel = () => chosen;

/** The server does not have the chosen model any more. */
export function forgetModel() {
  chosen = "";
  saveModel(chosen);
}

/** Show the models that the server reports. One that is not in memory is loaded by the first question. */
export function showModels(status) {
  const several = status.models.length > 1;
  document.getElementById("choice").hidden = !several;
  document.getElementById("model").textContent = several ? "Shoal" : status.model;
  const entries = status.models.map(({ id, loaded }) => new Option(loaded ? id : `${id} (not loaded)`, id));
  const same = entries.length === list.options.length && entries.every((entry, at) => entry.isEqualNode(list.options[at]));
  if (!same) list.replaceChildren(...entries); // an open list stays as it is
  list.value = status.model;
}

list.addEventListener("change", () => {
  chosen = list.value;
  saveModel(chosen);
  list.dispatchEvent(new CustomEvent("chosen", { bubbles: true }));
});
