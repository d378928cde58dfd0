"""Finding media and writing primers (pure)."""

from __future__ import annotations

import ast
import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from proxy_fakes import chat, image, text

from epd_conformance.proxy.media import KEYED_KINDS, MEDIA_KINDS, PRIMER_DROPS, extract_items, primer_body


def test_items_are_found_in_order_over_all_messages() -> None:
    body = {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [image("a"), text("x"), {"type": "input_audio", "input_audio": {}}]},
            {"role": "assistant", "content": None},
            {"role": "user", "content": ["plain", {"type": "video_url", "video_url": {"url": "v"}}]},
        ]
    }
    assert [(i.index, i.message, i.part, i.kind) for i in extract_items(body)] == [
        (0, 1, 0, "image_url"),
        (1, 1, 2, "input_audio"),
        (2, 3, 1, "video_url"),
    ]


@pytest.mark.parametrize("kind", sorted(MEDIA_KINDS))
def test_every_kind_is_found_by_its_type(kind: str) -> None:
    (item,) = extract_items(chat({"type": kind, kind: {}}))
    assert item.kind == kind


@pytest.mark.parametrize("kind", KEYED_KINDS)
def test_a_part_without_type_is_found_by_its_key(kind: str) -> None:
    assert [i.kind for i in extract_items(chat({kind: {"url": "x"}}))] == [kind]
    # A uuid makes vLLM look at the keys as well, whatever the type says; the value may then be null.
    assert [i.kind for i in extract_items(chat({"type": "odd", kind: None, "uuid": "u"}))] == [kind]


@pytest.mark.parametrize(
    "part",
    [text("image_url"), "image_url", {"type": "prompt_embeds", "data": "x"}, {"type": ["image_url"]}, {}, 7],
)
def test_what_is_no_media_is_not_found(part: Any) -> None:
    assert extract_items(chat(part)) == []


@pytest.mark.parametrize("content", ["image_url", None, {"type": "image_url"}, 3])
def test_content_that_is_no_list_holds_no_media(content: Any) -> None:
    assert extract_items({"messages": [{"role": "user", "content": content}, {"role": "user"}]}) == []


def test_primer_holds_one_untouched_item_and_no_text() -> None:
    part = image("a", uuid="mine", detail="high", vendor={"x": 1})
    body = chat(text("secret"), image("b"), part, max_completion_tokens=9, n=3, stream=True)
    before = copy.deepcopy(body)
    primer = primer_body(body, extract_items(body)[1])
    assert primer == {
        "model": "tiny",
        "messages": [{"role": "user", "content": [part]}],
        "stream": False,
        "max_tokens": 1,
    }
    assert body == before


def test_primer_invents_no_uuid() -> None:
    body = chat(image("a"))
    assert "uuid" not in primer_body(body, extract_items(body)[0])["messages"][0]["content"][0]


KEPT = {
    "model": "m",
    "mm_processor_kwargs": {"max_pixels": 9},
    "media_io_kwargs": {"image": {}},
    "priority": 3,
    "cache_salt": "s",
    "chat_template": "t",
    "chat_template_kwargs": {"k": 1},
    "session_id": "s1",
    "ec_transfer_params": {"to": "x"},
    "vllm_xargs": {"a": 1},
    "user": "u",
    "field_of_a_vendor": [1, {"x": None}],
}


def test_primer_keeps_what_can_change_an_encoding_its_key_or_the_routing() -> None:
    body = {**chat(image("a")), **KEPT, **dict.fromkeys(PRIMER_DROPS, 5)}
    primer = primer_body(body, extract_items(body)[0])
    assert {k: v for k, v in primer.items() if k not in ("messages", "stream", "max_tokens")} == KEPT


def test_every_field_of_vllms_request_is_decided_about() -> None:
    """A field that a new vLLM adds must be judged by a person: does it change an encoding?"""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    source = Path(spec.submodule_search_locations[0], "entrypoints/openai/chat_completion/protocol.py")
    (request,) = (
        node
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "ChatCompletionRequest"
    )
    fields = {
        node.target.id
        for node in request.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_")
    }
    written = {"messages", "stream", "max_tokens"}
    assert len(fields) > 40
    assert fields - PRIMER_DROPS - set(KEPT) - written == set()
    # And the reverse: what we drop is known to vLLM, so nothing is dropped by a slip of the pen.
    assert PRIMER_DROPS - fields == set()
