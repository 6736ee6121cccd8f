// The column that watches one answer: figures, charts, and the trees of its latest rounds.

import { asText, drawn } from "./tree.js";
import { inWords, letters } from "./drafters.js";
import { beforePaint, byId, element, shape } from "./dom.js";

const TREES = 3;
const BARS = 60;
const FEWEST = 20; // a chart has room for this many before it grows denser
const HEIGHT = 48;
const CLIP = 2.5; // times the median: faster rates are spikes, from pieces that came at once, and would flatten the rest

export class Watch {
  constructor() {
    this.answer = null;
    this.rates = [];
    this.selected = null; // index of the newest round shown; null follows the latest
    this.refresh = beforePaint(() => this.#paint());
    byId("older").addEventListener("click", () => this.#select(this.#last() - 1));
    byId("newer").addEventListener("click", () => this.#select(this.#last() + 1));
    byId("live").addEventListener("click", () => this.#select(null));
    byId("as-text").addEventListener("toggle", () => this.refresh());
  }

  /** Starts to watch another answer. */
  follow(answer) {
    this.answer = answer;
    this.rates = [];
    this.selected = null;
    byId("trees").replaceChildren();
    this.refresh();
  }

  /** Notes that the answer has grown. */
  grew() {
    this.rates.push(this.answer.rateNow);
    this.refresh();
  }

  /** Shows an answer's round. */
  show(answer, round) {
    if (answer !== this.answer) this.follow(answer);
    this.#select(round);
  }

  #last() {
    const latest = this.answer.rounds.length - 1;
    return this.selected === null ? latest : Math.min(this.selected, latest);
  }

  #select(round) {
    this.selected = round === null || round >= this.answer.rounds.length - 1 ? null : Math.max(0, round);
    this.refresh();
  }

  #paint() {
    if (!this.answer) return;
    this.#figures();
    bars(byId("round-chart"), this.answer.rounds.slice(-BARS));
    line(byId("rate-chart"), this.rates.slice(-4 * BARS));
    this.#steps();
    this.#trees();
  }

  #figures() {
    const { answer } = this;
    const { numDrafts, numAccepted, rounds } = answer;
    byId("accept-length").textContent = rounds.length ? answer.acceptLength.toFixed(2) : "–";
    byId("rate").textContent = answer.rate ? answer.rate.toFixed(1) : "–";
    byId("accepted").textContent = numDrafts ? `${numAccepted} of ${numDrafts}` : "–";
    byId("rounds").textContent = String(rounds.length || "–");
    const parts = [...answer.byDrafter()].map(
      ([name, [guessed, hits]]) => `${letters(name)}: ${inWords(name)}, ${hits} of ${guessed} accepted`,
    );
    byId("drafters").textContent = parts.join("; ");
  }

  #steps() {
    const last = this.#last();
    byId("older").disabled = last <= 0;
    byId("newer").disabled = byId("live").disabled = this.selected === null;
  }

  /** Draws rounds that are not drawn yet, and removes those that are no longer shown. */
  #trees() {
    const last = this.#last();
    const wanted = [];
    for (let round = last; round >= 0 && wanted.length < TREES; round -= 1) wanted.push(round);
    const holder = byId("trees");
    const there = new Map(Array.from(holder.children, (figure) => [figure.getAttribute("data-round"), figure]));
    const figures = wanted.map((round) => there.get(String(round)) ?? drawn(this.answer.rounds[round]));
    if (figures.length) holder.replaceChildren(...figures);
    else holder.replaceChildren(element("p", { class: "hint" }, "No round yet."));
    if (byId("as-text").open) byId("tree-text").replaceChildren(...(last < 0 ? [] : asText(this.answer.rounds[last])));
  }
}

/** Draws a bar for each round: accepted tokens, and the model's own on top. */
function bars(svg, rounds) {
  const most = Math.max(0, ...rounds.map((round) => round.committed));
  const width = measured(svg) / Math.max(FEWEST, rounds.length);
  const unit = HEIGHT / Math.max(4, most);
  const parts = rounds.flatMap((round, index) => {
    const accepted = Math.min(round.accepted.length, round.committed);
    const place = { x: index * width, width: Math.max(1, width - 1) };
    return [
      shape("rect", { class: "accepted", ...place, y: HEIGHT - accepted * unit, height: accepted * unit }),
      shape("rect", {
        class: "bonus",
        ...place,
        y: HEIGHT - round.committed * unit,
        height: Math.max(0, (round.committed - accepted) * unit - 1),
      }),
    ];
  });
  svg.replaceChildren(...parts);
  showMost(svg, most);
}

/** Draws the rate over time. Spikes are cut near the chart's upper edge and marked with dots. */
export function line(svg, rates) {
  const known = rates.filter((rate) => rate > 0);
  const most = Math.max(0, ...known);
  const top = Math.min(most, CLIP * ([...known].sort((a, b) => a - b)[known.length >> 1] ?? 0));
  const step = measured(svg) / Math.max(FEWEST, known.length - 1);
  const place = (rate, index) => [index * step, HEIGHT * (1 - (0.9 * Math.min(rate, top)) / top)];
  const points = known.map((rate, index) => place(rate, index).map((at) => at.toFixed(1)).join());
  const spikes = known.flatMap((rate, index) => {
    if (rate <= top) return [];
    const [cx, cy] = place(rate, index);
    return [shape("circle", { cx, cy, r: 2 })];
  });
  svg.replaceChildren(...(known.length < 2 ? [] : [shape("polyline", { points: points.join(" ") }), ...spikes]));
  showMost(svg, Math.round(most), spikes.length ? `, cut at ${Math.round(top)}` : "");
}

/** Returns the width of a chart in pixels, and makes pixels its unit. */
function measured(svg) {
  const width = svg.clientWidth || 240;
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  return width;
}

function showMost(svg, value, more = "") {
  svg.parentNode.querySelector(".most").textContent = value ? `up to ${value}${more}` : "";
}
