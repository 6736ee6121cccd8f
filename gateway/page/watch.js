// The column that watches one answer: figures, charts, and the trees of its latest rounds.

import { asText, drawn, letter } from "./tree.js";
import { beforePaint, byId, element, shape } from "./dom.js";

const TREES = 3;
const BARS = 60;
const CHART = { width: 240, height: 48 };

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

  /** Watches another answer. */
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
      ([name, [guessed, hits]]) => `${letter(name)} is ${name}: ${hits} of ${guessed} accepted`,
    );
    byId("drafters").textContent = parts.join("; ");
  }

  #steps() {
    const last = this.#last();
    byId("older").disabled = last <= 0;
    byId("newer").disabled = byId("live").disabled = this.selected === null;
  }

  /** Draws what is not drawn yet; figures of other rounds go. */
  #trees() {
    const last = this.#last();
    const wanted = [];
    for (let round = last; round >= 0 && wanted.length < TREES; round -= 1) wanted.push(round);
    const holder = byId("trees");
    const there = new Map(Array.from(holder.children, (figure) => [figure.getAttribute("data-round"), figure]));
    const figures = wanted.map((round) => there.get(String(round)) ?? drawn(this.answer.rounds[round]));
    if (figures.length) holder.replaceChildren(...figures);
    else holder.replaceChildren(element("p", { class: "hint" }, "No round yet."));
    if (byId("as-text").open && last >= 0) byId("tree-text").replaceChildren(...asText(this.answer.rounds[last]));
  }
}

/** A bar for each round: accepted tokens, and the model's own on top. */
function bars(svg, rounds) {
  svg.setAttribute("viewBox", `0 0 ${CHART.width} ${CHART.height}`);
  const most = Math.max(4, ...rounds.map((round) => round.committed));
  const [width, unit] = [CHART.width / BARS, CHART.height / most];
  const parts = rounds.flatMap((round, index) => {
    const accepted = Math.min(round.accepted.length, round.committed);
    const place = { x: index * width, width: width - 1 };
    return [
      shape("rect", { class: "accepted", ...place, y: CHART.height - accepted * unit, height: accepted * unit }),
      shape("rect", {
        class: "bonus",
        ...place,
        y: CHART.height - round.committed * unit,
        height: Math.max(0, (round.committed - accepted) * unit - 1),
      }),
    ];
  });
  svg.replaceChildren(...parts, amount(most));
}

function line(svg, rates) {
  svg.setAttribute("viewBox", `0 0 ${CHART.width} ${CHART.height}`);
  const known = rates.filter((rate) => rate > 0);
  if (known.length < 2) return svg.replaceChildren();
  const most = Math.max(...known) * 1.1;
  const step = CHART.width / Math.max(BARS, known.length - 1);
  const points = known.map((rate, index) => `${(index * step).toFixed(1)},${(CHART.height * (1 - rate / most)).toFixed(1)}`);
  return svg.replaceChildren(shape("polyline", { points: points.join(" ") }), amount(Math.round(most)));
}

function amount(value) {
  return shape("text", { x: CHART.width - 2, y: 10 }, String(value));
}
