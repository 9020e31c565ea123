"""``python -m proxy_ext`` that first writes down which routes LiteLLM's app has:
``python -m tests.support.chaos.listing_proxy FILE --config ...``.
"""

from __future__ import annotations

import json
import sys

from fastapi.routing import iter_route_contexts

from proxy_ext import litellm_shim
from proxy_ext.__main__ import main


def routes_of_litellm() -> list[tuple[str, str]]:
    """Method and path template; what is mounted, or no HTTP, is asked for by GET."""
    routes = iter_route_contexts(list(litellm_shim.load_app().routes))
    return [
        (method, str(route.path) + ("" if route.methods else "/x"))
        for route in routes
        for method in sorted(route.methods or {"GET"})
    ]


if __name__ == "__main__":
    with open(sys.argv.pop(1), "w", encoding="utf-8") as file:
        json.dump(routes_of_litellm(), file)
    sys.exit(main())
