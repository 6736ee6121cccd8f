// The conversation, kept by the browser so that it survives a reload. Never a key.

const NAME = "outrider.conversation";
const VERSION = 1;
const MOST = 1_000_000; // characters

/** What was kept: {turns, marks}; turns as Turn.saved has them. */
export function load() {
  try {
    const kept = JSON.parse(localStorage.getItem(NAME));
    if (kept?.version === VERSION && Array.isArray(kept.turns)) return kept;
  } catch {
    // No storage here, or nothing that can be read: begin anew.
  }
  return { turns: [], marks: true };
}

/** Keeps turns. What is too much goes: turns too large by themselves, then the oldest; tokens and trees before whole turns. */
export function save(turns, marks) {
  const written = (some) => JSON.stringify({ version: VERSION, turns: some, marks });
  const fits = (turn) => written([turn]).length <= MOST;
  let kept = turns;
  let text = written(kept);
  if (text.length > MOST) {
    // One that never fits would drive out all the older ones.
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
    // Full, or turned off: the conversation lasts as long as the page.
  }
}

/** Keeps the switch of marks alone: the turns may be those of another window. */
export const saveMarks = (marks) => save(load().turns, marks);

const withoutTraces = (turn) => ({
  ...turn,
  answers: turn.answers.map((answer) => ({ ...answer, tokens: [], rounds: [] })),
});
