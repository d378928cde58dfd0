"""Reading what a server answered: ids, log-probabilities, margins, and what is no answer at all."""

from __future__ import annotations

import json
from typing import Any

import pytest

from epd_conformance.oracle.answers import NO_IDS, Answer, from_completion, read_logprobs


def completion(**changes: Any) -> dict[str, Any]:
    choice = {
        "token_ids": [5, 6],
        "finish_reason": "length",
        "logprobs": {
            "content": [
                {"logprob": -0.5, "top_logprobs": [{"logprob": -0.5}, {"logprob": -2.0}]},
                {"logprob": -1.0, "top_logprobs": [{"logprob": -1.0}, {"logprob": -1.25}]},
            ]
        },
    }
    return {"prompt_token_ids": [1, 2, 3], "choices": [choice | changes]}


def test_a_completion_is_read_whole() -> None:
    answer = from_completion("label", "rid", completion())
    assert answer == Answer("label", "rid", 200, (1, 2, 3), (5, 6), (-0.5, -1.0), (1.5, 0.25), "length")
    assert answer.error is None


def test_missing_ids_are_no_answer_to_compare() -> None:
    body = completion()
    del body["choices"][0]["token_ids"]
    assert from_completion("l", "r", body).error == NO_IDS
    body = completion()
    del body["prompt_token_ids"]
    assert from_completion("l", "r", body).error == NO_IDS


def test_an_empty_list_of_ids_is_an_answer() -> None:
    """It differs from what a baseline says, where a missing list would only be unknown."""
    answer = from_completion("l", "r", completion(token_ids=[], logprobs=None))
    assert (answer.error, answer.ids, answer.logprobs) == (None, (), ())


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        {},
        "text",
        {"choices": []},
        {"choices": [1]},
        {"choices": [{}, {}]},
        completion(token_ids="56"),
        completion(token_ids=[5.0]),
        completion(token_ids=[True]),
        completion(logprobs=7),
        completion(logprobs={"content": [{"top_logprobs": []}]}),
        completion(logprobs={"content": [{"logprob": "much"}]}),
    ],
)
def test_what_is_no_completion_is_refused(body: Any) -> None:
    with pytest.raises(ValueError):
        from_completion("l", "r", body)


def test_margins_are_between_the_two_best_whatever_their_order() -> None:
    content: list[dict[str, Any]] = [
        {"logprob": -2.0, "top_logprobs": [{"logprob": -2.0}, {"logprob": -0.5}]},
        {"logprob": -1.0, "top_logprobs": [{"logprob": -1.0}]},
        {"logprob": -1.0},
    ]
    assert read_logprobs(content) == ((-2.0, -1.0, -1.0), (1.5, 0.0, 0.0))
    assert read_logprobs(None) == ((), ())


def test_an_answer_survives_json() -> None:
    for answer in (
        from_completion("l", "r", completion()),
        Answer("l", "r", 0, error="ConnectionError"),
        Answer("", "", 404, body="{}"),
    ):
        assert Answer.from_json(json.loads(json.dumps(answer.to_json()))) == answer
