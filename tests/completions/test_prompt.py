"""A prompt's ids begin with all of its parent's, whatever the agent says next."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from any_agent.chat import ChatFormat, chain_keys, load_chat_format
from any_agent.completions.prompt import Prompt, parent_of, prompt_of
from any_agent.record import InteractionTree, interaction_row
from any_agent.types import (
    Continuation,
    Interaction,
    Message,
)
from tests.support.chat_templates import with_template
from tests.support.completions.params import parse
from tests.support.families import family
from tests.support.records import make_interaction


@pytest.fixture(scope="module")
def chat(tiny_model_dir: Path) -> ChatFormat:
    return load_chat_format(str(tiny_model_dir), enable_thinking=False)


def find(messages: list[Message], tree: InteractionTree, chat: ChatFormat) -> Prompt:
    call = parse(messages=messages)
    found = parent_of(call, tree, chat, context_length=100_000)
    return prompt_of(call, found, tree, chat)


def record(
    tree: InteractionTree, messages: list[Message], prompt: Prompt, output: list[int], text: str
) -> Interaction:
    answer = {"role": "assistant", "content": text}
    interaction = make_interaction(
        str(len(tree)),
        prompt.parent_id,
        prompt=prompt.ids[prompt.inherited :],
        output=output,
        message_delta=messages[prompt.covered :],
        output_message=answer,
        continuation=prompt.continuation,
        branch_reason=prompt.branch_reason,
    )
    (key,) = chain_keys([answer], None, start=prompt.key)
    tree.add(interaction, key)
    return interaction


TURN = st.tuples(st.integers(0, 20), st.text("ab .\n", max_size=8), st.sampled_from("earu"))


@settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
@given(turns=st.lists(TURN, min_size=1, max_size=8))
def test_a_prompt_begins_with_what_its_parent_was(
    chat: ChatFormat, turns: list[tuple[int, str, str]]
) -> None:
    """Echoes, rewritten answers, answers put in between, and users who go on at once."""
    tree = InteractionTree()
    sent: dict[str, list[int]] = {}
    talks: list[list[Message]] = [[{"role": "user", "content": "go"}]]
    for which, text, kind in turns:
        messages = talks[which % len(talks)]
        prompt = find(messages, tree, chat)
        if prompt.parent_id is None:
            assert prompt.ids.tolist() == chat.render(messages, None)
            assert (prompt.branch_reason is None) == (len(tree) == 0)
        else:
            assert prompt.continuation is Continuation.EXACT
            before = sent[prompt.parent_id]
            assert prompt.ids[: prompt.inherited].tolist() == before
            assert prompt.inherited == len(before) < len(prompt.ids)
        output = [*chat.tokenizer.encode(text), chat.stop_token_ids[0]]
        interaction = record(tree, messages, prompt, output, text)
        sent[interaction.id] = [*prompt.ids.tolist(), *output]
        row = interaction_row(tree, interaction.id, 0.0)
        assert row["input_ids"].tolist() == sent[interaction.id]
        echo: list[Message] = [{"role": "assistant", "content": text}]
        if kind == "r":
            echo = [{"role": "assistant", "content": text + "!"}]
        elif kind == "a":
            echo = [*echo, {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
        elif kind == "u":
            echo = []
        talks.append([*messages, *echo, {"role": "user", "content": text}])


@pytest.mark.parametrize(
    ("after", "reason"),
    [
        ([], "no_new_message"),
        ([{"role": "user", "content": "x"}], "template_declines"),
        (
            [{"role": "assistant", "content": "y"}, {"role": "user", "content": "x"}],
            "assistant_rewritten",
        ),
    ],
)
def test_why_a_prompt_is_rendered_anew(
    chat: ChatFormat, monkeypatch: pytest.MonkeyPatch, after: list[Message], reason: str
) -> None:
    tree = InteractionTree()
    messages: list[Message] = [{"role": "user", "content": "go"}]
    root = find(messages, tree, chat)
    assert (root.continuation, root.branch_reason) == (Continuation.ROOT, None)
    parent = record(tree, messages, root, [30, chat.stop_token_ids[0]], "n")
    monkeypatch.setattr(chat, "bridge", lambda *_, **__: None)
    prompt = find([*messages, parent.output_message, *after], tree, chat)
    assert (prompt.continuation, prompt.branch_reason) == (Continuation.BRANCH, reason)
    assert (prompt.parent_id, prompt.inherited, prompt.covered) == (None, 0, 0)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_several_system_messages_are_continued_exactly(name: str) -> None:
    """The next prompt goes on from the tokens, with templates that take them and that get one."""
    chat = family(name).chat
    tree = InteractionTree()
    system: list[Message] = [
        {"role": role, "content": role} for role in ("system", "developer", "system")
    ]
    messages: list[Message] = [*system, {"role": "user", "content": "go"}]
    prompt = find(messages, tree, chat)
    for turn in range(3):
        output = family(name).say(f"n {turn}")
        record(tree, messages, prompt, output, f"n {turn}")
        before = [*prompt.ids.tolist(), *output]
        messages = [
            *messages,
            {"role": "assistant", "content": f"n {turn}"},
            {"role": "user", "content": "on"},
        ]
        prompt = find(messages, tree, chat)
        assert (prompt.continuation, prompt.parent_id) == (Continuation.EXACT, str(turn))
        assert prompt.ids[: prompt.inherited].tolist() == before
    # A framework that merges them by itself goes on with the same conversation.
    merged: Message = {"role": "system", "content": "system\n\ndeveloper\n\nsystem"}
    assert find([merged, *messages[3:]], tree, chat).ids.tolist() == prompt.ids.tolist()


@pytest.mark.parametrize("shown", [False, True], ids=["names are not shown", "names are shown"])
def test_a_name_of_a_returned_answer_counts_where_the_prompt_shows_it(
    tmp_path: Path, shown: bool
) -> None:
    """LangChain's agents give a name to their own answers when they return them."""
    template = (
        "{% for m in messages %}<|im_start|>{{ (m.name if names) or m.role }}\n{{ m.content }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chat = with_template(tmp_path / "model", template, renderer="default")
    chat = chat.variant({"names": shown})
    assert bool(chat.render_key) == shown
    tree = InteractionTree()
    messages: list[Message] = [{"role": "user", "content": "go"}]
    prompt = find(messages, tree, chat)
    output = [*chat.encode("n", special=False), chat.stop_token_ids[0]]
    first = record(tree, messages, prompt, output, "n")
    named: Message = {"role": "assistant", "content": "n", "name": "model"}
    messages = [*messages, named, {"role": "user", "content": "on"}]
    again = find(messages, tree, chat)
    assert again.ids.tolist() == chat.render(messages, None)
    if shown:
        assert (again.continuation, again.branch_reason) == (Continuation.ROOT, "history_rewritten")
    else:
        assert (again.continuation, again.parent_id) == (Continuation.EXACT, first.id)
        assert again.ids[: again.inherited].tolist() == [*prompt.ids.tolist(), *output]
