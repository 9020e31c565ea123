"""gpt-oss: harmony's channels. The generation prompt leaves the channel to the model.

``renderers`` encodes harmony with OpenAI's own vocabulary of 200,000 tokens, which is not this
one's, so the family is continued through its template.
"""

from __future__ import annotations

from tests.support.families.spec import Answer, Spec

_TEMPLATE = """
{%- macro kind(p) -%}
  {%- if p.type == 'integer' or p.type == 'number' -%}{{- 'number' -}}
  {%- elif p.type == 'array' -%}{{- kind(p['items'] or {}) + '[]' -}}
  {%- elif p.type is string -%}{{- p.type -}}
  {%- else -%}{{- 'any' -}}{%- endif -%}
{%- endmacro -%}
{{- '<|start|>system<|message|>Tiny model.\\nCurrent date: ' + strftime_now('%Y-%m-%d') -}}
{{- '\\n\\nReasoning: ' + (reasoning_effort or 'medium') -}}
{{- '\\n\\n# Valid channels: analysis, commentary, final.' -}}
{%- if tools -%}{{- '\\nTools: commentary channel, functions.' -}}{%- endif -%}
{{- '<|end|>' -}}
{%- set has_system = messages[0].role in ('system', 'developer') -%}
{%- if has_system or tools -%}
  {{- '<|start|>developer<|message|>' -}}
  {%- if has_system -%}{{- '# Instructions\\n\\n' + messages[0].content -}}{%- endif -%}
  {%- if tools -%}
    {{- '\\n\\n# Tools\\n\\n## functions\\n\\nnamespace functions {\\n\\n' -}}
    {%- for tool in tools -%}
      {%- set f = tool.function -%}
      {{- '// ' + (f.description or '') + '\\ntype ' + f.name + ' = ' -}}
      {%- if f.parameters and f.parameters.properties -%}
        {{- '(_: {\\n' -}}
        {%- for name, p in f.parameters.properties.items() -%}
          {{- name + ('' if name in (f.parameters.required or []) else '?') + ': ' -}}
          {{- kind(p) + ',\\n' -}}
        {%- endfor -%}
        {{- '}) => any;\\n\\n' -}}
      {%- else -%}
        {{- '() => any;\\n\\n' -}}
      {%- endif -%}
    {%- endfor -%}
    {{- '} // namespace functions' -}}
  {%- endif -%}
  {{- '<|end|>' -}}
{%- endif -%}
{%- set ns = namespace(name=none) -%}
{%- for m in (messages[1:] if has_system else messages) -%}
  {%- if m.role == 'assistant' -%}
    {%- if m.tool_calls -%}
      {%- set f = m.tool_calls[0].function -%}
      {%- set ns.name = f.name -%}
      {%- if m.content or m.thinking -%}
        {{- '<|start|>assistant<|channel|>analysis<|message|>' -}}
        {{- (m.content or m.thinking) + '<|end|>' -}}
      {%- endif -%}
      {{- '<|start|>assistant to=functions.' + f.name + '<|channel|>commentary json<|message|>' -}}
      {{- f.arguments if f.arguments is string else f.arguments | tojson -}}
      {{- '<|call|>' -}}
    {%- elif loop.last and not add_generation_prompt -%}
      {%- if m.thinking -%}
        {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' -}}
      {%- endif -%}
      {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' -}}
    {%- else -%}
      {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' -}}
      {%- set ns.name = none -%}
    {%- endif -%}
  {%- elif m.role == 'tool' -%}
    {%- if ns.name is none -%}{{- raise_exception('a tool result without a call') -}}{%- endif -%}
    {{- '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' -}}
    {{- (m.content | tojson) + '<|end|>' -}}
  {%- elif m.role == 'user' -%}
    {{- '<|start|>user<|message|>' + m.content + '<|end|>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}
"""


def _write(answer: Answer, _thinking: bool) -> str:
    blocks = []
    if answer.reasoning is not None:
        blocks.append(f"<|channel|>analysis<|message|>{answer.reasoning}")
    if answer.calls:
        if answer.text:
            blocks.append(f"<|channel|>commentary<|message|>{answer.text}")
        (call,) = answer.calls
        header = f"<|channel|>commentary to=functions.{call.name} <|constrain|>json"
        blocks.append(f"{header}<|message|>{call.json()}")
    else:
        blocks.append(f"<|channel|>final<|message|>{answer.text}")
    end = "<|call|>" if answer.calls else "<|return|>"
    return "<|end|><|start|>assistant".join(blocks) + end


GPT_OSS = Spec(
    model_type="gpt_oss",
    renderer="default",
    specials=(
        "<|startoftext|>",
        "<|endoftext|>",
        "<|return|>",
        "<|constrain|>",
        "<|channel|>",
        "<|start|>",
        "<|end|>",
        "<|message|>",
        "<|call|>",
    ),
    ends=("<|return|>", "<|call|>", "<|endoftext|>"),
    past_end="<|end|>",
    template=_TEMPLATE,
    write=_write,
    thinks=True,
    calls=1,
)
