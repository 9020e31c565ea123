"""The cloud, whose runs are those of `cloud_run.py`; ``--fill ROOT N`` stores N accounts before."""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from pathlib import Path

from any_agent.auth.key_store import StoredKey, StoredKeys
from any_agent.keys import new_key, secret_hash
from router.cloud import launching
from router.cloud.__main__ import main
from router.cloud.store import Run, RunStore


async def fill(root: Path, count: int) -> None:
    """Store ``count`` accounts, each with a key and a run."""
    folder = root / ".cloud"
    folder.mkdir(parents=True, mode=0o700)
    keys, store = [], await RunStore.open(folder)
    # One commit each would be the disk's figure.
    store._connection.execute("PRAGMA synchronous = OFF")
    for number in range(count):
        text, id = new_key("tenant")
        name, now = f"account-{number}", time.time()
        hash = secret_hash(text).hex()
        keys.append(StoredKey(id=id, scope="tenant", tenant=name, hash=hash, created_at=now))
        await store.add(Run(secrets.token_hex(4), name, "exp", "trial-1", "tiny", "grpo", {}))
    await store.close()
    content = StoredKeys(keys=tuple(keys)).model_dump_json(exclude_none=True)
    (folder / "keys.json").write_text(content)
    (folder / "keys.json").chmod(0o600)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--fill"]:
        asyncio.run(fill(Path(sys.argv[2]), int(sys.argv[3])))
        sys.exit()
    launching.PROGRAM = ("cloud_run",)
    sys.exit(main())
