"""`any-agent replay`: recorded calls under other weights, compared exactly."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from any_agent.chat import ChatFormat
from any_agent.demo.models.tiny import save_tiny_model
from any_agent.inference.text_codec import TextCodec
from any_agent.record import InteractionTree
from any_agent.rundir.layout import RunDir
from any_agent.types import (
    Continuation,
    GenerationHyperparameters,
    Interaction,
    SessionState,
    id_array,
    logprob_array,
)
from proxy_ext.export.comparison import Comparison
from proxy_ext.export.replay import main, message_of
from proxy_ext.journal import PutInteraction, PutSession
from tests.support.archives import Rank
from tests.support.families import Call, family
from tests.support.journal import make_interaction, make_row
from tests.support.trials import save_trial
from tests.support.true_logprobs import TrueModel

OUTPUT = [40, 41, 42]
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def models(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    other = save_tiny_model(tmp_path_factory.mktemp("models") / "1", seed=1)
    return [tiny_model_dir, other]


@pytest.fixture
def trial(models: list[Path], tmp_path: Path) -> RunDir:
    """Step 10, which is version 11, and step 20, which is version 21."""
    return save_trial(tmp_path, {(10, 11): models[0], (20, 21): models[1]}, base=models[0])


def true(model: Path, prompt: Sequence[int], output: Sequence[int], t: float) -> list[float]:
    table = TrueModel(model).logprobs(prompt, output, {"temperature": t})
    return table.gather(-1, torch.tensor(output)[:, None])[:, 0].tolist()


def call(
    id: str, parent: Interaction | None, prompt: list[int], model: Path, t: float = TEMPERATURE
) -> Interaction:
    """A call that `model` really sampled, as version 11; ``prompt`` includes its parent's ids."""
    known = len(prompt) if parent is None else 0
    made = make_interaction(id, "s-0-a", parent.id if parent is not None else None)
    return replace(
        made,
        prompt_delta_ids=id_array(prompt[-known:] if known else prompt[-4:]),
        output_ids=id_array(OUTPUT),
        output_logprobs=logprob_array(true(model, prompt, OUTPUT, t)),
        output_versions=id_array([11] * len(OUTPUT)),
        gconfig=GenerationHyperparameters(max_new_tokens=5, temperature=t),
        continuation=Continuation.ROOT if parent is None else Continuation.EXACT,
    )


@pytest.fixture
def prompts(chat: ChatFormat) -> list[list[int]]:
    """Of the session that is recorded."""
    first = chat.render([{"role": "user", "content": "hi"}], None)
    second = [*first, *OUTPUT, *first[-4:]]
    return [first, second, second]


@pytest.fixture
async def recorded(trial: RunDir, prompts: list[list[int]], models: list[Path]) -> RunDir:
    """The trial, with a session of two turns, and a greedy branch of the second."""
    first, second, _ = prompts
    one = call("one", None, first, models[0])
    two = replace(call("two", one, second, models[0]), request={"bound": [[0, 2]]})
    three = call("three", one, second, models[0], t=0.0)
    row = make_row("s-0-a", state=SessionState.TRAINED, ended_at=1500.0)
    empty = make_row("s-0-empty", state=SessionState.ABORTED, ended_at=1600.0)
    foreign = make_row("s-0-f", state=SessionState.TRAINED, ended_at=1000.0)
    four = replace(make_interaction("f", "s-0-f"), prompt_delta_ids=id_array([1, 99_999]))
    rank = await Rank(trial.path).start()
    rows = map(PutSession, (row, empty, foreign))
    await rank.journal.commit(*rows, *map(PutInteraction, (one, two, three, four)))
    await rank.stop()
    return trial


async def replay(trial: RunDir, *arguments: str, session: str = "s-0-a") -> int:
    place = [f"root={trial.path.parents[2]}", "user=me", "experiment=exp", "trial=one"]
    # It has an event loop of its own.
    return await asyncio.to_thread(main, [session, *place, "--device", "cpu", *arguments])


def shown(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return dict(json.loads(capsys.readouterr().out))


@pytest.mark.parametrize(
    "named", [(), ("--version", "21"), ("--step", "20"), ("--model",), ("--version", "11")]
)
async def test_calls_are_compared_exactly_under_the_named_weights(
    recorded: RunDir,
    models: list[Path],
    prompts: list[list[int]],
    capsys: pytest.CaptureFixture[str],
    named: tuple[str, ...],
) -> None:
    if named == ("--model",):
        named = ("--model", str(models[1]))
    assert await replay(recorded, *named, "--json") == 0
    found = shown(capsys)
    version = 0 if "--model" in named else 11 if "11" in named else 21
    assert found["against"]["version"] == version
    weights = models[0 if version == 11 else 1]
    differences: list[float] = []
    for got, prompt, t in zip(found["calls"], prompts, (0.7, 0.7, 0.0), strict=True):
        now, before = (true(model, prompt, OUTPUT, t) for model in (weights, models[0]))
        assert got["logprobs"] == pytest.approx(now, abs=1e-5)
        assert got["recorded_logprobs"] == pytest.approx(before, abs=1e-6)
        off = [b - a for a, b in zip(before, now, strict=True)]
        assert got["comparison"]["difference_max"] == pytest.approx(max(map(abs, off)), abs=1e-4)
        differences += off
        # Greedy: each token of the new answer is the likeliest one.
        answer = got["answer_ids"]
        table = TrueModel(weights).logprobs(prompt, answer, {"temperature": 1.0})
        assert table.argmax(-1).tolist() == answer and 0 < len(answer) <= 5
        assert got["answer"]["role"] == "assistant"
        assert got["same"] is (answer == OUTPUT)
    mean = sum(map(abs, differences)) / len(differences)
    assert found["comparison"]["difference_mean"] == pytest.approx(mean, abs=1e-4)
    if version == 11:
        assert mean < 1e-5 and found["comparison"]["ratio"] == pytest.approx(1, abs=1e-5)
    else:
        assert mean > 0.01


async def test_a_call_that_an_adapter_sampled_is_named_and_not_compared(
    recorded: RunDir,
    models: list[Path],
    prompts: list[list[int]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What the policy's weights make of it would be of another model."""
    rank = await Rank(recorded.path).start()
    row = make_row("s-0-b", state=SessionState.TRAINED, ended_at=1700.0)
    await rank.journal.commit(PutSession(row))
    own = replace(call("own", None, prompts[0], models[0]), session_id="s-0-b")
    of_adapter = replace(
        call("ann", None, prompts[0], models[1]),
        session_id="s-0-b",
        request={"adapter": "ann@0011"},
        untrainable_reason="adapter",
    )
    await rank.journal.commit(PutInteraction(of_adapter), PutInteraction(own))
    await rank.stop()
    assert await replay(recorded, "--version", "11", "--json", session="s-0-b") == 0
    found = shown(capsys)
    got = {one["interaction_id"]: one for one in found["calls"]}
    assert "sampled by the adapter ann@0011" in got["ann"]["problem"]
    assert got["ann"]["comparison"] is got["ann"]["answer_ids"] is got["ann"]["same"] is None
    assert got["ann"]["logprobs"] == [] and got["own"]["answer_ids"]
    # The adapter's would differ by more.
    assert found["comparison"] == got["own"]["comparison"]
    assert found["comparison"]["difference_max"] < 1e-4
    assert await replay(recorded, "--version", "11", session="s-0-b") == 0
    out = capsys.readouterr().out
    assert "no answer: sampled by the adapter ann@0011" in out and "of 1 answers" in out


async def test_the_printed_report_shows_what_was_recorded_and_what_is_said_now(
    recorded: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await replay(recorded, "--sampling", "recorded", "--max-tokens", "2") == 0
    out = capsys.readouterr().out
    for said in ("s-0-a (trained), 3 calls", "version 21", "T=0.7 under version 11"):
        assert said in out
    assert out.count("\nrecorded  ho\n") == out.count("\nnow       ") == 3
    assert "2 of them decided by a grammar" in out and "of 3 answers are the same" in out


async def test_without_an_id_the_newest_session_with_calls_is_compared(
    recorded: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    # Then the first positional argument is a setting.
    assert await replay(recorded, "--no-answers", "--json", session="log_level=info") == 0
    assert shown(capsys)["session_id"] == "s-0-a"
    assert await replay(recorded, session="s-0-empty") == 1
    said = capsys.readouterr()
    assert "no call to compare" in said.err and said.out == ""


async def test_many_sessions_are_compared_in_sum_and_by_their_score_in_the_group(
    recorded: RunDir,
    models: list[Path],
    prompts: list[list[int]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    rank = await Rank(recorded.path).start()
    for number, score in enumerate((1.0, 0.0, 0.0)):
        id = f"s-0-g{number}"
        row = make_row(
            id, state=SessionState.TRAINED, ended_at=1700.0, group_id="g", final_reward=score
        )
        one = replace(call(f"g{number}", None, prompts[number], models[0]), session_id=id)
        await rank.journal.commit(PutSession(row), PutInteraction(one))
    await rank.stop()
    # One of the sessions has another tokenizer's ids.
    assert await replay(recorded, "--state", "trained", "--json", session="log_level=info") == 1
    said = capsys.readouterr()
    assert "s-0-f is left out" in said.err
    found = json.loads(said.out)
    changes = []
    for prompt in prompts:
        before, now = (true(model, prompt, OUTPUT, TEMPERATURE) for model in models)
        changes.append((sum(now) - sum(before)) / 3)
    better, worse = found["above_the_mean"], found["below_the_mean"]
    assert (better["sessions"], worse["sessions"], worse["tokens"]) == (1, 2, 6)
    assert better["change"] == pytest.approx(changes[0], abs=1e-4)
    assert worse["change"] == pytest.approx((changes[1] + changes[2]) / 2, abs=1e-4)
    # The session of the fixture: what a grammar decided is not counted.
    assert (found["all"]["sessions"], found["all"]["calls"], found["all"]["tokens"]) == (4, 6, 16)
    assert found["problems"] == 1 and len(found["most_changed"]) == 4
    assert await replay(recorded, "--all") == 2
    assert "not both" in capsys.readouterr().err
    assert await replay(recorded, "--task", "none", session="log_level=info") == 1


async def test_a_session_that_cannot_be_compared_is_refused_with_its_reason(
    recorded: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, session, says in (
        ((), "s-0-b", "s-0-b"),
        ((), "s-0-f", "another tokenizer"),
        (("--version", "12"), "s-0-a", "version 12"),
        (("--step", "11"), "s-0-a", "step 11"),
        (("--model", "/nowhere"), "s-0-a", "/nowhere"),
    ):
        code = await replay(recorded, *arguments, session=session)
        said = capsys.readouterr()
        assert code in (1, 2) and says in said.err and said.out == "", said.err


@pytest.mark.parametrize("name", ["qwen3_5", "glm"])
def test_a_call_of_a_tool_that_was_searched_for_is_read_by_its_schema(name: str) -> None:
    """Only the schema tells the text "42" from the number."""
    fam = family(name)
    schema = {"type": "object", "properties": {"text": {"type": "string"}}}
    head, found = (
        {"type": "function", "function": {"name": each, "parameters": schema}}
        for each in ("search", "shout")
    )
    made = make_interaction("one", "s-0-a")
    tree = InteractionTree()
    request, gconfig = {"found_tools": [found]}, made.gconfig.new(stop=())
    tree.add(replace(made, tools=[head], request=request, gconfig=gconfig))
    prompt = fam.chat.render([{"role": "user", "content": "hi"}], [head])
    output = fam.say(calls=(Call("shout", {"text": "42"}),))
    codec = TextCodec(fam.chat.tokenizer, fam.chat)
    (made_call,) = message_of(tree, tree["one"], prompt, output, codec)["tool_calls"]
    assert json.loads(made_call["function"]["arguments"]) == {"text": "42"}


def test_the_distances_of_log_probabilities_are_reckoned_right() -> None:
    found = Comparison.of([-1.0, -2.0], [-1.5, -1.0])
    assert found == Comparison(-1.5, -1.25, 0.75, 1.0, 1, pytest.approx(2.718281828**0.25))
    assert Comparison.of([], []) is None


@pytest.mark.service
async def test_the_replay_command_prints_json(recorded: RunDir) -> None:
    place = [f"root={recorded.path.parents[2]}", "user=me", "--experiment", "exp", "--trial", "one"]
    command = [sys.executable, "-m", "any_agent.cli", "replay", "s-0-a", *place, "--json"]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["session_id"] == "s-0-a"
