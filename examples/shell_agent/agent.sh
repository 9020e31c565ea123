#!/usr/bin/env bash
# An agent in bash: it asks a model, executes the model's additions, and prints the model's answer.
# It contains nothing for training, and also runs against OpenAI, with these two variables set:
#   OPENAI_BASE_URL=https://api.openai.com/v1 OPENAI_API_KEY=... bash agent.sh "What is 2 + 3?"
set -euo pipefail

tools='[{"type": "function", "function": {
  "name": "add",
  "description": "Add two whole numbers.",
  "parameters": {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"]
  }
}}]'
messages=$(jq -n --arg question "$1" '[{role: "user", content: $question}]')

ask() {
  # The key is passed by a file: every user of the machine sees a command's arguments.
  jq -n --argjson messages "$messages" --argjson tools "$tools" \
    '{model: "gpt-5-mini", messages: $messages, tools: $tools}' |
    curl -sS --fail-with-body --retry 8 "$OPENAI_BASE_URL/chat/completions" \
      -H @<(printf 'Authorization: Bearer %s\n' "$OPENAI_API_KEY") \
      -H 'Content-Type: application/json' -d @-
}

add() {
  # The numbers are the model's, and bash's arithmetic would execute code in them.
  local whole='^(0|-?[1-9][0-9]{0,14})$'
  if [[ $1 =~ $whole && $2 =~ $whole ]]; then
    echo $(($1 + $2))
  else
    echo 'error: a and b must be whole numbers'
  fi
}

say() {
  messages=$(jq -n --argjson messages "$messages" --argjson message "$1" '$messages + [$message]')
}

for _ in 1 2 3 4; do
  message=$(ask | jq '.choices[0].message')
  say "$message"
  calls=$(jq -c '.tool_calls // [] | .[]' <<< "$message")
  if [[ -z $calls ]]; then
    jq -r .content <<< "$message"
    exit
  fi
  while read -r call; do
    read -r a b < <(jq -r '.function.arguments | fromjson? | "\(.a) \(.b)"' <<< "$call") || a='' b=''
    say "$(jq -n --argjson call "$call" --arg sum "$(add "$a" "$b")" \
      '{role: "tool", tool_call_id: $call.id, content: $sum}')"
  done <<< "$calls"
done
echo 'error: no answer after four calls' >&2
exit 1
