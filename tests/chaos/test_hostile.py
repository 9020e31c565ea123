"""Whatever is sent, by whomever: refused in the API's own words, at no cost, and nothing is run."""

from __future__ import annotations

import asyncio
import gzip
import json
import pickle
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from urllib.parse import quote

import msgpack
import pytest

from tests.chaos.conftest import Figure
from tests.support.chaos.hostile import (
    ADMIN_KEY,
    CLIENT_TIMEOUT,
    Part,
    Target,
    connected,
    exchange,
    request,
    running_target,
)
from tests.support.chaos.hostile_inputs import (
    ALIEN,
    DEEP,
    HIDDEN,
    MARKUP,
    MODEL_CALLS,
    NAMES,
    NUMBERS,
    NUMERIC,
    POSTS,
    REWARDED,
    SMUGGLED,
    Canary,
)
from tests.support.waiting import until

MIB = 2**20
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("hostile")
    with running_target(folder, tiny_model_dir) as target:
        target.alive()
        yield target


@pytest.fixture(autouse=True)
def unharmed(target: Target, request: pytest.FixtureRequest) -> Iterator[None]:
    """After each attack the service serves as before; what the attack cost is noted."""
    before = [part.resident for part in target.parts]
    for part in target.parts:
        part.forget_peak()
    yield
    target.alive()
    for part, resident in zip(target.parts, before, strict=True):
        part.costs.append((part.peak, request.node.name, resident, part.resident))
        assert part.resident - resident < 48, f"{part.name} keeps what it was sent"


@pytest.fixture(params=["router", "proxy"])
def part(request: pytest.FixtureRequest, target: Target) -> Part:
    """Both: who gets past the router, or is another user of its machine, meets the proxy."""
    found: Part = getattr(target, request.param)
    return found


@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("path", [CHAT, "/rl/v1/start_session"])
async def test_a_body_of_a_gigabyte_is_refused_without_being_held_in_memory(
    target: Target, part: Part, path: str, framing: str, figure: Figure
) -> None:
    _, key = target.open()
    head = request("POST", path, key=key if path == CHAT else ADMIN_KEY)
    frame = b"Transfer-Encoding: chunked" if framing == "chunked" else b"Content-Length: 1073741824"
    piece = b'{"' + b"x" * (MIB - 4) + b'",'
    chunk = b"%x\r\n%s\r\n" % (len(piece), piece) if framing == "chunked" else piece
    peak = part.peak
    async with connected(part) as wire:
        await wire.send(head.replace(b"Content-Length: 0", frame))
        await wire.pour(chunk for _ in range(1024))
        reply = await wire.reply()
        sent = wire.sent // MIB
    figure(f"answered {reply.status} after {sent} MiB")
    assert reply.refused()
    assert reply.status in (0, 413)
    assert sent < 100, "it took more than the limit and what buffers hold"
    # 32 MiB may be read, and are copied once to be joined.
    assert part.peak - peak < 128


async def test_a_compressed_body_that_is_a_bomb_is_refused_without_being_unpacked(
    target: Target, part: Part, figure: Figure
) -> None:
    """A quarter of a megabyte that becomes 256."""
    _, key = target.open()
    headers = [(b"Content-Encoding", b"gzip")]
    bomb = request("POST", CHAT, gzip.compress(bytes(256 * MIB)), key=key, headers=headers)
    peak = part.peak
    reply = await exchange(part, bomb)
    figure(f"{len(bomb) >> 10} KiB answered {reply.status}; {part.peak - peak} MiB more")
    assert (reply.status, reply.error["code"]) == (413, "payload_too_large")
    assert part.peak - peak < 128


async def test_a_body_that_never_ends_is_refused_in_time(target: Target, part: Part) -> None:
    """Some bytes, then nothing: it holds no connection for long."""
    _, key = target.open()
    data = request("POST", "/rl/v1/set_reward", b'{"reward": 1}', key=key)
    started = time.monotonic()
    async with connected(part) as wire:
        await wire.send(data[:-5])
        reply = await wire.reply()
    assert reply.refused()
    assert time.monotonic() - started < CLIENT_TIMEOUT + 40


async def test_clients_whose_headers_never_end_are_cut_off(
    target: Target, part: Part, long: bool, figure: Figure
) -> None:
    """A crowd that sends its headers a byte at a time, and another one that sends nothing."""
    crowd, seconds = (400, 90.0) if long else (60, 2.0)
    text = b"GET /healthz HTTP/1.1\r\nX-Slow: " + b"a" * 1000
    async with AsyncExitStack() as stack:
        wires = [await stack.enter_async_context(connected(part)) for _ in range(crowd)]
        started = time.monotonic()
        for k in range(int(seconds / 0.25)):
            for wire in wires[::2]:
                if not wire.writer.is_closing():
                    wire.writer.write(text[k : k + 1])
            await asyncio.sleep(0.25)
            if k % 20 == 1:
                await asyncio.to_thread(target.alive)
        still = sum(not wire.reader.at_eof() for wire in wires)
    figure(f"{crowd} slow heads: after {time.monotonic() - started:.0f} s {still} are open")
    assert not (long and still), "it waits for ever"
    await until(lambda: part.connections <= 16, "the connections' end")


async def test_a_flood_of_connections_is_answered_and_leaves_none_open(
    target: Target, long: bool, figure: Figure
) -> None:
    crowd = 800 if long else 200
    forged = "sk-v1.0.0123456789abcdef01234567.0123456789abcdef0123456789abcdef"
    target.used_keys.add(forged)
    data = request("GET", "/rl/v1/run", key=forged)
    async with AsyncExitStack() as stack:
        opening = (stack.enter_async_context(connected(target.router)) for _ in range(crowd))
        wires = await asyncio.gather(*opening)
        replies = await asyncio.gather(*(wire.ask(data) for wire in wires))
        assert {reply.status for reply in replies} == {401}
        await asyncio.to_thread(target.alive)
    await until(lambda: target.router.connections <= 16, "the connections' end")
    figure(f"{crowd} connections at once, each answered 401, none left open")


async def test_deeply_nested_json_is_refused(target: Target, part: Part) -> None:
    _, key = target.open()
    for name, body in DEEP.items():
        for path in POSTS:
            own = key if path in (*MODEL_CALLS, *REWARDED) else ADMIN_KEY
            reply = await exchange(part, request("POST", path, body, key=own))
            assert reply.refused(), (name, path)
            assert reply.error["code"] in ("too_deep", "session_not_found"), (path, reply.error)


async def test_values_that_are_no_numbers_are_refused_where_a_number_belongs(
    target: Target, part: Part
) -> None:
    session, key = target.open()
    chat = request("POST", CHAT, b'{"messages":[{"role":"user","content":"x"}]}', key=key)
    assert (await exchange(target.router, chat)).status == 200
    for path, names in NUMERIC.items():
        own = key if path in REWARDED else ADMIN_KEY
        for name in names:
            for number, good in NUMBERS.items():
                if good and path not in REWARDED[:1]:
                    continue
                body = b'{"%s": %s}' % (name, number)
                reply = await exchange(part, request("POST", path, body, key=own))
                where = (path, body[:60], reply.body[:200])
                assert (reply.status == 200) if good else reply.refused(), where
    recorded = target.admin.get(f"/rl/v1/sessions/{session}").json()
    assert list(recorded["rewards"].values()) == [0.0], recorded


async def test_hostile_names_in_bodies_do_no_harm(target: Target, part: Part) -> None:
    for name in NAMES:
        places: list[tuple[str, str, dict[str, object]]] = [
            ("/rl/v1/start_session", "task_id", {"mode": "eval"}),
            ("/rl/v1/start_session", "group_id", {"mode": "eval"}),
            ("/rl/start_session", "task_id", {}),
            ("/rl/v1/set_reward", "interaction_id", {"reward": 1}),
            ("/rl/v1/set_reward", "session_id", {"reward": 1}),
            ("/rl/v1/set_reward", "name", {"reward": 1}),
            ("/rl/v1/finalize", "session_id", {}),
            ("/export_trajectories", "session_id", {}),
        ]
        if len(name) > 64:
            places.append(("/rl/v1/lease", "owner", {}))
        for path, field, more in places:
            body = json.dumps({field: name, **more}).encode()
            reply = await exchange(part, request("POST", path, body))
            assert reply.refused(), (path, field, name[:40], reply.body[:200])
            assert b"root:" not in reply.body


async def test_hostile_names_in_paths_and_headers_do_no_harm(target: Target, part: Part) -> None:
    for name in NAMES:
        raw = name.encode("utf-8", "surrogatepass")[:20_000]
        encoded = quote(raw, safe="").encode()
        bare = raw.translate(None, b"\r\n \0")
        for path in {encoded, quote(encoded, safe="").encode(), bare}:
            for before, after in (
                (b"/rl/v1/sessions/", b"/nothing"),
                (b"/", b""),
                (b"/rl/v1/", b""),
                (b"/static/", b""),
                (b"/ses-0-", b"/v1/chat/completions"),
                (b"/rl/v1/sessions?limit=", b""),
            ):
                reply = await exchange(part, request("GET", before + path + after))
                where = (before, path[:60], reply.status, reply.body[:100])
                # A name may add nothing to `/`, as a lone `?` does: the router's page is for all.
                front = before == b"/" and reply.body.startswith(b"any-agent runs here")
                assert path == b"" or front or reply.refused(), where
                assert b"root:" not in reply.body
        for header in (b"X-Any-Agent-Session", b"Idempotency-Key", b"X-Api-Key"):
            if bare:
                headers = [(header, bare)]
                data = request("POST", "/rl/v1/set_reward", b'{"reward": 1}', headers=headers)
                reply = await exchange(part, data)
                assert reply.refused(), (header, bare[:40], reply.body[:200])


async def test_planted_markup_is_served_as_data(target: Target, part: Part) -> None:
    """It stands in metadata, in a model's name and in messages: no page is ever made of it."""
    for text in MARKUP:
        _, key = target.open(metadata={"note": text, text: 1})
        body = b'{"model": "%s", "messages": [{"role": "user", "content": "%s"}]}'
        filled = body % (text.encode(), text.encode())
        for reply in (
            await exchange(part, request("POST", CHAT, filled, key=key)),
            await exchange(part, request("GET", "/rl/v1/sessions")),
            await exchange(part, request("GET", "/" + quote(text))),
            await exchange(part, request("GET", "/metrics")),
        ):
            kind = reply.headers["content-type"]
            assert kind.startswith(("application/json", "text/plain")), kind
            if kind.startswith("text/plain"):
                assert text.encode() not in reply.body


def _forged(key: str) -> list[str]:
    version, rank, lane, mac = key.split(".")
    flipped = mac[:-1] + ("0" if mac[-1] != "0" else "1")
    return [
        f"{version}.{rank}.{lane}.{flipped}",
        f"{version}.7.{lane}.{mac}",
        f"{version}.{rank}.{lane}.",
        key[:-1],
        key + "0",
        key.upper(),
        f"{version}.\u0660.{lane}.{mac}",
        f"{version}.{rank}.{lane}.{'0' * 32}",
        f"{version}.-1.{lane}.{mac}",
        f"{version}.99999999999999999999.{lane}.{mac}",
        f"{version}.{rank}.{lane}.{mac}.{mac}",
        "sk-admin.0123456789ab.guess",
        "sk-tenant.0123456789ab.guess",
        "sk-trainer.0123456789ab.guess",
        ADMIN_KEY[:-1],
        ADMIN_KEY + "x",
        "sk-v1." + "9" * 10_000,
        "null",
    ]


async def test_forged_keys_open_no_route(target: Target, part: Part) -> None:
    session, key = target.open()
    mac = key.rpartition(".")[2].encode()
    for text in _forged(key):
        if text.isascii() and len(text) > 10:
            target.used_keys.add(text)
        for method, path, body in (
            ("GET", "/rl/v1/run", b""),
            ("GET", f"/rl/v1/sessions/{session}", b""),
            ("POST", "/rl/v1/start_session", b'{"mode": "eval"}'),
            ("POST", CHAT, b'{"messages": []}'),
            ("POST", "/rl/v1/finalize", b"{}"),
            ("GET", "/metrics", b""),
        ):
            reply = await exchange(part, request(method, path, body, key=text))
            assert reply.refused(), (text[:60], path)
            assert reply.status in (0, 400, 401, 403, 404), (text[:60], path, reply.status)
            assert mac not in reply.body
        prefixed = request("POST", f"/{quote(text)}/rl/v1/finalize", b"{}", key=None)
        assert (await exchange(part, prefixed)).refused(), text[:60]
    assert target.admin.get(f"/rl/v1/sessions/{session}").json()["state"] == "open"


async def test_a_request_hidden_behind_an_ambiguous_framing_is_never_served(
    target: Target, part: Part
) -> None:
    """Behind a framing that two readers may read differently hides another request."""
    body = b"0\r\n\r\n" + HIDDEN % ADMIN_KEY.encode()
    for name, lines in SMUGGLED.items():
        head = b"\r\n".join([b"POST /healthz HTTP/1.1", b"Host: localhost", *lines, b"", b""])
        async with connected(part) as wire:
            await wire.send(head + body)
            first = await wire.reply()
            assert first.status == 0 or 400 <= first.status < 500, (name, first)
            wire.writer.write_eof()
            rest = await wire.rest()
        assert b" 200 " not in rest, (name, rest[:300])
        assert b"session_id" not in rest, name


async def test_a_request_with_ten_thousand_headers_is_refused(part: Part) -> None:
    headers = [(b"X-%d" % k, b"v" * 16) for k in range(10_000)]
    reply = await exchange(part, request("GET", "/rl/v1/run", headers=headers))
    assert reply.refused()


async def test_a_gigabyte_of_headers_is_refused_without_being_held_in_memory(
    part: Part, figure: Figure
) -> None:
    peak = part.peak
    async with connected(part) as wire:
        await wire.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
        await wire.pour(b"X-%d: %s\r\n" % (k, b"v" * MIB) for k in range(1024))
        reply = await wire.reply()
    figure(f"answered {reply.status} after {wire.sent // 1024} KiB of headers")
    assert reply.refused()
    assert wire.sent < 16 * MIB
    assert part.peak - peak < 64


async def test_bytes_of_other_protocols_are_refused(target: Target, part: Part) -> None:
    for name, data in ALIEN.items():
        async with connected(part) as wire:
            await wire.send(data)
            wire.writer.write_eof()
            reply = await wire.reply()
        assert reply.status == 0 or 400 <= reply.status < 500, (name, reply)
        assert b"X-Secret" not in reply.body


async def test_pickles_are_not_opened(target: Target, part: Part) -> None:
    file = target.folder / f"canary-{part.name}"
    dumped = pickle.dumps(Canary(file))
    bodies = {
        "pickle": dumped,
        "pickle, old": pickle.dumps(Canary(file), protocol=0),
        "msgpack": msgpack.packb({"trajectories": dumped, "format": 2}),
        "msgpack extension": msgpack.packb(msgpack.ExtType(42, dumped)),
        "python": b"__import__('os').system('touch %s')" % str(file).encode(),
        "yaml": b"!!python/object/apply:os.system ['touch %s']" % str(file).encode(),
        "typed": b'{"type": "dataclass", "class_path": "os.system", "data": {}}',
    }
    kinds = (b"application/json", b"application/x-msgpack", b"application/python-pickle")
    for path in POSTS:
        for name, body in bodies.items():
            for kind in kinds:
                data = request("POST", path, body).replace(b"application/json", kind)
                assert (await exchange(part, data)).refused(), (path, name)
    text = dumped.hex().encode()
    for header in (b"X-Any-Agent-Session", b"Idempotency-Key", b"Cookie", b"Traceparent"):
        data = request("POST", "/rl/v1/set_reward", b'{"reward": 1}', headers=[(header, text)])
        assert (await exchange(part, data)).refused()
    assert not file.exists(), "it was executed"
    pickle.loads(dumped)
    assert file.exists(), "the canary would not have sung"
    file.unlink()


def test_zz_memory_was_flat(target: Target, figure: Figure) -> None:
    for part in target.parts:
        peak, worst, before, _ = max(part.costs)
        first, last = part.costs[0][2], part.costs[-1][3]
        figure(
            f"{part.name}: {first} MiB at first, {last} after {len(part.costs)} attacks; the most "
            f"was {peak} ({before} before), in {worst}"
        )
        assert last - first < 96


def test_zz_no_file_holds_a_key(target: Target, figure: Figure) -> None:
    """Logs, journal, audit, metrics: of all keys that were sent, genuine or forged, none stays."""
    files = [path for path in target.folder.rglob("*") if path.is_file()]
    contents = {str(path): path.read_bytes() for path in files}
    contents["/metrics"] = target.metrics().encode()
    assert len(contents) > 8, sorted(contents)
    found = [
        (name, key[:12])
        for name, content in contents.items()
        for key in target.used_keys
        if key.encode() in content
    ]
    size = sum(map(len, contents.values())) // 1024
    figure(
        f"{len(target.used_keys)} keys were sent; of {len(files)} files ({size} KiB) and the "
        f"metrics {len(found)} hold one"
    )
    assert not found
    for name, content in contents.items():
        assert b"Traceback" not in content, name
