"""The gateways that `proxy.py` and `streams.py` measure, each in a process of its own."""

from __future__ import annotations

import random
import time
import urllib.request
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import orjson
from common import child, wait_until_up

PROMPT, OUTPUT = 1000, 500
OURS = "any-agent"
WITH_LITELLM, FROZEN = f"{OURS} with LiteLLM", f"{OURS}, frozen"
_PEERS = Path(__file__).with_name("peers")
KEY = "sk-benchmark-benchmark-benchmark"
"""A master key, without which LiteLLM does not start; the bare routes check none."""
Message = dict[str, Any]
Api = Literal["chat", "responses", "messages"]


@dataclass(slots=True)
class Contender:
    """A gateway under load; ``sessions``: calls go to train sessions of its own."""

    name: str
    url: str
    pid: int
    logprobs: bool = True
    sessions: bool = False
    model: str = "policy"
    api: Api = "chat"
    journal: Path | None = None
    cpu: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """CPU seconds of the process per call, one figure a round, by kind of call."""
    rate: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    turn: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """CPU seconds of the n-th turn of an episode."""
    memory: float = 0.0
    disk: float = 0.0


class Lab:
    """The engine and the contenders, started in a folder."""

    def __init__(self, folder: Path, stack: ExitStack, gap: float) -> None:
        self._folder = folder
        self._stack = stack
        self.model = folder / "model"
        log = folder / "model.log"
        with child(
            ["-m", "any_agent.demo.model", str(self.model), "--warmup-steps", "0"], log
        ) as p:
            if p.wait(300):
                raise RuntimeError(log.read_text())
        self.text = Texts(self.model)
        canned = folder / "canned.json"
        canned.write_bytes(orjson.dumps(self.text.canned()))
        command = [str(_PEERS / "canned.py"), "--canned", str(canned), "--gap", str(gap)]
        self.engine, _ = self._start("engine", command, "/get_model_info")

    def _start(self, name: str, command: list[str], health: str, **more: str) -> tuple[str, int]:
        from any_agent.runtime.ports import free_port

        log = self._folder / f"{name}.log"
        port = free_port("127.0.0.1")
        environment = {
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_TELEMETRY": "False",
            "HF_HUB_OFFLINE": "1",
            **more,
        }
        process = self._stack.enter_context(
            child([*command, "--port", str(port)], log, environment)
        )
        url = f"http://127.0.0.1:{port}"
        wait_until_up(process, url + health, log)
        return url, process.pid

    def ours(self, name: str = OURS, **more: object) -> list[Contender]:
        import yaml

        from any_agent.config import load_config
        from any_agent.rundir.layout import RunDir

        settings = {
            "root": self._folder / "runs",
            "model.path": self.model,
            "model.enable_thinking": "false",
            "log_level": "warning",
            "trial": name.replace(" ", "-").replace(",", ""),
            **more,
        }
        config = load_config(None, [f"{k}={v}" for k, v in settings.items()], environ={})
        path = self._folder / f"{config.trial}.yaml"
        path.write_text(yaml.safe_dump(config.dump()))
        command = ["-m", "proxy_ext", "--config", str(path), "--engine-url", self.engine]
        url, pid = self._start(config.trial, [*command, "--training"], "/readyz")
        run = RunDir.of(config.root, config.user, config.experiment, config.trial)
        journal = run.journal(0).parent
        chat = Contender(name, url, pid, logprobs=False, sessions=True, journal=journal)
        told = Contender(f"{name}, logprobs", url, pid, sessions=True, journal=journal)
        return [chat, told, *_other_apis(chat)]

    def with_litellm(self) -> list[Contender]:
        """Return ours with a LiteLLM configuration and two callbacks: calls of the policy, and of
        LiteLLM's model."""
        path = self._write_litellm("brought.yaml", "frozen", callbacks=["two.first", "two.second"])
        (self._folder / "two.py").write_text(_CALLBACKS)
        policy, *_ = self.ours(WITH_LITELLM, **{"litellm.config": path})
        _await_litellm(policy.url)
        frozen = replace(
            policy,
            name=FROZEN,
            model="frozen",
            # As stock LiteLLM is asked.
            logprobs=True,
            cpu=defaultdict(list),
            rate=[],
            first=[],
            turn=defaultdict(list),
        )
        return [policy, frozen]

    def _write_litellm(self, file: str, name: str, **settings: object) -> Path:
        import yaml

        model = {"model": "openai/policy", "api_base": f"{self.engine}/v1", "api_key": "none"}
        config = {
            "model_list": [{"model_name": name, "litellm_params": model}],
            "general_settings": {"disable_model_info_refresh": True},
            "litellm_settings": {"num_retries": 0, "telemetry": False, **settings},
        }
        path = self._folder / file
        path.write_text(yaml.safe_dump(config))
        return path

    def litellm(self) -> list[Contender]:
        path = self._write_litellm("litellm.yaml", "policy")
        run = "from litellm import run_server; run_server()"
        command = ["-c", run, "--config", str(path), "--host", "127.0.0.1"]
        url, pid = self._start("litellm", command, "/health/liveliness", LITELLM_MASTER_KEY=KEY)
        chat = Contender("LiteLLM", url, pid)
        return [chat, *_other_apis(chat)]

    def bare(self) -> list[Contender]:
        command = [str(_PEERS / "bare.py"), "--engine-url", self.engine]
        url, pid = self._start("bare", command, "/healthz")
        return [Contender("bare", url, pid), Contender("relay", f"{url}/relay", pid)]


_CALLBACKS = """
from litellm.integrations.custom_logger import CustomLogger


class Count(CustomLogger):
    calls = 0

    async def async_log_success_event(self, kwargs, response_obj, start_time, end_time):
        self.calls += 1


first, second = Count(), Count()
"""


def _await_litellm(url: str) -> None:
    deadline = time.monotonic() + 120
    while "litellm" in orjson.loads(urllib.request.urlopen(f"{url}/readyz").read()):
        if time.monotonic() > deadline:
            raise RuntimeError("LiteLLM has not started")
        time.sleep(0.5)


def _other_apis(chat: Contender) -> list[Contender]:
    """Return the same process under the other APIs, whose answers have no log-probabilities."""
    apis: tuple[Api, ...] = ("responses", "messages")
    return [
        replace(
            chat,
            name=f"{chat.name}, {api}",
            logprobs=False,
            api=api,
            cpu=defaultdict(list),
            rate=[],
            first=[],
            turn=defaultdict(list),
        )
        for api in apis
    ]


class Texts:
    """Prompts of a known number of tokens, and the engine's canned answer."""

    def __init__(self, model: Path) -> None:
        from tokenizers import Tokenizer

        from any_agent.demo.task import corpus

        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        config = orjson.loads((model / "config.json").read_bytes())
        self._vocabulary: int = config["vocab_size"]
        self._lines = sorted({line.split("\n")[1] for line in corpus()})
        self._random = random.Random(0)

    def user(self, tokens: int) -> Message:
        """Return a user message of about ``tokens`` tokens, a new one each time."""
        parts: list[str] = []
        size = 0
        while size < tokens:
            line = self._random.choice(self._lines) + "\n"
            parts.append(line)
            size += len(self._tokenizer.encode(line).ids)
        return {"role": "user", "content": "".join(parts)}

    def canned(self) -> dict[str, Any]:
        """Return fixed ids whose texts are visible ASCII, so that every token is a chunk."""
        size = self._tokenizer.get_vocab_size()
        texts = {i: self._tokenizer.decode([i], skip_special_tokens=False) for i in range(size)}
        plain = [i for i, t in texts.items() if t.strip() and t.isascii() and "<" not in t]
        ids = self._random.choices(plain, k=OUTPUT)
        end = self._tokenizer.token_to_id("<|im_end|>")
        return {
            "ids": ids,
            "texts": [texts[i] for i in ids],
            "end": end,
            "vocabulary": self._vocabulary,
        }
