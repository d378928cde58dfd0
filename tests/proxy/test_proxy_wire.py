"""Cutting a client's JSON into the legs' bodies without writing it again (pure)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from proxy_fakes import chat, image, text

from epd_conformance.proxy import wire
from epd_conformance.proxy.media import extract_items, primer_body, replace_parts
from epd_conformance.proxy.stages import prefill_body
from epd_conformance.proxy.wire import Wire

BIG = "x" * wire.WALKED_FROM_BYTES

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8
)
parts = st.one_of(
    values,
    st.builds(lambda name, extra: {"type": "image_url", "image_url": {"url": name}, **extra}, st.text(), st.just({})),
)
messages = st.lists(
    st.one_of(values, st.fixed_dictionaries({"role": st.text(), "content": st.lists(parts, max_size=3)})), max_size=3
)
requests = st.builds(
    lambda fields, found, pad: {**fields, "messages": found, pad: BIG},
    st.dictionaries(st.text(), values, max_size=4),
    messages,
    st.text(),
)


@given(requests, st.booleans(), st.sampled_from([None, 0, 1]))
@settings(max_examples=150, deadline=None)
def test_a_body_is_what_json_makes_of_it_and_changes_are_what_is_written(
    body: dict[str, Any], ascii_only: bool, indent: int | None
) -> None:
    try:
        raw = json.dumps(body, ensure_ascii=ascii_only, indent=indent).encode()
    except UnicodeEncodeError:
        raw = json.dumps(body).encode()
    cut = Wire(raw)
    expected = json.loads(raw)
    assert cut.body == expected
    assert cut.dumps(cut.body) is raw
    changed = {"first": {"new": [1]}, **cut.body, "messages": [*cut.body["messages"], {"role": "é", "content": []}]}
    assert json.loads(cut.dumps(changed)) == changed
    shorter = {key: value for key, value in cut.body.items() if key != "messages"}
    assert json.loads(cut.dumps(shorter)) == shorter


@given(st.binary(max_size=40), st.integers(0, 60))
@settings(max_examples=200, deadline=None)
def test_damaged_bodies_fail_as_json_does(junk: bytes, where: int) -> None:
    good = json.dumps({"messages": [{"content": [image(BIG)]}], "n": 1.5}).encode()
    for raw in (good[:where] + junk + good[where:], good[: -where or None], good + junk):
        try:
            expected: Any = json.loads(raw)
        except ValueError as error:
            with pytest.raises(type(error)):
                Wire(raw)
        else:
            assert Wire(raw).body == expected


def test_the_clients_text_is_copied_not_written_again() -> None:
    part = '{"image_url" :{"url":"data:BIG"}, "type":"image_url","detail":1.50,"é":"\\u00e9"}'.replace("BIG", BIG)
    raw = f' {{"messages":[ {{"content":[{part}],"role":"user"}}] ,"temperature" : 0.70}} '.encode()
    cut = Wire(raw)
    (item,) = extract_items(cut.body)
    primer = cut.dumps(primer_body(cut.body, item))
    assert part.encode() in primer
    assert b'"temperature"' not in primer
    assert b'"temperature":0.70' in cut.dumps(prefill_body(cut.body))


def test_a_replaced_part_is_written_and_its_neighbours_are_copied() -> None:
    body = chat(image("a", size=1.50), image(BIG), text("x"))
    raw = json.dumps(body).replace("1.5", "1.50").encode()
    cut = Wire(raw)
    changed = replace_parts(cut.body, {(0, 1): image("new")})
    out = cut.dumps(changed)
    assert json.loads(out) == chat(image("a", size=1.50), image("new"), text("x"))
    assert b"1.50" in out
    assert BIG.encode() not in out


@pytest.mark.parametrize("again", ['"messages":[]', '"messages":[{"content":[{"a":1}]}]'])
def test_of_two_members_of_one_name_the_last_counts(again: str) -> None:
    raw = f'{{"messages":[{{"content":[{{"t":"{BIG}"}}]}}],{again}}}'.encode()
    cut = Wire(raw)
    assert cut.body == json.loads(raw)
    for number in range(50):
        # New objects could get the addresses of the first ones, which are gone.
        fresh = {**cut.body, "messages": [{"content": [{"number": number}]} for _ in range(20)]}
        assert json.loads(cut.dumps(fresh)) == fresh


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
def test_other_encodings_are_read_as_json_reads_them(encoding: str) -> None:
    body = chat(image(BIG + "é"))
    cut = Wire(json.dumps(body, ensure_ascii=False).encode(encoding))
    assert cut.body == body
    assert json.loads(cut.dumps(prefill_body(cut.body))) == prefill_body(body)


@pytest.mark.parametrize("raw", [b"[" * 100_000, b'{"messages":' + b"[" * 100_000, b'{"a":' * 100_000])
def test_nesting_ends_in_the_error_that_json_gives(raw: bytes) -> None:
    with pytest.raises(RecursionError):
        Wire(raw)
