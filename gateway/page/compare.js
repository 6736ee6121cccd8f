// Whether an answer with speculation and one without are equal, token for token.

import { quoted } from "./dom.js";

/** Returns the index of the first token in which two lists differ; -1 if one list begins with the other. */
export function parting(one, other) {
  const length = Math.min(one.length, other.length);
  for (let index = 0; index < length; index += 1) {
    if (one[index].id !== other[index].id) return index;
  }
  return -1;
}

/** Returns {kind: "equal" | "parted" | "open", text, at}; `dtype` is the target's, `whole`: both answers are complete. */
export function verdict(withDrafts, without, { dtype, whole }) {
  const [one, other] = [withDrafts.tokens, without.tokens];
  const at = parting(one, other);
  if (at >= 0) return { kind: "parted", at, text: `${where(one, other, at)} ${why(dtype)}` };
  if (whole && one.length === other.length) {
    return { kind: "equal", at, text: `Equal: both texts are the same, all ${one.length} tokens.` };
  }
  const length = Math.min(one.length, other.length);
  if (whole) return { kind: "parted", at: length, text: `${where(one, other, length)} ${why(dtype)}` };
  return { kind: "open", at, text: `Equal so far: ${length} tokens were compared before the end.` };
}

function where(one, other, at) {
  const [first, second] = [one[at]?.text ?? "", other[at]?.text ?? ""];
  return `The texts first differ at token ${at + 1}: ${quoted(first)} with speculation, ${quoted(second)} without.`;
}

function why(dtype) {
  if (dtype === "float32") {
    return (
      "With --deterministic on a GPU this must not happen: please report it. In float32 on a CPU it may at a near tie, " +
      "where two candidates' log-probabilities are less than 1e-4 apart."
    );
  }
  return (
    `In ${dtype || "half precision"} rounding may make them differ, since forwards of different widths round differently; ` +
    "neither is the better one. With --deterministic on a GPU they are equal, and in float32 on a CPU but for near ties."
  );
}

/** Says in a sentence how much faster the first answer was; empty if its speed or the other's is unknown. */
export function speedup(withDrafts, without, order) {
  if (!withDrafts.rate || !without.rate) return "";
  const times = (withDrafts.rate / without.rate).toFixed(2);
  const shared = order === "beside" ? " They ran at the same time and shared rounds, so this is no measure." : "";
  return `Speed with speculation: ${times} times that without.${shared}`;
}
