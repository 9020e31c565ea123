"""``any-agent keys``: create, list and revoke keys, and rotate the secret behind session keys.

The commands work on the trial's folder, whether its service runs, has run, or was never started.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from any_agent.errors import StartupError
from any_agent.runtime.command_line import (
    add_below,
    add_commands,
    add_trial_arguments,
    columns,
    count,
    duration,
    option,
    overrides_of,
    positive,
)

if TYPE_CHECKING:
    from any_agent.auth.key_store import StoredKey
    from any_agent.rundir.layout import RunDir

_LIMITS = ("open_sessions", "requests_per_second", "tokens_per_second")
_MAX_SECRETS = 8
_EPILOG = (
    "A running service picks up the change within two seconds. Exit codes: 0 done, 1 not done (no "
    "such key or trial, or a file that cannot be written), 2 wrong input."
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    keys = commands.add_parser(
        "keys",
        help="create, list and revoke keys of operators, trainers and tenants; rotate secrets",
        epilog=_EPILOG,
    )
    below = add_commands(keys, "keys_command")
    add = partial(add_below, below, epilog=_EPILOG, run=run)
    create = add("create", "create a key and print it, only this once")
    scopes = ("admin", "trainer", "tenant")
    scope_help = "the routes that the key may use"
    create.add_argument("--scope", required=True, choices=scopes, help=scope_help)
    option(create, "--tenant NAME", "the tenant that gets the key; for --scope tenant")
    for limit in _LIMITS:
        option(
            create,
            f"--{limit.replace('_', '-')} N",
            f"the tenant's limit for the whole service (default: server.tenant_{limit})",
            type=count(10**12) if limit == "open_sessions" else positive,
        )
    option(create, "--new-trial", "the trial may be one that has not been started yet")
    lifetime = "lifetime, like 90s, 12h or 30d (default: unlimited)"
    option(create, "--expires-in TIME", lifetime, type=duration)
    add("list", "show every key: id, scope, tenant, state, limits; never the key itself")
    revoke = add("revoke", "revoke a key; a tenant's open sessions go on with their own keys")
    revoke.add_argument("id", metavar="ID", help="the key's id, as `any-agent keys list` shows it")
    rotate = add(
        "rotate",
        "sign session keys with a new secret; keys signed with earlier secrets stay valid",
    )
    option(rotate, "--drop-old", "invalidate all earlier session keys")
    for parser in below.choices.values():
        # The positional arguments of one command come first.
        add_trial_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code. Raises AnyAgentError."""
    command = arguments.keys_command
    run_dir = _trial(arguments, must_exist=command != "create" or not arguments.new_trial)
    try:
        return _COMMANDS[command](arguments, run_dir)
    except PermissionError:
        raise  # Told with the folder's owner.
    except OSError as error:
        raise StartupError(f"cannot write in {run_dir.path}: {error.strerror}") from None


def _trial(arguments: argparse.Namespace, *, must_exist: bool) -> RunDir:
    from any_agent.auth.access import run_dir_of
    from any_agent.config import load_config

    run_dir = run_dir_of(load_config(arguments.config, overrides_of(arguments)))
    run_dir.check_format()
    if must_exist and not run_dir.path.is_dir():
        remedy = "name it with root=, --experiment and --trial"
        if arguments.keys_command == "create":
            remedy += "; for one that has not been started yet add --new-trial"
        raise run_dir.no_trial(remedy)
    return run_dir


def _create(arguments: argparse.Namespace, run_dir: RunDir) -> int:
    import getpass

    from any_agent.auth.key_store import TenantLimits, create_key, read_keys

    text, key = create_key(
        run_dir.keys,
        arguments.scope,
        tenant=arguments.tenant,
        limits=TenantLimits(**{name: getattr(arguments, name) for name in _LIMITS}),
        expires_in=arguments.expires_in,
        created_by=getpass.getuser(),
        record=lambda key: _audit(run_dir, "keys create", key),
    )
    if arguments.json:
        print(json.dumps(_public_fields(key) | {"key": text}))
    else:
        _print_note(f"key {key.id} for {run_dir.path}; it is shown only now and stored nowhere:")
        print(text)
    started = run_dir.resolved.is_file() or (run_dir.path / "config.yaml").is_file()
    if not started:
        _print_note(
            f"this trial has not been started yet: {run_dir.path.absolute()}; the key is valid for "
            "no other trial. Choose one with --config, --experiment, --trial and root=FOLDER"
        )
    admins = [k for k in read_keys(run_dir.keys).keys if k.scope == "admin"]
    if not admins:
        _print_note(
            "keys.json holds no admin key: without server.admin_key the service is open to "
            "everybody on its machine"
        )
    elif admins == [key]:
        since = "from now on" if started else "once it is started,"
        _print_note(f"the first admin key: {since} this trial's service requires keys")
    return 0


def _list(arguments: argparse.Namespace, run_dir: RunDir) -> int:
    from any_agent.auth.key_store import read_keys

    found = read_keys(run_dir.keys).keys
    if arguments.json:
        print(json.dumps([_public_fields(key) for key in found]))
        return 0
    rows = [("ID", "SCOPE", "TENANT", "STATE", "MADE", "EXPIRES", "LIMITS"), *map(_row, found)]
    print("\n".join(columns(rows)))
    return 0


def _revoke(arguments: argparse.Namespace, run_dir: RunDir) -> int:
    from any_agent.auth.key_store import read_keys, revoke_key
    from any_agent.keys import key_id

    # A caller who passes the key itself means its id; the key is not repeated.
    id = key_id(arguments.id) or arguments.id
    key, done = revoke_key(run_dir.keys, id, record=lambda k: _audit(run_dir, "keys revoke", k))
    if arguments.json:
        print(json.dumps(_public_fields(key)))
    else:
        owner = f"tenant {key.tenant}" if key.tenant is not None else key.scope
        print(f"key {key.id} ({owner}) {'is revoked' if done else 'was revoked already'}")
    if key.scope == "admin" and not read_keys(run_dir.keys).wants_admin:
        _print_note(
            "keys.json holds no admin key any more: without server.admin_key a service on "
            "127.0.0.1 starts open to everybody there, and one on another address does not start"
        )
    return 0


def _rotate(arguments: argparse.Namespace, run_dir: RunDir) -> int:
    import secrets

    from any_agent.auth.key_store import locked
    from any_agent.runtime.atomic_files import write_atomic

    with locked(run_dir.secret):
        old = [] if arguments.drop_old else [secret.hex() for secret in run_dir.signing_secrets()]
        if len(old) >= _MAX_SECRETS:
            raise StartupError(
                f"{run_dir.secret} holds {len(old)} secrets already; rotate with --drop-old once "
                "the sessions that were opened under the older ones have ended"
            )
        _audit(run_dir, "keys rotate", None, dropped_old=arguments.drop_old)
        text = "\n".join([secrets.token_hex(32), *old]) + "\n"
        write_atomic(run_dir.secret, text)
    if arguments.json:
        print(json.dumps({"secrets": len(old) + 1}))
    else:
        now = "are invalid" if arguments.drop_old else "stay valid"
        print(f"a new secret signs session keys; keys signed before {now}")
    return 0


_COMMANDS = {"create": _create, "list": _list, "revoke": _revoke, "rotate": _rotate}


def _public_fields(key: StoredKey) -> dict[str, Any]:
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
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def _audit(run_dir: RunDir, event: str, key: StoredKey | None, **fields: Any) -> None:
    """Write a line of the audit log, on disk before the change that it records."""
    import getpass

    from any_agent.runtime.atomic_files import append_line, fsync, make_folder

    make_folder(run_dir.audit)
    about = {"id": key.id, "scope": key.scope, "tenant": key.tenant} if key is not None else {}
    line = {"at": _time(time.time()), "event": event, "who": getpass.getuser(), **about, **fields}
    path = run_dir.audit / "keys.jsonl"
    append_line(path, json.dumps({k: v for k, v in line.items() if v is not None}))
    fsync(path)


def _print_note(text: str) -> None:
    """Print to standard error: standard output may be piped to where the key goes."""
    print(text, file=sys.stderr)
