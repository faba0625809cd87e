// What the scripts of the clients tell the model, which repeats it, and what their tools answer.

export const LONG = "x".repeat(4000);
export const TRIP = '{"city": "Rome", "days": 2, "cheap": true}';

export const CALLED_TRIP = `<tool_call>\n{"name": "json", "arguments": ${TRIP}}\n</tool_call>`;

/** A text that is a call when the model repeats it. */
export function calling(name, args) {
  return `First.\n<tool_call>\n${JSON.stringify({ name, arguments: args })}\n</tool_call>\n`;
}

/** The result of the first tool is the call of the second; that of the second is an answer. */
export const WEATHER_SAID = `sunny\n${calling("price", { city: "Rome" })}`;
export const PRICE_SAID = "120 euros";
export const ASK = calling("weather", { city: "Rome", days: 2 });

export const WEATHER_PARAMETERS = {
  type: "object",
  properties: { city: { type: "string" }, days: { type: "integer" } },
  required: ["city", "days"],
  additionalProperties: false,
};
export const PRICE_PARAMETERS = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
export const TRIP_SCHEMA = {
  type: "object",
  properties: { city: { type: "string" }, days: { type: "integer" }, cheap: { type: "boolean" } },
  required: ["city", "days", "cheap"],
  additionalProperties: false,
};

/** Runs a tool by its name, and keeps what it was called with. */
export function toolbox() {
  const called = [];
  return {
    called,
    answer(name, args) {
      called.push([name, args]);
      return name === "weather" ? WEATHER_SAID : PRICE_SAID;
    },
  };
}

/** Whether a promise was rejected because its request was aborted. */
export async function wasAborted(promise) {
  try {
    await promise;
    return false;
  } catch (error) {
    return /abort/i.test(`${error?.name} ${error?.message}`);
  }
}
