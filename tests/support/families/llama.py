"""Llama 3.2: headers, one call an answer as bare JSON, tools told in the first user message."""

from __future__ import annotations

import json

from renderers import llama_3

from tests.support.families.spec import Answer, Spec

_TEMPLATE = (
    """
{%- if not date_string is defined -%}{%- set date_string = '26 Jul 2024' -%}{%- endif -%}
{%- if messages[0].role == 'system' -%}
  {%- set system = messages[0].content | trim -%}
  {%- set rest = messages[1:] -%}
{%- else -%}
  {%- set system = '' -%}
  {%- set rest = messages -%}
{%- endif -%}
{{- bos_token + '<|start_header_id|>system<|end_header_id|>\\n\\n' -}}
{%- if tools -%}{{- 'Environment: ipython\\n' -}}{%- endif -%}
{{- 'Cutting Knowledge Date: """
    + llama_3._CUTTING_KNOWLEDGE_DATE
    + """\\nToday Date: ' + date_string + '\\n\\n' -}}
{{- system + '<|eot_id|>' -}}
{%- if tools -%}
  {%- if not rest or rest[0].role != 'user' -%}
    {{- raise_exception('tools need a user message to stand in') -}}
  {%- endif -%}
  {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' -}}
  {{- """
    + json.dumps(llama_3._TOOLS_IN_USER_INTRO)
    + """ -}}
  {%- for tool in tools -%}{{- (tool | tojson(indent=4)) + '\\n\\n' -}}{%- endfor -%}
  {{- (rest[0].content | trim) + '<|eot_id|>' -}}
  {%- set rest = rest[1:] -%}
{%- endif -%}
{%- for m in rest -%}
  {%- if m.role == 'tool' or m.role == 'ipython' -%}
    {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' -}}
    {{- (m.content | tojson) + '<|eot_id|>' -}}
  {%- elif m.tool_calls -%}
    {%- if m.tool_calls | length != 1 -%}{{- raise_exception('one call at a time') -}}{%- endif -%}
    {%- set f = m.tool_calls[0].function -%}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
    {{- '{"name": "' + f.name + '", "parameters": ' -}}
    {{- f.arguments if f.arguments is string else f.arguments | tojson -}}
    {{- '}<|eot_id|>' -}}
  {%- else -%}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' -}}
    {{- (m.content | trim) + '<|eot_id|>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{%- endif -%}
"""
)


def _write(answer: Answer, _thinking: bool) -> str:
    if answer.calls:
        (call,) = answer.calls
        return f'{{"name": "{call.name}", "parameters": {call.json()}}}<|eot_id|>'
    return f"{answer.text}<|eot_id|>"


LLAMA3 = Spec(
    model_type="llama",
    renderer="llama-3",
    specials=(
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eom_id|>",
        "<|eot_id|>",
        "<|python_tag|>",
    ),
    ends=("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    template=_TEMPLATE,
    write=_write,
    calls=1,
    bos="<|begin_of_text|>",
)
