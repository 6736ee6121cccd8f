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

/** Keeps turns; what is too much goes, the oldest first: tokens and trees, then whole turns. */
export function save(turns, marks) {
  let kept = turns;
  const written = () => JSON.stringify({ version: VERSION, turns: kept, marks });
  let text = written();
  for (let index = 0; text.length > MOST && index < turns.length; index += 1) {
    kept = kept.map((turn, at) => (at === index ? withoutTraces(turn) : turn));
    text = written();
  }
  while (text.length > MOST && kept.length) {
    kept = kept.slice(1);
    text = written();
  }
  try {
    localStorage.setItem(NAME, text);
  } catch {
    // Full, or turned off: the conversation lasts as long as the page.
  }
}

const withoutTraces = (turn) => ({
  ...turn,
  answers: turn.answers.map((answer) => ({ ...answer, tokens: [], rounds: [] })),
});
