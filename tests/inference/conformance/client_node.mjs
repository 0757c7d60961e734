// The npm package `openai` under Node: chats, streams, responses, files and errors.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const resolve = createRequire(process.env.NODE_PACKAGES + "/").resolve;
const { default: OpenAI, toFile } = await import(pathToFileURL(resolve("openai")));

const model = process.env.WEIR_MODEL;
const client = new OpenAI({
  baseURL: `${process.env.WEIR_URL}/v1`, apiKey: process.env.WEIR_KEY, maxRetries: 0, timeout: 60_000,
});
const messages = [{ role: "developer", content: "Be brief." }, { role: "user", content: [{ type: "text", text: "hello" }] }];

const whole = await client.chat.completions.create({ model, messages, max_completion_tokens: 7, seed: 3 });
assert.equal(whole.choices[0].message.content.length, 7);
assert.equal(whole.usage.completion_tokens, 7);
assert.ok(whole._request_id);

let text = "", usage = null;
const stream = await client.chat.completions.create({
  model, messages, max_completion_tokens: 7, seed: 3, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, whole.choices[0].message.content);
assert.equal(usage.completion_tokens, 7);

const tools = [{ type: "function", function: { name: "is_open", parameters: {
  type: "object", properties: { sluice: { type: "boolean" } }, required: ["sluice"], additionalProperties: false } } }];
const runner = client.chat.completions.stream({
  model: process.env.WEIR_TOOL_MODEL, messages, tools, tool_choice: "required", parallel_tool_calls: false,
  max_completion_tokens: 300, seed: 1,
});
const [call] = (await runner.finalMessage()).tool_calls;
assert.equal(typeof JSON.parse(call.function.arguments).sluice, "boolean");

const response = await client.responses.create({ model, input: "hello", max_output_tokens: 7 });
assert.equal(response.output_text.length, 7);
const next = await client.responses.create({
  model, input: "and?", previous_response_id: response.id, max_output_tokens: 5, stream: true,
});
const types = [];
for await (const event of next) types.push(event.type);
assert.equal(types[0], "response.created");
assert.equal(types.at(-1), "response.incomplete");

const file = await client.files.create({ file: await toFile(Buffer.from("{}\n"), "in.jsonl"), purpose: "batch" });
assert.equal(await (await client.files.content(file.id)).text(), "{}\n");
assert.ok((await client.files.delete(file.id)).deleted);

const names = [];
for await (const each of client.models.list()) names.push(each.id);
assert.ok(names.includes(model));
await assert.rejects(
  client.chat.completions.create({ model, messages, temperature: 3 }),
  (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature",
);
await assert.rejects(client.models.retrieve("nope"), OpenAI.NotFoundError);

const aborted = await client.chat.completions.create({ model, messages, max_completion_tokens: 3000, stream: true });
for await (const _ of aborted) break; // leaves in mid-stream, as a browser does
console.log("ok");
