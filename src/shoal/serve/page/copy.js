// Buttons that copy a text to the clipboard.

const SHOWN_MS = 2000;

/** Copy a text; false where the browser does not allow it. Browsers offer `navigator.clipboard` over https and on this machine only. */
async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  const box = document.createElement("textarea"), focused = document.activeElement;
  box.value = text;
  box.className = "skip";
  document.body.append(box);
  box.select();
  const copied = document.execCommand("copy");
  box.remove();
  focused?.focus();
  return copied;
}

/** A button that copies what `textOf` returns when it is pressed. */
export function copyButton(label, textOf) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = "Copy";
  button.setAttribute("aria-label", label);
  button.onclick = async () => {
    const copied = await copy(textOf());
    button.textContent = copied ? "Copied" : "The browser refused: select the text";
    setTimeout(() => { button.textContent = "Copy"; }, SHOWN_MS);
  };
  return button;
}
