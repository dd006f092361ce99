// A streamed answer to a prompt or, with messages in the body, to a chat.

const NO_CONNECTION = "The server does not answer; try again when it runs.";
const NO_END = "The connection ended before the answer did.";

// Yields {text, reasoning, reason, usage} of each event. Throws an Error with the server's own words.
export async function* complete(body, signal, onStart = () => {}) {
  const response = await fetch(body.messages ? "/v1/chat/completions" : "/v1/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  }).catch((error) => { throw plain(error, NO_CONNECTION); });
  if (!response.ok) {
    const answer = await response.json().catch(() => null);
    throw new Error(answer?.error?.message ?? `The server answered ${response.status}.`);
  }
  onStart(response.headers.get("x-request-id"));
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    const { text, delta, finish_reason: reason = null } = chunk.choices[0] ?? {};
    yield { text: text ?? delta?.content ?? "", reasoning: delta?.reasoning_content ?? "", reason, usage: chunk.usage ?? null };
  }
  throw new Error(NO_END);
}

const plain = (error, words) => (error.name === "TypeError" ? new Error(words) : error);

// The data of each server-sent event.
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((error) => { throw plain(error, NO_END); });
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const lines = part.split("\n").filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
