// Tools that a person has typed as JSON: checked for their form here, and by the server for the rest.

export function readTools(text) {
  if (!text.trim()) return { tools: [], problem: "" };
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    return { tools: [], problem: `This is not JSON: ${error.message}` };
  }
  if (!Array.isArray(tools)) return { tools: [], problem: "The tools must be an array." };
  const place = tools.findIndex((tool) => !isFunction(tool));
  if (place >= 0) {
    return { tools: [], problem: `Tool ${place + 1} must be {"type": "function", "function": {"name": …}}.` };
  }
  return { tools, problem: "" };
}

function isFunction(tool) {
  return tool !== null && typeof tool === "object" && tool.type === "function" && typeof tool.function?.name === "string";
}
