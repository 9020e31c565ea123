"""Templates of our own invention, that no renderer knows."""

from __future__ import annotations

from tests.support.families.spec import Answer, Spec

_WITH_TOOLS = """
{%- if tools -%}
  {{- '<|turn|>rules\\nTools, to be called as <tool_call>{"name": ..., "arguments": ...}' -}}
  {{- '</tool_call>:\\n' -}}
  {%- for tool in tools -%}{{- (tool.function | tojson) + '\\n' -}}{%- endfor -%}
  {{- '<|done|>\\n' -}}
{%- endif -%}
{%- for m in messages -%}
  {%- if m.role == 'assistant' -%}
    {{- '<|turn|>model\\n' + (m.content or '') -}}
    {%- for call in m.tool_calls or [] -%}
      {%- set f = call.function -%}
      {{- '\\n' if m.content or not loop.first else '' -}}
      {{- '<tool_call>{"name": "' + f.name + '", "arguments": ' -}}
      {{- f.arguments if f.arguments is string else f.arguments | tojson -}}
      {{- '}</tool_call>' -}}
    {%- endfor -%}
    {{- '<|done|>\\n' -}}
  {%- elif m.role == 'tool' -%}
    {{- '<|turn|>result\\n' + m.content + '<|done|>\\n' -}}
  {%- else -%}
    {{- '<|turn|>' + m.role + '\\n' + m.content + '<|done|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn|>model\\n' -}}{%- endif -%}
"""
_WITHOUT_TOOLS = """
{%- for m in messages -%}
  {%- if m.role == 'system' and not loop.first -%}
    {{- raise_exception('the system message comes first') -}}
  {%- endif -%}
  {{- '[' + m.role + ']: ' + (m.content | trim) -}}
  {{- '</s>' if m.role == 'assistant' else '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '[assistant]:' -}}{%- endif -%}
"""


def _write(answer: Answer, _thinking: bool) -> str:
    blocks = [
        f'<tool_call>{{"name": "{call.name}", "arguments": {call.json()}}}</tool_call>'
        for call in answer.calls
    ]
    return "\n".join([*([answer.text] if answer.text else []), *blocks]) + "<|done|>"


WITH_TOOLS = Spec(
    model_type="gpt_neox",
    renderer="default",
    specials=("<|pad|>", "<|turn|>", "<|done|>", "<tool_call>", "</tool_call>"),
    ends=("<|done|>", "<|pad|>"),
    stop_ids=("<|done|>",),
    template=_WITH_TOOLS,
    write=_write,
)
WITHOUT_TOOLS = Spec(
    model_type="gpt_neox",
    renderer="default",
    specials=("<pad>", "</s>"),
    ends=("</s>", "<pad>"),
    stop_ids=("</s>",),
    template=_WITHOUT_TOOLS,
    write=lambda answer, _thinking: f" {answer.text}</s>",
    calls=0,
)
