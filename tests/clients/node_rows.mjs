// Node's clients. node node_rows.mjs URL MODEL: one JSON array [client, what, answer] a line.
// Packages are looked for where it lies: `make clients` copies it beside its node_modules.
import Anthropic from "@anthropic-ai/sdk";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, jsonSchema, streamText, tool } from "ai";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const messages = [{ role: "user", content: "Name a city." }];
const schema = {
  type: "object",
  properties: { city: { enum: ["Bern", "Paris"] } },
  required: ["city"],
  additionalProperties: false,
};
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "any", maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: url, apiKey: "any", maxRetries: 0 });
const compatible = createOpenAICompatible({ name: "served", baseURL: `${url}/v1`, supportsStructuredOutputs: true });
const claude = createAnthropic({ baseURL: `${url}/v1`, apiKey: "any" });
const functions = [{ type: "function", function: { name: "weather", parameters: schema } }];
const tools = { weather: tool({ description: "of a city", inputSchema: jsonSchema(schema) }) };
const check = (holds, what) => {
  if (!holds) throw new Error(JSON.stringify(what).slice(0, 200));
};
const all = async (stream) => {
  const found = [];
  for await (const each of stream) found.push(each);
  return found;
};
const text = async (served, more = {}) => {
  const base = { model: served, messages, maxOutputTokens: 8, maxRetries: 0 };
  check((await generateText({ ...base, ...more })).usage.outputTokens, "nothing");
  let failure;
  const stream = streamText({ ...base, ...more, onError: ({ error }) => (failure = error) });
  const parts = await all(stream.fullStream);
  if (failure) throw failure;
  check(parts.at(-1).type === "finish", parts.at(-1));
};
const object = async (served) => {
  const options = { model: served, messages, schema: jsonSchema(schema), maxOutputTokens: 250, maxRetries: 0 };
  check("city" in (await generateObject({ ...options, temperature: 0 })).object, "no city");
};
const forced = async (served) => {
  const options = { model: served, messages, tools, toolChoice: "required", maxOutputTokens: 250, maxRetries: 0 };
  const { toolCalls } = await generateText({ ...options, temperature: 0 });
  check(toolCalls[0]?.toolName === "weather", toolCalls);
};

const rows = [
  ["openai (node)", "chat, streamed, tools", async () => {
    const create = (more) => openai.chat.completions.create({ model, messages, max_tokens: 8, ...more });
    check((await create({ tools: functions })).choices.length, "nothing");
    const chunks = await all(await create({ stream: true, stream_options: { include_usage: true } }));
    check(chunks.at(-1).usage.completion_tokens, chunks.at(-1));
  }],
  ["openai (node)", "responses, streamed", async () => {
    const events = await all(await openai.responses.create({ model, input: "Name a city.", max_output_tokens: 16, stream: true }));
    check(["response.completed", "response.incomplete"].includes(events.at(-1).type), events.at(-1));
  }],
  ["anthropic (node)", "messages, streamed", async () => {
    const stream = anthropic.messages.stream({ model, messages, max_tokens: 8 });
    check((await stream.finalMessage()).usage.output_tokens, "nothing");
  }],
  ["AI SDK, openai-compatible", "generateText, streamText", () => text(compatible(model))],
  ["AI SDK, openai-compatible", "tools, streamed", () => text(compatible(model), { tools })],
  ["AI SDK, openai-compatible", "generateObject", () => object(compatible(model))],
  ["AI SDK, openai-compatible", "toolChoice required", () => forced(compatible(model))],
  ["AI SDK, anthropic", "generateText, streamText", () => text(claude(model))],
  ["AI SDK, anthropic", "tools, streamed", () => text(claude(model), { tools })],
  ["AI SDK, anthropic", "generateObject", () => object(claude(model))],
  ["AI SDK, anthropic", "toolChoice required", () => forced(claude(model))],
];

globalThis.AI_SDK_LOG_WARNINGS = false;
for (const [client, what, work] of rows) {
  let answer = "ok";
  try {
    await work();
  } catch (error) {
    const body = error.responseBody ?? error.message ?? String(error);
    answer = (body.match(/"message":"(.*?)"[,}]/)?.[1] ?? body).replace(/\s+/g, " ").slice(0, 300);
  }
  console.log(JSON.stringify([client, what, answer]));
}
