// The gateway's REST door, as the page uses it. Addresses are relative, so that the page works below a proxy's prefix.

/** Why a request failed. */
export class ApiError extends Error {
  constructor(status, message, retryAfter) {
    super(retryAfter ? `${message} (try again in ${retryAfter} s)` : message);
    this.status = status;
  }
}

function headers(key) {
  // The browser's own error names neither the key nor what is wrong with it.
  if (/[^\x20-\x7e]/.test(key)) throw new ApiError(401, "The API key has characters that are not allowed: use only letters, digits and signs of ASCII.");
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function failure(response) {
  let message = `the gateway answered ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // An HTML page from a proxy says no more than the status does.
  }
  return new ApiError(response.status, message, response.headers.get("retry-after"));
}

async function read(path, key, options = {}) {
  const response = await fetch(path, { headers: headers(key), cache: "no-store", ...options });
  if (!response.ok) throw await failure(response);
  return response.json();
}

const posted = (key, body) => ({
  method: "POST",
  headers: { "content-type": "application/json", ...headers(key) },
  body: JSON.stringify(body),
});

/** Returns {needs_key}: whether an API key is needed. Open to everybody. */
export const settings = () => read("page/settings.json", "");

/** Returns the served model: {model_path, dtype, max_model_len, ...}. */
export const modelInfo = (key) => read("get_model_info", key);

/** Parses at most MOST_MARKDOWN characters of Markdown. Returns [{tag, begin, end, children, ...}]; lines count from 0. */
export const markdown = async (text, key) =>
  (await read("page/markdown", key, { ...posted(key, { text }), signal: AbortSignal.timeout(MARKDOWN_MS) })).blocks;

export const MOST_MARKDOWN = 16_000;
const MARKDOWN_MS = 10_000; // a browser has few connections, and a request without an answer holds one of them

/** Streams a chat answer: yields each chunk, parsed. Throws ApiError; aborting `signal` throws AbortError. */
export async function* chat(body, key, signal) {
  const response = await fetch("v1/chat/completions", { ...posted(key, { ...body, stream: true, trace: true }), signal });
  if (!response.ok) throw await failure(response);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(0, chunk.error.message);
    yield chunk;
  }
  throw new ApiError(0, "the connection was lost before the end of the answer");
}

/** Yields the data of server-sent events, without comments. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (part.startsWith("data: ")) yield part.slice(6);
      }
    }
  } finally {
    // This also ends a request that is left early. A broken stream has raised its error already.
    await reader.cancel().catch(() => {});
  }
}
