"""What of an engine's own options somebody may choose, and what the service says itself."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence

import yaml

_OURS: Mapping[str, str] = {
    "--model-path": "model.path is served, and the newest weights after a restart",
    "--model": "model.path is served, and the newest weights after a restart",
    "--tokenizer-path": "texts are only matched with stop strings: it must be the model's own",
    "--weight-version": "the run counts its versions",
    "--host": "an engine listens where only its proxy and the trainer reach it",
    "--port": "the service finds a free one",
    "--dtype": "set model.dtype",
    "--context-length": "set engine.context_length",
    "--max-running-requests": "set engine.max_running_requests",
    "--max-queued-requests": "set engine.max_queued_requests",
    "--device": "set engine.device",
    "--log-level": "set log_level",
    "--tp-size": "set engine.gpus",
    "--tensor-parallel-size": "set engine.gpus",
    "--pp-size": "set engine.gpus: all of them compute each layer together",
    "--pipeline-parallel-size": "set engine.gpus: all of them compute each layer together",
    "--dp-size": "set server.ranks: each has an engine",
    "--data-parallel-size": "set server.ranks: each has an engine",
    "--base-gpu-id": "the service deals out the GPUs, by CUDA_VISIBLE_DEVICES",
    "--gpu-id-step": "the service deals out the GPUs, by CUDA_VISIBLE_DEVICES",
    "--nnodes": "an engine is on one machine; set server.ranks for more engines",
    "--node-rank": "an engine is on one machine; set server.ranks for more engines",
    "--dist-init-addr": "an engine is on one machine; set server.ranks for more engines",
    "--api-key": "others could read it in the list of processes; engines are private without",
    "--admin-api-key": "others could read it in the list of processes; engines are private without",
    "--skip-tokenizer-init": "without its tokenizer an engine finds no stop strings",
    "--config": "a file could set any of the options that the service sets",
}


def option_words(value: object) -> object:
    """A command line's words from a list, a text, or a mapping of options to their values.

    ``{"mem-fraction-static": 0.8, "enable-metrics": True}`` becomes ``--mem-fraction-static 0.8
    --enable-metrics``; what is False or None is left out. Anything else is returned as it is.
    """
    if isinstance(value, str):
        text = value.strip()
        if not text.startswith(("[", "{")):
            return tuple(shlex.split(text))
        value = yaml.safe_load(text)
    if isinstance(value, Mapping):
        return tuple(_words_of(value))
    if isinstance(value, Sequence):
        return tuple(str(word) for word in value)
    return value


def _words_of(options: Mapping[str, object]) -> Iterator[str]:
    for name, value in options.items():
        if value is None or value is False:
            continue
        yield f"--{str(name).lstrip('-').replace('_', '-')}"
        if isinstance(value, Sequence) and not isinstance(value, str):
            yield from map(str, value)
        elif value is not True:
            yield str(value)


def require_free_options(words: Sequence[str]) -> None:
    """ValueError for an option that the service sets itself, with what to set instead.

    Also for the beginning of its name, which an engine takes for the whole.
    """
    for word in words:
        name = word.partition("=")[0].replace("_", "-")
        if not name.startswith("--") or name == "--":
            continue
        ours = name if name in _OURS else next((o for o in _OURS if o.startswith(name)), None)
        if ours is not None:
            raise ValueError(f"{name} cannot be given to the engine: {_OURS[ours]}")
