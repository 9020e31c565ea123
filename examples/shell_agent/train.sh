#!/usr/bin/env bash
# Train the agent until the last step: bash examples/shell_agent/train.sh [key=value ...]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
largest=${LARGEST:-99999}
group=${GROUP:-8}

# The service, which trains on finalized sessions.
exec {said}< <(exec any-agent train --config "$here/config.yaml" "$@" 2>&1)
trainer=$!
logs=$(mktemp -d)
trap 'kill "$trainer" 2> /dev/null || true; rm -rf "$logs"' EXIT
while read -r line <&"$said"; do
  echo "$line"
  if [[ $line == *'any-agent server listening at '* ]]; then
    export ANY_AGENT_URL=${line##* }
    break
  fi
done
[[ -n ${ANY_AGENT_URL:-} ]] || exit 1
cat <&"$said" &

# The agents: a group of runs for one task after another.
while kill -0 "$trainer" 2> /dev/null; do
  a=$(((RANDOM * 32768 + RANDOM) % (largest + 1)))
  b=$(((RANDOM * 32768 + RANDOM) % (largest + 1)))
  rm -rf "$logs"
  code=0
  any-agent run --n "$group" --task "add-$a-$b" --timeout 300 --logs "$logs" \
    --reward-cmd "tail -n 1 | grep -cx '$((a + b))' || true" \
    -- bash "$here/agent.sh" "What is $a + $b?" || code=$?
  case $code in
    0 | 1) ;;  # some runs may fail: they are discarded
    3) break ;;  # the training has ended
    *) exit "$code" ;;
  esac
done
wait "$trainer"
