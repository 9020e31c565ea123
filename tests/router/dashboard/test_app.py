"""The dashboard over HTTP: who gets in, what a page may do in a browser, and what is missing."""

from __future__ import annotations

import html
import json
import re
import time
from email.utils import formatdate
from typing import Any
from urllib.parse import parse_qs

import httpx
import pytest

from any_agent.auth.key_store import create_key, revoke_key
from any_agent.keys import key_id
from any_agent.launcher.trial import trial_dir
from any_agent.runtime.metrics import CONTENT_TYPE
from tests.router.conftest import StartLab
from tests.router.test_affinity import IDS
from tests.support.proxy import until
from tests.support.router import Lab, Received, says, sends, serving

ADMIN = "admin-key-1"
KEYS = f"server.admin_key={ADMIN}"
EVIL = "<script>alert(1)</script>"
PAGES = ("", "/training", "/tasks", "/service", "/sessions", f"/sessions/{IDS[0]}")


def session(id: str = IDS[0], **more: Any) -> dict[str, Any]:
    """As a rank tells of one whose texts are all hostile."""
    given = {"interaction_id": None, "name": "style", "value": 0.25, "by": EVIL, "at": 1e9}
    given |= {"text": f"{EVIL} \u202eright to left"}
    told = dict.fromkeys(("reason", "task_id", "group_id", "opened_by"), EVIL)
    none = dict.fromkeys(("tenant", "step", "ended_at"))
    ones = dict.fromkeys(("interactions", "trainable_calls", "rewards_given", "number"), 1)
    return {
        **told,
        **none,
        **ones,
        "session_id": id,
        "state": "finalized",
        "mode": "train",
        "content": "stored",
        "final_reward": 0.25,
        "reward": 0.25,
        "created_at": 1e9,
        "untrainable_calls": {EVIL: 1},
        "roots": 2,
        "root_reasons": {EVIL: 1},
        "roles": {EVIL: 1, "": 1},
        "first_version": 3,
        "last_version": 4,
        "reward_history": [given],
        **more,
    }


CALL = {
    **dict.fromkeys(("parent_id", "branch_reason", "untrainable_reason", "reward", "adapter")),
    "id": "chatcmpl-1",
    "number": 1,
    "depth": 0,
    "role": EVIL,
    "created_at": 1e9,
    "message_delta": [{"role": EVIL, "content": f"{EVIL} \u202eright to left"}],
    "output_message": {"role": "assistant", "content": EVIL, "reasoning_content": EVIL},
    "finish_reason": "stop",
    "continuation": "root",
    "propagated": 0.25,
    "prompt_tokens": 5,
    "new_prompt_tokens": 5,
    "output_tokens": 2,
    "first_version": 3,
    "last_version": 4,
    "logprob_mean": -0.5,
}
CALLS = {
    **{"total": 1, "start": 0, "next": None, "cut": False},
    **{"interactions": [CALL], "score": 0.25},
}


async def rank(received: Received) -> None:
    """Answer as a rank does that has one session."""
    path, _, query = received.target.partition("?")
    if path == "/rl/v1/sessions":
        if "min_reward=x" in query:
            error = {"message": "min_reward must be a number", "code": "invalid_request"}
            return await received.answer({"error": error}, status=400)
        return await received.answer([session()])
    if path.endswith("/interactions"):
        return await received.answer(CALLS)
    if path.endswith("/tokens"):
        return await received.answer({"ids": [1], "texts": [EVIL]})
    if path == f"/rl/v1/sessions/{IDS[0]}":
        return await received.answer(session())
    if path.startswith("/rl/v1/sessions/"):
        error = {"message": f"there is no session {EVIL}", "code": "session_not_found"}
        return await received.answer({"error": error}, status=404)
    await received.answer({})


@pytest.fixture
async def lab(start_lab: StartLab) -> Lab:
    """One rank behind a service with an admin key."""
    lab = await start_lab(KEYS)
    lab.ranks[0].handler = rank
    return lab


async def log_in(lab: Lab, key: str = ADMIN, **fields: str) -> httpx.Response:
    return await lab.http.post("/ui/login", data={"key": key, **fields})


def keys_sent(lab: Lab) -> set[str]:
    return {key for got in lab.ranks[0].received for key in got.values("authorization")}


async def test_nothing_is_shown_without_a_login(lab: Lab) -> None:
    for page in PAGES:
        answer = await lab.get(f"/ui{page}")
        assert answer.status_code == 401 and 'name="key"' in answer.text
        assert f'name="next" value="/ui{page}"' in answer.text
    for key in (ADMIN, "wrong"):
        # A key in a header or in the URL opens no page.
        assert (await lab.get("/ui", key)).status_code == 401
        assert (await lab.get(f"/ui?key={key}")).status_code == 401
    assert lab.ranks[0].received == []
    assert (await lab.get("/ui/static/style.css")).headers["content-type"] == "text/css"


async def test_a_login_is_a_cookie_that_no_script_reads(lab: Lab) -> None:
    answer = await log_in(lab, next="/ui/sessions")
    assert (answer.status_code, answer.headers["location"]) == (303, "/ui/sessions")
    cookie = answer.headers["set-cookie"]
    for part in ("Path=/ui", "HttpOnly", "SameSite=Strict", "Max-Age=43200"):
        assert part in cookie
    assert ADMIN not in cookie and "Secure" not in cookie
    for page in PAGES:
        answer = await lab.get(f"/ui{page}")
        assert answer.status_code == 200, answer.text
        assert ADMIN not in answer.text
    assert keys_sent(lab) == {f"Bearer {ADMIN}", f"Bearer {lab.signer.run_key}"}
    answer = await lab.http.post("/ui/logout")
    assert (answer.status_code, answer.headers["location"]) == (303, "/ui/login")
    assert (await lab.get("/ui")).status_code == 401


async def test_behind_tls_the_cookie_is_for_tls_alone(lab: Lab) -> None:
    async with (
        serving(lab.config, url="https://service.example") as (_, port),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http,
    ):
        answer = await http.post("/ui/login", data={"key": ADMIN})
    assert "; Secure" in answer.headers["set-cookie"]


async def test_a_link_to_a_sessions_tokens_outlives_the_login(lab: Lab) -> None:
    page = f"/ui/sessions/{IDS[0]}"
    for odd in ("view=%22", "view=a&view=b", "view=a%0d%0aX:y", "view="):
        assert f'name="next" value="{page}"' in (await lab.get(f"{page}?{odd}")).text, odd
    link = f"{page}?view=logprob"
    assert f'name="next" value="{link}"' in (await lab.get(link)).text
    assert (await log_in(lab, next=link)).headers["location"] == link


async def test_a_login_leads_to_a_page_of_ours(lab: Lab) -> None:
    evil = ("https://evil.example/ui", "//evil.example")
    for after in (*evil, "/ui/../v1", "/ui\r\nX: y", "/v1", "/ui?view=a&b", EVIL):
        assert (await log_in(lab, next=after)).headers["location"] == "/ui", after
    wrong = await log_in(lab, "wrong", next=EVIL)
    assert 'name="next" value="/ui"' in wrong.text and EVIL not in wrong.text


async def test_wrong_keys_are_refused_counted_and_written_down(lab: Lab) -> None:
    for _ in range(5):
        answer = await log_in(lab, "wrong-key")
        assert answer.status_code == 401 and "not valid" in answer.text
        assert "set-cookie" not in answer.headers and "wrong-key" not in answer.text
    answer = await log_in(lab)
    assert answer.status_code == 429 and int(answer.headers["retry-after"]) <= 60
    path = trial_dir(lab.config).audit / "router.jsonl"
    lines = await until(lambda: path.exists() and path.read_text().splitlines()[4:5])
    assert json.loads(lines[0])["route"] == "POST /ui/login"
    assert "wrong-key" not in path.read_text()


async def test_forms_of_other_sites_do_nothing(lab: Lab) -> None:
    for headers, status in (
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "same-origin", "origin": "null"}, 303),
        ({"sec-fetch-site": "same-origin"}, 303),
        ({"origin": f"http://127.0.0.1:{lab.port}"}, 303),
        ({}, 303),
    ):
        for path in ("login", "logout"):
            answer = await lab.http.post(f"/ui/{path}", data={"key": ADMIN}, headers=headers)
            assert answer.status_code == status, (path, headers)


async def test_pages_are_only_read(lab: Lab) -> None:
    await log_in(lab)
    for method in ("POST", "PUT", "DELETE"):
        assert (await lab.http.request(method, "/ui/sessions")).status_code == 400, method
    head = await lab.http.head("/ui/sessions")
    assert (head.status_code, head.content) == (200, b"")


async def test_a_revoked_key_is_out_at_once(lab: Lab) -> None:
    path = trial_dir(lab.config).keys
    key = create_key(path, "admin")[0]
    assert (await log_in(lab, key)).status_code == 303
    assert (await lab.get("/ui/sessions")).status_code == 200
    revoke_key(path, key_id(key) or "")

    async def refused() -> bool:
        return (await lab.get("/ui/sessions")).status_code == 401

    await until(refused)


async def test_a_tenant_sees_its_sessions_alone(lab: Lab) -> None:
    key = create_key(trial_dir(lab.config).keys, "tenant", tenant="alice")[0]
    assert (await log_in(lab, key)).status_code == 303
    answer = await lab.get("/ui")
    assert (answer.status_code, answer.headers["location"]) == (303, "/ui/sessions")
    shown = await lab.get("/ui/sessions")
    assert shown.status_code == 200 and "/ui/training" not in shown.text
    assert 'name="tenant"' not in shown.text
    assert (await lab.get("/ui/training")).status_code == 403
    # The rank judges each read by the tenant's own key.
    assert keys_sent(lab) == {f"Bearer {key}"}


async def test_keys_of_trainers_and_sessions_do_not_open_the_dashboard(lab: Lab) -> None:
    trainers = create_key(trial_dir(lab.config).keys, "trainer")[0]
    for scope, key in (("trainer", trainers), ("session", lab.key(0))):
        answer = await log_in(lab, key)
        assert answer.status_code == 403 and "set-cookie" not in answer.headers
        assert f"a key of scope {scope}" in answer.text


async def test_pages_are_safe_in_a_browser(lab: Lab) -> None:
    await log_in(lab)
    for page in (*PAGES, "/groups?group_id=x", "/none", "/static/live.js", "/login"):
        answer = await lab.get(f"/ui{page}")
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "frame-ancestors 'none'" in policy and "form-action 'self'" in policy
        if "html" in answer.headers["content-type"]:
            assert answer.headers["cache-control"] == "no-store"
            assert EVIL not in answer.text
            # Inline styles, handlers and scripts would not work, either.
            assert not re.search(
                r"<style|\sstyle=|\son\w+=|<script(?! type=\"module\" src=)", answer.text
            )


async def test_what_agents_wrote_stays_text(lab: Lab) -> None:
    await log_in(lab)
    escaped = "&lt;script&gt;alert(1)&lt;/script&gt;"
    assert (await lab.get("/ui/sessions")).text.count(escaped) >= 4
    shown = (await lab.get(f"/ui/sessions/{IDS[0]}")).text
    assert shown.count(escaped) >= 6
    assert "\u202eright to left" in shown and 'dir="auto"' in shown
    assert (await lab.get("/ui/groups?group_id=x")).text.count(escaped) >= 4
    unknown = await lab.get(f"/ui/sessions/{IDS[0][:-1]}x")
    assert unknown.status_code == 404 and EVIL not in unknown.text
    tokens = await lab.get(f"/ui/sessions/{IDS[0]}/tokens/chatcmpl-1")
    assert tokens.headers["content-type"] == "application/json"
    assert tokens.json()["texts"] == [EVIL]


async def test_lists_of_sessions_lead_to_each_other_and_the_newest_is_renewed(lab: Lab) -> None:
    await log_in(lab)
    answer = await lab.get("/ui/groups")
    assert (answer.status_code, answer.headers["location"]) == (303, "/ui/sessions")
    assert 'data-live="5"' in (await lab.get("/ui/sessions")).text
    assert "data-live" not in (await lab.get("/ui/sessions?after=0:1")).text


async def test_filters_reach_the_ranks_and_their_refusal_is_shown(lab: Lab) -> None:
    await log_in(lab)
    query = "state=open&task_id=a%20b&group_id=&min_reward=0.5&unknown=1&after="
    assert (await lab.get(f"/ui/sessions?{query}")).status_code == 200
    target = lab.ranks[0].received[-1].target
    assert target == "/rl/v1/sessions?state=open&task_id=a+b&min_reward=0.5&limit=50"
    before = time.time()
    answer = await lab.get("/ui/sessions?reason=timed+out&lately=hour")
    asked = parse_qs(lab.ranks[0].received[-1].target.partition("?")[2])
    assert asked["reason"] == ["timed out"]
    assert 0 <= float(asked["created_after"][0]) - (before - 3600) < 60
    assert "<option selected>hour" in answer.text
    assert 'name="reason" value="timed out"' in answer.text
    await lab.get("/ui/sessions?lately=1e9")
    assert "created_after" not in lab.ranks[0].received[-1].target
    answer = await lab.get("/ui/sessions?min_reward=x")
    assert answer.status_code == 400 and "min_reward must be a number" in answer.text
    assert 'name="min_reward" value="x"' in answer.text


async def test_the_overview_says_how_many_steps_there_will_be(start_lab: StartLab) -> None:
    lab = await start_lab(KEYS, "train.steps=37")
    lab.ranks[0].handler = rank
    await log_in(lab)
    text = re.sub("<[^>]*>", "", (await lab.get("/ui")).text)
    assert "– / 37" in text and "Training has ended" not in text


async def test_a_session_shows_who_rewarded_which_call(lab: Lab) -> None:
    given = [
        {"interaction_id": "chatcmpl-1", "name": None, "value": 0.3, "by": "session", "at": 1e9},
        {"interaction_id": "chatcmpl-99", "name": "style", "value": 0.5, "by": "judge", "at": 1e9},
        {"interaction_id": None, "name": None, "value": 1.0, "by": "acme", "at": 1e9},
        {"interaction_id": None, "name": "feedback", "value": None, "by": "u", "at": 1e9}
        | {"text": "You are <b>rude</b>."},
    ]

    async def handler(received: Received) -> None:
        if received.target == f"/rl/v1/sessions/{IDS[0]}":
            await received.answer(session(reward_history=given, reason="zero_variance"))
        else:
            await rank(received)

    lab.ranks[0].handler = handler
    await log_in(lab)
    page = (await lab.get(f"/ui/sessions/{IDS[0]}")).text
    table = re.search(r'<table id="rewards">(.*?)</table>', page, re.DOTALL)
    assert table is not None
    cells = [re.sub("<[^>]*>", " ", row).split() for row in table[1].split("<tr>")[2:]]
    assert [row[:5] for row in cells] == [
        ["call", "1", "–", "0.3", "session"],
        ["a", "call", "not", "shown", "here"],
        ["the", "whole", "session", "–", "1"],
        ["the", "whole", "session", "feedback", "–"],
    ]
    assert "You are &lt;b&gt;rude&lt;/b&gt;." in table[1]
    assert 'href="#call-1">call 1' in table[1] and "judge" in table[1] and "acme" in table[1]
    assert "its group scored alike" in page


async def test_a_rank_that_is_away_is_named(start_lab: StartLab) -> None:
    lab = await start_lab(KEYS, ranks=2)
    lab.handle(rank)
    await log_in(lab)
    await lab.ranks[1].kill()
    lab.router.ranks.mark_failed(1)
    assert "Rank 1 does not answer" in (await lab.get("/ui/sessions")).text
    assert "Rank 1 does not answer" in (await lab.get("/ui")).text
    await lab.ranks[0].kill()
    lab.router.ranks.mark_failed(0)
    answer = await lab.get(f"/ui/sessions/{IDS[0]}")
    assert answer.status_code == 503 and "rank 0" in answer.text
    assert (await lab.get("/ui/sessions")).status_code == 503
    assert (await lab.get("/ui")).status_code == 200
    assert (await lab.get("/ui/training")).status_code == 200


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        (f"sessions/{IDS[0][:-1]}x", 404, "there is no session"),
        ("sessions/nope", 404, "there is no session nope"),
        ("sessions/sk-abc", 404, "there is no session sk-abc"),
        ("sessions/ses-9-0123456789abcdef", 404, "one of rank 9"),
        ("sessions/%ff%00%ed%a0%80", 404, "there is no session"),
        (f"sessions/{'x' * 4000}", 404, "there is no session"),
        (f"sessions/{IDS[0]}?start=-1", 400, "start must be a whole number"),
        (f"sessions/{IDS[0]}?start=99999999999", 400, "start must be a whole number"),
        (f"sessions/{IDS[0]}/more", 404, "no such page"),
        ("static/none.css", 404, "no such file"),
        ("service?log=none", 404, "no log of none"),
        ("service?log=../secret", 404, "no such log"),
        ("tasks?order=none", 200, EVIL),
        ("training?with=../../other", 200, "No step has been made"),
        ("sessions?task_id=%ff%00&lately=none&after=", 200, EVIL),
        (f"sessions?{'&'.join(f'a{k}=1' for k in range(17))}", 400, "the query cannot be read"),
    ],
)
async def test_an_address_that_leads_nowhere_is_answered_in_words(
    lab: Lab, path: str, status: int, words: str
) -> None:
    await log_in(lab)
    answer = await lab.get(f"/ui/{path}")
    assert answer.status_code == status and html.escape(words) in answer.text
    assert 'aria-label="Pages"' in answer.text, "it leads on"


async def test_tokens_of_a_login_that_has_ended_are_refused_in_json(lab: Lab) -> None:
    answer = await lab.get(f"/ui/sessions/{IDS[0]}/tokens/chatcmpl-1")
    assert answer.status_code == 401 and "your login has ended" in answer.json()["error"]


async def test_a_rank_that_gives_no_figures_is_named_beside_the_counts(
    start_lab: StartLab,
) -> None:
    lab = await start_lab(ranks=2)
    counts = b'any_agent_sessions{mode="train",state="open"} 3\n'
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {CONTENT_TYPE}\r\ncontent-length: {len(counts)}"
    lab.ranks[0].handler = sends(f"{head}\r\n\r\n".encode() + counts)
    lab.ranks[1].handler = says(status=500)
    shown = (await lab.get("/ui")).text
    assert "Rank 1 gave no figures" in shown and 'data-state="train open">3' in shown


@pytest.mark.parametrize(
    ("off", "age", "words"), [(7210, "in 2.0 h", "ahead of"), (-7210, "2.0 h ago", "behind")]
)
async def test_a_rank_whose_clock_is_off_is_named_with_the_difference(
    start_lab: StartLab, off: int, age: str, words: str
) -> None:
    lab = await start_lab()

    async def early(received: Received) -> None:
        now = time.time() + off
        headers = {"date": formatdate(now, usegmt=True)}
        listed = received.target.startswith("/rl/v1/sessions")
        await received.answer([session(created_at=now)] if listed else {}, headers=headers)

    lab.ranks[0].handler = early
    assert age in (await lab.get("/ui/sessions")).text
    alarm = f"The clock of rank 0 is 120 minutes {words} the router"
    assert alarm in (await lab.get("/ui")).text


async def test_what_left_the_journal_is_called_archived_and_not_none(lab: Lab) -> None:
    gone = session(content="archived", interactions=0, reward=None, reward_history=[])

    async def archived(received: Received) -> None:
        if "/interactions" in received.target:
            error = {"message": "its content is archived", "code": "content_not_stored"}
            return await received.answer({"error": error}, status=409)
        await received.answer([gone] if received.target.count("/") == 3 else gone)

    lab.ranks[0].handler = archived
    await log_in(lab)
    one = (await lab.get(f"/ui/sessions/{IDS[0]}")).text
    assert "<dt>calls</dt><dd>archived</dd>" in one
    group = (await lab.get("/ui/groups?group_id=x")).text
    assert "<dt>reward</dt><dd>archived</dd>" in group
    assert "The rewards of 1 of its sessions" in group
    assert "The rewards of 1 of these sessions" in (await lab.get("/ui/tasks")).text


async def test_calls_that_cannot_be_read_leave_the_rest_of_the_page(lab: Lab) -> None:
    async def archived(received: Received) -> None:
        if received.target.partition("?")[0].endswith("/interactions"):
            error = {"message": "its content is archived", "code": "content_not_stored"}
            return await received.answer({"error": error}, status=409)
        await received.answer(session(content="archived", reward_history=[]))

    lab.ranks[0].handler = archived
    await log_in(lab)
    answer = await lab.get(f"/ui/sessions/{IDS[0]}")
    assert answer.status_code == 200
    assert "its content is archived" in answer.text and "finalized" in answer.text


async def test_what_the_browser_has_is_not_sent_again(lab: Lab) -> None:
    first = await lab.get("/ui/static/style.css")
    again = await lab.get("/ui/static/style.css", **{"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert "immutable" not in again.headers["cache-control"]
    # A page names the content, of which a browser need not ask whether it is still the same.
    (named,) = re.findall(r'href="(/ui/static/style[^"]+)"', (await lab.get("/ui/login")).text)
    kept = await lab.get(named)
    assert kept.content == first.content and "immutable" in kept.headers["cache-control"]
    assert "immutable" not in (await lab.get(f"{named}0")).headers["cache-control"]
    assert (await lab.get("/ui/static/../app.py")).status_code in (401, 404)


async def test_without_keys_the_dashboard_is_open_on_loopback_alone(start_lab: StartLab) -> None:
    lab = await start_lab()
    lab.ranks[0].handler = rank
    assert (await lab.get("/ui")).status_code == 200
    assert "Log out" not in (await lab.get("/ui/sessions")).text
    assert (await lab.get("/ui", **{"sec-fetch-site": "cross-site"})).status_code == 403
    assert (await lab.get("/ui", host="evil.example")).status_code == 403


async def test_a_dashboard_that_is_switched_off_leaves_its_path_to_the_ranks(
    start_lab: StartLab,
) -> None:
    lab = await start_lab("server.ui=false")

    lab.ranks[0].handler = says({"whose": "the rank's"}, status=404)
    for path in ("/ui", "/ui/", "/ui/login", "/ui/sessions"):
        answer = await lab.get(path)
        assert (answer.status_code, answer.json()) == (404, {"whose": "the rank's"})
