"""``any-agent keys``: make, list and revoke keys, and rotate what signs the sessions' keys.

All of it works on the trial's folder, whether its service runs, ran, or never did.
"""

from __future__ import annotations

import argparse
import getpass
import json
import secrets
import sys
import time
from datetime import UTC, datetime
from typing import Any

from any_agent.auth.access import run_dir_of
from any_agent.auth.key_store import (
    StoredKey,
    TenantLimits,
    create_key,
    locked,
    read_keys,
    revoke_key,
    write_private,
)
from any_agent.cli.keys import LIMITS
from any_agent.config import load_config
from any_agent.errors import StartupError
from any_agent.keys import key_id
from any_agent.rundir.layout import RunDir
from any_agent.runtime.atomic_files import append_line, fsync

_MAX_SECRETS = 8


def run(arguments: argparse.Namespace) -> int:
    """Do what was asked for; the exit code. Raises AnyAgentError."""
    command = arguments.keys_command
    run_dir = _trial(arguments, must_exist=command != "create")
    try:
        return _COMMANDS[command](arguments, run_dir)
    except OSError as error:
        raise StartupError(f"cannot write in {run_dir.path}: {error.strerror}") from None


def _trial(arguments: argparse.Namespace, *, must_exist: bool) -> RunDir:
    short = [(name, getattr(arguments, name)) for name in ("experiment", "trial")]
    named = [f"{name}={value}" for name, value in short if value is not None]
    run_dir = run_dir_of(load_config(arguments.config, [*named, *arguments.overrides]))
    run_dir.check_format()
    if must_exist and not run_dir.path.is_dir():
        raise StartupError(f"there is no trial at {run_dir.path}; see root, experiment and trial")
    return run_dir


def _create(arguments: argparse.Namespace, run_dir: RunDir) -> int:
    text, key = create_key(
        run_dir.keys,
        arguments.scope,
        tenant=arguments.tenant,
        limits=TenantLimits(**{name: getattr(arguments, name) for name in LIMITS}),
        expires_in=arguments.expires_in,
        created_by=getpass.getuser(),
        told=lambda key: _note(run_dir, "keys create", key),
    )
    if arguments.json:
        print(json.dumps(_shown(key) | {"key": text}))
    else:
        _say(f"key {key.id} for {run_dir.path}; it is shown this once, and kept nowhere:")
        print(text)
    started = (run_dir.path / "config.yaml").is_file()
    if not started:
        _say(
            f"this trial has not been started yet: {run_dir.path.absolute()}; the key is good for "
            "no other. --config, --experiment, --trial and root=FOLDER choose one"
        )
    admins = [k for k in read_keys(run_dir.keys).keys if k.scope == "admin"]
    if not admins:
        _say(
            "no admin key is in keys.json: without server.admin_key the service is open to "
            "everybody on its machine"
        )
    elif admins == [key]:
        since = "from now on" if started else "once it is started,"
        _say(f"the first admin key: {since} this trial's service asks everybody for a key")
    return 0


def _list(arguments: argparse.Namespace, run_dir: RunDir) -> int:
    found = read_keys(run_dir.keys).keys
    if arguments.json:
        print(json.dumps([_shown(key) for key in found]))
        return 0
    rows = [("ID", "SCOPE", "TENANT", "STATE", "MADE", "EXPIRES", "LIMITS"), *map(_row, found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip())
    return 0


def _revoke(arguments: argparse.Namespace, run_dir: RunDir) -> int:
    # Whoever gives the key itself means it, and it is not repeated.
    id = key_id(arguments.id) or arguments.id
    key, done = revoke_key(run_dir.keys, id, told=lambda key: _note(run_dir, "keys revoke", key))
    if arguments.json:
        print(json.dumps(_shown(key)))
    else:
        whose = f"tenant {key.tenant}" if key.tenant is not None else key.scope
        print(f"key {key.id} ({whose}) {'is revoked' if done else 'was revoked already'}")
    if key.scope == "admin" and not read_keys(run_dir.keys).wants_admin:
        _say(
            "no admin key is left in keys.json: without server.admin_key a service on 127.0.0.1 "
            "starts open to everybody there, and one on another address does not start"
        )
    return 0


def _rotate(arguments: argparse.Namespace, run_dir: RunDir) -> int:
    with locked(run_dir.secret):
        old = [] if arguments.drop_old else [secret.hex() for secret in run_dir.signing_secrets()]
        if len(old) >= _MAX_SECRETS:
            raise StartupError(
                f"{run_dir.secret} holds {len(old)} secrets already; rotate with --drop-old once "
                "the sessions that were opened under the older ones have ended"
            )
        _note(run_dir, "keys rotate", None, dropped_old=arguments.drop_old)
        write_private(run_dir.secret, "\n".join([secrets.token_hex(32), *old]) + "\n")
    if arguments.json:
        print(json.dumps({"secrets": len(old) + 1}))
    elif arguments.drop_old:
        print("a new secret signs session keys; those signed before are void")
    else:
        print("a new secret signs session keys; those signed before stay good")
    return 0


_COMMANDS = {"create": _create, "list": _list, "revoke": _revoke, "rotate": _rotate}


def _shown(key: StoredKey) -> dict[str, Any]:
    """What may be shown of a key."""
    fields = key.model_dump(exclude={"hash"}, exclude_none=True)
    return fields | {"state": key.state(time.time())}


def _row(key: StoredKey) -> tuple[str, ...]:
    limits = key.limits.model_dump(exclude_none=True)
    return (
        key.id,
        key.scope,
        key.tenant or "-",
        key.state(time.time()),
        _time(key.created_at),
        _time(key.expires_at) if key.expires_at is not None else "never",
        " ".join(f"{name}={value:g}" for name, value in limits.items()) or "-",
    )


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _note(run_dir: RunDir, event: str, key: StoredKey | None, **fields: Any) -> None:
    """A line of the audit log, on disk before what it tells of."""
    run_dir.audit.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = {"id": key.id, "scope": key.scope, "tenant": key.tenant} if key is not None else {}
    line = {"at": _time(time.time()), "event": event, "who": getpass.getuser(), **about, **fields}
    path = run_dir.audit / "keys.jsonl"
    append_line(path, json.dumps({k: v for k, v in line.items() if v is not None}))
    fsync(path)


def _say(text: str) -> None:
    """Beside the output, which may be piped to where the key goes."""
    print(text, file=sys.stderr)
