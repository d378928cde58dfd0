"""What prefill and decode servers are sent (pure)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from proxy_fakes import chat, image

from epd_conformance.proxy.stages import PREFILL_DROPS, decode_body, prefill_body

HANDOVER = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def test_prefill_overrides_its_fields_and_nothing_else() -> None:
    body = chat(
        image("a", uuid="u"),
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=50,
        max_completion_tokens=60,
        n=4,
        min_tokens=8,
        kv_transfer_params={"mine": 1},
        logprobs=True,
        top_logprobs=5,
        prompt_logprobs=1,
        logprob_token_ids=[1],
        echo=True,
        use_beam_search=True,
        response_format={"type": "json_object"},
        tool_choice="auto",
        tools=[{"type": "function"}],
        odd=[1, {"x": None}],
    )
    before = copy.deepcopy(body)
    expected = {key: value for key, value in body.items() if key not in PREFILL_DROPS} | {
        "stream": False,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "n": 1,
        "min_tokens": 1,
        "kv_transfer_params": HANDOVER,
    }
    assert prefill_body(body) == expected
    assert body == before


def test_prefill_adds_no_field_that_the_client_left_out() -> None:
    body = chat("hi")
    assert prefill_body(body) == {
        **body,
        "stream": False,
        "max_tokens": 1,
        "kv_transfer_params": HANDOVER,
    }


@pytest.mark.parametrize("value", [0, 1, None, "3"])
def test_prefill_leaves_min_tokens_that_vllm_would_take_or_refuse_itself(value: Any) -> None:
    assert prefill_body(chat("hi", min_tokens=value))["min_tokens"] == value


@pytest.mark.parametrize("answer", [None, {}, {"kv_transfer_params": None}])
def test_decode_body_is_the_clients_where_nothing_was_handed_over(answer: dict[str, Any] | None) -> None:
    body = chat(image("a"), kv_transfer_params={"mine": 1}, odd=1)
    assert decode_body(body, answer) == body


def test_decode_body_carries_what_prefill_handed_over() -> None:
    body = chat(image("a"), kv_transfer_params={"mine": 1}, odd=1)
    before = copy.deepcopy(body)
    params = {"remote_block_ids": [1, 2], "do_remote_prefill": True}
    assert decode_body(body, {"kv_transfer_params": params, "choices": []}) == {
        **before,
        "kv_transfer_params": params,
    }
    assert body == before
