// The page: what the user does, and what follows.

import { ApiError, chat, modelInfo, settings } from "./api.js";
import { Answer, AnswerView } from "./answer.js";
import { speedup, verdict } from "./compare.js";
import { byId, element } from "./dom.js";
import { Speech } from "./speech.js";
import { Watch } from "./watch.js";

const RETRY_MS = 2000;
const NEAR = 80; // pixels: so near to its end the conversation is kept in view as it grows
const END_SPACE = 20;

class Page {
  constructor() {
    this.model = null;
    this.messages = [];
    this.running = null; // AbortController of the turn in the making
    this.welcome = byId("welcome");
    this.watch = new Watch();
    this.speech = new Speech();
    this.#listen();
  }

  async start() {
    byId("key-row").hidden = !(await settings()).needs_key;
    if (byId("key-row").hidden) await this.#connect();
    else this.#say("an API key is needed");
    byId("question").focus();
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
      if (event.key === "Escape") this.running?.abort();
    });
    byId("stop").addEventListener("click", () => this.running?.abort());
    byId("fresh").addEventListener("click", () => this.#clear());
    byId("key").addEventListener("change", () => this.#connect());
  }

  /** Learns which model is served; asks again until it is known. */
  async #connect() {
    const key = byId("key").value;
    try {
      this.model = await modelInfo(key);
      const { model_path: name, dtype, max_model_len: context } = this.model;
      this.#say(`${name}, ${dtype}, ${context} tokens of context`);
      byId("max-tokens").max = context;
    } catch (error) {
      this.#say(error.message);
      // A wrong key stays wrong; everything else may pass.
      if (error.status !== 401) setTimeout(() => key === byId("key").value && this.#connect(), RETRY_MS);
    }
  }

  #say(text) {
    byId("model").textContent = text;
  }

  #clear() {
    this.running?.abort();
    this.messages = [];
    byId("turns").replaceChildren(this.welcome);
    this.watch.follow(new Answer());
    byId("question").focus();
  }

  /** The body of a request, or null where a field is wrong, which the user is then told. */
  #body(question) {
    const form = byId("composer");
    byId("complaint").textContent = "";
    if (!question.trim()) {
      byId("complaint").textContent = "Write a question first.";
      byId("question").focus();
      return null;
    }
    if (!form.checkValidity()) {
      byId("settings").open = true;
      form.reportValidity();
      return null;
    }
    const seed = byId("seed").value;
    return {
      messages: [...this.messages, { role: "user", content: question }],
      temperature: byId("temperature").valueAsNumber,
      top_p: byId("top-p").valueAsNumber,
      max_tokens: byId("max-tokens").valueAsNumber,
      // Both runs of a comparison need the same noise, so that it is drawn here.
      seed: seed === "" ? crypto.getRandomValues(new Uint32Array(1))[0] : Number(seed),
    };
  }

  async #ask() {
    if (this.running) return;
    const field = byId("question");
    const body = this.#body(field.value);
    if (!body) return;
    const question = field.value;
    field.value = "";
    const turn = new Turn(question, byId("compare").checked);
    turn.onRound((answer, round) => this.watch.show(answer, round));
    this.welcome.remove();
    byId("turns").append(turn.node);
    reveal(overhang());
    this.#busy(new AbortController());
    try {
      await this.#answer(turn, body);
      this.#remember(turn, body.messages, question);
    } finally {
      this.#busy(null);
    }
  }

  /** What was said goes along with the next question. A question without any answer can be asked again. */
  #remember(turn, messages, question) {
    if (!turn.node.isConnected) return; // a new chat was begun meanwhile
    const { text } = turn.drafted.answer;
    if (text) this.messages = [...messages, { role: "assistant", content: text }];
    else byId("question").value ||= question;
  }

  #busy(running) {
    this.running = running;
    byId("send").disabled = Boolean(running);
    byId("stop").disabled = !running;
    // A disabled button loses the focus to nowhere.
    if (!running && [document.body, byId("stop")].includes(document.activeElement)) byId("question").focus();
  }

  async #answer(turn, body) {
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
    this.speech.say(found.text);
  }

  /** Streams one answer. Returns whether it came to its end. */
  async #run(view, body, watched) {
    try {
      for await (const chunk of chat(body, byId("key").value, this.running.signal)) {
        const before = view.answer.text.length;
        const fresh = view.answer.take(chunk, performance.now() / 1000);
        if (watched) this.speech.write(view.answer.text.slice(before));
        if (!fresh.length) continue;
        this.#following(() => view.add(fresh));
        if (watched) this.watch.grew();
      }
      this.#following(() => view.end(view.answer.finishReason === "length" ? "the limit of tokens ended it" : ""));
      if (watched) this.speech.end(`The answer is complete: ${view.note.textContent}.`);
      return true;
    } catch (error) {
      this.#failed(view, error, watched);
      return false;
    }
  }

  #failed(view, error, watched) {
    const stopped = error.name === "AbortError";
    view.end(stopped ? "stopped" : "failed");
    if (watched) this.speech.end(stopped ? "Stopped." : "");
    if (stopped) return;
    view.node.append(element("p", { class: "complaint", role: "alert" }, error.message));
    if (error instanceof ApiError && error.status === 401) {
      byId("key-row").hidden = false;
      byId("key").focus();
    }
  }

  /** Does `work`, and keeps the end of the conversation in view if it was. */
  #following(work) {
    const near = overhang() < NEAR;
    work();
    if (near) reveal(overhang());
  }
}

/** How far the conversation reaches below the composer's upper edge, in pixels; less than 0 while there is room. */
function overhang() {
  const last = byId("turns").lastElementChild;
  return last ? last.getBoundingClientRect().bottom - byId("composer").getBoundingClientRect().top : 0;
}

/** Scrolls the conversation up; in narrow windows that is the whole page. */
function reveal(pixels) {
  const box = byId("turns");
  const scroller = getComputedStyle(box).overflowY === "auto" ? box : document.scrollingElement;
  if (pixels > 0) scroller.scrollBy(0, pixels + END_SPACE);
}

/** A question and its answers. */
class Turn {
  constructor(question, compared) {
    this.drafted = new AnswerView(compared ? "Speculation on" : "Answer");
    this.plain = compared ? new AnswerView("Speculation off") : null;
    const answers = element("div", { class: compared ? "answers two" : "answers" }, this.drafted.node);
    this.node = element("article", { "aria-label": "Turn" }, element("p", { class: "question", dir: "auto" }, question), answers);
    if (!compared) return;
    answers.append(this.plain.node);
    this.result = element("p", { class: "verdict" }, "The texts will be compared token by token.");
    this.node.append(this.result);
  }

  /** Calls `show(answer, round)` where a token is clicked. The buttons beside the trees do the same by keyboard. */
  onRound(show) {
    for (const view of [this.drafted, this.plain]) {
      view?.text.addEventListener("click", (event) => {
        const { round } = event.target.dataset;
        if (round) show(view.answer, Number(round));
      });
    }
  }

  /** Says that there was no second answer. */
  leaveOut() {
    this.plain.note.textContent = "not asked";
    this.result.textContent = "Nothing was compared: the first answer did not come to its end.";
  }

  /** Shows whether both texts are equal. */
  judge({ kind, text, at }, speed) {
    this.result.classList.add(kind);
    this.result.textContent = `${text} ${speed}`.trim();
    if (kind !== "parted") return;
    this.drafted.markParting(at);
    this.plain.markParting(at);
  }
}

new Page().start().catch((error) => {
  byId("model").textContent = error.message;
});
