"""Write `proxy_ext/web/litellm_routes.txt` from the installed LiteLLM: ``python
tools/docs/litellm_routes.py``. Routes that the file has keep their scope; new ones are admin's."""

from __future__ import annotations

import importlib
import os
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

TABLE = Path(__file__).resolve().parents[2] / "proxy_ext" / "web" / "litellm_routes.txt"


def installed() -> set[tuple[str, str]]:
    """Return every method and path template of LiteLLM's app, parts that it loads late included."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    os.environ.setdefault("LITELLM_MASTER_KEY", "sk-not-used-for-anything-at-all-here")
    from fastapi.routing import iter_route_contexts
    from litellm.proxy import proxy_server

    app = proxy_server.app
    for middleware in app.user_middleware:
        for feature in middleware.kwargs.get("features", ()):
            feature.register_fn(app, importlib.import_module(feature.module_path))
    found: set[tuple[str, str]] = set()
    for route in iter_route_contexts(list(app.routes)):
        path = re.sub(r"/+$", "", str(route.path)) or "/"
        methods: Any = getattr(route, "methods", None)
        if methods:
            found |= {(method, path) for method in methods}
        elif "realtime" not in path and not path.endswith("/live"):
            # A mounted app: what lies below it.
            found |= {("GET", path), ("GET", path + "/{path:path}")}
    return found


def to_list() -> set[tuple[str, str]]:
    """Return the routes that belong in the table: all whose paths are not all our own."""
    from proxy_ext.web.permissions import template_of

    def is_ours(path: str) -> bool:
        # We answer every method of a path that one of our templates fits.
        return ":path}" not in path and template_of(re.sub(r"\{[^}]*\}", "x", path)) is not None

    listed = (each for each in installed() if each[0] not in ("OPTIONS", "HEAD"))
    return {(method, path) for method, path in listed if not is_ours(path)}


def main() -> None:
    from proxy_ext.web.permissions import LiteLLMRoutes

    known = LiteLLMRoutes().rules
    lines: dict[tuple[str, str], list[str]] = defaultdict(list)
    for method, path in sorted(to_list()):
        lines[path, known.get((method, path), "admin")].append(method)
    text = "".join(f"{s:<10}{','.join(m):<28}{p}\n" for (p, s), m in sorted(lines.items()))
    TABLE.write_text(text)


if __name__ == "__main__":
    main()
