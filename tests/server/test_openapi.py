"""schemathesis on the OpenAPI document: valid and invalid requests."""

import hypothesis.strategies as st
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS

from server.conftest import running

pytestmark = pytest.mark.slow

# Some limits cannot be expressed in a schema (a prompt's length in tokens): the server responds with 400 and names
# them. Strings and booleans are accepted as numbers ("16", true), as in vLLM.
EXCLUDED = ("positive_data_acceptance", "negative_data_rejection")


@pytest.fixture(scope="module")
def small_server():
    with running(max_model_len=64, num_kv_blocks=64, max_num_seqs=8) as server:
        yield server
        server.wait_until_idle()


@pytest.fixture(scope="module")
def document(small_server):
    return schemathesis.openapi.from_url(small_server.url + "/openapi.json")


def test_responses_conform_to_the_document(document):
    operations = [result.ok() for result in document.get_all_operations()]
    assert {operation.path for operation in operations} >= {"/v1/chat/completions", "/v1/completions", "/tokenize"}
    excluded = [CHECKS.get_one(name) for name in EXCLUDED]
    for operation in operations:
        if operation.path == "/scheduler/steps":  # a stream without an end
            continue
        takes_a_body = operation.method == "post"
        modes = GenerationMode if takes_a_body else [GenerationMode.POSITIVE]

        @settings(
            max_examples=40 if takes_a_body else 3, deadline=None, derandomize=True, database=None,
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in modes)))
        def check(case):
            case.call_and_validate(timeout=300, excluded_checks=excluded)

        check()
