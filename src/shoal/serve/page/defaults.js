// The server's own values, shown in the fields of the settings that are empty.

const shownNumber = (value) => (value === null ? "off" : String(value));

/** Show what the server uses for an empty field. A decoding method has values of its own. */
export function showDefaults(form, defaults) {
  const fields = form.elements, chosen = fields.strategy.value || defaults.strategy;
  fields.strategy.options[0].textContent = `the server's: ${defaults.strategy}`;
  for (const [name, value] of Object.entries(defaults.strategies[chosen])) fields[name].placeholder = shownNumber(value);
  fields.max_tokens.placeholder = `${defaults.max_tokens} tokens`;
}
