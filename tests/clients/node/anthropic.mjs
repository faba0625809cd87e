// The @anthropic-ai/sdk package: node anthropic.mjs URL story | turn [MESSAGES]. Prints one JSON value.

import Anthropic from "@anthropic-ai/sdk";

import { ASK, LONG, PRICE_PARAMETERS, toolbox, TRIP, TRIP_SCHEMA, WEATHER_PARAMETERS } from "./telling.mjs";

const [url, verb, given] = process.argv.slice(2);
const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const plain = { model: "echo", max_tokens: 8000 };
const PARAMETERS = { weather: WEATHER_PARAMETERS, price: PRICE_PARAMETERS };
const offered = Object.entries(PARAMETERS).map(([name, input_schema]) => ({
  name,
  description: `The ${name} of a city.`,
  input_schema,
}));

const textOf = (message) => message.content.map((block) => block.text ?? "").join("");

async function turn(messages, text) {
  const said = [...messages, { role: "user", content: text }];
  const answer = await client.messages.create({ ...plain, messages: said });
  const state = [...said, { role: "assistant", content: answer.content }];
  return { text: textOf(answer), cached: answer.usage.cache_read_input_tokens, state };
}

async function cut(messages, text) {
  const stream = client.messages.stream({ ...plain, messages: [...messages, { role: "user", content: text }] });
  let heard = "";
  stream.on("text", (piece) => {
    heard += piece;
    stream.abort();
  });
  await stream.done().catch(() => undefined);
  return { aborted: stream.aborted, heard: heard.length, asked: text.length };
}

async function rounds(ask) {
  const box = toolbox();
  const messages = [{ role: "user", content: ASK }];
  for (;;) {
    const answer = await ask({ ...plain, messages, tools: offered });
    const calls = answer.content.filter((block) => block.type === "tool_use");
    if (!calls.length) return { text: textOf(answer), called: box.called };
    const results = calls.map((call) => ({
      type: "tool_result",
      tool_use_id: call.id,
      content: box.answer(call.name, call.input),
    }));
    messages.push({ role: "assistant", content: answer.content }, { role: "user", content: results });
  }
}

async function structured() {
  const format = { type: "json_schema", schema: TRIP_SCHEMA };
  const messages = [{ role: "user", content: TRIP }];
  return JSON.parse(textOf(await client.messages.create({ ...plain, messages, output_config: { format } })));
}

async function story() {
  const first = await turn([], "hello");
  const second = await turn(first.state, "again");
  const interrupted = await cut(second.state, LONG);
  const after = await turn(second.state, "after");
  return {
    turns: [first.text, second.text, after.text],
    cached: [first.cached, second.cached, after.cached],
    interrupted,
    loop: await rounds((body) => client.messages.create(body)),
    streamed: await rounds((body) => client.messages.stream(body).finalMessage()),
    structured: await structured(),
  };
}

console.log(JSON.stringify(verb === "story" ? await story() : await turn(...JSON.parse(given))));
