// Names of drafters: one or two letters in a tree's nodes, words elsewhere.

const KNOWN = {
  ngram: ["N", "n-grams of this conversation"],
  ngram_shared: ["NS", "n-grams of earlier answers"],
  eagle: ["E", "EAGLE head"],
  eagle3: ["E3", "EAGLE-3 head"],
  nextn: ["M", "the model's own head for next tokens (MTP)"],
  standalone: ["D", "draft model"],
};

/** Returns the letters of a drafter for a node. */
export const letters = (name) => KNOWN[name]?.[0] ?? name.slice(0, 2).toUpperCase();

/** Returns a drafter's name in words. */
export const inWords = (name) => KNOWN[name]?.[1] ?? name;
