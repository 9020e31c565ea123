"""A tiny Qwen3-shaped model and tokenizer, made by code without a download.

The command ``python -m any_agent.demo.model`` makes them, so that the demo's own process does not
import torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from any_agent.demo.task import corpus

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

VOCAB_SIZE = 448
_PHRASE = 16  # the most characters of a token that may be several words
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
# ChatML as the Qwen3 family renders it. transformers trims the newline after a block tag, so
# every newline that matters is inside an expression.
CHAT_TEMPLATE = r"""
{%- if tools -%}
  {{- '<|im_start|>system\n' -}}
  {%- if messages[0].role == 'system' -%}{{- messages[0].content + '\n\n' -}}{%- endif -%}
  {{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' -}}
  {{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' -}}
  {%- for tool in tools -%}{{- '\n' -}}{{- tool | tojson -}}{%- endfor -%}
  {{- '\n</tools>\n\nFor each function call, return a json object with function name and ' -}}
  {{- 'arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n' -}}
  {{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' -}}
{%- elif messages[0].role == 'system' -%}
  {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' -}}
{%- endif -%}
{%- for m in messages -%}
  {%- if m.role == 'user' or (m.role == 'system' and not loop.first) -%}
    {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}
  {%- elif m.role == 'assistant' -%}
    {{- '<|im_start|>assistant\n' -}}
    {%- if loop.last -%}
      {{- '<think>\n' + (m.reasoning_content or '').strip('\n') + '\n</think>\n\n' -}}
    {%- endif -%}
    {{- m.content or '' -}}
    {%- for call in m.tool_calls or [] -%}
      {%- if not loop.first or m.content -%}{{- '\n' -}}{%- endif -%}
      {%- set f = call.function -%}
      {{- '<tool_call>\n{"name": "' + f.name + '", "arguments": ' -}}
      {{- f.arguments if f.arguments is string else f.arguments | tojson -}}
      {{- '}\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\n' -}}
  {%- elif m.role == 'tool' -%}
    {%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
    {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' -}}
    {%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\n' -}}
  {%- if enable_thinking is defined and enable_thinking is false -%}
    {{- '<think>\n\n</think>\n\n' -}}
  {%- endif -%}
{%- endif -%}
"""


def make_tokenizer(
    texts: Iterable[str] | None = None, *, vocab_size: int = VOCAB_SIZE, phrases: bool = False
) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE of ``texts`` (the demo's), with Qwen3's special tokens and template.

    With ``phrases`` a token may be several words of one line, which makes prompts shorter.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            *([pre_tokenizers.Split(Regex(r"\n"), "isolated")] if phrases else []),
            pre_tokenizers.ByteLevel(False, use_regex=not phrases),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        max_token_length=_PHRASE if phrases else None,
    )
    core.train_from_iterator(corpus() if texts is None else texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL_TOKENS),
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(
    vocab_size: int,
    seed: int,
    *,
    hidden_size: int = 64,
    layers: int = 2,
    context: int = 2048,
    eos_token_id: int = 2,
    pad_token_id: int = 0,
) -> PreTrainedModel:
    """Return a random Qwen3 of ``layers`` x ``hidden_size``, float32.

    ``initializer_range`` is 0.1: with the usual 0.02 a model of this size does not learn.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 2,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        max_position_embeddings=context,
        initializer_range=0.1,
        tie_word_embeddings=False,
        eos_token_id=eos_token_id,
        bos_token_id=None,
        pad_token_id=pad_token_id,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config).eval()


def save_tiny_model(
    path: Path,
    seed: int = 0,
    *,
    tokenizer: PreTrainedTokenizerFast | None = None,
    **shape: int,
) -> Path:
    """Write a random tiny model with its tokenizer in Hugging Face's layout."""
    tokenizer = tokenizer or make_tokenizer()
    model = make_model(
        len(tokenizer),
        seed,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        **shape,
    )
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
