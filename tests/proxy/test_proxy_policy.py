"""Which media a client may name, and fetching them in the proxy."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from conftest import MakeStack
from proxy_fakes import Fake, Reply, chat, image, one_server, text

from epd_conformance.proxy.config import make_config
from epd_conformance.proxy.policy import MediaPolicy, is_public, urls_in
from epd_conformance.proxy.upstreams import StageError


def policy(**options: Any) -> MediaPolicy:
    return MediaPolicy(make_config(decode=["http://127.0.0.1:1"], **options))


def verdict(url: str, **options: Any) -> int:
    """The status that a client gets for this URL; 200 where it is allowed."""
    try:
        asyncio.run(policy(**options).check_url(url, 0))
    except StageError as error:
        assert (error.stage, error.item) == ("proxy", 0)
        return error.code
    return 200


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """A name service of the test's own; addresses written as numbers resolve as they do everywhere."""
    known = {"example.org": ["93.184.216.34"], "two.example.org": ["93.184.216.34", "10.0.0.1"], "lan": ["192.168.1.1"]}
    real = socket.getaddrinfo

    def getaddrinfo(host: str, *args: Any, **kwargs: Any) -> Any:
        name = host.rstrip(".").lower()
        if name in known:
            return [(2, 1, 6, "", (address, 0)) for address in known[name]]
        return real(host, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return known


PRIVATE = [
    "127.0.0.1",
    "10.1.2.3",
    "172.16.0.1",
    "192.168.0.1",
    "169.254.169.254",
    "100.64.0.1",
    "0.0.0.0",
    "224.0.0.1",
    "255.255.255.255",
    "::1",
    "::",
    "fe80::1",
    "fc00::1",
    "ff02::1",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "64:ff9b::7f00:1",
    "2002:7f00:1::",
    "2001:0:7f00:1::1",
]


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "address", ["93.184.216.34", "2606:2800:220:1::1", "::ffff:93.184.216.34", "64:ff9b::5db8:d822"]
)
def test_addresses_that_are_public(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/x",
        "http://127.1/x",
        "http://2130706433/",
        "http://0x7f.0.0.1/",
        "http://017700000001/",
        "HTTP://[::1]:8080/x",
        "http://[::ffff:10.0.0.1]/",
        "http://lan/",
        "http://LAN./",
        "http://two.example.org/one-address-is-private",
        "http://nowhere.invalid/",
        "http://user@example.org/",
        "http://example.org@127.0.0.1/",
        "http://example.org\\@127.0.0.1/",
        "http://example.org/ x",
        " http://example.org/",
        "http://example.org/\r\nx",
        "http://exämple.org/",
        "http://ex%61mple.org/",
        "http:///x",
        "http:example.org",
        "http://",
        "ftp://example.org/x",
        "//example.org/x",
        "example.org/x",
        "file:///etc/passwd",
        "gopher://example.org",
        "",
    ],
)
def test_urls_that_are_refused_by_default(names: dict[str, list[str]], url: str) -> None:
    assert verdict(url) == 400


@pytest.mark.parametrize(
    "url",
    [
        "http://example.org",
        "https://example.org/a.png?x=http://127.0.0.1/#y",
        "HTTPS://EXAMPLE.ORG:8443/é.png",
        "http://93.184.216.34/x",
        "data:image/png;base64,AAAA",
        "DATA:,x",
    ],
)
def test_urls_that_are_allowed_by_default(names: dict[str, list[str]], url: str) -> None:
    assert verdict(url) == 200


def test_an_allow_list_is_complete_and_may_be_private(names: dict[str, list[str]]) -> None:
    hosts = ["lan", "*.example.org"]
    assert [
        verdict(f"http://{host}/", media_hosts=hosts) for host in ("lan", "LAN.", "a.example.org", "b.a.example.org")
    ] == [200] * 4
    assert [
        verdict(f"http://{host}/", media_hosts=hosts) for host in ("example.org", "badexample.org", "lan.evil")
    ] == [400] * 3
    assert verdict("http://lan/", media_private=True) == 200


@pytest.mark.parametrize(
    ("url", "status"),
    [
        ("file:///srv/media/a.png", 200),
        ("file://localhost/srv/media/b%20c.png", 200),
        ("FILE:///srv/media/sub/a.png", 200),
        ("file:///srv/media/../secret", 400),
        ("file:///srv/media/%2e%2e/secret", 400),
        ("file:///srv/media/%252e%252e/secret", 400),
        ("file:///srv/mediaother/a", 400),
        ("file:///srv/media", 400),
        ("file:///srv/media/a%00.png", 400),
        ("file://host/srv/media/a.png", 400),
        ("file:srv/media/a.png", 400),
    ],
)
def test_file_urls_only_below_the_root(url: str, status: int) -> None:
    assert verdict(url, media_root="/srv/media") == status
    assert verdict(url) == 400


def test_the_size_of_data() -> None:
    data = "data:image/png;base64," + "A" * 400
    assert verdict(data, max_item_bytes=300) == 200
    assert verdict(data, max_item_bytes=299) == 413


def test_urls_are_found_in_any_api() -> None:
    body = {
        "input": [
            {
                "content": [
                    {"type": "input_image", "image_url": "http://a"},
                    {"type": "input_file", "file_url": "http://b"},
                ]
            }
        ],
        "messages": [
            {
                "content": [
                    {"type": "image", "source": {"type": "url", "url": "http://c"}},
                    {"image_url": {"url": " FILE:d"}},
                ]
            }
        ],
        "source": "wikipedia: a page",
        "tools": [{"parameters": {"properties": {"video_url": {"type": "string"}}}}],
        "url": "http://not-media",
    }
    assert sorted(urls_in(body)) == [" FILE:d", "http://a", "http://b", "http://c"]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x"}},
        {"type": "input_image", "image_url": "http://127.0.0.1:1/x"},
        {"type": "audio_url", "audio_url": {"url": "http://127.0.0.1:1/x"}},
        {"video_url": "http://127.0.0.1:1/x"},
        {"type": "odd", "uuid": "u", "image_url": "http://127.0.0.1:1/x"},
    ],
)
def test_a_refused_item_reaches_no_server(make_stack: MakeStack, part: dict[str, Any]) -> None:
    stack = make_stack()
    answer = stack.chat(chat(image("a"), part))
    assert answer.status_code == 400
    assert (answer.json()["error"]["stage"], answer.json()["error"]["item"]) == ("proxy", 1)
    assert "not public" in answer.json()["error"]["message"]
    assert [f.seen for f in (*stack.encode, *stack.prefill, *stack.decode)] == [[], [], [], []]


@pytest.mark.parametrize("path", ["/tokenize", "/v1/responses", "/v1/messages", "/v1/embeddings"])
def test_no_way_around_the_policy_through_other_apis(make_stack: MakeStack, path: str) -> None:
    stack = make_stack()
    part = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}}
    answer = requests.post(stack.url + path, json={"input": [{"content": [part]}]}, timeout=5)
    assert (answer.status_code, answer.json()["error"]["stage"]) == (400, "proxy")
    assert stack.decode[0].seen == []
    # And what names nothing of the kind passes.
    assert requests.post(stack.url + path, json={"input": [{"content": [text("hi")]}]}, timeout=5).status_code == 200


@pytest.mark.parametrize("kind", ["input_audio", "image_embeds"])
def test_content_that_is_too_large_is_refused_in_every_form(make_stack: MakeStack, kind: str) -> None:
    stack = make_stack(max_item_bytes=30)
    content = {"data": "A" * 48, "format": "wav"} if kind == "input_audio" else "A" * 48
    answer = stack.chat(chat({"type": kind, kind: content}))
    assert (answer.status_code, answer.json()["error"]["item"]) == (413, 0)


# --- fetching ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def media() -> Iterator[Fake]:
    """A server of pictures: each path's content is its own name."""
    fake = Fake()
    fake.reply = lambda seen: Reply(body=seen.path.encode(), content_type="image/png")
    with one_server(fake.app()) as url:
        fake.url = url
        yield fake


def data_url(content: str, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content.encode()).decode()}"


def test_fetched_media_reach_every_stage_as_the_same_bytes_in_order(make_stack: MakeStack, media: Fake) -> None:
    stack = make_stack(encode=1, media_fetch=True, media_private=True)
    a, b = f"{media.url}/a", f"{media.url}/b"
    body = chat(
        text("see"),
        {"type": "image_url", "image_url": {"url": b, "detail": "high"}, "uuid": "u"},
        image("inline"),
        {"video_url": a},
        {"type": "input_image", "image_url": b},
    )
    assert stack.chat(body, {"X-Request-Id": "r"}).status_code == 200
    assert sorted(seen.path for seen in media.seen) == ["/a", "/b"]
    expected = [
        text("see"),
        {"type": "image_url", "image_url": {"url": data_url("/b"), "detail": "high"}, "uuid": "u"},
        image("inline"),
        {"video_url": data_url("/a")},
        {"type": "input_image", "image_url": data_url("/b")},
    ]
    for fake in (stack.prefill[0], stack.decode[0]):
        assert fake.bodies[0]["messages"][0]["content"] == expected
    primed = {seen.headers["x-request-id"]: seen.body["messages"][0]["content"][0] for seen in stack.encode[0].seen}
    assert primed == {f"r-e{i}": part for i, part in enumerate(expected[1:])}


@pytest.mark.parametrize(
    ("reply", "status", "says"),
    [
        (Reply(status=404), 422, "answered 404"),
        (Reply(body=b"x" * 101), 413, "more than 100 bytes"),
        (Reply(body=b"x", breaks=True), 422, "cannot be fetched"),
        (Reply(status=302, location="/again"), 422, "redirects"),
        (Reply(status=302, location="file:///etc/passwd"), 422, "not http"),
        (Reply(status=302), 422, "redirects"),
    ],
)
def test_media_that_cannot_be_fetched(make_stack: MakeStack, media: Fake, reply: Reply, status: int, says: str) -> None:
    stack = make_stack(media_fetch=True, media_private=True, max_item_bytes=100)
    media.reply = lambda seen: reply
    answer = stack.chat(chat({"type": "image_url", "image_url": {"url": f"{media.url}/a"}}))
    assert (answer.status_code, answer.json()["error"]["item"]) == (status, 0)
    assert says in answer.json()["error"]["message"]
    assert stack.decode[0].seen == []


def test_a_redirect_is_checked_as_a_url_is(make_stack: MakeStack, media: Fake) -> None:
    port = media.url.rsplit(":", 1)[1]
    media.reply = lambda seen: Reply(status=302, location=f"http://127.0.0.2:{port}/b")
    stack = make_stack(media_fetch=True, media_hosts=["127.0.0.1"])
    answer = stack.chat(chat({"type": "image_url", "image_url": {"url": f"{media.url}/a"}}))
    assert answer.status_code == 400
    assert "127.0.0.2" in answer.json()["error"]["message"]
    assert len(media.seen) == 1


def test_a_name_that_changes_its_mind_between_check_and_use(
    make_stack: MakeStack, media: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up: list[str] = []

    async def resolve(self: MediaPolicy, host: str) -> list[Any]:
        looked_up.append(host)
        return [ipaddress.ip_address("93.184.216.34" if len(looked_up) == 1 else "127.0.0.1")]

    monkeypatch.setattr(MediaPolicy, "resolve", resolve)
    stack = make_stack(media_fetch=True)
    port = media.url.rsplit(":", 1)[1]
    answer = stack.chat(chat({"type": "image_url", "image_url": {"url": f"http://rebinding.example:{port}/a"}}))
    assert (answer.status_code, len(looked_up), media.seen) == (422, 2, [])
