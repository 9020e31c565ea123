// What an agent does with npm's openai, over chat and over Responses.
import OpenAI from "openai";

const MODEL = "gpt-4o";
const ASK = [{ role: "user", content: "What is 2 and 3?" }];
const ADD = {
  name: "add",
  description: "Adds two numbers.",
  parameters: {
    type: "object",
    properties: { a: { type: "integer" }, b: { type: "integer" } },
    required: ["a", "b"],
    additionalProperties: false,
  },
};
const TOOLS = [{ type: "function", function: ADD }];
const TOOL_ITEMS = [{ type: "function", strict: false, ...ADD }];

const chat = (more = {}) => ({ model: MODEL, messages: ASK, ...more });
const items = (more = {}) => ({ model: MODEL, input: ASK, store: false, ...more });
const sum = (text) => {
  const { a, b } = JSON.parse(text);
  return String(a + b);
};

export async function plain(api) {
  const client = new OpenAI();
  if (api === "chat") {
    const answer = await client.chat.completions.create(chat());
    const [choice] = answer.choices;
    return {
      content: choice.message.content,
      ended: choice.finish_reason === "stop",
      tokens: answer.usage.completion_tokens,
    };
  }
  const answer = await client.responses.create(items());
  const ended = answer.status === "completed";
  return { content: answer.output_text, ended, tokens: answer.usage.output_tokens };
}

export async function stream(api) {
  const client = new OpenAI();
  let content = "";
  let parts = 0;
  let tokens = 0;
  if (api === "chat") {
    const more = { stream: true, stream_options: { include_usage: true } };
    for await (const chunk of await client.chat.completions.create(chat(more))) {
      const delta = chunk.choices[0]?.delta.content ?? "";
      content += delta;
      parts += delta === "" ? 0 : 1;
      tokens = chunk.usage?.completion_tokens ?? tokens;
    }
    return { content, tokens, "in parts": parts > 2 };
  }
  for await (const event of await client.responses.create(items({ stream: true }))) {
    if (event.type === "response.output_text.delta") {
      content += event.delta;
      parts += 1;
    } else if (event.type === "response.completed") {
      tokens = event.response.usage.output_tokens;
    }
  }
  return { content, tokens, "in parts": parts > 2 };
}

// The SDK's own accumulation of a stream, which is to equal the whole answer.
export async function helper(api) {
  const client = new OpenAI();
  if (api === "chat") {
    const final = await client.chat.completions.stream(chat({ tools: TOOLS })).finalChatCompletion();
    const { message, finish_reason } = final.choices[0];
    const calls = message.tool_calls.map((c) => [c.function.name, c.function.arguments]);
    return { content: message.content, ended: finish_reason === "tool_calls", calls };
  }
  const final = await client.responses.stream(items({ tools: TOOL_ITEMS })).finalResponse();
  const calls = final.output.filter((item) => item.type === "function_call");
  return {
    content: final.output_text,
    ended: final.status === "completed",
    calls: calls.map((c) => [c.name, c.arguments]),
  };
}

export async function threeTurns(api) {
  const client = new OpenAI();
  const said = [];
  let talk = [];
  for (const text of [ASK[0].content, "And 1?", "And 2?"]) {
    talk = [...talk, { role: "user", content: text }];
    if (api === "chat") {
      const { message } = (await client.chat.completions.create(chat({ messages: talk }))).choices[0];
      said.push(message.content);
      talk.push(message);
    } else {
      const answer = await client.responses.create(items({ input: talk }));
      said.push(answer.output_text);
      talk.push(...answer.output);
    }
  }
  return { said };
}

// Three turns, of which each sends only what is new.
export async function previous() {
  const client = new OpenAI();
  const said = [];
  let last = null;
  for (const input of [ASK[0].content, "And 1?", "And 2?"]) {
    const answer = await client.responses.create({
      model: MODEL,
      input,
      previous_response_id: last,
    });
    said.push(answer.output_text);
    last = answer.id;
  }
  return { said };
}

// A round trip: the call is carried out, its result goes back.
export async function tools(api) {
  const client = new OpenAI();
  if (api === "chat") {
    const first = await client.chat.completions.create(chat({ tools: TOOLS }));
    return chatCarriedOut(client, first.choices[0].message);
  }
  return itemsCarriedOut(client, await client.responses.create(items({ tools: TOOL_ITEMS })));
}

export async function toolsStreamed(api) {
  const client = new OpenAI();
  if (api === "chat") {
    const final = await client.chat.completions.stream(chat({ tools: TOOLS })).finalChatCompletion();
    return chatCarriedOut(client, final.choices[0].message);
  }
  const final = await client.responses.stream(items({ tools: TOOL_ITEMS })).finalResponse();
  return itemsCarriedOut(client, final);
}

async function chatCarriedOut(client, message) {
  const [call] = message.tool_calls;
  const result = sum(call.function.arguments);
  const messages = [...ASK, message, { role: "tool", tool_call_id: call.id, content: result }];
  const last = await client.chat.completions.create(chat({ messages, tools: TOOLS }));
  return { name: call.function.name, result, content: last.choices[0].message.content };
}

async function itemsCarriedOut(client, answer) {
  const call = answer.output.find((item) => item.type === "function_call");
  const output = sum(call.arguments);
  const input = [
    ...ASK,
    ...answer.output,
    { type: "function_call_output", call_id: call.call_id, output },
  ];
  const last = await client.responses.create(items({ input, tools: TOOL_ITEMS }));
  return { name: call.name, result: output, content: last.output_text };
}

export async function legacy() {
  const client = new OpenAI();
  const asked = { model: MODEL, prompt: "2 and 3 is", max_tokens: 8 };
  const answer = await client.completions.create(asked);
  let streamed = "";
  for await (const chunk of await client.completions.create({ ...asked, stream: true })) {
    streamed += chunk.choices[0].text;
  }
  return { text: answer.choices[0].text, streamed };
}

export async function refused(api) {
  const client = new OpenAI();
  const calls = {
    chat: () => client.chat.completions.create(chat({ suffix: 1 })),
    responses: () => client.responses.create(items({ suffix: 1 })),
  };
  try {
    await calls[api]();
  } catch (error) {
    return { bad: error instanceof OpenAI.BadRequestError, code: error.code };
  }
  return {};
}
