"""GLM-4.5: the next role's token ends an answer; arguments between key and value tokens."""

from __future__ import annotations

import json

from renderers import glm45

from tests.support.families.spec import Answer, Call, Spec

_TEMPLATE = (
    """
{{- '[gMASK]<sop>' -}}
{%- if tools -%}
  {{- '<|system|>' + """
    + json.dumps(glm45._TOOLS_HEADER)
    + """ -}}
  {%- for tool in tools -%}{{- (tool | tojson) + '\\n' -}}{%- endfor -%}
  {{- """
    + json.dumps(glm45._TOOLS_FOOTER)
    + """ -}}
{%- endif -%}
{%- set ns = namespace(last_user=-1) -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}{%- set ns.last_user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- set quiet = enable_thinking is defined and not enable_thinking -%}
{%- for m in messages -%}
  {%- if m.role == 'system' -%}
    {{- '<|system|>\\n' + m.content -}}
  {%- elif m.role == 'user' -%}
    {{- '<|user|>\\n' + m.content -}}
    {%- if quiet and not m.content.endswith('/nothink') -%}{{- '/nothink' -}}{%- endif -%}
  {%- elif m.role == 'assistant' -%}
    {{- '<|assistant|>' -}}
    {%- if loop.index0 > ns.last_user and m.reasoning_content -%}
      {{- '\\n<think>' + (m.reasoning_content | trim) + '</think>' -}}
    {%- else -%}
      {{- '\\n<think></think>' -}}
    {%- endif -%}
    {%- if m.content and m.content | trim -%}{{- '\\n' + (m.content | trim) -}}{%- endif -%}
    {%- for call in m.tool_calls or [] -%}
      {{- '\\n<tool_call>' + call.function.name + '\\n' -}}
      {%- for key, value in (call.function.arguments or {}).items() -%}
        {{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' -}}
        {{- value if value is string else value | tojson -}}
        {{- '</arg_value>\\n' -}}
      {%- endfor -%}
      {{- '</tool_call>' -}}
    {%- endfor -%}
  {%- elif m.role == 'tool' -%}
    {%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|observation|>' -}}{%- endif -%}
    {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|assistant|>' + ('\\n<think></think>' if quiet else '') -}}
{%- endif -%}
"""
)


def _write(answer: Answer, thinking: bool) -> str:
    out = f"\n<think>{answer.reasoning or ''}</think>" if thinking else ""
    if answer.text:
        out += "\n" + answer.text
    out += "".join(f"\n<tool_call>{_call(call)}</tool_call>" for call in answer.calls)
    return out + ("<|observation|>" if answer.calls else "<|user|>")


def _call(call: Call) -> str:
    if isinstance(call.arguments, str):
        return f"{call.name}\n{call.arguments}"
    return f"{call.name}\n" + "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>"
        f"{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        "</arg_value>\n"
        for key, value in call.arguments.items()
    )


GLM = Spec(
    model_type="glm4_moe",
    renderer="glm-4.5",
    specials=(
        "<|endoftext|>",
        "[gMASK]",
        "<sop>",
        "<|system|>",
        "<|user|>",
        "<|assistant|>",
        "<|observation|>",
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "/nothink",
    ),
    ends=("<|user|>", "<|observation|>", "<|endoftext|>"),
    template=_TEMPLATE,
    write=_write,
    thinks=True,
    enable_thinking=True,
    bare_values=True,
)
