"""Qwen3 (calls as JSON) and Qwen3.5 (calls as XML): ChatML, reasoning between think tokens."""

from __future__ import annotations

import json

from renderers import qwen35

from any_agent.demo.models.tiny import CHAT_TEMPLATE, SPECIAL_TOKENS
from tests.support.families.spec import Answer, Call, Spec

_QWEN3_5_TEMPLATE = (
    """
{%- set ns = namespace(last_query=-1) -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}{%- set ns.last_query = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools -%}
  {{- '<|im_start|>system\\n' + """
    + json.dumps(qwen35._TOOLS_HEADER)
    + """ -}}
  {%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
  {{- """
    + json.dumps(qwen35._TOOLS_FOOTER + qwen35._TOOLS_INSTRUCTIONS)
    + """ -}}
  {%- if messages[0].role == 'system' and messages[0].content | trim -%}
    {{- '\\n\\n' + (messages[0].content | trim) -}}
  {%- endif -%}
  {{- '<|im_end|>\\n' -}}
{%- elif messages[0].role == 'system' -%}
  {{- '<|im_start|>system\\n' + (messages[0].content | trim) + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for m in messages -%}
  {%- if m.role == 'system' -%}
    {%- if not loop.first -%}{{- raise_exception('system comes first') -}}{%- endif -%}
  {%- elif m.role == 'user' -%}
    {{- '<|im_start|>user\\n' + (m.content | trim) + '<|im_end|>\\n' -}}
  {%- elif m.role == 'assistant' -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if loop.index0 > ns.last_query -%}
      {{- '<think>\\n' + ((m.reasoning_content or '') | trim) + '\\n</think>\\n\\n' -}}
    {%- endif -%}
    {{- (m.content or '') | trim -}}
    {%- for call in m.tool_calls or [] -%}
      {%- if not loop.first -%}{{- '\\n' -}}
      {%- elif m.content | trim -%}{{- '\\n\\n' -}}{%- endif -%}
      {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' -}}
      {%- for key, value in (call.function.arguments or {}).items() -%}
        {{- '<parameter=' + key + '>\\n' -}}
        {{- value if value is string else value | tojson -}}
        {{- '\\n</parameter>\\n' -}}
      {%- endfor -%}
      {{- '</function>\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
  {%- elif m.role == 'tool' -%}
    {%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
    {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' -}}
    {%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
  {%- if enable_thinking is defined and enable_thinking is false -%}
    {{- '<think>\\n\\n</think>\\n\\n' -}}
  {%- else -%}
    {{- '<think>\\n' -}}
  {%- endif -%}
{%- endif -%}
"""
)


def _write(answer: Answer, thinking: bool) -> str:
    out = ""
    if thinking:
        out = f"<think>\n{answer.reasoning or ''}\n</think>\n\n"
    blocks = [
        f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.json()}}}\n</tool_call>'
        for call in answer.calls
    ]
    return out + "\n".join([*([answer.text] if answer.text else []), *blocks]) + "<|im_end|>"


def _write_xml(answer: Answer, thinking: bool) -> str:
    # The prompt has opened the reasoning.
    out = f"{answer.reasoning or ''}\n</think>\n\n" if thinking else ""
    blocks = "\n".join(f"<tool_call>\n{_xml(call)}\n</tool_call>" for call in answer.calls)
    separator = "\n\n" if answer.text and blocks else ""
    return out + answer.text + separator + blocks + "<|im_end|>"


def _xml(call: Call) -> str:
    if isinstance(call.arguments, str):
        return f"<function={call.name}>\n{call.arguments}"
    parameters = "".join(
        f"<parameter={key}>\n"
        f"{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        "\n</parameter>\n"
        for key, value in call.arguments.items()
    )
    return f"<function={call.name}>\n{parameters}</function>"


QWEN3 = Spec(
    model_type="qwen3",
    renderer="qwen3",
    specials=SPECIAL_TOKENS,
    ends=("<|im_end|>", "<|endoftext|>"),
    template=CHAT_TEMPLATE,
    write=_write,
    thinks=True,
    enable_thinking=True,
)
QWEN3_5 = Spec(
    model_type="qwen3_5",
    renderer="qwen3.5",
    specials=(
        *SPECIAL_TOKENS,
        "<|vision_start|>",
        "<|vision_end|>",
        "<|image_pad|>",
        "<|video_pad|>",
    ),
    ends=("<|im_end|>", "<|endoftext|>"),
    template=_QWEN3_5_TEMPLATE,
    write=_write_xml,
    thinks=True,
    enable_thinking=True,
    bare_values=True,
)
