// One answer: its text, token by token, and its rounds.

import { MOST_MARKDOWN } from "./api.js";
import { built, lineBegins } from "./blocks.js";
import { copyButton, element } from "./dom.js";
import { inWords } from "./drafters.js";

const WORDS = {
  accepted: "accepted draft token",
  bonus: "bonus token, the model's own",
  plain: "plain token, the model's own",
  unspecified: "token",
};

/** An answer so far. */
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

  /** Tokens committed in a round, on average; 0 before the first round. */
  get acceptLength() {
    return this.rounds.length ? this.tokens.length / this.rounds.length : 0;
  }

  /** Tokens per second after the first piece, which leaves out the wait for it; 0 while unknown. */
  get rate() {
    return this.#rateFrom(0);
  }

  /** Tokens per second over the last pieces only; 0 while unknown. */
  get rateNow() {
    return this.#rateFrom(Math.max(0, this.marks.length - 9));
  }

  #rateFrom(index) {
    if (this.marks.length - index < 2) return 0;
    const [[begin, before], [end, after]] = [this.marks[index], this.marks.at(-1)];
    return end > begin ? (after - before) / (end - begin) : 0;
  }

  /** Returns what to keep of the answer: all but the times, of which the first and the last are enough for the rate. */
  saved() {
    const { tokens, rounds, text, finishReason, numDrafts, numAccepted, marks } = this;
    return { tokens, rounds, text, finishReason, numDrafts, numAccepted, marks: marks.length ? [marks[0], marks.at(-1)] : [] };
  }

  /** Takes over what was kept of an answer. */
  restore({ tokens, rounds, text, finishReason, numDrafts, numAccepted, marks }) {
    Object.assign(this, { tokens, rounds, text, finishReason, numDrafts, numAccepted, marks });
  }

  /** Counts the guesses of each drafter: a map of names to [guessed, accepted]. */
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
  /** `format(text)` returns blocks of Markdown; without it the text stays as it is. `follow(work)` does work on the page. */
  constructor(title, { format = null, follow }) {
    this.answer = new Answer();
    this.format = format;
    this.follow = follow;
    this.blocks = element("div", { class: "blocks" });
    this.tail = element("div", { class: "tail" });
    this.text = element("div", { class: "text" }, this.blocks, this.tail);
    this.note = element("p", { class: "note" }, "waiting for the first token");
    this.actions = element("div", { class: "actions" }, copyButton(() => this.shown, "Copy this answer"));
    const foot = element("div", { class: "foot" }, this.note, this.actions);
    this.node = element("section", { class: "answer", "aria-label": title }, element("h3", {}, title), this.text, foot);
    this.shown = ""; // all the text that there is
    this.pieces = []; // {token, end}: the parts of `shown`; `token` is null for text that belongs to none
    this.owners = []; // index of the piece of each character
    this.formatted = 0; // characters that are in blocks
    this.tried = 0; // characters after those when the last try found no complete block
    this.ended = false;
    this.formatting = null;
  }

  /** Adds tokens. */
  add(tokens) {
    const begin = this.shown.length;
    // Part of a character has no text, nor has the token that ends the answer.
    for (const token of tokens) this.#append(token.text, token);
    this.tail.append(...this.#marked(begin, this.shown.length));
    const { rate } = this.answer;
    this.note.textContent = `${this.answer.tokens.length} tokens${rate ? `, ${rate.toFixed(1)} per second` : ""}`;
    this.#formatMore();
  }

  /** Says how the answer ended, and formats the rest of it when the gateway finds the time. */
  end(how) {
    // Text that was held back until the end does not belong to any one token.
    const rest = this.answer.text.startsWith(this.shown) ? this.answer.text.slice(this.shown.length) : "";
    const begin = this.shown.length;
    this.#append(rest, null);
    this.tail.append(...this.#marked(begin, this.shown.length));
    const { tokens, rate, acceptLength } = this.answer;
    const figures = [`${tokens.length} tokens`];
    if (rate) figures.push(`${rate.toFixed(1)} per second`);
    if (this.answer.numDrafts) figures.push(`accept length ${acceptLength.toFixed(2)}`);
    this.note.textContent = `${figures.join(", ")}${how ? `; ${how}` : ""}`;
    this.settle();
  }

  /** Formats the rest, now that nothing follows. */
  async settle() {
    this.ended = true;
    await this.formatting;
    await this.#formatMore();
  }

  /** Formats complete blocks. Only one run at a time, or a block would be placed twice. */
  #formatMore() {
    this.formatting ??= this.#formatComplete().finally(() => (this.formatting = null));
    return this.formatting;
  }

  /** Marks the token where this answer parts from another. For answers that are shown without formatting. */
  markParting(index) {
    const shown = this.answer.tokens.slice(0, index).filter((token) => token.text).length;
    this.tail.children[shown]?.classList.add("parting");
  }

  /** Returns what to keep of the answer. */
  saved() {
    const note = this.ended ? this.note.textContent : `${this.answer.tokens.length} tokens; the page was left`;
    return { ...this.answer.saved(), shown: this.shown, note };
  }

  /** Shows what was kept of an answer. */
  restore(saved) {
    this.answer.restore(saved);
    for (const token of this.answer.tokens) this.#append(token.text, token);
    this.#append(saved.shown.slice(this.shown.length), null);
    this.tail.append(...this.#marked(0, this.shown.length));
    this.note.textContent = saved.note;
    this.ended = true;
  }

  #append(text, token) {
    if (!text) return;
    this.shown += text;
    for (let at = 0; at < text.length; at += 1) this.owners.push(this.pieces.length);
    this.pieces.push({ token, end: this.shown.length });
  }

  /** Makes elements for the characters from `begin` to `end` of the text, one for each token. */
  #marked(begin, end) {
    const spans = [];
    for (let at = begin; at < end; ) {
      const { token, end: pieceEnd } = this.pieces[this.owners[at]];
      const next = Math.min(end, pieceEnd);
      spans.push(span(token, this.shown.slice(at, next)));
      at = next;
    }
    return spans;
  }

  /** Moves complete blocks out of the tail. The last block is complete when the answer is. After a failure, the rest stays. */
  async #formatComplete() {
    while (this.format) {
      const rest = this.shown.slice(this.formatted);
      // Formatting costs a request. So it needs the end of a paragraph and, after a try in vain, half as much text again.
      if (!rest || (!this.ended && (rest.length < 1.5 * this.tried || !/\n\s*\n\s*\S/.test(rest)))) return;
      // The gateway refuses half of a surrogate pair, which the cut may leave.
      const piece = rest.slice(0, MOST_MARKDOWN).replace(/[\uD800-\uDBFF]$/, "");
      const whole = this.ended && piece.length === rest.length;
      let blocks;
      try {
        blocks = await this.format(piece);
      } catch {
        this.tried = Infinity;
        return;
      }
      const complete = whole ? blocks : blocks.slice(0, -1);
      this.tried = complete.length ? 0 : rest.length;
      const begins = lineBegins(piece);
      const next = whole ? piece.length : begins[blocks.at(-1)?.begin ?? 0];
      if (complete.length || whole) this.follow(() => this.#place(complete, begins, next));
      if (whole || !complete.length) return;
    }
  }

  /** Appends blocks to those that are there. Lines of the text begin at `begins`; the text after these blocks, at `next`. */
  #place(blocks, begins, next) {
    const base = this.formatted;
    for (const block of blocks) {
      const end = base + (begins[block.end] ?? next);
      let cursor = base + begins[block.begin];
      // To find a block's text in what was written, its lines are searched in turn, which skips the marks of Markdown.
      // A line with an escape is not found, so its tokens are not marked.
      const marked = (text) =>
        text.split(/(?<=\n)/).flatMap((line) => {
          const [, before, sought, after] = /^(\s*)(.*?)(\s*)$/s.exec(line);
          const at = sought ? this.shown.indexOf(sought, cursor) : -1;
          if (at < 0 || at + sought.length > end) return [line];
          cursor = at + sought.length;
          return [before, ...this.#marked(at, cursor), after];
        });
      this.blocks.append(...built(block, marked));
    }
    this.formatted = base + next;
    this.tail.replaceChildren(...this.#marked(this.formatted, this.shown.length));
  }
}

function span(token, text) {
  if (!token) return element("span", { class: "token plain" }, text);
  const by = token.drafter ? ` by ${inWords(token.drafter)}` : "";
  const title = `${WORDS[token.origin]}${by}, ${token.depth} in round ${token.round + 1}`;
  return element("span", { class: `token ${token.origin}`, title, "data-round": token.round }, text);
}
