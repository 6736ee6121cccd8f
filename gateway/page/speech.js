// What is read aloud: whole sentences instead of tokens, which would be stammering.

import { byId, element } from "./dom.js";

// White space ends a sentence, but for Chinese and Japanese, which have none: there the next sign does.
const SENTENCE = /^[\s\S]*?(?:[.!?:؟।]["\p{Pe}\p{Pf}]*\s+|[。！？]["\p{Pe}\p{Pf}]*(?=[^。！？"\p{Pe}\p{Pf}])|\n)/u;
const MARKDOWN = /^#+ +|\*\*|`+/gm; // signs that are not read aloud
const KEPT = 20;

export class Speech {
  constructor() {
    this.region = byId("speech");
    this.pending = "";
  }

  /** Adds text of an answer; complete sentences are said. */
  write(text) {
    this.pending += text;
    let match;
    while ((match = SENTENCE.exec(this.pending))) {
      this.say(match[0].trim());
      this.pending = this.pending.slice(match[0].length);
    }
  }

  /** Forgets what was said and what was to be. */
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
