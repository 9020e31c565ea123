"""Write the documents that are generated from code: ``python tools/docs/generate.py [--check]``.

All of them are in docs/reference:

- configuration.md from any_agent/config: a setting's meaning is the docstring under its field, its
  section's the docstring of the class;
- metrics.md from each part's table of metrics;
- sessions.md from the table of states in proxy_ext/sessions/state_machine.py;
- keys.md from the table of routes and scopes in proxy_ext/web/permissions.py;
- parameters.md from the table in any_agent/completions/params/table.py;
- http-api.md from the description of the routes that a service answers at /openapi.json;
- python.md from the docstrings of the public names;
- compatibility.md from what `make verify SUITES=clients` found;
- from-areal.md from tools/docs/from_areal.yaml;
- in reliability.md the results of the scenarios, from what their runs kept in tests/results.jsonl.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools" / "docs")]
route_scopes: Any = importlib.import_module("route_scopes")
call_parameters: Any = importlib.import_module("call_parameters")
client_results: Any = importlib.import_module("client_results")
from_areal: Any = importlib.import_module("from_areal")
http_api: Any = importlib.import_module("http_api")
python_api: Any = importlib.import_module("python_api")
scenario_results: Any = importlib.import_module("scenario_results")
session_states: Any = importlib.import_module("session_states")
SOURCE = ROOT / "any_agent" / "config"
TARGET = ROOT / "docs" / "reference" / "configuration.md"
TREE = "Config"
CLOUD_TREE = "CloudConfig"
CLOUD_SECTIONS = {"CloudServer": "server", "CloudDefault": "default", "Budget": "budget"}
CLOUD_HEAD = """## The file of `any-agent cloud`

[Run a service for many](../how-to/run-a-service.md) has an example. Its settings come from the file
alone; the operator's key is `ANY_AGENT_SERVER__ADMIN_KEY` in the environment.
"""
METRICS_TARGET = ROOT / "docs" / "reference" / "metrics.md"
KEYS_TARGET = ROOT / "docs" / "reference" / "keys.md"
SESSIONS_TARGET = ROOT / "docs" / "reference" / "sessions.md"
PARAMETERS_TARGET = ROOT / "docs" / "reference" / "parameters.md"
COMPATIBILITY_TARGET = ROOT / "docs" / "reference" / "compatibility.md"
FROM_AREAL_TARGET = ROOT / "docs" / "reference" / "from-areal.md"
HTTP_API_TARGET = ROOT / "docs" / "reference" / "http-api.md"
PYTHON_API_TARGET = ROOT / "docs" / "reference" / "python.md"

HEAD = """# Configuration

<!-- Written by tools/docs/generate.py from any_agent/config; change a file there, then run it. -->

A setting has a dotted name. Its value comes from the first of these that has one:

1. the command line: `any-agent serve train.lr=1e-5`,
2. the environment: `ANY_AGENT_TRAIN__LR=1e-5` (two underscores for the dot),
3. the YAML file: `--config my.yaml`, with a mapping for each section,
4. its default.

`--model`, `--experiment`, `--trial`, `--host` and `--port` are short for `model.path`,
`experiment`, `trial`, `server.host` and `server.port`. Unknown names are refused with the nearest
known one. `any-agent config` prints the resulting settings. Without `--config`, `any-agent serve`
and `any-agent train` use the settings of the last start of the same experiment and trial;
`server.admin_key` and `engine.key` are never written to a file, so give them again.
"""

ALIASES_HEAD = """## AReaL's names

These names are accepted, too, in the file, the environment and on the command line. In one of these
places a setting may have one name, or both with the same value. AReaL's settings with another
meaning are refused with advice. Three names repeat other settings, and are refused where they
contradict them: `async_training` (false: `rollout.eta=0`), `tokenizer_path` (the model's) and
`scheduler.type` (`local`; in Slurm's launcher `slurm`). Settings that a GRPO run does not have
(`critic`, `ref`, `actor.kl_ctl`, `actor.gae_lambda`, ...) are accepted with the value that changes
nothing.

In a file, the whole value `${actor.path}` means the value of that name in the same file, in the
environment or on the command line. A name that the file lacks, a circle, `${` inside a longer text
and `${oc.env:...}` are refused by name: write the value, or set it by the environment.

| AReaL's | ours |
|---|---|"""

METRICS_HEAD = """# Metrics and logs

<!-- Written by tools/docs/generate.py from the metrics.py of proxy_ext, router, router/cloud and
trainer; change those files, then run it. -->

`GET /metrics` at the service's URL answers for the whole run in Prometheus's text format: the
router's own metrics, each rank's and the trainer's. Where there is an admin key, a key of scope
admin or trainer is needed as bearer token:

```yaml
scrape_configs:
  - job_name: any-agent
    authorization: {credentials_file: /path/to/a/trainer.key}
    static_configs: [{targets: ["service.example:8000"]}]
```

Counters begin at 0 when their part starts, except those of sessions, which come from the journal:
after any restart `any_agent_sessions_created_total` is the sum of `any_agent_sessions` over
its states. Useful queries:

| question | query |
|---|---|
| sampled tokens per second | `sum(rate(any_agent_output_tokens_total[1m]))` |
| share of continued calls that could not be continued exactly | \
`sum(rate(any_agent_interactions_total{continuation="branch"}[5m])) / \
sum(rate(any_agent_interactions_total{continuation=~"exact\\|branch"}[5m]))` |
| 95th percentile of the time to the first token | \
`histogram_quantile(0.95, sum by (le) (rate(any_agent_first_token_seconds_bucket[5m])))` |
| writes that share a commit | \
`rate(any_agent_journal_writes_total[5m]) / rate(any_agent_journal_commit_seconds_count[5m])` |
| do the session counters balance? (0 for yes) | \
`sum(any_agent_sessions_created_total) - sum(any_agent_sessions)` |
| is a part missing? | `any_agent_up == 0` |
| is a disk full within an hour? | `any_agent_disk_full_in_seconds < 3600` |
| do engine and trainer disagree? | `any_agent_train_logprob_mismatch_fresh > 0.01` |
"""
METRICS_PARTS = {
    "proxy_ext.metrics": ("Ranks", "Each has the label `rank`."),
    "trainer.metrics": ("Trainer", "Counts since it started, gauges of its latest step."),
    "router.metrics": ("Router", ""),
    "router.cloud.metrics": (
        "any-agent cloud",
        "`GET /metrics` of a [service for many](../how-to/run-a-service.md) answers for itself, "
        "with the operator's key: these, and of the router's those of requests, refusals, bytes "
        "and the event loop. Those of the runs are not among them.",
    ),
}
METRICS_TAIL = """## Processes

Each part also shows Prometheus's usual `process_` metrics of itself (CPU seconds, resident memory,
open files, start time) with the label `part`: `router`, `rank-0`, ..., `trainer`.

## Logs

Each process writes one file in the run's `logs` folder, as lines for people, or with
`log_format=json` as one JSON object each:

| field | meaning |
|---|---|
| `time` | ISO 8601, UTC, milliseconds |
| `level` | debug, info, warning, error or critical |
| `logger` | the module that wrote it |
| `message` | the event |
| `part` | `rank-0`, `engine-0`, `router` or `trainer` |
| `pid` | the process |
| `exception`, `stack` | the traceback, if there is one |

A message may add further fields. Session keys, everything else that begins with `sk-`, and the
configured admin key are removed from every line, in both forms. There are no access logs. A process
that cannot start writes the reason as a plain line that begins with `error:`.
"""


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of a section."""

    name: str
    type: str
    default: str
    meaning: str


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the generated documents.")
    parser.add_argument("--check", action="store_true", help="only report outdated documents")
    arguments = parser.parse_args()
    texts = {
        TARGET: render(settings_source()),
        METRICS_TARGET: render_metrics(),
        SESSIONS_TARGET: session_states.render(),
        KEYS_TARGET: route_scopes.render(),
        PARAMETERS_TARGET: call_parameters.render(),
        COMPATIBILITY_TARGET: client_results.render(),
        FROM_AREAL_TARGET: from_areal.render(),
        HTTP_API_TARGET: http_api.render(),
        PYTHON_API_TARGET: python_api.render(),
        scenario_results.TARGET: scenario_results.render(),
    }
    old = [p for p, text in texts.items() if not p.exists() or p.read_text("utf-8") != text]
    for path in old:
        if arguments.check:
            name = path.relative_to(ROOT)
            print(f"{name} is out of date: run python tools/docs/generate.py", file=sys.stderr)
        else:
            path.write_text(texts[path], encoding="utf-8")
    return 1 if old and arguments.check else 0


def render_metrics() -> str:
    """Return the document of every part's metrics."""
    parts = [METRICS_HEAD]
    for module, (title, about) in METRICS_PARTS.items():
        parts.append(f"## {title}\n")
        if about:
            parts.append(f"{about}\n")
        rows = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
        for metric in importlib.import_module(module).METRICS:
            labels = ", ".join(f"`{label}`" for label in metric.labels)
            rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.meaning} |")
        parts.append("\n".join(rows) + "\n")
    return "\n".join([*parts, METRICS_TAIL])


def settings_source() -> str:
    """Return the text of every file that defines settings."""
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(SOURCE.glob("*.py")))


def render(source: str) -> str:
    """Return the document of the settings that this text defines."""
    classes = {n.name: n for n in ast.parse(source).body if isinstance(n, ast.ClassDef)}
    parts = [HEAD, "## Top level\n", _table(_settings(classes[TREE], classes))]
    parts += [*_sections(classes[TREE], classes), _aliases()]
    if CLOUD_TREE in classes:
        parts += [CLOUD_HEAD, _table(_settings(classes[CLOUD_TREE], classes))]
        for kind, name in CLOUD_SECTIONS.items():
            parts += [f"### `{name}` of a cloud\n"]
            parts += [_table(_settings(classes[kind], classes), prefix=f"{name}.")]
    return "\n".join(parts)


def _aliases() -> str:
    """Return the table of AReaL's names."""
    elsewhere = importlib.import_module("any_agent.config.foreign_settings")
    rows = [f"| `{theirs}` | `{here}` |" for theirs, here in elsewhere.ALIASES.items()]
    return "\n".join([ALIASES_HEAD, *rows]) + "\n"


def _sections(tree: ast.ClassDef, classes: dict[str, ast.ClassDef], prefix: str = "") -> list[str]:
    """Return a heading and a table for each section of a tree, and for its inner sections."""
    parts = []
    for field in _fields(tree):
        kind = _section(field)
        if kind not in classes:
            continue
        section, name = classes[kind], prefix + _name(field)
        parts.append(f"## `{name}`\n")
        about = ast.get_docstring(section)
        if about:
            parts.append(about + "\n")
        parts.append(_table(_settings(section, classes), prefix=f"{name}."))
        parts += _sections(section, classes, prefix=f"{name}.")
    return parts


def _settings(section: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> list[Setting]:
    """Return the fields that are not sections, with the docstring that follows each."""
    followers = dict(zip(section.body, section.body[1:], strict=False))
    out = []
    for field in _fields(section):
        if _section(field) in classes or _name(field).startswith("_"):
            continue
        kind = ast.unparse(field.annotation)
        default, limits = _default(field.value)
        meaning = " ".join(_text(followers.get(field)).split()).replace("None", "null")
        out.append(Setting(_name(field), " ".join([_type(kind), *limits]), default, meaning))
    return out


def _fields(section: ast.ClassDef) -> Iterator[ast.AnnAssign]:
    for node in section.body:
        if isinstance(node, ast.AnnAssign):
            yield node


def _section(field: ast.AnnAssign) -> str:
    """Return the class of a field, which may be null, if it is a section."""
    return ast.unparse(field.annotation).removesuffix(" | None")


def _name(field: ast.AnnAssign) -> str:
    assert isinstance(field.target, ast.Name)
    return field.target.id


def _text(node: ast.stmt | None) -> str:
    match node:
        case ast.Expr(value=ast.Constant(value=str(text))):
            return text
    return ""


def _default(value: ast.expr | None) -> tuple[str, list[str]]:
    """Return the default as YAML writes it, and the limits of a ``Field``."""
    limits: list[str] = []
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "Field":
        signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
        limits = [f"{signs[k.arg]} {_plain(k.value)}" for k in value.keywords if k.arg in signs]
        factory = next((k.value for k in value.keywords if k.arg == "default_factory"), None)
        if factory is not None and ast.unparse(factory) == "dict":
            return "{}", limits
        if factory is not None:
            return f"({ast.unparse(factory).strip('_')})", limits
        value = value.args[0] if value.args else None
    return (_plain(value) if value is not None else "(needed)"), limits


def _plain(value: ast.expr) -> str:
    if isinstance(value, ast.Call):
        value = value.args[0]
    literal: Any = eval(compile(ast.Expression(value), "default", "eval"), {})
    match literal:
        case None:
            return "null"
        case bool():
            return str(literal).lower()
        case "":
            return '""'
        case tuple():
            return str(list(literal))
    return str(literal)


def _type(annotation: str) -> str:
    # A type with a validator is documented as the type.
    bare = re.sub(r"^Annotated\[([^,]+), .*\]$", r"\1", annotation)
    out = bare.replace(" | None", "")
    if out.startswith("Literal["):
        return " / ".join(part.strip().strip("'\"") for part in out[8:-1].split(","))
    names = {"str": "text", "int": "integer", "float": "number", "bool": "true / false"}
    names |= {"Name": "name", "Path": "folder", "SecretStr": "secret", "LocalPath": "text"}
    names |= {"EngineOptions": "list of texts", "Variables": "texts by name"}
    names |= {"dict[str, float]": "numbers by name", "ModelList": "list of mappings"}
    names |= {"tuple[float, float]": "two numbers", "Texts": "list of texts"}
    names |= {"TrackerNames": "list of texts", "Limit": "number ≥ 0"}
    names |= {"dict[Name, dict[str, Any]]": "settings by name"}
    names |= {"dict[Name, LocalPath]": "folders by name"}
    return names[out]


def _table(settings: list[Setting], prefix: str = "") -> str:
    rows = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    for s in settings:
        meaning = s.meaning.replace("|", "\\|")
        rows.append(f"| `{prefix}{s.name}` | {s.type} | `{s.default}` | {meaning} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.exit(main())
