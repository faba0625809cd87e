// AI SDK: node ai_sdk.mjs PROVIDER URL story | turn [MESSAGES]. Prints one JSON value.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, isStepCount, Output, streamText, tool } from "ai";
import { z } from "zod";

import { ASK, CALLED_TRIP, LONG, toolbox, TRIP } from "./telling.mjs";

const [provider, url, verb, given] = process.argv.slice(2);
const where = { baseURL: `${url}/v1`, apiKey: "none" };
const models = {
  responses: () => createOpenAI(where).responses("echo"),
  chat: () => createOpenAI(where).chat("echo"),
  compatible: () =>
    createOpenAICompatible({
      ...where,
      name: "holdfast",
      includeUsage: true,
      supportsStructuredOutputs: true,
    }).chatModel("echo"),
  anthropic: () => createAnthropic(where)("echo"),
};
const plain = { model: models[provider](), maxRetries: 0, maxOutputTokens: 8000 };

async function turn(messages, text) {
  const said = [...messages, { role: "user", content: text }];
  const result = await generateText({ ...plain, messages: said });
  const cached = result.usage.inputTokenDetails?.cacheReadTokens ?? 0;
  return { text: result.text, cached, messages: [...said, ...result.response.messages] };
}

function offered(box) {
  const city = z.string();
  return {
    weather: tool({
      description: "The weather of a city.",
      inputSchema: z.object({ city, days: z.number().int() }),
      execute: (args) => box.answer("weather", args),
    }),
    price: tool({
      description: "The price of a journey.",
      inputSchema: z.object({ city }),
      execute: (args) => box.answer("price", args),
    }),
  };
}

async function loop() {
  const box = toolbox();
  const result = await generateText({ ...plain, prompt: ASK, tools: offered(box), stopWhen: isStepCount(5) });
  return { called: box.called, steps: result.steps.length, finish: result.finishReason, text: result.text };
}

async function streamedLoop() {
  const box = toolbox();
  const result = streamText({ ...plain, prompt: ASK, tools: offered(box), stopWhen: isStepCount(5) });
  const kinds = new Set();
  for await (const part of result.fullStream) {
    if (part.type === "error") throw part.error;
    kinds.add(part.type);
  }
  return { called: box.called, steps: (await result.steps).length, kinds: [...kinds], text: await result.text };
}

async function structured() {
  const schema = z.object({ city: z.string(), days: z.number().int(), cheap: z.boolean() });
  // With a model that it does not know, the Anthropic provider asks for a call of a tool named json.
  const prompt = provider === "anthropic" ? CALLED_TRIP : TRIP;
  const output = await generateText({ ...plain, prompt, output: Output.object({ schema }) });
  const object = await generateObject({ ...plain, prompt, schema });
  return { output: output.output, object: object.object };
}

async function cut(messages) {
  const stopper = new AbortController();
  const said = [...messages, { role: "user", content: LONG }];
  const result = streamText({ ...plain, messages: said, abortSignal: stopper.signal });
  let heard = "";
  let aborted = false;
  for await (const part of result.fullStream) {
    if (part.type === "text-delta") {
      heard += part.text;
      stopper.abort();
    }
    aborted ||= part.type === "abort";
  }
  return { aborted, heard: heard.length, asked: LONG.length };
}

async function story() {
  const first = await turn([], "hello");
  const second = await turn(first.messages, "again");
  const interrupted = await cut(second.messages);
  const after = await turn(second.messages, "after");
  return {
    turns: [first.text, second.text, after.text],
    cached: [first.cached, second.cached, after.cached],
    interrupted,
    loop: await loop(),
    streamed: await streamedLoop(),
    structured: await structured(),
  };
}

const done = verb === "story" ? await story() : await turn(...JSON.parse(given));
console.log(JSON.stringify(done));
