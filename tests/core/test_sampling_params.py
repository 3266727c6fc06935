"""Limits and types of sampling parameters; each error gives the field, the value and the limit."""

import pytest

from treadle import SamplingParams
from treadle.core.errors import InvalidRequestError
from treadle.core.request import Request
from treadle.core.sampling_params import (
    FLAGS,
    MAX_LOGIT_BIAS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)


@pytest.mark.parametrize(
    ("field", "largest", "too_large", "message"),
    [
        ("stop", ["a"] * MAX_STOP_STRINGS, ["a"] * 10**6, "at most 64 entries, got 1000000"),
        ("stop", "a" * MAX_STOP_CHARS, "a" * 1025, "1024 characters, got 1025"),
        ("stop_token_ids", [1] * MAX_STOP_TOKEN_IDS, [1] * 3_000_000, "at most 1024 entries, got 3000000"),
        ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0), dict.fromkeys(range(49152), 1.0), "at most 1024"),
        ("seed", 2**64 - 1, 2**64, "between"),
        ("seed", -(2**63), -(2**63) - 1, "between"),
    ],
)
def test_limits_are_checked(field, largest, too_large, message):
    SamplingParams(**{field: largest})
    with pytest.raises(InvalidRequestError, match=message) as caught:
        SamplingParams(**{field: too_large})
    assert caught.value.field == field
    assert len(str(caught.value)) < 200


def test_at_most_vocab_size_allowed_token_ids():
    SamplingParams(allowed_token_ids=[3] * 50).check_token_ids(50)
    with pytest.raises(InvalidRequestError, match="allowed_token_ids: must have at most 50 entries, got 51"):
        SamplingParams(allowed_token_ids=[3] * 51).check_token_ids(50)


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids"])
@pytest.mark.parametrize("value", [5, "5", b"5", {5: 1}, 1.5, True, object()])
def test_invalid_token_id_lists_are_refused(field, value):
    with pytest.raises(InvalidRequestError, match=f"^{field}: must be a list of token ids"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("value", [(5, 6), {5}, frozenset({5}), range(5, 7)])
def test_any_collection_of_token_ids_is_accepted(value):
    SamplingParams(stop_token_ids=value, allowed_token_ids=value).check_token_ids(10)


@pytest.mark.parametrize("field", FLAGS)
@pytest.mark.parametrize("value", [None, 1, "true"])
def test_flags_must_be_bools(field, value):
    with pytest.raises(InvalidRequestError, match=f"^{field}: must be True or False, got"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(("seed", "same"), [(-1, 2**64 - 1), (-(2**63), 2**63), (0, 0), (7, 7)])
def test_negative_seeds_are_accepted(seed, same):
    assert Request("a", [1], SamplingParams(seed=seed)).seed == same
