// One answer: what it says, token by token, and what its rounds came to.

import { element } from "./dom.js";

const WORDS = {
  accepted: "accepted draft token",
  bonus: "bonus token, the model's own",
  plain: "plain token, the model's own",
  unspecified: "token",
};

/** What is known of an answer so far. */
export class Answer {
  constructor() {
    this.tokens = []; // {id, text, origin, depth, drafter, round}
    this.rounds = []; // as the trace has them, with `root`, `bonus` and `number`
    this.text = "";
    this.finishReason = null;
    this.numDrafts = 0;
    this.numAccepted = 0;
    this.marks = []; // [seconds, tokens] at each piece, for the rate
  }

  /** Takes a chunk of the stream at `now` (seconds). Returns its tokens. */
  take(chunk, now) {
    const choice = chunk.choices[0];
    if (!choice) return [];
    this.finishReason = choice.finish_reason ?? this.finishReason;
    this.text += choice.delta.content ?? "";
    const fresh = choice.trace ? this.#follow(choice.trace) : [];
    if (fresh.length) this.marks.push([now, this.tokens.length]);
    return fresh;
  }

  #follow({ tokens, rounds }) {
    const begin = this.tokens.length;
    let next = 0;
    for (const round of rounds) {
      const root = this.tokens.at(-1)?.text ?? null;
      const committed = tokens.slice(next, next + round.num_tokens);
      next += round.num_tokens;
      const bonus = committed[round.accepted.length] ?? null;
      this.numDrafts += round.parents.length;
      this.numAccepted += round.accepted.length;
      this.rounds.push({ ...round, root, bonus, number: this.rounds.length + 1, committed: committed.length });
      for (const token of committed) this.tokens.push({ ...token, round: this.rounds.length - 1 });
    }
    return this.tokens.slice(begin);
  }

  /** Tokens committed in a round, on average; 0 before the first. */
  get acceptLength() {
    return this.rounds.length ? this.tokens.length / this.rounds.length : 0;
  }

  /** Tokens per second after the first piece, so without the wait for it; 0 while unknown. */
  get rate() {
    return this.#rateFrom(0);
  }

  /** The same over the last pieces alone. */
  get rateNow() {
    return this.#rateFrom(Math.max(0, this.marks.length - 9));
  }

  #rateFrom(index) {
    if (this.marks.length - index < 2) return 0;
    const [[begin, before], [end, after]] = [this.marks[index], this.marks.at(-1)];
    return end > begin ? (after - before) / (end - begin) : 0;
  }

  /** Guesses and accepted guesses of each drafter: name to [guessed, accepted]. */
  byDrafter() {
    const counts = new Map();
    for (const round of this.rounds) {
      const accepted = new Set(round.accepted);
      round.drafters.forEach((name, node) => {
        const [guessed, hits] = counts.get(name) ?? [0, 0];
        counts.set(name, [guessed + 1, hits + accepted.has(node)]);
      });
    }
    return counts;
  }
}

/** An answer on the page. */
export class AnswerView {
  constructor(title) {
    this.answer = new Answer();
    this.text = element("div", { class: "text", dir: "auto" });
    this.note = element("p", { class: "note" }, "waiting for the first token");
    this.node = element("section", { class: "answer", "aria-label": title }, element("h3", {}, title), this.text, this.note);
    this.shown = "";
  }

  /** Adds tokens. */
  add(tokens) {
    const spans = document.createDocumentFragment();
    for (const token of tokens) {
      if (!token.text) continue; // half a character, or the token that ends the answer
      this.shown += token.text;
      const by = token.drafter ? ` by ${token.drafter}` : "";
      const told = `${WORDS[token.origin]}${by}, ${token.depth} in round ${token.round + 1}`;
      spans.append(element("span", { class: `token ${token.origin}`, title: told, "data-round": token.round }, token.text));
    }
    this.text.append(spans);
    const { rate } = this.answer;
    this.note.textContent = `${this.answer.tokens.length} tokens${rate ? `, ${rate.toFixed(1)} per second` : ""}`;
  }

  /** Says how the answer ended. */
  end(how) {
    // What was held back at the end belongs to no token of its own.
    const rest = this.answer.text.startsWith(this.shown) ? this.answer.text.slice(this.shown.length) : "";
    if (rest) this.text.append(element("span", { class: "token plain" }, rest));
    const { tokens, rate, acceptLength } = this.answer;
    const figures = [`${tokens.length} tokens`];
    if (rate) figures.push(`${rate.toFixed(1)} per second`);
    if (this.answer.numDrafts) figures.push(`accept length ${acceptLength.toFixed(2)}`);
    this.note.textContent = `${figures.join(", ")}${how ? `; ${how}` : ""}`;
  }

  /** Marks the token where this answer parts from another. */
  markParting(index) {
    const shown = this.answer.tokens.slice(0, index).filter((token) => token.text).length;
    this.text.children[shown]?.classList.add("parting");
  }
}
