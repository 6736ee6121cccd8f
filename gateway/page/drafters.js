// What drafters are called: two letters in a tree's nodes, words elsewhere.

const KNOWN = {
  ngram: ["N", "n-grams of this conversation"],
  ngram_shared: ["NS", "n-grams of earlier answers"],
  eagle: ["E", "EAGLE head"],
  eagle3: ["E3", "EAGLE-3 head"],
  nextn: ["M", "the model's own head for next tokens (MTP)"],
  standalone: ["D", "draft model"],
};

/** The letters of a drafter in a node. */
export const letters = (name) => KNOWN[name]?.[0] ?? name.slice(0, 2).toUpperCase();

/** A drafter in words. */
export const inWords = (name) => KNOWN[name]?.[1] ?? name;
