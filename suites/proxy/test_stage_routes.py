"""Area PROXY on fake servers: other routes, malformed requests, and what a client may name."""

from __future__ import annotations

from epd_conformance.live.case import requirement
from epd_conformance.proxycheck.case import ProxyCase
from epd_conformance.proxycheck.plan import COMPLETIONS, Plan, Send, Step, chat, image, once, png
from epd_conformance.pytest_plugin import CellUnderTest

RESPONSES = {
    "model": "fake-model",
    "input": [{"role": "user", "content": [{"type": "input_image", "image_url": png("responses")}]}],
}
MESSAGES = {
    "model": "fake-model",
    "max_tokens": 4,
    "messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": png("messages")}}]}],
}

# What vLLM, or any server behind, refuses with 400; the ones that are no JSON or no request the proxy has to refuse itself.
MALFORMED = {
    "empty": "",
    "cut-short": '{"messages": [',
    "no-json": "\\xff\\x00",
    "deep": "[" * 100_000,
    "list": "[]",
    "null": "null",
    "text": '"messages"',
    "no-messages": "{}",
    "null-messages": '{"messages": null}',
    "object-messages": '{"messages": {"role": "user"}}',
    "text-messages": '{"messages": ["hi"]}',
    "numbers": '{"messages": [{"role": "user", "content": [1, 2]}]}',
    "no-url": '{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}',
    "number-url": '{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": 5}]}]}',
}

PLACES = (
    "http://127.0.0.1:9/x.png",
    "http://169.254.169.254/latest/meta-data",
    "http://[::1]:9/x.png",
    "file:///etc/passwd",
)


@requirement(
    "EPD-PROXY-012",
    ProxyCase(
        "apis",
        "every-api",
        once(
            Send("chat", chat("chat", image("chat"))),
            Send("responses", RESPONSES, path="/v1/responses"),
            Send("messages", MESSAGES, path="/v1/messages"),
        ),
    ),
)
def test_every_api_is_primed_or_says_so(cell: CellUnderTest) -> None:
    cell.check()


@requirement(
    "EPD-PROXY-023",
    ProxyCase(
        "roles",
        "health",
        Plan(
            (
                Step((Send("well", path="/health", method="GET"),)),
                Step((Send("encode-ill", path="/health", method="GET"),), ill=("encode",)),
                Step((Send("decode-ill", path="/health", method="GET"),), ill=("decode",)),
                Step((Send("well-again", path="/health", method="GET"),)),
            )
        ),
    ),
)
def test_health_tells_each_role(cell: CellUnderTest) -> None:
    cell.check()


@requirement(
    "EPD-PROXY-028",
    ProxyCase(
        "bodies",
        "malformed",
        Plan(
            (
                Step(tuple(Send(label, raw=raw) for label, raw in MALFORMED.items())),
                Step((Send("completion", raw='{"prompt": ', path=COMPLETIONS),)),
                Step(
                    (Send("good", chat("good", image("good"))), Send("good-stream", chat("good-stream", stream=True)))
                ),
            )
        ),
    ),
)
def test_malformed_requests_get_4xx(cell: CellUnderTest) -> None:
    cell.check()


@requirement(
    "EPD-PROXY-029",
    ProxyCase(
        "models-tokenize",
        "as-decode",
        once(
            Send("models", path="/v1/models", method="GET"),
            Send("tokenize", {"model": "fake-model", "prompt": "how many tokens"}, path="/tokenize"),
        ),
    ),
)
def test_other_paths_reach_decode(cell: CellUnderTest) -> None:
    cell.check()


@requirement(
    "EPD-PROXY-035",
    ProxyCase(
        "addresses",
        "private",
        once(
            *(
                Send(f"place{i}", chat(f"place{i}", {"type": "image_url", "image_url": {"url": url}}))
                for i, url in enumerate(PLACES)
            )
        ),
    ),
)
def test_no_url_leads_into_the_network(cell: CellUnderTest) -> None:
    cell.check()
