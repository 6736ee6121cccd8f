// Makes elements of the Markdown blocks that the gateway parsed: each by its name, with text added as text.

import { copyButton, element } from "./dom.js";

const DIRECTED = new Set(["p", "h4", "h5", "h6", "blockquote", "li", "th", "td"]);

/**
 * Makes a block's nodes. `marked(text)` returns the nodes for a piece of its text. The direction of a block follows its
 * first letter; paragraphs `within` a list item or a quotation follow that of the whole.
 */
export function built(node, marked, within = false) {
  if (typeof node === "string") return marked(node);
  const holds = node.tag === "li" || node.tag === "blockquote";
  const children = node.children.flatMap((child) => built(child, marked, holds));
  const direction = DIRECTED.has(node.tag) && !(within && node.tag === "p") ? { dir: "auto" } : {};
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
      return [element(node.tag, { ...direction, ...(node.align ? { class: node.align } : {}) }, ...children)];
    case "code":
      return [element("code", { dir: "ltr" }, ...children)];
    default:
      return [element(node.tag, direction, ...children)];
  }
}

function code({ language, children: [text] }, children) {
  const label = language || "code";
  const head = element("figcaption", {}, element("span", {}, label), copyButton(() => text, `Copy this ${label}`));
  return element("figure", { class: "code", dir: "ltr" }, head, element("pre", { tabindex: "0" }, element("code", {}, ...children)));
}

/** Returns the index of the first character of each line of a text, and the index of its end. */
export function lineBegins(text) {
  return [0, ...Array.from(text.matchAll(/\r\n?|\n/g), (found) => found.index + found[0].length), text.length];
}
