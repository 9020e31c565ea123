"""`EngineOpenAI`: OpenAI's asynchronous client on an engine in this process."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from typing import Any, Literal, Self

from openai import AsyncOpenAI

from any_agent.chat import ChatFormat, chat_format_for
from any_agent.completions.call_types import completion_of
from any_agent.completions.untrainable import has_modified_distribution
from any_agent.config import NAME_PATTERN, SamplingConfig
from any_agent.direct.record import DirectSession, checked_number
from any_agent.direct.transport import BASE_URL, InProcessClient
from any_agent.engine import InferenceEngine, ScriptInferenceEngine
from any_agent.errors import ConfigError, Unprocessable
from any_agent.protocol.rl import MAX_REWARD
from any_agent.record import InteractionWithTokenLogpReward, propagate_rewards
from any_agent.types import GenerationHyperparameters, Interaction, SessionMode, Trajectory
from any_agent.workflow import context as workflow_context

_OURS = ("base_url", "http_client")


class EngineOpenAI(AsyncOpenAI):
    """OpenAI's client, without HTTP: its calls are sampled by ``engine`` and recorded here.

    One client is one session: what its calls say to each other is one trajectory, whose rewards
    are given by :meth:`set_reward` and which :meth:`trajectory` or :meth:`export_interactions`
    hand out. Calls may run side by side. Everything else is the SDK's: streams, helpers, raw
    responses, time-outs, retries, errors.

    ``tokenizer`` is a :class:`ChatFormat`, a tokenizer of transformers, or the path or hub name of
    one; the three settings of thinking and rendering are of the last two, and mean what they mean
    in :class:`~any_agent.config.ModelConfig`.
    Inside of a workflow ``mode`` and ``sampling`` are the run's, where they are not given.
    ``mode`` ``train``: ``sampling`` replaces what calls ask for, as a service does it in train
    sessions, and must not truncate; ``eval``: calls are sampled as they ask. ``context_length`` is
    asked of the engine, else of the tokenizer, where it is not given. ``keeps_cache``: the
    engine's weight updates keep the cache of calls under way. ``options`` are the SDK's, such as
    ``timeout`` and ``max_retries``.

    Raises ConfigError for what cannot be trained or rendered with.
    """

    def __init__(
        self,
        engine: InferenceEngine | ScriptInferenceEngine,
        tokenizer: ChatFormat | str | PathLike[str] | Any,
        *,
        mode: SessionMode | Literal["train", "eval"] | None = None,
        sampling: GenerationHyperparameters | None = None,
        context_length: int | None = None,
        model: str = "policy",
        session_id: str | None = None,
        renderer: str = "auto",
        enable_thinking: bool | None = None,
        thinking_retention: Literal["all", "tool_cycle", "template"] = "all",
        keeps_cache: bool = False,
        _session: DirectSession | None = None,
        **options: Any,
    ) -> None:
        if _session is None:
            _refuse_http(options)
            mode, sampling = _mode_and_sampling(mode, sampling)
            session = DirectSession(
                _session_id(session_id),
                _inference_engine(engine),
                chat_format_for(
                    tokenizer,
                    renderer=renderer,
                    enable_thinking=enable_thinking,
                    thinking_retention=thinking_retention,
                ),
                mode=mode,
                sampling=sampling,
                model=model,
                context_length=context_length,
                keeps_cache=keeps_cache,
            )
            options |= {"base_url": BASE_URL, "http_client": InProcessClient(session)}
            options["api_key"] = options.get("api_key") or "none"
        else:
            session = _session
        super().__init__(**options)
        self._session = session
        self.engine = session.engine
        self.chat_format = session.chat
        self.session_id = session.id

    def copy(self, **options: Any) -> Self:
        """Return a client of the same session with other options of the SDK."""
        _refuse_http(options)
        more = dict(options.pop("_extra_kwargs", None) or {})
        own = {
            "engine": self.engine,
            "tokenizer": self.chat_format,
            "_session": self._session,
        }
        return super().copy(**options, _extra_kwargs=more | own)

    with_options = copy

    @property
    def interactions(self) -> list[Interaction]:
        """The recorded interactions in the order of recording: parents before children."""
        return list(self._session.tree)

    def get_interaction(self, id: str) -> Interaction | None:
        """Return the recorded call of this id; each of several choices is ``<id>.<index>``."""
        return self._session.tree.get(id)

    def set_reward(self, id: str, reward: float) -> None:
        """Reward one completion; another reward replaces it.

        Raises NotFound, or InvalidRequest for a reward that is not finite, and for a completion of
        several choices, each of which has its own (``<id>.<index>``).
        """
        self._session.find(id).reward = checked_number("reward", reward, -MAX_REWARD, MAX_REWARD)

    def set_last_reward(self, reward: float) -> None:
        """Reward the completion that was recorded last; Unprocessable if there is none."""
        if not self._session.tree:
            raise Unprocessable("there is no completion to reward yet", code="no_interactions")
        last = self._session.tree.last().id
        self.set_reward(completion_of(last) or last, reward)

    def set_final_reward(self, reward: float) -> None:
        """Reward the session: it is added to every leaf of its tree."""
        self._session.final_reward = checked_number("reward", reward, -MAX_REWARD, MAX_REWARD)

    def apply_reward_discount(
        self, turn_discount: float = 1.0
    ) -> dict[str, InteractionWithTokenLogpReward]:
        """Propagate rewards back with this discount; return every interaction with its r, by id.

        ``r(parent) = own(parent) + turn_discount * mean(r(children))``. Own rewards stay as they
        are, so it may be called again, and exports of later rewards apply it, too. Until it is
        called the discount is 1.
        """
        self._session.discount = checked_number("discount", turn_discount, 0, 1)
        return self.export_interactions()

    def export_interactions(
        self, style: Literal["individual", "concat"] = "individual"
    ) -> dict[str, InteractionWithTokenLogpReward]:
        """Return the recorded interactions by id, with final rewards and as rows of tensors.

        ``individual``: every interaction a row; ``concat``: a row for each leaf, which trains on
        every output of its path. Raises Unprocessable where a path is not token-exact, and
        InvalidRequest for another style.
        """
        session = self._session
        rewards = propagate_rewards(
            session.tree, discount=session.discount, final_reward=session.final_reward
        )
        return InteractionWithTokenLogpReward.of_tree(session.tree, rewards, style)

    def trajectory(
        self,
        *,
        group_id: str | None = None,
        task_id: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Trajectory:
        """Return the session as workflows give it to the trainer, which applies the discount.

        The interactions have their own rewards. Without ``group_id`` it is a group of its own.
        """
        session = self._session
        return Trajectory(
            session_id=session.id,
            group_id=group_id or session.id,
            interactions=[replace(interaction) for interaction in session.tree],
            final_reward=session.final_reward,
            task_id=task_id,
            metadata=dict(metadata or {}),
        )


def _inference_engine(engine: Any) -> InferenceEngine:
    """Return the engine itself, or that of a script, which runs on an event loop of its own."""
    found: InferenceEngine = getattr(engine, "inference_engine", engine)
    return found


def _refuse_http(options: Mapping[str, Any]) -> None:
    for name in _OURS:
        if options.get(name) is not None:
            raise TypeError(f"EngineOpenAI makes no HTTP requests: leave out {name}")


def _session_id(given: str | None) -> str:
    if given is None:
        return f"direct-{uuid.uuid4().hex}"
    if not re.fullmatch(NAME_PATTERN, given):
        raise ConfigError(f"session_id {given[:80]!r} does not match {NAME_PATTERN}")
    return given


def _mode_and_sampling(
    given: SessionMode | str | None, sampling: GenerationHyperparameters | None
) -> tuple[SessionMode, GenerationHyperparameters]:
    """Return both as given, else the running episode's, else the defaults."""
    episode = workflow_context.get()
    mode = SessionMode(given or ("eval" if episode.is_eval else "train"))
    sampling = sampling or episode.sampling
    if sampling is None:
        run = SamplingConfig()  # type: ignore[call-arg]
        sampling = GenerationHyperparameters(
            max_new_tokens=run.max_new_tokens, temperature=run.temperature
        )
    if mode is SessionMode.TRAIN and (why := has_modified_distribution(sampling)):
        raise ConfigError(
            f"answers sampled so cannot be trained on ({why}): give sampling a temperature above 0 "
            'and no other field that changes the distribution, or use mode "eval"'
        )
    return mode, sampling
