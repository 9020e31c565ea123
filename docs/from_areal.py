"""docs/from-areal.md: what users of AReaL and of the proposal know, and what it is here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

ROWS = Path(__file__).with_suffix(".yaml")
HEAD = """# Coming from AReaL

<!-- Written by docs/generate.py from docs/from_areal.yaml; change that, then run it. -->

Code that was written against AReaL's documents, or against the any-agent proposal, runs here with other import names: agents,
workflows, training scripts, sessions, clients of AReaL's proxy. This page lists every public name, route, setting and example of
AReaL 1.0.4's references and guides and of the proposal, and the tests that show each.
[Differences in meaning](#differences-in-meaning) are at the end.

The training script of AReaL's guide, with our imports:

```python
import sys

from any_agent import GRPOConfig, get_custom_dataset, load_expr_config, load_hf_tokenizer
from trainer import PPOTrainer

if __name__ == "__main__":
    config, _ = load_expr_config(sys.argv[1:], GRPOConfig)
    train_dataset = get_custom_dataset(
        split="train",
        dataset_config=config.train_dataset,
        tokenizer=load_hf_tokenizer(config.tokenizer_path),
    )
    with PPOTrainer(config, train_dataset=train_dataset) as trainer:
        trainer.train(workflow="my_agent.MathAgent")
```

The last lines stand under `if __name__ == "__main__":`, because worker processes import the script, too.
How training works here: [training-on-data.md](training-on-data.md), [agents-in-training.md](agents-in-training.md),
[workflows.md](workflows.md).
"""
INTROS = {
    "Import names": "Each module of the documents, and the one to import from here.",
    "Settings": "A setting whose meaning is exactly one of ours is accepted under its old name. "
    "Any other is refused, and the error names ours.",
    "Routes": "A client of AReaL's proxy, or of its gateway, works with another URL. "
    "`tests/proxy_ext/areal_client.py` is such a client.\n\n"
    "The session's key goes into `Authorization: Bearer` or `x-api-key`, or before the path: "
    "`/{api_key}/rl/set_reward`. Without an admin key the session's id works there, too: "
    "`/task-0-0/v1/chat/completions`.",
    "Examples": "`make test-documents` runs every code block of the documents against a live "
    "service and prints a line for each, where the documents lie beside the repository.",
}
TAIL = """
## Differences in meaning

- **Slots.** Our trainer admits train sessions, so nobody has to grant any. A grant is one slot more, on a counter of
  its own that outlives restarts; the next `/rl/start_session` takes it, whichever rank has it. A session that is opened on a
  grant has no group and belongs to whoever granted it: our trainer never gets it and never counts it, and it opens also
  with `--no-train` or when the training has finished. Whoever grants slots is expected to export the trajectory; one that nobody
  exports stays `finalized`, also over restarts, until it is vetoed or deleted. Without grants, sessions of one `task_id` form
  groups of `sessions.group_size`; a session without a `task_id` is a group of its own.
- **Rewards.** A session that was called and never rewarded is not ended with a reward of 0: `end_session` and the next
  `start_session` with its key answer 422 `no_reward` (`sessions.require_reward=false` takes it as 0). Rewards are finite
  numbers of at most 1e6. An unknown interaction is 404, a session without one 422; AReaL says 400.
- **Ends.** `end_session` may be repeated and answers the same. A session without a model call is thrown away, and its export is
  empty. Calls after the end get 410.
- **Keys.** `start_session` with an earlier key ends the session that is open under it and opens the next one, for which it
  waits up to 115 s. A key of another service is refused (401), not replaced.
- **Exports.** `export_trajectories` waits up to 240 s for the session's end. Then the session is the caller's: our trainer
  never sees it. (If it was opened without a grant, the trainer may have had it first: 409.) It can be exported again, as an answer
  may be lost. What a retry left behind is masked, whatever `drop_retry_orphans` says. Rewards run back by
  `r(parent) = own + discount * mean(r(children))`, with `discount` between 0 and 1. `concat` of a conversation that is not
  token-exact is 422 instead of a guess.
- **Names.** `task_id` has at most 48 characters of `A-Za-z0-9._-`. Unknown fields and query parameters are refused, not ignored.
- **Sampling.** In train sessions the run's temperature applies, whatever a call asks for.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table: names in Markdown, ``pytest`` ids of the tests that show it."""

    areal: str
    here: str
    tests: tuple[str, ...]


def sections() -> dict[str, list[Row]]:
    """Return the rows of each section, in the document's order."""
    read = yaml.safe_load(ROWS.read_text(encoding="utf-8"))
    return {
        title: [Row(row["areal"], row["here"], tuple(row["tests"])) for row in rows]
        for title, rows in read.items()
    }


def document() -> str:
    parts = [HEAD]
    for title, rows in sections().items():
        parts.append(f"\n## {title}\n")
        if title in INTROS:
            parts.append(f"\n{INTROS[title]}\n")
        parts.append("\n| AReaL | here | shown by |\n|---|---|---|\n")
        for row in rows:
            tests = ", ".join(f"`{test}`" for test in row.tests)
            parts.append(f"| {_cell(row.areal)} | {_cell(row.here)} | {tests} |\n")
    return "".join(parts) + TAIL


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
