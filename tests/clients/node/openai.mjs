// The openai package: node openai.mjs INTERFACE URL story | turn [STATE]. Prints one JSON value.

import OpenAI from "openai";

import { ASK, LONG, PRICE_PARAMETERS, toolbox, TRIP, TRIP_SCHEMA, wasAborted, WEATHER_PARAMETERS } from "./telling.mjs";

const [name, url, verb, given] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const PARAMETERS = { weather: WEATHER_PARAMETERS, price: PRICE_PARAMETERS };
const flat = Object.entries(PARAMETERS).map(([tool, parameters]) => ({
  type: "function",
  name: tool,
  description: `The ${tool} of a city.`,
  parameters,
  strict: false,
}));
const nested = flat.map(({ type, ...rest }) => ({ type, function: rest }));

/** Chat completions: the state of a conversation is its messages. */
const chat = {
  fresh: [],
  async turn(messages, text, options = {}) {
    const said = [...messages, { role: "user", content: text }];
    const answer = await client.chat.completions.create({ model: "echo", messages: said }, options);
    const cached = answer.usage.prompt_tokens_details?.cached_tokens ?? 0;
    return { text: answer.choices[0].message.content, cached, state: [...said, answer.choices[0].message] };
  },
  async cut(messages, text) {
    const said = [...messages, { role: "user", content: text }];
    const stream = await client.chat.completions.create({ model: "echo", messages: said, stream: true });
    let heard = "";
    for await (const chunk of stream) {
      heard += chunk.choices[0]?.delta.content ?? "";
      if (heard) stream.controller.abort();
    }
    return { aborted: stream.controller.signal.aborted, heard: heard.length, asked: text.length };
  },
  async loop() {
    const box = toolbox();
    const tools = nested.map((tool) => ({
      type: "function",
      function: { ...tool.function, parse: JSON.parse, function: (args) => box.answer(tool.function.name, args) },
    }));
    const runner = client.chat.completions.runTools({ model: "echo", messages: [{ role: "user", content: ASK }], tools });
    return { text: await runner.finalContent(), called: box.called };
  },
  async streamedLoop() {
    const box = toolbox();
    const messages = [{ role: "user", content: ASK }];
    for (;;) {
      const stream = client.chat.completions.stream({ model: "echo", messages, tools: nested });
      const { message } = (await stream.finalChatCompletion()).choices[0];
      messages.push(message);
      if (!message.tool_calls?.length) return { text: message.content, called: box.called };
      for (const call of message.tool_calls) {
        const content = box.answer(call.function.name, JSON.parse(call.function.arguments));
        messages.push({ role: "tool", tool_call_id: call.id, content });
      }
    }
  },
  async structured() {
    const format = { type: "json_schema", json_schema: { name: "trip", strict: true, schema: TRIP_SCHEMA } };
    const messages = [{ role: "user", content: TRIP }];
    const answer = await client.chat.completions.parse({ model: "echo", messages, response_format: format });
    return JSON.parse(answer.choices[0].message.content);
  },
};

/** Responses: the state of a conversation is the id of the last one. */
const responses = {
  fresh: null,
  async turn(previous, text, options = {}) {
    const body = { model: "echo", input: text, previous_response_id: previous };
    const answer = await client.responses.create(body, options);
    const cached = answer.usage.input_tokens_details.cached_tokens;
    return { text: answer.output_text, cached, state: answer.id };
  },
  async cut(previous, text) {
    const body = { model: "echo", input: text, previous_response_id: previous, stream: true };
    const stream = await client.responses.create(body);
    let heard = "";
    for await (const event of stream) {
      if (event.type === "response.output_text.delta") heard += event.delta;
      if (heard) stream.controller.abort();
    }
    return { aborted: stream.controller.signal.aborted, heard: heard.length, asked: text.length };
  },
  async rounds(ask) {
    const box = toolbox();
    let input = ASK;
    let previous = null;
    for (;;) {
      const answer = await ask({ model: "echo", input, tools: flat, previous_response_id: previous });
      const calls = answer.output.filter((item) => item.type === "function_call");
      if (!calls.length) return { text: answer.output_text, called: box.called };
      previous = answer.id;
      input = calls.map((call) => ({
        type: "function_call_output",
        call_id: call.call_id,
        output: box.answer(call.name, JSON.parse(call.arguments)),
      }));
    }
  },
  loop() {
    return this.rounds((body) => client.responses.create(body));
  },
  streamedLoop() {
    return this.rounds((body) => client.responses.stream(body).finalResponse());
  },
  async structured() {
    const format = { type: "json_schema", name: "trip", strict: true, schema: TRIP_SCHEMA };
    const answer = await client.responses.parse({ model: "echo", input: TRIP, text: { format } });
    return answer.output_parsed ?? JSON.parse(answer.output_text);
  },
};

async function story(talk) {
  const first = await talk.turn(talk.fresh, "hello");
  const second = await talk.turn(first.state, "again");
  const stopper = new AbortController();
  const refused = wasAborted(talk.turn(second.state, LONG, { signal: stopper.signal }));
  setImmediate(() => stopper.abort());
  const unheard = await refused;
  const interrupted = await talk.cut(second.state, LONG);
  const after = await talk.turn(second.state, "after");
  return {
    turns: [first.text, second.text, after.text],
    cached: [first.cached, second.cached, after.cached],
    unheard,
    interrupted,
    loop: await talk.loop(),
    streamed: await talk.streamedLoop(),
    structured: await talk.structured(),
  };
}

const talk = { chat, responses }[name];
const done = verb === "story" ? await story(talk) : await talk.turn(...JSON.parse(given));
console.log(JSON.stringify(done));
