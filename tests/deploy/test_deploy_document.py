"""The pages of deployment: tables are computed, settings fit their machines, commands are ours."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from any_agent.config import Config, load_config
from any_agent.launcher.engines import assign_gpus
from any_agent.launcher.slurm.plan import count_ranks, plan
from benchmarks.gpu import sizing
from benchmarks.gpu.shapes import SHAPES, Shape
from trainer.pass_size import GPU_TOKENS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "docs" / "how-to" / f"{name}.md" for name in ("gpus", "deploy", "slurm")]
TEXT = "\n".join(page.read_text() for page in PAGES)
CONFIGS = re.findall(
    r"<!-- config: (\d+) nodes?, (\d+) GPUs of (\d+) GB -->\n```yaml\n(.*?)```", TEXT, re.S
)
COMMANDS = [
    line.partition(" #")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", TEXT, re.S)
    for line in block.splitlines()
    if line.strip()
]


def test_the_tables_are_computed_and_there_are_settings_for_each_cluster() -> None:
    begin, end = "<!-- sizing: written by python -m benchmarks.gpu.sizing -->\n", "\n<!-- sizing"
    shown = TEXT.partition(begin)[2].partition(end)[0]
    assert [int(nodes) for nodes, *_ in CONFIGS] == [1, 2, 6]
    assert shown.strip() == sizing.tables(), "run python -m benchmarks.gpu.sizing"


def shape_of(config: Config) -> Shape:
    return SHAPES[config.model.path.rsplit("-", 1)[-1]]


def overridden(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return settings with those of `over` in place of the same ones of `base`."""
    out = dict(base)
    for name, value in over.items():
        inner = base.get(name)
        out[name] = overridden(inner, value) if isinstance(inner, dict) else value
    return out


@pytest.mark.parametrize(
    ("nodes", "gpus", "card", "text"), CONFIGS, ids=[f"{one[0]}-nodes" for one in CONFIGS]
)
def test_documented_settings_fit_their_machines(
    nodes: str, gpus: str, card: str, text: str, tmp_path: Path
) -> None:
    """By the counts of the tables: training with its longest rows, and an engine's cache for all
    the calls that it samples at once at a quarter of the longest length."""
    path = tmp_path / "my.yaml"
    # The page shows only how the last cluster's settings differ from those before it.
    base = yaml.safe_load(CONFIGS[1][-1]) if int(nodes) == 6 else {}
    path.write_text(yaml.safe_dump(overridden(base, yaml.safe_load(text))))
    config = load_config(str(path), environ={})
    shape = shape_of(config)
    limit = sizing.USABLE * int(card) * sizing.GB
    roles = plan(config, [f"node-{k}" for k in range(int(nodes))], int(gpus))
    if int(nodes) == 1:
        dealt = assign_gpus(
            config, [str(k) for k in range(int(gpus))], engines=count_ranks(roles), trains=True
        )
        assert len(dealt.trainer or ()) == config.train.processes
    else:
        assert config.cluster.nodes == int(nodes)
        assert count_ranks(roles) * config.engine.gpus == int(gpus) * (
            int(nodes) - roles[0].training_nodes
        )
        assert config.server.journal_dir is not None
    tokens = config.train.micro_batch_tokens or GPU_TOKENS[1]
    assert (config.train.max_row_tokens or 0) <= tokens
    processes = config.train.processes * roles[0].training_nodes
    assert sizing.training(shape, processes, tokens=tokens).total <= limit
    cached = config.engine.max_running_requests * (config.engine.context_length or 0) // 4
    assert sizing.serving(shape, config.engine.gpus, cached_tokens=cached).total <= limit


def test_the_file_for_one_gpu_fits() -> None:
    """SGLang's share of the card, and the trainer's beside it."""
    path = ROOT / "deploy" / "one-gpu.yaml"
    config = load_config(str(path), environ={})
    shape, card = shape_of(config), 80 * sizing.GB
    words = config.engine.arguments
    share = float(words[words.index("--mem-fraction-static") + 1])
    trained = sizing.training(
        shape, 1, tokens=config.train.micro_batch_tokens or GPU_TOKENS[1]
    ).total
    assert trained + share * card <= sizing.USABLE * card
    assert "80 GB" in path.read_text()


def test_documented_compose_commands_name_what_compose_has() -> None:
    services = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
    lines = [shlex.split(line) for line in COMMANDS if line.startswith("docker compose")]
    assert {line[-1] for line in lines if "up" in line} == set(services)
    for words in lines:
        assert (ROOT / words[words.index("-f") + 1]).is_file()
        if "--profile" in words:
            assert words[words.index("--profile") + 1] in services[words[-1]]["profiles"]
