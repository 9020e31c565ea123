"""`/openapi.json`: complete, true, and the same at every start."""

from __future__ import annotations

from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from any_agent.auth.access import Scope
from any_agent.completions.apis import error_format
from proxy_ext.api.model_routes import model_call_handlers
from proxy_ext.web.permissions import RULES
from tests.support.proxy import Proxy, our_app
from tests.support.proxy_fixtures import Start

UNDESCRIBED = {
    # The same as those under /v1.
    *((method, path) for method, path in RULES if (method, f"/v1{path}") in RULES),
    ("GET", "/openapi.json"),
    ("HEAD", "/openapi.json"),
}
MODEL_CALLS = {("POST", f"/v1{path}") for path in model_call_handlers()}
COUNT = ("POST", "/v1/messages/count_tokens")
HEARTBEAT = "/rl/v1/sessions/{session_id}/heartbeat"


SCHEMA: dict[str, Any] = our_app().openapi()
OPERATIONS = {
    (method.upper(), path): operation
    for path, methods in SCHEMA["paths"].items()
    for method, operation in methods.items()
}


def test_every_route_is_described() -> None:
    assert OPERATIONS.keys() == RULES.keys() - UNDESCRIBED
    assert our_app().openapi() == SCHEMA, "it is the same every time"


@pytest.mark.parametrize("route", OPERATIONS, ids=" ".join)
def test_a_route_says_what_it_takes_and_answers(route: tuple[str, str]) -> None:
    operation, scopes = OPERATIONS[route], RULES[route].scopes
    responses = operation["responses"]
    assert "200" in responses
    expected = {"400", "413", "415", "502", "503"}
    if Scope.NONE not in scopes:
        expected |= {"401", "403"}
        assert operation["security"] == [{"bearer": []}, {"x_api_key": []}, {"api_key": []}]
    if "{session_id}" in route[1]:
        expected |= {"404"}
    if route[0] != "GET" and route != COUNT:
        # Whatever changes something is written, and a disk may be full.
        expected |= {"409", "507"}
    if "start_session" in route[1] or route in MODEL_CALLS:
        expected |= {"429"}
    if route[1] in ("/grant_capacity", HEARTBEAT):
        expected -= {"409"}
    missing = expected - responses.keys()
    assert not missing
    for status, response in responses.items():
        assert len(response["description"]) > 5
        if status >= "400":
            error = {"$ref": f"#/components/schemas/{error_format(route[1]).schema}"}
            assert response["content"] == {"application/json": {"schema": error}}
        if status in ("429", "503", "507"):
            assert "Retry-After" in response["headers"]
    assert operation["tags"]
    assert operation.get("description") or operation.get("summary")
    # Whatever is JSON has a schema that says more than that.
    for body in (operation.get("requestBody", {"content": {}}), responses["200"]):
        for kind, content in body["content"].items():
            assert kind != "application/json" or content["schema"], kind


def test_the_examples_of_the_description_fit_their_schemas() -> None:
    schemas = SCHEMA["components"]["schemas"]
    shown = {name for name, schema in schemas.items() if "examples" in schema}
    assert {"StartSession", "SetReward", "Finalize", "ArealStart", "Error"} <= shown
    for name in shown:
        for example in schemas[name]["examples"]:
            whole = {**schemas[name], "components": SCHEMA["components"]}
            jsonschema.validate(example, whole)


@pytest.mark.parametrize("settings", [(), ("server.admin_key=operator-secret",)])
async def test_the_openapi_description_is_served_without_a_key(
    start: Start, settings: tuple[str, ...]
) -> None:
    proxy = await start(*settings)
    proxy.http.headers.pop("authorization", None)
    assert (await proxy.http.get("/openapi.json")).json() == SCHEMA


async def test_a_wrong_method_is_refused_with_the_allowed_ones(proxy: Proxy) -> None:
    response = await proxy.http.put("/rl/v1/finalize")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    error = response.json()["error"]
    assert error["code"] == "method_not_allowed" and "POST" in error["message"]
    several = await proxy.http.patch("/rl/v1/run")
    assert several.status_code == 405 and several.headers["allow"] == "GET, PUT"
    assert "GET, PUT" in several.json()["error"]["message"]
