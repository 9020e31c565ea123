"""One rank's proxy process: ``python -m proxy_ext --config FILE --rank 0 --engine-url URL ...``."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import time
import uuid

from any_agent.auth.access import require_key
from any_agent.auth.engine_key import key_of_engines
from any_agent.config import Config, load_resolved
from any_agent.config.model_list import resolved
from any_agent.engine import HALF_LOADED, open_engine
from any_agent.engine.model_fingerprint import ModelFingerprint, shape_of
from any_agent.errors import EngineUnavailable, StartupError
from any_agent.rundir.layout import RunDir
from any_agent.rundir.registry import rank_name
from any_agent.rundir.store_beside import store_beside
from any_agent.runtime.command_line import guarded
from any_agent.runtime.logs import FloodFilter, set_up_logging
from any_agent.runtime.open_files import raise_open_files_limit
from any_agent.runtime.ports import reserve, url_of
from any_agent.runtime.private_address import require_private_url

_POLL_INTERVAL = 0.3


def main() -> int:
    # Until the server runs, Ctrl-C ends the process without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parser = argparse.ArgumentParser(prog="python -m proxy_ext", description="One rank's proxy.")
    parser.add_argument("--config", required=True, help="the run's resolved YAML")
    parser.add_argument("--rank", type=int, default=0, help="number of this rank")
    parser.add_argument("--engine-url", required=True, help="URL of this rank's engine")
    parser.add_argument(
        "--engine-wait", type=float, default=0.0, help="seconds to wait for the engine"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, required=True, help="port to listen on")
    parser.add_argument(
        "--public-url", help="URL that agents call (the router's); default: this process's"
    )
    parser.add_argument("--model-path", help="folder of the tokenizer, if not the configured model")
    parser.add_argument("--training", action="store_true", help="a trainer will lease sessions")
    args = parser.parse_args()
    return guarded(lambda: _start(args))


def _start(args: argparse.Namespace) -> int:
    config = load_resolved(args.config)
    part = rank_name(args.rank)
    set_up_logging(config.log_level, config.log_format, part=part, secrets=config.secrets())
    raise_open_files_limit()
    for host in (args.host, config.server.host):
        require_key(config, host)
    # Missing settings and a port in use are reported before anything slow.
    resolved(config.frozen.model_list, os.environ)
    config.require_litellm()
    listener = reserve(args.host, args.port)
    return _serve(config, args, listener)


async def check_engine(config: Config, url: str, wait: float, shape: ModelFingerprint) -> None:
    """Check the engine before the slow imports.

    StartupError if it does not answer in time, ConfigError if it serves another model or has a
    public address.
    """
    await asyncio.to_thread(require_private_url, url)
    kind, key = config.engine.kind, key_of_engines(config)
    engine = open_engine(kind, url, decode=lambda _: "", shape=shape, key=key)
    deadline = time.monotonic() + wait
    try:
        while True:
            try:
                await engine.info()
                # Resume an engine that an earlier proxy paused, unless its weights are half loaded:
                # its trainer completes them once this proxy serves.
                if engine.version != HALF_LOADED:
                    await engine.resume(engine.version)
                await engine.require_model()
                return
            except EngineUnavailable as error:
                if time.monotonic() >= deadline:
                    raise StartupError(
                        f"the engine at {url} cannot be used: {error.message}; is engine.urls "
                        "right, and is it running?"
                    ) from None
            await asyncio.sleep(_POLL_INTERVAL)
    finally:
        await engine.close()


def _serve(config: Config, args: argparse.Namespace, listener: socket.socket) -> int:
    from proxy_ext.lean_imports import import_lean

    import_lean()
    import uvicorn

    from any_agent.doctor.startup_check import require_passing
    from proxy_ext.app import create_app
    from proxy_ext.server import DrainingServer, entry_of
    from proxy_ext.service import load_chat
    from proxy_ext.sessions.grading import check_grader
    from proxy_ext.web.protocol import bounded

    url = url_of(*listener.getsockname()[:2])
    chat = load_chat(config, args.model_path)
    asyncio.run(require_passing(chat, config, training=args.training))
    asyncio.run(check_grader(config.sessions))
    shape = shape_of(args.model_path or config.model.path)
    asyncio.run(check_engine(config, args.engine_url, args.engine_wait, shape))
    app = create_app(
        config,
        chat,
        rank=args.rank,
        engine_url=args.engine_url,
        shape=shape,
        training=args.training,
        public_url=args.public_url or url,
        engine_wait=args.engine_wait,
    )
    boot_id = uuid.uuid4().hex
    server = DrainingServer(
        uvicorn.Config(
            app,
            http=bounded(config.server.body_timeout),
            loop="uvloop",
            lifespan="on",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_graceful_shutdown=1,
            timeout_keep_alive=75,
            backlog=2048,
        ),
        RunDir.of(config.root, config.user, config.experiment, config.trial).registry,
        lambda: entry_of(app.service, url=url, boot_id=boot_id),
        lambda: app.service.drain(),
        drain_timeout=config.server.drain_timeout,
        lost=lambda: app.service.journal.stats.lost,
        on_lost=lambda why: app.service.lose(why),
        also=store_beside(config),
    )

    def end() -> None:
        server.should_exit = True

    app.on_refused = end
    uvicorn_log = logging.getLogger("uvicorn.error")
    uvicorn_log.setLevel(logging.WARNING)
    # It warns of each malformed request.
    uvicorn_log.addFilter(FloodFilter())
    try:
        server.run(sockets=[listener])
    except SystemExit:
        # uvicorn exits like this if the start failed; the log has the reason.
        if app.refused is not None:
            raise app.refused from None
        return 1
    if app.refused is not None:
        raise app.refused
    if server.lost is not None:
        raise StartupError(server.lost)
    return 0 if server.started else 1


if __name__ == "__main__":
    sys.exit(main())
