// Blocks of Markdown, as the gateway parsed them, as elements. Each is made by name, and text goes in as text.

import { copyButton, element } from "./dom.js";

/** A block's element. `marked(text)` gives the nodes that a piece of its text becomes. */
export function built(node, marked) {
  if (typeof node === "string") return marked(node);
  const children = node.children.flatMap((child) => built(child, marked));
  switch (node.tag) {
    case "pre":
      return [code(node, children)];
    case "table":
      return [element("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "Table" }, element("table", {}, ...children))];
    case "a":
      return [element("a", { href: node.href, title: node.href, target: "_blank", rel: "noopener noreferrer" }, ...children)];
    case "ol":
      return [element("ol", { start: node.start }, ...children)];
    case "th":
    case "td":
      return [element(node.tag, node.align ? { class: node.align } : {}, ...children)];
    default:
      return [element(node.tag, {}, ...children)];
  }
}

function code({ language, children: [text] }, children) {
  const label = language || "code";
  const head = element("figcaption", {}, element("span", {}, label), copyButton(() => text, `Copy this ${label}`));
  return element("figure", { class: "code" }, head, element("pre", { tabindex: "0" }, element("code", {}, ...children)));
}

/** Index of the first character of each line of a text, and of its end. */
export function lineBegins(text) {
  return [0, ...Array.from(text.matchAll(/\r\n?|\n/g), (found) => found.index + found[0].length), text.length];
}
