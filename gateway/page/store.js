// The conversation, which the browser keeps so that it survives a reload. API keys are never kept.

const NAME = "outrider.conversation";
const VERSION = 1;
const MOST = 1_000_000; // characters

/** Returns the kept conversation, {turns, marks}; turns have the form of Turn.saved. */
export function load() {
  try {
    const kept = JSON.parse(localStorage.getItem(NAME));
    if (kept?.version === VERSION && Array.isArray(kept.turns)) return kept;
  } catch {
    // There is no storage, or its content cannot be read: begin anew.
  }
  return { turns: [], marks: true };
}

/** Keeps turns up to MOST. Drops from those too large by themselves, then from the oldest: first traces, then whole turns. */
export function save(turns, marks) {
  const written = (some) => JSON.stringify({ version: VERSION, turns: some, marks });
  const fits = (turn) => written([turn]).length <= MOST;
  let kept = turns;
  let text = written(kept);
  if (text.length > MOST) {
    // A turn that never fits would drive out all the older ones.
    kept = kept.map((turn) => (fits(turn) ? turn : withoutTraces(turn))).filter(fits);
    text = written(kept);
  }
  for (let index = 0; text.length > MOST && index < kept.length; index += 1) {
    kept = kept.map((turn, at) => (at === index ? withoutTraces(turn) : turn));
    text = written(kept);
  }
  while (text.length > MOST && kept.length) {
    kept = kept.slice(1);
    text = written(kept);
  }
  try {
    localStorage.setItem(NAME, text);
  } catch {
    // The storage is full or turned off: the conversation lasts as long as the page.
  }
}

/** Keeps only whether tokens are marked, with the turns that are kept: another window may have changed those. */
export const saveMarks = (marks) => save(load().turns, marks);

const withoutTraces = (turn) => ({
  ...turn,
  answers: turn.answers.map((answer) => ({ ...answer, tokens: [], rounds: [] })),
});
