"""What a truncated answer left open is closed, innermost first."""

from __future__ import annotations

from any_agent.chat.bridge import TruncationCloser
from any_agent.chat.template import ChatTemplate
from tests.support.families import family

CASES = [
    ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "It is", ""),
    ("qwen3", "<|im_start|>assistant\n<think>\n", "Becau", "</think>"),
    ("qwen3", "<|im_start|>assistant\n", "<think>a</think>b", ""),
    ("qwen3", "", '<think>a<tool_call>{"na', "</tool_call></think>"),
    ("qwen3", "", "</think></tool_call>", ""),
    ("qwen3", "<tool_call><|im_end|>", "x", ""),
    ("qwen3", "<think>\n\n</think>\n\n<tool_call>\n", '{"name"', "</tool_call>"),
    ("glm", "", "<tool_call>add\n<arg_key>a", "</arg_key></tool_call>"),
    (
        "deepseek",
        "",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    ("deepseek_r1", "<｜Assistant｜><think>\n", "Becau", "</think>"),
    ("gpt_oss", "<|start|>assistant", "<|channel|>final", "<|message|>"),
    ("gpt_oss", "<|start|>assistant", "", "<|message|>"),
    ("gpt_oss", "<|start|>assistant", "<|channel|>final<|message|>It", ""),
    ("unknown", "", "anything", ""),
    ("unknown", "model\n<think>\n", "Becau", "</think>"),
    ("unknown", "", "\n<think>Becau", "</think>"),
    ("unknown", "", "<think>a</think>b", ""),
    ("unknown", "what is <think> for?<|done|><|turn|>model\n", "It is", ""),
    ("unknown", "", "The <think> tag", ""),
]


def test_what_a_truncated_answer_left_open_is_closed() -> None:
    for name, prompt, output, closers in CASES:
        made = family(name)
        template = ChatTemplate(made.chat.tokenizer, {})
        blocks = TruncationCloser(template, made.chat.stop_token_ids)
        ids = blocks.closing_ids(made.encode(prompt), made.encode(output))
        assert template.decode(ids) == closers, (name, prompt, output)
