// Conversations and settings, kept in this browser and nowhere else. The key is forgotten with the tab.

const CONVERSATIONS = "shoal.conversations", SETTINGS = "shoal.settings", KEY = "shoal.key", MODEL = "shoal.model";

function read(storage, name, otherwise) {
  try {
    return JSON.parse(storage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function write(storage, name, value) {
  try {
    storage.setItem(name, JSON.stringify(value));
  } catch {
    // The browser's storage is full or disabled: the conversation continues unsaved.
  }
}

export function loadConversations() {
  const found = read(localStorage, CONVERSATIONS, []);
  return Array.isArray(found) && found.length ? found : [newConversation()];
}

export const loadModel = () => String(read(localStorage, MODEL, ""));
export const saveModel = (name) => write(localStorage, MODEL, name);
export const newConversation = () => ({ turns: [] });
export const saveConversations = (all) => write(localStorage, CONVERSATIONS, all);
export const loadSettings = () => ({ ...read(localStorage, SETTINGS, {}), key: read(sessionStorage, KEY, "") });

export function saveSettings({ key, ...others }) {
  write(localStorage, SETTINGS, others);
  write(sessionStorage, KEY, key);
}
