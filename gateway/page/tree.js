// The tree of a round: which nodes are drawn and where, and the tree in words.

import { inWords, letters } from "./drafters.js";
import { element, quoted, shape, visible } from "./dom.js";

const MOST_NODES = 24;
const MOST_SIGNS = 12; // characters of a token's text in a box
const SIGN = 6.8; // pixels: the width of a character in the font that page.css gives the boxes
const BOX = { height: 22, padding: 7, least: 30, letter: 6 };
const STEP = { x: 18, y: 29 }; // between boxes; from row to row
const MARGIN = 4;

/** Returns the root of a round's tree; a node is {text, state, drafter, chance, children}. */
export function grown(round) {
  const accepted = new Set(round.accepted);
  const nodes = round.parents.map((parent, index) => ({
    index,
    parent,
    text: round.texts[index],
    state: accepted.has(index) ? "accepted" : "rejected",
    drafter: round.drafters[index],
    chance: Math.exp(round.scores[index]),
    children: [],
  }));
  // A path's score is the sum of its edges' scores. Parents come before their children.
  for (const node of nodes) node.path = round.scores[node.index] + (nodes[node.parent]?.path ?? 0);
  const root = { text: round.root, state: "root", drafter: null, children: [], numHidden: 0 };
  const kept = likeliest(nodes);
  for (const node of kept) (node.parent < 0 ? root : nodes[node.parent]).children.push(node);
  root.numHidden = nodes.length - kept.length;
  if (round.bonus) {
    const last = round.accepted.length ? nodes[round.accepted.at(-1)] : root;
    last.children.push({ text: round.bonus.text, state: "bonus", drafter: null, children: [] });
  }
  order(root);
  return root;
}

/** Picks at most MOST_NODES nodes, more only if accepted: those first, then the likeliest. A node comes with its parents. */
function likeliest(nodes) {
  if (nodes.length <= MOST_NODES) return nodes;
  const ranked = [...nodes].sort((a, b) => (b.state === "accepted") - (a.state === "accepted") || b.path - a.path);
  const kept = new Set();
  for (const node of ranked) {
    const line = [];
    for (let at = node; at && !kept.has(at); at = nodes[at.parent]) line.push(at);
    if (kept.size + line.length <= MOST_NODES || node.state === "accepted") line.forEach((each) => kept.add(each));
  }
  return nodes.filter((node) => kept.has(node));
}

/** Sorts children: the committed one comes first, so that the committed path runs along the top. */
function order(node) {
  const rank = { accepted: 0, bonus: 0, rejected: 1 };
  node.children.sort((a, b) => rank[a.state] - rank[b.state] || (b.chance ?? 0) - (a.chance ?? 0));
  node.children.forEach(order);
}

/** Places nodes: a column for each depth, a row for each leaf. Returns {nodes: [{node, parent, x, y, width}], width, height}. */
function placed(root) {
  const nodes = [];
  const columns = []; // the width of each column, that of its widest box
  let rows = 0;
  const place = (node, parent, depth) => {
    const item = { node, parent, depth, y: MARGIN + rows * STEP.y };
    nodes.push(item);
    columns[depth] = Math.max(columns[depth] ?? BOX.least, boxWidth(node));
    node.children.forEach((child) => place(child, item, depth + 1));
    if (!node.children.length) rows += 1;
  };
  place(root, null, 0);
  const begins = [MARGIN];
  columns.forEach((width, depth) => begins.push(begins[depth] + width + STEP.x));
  for (const item of nodes) [item.x, item.width] = [begins[item.depth], columns[item.depth]];
  return { nodes, width: begins.at(-1) - STEP.x + MARGIN, height: 2 * MARGIN + (rows - 1) * STEP.y + BOX.height };
}

function boxWidth(node) {
  return Array.from(label(node)).length * SIGN + 2 * BOX.padding + (node.drafter ? (letters(node.drafter).length + 1) * BOX.letter : 0);
}

/** Returns the drawing of a round's tree and its caption, as a figure. */
export function drawn(round) {
  const root = grown(round);
  const { nodes, width, height } = placed(root);
  const caption = element("figcaption", { id: `round-${round.number}-caption` }, summary(round));
  const picture = shape("svg", { role: "img", "aria-labelledby": caption.id, width, height, viewBox: `0 0 ${width} ${height}` });
  picture.append(...nodes.filter((item) => item.parent).map(edge), ...nodes.map(box));
  const figure = element("figure", { class: "round", "data-round": round.number - 1 }, caption, picture);
  if (root.numHidden) figure.append(element("p", { class: "hint" }, `${root.numHidden} less likely nodes are not drawn`));
  return figure;
}

function edge({ node, parent, x, y }) {
  const middle = BOX.height / 2;
  const [from, to] = [parent.x + parent.width, x];
  const bend = (from + to) / 2;
  const path = `M${from} ${parent.y + middle}C${bend} ${parent.y + middle} ${bend} ${y + middle} ${to} ${y + middle}`;
  return shape("path", { class: `edge ${node.state}`, d: path });
}

const SIGNS = { accepted: "✓", bonus: "+", root: "", rejected: "" };

/** Returns the text in a node's box. */
function label(node) {
  if (node.state === "root" && node.text === null) return "prompt";
  return SIGNS[node.state] + visible(node.text, MOST_SIGNS);
}

function box({ node, x, y, width }) {
  const group = shape("g", { class: `node ${node.state}`, transform: `translate(${x} ${y})` });
  group.append(shape("title", {}, describe(node)), shape("rect", { width, height: BOX.height, rx: 5 }));
  group.append(shape("text", { x: BOX.padding, y: 15 }, label(node)));
  if (node.drafter) group.append(shape("text", { class: "by", x: width - 5, y: 15 }, letters(node.drafter)));
  return group;
}

function describe(node) {
  if (node.state === "root") return node.text === null ? "root: the prompt's last token" : `root: ${quoted(node.text)}`;
  if (node.state === "bonus") return `${quoted(node.text)}, the model's own token`;
  return `${quoted(node.text)}, ${node.state}, guessed by ${inWords(node.drafter)} at ${(100 * node.chance).toFixed(0)} %`;
}

/** Describes a round in a sentence. */
export function summary(round) {
  const all = round.parents.length;
  const own = round.bonus ? `the model's own ${quoted(round.bonus.text)}` : "nothing of the model's own";
  if (!all) return `Round ${round.number}: no guesses; ${own}`;
  return `Round ${round.number}: ${round.accepted.length} of ${all} guesses accepted, then ${own}`;
}

/** Returns the tree as nested lists. */
export function asText(round) {
  const list = (nodes) => {
    const items = nodes.map((node) => element("li", {}, describe(node), ...(node.children.length ? [list(node.children)] : [])));
    return element("ul", {}, ...items);
  };
  const root = grown(round);
  const parts = [element("p", {}, `${summary(round)}.`), list([root])];
  if (root.numHidden) parts.push(element("p", {}, `${root.numHidden} less likely nodes are left out.`));
  return parts;
}
