// Runs steps of a client's script for the tests, as runner.py does: `node runner.mjs SCRIPT`.
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

const steps = await import(pathToFileURL(process.argv[2]));
for await (const line of createInterface({ input: process.stdin })) {
  const asked = JSON.parse(line);
  Object.assign(process.env, asked.variables);
  let answer;
  try {
    answer = await steps[asked.step](...asked.given);
  } catch (error) {
    answer = { raised: String(error?.stack ?? error) };
  }
  process.stdout.write(JSON.stringify(answer) + "\n");
}
