"""The page at `/`, for people who meet the service's URL."""

from __future__ import annotations

from aiohttp import hdrs, web
from multidict import CIMultiDict

from router.body import RequestBody
from router.client_response import ClientResponder

_TEXT = """\
any-agent runs here: agents call its model through an API like OpenAI's, and are trained.

Base URL for agents   {url}/v1     (OPENAI_BASE_URL; for Anthropic's SDK {url})
Sessions and rewards  {url}/rl/v1  (start_session, set_reward, finalize)
Is it well?           {url}/readyz
{dashboard}
Every route           {url}/openapi.json
Documents             docs/README.md of any-agent's sources; docs/how-to/troubleshoot.md when
                      something does not work
"""
_DASHBOARD = "Dashboard             {url}/ui, or any-agent status --url {url}"
_NO_DASHBOARD = "Overview              any-agent status --url {url}"


class FrontPage:
    """Answers `GET /`, also without a key: it says nothing about the run."""

    def __init__(self, public_url: str, replies: ClientResponder, *, pages: bool) -> None:
        """``pages``: the dashboard is there, and browsers are led to it."""
        self._replies = replies
        self._pages = pages
        url = public_url.rstrip("/")
        dashboard = (_DASHBOARD if pages else _NO_DASHBOARD).format(url=url)
        self._text = _TEXT.format(url=url, dashboard=dashboard).encode()

    async def show(self, request: web.BaseRequest, _: RequestBody) -> web.StreamResponse:
        # Programs, curl among them, do not ask for HTML.
        browser = "text/html" in request.headers.get(hdrs.ACCEPT, "")
        head = CIMultiDict({hdrs.CONTENT_TYPE: "text/plain; charset=utf-8", hdrs.VARY: hdrs.ACCEPT})
        status, body = 200, self._text
        if browser and self._pages:
            status, body = 303, b""
            head[hdrs.LOCATION] = "/ui"
        head[hdrs.CONTENT_LENGTH] = str(len(body))
        content = b"" if request.method == "HEAD" else body
        return await self._replies.send(request, status, head, content)
