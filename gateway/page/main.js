// The page: handles what the user does.

import { ApiError, chat, markdown, modelInfo, settings } from "./api.js";
import { Answer, AnswerView } from "./answer.js";
import { speedup, verdict } from "./compare.js";
import { beforePaint, byId, element } from "./dom.js";
import { Repeats } from "./repeats.js";
import { Speech } from "./speech.js";
import { load, save, saveMarks } from "./store.js";
import { Watch } from "./watch.js";

const RETRY_MS = 2000;
const NEAR = 80; // pixels: if the view is this near to the conversation's end, it follows the end
const END_SPACE = 20;
const FOLDED = { characters: 600, lines: 8 }; // a longer question is folded
// The default model answers these well and briefly at temperature 0, and drafts are often right.
const EXAMPLES = [
  "Copy this text: The sun had set on a stormy night, and the lighthouse stood alone above the sea. Nobody had lit its lamp for seven years.",
  "Write a Python class for a stack with push, pop and peek.",
  "Write a Python function that returns the largest of three numbers.",
  "Give three tips for a good night's sleep, as a numbered list.",
];

class Page {
  constructor() {
    this.model = null;
    this.turns = []; // of the conversation, including the one under way
    this.repeats = new Repeats();
    this.running = null; // AbortController of the turn under way
    this.left = false; // while the browser shows another page
    this.near = null; // whether the end was in view when the frame began; null until this is measured
    this.top = 0; // the scroll position at that time: a user who scrolls up within the frame is not brought back
    this.follow = beforePaint(() => {
      if (this.near && scroller().scrollTop >= this.top) reveal(overhang());
      this.near = null;
    });
    this.welcome = byId("welcome");
    this.watch = new Watch();
    this.speech = new Speech();
    this.windows = new BroadcastChannel("outrider.new-chat"); // to the other windows of this browser
    this.#listen();
  }

  async start() {
    this.#restore();
    byId("key-row").hidden = !(await settings()).needs_key;
    if (byId("key-row").hidden) await this.#connect();
    else this.#showStatus("an API key is needed");
    focusQuestion();
  }

  #listen() {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#ask();
    });
    byId("question").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      byId("composer").requestSubmit();
    });
    document.addEventListener("keydown", (event) => {
      // During a composition the key belongs to the input method.
      if (event.key === "Escape" && !event.isComposing) this.running?.abort();
    });
    byId("stop").addEventListener("click", () => this.running?.abort());
    byId("fresh").addEventListener("click", () => {
      this.#clear();
      this.#save();
      this.windows.postMessage(null);
      focusQuestion();
    });
    // The window that deleted the conversation has stored the new state.
    this.windows.addEventListener("message", () => this.#clear());
    byId("key").addEventListener("change", () => this.#connect());
    byId("marks").addEventListener("change", () => {
      this.#mark();
      saveMarks(byId("marks").checked);
    });
    // Only a running turn is not kept yet. Without one, do not save: another window may have kept or deleted more since.
    window.addEventListener("pagehide", () => {
      this.left = true;
      if (this.running) this.#save();
    });
    window.addEventListener("pageshow", () => (this.left = false));
    for (const question of EXAMPLES) {
      const button = element("button", { type: "button", class: "quiet" }, question);
      button.addEventListener("click", () => this.#ask(question));
      byId("examples").append(element("li", {}, button));
    }
  }

  /** Shows the conversation that the browser kept. */
  #restore() {
    const { turns, marks } = load();
    byId("marks").checked = marks;
    this.#mark();
    for (const saved of turns) {
      const turn = this.#turn(saved.question, saved.answers.length > 1);
      try {
        turn.restore(saved);
      } catch {
        continue; // it was kept by another release
      }
      this.#show(turn);
      this.repeats.note(turn.drafted.answer);
    }
    if (this.turns.length) this.watch.follow(this.turns.at(-1).drafted.answer);
    reveal(overhang());
  }

  #mark() {
    byId("turns").classList.toggle("unmarked", !byId("marks").checked);
  }

  #save() {
    save(this.turns.map((turn) => turn.saved()), byId("marks").checked);
  }

  /** Asks which model is served, again and again until it is known. */
  async #connect() {
    const key = byId("key").value;
    try {
      this.model = await modelInfo(key);
      const { model_path: name, dtype, max_model_len: context } = this.model;
      this.#showStatus(`${name}, ${dtype}, ${context} tokens for prompt and answer`);
      byId("max-tokens").max = context;
      for (const turn of this.turns) if (!this.running) turn.settle();
    } catch (error) {
      this.#showStatus(error.message);
      // A wrong key stays wrong; any other error may pass.
      if (error.status !== 401) setTimeout(() => key === byId("key").value && this.#connect(), RETRY_MS);
    }
  }

  #showStatus(text) {
    byId("model").textContent = text;
  }

  #clear() {
    this.running?.abort();
    this.near &&= false; // a frame that was requested before must not scroll the new conversation
    this.turns = [];
    byId("turns").replaceChildren(this.welcome);
    this.watch.follow(new Answer());
    this.speech.clear();
  }

  /** Makes a turn, not yet on the page. A comparison is shown without formatting, token by token. */
  #turn(question, compared) {
    const format = compared ? null : (text) => markdown(text, byId("key").value);
    const turn = new Turn(question, compared, { format, follow: (work) => this.#following(work) });
    turn.onRound((answer, round) => this.watch.show(answer, round));
    turn.onRetry(() => this.#askAgain(turn));
    return turn;
  }

  #show(turn) {
    this.turns.push(turn);
    this.welcome.remove();
    byId("turns").append(turn.node);
  }

  /** Returns the body of a request that continues `turns`; if a field is wrong, tells the user and returns null. */
  #body(question, turns) {
    const form = byId("composer");
    byId("complaint").textContent = "";
    if (!question.trim()) {
      byId("complaint").textContent = "Write a question first.";
      focusQuestion();
      return null;
    }
    if (!form.checkValidity()) {
      byId("settings").open = true;
      form.reportValidity();
      return null;
    }
    const seed = byId("seed").value;
    return {
      messages: [...turns.flatMap((turn) => turn.messages()), { role: "user", content: question }],
      temperature: byId("temperature").valueAsNumber,
      top_p: byId("top-p").valueAsNumber,
      max_tokens: byId("max-tokens").valueAsNumber,
      // Both runs of a comparison need the same noise, so the seed is drawn here.
      seed: seed === "" ? crypto.getRandomValues(new Uint32Array(1))[0] : Number(seed),
    };
  }

  async #ask(example = null) {
    if (this.running) return;
    const field = byId("question");
    const question = example ?? field.value;
    const body = this.#body(question, this.turns);
    if (!body) return;
    if (example === null) field.value = "";
    const turn = this.#turn(question, byId("compare").checked);
    this.#show(turn);
    reveal(overhang());
    this.#busy(new AbortController());
    try {
      await this.#answer(turn, body);
    } finally {
      this.#busy(null);
    }
    if (!turn.node.isConnected) return; // the user has begun a new chat meanwhile
    this.#following(() => turn.repeats(this.repeats.note(turn.drafted.answer)));
    // After a question without an answer, put it back so that it can be asked again.
    if (!turn.drafted.answer.text) field.value ||= question;
    // Leaving the page breaks off the answer; `pagehide` has saved it as such, so do not save it as failed.
    if (!this.left) this.#save();
  }

  /** Asks the last question once more, and replaces its answer. */
  #askAgain(turn) {
    if (this.running || !this.#body(turn.question, [])) return;
    this.turns = this.turns.filter((other) => other !== turn);
    turn.node.remove();
    if (byId("question").value === turn.question) byId("question").value = "";
    this.#ask(turn.question);
  }

  #busy(running) {
    this.running = running;
    byId("send").disabled = Boolean(running);
    byId("stop").disabled = !running;
    // When a button is disabled, it loses the focus, and nothing else gets it.
    if (!running && [document.body, byId("stop")].includes(document.activeElement)) focusQuestion();
  }

  async #answer(turn, asked) {
    // Both runs of a comparison compute the whole prompt: with different parts from the cache, they may round differently.
    const body = turn.plain ? { ...asked, skip_prefix_cache: true } : asked;
    this.watch.follow(turn.drafted.answer);
    const first = () => this.#run(turn.drafted, body, true);
    const second = () => this.#run(turn.plain, { ...body, speculation: "off" }, false);
    const order = byId("order").value;
    const ended = [];
    if (turn.plain && order === "beside") ended.push(...(await Promise.all([first(), second()])));
    else {
      ended.push(await first());
      if (turn.plain && ended[0]) ended.push(await second());
    }
    if (!turn.plain) return;
    if (ended.length < 2) {
      turn.leaveOut();
      return;
    }
    const whole = ended.every(Boolean);
    const answers = [turn.drafted.answer, turn.plain.answer];
    const found = verdict(...answers, { dtype: this.model?.dtype, whole });
    this.#following(() => turn.judge(found, whole ? speedup(...answers, order) : ""));
    if (turn.node.isConnected) this.speech.say(found.text);
  }

  /** Streams one answer. Returns whether it came to its end. */
  async #run(view, body, watched) {
    // An answer that a new chat has removed is not read aloud any more.
    const heard = () => watched && view.node.isConnected;
    try {
      for await (const chunk of chat(body, byId("key").value, this.running.signal)) {
        const before = view.answer.text.length;
        const fresh = view.answer.take(chunk, performance.now() / 1000);
        if (heard()) this.speech.write(view.answer.text.slice(before));
        if (!fresh.length) continue;
        this.#following(() => view.add(fresh));
        if (watched) this.watch.grew();
      }
      view.end(view.answer.finishReason === "length" ? "ended at the token limit" : "");
      if (heard()) this.speech.end(`The answer is complete: ${view.note.textContent}.`);
      return true;
    } catch (error) {
      this.#failed(view, error, heard());
      return false;
    }
  }

  #failed(view, error, heard) {
    const stopped = error.name === "AbortError";
    view.end(stopped ? "stopped" : "failed");
    if (heard) this.speech.end(stopped ? "Stopped." : "");
    if (stopped) return;
    view.node.append(element("p", { class: "complaint", role: "alert" }, error.message));
    if (error instanceof ApiError && error.status === 401) {
      byId("key-row").hidden = false;
      byId("key").focus();
    }
  }

  /** Does `work`, and keeps the end of the conversation in view if it was. Measures once a frame, since that costs a layout. */
  #following(work) {
    if (this.near === null) {
      this.near = overhang() < NEAR;
      this.top = scroller().scrollTop;
    }
    work();
    this.follow();
  }
}

/** Focuses the question without scrolling: it is always in view, but phones would scroll to its place at the page's end. */
function focusQuestion() {
  byId("question").focus({ preventScroll: true });
}

/** Returns how far the conversation reaches below the composer's upper edge, in pixels; below 0 while there is room. */
function overhang() {
  const last = byId("turns").lastElementChild;
  return last ? last.getBoundingClientRect().bottom - byId("composer").getBoundingClientRect().top : 0;
}

/** Returns the element that scrolls: the conversation or, in narrow windows, the whole page. */
function scroller() {
  const box = byId("turns");
  return getComputedStyle(box).overflowY === "auto" ? box : document.scrollingElement;
}

/** Scrolls the conversation up by this many pixels and END_SPACE, if there are any. */
function reveal(pixels) {
  if (pixels > 0) scroller().scrollBy(0, pixels + END_SPACE);
}

/** A question and its answers. */
class Turn {
  /** `options` are those of AnswerView. */
  constructor(question, compared, options) {
    this.question = question;
    this.drafted = new AnswerView(compared ? "Speculation on" : "Answer", options);
    this.plain = compared ? new AnswerView("Speculation off", options) : null;
    this.views = this.plain ? [this.drafted, this.plain] : [this.drafted];
    const answers = element("div", { class: compared ? "answers two" : "answers" }, ...this.views.map((view) => view.node));
    this.repeated = element("p", { class: "hint repeated" });
    this.node = element("article", { "aria-label": "Turn" }, ...asked(question), answers, this.repeated);
    this.verdict = null;
    if (!compared) return;
    this.result = element("p", { class: "verdict" }, "The texts will be compared token by token.");
    this.node.append(this.result);
  }

  /** Returns the turn's messages, which the next question continues; none if there was no answer. */
  messages() {
    const { text } = this.drafted.answer;
    return text ? [{ role: "user", content: this.question }, { role: "assistant", content: text }] : [];
  }

  /** Adds a button that calls `again()`, to ask the question once more. Only the last turn shows it. */
  onRetry(again) {
    const button = element("button", { type: "button", class: "quiet small retry", "aria-label": "Retry this question" }, "Retry");
    button.addEventListener("click", again);
    this.drafted.actions.append(button);
  }

  /** Shows the note that the answer repeats earlier ones; it may be empty. */
  repeats(note) {
    this.repeated.textContent = note;
  }

  /** Formats answers that were restored. */
  settle() {
    for (const view of this.views) view.settle();
  }

  /** Returns what to keep of the turn. */
  saved() {
    return {
      question: this.question,
      answers: this.views.map((view) => view.saved()),
      repeated: this.repeated.textContent,
      verdict: this.verdict,
    };
  }

  /** Shows what was kept of a turn. */
  restore({ answers, repeated, verdict: judged }) {
    this.views.forEach((view, index) => view.restore(answers[index]));
    this.repeats(repeated);
    if (judged) this.judge(...judged);
    else if (this.result) this.result.textContent = "Nothing was compared.";
  }

  /** Calls `show(answer, round)` when a token is clicked. The buttons beside the trees do the same by keyboard. */
  onRound(show) {
    for (const view of this.views) {
      view.text.addEventListener("click", (event) => {
        const { round } = event.target.dataset;
        if (round) show(view.answer, Number(round));
      });
    }
  }

  /** Says that the second answer was not asked for. */
  leaveOut() {
    this.plain.note.textContent = "not asked";
    this.result.textContent = "Nothing was compared: the first answer was not completed.";
  }

  /** Shows whether both texts are equal. */
  judge(found, speed) {
    const { kind, text, at } = found;
    this.verdict = [found, speed];
    this.result.classList.add(kind);
    this.result.textContent = `${text} ${speed}`.trim();
    if (kind !== "parted") return;
    this.drafted.markParting(at);
    this.plain.markParting(at);
  }
}

/** Makes the elements of a question; a long one is folded, and a button shows the rest. */
function asked(question) {
  const text = element("p", { class: "question", dir: "auto" }, question);
  if (question.length <= FOLDED.characters && question.split("\n").length <= FOLDED.lines) return [text];
  const button = element("button", { type: "button", class: "quiet small unfold", "aria-expanded": "false" }, "Show the whole question");
  text.classList.add("folded");
  button.addEventListener("click", () => {
    const folded = text.classList.toggle("folded");
    button.setAttribute("aria-expanded", String(!folded));
    button.textContent = folded ? "Show the whole question" : "Fold the question";
  });
  return [text, button];
}

new Page().start().catch((error) => {
  byId("model").textContent = error.message;
});
