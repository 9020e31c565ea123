"""The tables of output grammars: by the renderer's name, and by signs in the chat template."""

from __future__ import annotations

from any_agent.chat.output.grammar import THINK, OutputGrammar, marked
from any_agent.chat.output.grammars import deepseek, glm, harmony, hermes, kimi, llama, xml

_PLAIN = OutputGrammar(marks=THINK, new_machine=marked(None))
_BY_RENDERER: dict[str, OutputGrammar] = {
    "qwen3": hermes.GRAMMAR,
    "qwen3-vl": hermes.GRAMMAR,
    "qwen3.5": xml.GRAMMAR,
    "qwen3.6": xml.GRAMMAR,
    "qwen3.8": xml.GRAMMAR,
    "prime-qwen3": xml.GRAMMAR,
    "nemotron-3": xml.GRAMMAR,
    "nemotron-3-ultra": xml.GRAMMAR,
    "nemotron-3.5": xml.GRAMMAR,
    "glm-4.5": glm.GRAMMAR,
    "glm-5": glm.GRAMMAR,
    "glm-5.1": glm.GRAMMAR,
    "glm-5.3": glm.GRAMMAR,
    "deepseek-v3": deepseek.GRAMMAR,
    "deepseek-r1": deepseek.GRAMMAR,
    "llama-3": llama.GRAMMAR,
    "gpt-oss": harmony.GRAMMAR,
    "kimi-k2": kimi.GRAMMAR,
    "minimax-m2": xml.MINIMAX_GRAMMAR,
}
"""Grammars by names of PyPI's ``renderers``. Outputs of other families are parsed at their end."""
_BY_TEMPLATE: tuple[tuple[tuple[str, ...], OutputGrammar], ...] = (
    (("<minimax:tool_call>", "<invoke name="), xml.MINIMAX_GRAMMAR),
    (("<tool_call>", "<function="), xml.GRAMMAR),
    (("<tool_call>", "<arg_key>"), glm.GRAMMAR),
    (("<tool_call>",), hermes.GRAMMAR),
    (("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "```json"), deepseek.GRAMMAR),
    (("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"), kimi.GRAMMAR),
    (("<|start|>", "<|channel|>", "<|message|>"), harmony.GRAMMAR),
    (("<|start_header_id|>", '"parameters": '), llama.GRAMMAR),
)
"""Texts in a chat template, and the grammar that they identify; the first match counts."""


def grammar_of(renderer: str, template: str) -> OutputGrammar | None:
    """Return the grammar of a renderer's outputs; for ``default`` the chat template identifies it.

    None for an unknown grammar. A template without a known form of calls gets a grammar with
    reasoning alone.
    """
    if renderer != "default":
        return _BY_RENDERER.get(renderer)
    for signs, grammar in _BY_TEMPLATE:
        if all(sign in template for sign in signs):
            return grammar
    return _PLAIN
