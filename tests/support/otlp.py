"""A collector of traces: the HTTP of OTLP, in protobuf."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """Takes spans at any path, or answers with 503 while it is ill."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.paths: list[str] = []
        """The path that each span came to."""
        self.resources: list[dict[str, Any]] = []
        self.ill = False
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                self.send_response(503 if collector.ill else 200)
                self.send_header("content-length", "0")
                self.end_headers()
                if not collector.ill:
                    collector.take(self.path, body)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def take(self, path: str, body: bytes) -> None:
        plain = gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body
        for resource in ExportTraceServiceRequest.FromString(plain).resource_spans:
            self.resources.append(values(resource.resource.attributes))
            for scope in resource.scope_spans:
                self.spans += scope.spans
                self.paths += [path] * len(scope.spans)


def values(attributes: Any) -> dict[str, Any]:
    out = {}
    for each in attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind or "string_value")
        out[each.key] = [v.string_value for v in value.values] if kind == "array_value" else value
    return out


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    threading.Thread(target=made.server.serve_forever, daemon=True).start()
    yield made
    made.server.shutdown()
    made.server.server_close()
