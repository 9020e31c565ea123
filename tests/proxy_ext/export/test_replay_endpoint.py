"""`any-agent replay --url`: recorded calls at another service, compared with what it answers."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from any_agent.chat import ChatFormat
from any_agent.errors import ConfigError
from any_agent.launcher.trial import trial_dir
from any_agent.record import strip_content
from any_agent.rundir.layout import RunDir
from any_agent.types import GenerationHyperparameters, SessionState, id_array, logprob_array
from proxy_ext.export.endpoint import Endpoint
from proxy_ext.export.replay import main
from proxy_ext.journal import PutInteraction, PutSession
from tests.support.archives import CALL, TOOLS, Rank
from tests.support.errors import fails_with
from tests.support.fake_provider import Provider
from tests.support.journal import make_interaction, make_row
from tests.support.ports import own_port
from tests.support.proxy_fixtures import Start
from tests.support.scripted_engine import ScriptedEngine
from tests.support.sessions import finalize
from tests.support.trials import save_trial

KEY = "sk-of-the-other-service"
HI = [{"role": "user", "content": "hi"}]
Reply = Callable[[dict[str, Any], web.Request], Awaitable[Any]]


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


@pytest.fixture
def trial(tiny_model_dir: Path, tmp_path: Path) -> RunDir:
    return save_trial(tmp_path, {}, base=tiny_model_dir)


async def record(trial: RunDir, *calls: dict[str, Any], session: str = "s-0-a") -> None:
    """A session of these calls, each a root of one message unless it has a ``parent``."""
    rank = await Rank(trial.path).start()
    row = make_row(session, state=SessionState.TRAINED, ended_at=1500.0)
    await rank.journal.commit(PutSession(row))
    for k, fields in enumerate(calls):
        parent = fields.pop("parent", None)
        made = make_interaction(f"{session}-{k}", session, parent)
        values: dict[str, Any] = {
            "message_delta": HI,
            "gconfig": GenerationHyperparameters(max_new_tokens=7),
        }
        await rank.journal.commit(PutInteraction(replace(made, **values | fields)))
    await rank.stop()


async def replay(trial: RunDir, *arguments: str) -> int:
    place = [f"root={trial.path.parents[2]}", "user=me", "experiment=exp", "trial=one"]
    # It has an event loop of its own.
    return await asyncio.to_thread(main, [*arguments, *place])


def lines_of(capsys: pytest.CaptureFixture[str]) -> tuple[list[dict[str, Any]], str]:
    said = capsys.readouterr()
    return list(map(json.loads, said.out.splitlines())), said.err


@asynccontextmanager
async def serving(reply: Reply) -> AsyncIterator[str]:
    """A service whose chat route is ``reply``, which returns JSON or a response; its base URL."""

    async def handle(request: web.Request) -> web.StreamResponse:
        said = await reply(await request.json(), request)
        return said if isinstance(said, web.StreamResponse) else web.json_response(said)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


def completion(
    content: str | None,
    *,
    finish: str = "stop",
    calls: list[dict[str, Any]] | None = None,
    prompt: int = 3,
    tokens: int = 2,
    logprobs: list[tuple[str, float]] | None = None,
) -> dict[str, Any]:
    message = {"role": "assistant", "content": content, "tool_calls": calls}
    entries = [{"token": t, "bytes": list(t.encode()), "logprob": p} for t, p in logprobs or ()]
    choice = {"index": 0, "message": message, "finish_reason": finish}
    choice["logprobs"] = None if logprobs is None else {"content": entries}
    usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
    return {"id": "x", "choices": [choice], "usage": usage}


async def test_this_service_gives_its_recorded_answers_and_log_probabilities_again(
    start: Start,
    engine: ScriptedEngine,
    chat: ChatFormat,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In eval sessions, which honour what is asked for; only the seventh token differs."""
    proxy = await start("experiment=exp", "trial=one", "user=me")
    config, run = proxy.service.config, trial_dir(proxy.service.config)
    model = {"model": config.dump()["model"] | {"path": str(chat.tokenizer.name_or_path)}}
    (run.path / "config.yaml").write_text(yaml.safe_dump(config.dump() | model))
    one, two = [40, 41, 42, 43, 44, 45, 46, 47], [50, 51, 52, 53, 54, 55, 56, 57]
    session = await proxy.open(mode="eval")
    engine.say(one)
    first = await proxy.complete(session["api_key"], HI, temperature=1)
    talk = [*HI, first["choices"][0]["message"], {"role": "user", "content": "and?"}]
    engine.say(two)
    second = await proxy.complete(session["api_key"], talk, temperature=1, stop=["never"])
    recorded = await proxy.recorded(session["session_id"])
    await finalize(proxy, session)
    again = await proxy.open(mode="eval")
    monkeypatch.setenv("OPENAI_API_KEY", again["api_key"])
    engine.say(one)
    engine.say([*two[:6], 60, 61])
    asked = len(engine.requests)
    wanted = ("--url", proxy.url, "--concurrency", "1", "--sampling", "recorded", "--json")
    assert await replay(run, session["session_id"], *wanted) == 0
    (found, sums), _ = lines_of(capsys)
    assert found["session_id"] == session["session_id"]
    same, differs = found["calls"]
    assert [c["interaction_id"] for c in found["calls"]] == [first["id"], second["id"]]
    assert same["same"] and same["compared_tokens"] == len(one)
    assert same["answer"]["content"] == first["choices"][0]["message"]["content"]
    assert (same["prompt_tokens"], same["output_tokens"]) == (
        first["usage"]["prompt_tokens"],
        len(one),
    )
    # The engine's formula gives the same token at the same place the same log-probability.
    assert same["comparison"]["difference_max"] == 0
    mean = sum(recorded[0].output_logprobs.tolist()) / len(one)
    assert same["comparison"]["recorded_mean"] == pytest.approx(mean, abs=1e-6)
    texts = [chat.decode(ids) for ids in (two, [*two[:6], 60, 61])]
    first_other = next(k for k, (a, b) in enumerate(zip(*texts, strict=True)) if a != b)
    assert (differs["same"], differs["text_differs_at"]) == (False, first_other)
    assert differs["compared_tokens"] == 6
    assert sums["all"]["same"] == 1 and sums["all"]["compared_tokens"] == len(one) + 6
    # It continued nothing, and the prompt was rendered with the same ids all the same.
    sent = [request["input_ids"] for request in engine.requests[asked:]]
    assert sent == [request["input_ids"] for request in engine.requests[:2]]
    assert [r["sampling_params"]["temperature"] for r in engine.requests[asked:]] == [1, 1]


async def test_a_call_is_sent_as_it_was_recorded(trial: RunDir) -> None:
    bodies: list[dict[str, Any]] = []
    keys = set()

    async def reply(body: dict[str, Any], request: web.Request) -> Any:
        bodies.append(body)
        keys.add(request.headers["authorization"])
        return completion("ho")

    custom = {**CALL, "type": "custom"}
    said = {"role": "assistant", "content": "", "tool_calls": [custom]}
    told = [{"role": "tool", "tool_call_id": "c1", "content": "\ud800 1"}]
    sampled = GenerationHyperparameters(
        max_new_tokens=7,
        temperature=0.6,
        top_k=20,
        stop=("x",),
        seed=3,
        stop_token_ids=(1,),
        logit_bias=((5, 1.5),),
        presence_penalty=0.5,
    )
    grammar = GenerationHyperparameters(max_new_tokens=7, grammar='{"json_schema": {"type": "a"}}')
    more = {"recorded": {"tool_choice": "add", "user": "u", "reasoning_effort": "low"}}
    await record(
        trial,
        {"tools": TOOLS, "output_message": said, "gconfig": sampled, "request": more},
        {"parent": "s-0-a-0", "message_delta": told, "gconfig": grammar},
    )
    async with serving(reply) as url:
        assert await replay(trial, "s-0-a", "--url", url, "--model", "other") == 0
        first, second = sorted(bodies, key=lambda body: len(body["messages"]))
        shared = {"model": "other", "tools": TOOLS, "max_completion_tokens": 7, "logprobs": True}
        shared["temperature"] = 0
        assert first == shared | {
            "messages": HI,
            "stop": ["x"],
            "logit_bias": {"5": 1.5},
            "presence_penalty": 0.5,
            "reasoning_effort": "low",
            "tool_choice": {"type": "function", "function": {"name": "add"}},
        }
        form = {"name": "answer", "schema": {"type": "a"}}
        assert second == shared | {
            "messages": [*HI, {**said, "tool_calls": [CALL]}, *told],
            "response_format": {"type": "json_schema", "json_schema": form},
        }
        bodies.clear()
        wanted = ("--sampling", "recorded", "--max-tokens", "5")
        assert await replay(trial, "--all", "--url", url, *wanted) == 0
        first, _ = sorted(bodies, key=lambda body: len(body["messages"]))
        names = ("model", "temperature", "top_k", "max_completion_tokens")
        assert [first[name] for name in names] == ["m", 0.6, 20, 5] and "seed" not in first
    assert keys == {f"Bearer {KEY}"}


async def test_text_calls_and_end_are_compared_each_by_its_own_rule(
    trial: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    def called(arguments: str, name: str = "add") -> list[dict[str, Any]]:
        return [
            {"id": "other", "type": "function", "function": {"name": name, "arguments": arguments}}
        ]

    def recorded(text: str, **fields: Any) -> dict[str, Any]:
        said = {"role": "assistant", "content": text, **fields}
        return {"output_message": said, "message_delta": [{"role": "user", "content": text}]}

    two = '{"b": 2, "a": 1}'
    cases: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
        "equal": ({}, completion("equal"), {"same": True}),
        "longer": ({}, completion("longer!"), {"same": False, "text_differs_at": 6}),
        "other": ({}, completion("oTher"), {"same": False, "text_differs_at": 1}),
        "spelled otherwise": (
            {"tool_calls": called(two)},
            completion("spelled otherwise", calls=called('{"a":1,"b":2.0}')),
            {"same": True, "calls_equal": True},
        ),
        "another value": (
            {"tool_calls": called(two)},
            completion("another value", calls=called('{"a":1,"b":true}')),
            {"same": False, "calls_equal": False, "text_differs_at": None},
        ),
        "another tool": (
            {"tool_calls": called(two)},
            completion("another tool", calls=called(two, "sub")),
            {"calls_equal": False},
        ),
        "one more": ({}, completion("one more", calls=called(two)), {"calls_equal": False}),
        "another end": (
            {},
            completion("another end", finish="length", tokens=9),
            {"same": False, "finish_reason_equal": False, "output_tokens": 9},
        ),
    }
    answers = {text: answer for text, (_, answer, _) in cases.items()}

    async def reply(body: dict[str, Any], _: web.Request) -> Any:
        return answers[body["messages"][0]["content"]]

    await record(trial, *(recorded(text, **fields) for text, (fields, _, _) in cases.items()))
    async with serving(reply) as url:
        assert await replay(trial, "s-0-a", "--url", url, "--json") == 0
    (found, sums), _ = lines_of(capsys)
    for (text, (_, _, expected)), got in zip(cases.items(), found["calls"], strict=True):
        assert got | expected == got, text
    counted = ("calls", "answered", "same", "text_equal", "calls_equal", "finish_reason_equal")
    assert [sums["all"][name] for name in counted] == [8, 8, 2, 6, 5, 7]
    assert (sums["all"]["output_tokens"], sums["all"]["recorded_output_tokens"]) == (23, 16)
    assert sums["all"]["not_compared"] == {"the service returns none that can be read": 8}


async def test_log_probabilities_are_compared_only_where_they_mean_the_same(
    trial: RunDir, chat: ChatFormat, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = [40, 41, 42]
    texts = [chat.token_text(id) for id in ids]
    tokens: dict[str, Any] = {"output_ids": id_array(ids), "output_versions": id_array([0] * 3)}
    tokens["output_logprobs"] = logprob_array([-0.5, -1.0, -2.0])
    plain, warm = (GenerationHyperparameters(max_new_tokens=7, temperature=t) for t in (1.0, 0.5))
    whole = list(zip(texts, (-0.5, -1.25, -1.5), strict=True))
    other = [*whole[:2], ("?!", -9.0)]
    numbers = list(zip(texts, (0, -1, -3), strict=True))
    cases: list[tuple[str, dict[str, Any], Any, Any]] = [
        ("whole", {"gconfig": plain}, completion("a", logprobs=whole), (3, 0.75 / 3, 0.5)),
        ("beginning", {"gconfig": plain}, completion("a", logprobs=other), (2, 0.125, 0.25)),
        ("none", {"gconfig": plain}, completion("a"), "returns none"),
        ("x", {"gconfig": plain}, completion("a", logprobs=[(texts[0], "x")]), "returns none"),  # type: ignore[list-item]
        *(
            (f"{odd}", {"gconfig": plain}, completion("a", logprobs=[(texts[0], odd)]), "can be")
            for odd in (1000.0, 0.01, 10**400, -(10**400), -1e308, math.nan, math.inf, False)
        ),
        ("whole numbers", {"gconfig": plain}, completion("a", logprobs=numbers), (3, 0.5, 1.0)),
        (
            "surprised",
            {"gconfig": plain, "output_logprobs": logprob_array([-9e3] * 3)},
            completion("a", logprobs=[(text, 1e-4) for text in texts]),
            (3, 9e3, 9e3),
        ),
        ("first", {"gconfig": plain}, completion("a", logprobs=other[2:]), "first one on"),
        ("warm", {"gconfig": warm}, completion("a", logprobs=whole), "temperature 0.5"),
        ("prompt", {"gconfig": plain}, completion("a", prompt=9, logprobs=whole), "the prompt"),
        (
            "bent",
            {"gconfig": plain.new(frequency_penalty=1.0)},
            completion("a", logprobs=whole),
            "bent (penalty)",
        ),
    ]
    answers = {name: answer for name, _, answer, _ in cases}

    async def reply(body: dict[str, Any], _: web.Request) -> Any:
        return answers[body["messages"][0]["content"]]

    await record(
        trial,
        *(
            tokens | fields | {"message_delta": [{"role": "user", "content": name}]}
            for name, fields, _, _ in cases
        ),
    )
    async with serving(reply) as url:
        assert await replay(trial, "s-0-a", "--url", url, "--json") == 0
        (found, sums), _ = lines_of(capsys)
        assert await replay(trial, "s-0-a", "--url", url, "--sampling", "recorded") == 0
    for (name, _, _, expected), got in zip(cases, found["calls"], strict=True):
        if isinstance(expected, str):
            assert got["comparison"] is None and expected in got["not_compared"], name
        else:
            count, mean, most = expected
            assert (got["compared_tokens"], got["not_compared"]) == (count, None), name
            assert got["comparison"]["difference_mean"] == pytest.approx(mean)
            assert got["comparison"]["difference_max"] == pytest.approx(most)
    figures = sums["all"]
    assert (figures["compared_calls"], figures["compared_tokens"]) == (4, 11)
    assert figures["difference_mean"] == pytest.approx((0.75 + 0.25 + 1.5 + 27e3) / 11)
    assert figures["difference_max"] == 9e3
    out = capsys.readouterr().out
    # At the recorded temperature, too: whether this service scales by it is not known.
    assert "by which the service may not scale its own" in out
    assert "a token differs by 2.5e+03 nats on average, by 9e+03 at most" in out


async def test_a_service_without_log_probabilities_is_asked_without_them(trial: RunDir) -> None:
    bodies: list[dict[str, Any]] = []

    async def reply(body: dict[str, Any], _: web.Request) -> Any:
        bodies.append(body)
        if "logprobs" in body:
            error = {"message": "logprobs is not supported with this model", "code": "unsupported"}
            return web.json_response({"error": error}, status=400)
        return completion("ho")

    await record(trial, {}, {})
    async with serving(reply) as url:
        assert await replay(trial, "s-0-a", "--url", url, "--concurrency", "1") == 0
    assert ["logprobs" in body for body in bodies] == [True, False, False]


@pytest.mark.parametrize(
    ("faults", "kind"),
    [
        (["401", "401"], "HTTP 401"),
        (["500", "html"], "HTTP 500"),
        (["html", "html"], "an answer that is no chat completion"),
        (["hang", "hang"], "no answer within 0.5 s"),
        (["429", "429"], "HTTP 429"),
    ],
)
async def test_what_a_service_does_instead_of_answering_is_named_with_counts(
    trial: RunDir, capsys: pytest.CaptureFixture[str], faults: list[Any], kind: str
) -> None:
    provider = Provider()
    await record(trial, {}, {}, {})
    async with provider.serve() as url:
        provider.fail(*faults)
        wanted = ("--url", url, "--timeout", "0.5", "--concurrency", "1")
        assert await replay(trial, "--all", *wanted, "--json") == 1
        (found, sums), said = lines_of(capsys)
        provider.fail(*faults)
        assert await replay(trial, "--all", *wanted) == 1
    assert sums["failed"][kind]["calls"] == faults.count(faults[0])
    assert sum(each["calls"] for each in sums["failed"].values()) == 2
    assert [call["problem"] is None for call in found["calls"]] == [False, False, True]
    assert sums["all"]["answered"] == 1
    shown = capsys.readouterr()
    assert f"failed    {faults.count(faults[0])} calls at {url}/v1: {kind}" in shown.out
    assert KEY not in shown.out + shown.err + said + json.dumps([found, sums])


async def test_a_service_that_answers_nothing_is_left_after_a_while(
    trial: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    await record(trial, *({} for _ in range(20)))
    url = f"http://127.0.0.1:{own_port()}"
    assert await replay(trial, "s-0-a", "--url", url, "--json") == 1
    (_, sums), _ = lines_of(capsys)
    assert sums["all"]["answered"] == 0
    # Those that were under way when the sixteenth failed were sent, too.
    reached, unsent = sums["failed"].items()
    assert "ConnectError" in reached[0] and "not sent" in unsent[0]
    assert reached[1]["calls"] + unsent[1]["calls"] == 20 and reached[1]["calls"] < 24


@pytest.mark.parametrize(("asked", "least"), [("1", 0.99), ("0", 0.49)])
async def test_a_busy_service_gets_the_time_that_it_asks_for_and_never_none(
    trial: RunDir, asked: str, least: float
) -> None:
    arrived: list[float] = []

    async def reply(_: dict[str, Any], __: web.Request) -> Any:
        arrived.append(asyncio.get_running_loop().time())
        if len(arrived) == 1:
            return web.json_response(
                {"error": {"message": "slow down"}}, status=429, headers={"retry-after": asked}
            )
        return completion("ho")

    await record(trial, {})
    async with serving(reply) as url:
        assert await replay(trial, "s-0-a", "--url", url) == 0
    assert len(arrived) == 2 and arrived[1] - arrived[0] >= least


async def test_no_more_calls_than_allowed_are_under_way(trial: RunDir) -> None:
    running = most = 0
    full = asyncio.Event()

    async def reply(_: dict[str, Any], __: web.Request) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 3:
            full.set()
        await full.wait()
        # Whoever else would come has time to.
        for _turn in range(20):
            await asyncio.sleep(0)
        running -= 1
        return completion("ho")

    for name in "abc":
        await record(trial, {}, {}, {}, session=f"s-0-{name}")
    async with serving(reply) as url:
        assert await replay(trial, "--all", "--url", url, "--concurrency", "3") == 0
    assert most == 3


async def test_sessions_and_calls_that_cannot_be_sent_are_named(
    trial: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    async def reply(_: dict[str, Any], __: web.Request) -> Any:
        return completion("ho")

    bare = strip_content(make_interaction("x", "s-0-b"))
    await record(trial, {})
    await record(
        trial, {"output_message": bare.output_message, "message_delta": []}, session="s-0-b"
    )
    legacy = {"role": "completion", "content": "ho"}
    await record(trial, {"output_message": legacy}, {}, session="s-0-c")
    async with serving(reply) as url:
        assert await replay(trial, "--state", "trained", "--url", url) == 1
        said = capsys.readouterr()
        assert "session s-0-b is left out: its texts were not kept" in said.err
        assert "2 sessions, 3 calls, 2 answered: 2 the same" in said.out
        assert (
            "left out  1: sessions whose texts were not kept (sessions.store_content)" in said.out
        )
        assert "left out  1: a call of /v1/completions" in said.out
        assert await replay(trial, "s-0-b", "--url", url) == 1
        said = capsys.readouterr()
        assert "s-0-b" in said.err and "no call to compare" in said.err


async def test_a_call_that_an_adapter_sampled_is_not_sent(
    trial: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = 0

    async def reply(_: dict[str, Any], __: web.Request) -> Any:
        nonlocal asked
        asked += 1
        return completion("ho")

    await record(trial, {"request": {"adapter": "ann@0011"}, "untrainable_reason": "adapter"}, {})
    async with serving(reply) as url:
        assert await replay(trial, "s-0-a", "--url", url) == 1
    said = capsys.readouterr().out
    assert asked == 1
    assert "no answer: sampled by the adapter ann@0011" in said
    assert "2 calls, 1 answered: 1 the same" in said
    assert "left out  1: calls that an adapter sampled" in said


async def test_options_that_do_not_belong_together_are_refused(
    trial: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    await record(trial, {})
    url = ("--url", "http://127.0.0.1:1/v1")
    for arguments, says in (
        ((*url, "--version", "0"), "--version is for weights"),
        ((*url, "--device", "cpu"), "--device is for weights"),
        ((*url, "--no-answers"), "--no-answers is for weights"),
        (("--timeout", "3"), "name it with --url"),
        (("--url", "nowhere"), "no URL"),
        (("--url", "http://u:secret@h/v1"), "OPENAI_API_KEY"),
        (("--url", "http://h/v1?key=secret"), "OPENAI_API_KEY"),
        (("--url", "user:secret@h/v1"), "OPENAI_API_KEY"),
    ):
        assert await replay(trial, "s-0-a", *arguments) == 2
        said = capsys.readouterr()
        assert says in said.err and "secret" not in said.err and said.out == ""


async def test_a_key_that_no_header_can_have_is_refused_unseen() -> None:
    with fails_with(ConfigError, "OPENAI_API_KEY") as failed:
        Endpoint("http://h/v1", "sk-\nsecret", seconds=1, at_once=1)
    assert "secret" not in str(failed.value)


@pytest.mark.parametrize(
    ("given", "base"),
    [
        ("http://h:1", "http://h:1/v1"),
        ("http://h:1/", "http://h:1/v1"),
        ("https://h/v1/", "https://h/v1"),
        ("https://h/v1beta/openai", "https://h/v1beta/openai"),
    ],
)
async def test_a_url_is_taken_as_clients_of_the_api_take_it(given: str, base: str) -> None:
    async with Endpoint(given, None, seconds=1, at_once=1) as endpoint:
        assert endpoint.url == base


@pytest.mark.service
async def test_the_command_compares_at_a_url(trial: RunDir) -> None:
    async def reply(_: dict[str, Any], __: web.Request) -> Any:
        return completion("hO")

    await record(trial, {})
    place = [f"root={trial.path.parents[2]}", "user=me", "--experiment", "exp", "--trial", "one"]
    async with serving(reply) as url:
        command = [sys.executable, "-m", "any_agent.cli", "replay", "--url", url, *place]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "text differs at character 1" in done.stdout and "0 the same" in done.stdout
