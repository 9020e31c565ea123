"""DeepSeek V3 and R1: no role newlines, calls in fences between section tokens.

R1 opens the reasoning in the prompt, with tags that are plain text.
"""

from __future__ import annotations

from tests.support.families.spec import Answer, Spec

_BAR = "\uff5c"
_US = "\u2581"


def _token(name: str) -> str:
    return f"<{_BAR}{name.replace('_', _US)}{_BAR}>"


BOS = _token("begin_of_sentence")
EOS = _token("end_of_sentence")
_SECTIONS = {
    name: _token(name)
    for name in (
        "User",
        "Assistant",
        "tool_calls_begin",
        "tool_calls_end",
        "tool_call_begin",
        "tool_call_end",
        "tool_sep",
        "tool_outputs_begin",
        "tool_outputs_end",
        "tool_output_begin",
        "tool_output_end",
    )
}

_TEMPLATE = """
{{- 'BOS' -}}
{%- set ns = namespace(system='', leading=true, any=false) -%}
{%- for m in messages -%}
  {%- if m.role != 'system' -%}{%- set ns.leading = false -%}
  {%- elif ns.leading -%}
    {%- set ns.system = ns.system + ('\\n\\n' if ns.any else '') + m.content -%}
    {%- set ns.any = true -%}
  {%- endif -%}
{%- endfor -%}
{{- ns.system -}}
{%- set ns.leading = true -%}
{%- for m in messages -%}
  {%- if m.role != 'system' -%}{%- set ns.leading = false -%}{%- endif -%}
  {%- if m.role == 'user' or (m.role == 'system' and not ns.leading) -%}
    {{- 'User' + m.content -}}
  {%- elif m.role == 'assistant' -%}
    {%- if loop.first or loop.previtem.role != 'tool' -%}{{- 'Assistant' -}}{%- endif -%}
    {{- PAST -}}
    {%- if m.tool_calls -%}
      {{- 'tool_calls_begin' -}}
      {%- for call in m.tool_calls -%}
        {%- set f = call.function -%}
        {{- 'tool_call_beginfunctiontool_sep' + f.name + '\\n```json\\n' -}}
        {{- f.arguments if f.arguments is string else f.arguments | tojson -}}
        {{- '\\n```tool_call_end' -}}
      {%- endfor -%}
      {{- 'tool_calls_end' -}}
    {%- endif -%}
    {{- 'EOS' -}}
  {%- elif m.role == 'tool' -%}
    {%- if loop.first or loop.previtem.role != 'tool' -%}{{- 'tool_outputs_begin' -}}{%- endif -%}
    {{- 'tool_output_begin' + m.content + 'tool_output_end' -}}
    {%- if loop.last or loop.nextitem.role != 'tool' -%}{{- 'tool_outputs_end' -}}{%- endif -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {%- if messages[-1].role != 'tool' -%}{{- 'Assistant' -}}{%- endif -%}
  {{- 'PREFILL' -}}
{%- endif -%}
"""


def _template(past: str, prefill: str) -> str:
    """With the tokens' names written out, longest first: one may be another's beginning."""
    out = _TEMPLATE.replace("PAST", past).replace("PREFILL", prefill)
    names = {"BOS": BOS, "EOS": EOS, **_SECTIONS}
    for name in sorted(names, key=len, reverse=True):
        if name.startswith("tool"):
            out = out.replace(f"'{name}", f"'{names[name]}").replace(name + "'", names[name] + "'")
            out = out.replace(f"function{name}", f"function{names[name]}")
            out = out.replace(f"{name}function", f"{names[name]}function")
        else:
            out = out.replace(f"'{name}'", f"'{names[name]}'")
    return out


def _write(answer: Answer, _thinking: bool) -> str:
    out = answer.text
    if answer.calls:
        s = _SECTIONS
        out += s["tool_calls_begin"]
        for call in answer.calls:
            out += f"{s['tool_call_begin']}function{s['tool_sep']}{call.name}"
            out += f"\n```json\n{call.json()}\n```{s['tool_call_end']}"
        out += s["tool_calls_end"]
    return out + EOS


def _write_r1(answer: Answer, thinking: bool) -> str:
    # The prompt has opened the reasoning.
    return f"{answer.reasoning or ''}\n</think>\n\n" + _write(answer, thinking)


V3 = Spec(
    model_type="deepseek_v3",
    renderer="deepseek-v3",
    specials=(BOS, EOS, *_SECTIONS.values()),
    ends=(EOS,),
    template=_template("m.content or ''", ""),
    write=_write,
    bos=BOS,
)
R1 = Spec(
    model_type="deepseek_v3",
    renderer="deepseek-r1",
    specials=(BOS, EOS, *_SECTIONS.values()),
    ends=(EOS,),
    template=_template("(m.content or '').split('</think>')[-1]", "<think>\\n"),
    write=_write_r1,
    thinks=True,
    bos=BOS,
)
