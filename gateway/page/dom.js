// Elements. Text is added as text, never as markup: what a model writes must not become part of the page.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** Makes an HTML element with attributes and children; a child that is a string becomes text. */
export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

/** Makes an SVG element, likewise. */
export function shape(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const MOST_QUOTED = 40;

/** Returns a token's text in at most `limit` characters, with visible signs for spaces, breaks and the empty text. */
export function visible(text, limit) {
  return shortened(breaksShown(text).replaceAll(" ", "␣"), limit) || "∅";
}

/** Quotes a token's text for sentences. The token that ends an answer has no text, nor has part of a character. */
export function quoted(text) {
  return text ? `“${shortened(breaksShown(text), MOST_QUOTED)}”` : "token without text";
}

const breaksShown = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥");

function shortened(text, limit) {
  const characters = Array.from(text);
  return characters.length > limit ? `${characters.slice(0, limit - 1).join("")}…` : text;
}

/** Returns a function that calls `work` before the next paint: once, however often the function is called. */
export function beforePaint(work) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      work();
    });
  };
}

const COPIED_MS = 2000;

/** Makes a button that copies what `text()` returns; `label` describes it to screen readers. */
export function copyButton(text, label) {
  const button = element("button", { type: "button", class: "quiet small", "aria-label": label }, "Copy");
  button.addEventListener("click", async () => {
    const done = (await copied(text())) ? "Copied" : "Not copied";
    button.textContent = done;
    button.setAttribute("aria-label", done);
    setTimeout(() => {
      button.textContent = "Copy";
      button.setAttribute("aria-label", label);
    }, COPIED_MS);
  });
  return button;
}

/** Copies a text to the clipboard; resolves to whether it did. Browsers have the newer API only on secure origins. */
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = element("textarea", { class: "hidden", "aria-hidden": "true" });
    const before = document.activeElement;
    field.value = text;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    before?.focus();
    return done;
  }
}
