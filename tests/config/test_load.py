from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from any_agent.config import SECRETS, Config, known_keys, load_config, load_resolved
from any_agent.config.script import GRPOConfig
from any_agent.errors import ConfigError
from tests.support.errors import fails_with

SGLANG = "engine.kind=sglang"


def write(folder: Path, data: Any) -> Path:
    path = folder / "run.yaml"
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
    return path


def test_command_line_over_environment_over_yaml_over_default(tmp_path: Path) -> None:
    path = write(tmp_path, {"train": {"lr": 1e-3, "steps": 3, "seed": 4}, "trial": "yaml"})
    environ = {"ANY_AGENT_TRAIN__LR": "2e-3", "ANY_AGENT_TRAIN__STEPS": "5", "PATH": "/bin"}
    config = load_config(path, ["train.lr=3e-3", "--server.port=0"], environ)
    assert (config.train.lr, config.train.steps, config.train.seed) == (3e-3, 5, 4)
    assert config.server.host == "127.0.0.1", "by default nobody else is served"
    assert (config.server.port, config.trial, config.train.grad_clip) == (0, "yaml", 1.0)


@pytest.mark.parametrize("source", ["yaml", "environment", "command line"])
@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("train.step", "train.steps?"),
        ("train.clip", "train.grad_clip?"),
        ("trian.lr", "train?"),
        ("sevrer.port", "server?"),
        ("rollout.batchsize", "rollout.batch_size?"),
        ("rollout.enable_rollout_tracing", "`any-agent config`"),
        ("qqq.zzz", "`any-agent config`"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(
    tmp_path: Path, source: str, key: str, says: str
) -> None:
    section, _, leaf = key.partition(".")
    path = write(tmp_path, {section: {leaf: 1}}) if source == "yaml" else None
    variable = f"ANY_AGENT_{section}__{leaf}".upper()
    environ = {variable: "1"} if source == "environment" else {}
    overrides = [f"{key}=1"] if source == "command line" else []
    with fails_with(ConfigError, says):
        load_config(path, overrides, environ)


def test_a_key_without_its_section_is_answered_with_it(tmp_path: Path) -> None:
    for path, overrides in ((None, ["port=1"]), (write(tmp_path, {"port": 1}), [])):
        with fails_with(ConfigError, "unknown key port", "server.port"):
            load_config(path, overrides, {})


def test_single_underscores_in_the_environment_are_refused() -> None:
    with fails_with(ConfigError, "ANY_AGENT_TRAIN__LR"):
        load_config(None, [], {"ANY_AGENT_TRAIN_LR": "1"})
    # Not a setting of the service's.
    assert load_config(None, [], {"ANY_AGENT_URL": "x"}) == load_config(None, [], {})


BAD = {
    "train.lr": "key=value",
    "train.lr=fast": "train.lr",
    "train.lr=-1": "train.lr",
    "train=5": "train",
    "server.port=70000": "server.port",
    "experiment=a b": "experiment",
    "trial=../x": "trial",
    "sampling.top_p=0.9": "truncated distribution",
    "sampling.top_k=5": "truncated distribution",
    "sampling.temperature=0": "sampling.temperature",
    "sessions.group_size=100": "sessions.group_size",
    "train.kl_coef=-0.1": "train.kl_coef",
    "train.lora.dropout=0.1": "train.lora.dropout",
    "train.lora.rank=0": "train.lora.rank",
    "train.lora.rnk=1": "train.lora.rank?",
    "train.lora.target_modules=all-linear,q_proj": "all-linear",
    "server.admin_key=short": "8 to 256",
    "server.admin_key=has a space in it": "without spaces",
    "server.admin_key=sk-v1.0.abc.def": "must not begin",
    "server.admin_key=sk-tenant.0123.abc": "must not begin",
}


def test_a_bad_value_names_its_key() -> None:
    for override, says in BAD.items():
        with fails_with(ConfigError, says, exit_code=2):
            load_config(None, [override], {})


def test_an_admin_key_opens_other_addresses() -> None:
    environ = {"ANY_AGENT_SERVER__ADMIN_KEY": "0123456789"}
    config = load_config(None, ["server.host=0.0.0.0"], environ)
    assert config.server.admin_key is not None
    # All digits, and still text; and never in a dump or a message.
    assert config.server.admin_key.get_secret_value() == "0123456789"
    assert "0123456789" not in str(config.dump()) + repr(config)
    with pytest.raises(ConfigError) as raised:
        load_config(None, ["server.port=x"], environ)
    assert "0123456789" not in raised.value.message


def test_an_empty_admin_key_is_refused(tmp_path: Path) -> None:
    """It would open the service to everybody; a variable that is not set expands to it."""
    path = write(tmp_path, {"server": {"host": "0.0.0.0", "admin_key": ""}})
    for file, environ in ((path, {}), (None, {"ANY_AGENT_SERVER__ADMIN_KEY": ""})):
        with fails_with(ConfigError, "8 to 256"):
            load_config(file, [], environ)
    assert load_config(None, ["server.admin_key=null"], {}).server.admin_key is None


def test_texts_and_numbers_are_what_their_setting_is() -> None:
    for name in ("2026-11-20", "007", "1e5", "on", "1_000", "3.14"):
        assert load_config(None, [f"trial={name}"], {}).trial == name
        assert load_config(None, [], {"ANY_AGENT_EXPERIMENT": name}).experiment == name
    for text, value in (("1e-3", 1e-3), ("2E5", 2e5), (".5", 0.5), ("7", 7.0), ("+1e2", 100.0)):
        assert load_config(None, [f"train.lr={text}"], {}).train.lr == value


def test_a_section_that_is_null_until_one_of_its_settings_is_given(tmp_path: Path) -> None:
    assert load_config(None, [], {}).train.lora is None
    off = write(tmp_path, {"train": {"lora": None}})
    for given, environ in (
        (["train.lora.rank=8"], {}),
        (["train.lora=null", "train.lora.rank=8"], {}),
        ([], {"ANY_AGENT_TRAIN__LORA__RANK": "8"}),
    ):
        lora = load_config(off, given, environ).train.lora
        assert lora is not None and (lora.rank, lora.alpha, lora.target_modules) == (8, 32, ())
    for text in ("q_proj,v_proj", "[q_proj, v_proj]"):
        lora = load_config(None, [f"train.lora.target_modules={text}"], {}).train.lora
        assert lora is not None and lora.target_modules == ("q_proj", "v_proj")
    both = write(tmp_path, {"train": {"lora": {"rank": 8, "target_modules": "all-linear"}}})
    assert load_config(both, [], {}).train.lora == load_config(off, given, environ).train.lora
    assert load_config(both, ["train.lora=null"], {}).train.lora is None


def test_a_section_of_comments_is_empty(tmp_path: Path) -> None:
    path = write(tmp_path, "train:\n  # lr: 1\nserver:\n")
    assert load_config(path, ["train.steps=2"], {}).train.steps == 2
    assert load_config(write(tmp_path, ""), [], {}) == load_config(environ={})


def test_files_that_are_no_settings_are_refused_by_name_and_line(tmp_path: Path) -> None:
    for text, says in (
        ("- a", "mapping"),
        ("a: [", "YAML"),
        ("5", "mapping"),
        # YAML itself keeps the last one.
        ("train: {lr: 1.0e-5}\nrollout: {eta: 1}\ntrain: {steps: 7}\n", "lines 1 and 3"),
        ("train:\n  lr: 3.0e-5\n  lr: 1.0e-3\n", "lines 2 and 3"),
        ("train: {lr: 3.0e-5, lr: 1.0e-3}\n", "lines 1 and 1"),
    ):
        path = write(tmp_path, text)
        with fails_with(ConfigError, says, str(path)):
            load_config(path, [], {})
    with fails_with(ConfigError, "nothing.yaml"):
        load_config(tmp_path / "nothing.yaml", [], {})


def test_a_dump_can_be_loaded_again(tmp_path: Path) -> None:
    given = ["train.betas=[0.8, 0.9]", "trial=2026-11-20", "train.grad_clip=.inf"]
    given += [SGLANG, "engine.arguments={a-b: 1}", "engine.environment={X: 2, A: b}"]
    config = load_config(None, given, {})
    assert config.engine.environment == {"X": "2", "A": "b"}, "variables are texts"
    assert load_config(write(tmp_path, config.dump()), [], {}) == config


def test_resolved_settings_are_the_files_and_the_secrets(tmp_path: Path) -> None:
    """What one process resolved, another one's environment does not change."""
    path = write(tmp_path, {"train": {"lr": 0.5}, "server": {"host": "0.0.0.0"}})
    environ = {
        "ANY_AGENT_SERVER__ADMIN_KEY": "0123456789",
        "ANY_AGENT_TRAIN__LR": "7",
        "ANY_AGENT_TRAIN__STEPS": "7",
        "ANY_AGENT_TRAIN__NO_SUCH_KEY": "7",
    }
    config = load_resolved(path, environ)
    assert (config.train.lr, config.train.steps) == (0.5, Config().train.steps)
    assert config.server.admin_key is not None
    assert config.server.admin_key.get_secret_value() == "0123456789"
    assert load_resolved(path, {"ANY_AGENT_SERVER__ADMIN_KEY": ""}).server.admin_key is None


def test_a_tilde_in_the_models_path_is_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    path = write(tmp_path, {"model": {"path": "~/model"}})
    for file, overrides, environ in (
        (path, [], {}),
        (None, ["model.path=~/model"], {}),
        (None, [], {"ANY_AGENT_MODEL__PATH": "~/model"}),
    ):
        assert load_config(file, overrides, environ).model.path == "/home/me/model"
    assert load_config(None, ["model.path=org/name"], {}).model.path == "org/name"


def test_every_setting_can_be_named(tmp_path: Path) -> None:
    keys = list(known_keys())
    assert len(keys) == len(set(keys))
    assert {"experiment", "train.lr", "server.admin_key"} <= set(keys)
    dumped = Config().dump()
    for key in keys:
        node: Any = dumped
        for part in key.split("."):
            if key not in SECRETS:
                node = node[part] if node is not None else None


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules can be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def resolved(folder: Path, *plugins: str) -> Path:
    """Write the settings of a run as its processes get them."""
    config = load_config(None, [f"plugins={','.join(plugins)}"], {})
    assert config.plugins == plugins
    return write(folder, config.dump())


def test_each_process_imports_plugins_once_and_in_order(folder: Path) -> None:
    for name in ("first_plugin", "second_plugin"):
        (folder / f"{name}.py").write_text("import os; os.environ['PLUGINS'] += __name__ + ' '")
    file = resolved(folder, "first_plugin", "second_plugin")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLUGINS", "")
        assert load_resolved(file, {}) == load_resolved(file, {})
        assert os.environ["PLUGINS"] == "first_plugin second_plugin "
    for name in ("first_plugin", "second_plugin"):
        del sys.modules[name]


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (None, "plugins=bad_plugin"),
        ("import no_such_package", "'no_such_package'"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_plugin_that_cannot_be_imported_is_named(
    folder: Path, code: str | None, problem: str
) -> None:
    if code is not None:
        (folder / "bad_plugin.py").write_text(code)
    with fails_with(ConfigError, problem):
        load_resolved(resolved(folder, "bad_plugin"), {})


def test_engine_arguments_come_as_text_list_or_mapping() -> None:
    for given in (
        "--mem-fraction-static 0.8 --enable-metrics",
        "[--mem-fraction-static, '0.8', --enable-metrics]",
        "{mem_fraction_static: 0.8, enable-metrics: true, disable-cuda-graph: false}",
    ):
        config = load_config(None, [SGLANG, f"engine.arguments={given}"], {})
        assert config.engine.arguments == ("--mem-fraction-static", "0.8", "--enable-metrics")
    config = load_config(None, [SGLANG, "engine.arguments={cuda-graph-bs: [1, 2]}"], {})
    assert config.engine.arguments == ("--cuda-graph-bs", "1", "2")
    for given in ("python=/usr/bin/python3", "gpus=2", "arguments=--x"):
        with fails_with(ConfigError, "engine.kind=sglang"):
            load_config(None, [f"engine.{given}"], {})


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ("--model-path /x", "model.path is served"),
        ("--port=3", "finds a free port"),
        ("--tp 2", "engine.gpus"),
        ("--tp-size=2", "engine.gpus"),
        ("--dp-size 2", "server.ranks"),
        ("--max_running_requests 3", "engine.max_running_requests"),
        ("--weight-v 3", "counts its versions"),
        ("{dtype: half}", "model.dtype"),
        ("--api-key s3cret", "a key of its own"),
        ("--tokenizer-worker-num 2", "takes no key"),
        ("--grpc-port 9", "no key"),
    ],
)
def test_engine_arguments_that_the_service_gives_itself_are_refused_by_name(
    given: str, fix: str
) -> None:
    with fails_with(ConfigError, fix) as caught:
        load_config(None, [SGLANG, f"engine.arguments={given}"], {})
    assert "s3cret" not in caught.value.message


def load(folder: Path, text: str, *overrides: str, **environ: str) -> Config:
    return load_config(write(folder, text), overrides, environ, kind=GRPOConfig)


THEIRS = """
experiment_name: mine
trial_name: t1
actor: {path: a/b}
tokenizer_path: ${actor.path}
rollout: {tokenizer_path: "${tokenizer_path}", fileroot: "${ experiment_name }"}
"""


def test_what_changes_a_setting_changes_what_names_it(tmp_path: Path) -> None:
    config = load(tmp_path, THEIRS)
    assert (config.model.path, str(config.rollout.tokenizer_path)) == ("a/b", "a/b")
    assert str(config.rollout.fileroot) == "mine"
    config = load(tmp_path, THEIRS, "actor.path=c", ANY_AGENT_EXPERIMENT="yours")
    assert (config.model.path, str(config.rollout.tokenizer_path)) == ("c", "c")
    assert (config.experiment, str(config.rollout.fileroot)) == ("yours", "yours")


def test_sections_numbers_and_lists_can_be_referred_to(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "train_dataset: {path: x, split: s}\nvalid_dataset: ${train_dataset}\n"
        "train: {seed: 7, steps: '${train.seed}'}\nmodel: {name: m, policy_names: ['${trial}']}\n"
        "trial: other\n",
        "train_dataset.split=t",
    )
    assert (config.valid_dataset.path, config.train_dataset.split) == ("x", "t")
    assert config.train.steps == 7
    assert list(config.model.policy_names) == ["other"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("trial: ${x.y}", "trial: ${x.y} names nothing in FILE"),
        ("trial: ${experiment.y}\nexperiment: e", "${experiment.y} names nothing in FILE"),
        ("trial: ${trial}", "trial -> trial is a circle in FILE"),
        ("trial: ${user}\nuser: ${trial}", "user -> trial -> user is a circle in FILE"),
        ("train: ${model}\nmodel: {path: '${train}'}", "is a circle in FILE"),
        ("root: ${user}/runs\nuser: me", "root: "),
        ("root: '${.user}'\nuser: me", "root: "),
        ("model: {path: '${oc.env:MODEL}'}", "ANY_AGENT_MODEL__PATH"),
        ("cluster: {sbatch: ['--x=${HOME}/y']}", "cluster.sbatch"),
    ],
)
def test_references_that_lead_nowhere_are_refused_by_name(
    tmp_path: Path, text: str, says: str
) -> None:
    with fails_with(ConfigError, says.replace("FILE", str(tmp_path / "run.yaml"))):
        load(tmp_path, text)


def test_references_stand_in_files_alone(tmp_path: Path) -> None:
    with fails_with(ConfigError, "model.path"):
        load(tmp_path, "", "actor.path=${root}")
    with fails_with(ConfigError, "ANY_AGENT_TRIAL"):
        load(tmp_path, "", ANY_AGENT_TRIAL="${oc.env:ME}")
    key = "a-key-with-${x}-of-thirty-two-letters"
    config = load(tmp_path, "", ANY_AGENT_SERVER__ADMIN_KEY=key)
    assert config.secrets() == [key]
