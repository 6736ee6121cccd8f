// Text for screen readers to read aloud: whole sentences, since single tokens would sound like stammering.

import { byId, element } from "./dom.js";

// A sentence ends with white space. Chinese and Japanese have none: there it ends before the next character.
const SENTENCE = /^[\s\S]*?(?:[.!?:؟।]["\p{Pe}\p{Pf}]*\s+|[。！？]["\p{Pe}\p{Pf}]*(?=[^。！？"\p{Pe}\p{Pf}])|\n)/u;
const MARKDOWN = /^#+ +|\*\*|`+/gm; // marks that are not read aloud
const KEPT = 20;

export class Speech {
  constructor() {
    this.region = byId("speech");
    this.pending = "";
  }

  /** Adds text of an answer; says the sentences that are complete. */
  write(text) {
    this.pending += text;
    let match;
    while ((match = SENTENCE.exec(this.pending))) {
      this.say(match[0].trim());
      this.pending = this.pending.slice(match[0].length);
    }
  }

  /** Forgets what was said and what is still to be said. */
  clear() {
    this.region.replaceChildren();
    this.pending = "";
  }

  /** Says what is left of an answer, and then `text`. */
  end(text) {
    this.say(this.pending.trim());
    this.pending = "";
    this.say(text);
  }

  say(text) {
    const said = text.replace(MARKDOWN, "");
    if (!said) return;
    this.region.append(element("p", {}, said));
    while (this.region.children.length > KEPT) this.region.firstElementChild.remove();
  }
}
