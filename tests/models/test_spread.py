"""Measuring the spread of a model's answers, against a server that is made up here."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from epd_conformance.errors import StackError, UsageError
from epd_conformance.models.spread import measure, summarise


class FakeServer:
    """Answers as vLLM would; `token(request, position)` says which token comes out."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.token: Callable[[dict[str, Any], int], int] = lambda request, position: 0
        self.edit: Callable[[dict[str, Any]], None] = lambda answer: None
        self.status = 200
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                fake.requests.append({"path": self.path, **request})
                body = json.dumps(fake.answer(request)).encode()
                self.send_response(fake.status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        ids = [self.token(request, position) for position in range(request["max_tokens"])]
        # Three entries, the sampled one first though it is not the best: as vLLM orders them.
        tops = [{"logprob": -2.0}, {"logprob": -0.5}, {"logprob": -1.25}]
        content = [{"top_logprobs": tops} for _ in ids]
        answer = {"choices": [{"token_ids": ids, "logprobs": {"content": content}}]}
        self.edit(answer)
        return answer


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    thread = threading.Thread(target=fake.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield fake
    fake.http.shutdown()
    thread.join()
    fake.http.server_close()


def of_image(request: dict[str, Any], position: int) -> int:
    url = request["messages"][0]["content"][0]["image_url"]["url"]
    return hashlib.sha256(f"{position}{url}".encode()).digest()[0]


def test_every_image_apart(server: FakeServer) -> None:
    server.token = of_image
    spread = measure(server.url + "/", "tiny", images=10)
    assert (spread.images, spread.tokens, spread.pairs, spread.differing, spread.share) == (
        10,
        8,
        45,
        45,
        1.0,
    )
    assert spread.margin_min == spread.margin_p05 == spread.margin_median == 0.75
    first = server.requests[0]
    assert (first["path"], first["model"], first["temperature"]) == ("/v1/chat/completions", "tiny", 0)
    assert first["ignore_eos"] and first["return_token_ids"] and len(server.requests) == 10


def test_a_model_blind_to_images_has_no_spread(server: FakeServer) -> None:
    spread = measure(server.url, "tiny", images=4)
    assert (spread.differing, spread.share, spread.first_token_share) == (0, 0.0, 0.0)


def test_shares_of_pairs() -> None:
    spread = summarise([[1, 2], [1, 3], [1, 2], [4, 5]], [0.1, 0.2, 0.3])
    assert (spread.pairs, spread.differing) == (6, 5)
    assert (spread.share, spread.first_token_share) == (5 / 6, 3 / 6)
    assert (spread.margin_min, spread.margin_median) == (0.1, 0.2)


@pytest.mark.parametrize(
    "edit",
    [
        lambda answer: answer["choices"][0].update(token_ids=None),
        lambda answer: answer["choices"][0].update(logprobs=None),
        lambda answer: answer.update(choices=[]),
        lambda answer: answer["choices"][0]["token_ids"].pop(),
    ],
    ids=["no-ids", "no-logprobs", "no-choice", "short"],
)
def test_an_answer_that_was_not_asked_for_is_an_error(
    server: FakeServer, edit: Callable[[dict[str, Any]], None]
) -> None:
    server.edit = edit
    with pytest.raises(StackError, match="for image 0"):
        measure(server.url, "tiny", images=2)


def test_a_refusal_is_an_error(server: FakeServer) -> None:
    server.status = 400
    with pytest.raises(StackError, match="answered 400 for image 0"):
        measure(server.url, "tiny", images=2)


def test_nobody_there_is_an_error() -> None:
    with pytest.raises(StackError, match="did not answer"):
        measure("http://127.0.0.1:1", "tiny", images=2)


def test_one_image_has_no_pair() -> None:
    with pytest.raises(UsageError, match="at least 2 images"):
        measure("http://127.0.0.1:1", "tiny", images=1)
