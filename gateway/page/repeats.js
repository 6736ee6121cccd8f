// Whether an answer repeats earlier ones: n-grams guess it well then, so its speed says little about new text.

const RUN = 8; // tokens in a row that an earlier answer must have
const FEWEST = 16; // this many repeated tokens are worth a note
const SHARE = 1 / 3;
const MOST_RUNS = 100_000;

export class Repeats {
  constructor() {
    this.runs = new Set();
  }

  /** Returns a note on an answer, empty if there is nothing to say. Later answers are compared with this one, too. */
  note(answer) {
    const ids = answer.tokens.map((token) => token.id);
    const runs = ids.slice(RUN - 1).map((_, begin) => ids.slice(begin, begin + RUN).join());
    // Only the drafter shows that a guess is from another conversation, but that drafter knows this answer's beginning, too.
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
