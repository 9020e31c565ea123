"""The index of the public Python names; the site adds signatures and methods below each."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

HEAD = """# Python API

<!-- Written by tools/docs/generate.py from the docstrings of any_agent's and trainer's public
names; change those, then run it. -->

`any_agent` promises these names, and `trainer` the last ones; everything else may change. They are
imported when they are used: `import any_agent` itself loads nothing else. The site that `make docs`
builds has the signature, parameters and methods of each on this page.
"""
GROUPS = {
    "For agents": (
        "Sessions around your own code; no torch, no LiteLLM. [sdk.md](../how-to/sdk.md), "
        "[agent-runner.md](../how-to/agent-runner.md), "
        "[direct-client.md](../how-to/direct-client.md)",
        "AgentSession AgentRunner RLClient EngineOpenAI load_engine RunFinished AnyAgentError",
    ),
    "Configuration and data": (
        "[configuration.md](configuration.md), [datasets.md](../how-to/datasets.md)",
        "Config load_config GRPOConfig load_expr_config get_custom_dataset load_hf_tokenizer",
    ),
    "Workflows": (
        "[workflows.md](../how-to/workflows.md), [rollout.md](../explanation/rollout.md)",
        "RolloutWorkflow RLVRWorkflow MultiTurnWorkflow OpenAIProxyWorkflow OpenAIProxyClient "
        "ProxyWorkflow GroupedRolloutWorkflow concat_padded_tensors workflow_context "
        "stats_tracker",
    ),
    "Engines": (
        "[extend.md](../how-to/extend.md#add-an-engine)",
        "InferenceEngine RemoteSGLangEngine LocalModel ModelRequest LLMRequest ModelResponse "
        "GenerationHyperparameters",
    ),
    "Records and rewards": (
        "[read-the-record.md](../how-to/read-the-record.md), [algorithms.md](algorithms.md)",
        "Interaction InteractionWithTokenLogpReward CompletionWithTokenLogpReward Trajectory "
        "AsyncRewardWrapper gsm8k_reward_fn",
    ),
}
TRAINER = "[training-on-data.md](../how-to/training-on-data.md), [extend.md](../how-to/extend.md)"

_GIVES = {
    "AgentSession": ("any_agent.sdk.session.AsyncSession",),
    "AgentRunner": ("any_agent.sdk.results.RunResults", "any_agent.sdk.results.RunResult"),
}
"""Classes whose objects users get from a public name."""


def render() -> str:
    """Return the document; KeyError if a public name is in no group, or a group's name is none."""
    public: Any = importlib.import_module("any_agent")
    trainer: Any = importlib.import_module("trainer")
    left = {*public.__all__} - {"__version__"}
    parts = [HEAD]
    for title, (about, names) in GROUPS.items():
        parts.append(_group(title, about, {n: getattr(public, n) for n in names.split()}))
        left ^= {*names.split()}
    if left:
        raise KeyError(f"tools/docs/python_api.py: put each public name in one group: {left}")
    parts.append(_group("trainer", TRAINER, {n: getattr(trainer, n) for n in trainer.__all__}))
    return "\n".join(parts)


def _group(title: str, about: str, members: dict[str, Any]) -> str:
    lines = [f"## {title}\n", f"{about}\n", "| name | |", "|---|---|"]
    homes = []
    for name, value in members.items():
        home = _home(value)
        alias = home.rpartition(".")[2] != name and not inspect.ismodule(value)
        text = f"another name of `{home.rpartition('.')[2]}`" if alias else _first_sentence(value)
        lines.append(f"| `{name}` | {text} |")
        homes += [] if alias else [home, *_GIVES.get(name, ())]
    return "\n".join([*lines, "", *(f"<!-- signature: {home} -->" for home in homes), ""])


def _home(value: Any) -> str:
    """Return the dotted name of a value's definition."""
    if inspect.ismodule(value):
        return value.__name__
    return f"{value.__module__}.{value.__qualname__}"


def _first_sentence(value: Any) -> str:
    """Return a docstring's first sentence, without Sphinx's roles."""
    text = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`")
    first = re.match(r".+?[.:](?= |$)", text)
    return (first.group() if first else text).rstrip(".:").replace("|", "\\|")
