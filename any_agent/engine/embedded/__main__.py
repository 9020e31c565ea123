"""``python -m any_agent.engine.embedded``: serve a model over SGLang's native HTTP contract."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

from any_agent.runtime.command_line import guarded
from any_agent.runtime.logs import set_up_logging
from any_agent.runtime.open_files import raise_open_files_limit

log = logging.getLogger(__name__)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m any_agent.engine.embedded",
        description="Serve a causal language model over SGLang's native HTTP contract.",
    )
    add = parser.add_argument
    add("--model-path", required=True, help="a directory, or a name on the Hugging Face hub")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=30000, help="0: any free one")
    add(
        "--key-file",
        type=Path,
        help='JSON with the key that requests must carry: {"api-key": "..."}; without it, programs '
        "of this machine alone may use the engine",
    )
    add("--device", default="auto", help="cpu, cuda, cuda:1, ...; auto: a GPU if there is one")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    add("--context-length", type=int, help="default: the model's")
    add("--weight-version", default="0")
    add("--max-running-requests", type=int, default=32)
    add("--max-queued-requests", type=int, default=1024)
    add("--max-total-tokens", type=int, help="limit of the key/value states, in tokens")
    add(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="a LoRA adapter that requests may name as lora_path; may be given several times",
    )
    add(
        "--live-adapters",
        type=int,
        default=0,
        metavar="NUMBER",
        help="LoRA adapters of training runs that share the model, each at /adapters/NAME, its "
        "run's engine.urls; the model's own weights stay as they are then",
    )
    add("--max-adapter-rank", type=int, default=64, help="highest rank of these adapters")
    add("--threads", type=int, default=1, help="CPU threads of the model")
    add("--random-seed", type=int)
    add("--incremental-streaming-output", action="store_true", help="events hold only new tokens")
    add("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    add("--log-format", default="text", choices=["text", "json"])
    add("--log-part", default="engine", help="name of this process in JSON log lines")
    return parser


def _adapters(given: list[str]) -> dict[str, str]:
    """Return folders by name; ConfigError for another form, or a name that comes twice."""
    from any_agent.errors import ConfigError

    found: dict[str, str] = {}
    for each in given:
        name, equals, folder = each.partition("=")
        if not (name and equals and folder) or name in found:
            raise ConfigError(f"--adapter {each}: give NAME=FOLDER, each name once")
        found[name] = folder
    return found


async def _serve(args: argparse.Namespace, key: str | None) -> None:
    from any_agent.engine.embedded.engine import EmbeddedEngine, EngineOptions
    from any_agent.engine.embedded.server import EngineServer, listen
    from any_agent.errors import ConfigError, StartupError

    options = EngineOptions(
        device=args.device,
        dtype=args.dtype,
        context_length=args.context_length,
        weight_version=args.weight_version,
        max_running_requests=args.max_running_requests,
        max_queued_requests=args.max_queued_requests,
        max_total_tokens=args.max_total_tokens,
        threads=args.threads,
        seed=args.random_seed,
        adapters=_adapters(args.adapter),
        live_adapters=args.live_adapters,
        max_adapter_rank=args.max_adapter_rank,
    )
    if options.live_adapters < 0 or options.max_adapter_rank < 1:
        raise ConfigError("--live-adapters must be 0 or more, and --max-adapter-rank 1 or more")
    stop = asyncio.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    async with EmbeddedEngine.load(args.model_path, options) as engine:
        server = EngineServer(engine, incremental=args.incremental_streaming_output, key=key)
        try:
            runner, port = await listen(server, args.host, args.port)
        except (ConfigError, OSError) as exc:
            # The launcher tries again, which it does not after a ConfigError.
            raise StartupError(f"cannot listen on {args.host}:{args.port}: {exc}") from exc
        log.info("ready on http://%s:%d", args.host, port)
        stopping = asyncio.create_task(stop.wait())
        ended = asyncio.create_task(engine.ended())
        await asyncio.wait({stopping, ended}, return_when=asyncio.FIRST_COMPLETED)
    await runner.cleanup()
    if (error := await ended) is not None:
        # The launcher restarts this process; if it stayed, it would refuse every request.
        raise StartupError(f"the generation loop died: {error!r}")


def main() -> int:
    args = _parser().parse_args()
    set_up_logging(args.log_level, args.log_format, part=args.log_part)
    raise_open_files_limit()
    # The event loop and the generation loop share the interpreter: a step may take less than 5 ms.
    sys.setswitchinterval(0.0002)
    return guarded(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    from any_agent.auth.engine_key import read_key_file
    from any_agent.config import LOOPBACK
    from any_agent.errors import ConfigError
    from any_agent.runtime.private_address import require_private_host

    require_private_host(args.host)
    if args.key_file is None and args.host not in LOOPBACK:
        raise ConfigError(
            f"{args.host} is reachable from other machines, so the engine needs a key: give "
            "--key-file, and its key to the service as engine.key; without one only loopback may "
            "be bound"
        )
    key = read_key_file(args.key_file) if args.key_file is not None else None
    asyncio.run(_serve(args, key))
    return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    # Skip the interpreter's shutdown: unloading torch takes seconds that a stop does not have.
    os._exit(code)
