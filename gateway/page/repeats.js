// Whether an answer repeats earlier ones: n-grams guess those well, so its speed says little of new text.

const RUN = 8; // tokens in a row that an earlier answer must have
const FEWEST = 16; // repeated tokens that are worth a note
const SHARE = 1 / 3;
const MOST_RUNS = 100_000;

export class Repeats {
  constructor() {
    this.runs = new Set();
  }

  /** A note on an answer, empty where there is nothing to say. The answer is an earlier one to those that follow. */
  note(answer) {
    const ids = answer.tokens.map((token) => token.id);
    const runs = ids.slice(RUN - 1).map((_, begin) => ids.slice(begin, begin + RUN).join());
    // Guesses from other conversations' answers are known by their drafter alone; it knows this one's beginning, too.
    const repeated = answer.tokens.map((token) => token.drafter === "ngram_shared");
    const own = new Set();
    runs.forEach((run, begin) => {
      if (own.has(run)) repeated.fill(false, begin, begin + RUN);
      own.add(run);
    });
    runs.forEach((run, begin) => {
      if (this.runs.has(run)) repeated.fill(true, begin, begin + RUN);
    });
    if (this.runs.size > MOST_RUNS) this.runs.clear();
    runs.forEach((run) => this.runs.add(run));
    const count = repeated.filter(Boolean).length;
    if (count < FEWEST || count < SHARE * ids.length) return "";
    return `${count} of these ${ids.length} tokens stood in earlier answers, where n-grams find them. New text is slower.`;
  }
}
