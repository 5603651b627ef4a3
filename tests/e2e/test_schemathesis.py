"""Requests made up from the OpenAPI document, good and bad: never a 5xx, never undocumented."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.e2e.running_server import RunningServer

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
OPERATIONS = {
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "GET /v1/models",
    "GET /v1/models/{model_id}",
    "POST /tokenize",
    "POST /detokenize",
    "GET /health",
    "GET /ready",
    "GET /version",
    "GET /metrics",
}


@pytest.fixture(scope="module")
def api(server: RunningServer) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def test_every_operation_is_documented(api: schemathesis.BaseSchema) -> None:
    assert {found.ok().label for found in api.get_all_operations()} == OPERATIONS


GOOD, BAD = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
CASES = [(label, GOOD) for label in sorted(OPERATIONS)] + [
    (label, BAD) for label in sorted(OPERATIONS) if label.startswith("POST")
]


@pytest.mark.parametrize(("label", "mode"), CASES)
def test_the_api_keeps_to_its_document(
    api: schemathesis.BaseSchema,
    server: RunningServer,
    label: str,
    mode: schemathesis.GenerationMode,
) -> None:
    (operation,) = (found.ok() for found in api.get_all_operations() if found.ok().label == label)

    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        case.call_and_validate(checks=CHECKS, timeout=30)

    check()
    assert server.chat(max_tokens=1).status_code == 200
