"""Secrets go, and the many tokens of this suite stay."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_conformance.report.redact import REDACTED, looks_secret, redact

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize(
    "key",
    [
        "token",
        "HF_TOKEN",
        "hfToken",
        "auth-token",
        "password",
        "dbPassword",
        "API_KEY",
        "apiKey",
        "api-key",
        "Authorization",
        "client_secret",
        "AWS_SECRET_ACCESS_KEY",
        "private_key",
        "credentials",
        "Cookie",
    ],
)
def test_secret_keys(key: str) -> None:
    assert looks_secret(key)
    assert redact({"a": [{key: "xyzzy"}]}) == {"a": [{key: REDACTED}]}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kvTokens", 64),
        ("kv_tokens_expected", 64),
        ("max_tokens", 1),
        ("tokenIds", [1, 2]),
        ("eos_token_id", 2),
        ("image_token", 151655),
        ("tokenizer", "tiny"),
        ("key", "sha256:abc"),
        ("mm_hash", "abc"),
        ("monkey", "banana"),
    ],
)
def test_other_keys_stay(key: str, value: Any) -> None:
    assert redact({key: value}) == {key: value}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (["--api-key", "xyzzy", "--port", "1"], ["--api-key", REDACTED, "--port", "1"]),
        (["--api-key", "--port", "1"], ["--api-key", "--port", "1"]),
        (["--api-key=xyzzy"], [f"--api-key={REDACTED}"]),
        (["--max-num-batched-tokens", "4096"], ["--max-num-batched-tokens", "4096"]),
        ("HF_TOKEN=xyzzy", f"HF_TOKEN={REDACTED}"),
        ("redis://me:xyzzy@host:1/0", f"redis://{REDACTED}@host:1/0"),
        ("--store=redis://me:xyzzy@host", f"--store=redis://{REDACTED}@host"),
        ("authorization: Bearer xyzzyxyzzy", f"authorization: Bearer {REDACTED}"),
        ("GET http://h/x?a=1&access_token=xyzzy&b=2", f"GET http://h/x?a=1&access_token={REDACTED}&b=2"),
        ("run --api-key xyzzy --port 1", f"run --api-key {REDACTED} --port 1"),
        ("log: HF_TOKEN=xyzzy; PORT=1", f"log: HF_TOKEN={REDACTED}; PORT=1"),
        ('extra {"password": "xyzzy", "a": "b"}', f'extra {{"password": "{REDACTED}", "a": "b"}}'),
        ("stop_token=151655 max_tokens=8", "stop_token=151655 max_tokens=8"),
        ("epd-conformance run --seed 7 -k EPD-TOK-001", "epd-conformance run --seed 7 -k EPD-TOK-001"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1"),
        ("image <end> of sentence, a@b.c", "image <end> of sentence, a@b.c"),
        ({"password": None, "secret": ""}, {"password": None, "secret": ""}),
        ({"secret": {"a": 1}}, {"secret": REDACTED}),
    ],
)
def test_secrets_in_text_and_arguments(value: Any, expected: Any) -> None:
    assert redact(value) == expected


def test_json_in_a_string() -> None:
    config = '{"ec_connector": "X", "ec_connector_extra_config": {"api_key": "xyzzy"}}'
    clean = redact(["--ec-transfer-config", config])
    assert json.loads(clean[1])["ec_connector_extra_config"] == {"api_key": REDACTED}
    harmless = '{ "a" :  1 }'
    assert redact(harmless) == harmless, "what holds no secret keeps its spelling"


@pytest.mark.parametrize("piece", ["x", "a-", "a=", "a ", "--a ", "a://", "-", '"a":"', "Bearer ", "a.b@", "{", "["])
def test_long_text_takes_linear_time(piece: str) -> None:
    """Quadratic patterns would need minutes for this; a linear one needs milliseconds."""
    began = time.process_time()
    redact(piece * (300_000 // len(piece)))
    assert time.process_time() - began < 5


@given(json_values)
def test_is_idempotent_and_keeps_the_shape(value: Any) -> None:
    once = redact(value)
    assert redact(once) == once
    assert type(once) is type(value)
