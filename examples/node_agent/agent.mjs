// An agent with npm's openai: it executes the model's additions, and prints the model's answer.
// It contains nothing for training, and also runs against OpenAI: OPENAI_API_KEY=... node agent.mjs "What is 2 + 3?"
import OpenAI from "openai";

const TOOLS = [
  {
    type: "function",
    function: {
      name: "add",
      description: "Add two whole numbers.",
      parameters: {
        type: "object",
        properties: { a: { type: "integer" }, b: { type: "integer" } },
        required: ["a", "b"],
      },
    },
  },
];

function add(text) {
  try {
    const { a, b } = JSON.parse(text);
    if (Number.isSafeInteger(a) && Number.isSafeInteger(b)) return String(a + b);
  } catch {
    // The model's text is not JSON.
  }
  return "error: a and b must be whole numbers";
}

const client = new OpenAI({ maxRetries: 5 });
const messages = [{ role: "user", content: process.argv[2] }];
for (let turn = 0; turn < 4; turn++) {
  const answer = await client.chat.completions.create({ model: "gpt-5-mini", messages, tools: TOOLS });
  const { message } = answer.choices[0];
  messages.push(message);
  if (!message.tool_calls?.length) {
    console.log(message.content);
    process.exit(0);
  }
  for (const call of message.tool_calls) {
    messages.push({ role: "tool", tool_call_id: call.id, content: add(call.function.arguments) });
  }
}
console.error("error: no answer after four calls");
process.exit(1);
