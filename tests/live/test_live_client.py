"""The client and the baselines against fake servers: what comes back is kept as it came, and nothing is decided."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from epd_conformance.connectors.journal import Journal
from epd_conformance.live import baseline, client
from epd_conformance.live.baseline import Baselines, ask_aggregated, ask_pd, floor_requests, settle, settle_plan
from epd_conformance.oracle.answers import NO_IDS, Answer
from epd_conformance.oracle.baselines import BaselineAnswers
from epd_conformance.plans import steps as script
from epd_conformance.plans.plan import Draw, Plan, Request, lengthen, replace_images
from epd_conformance.topology.spec import Role
from epd_conformance.topology.stack import SERVED_NAME

REQUEST = Draw(0, "client").request("a label", Draw(0, "client").image())


def completion(ids: Any = (5, 6), prompt: Any = (1, 2, 3)) -> dict[str, Any]:
    content = [{"logprob": -0.5, "top_logprobs": [{"logprob": -0.5}, {"logprob": -2.0}]} for _ in ids or ()]
    choice = {"token_ids": ids, "finish_reason": "length", "logprobs": {"content": content}}
    return {"prompt_token_ids": prompt, "choices": [choice]}


def stream_events(ids: tuple[int, ...] = (5, 6)) -> list[Any]:
    first = {"prompt_token_ids": [1, 2, 3], "choices": [{"token_ids": None}]}
    parts = [{"choices": [completion((token,))["choices"][0] | {"finish_reason": None}]} for token in ids]
    return [first, *parts, {"choices": [{"finish_reason": "length", "token_ids": []}]}, {"choices": [], "usage": {}}]


def sse(*events: Any, done: bool = True) -> bytes:
    text = "".join(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n" for event in events)
    return (text + ("data: [DONE]\n\n" if done else "")).encode()


class FakeServer:
    """Answers every request with `reply`, or lets `behave` write what it likes; remembers what it got."""

    def __init__(self) -> None:
        self.status, self.reply = 200, json.dumps(completion()).encode()
        self.behave: Callable[[BaseHTTPRequestHandler], None] = self._answer
        self.seen: list[tuple[dict[str, str], dict[str, Any]]] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                fake.seen.append((dict(self.headers), body))
                fake.behave(self)

            def log_message(self, *args: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(self.status)
        handler.send_header("Content-Length", str(len(self.reply)))
        handler.end_headers()
        handler.wfile.write(self.reply)


@pytest.fixture
def fake_server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.server.shutdown()
    fake.server.server_close()


def send(fake: FakeServer, stream: bool = False, **options: Any) -> Answer:
    return client.send(fake.url, REQUEST, "rid", overrides={"stream": stream, **options})


# -- the client --------------------------------------------------------------------------------------------------------


def test_an_answer_is_kept_as_it_came(fake_server: FakeServer) -> None:
    before = time.time()
    answer = client.send(fake_server.url, REQUEST, "rid", salt="s")
    assert (answer.label, answer.request_id, answer.status, answer.error) == ("a label", "rid", 200, None)
    assert (answer.prompt_ids, answer.ids) == ((1, 2, 3), (5, 6))
    assert (answer.logprobs, answer.margins, answer.finish_reason) == ((-0.5, -0.5), (1.5, 1.5), "length")
    assert before <= answer.started <= time.time()
    assert 0 < answer.seconds < 5
    headers, body = fake_server.seen[0]
    assert headers["X-Request-Id"] == "rid"
    assert body["cache_salt"] == "s"
    assert body["return_token_ids"] is True


def test_overrides_lie_over_the_body_and_none_removes(fake_server: FakeServer) -> None:
    send(fake_server, max_tokens=1, logprobs=None)
    _, body = fake_server.seen[0]
    assert body["max_tokens"] == 1
    assert "logprobs" not in body


def test_an_error_keeps_its_status_and_body(fake_server: FakeServer) -> None:
    fake_server.status, fake_server.reply = 503, b'{"error": "no"}'
    for stream in (False, True):
        answer = send(fake_server, stream)
        assert (answer.status, answer.body, answer.error, answer.streamed) == (503, '{"error": "no"}', None, stream)


@pytest.mark.parametrize(
    "reply", [b"", b"oops", b"[]", b"{}", b'{"choices": 3}', b"\xff\xfe", b'{"choices": [{}, {}]}']
)
def test_a_200_that_is_no_completion_says_so(fake_server: FakeServer, reply: bytes) -> None:
    fake_server.reply = reply
    answer = send(fake_server)
    assert answer.status == 200
    assert answer.error
    assert answer.error != NO_IDS
    assert answer.ids == ()


def test_missing_ids_are_told_from_empty_ones(fake_server: FakeServer) -> None:
    for ids, error in ((None, NO_IDS), ([], None)):
        fake_server.reply = json.dumps(completion(ids)).encode()
        assert (send(fake_server).error, send(fake_server).ids) == (error, ())


def test_no_answer_at_all_is_status_0() -> None:
    answer = client.send("http://127.0.0.1:9", REQUEST, "rid")
    assert answer.status == 0
    assert "ConnectionError" in (answer.error or "")


def test_a_connection_that_is_cut_is_status_0(fake_server: FakeServer) -> None:
    def cut(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        handler.wfile.write(b'{"choices": ')
        handler.close_connection = True

    fake_server.behave = cut
    assert send(fake_server).status == 0


class TestStream:
    def test_it_is_the_same_answer(self, fake_server: FakeServer) -> None:
        plain = send(fake_server)
        fake_server.reply = sse(*stream_events())
        streamed = send(fake_server, stream=True)
        for name in ("status", "prompt_ids", "ids", "logprobs", "margins", "finish_reason", "error"):
            assert getattr(streamed, name) == getattr(plain, name), name
        assert streamed.streamed

    def test_pieces_may_end_anywhere(self, fake_server: FakeServer) -> None:
        whole = b": a comment\n\n" + sse(*stream_events())

        def dribble(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(200)
            handler.send_header("Transfer-Encoding", "chunked")
            handler.end_headers()
            for start in range(0, len(whole), 7):
                piece = whole[start : start + 7]
                handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            handler.wfile.write(b"0\r\n\r\n")

        fake_server.behave = dribble
        answer = send(fake_server, stream=True)
        assert (answer.ids, answer.error) == ((5, 6), None)

    @pytest.mark.parametrize(
        ("reply", "error"),
        [
            (sse(*stream_events(), done=False), "without [DONE]"),
            (sse(*stream_events())[:-9], "without [DONE]"),
            (b"", "without [DONE]"),
            (json.dumps(completion()).encode(), "without [DONE]"),
            (sse(*stream_events()[:2], {"error": {"message": "boom"}}), "boom"),
            (sse(*stream_events(), "{"), "is none"),
            (sse(*stream_events(), 5), "is none"),
            (sse(*stream_events(), {"choices": 5}), "is none"),
            (sse(*stream_events(), {"choices": [{"token_ids": "x"}]}), "is none"),
            (sse({"choices": [{"logprobs": {"content": [{}]}}]}), "is none"),
        ],
    )
    def test_what_breaks_off_or_is_garbled_is_no_answer(
        self, fake_server: FakeServer, reply: bytes, error: str
    ) -> None:
        fake_server.reply = reply
        answer = send(fake_server, stream=True)
        assert answer.status == 200
        assert error in (answer.error or "")
        assert answer.error != NO_IDS

    def test_missing_ids_are_told_from_empty_ones(self, fake_server: FakeServer) -> None:
        first = {"prompt_token_ids": [1], "choices": [{}]}
        fake_server.reply = sse(first, {"choices": [{"delta": {"content": "text"}}]})
        assert send(fake_server, stream=True).error == NO_IDS
        fake_server.reply = sse(first, {"choices": [{"token_ids": []}]})
        assert send(fake_server, stream=True).error is None
        fake_server.reply = sse({"choices": [{"token_ids": [1]}]})
        assert send(fake_server, stream=True).error == NO_IDS

    def test_a_stream_that_is_cut_says_so(self, fake_server: FakeServer) -> None:
        def cut(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(200)
            handler.send_header("Content-Length", "5000")
            handler.end_headers()
            handler.wfile.write(sse(*stream_events(), done=False))
            handler.close_connection = True

        fake_server.behave = cut
        answer = send(fake_server, stream=True)
        assert answer.status == 200
        assert "broke" in (answer.error or "")

    @pytest.mark.parametrize("chunked", [True, False])
    def test_a_stream_without_end_is_ended(
        self, fake_server: FakeServer, monkeypatch: pytest.MonkeyPatch, chunked: bool
    ) -> None:
        """Each piece comes in time, the answer never."""

        def forever(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(200)
            if chunked:
                handler.send_header("Transfer-Encoding", "chunked")
            handler.end_headers()
            while True:
                handler.wfile.write(b"f\r\n: still there\n\n\r\n" if chunked else b": still there\n\n")
                time.sleep(0.01)

        monkeypatch.setattr(client, "DEADLINE_S", 0.2)
        monkeypatch.setattr(ThreadingHTTPServer, "handle_error", lambda *_: None)  # the client hangs up on it
        fake_server.behave = forever
        for stream in (True, False):
            answer = send(fake_server, stream)
            assert answer.status == 0
            assert "TimeoutError" in (answer.error or "")
            assert answer.seconds < 2


# -- baselines ---------------------------------------------------------------------------------------------------------


def fake_stack(url: str, folder: Path) -> Any:
    decode = SimpleNamespace(name="decode-0")
    return SimpleNamespace(
        base_url=url,
        journal=Journal(folder),
        of=lambda role: [decode] if role is Role.DECODE else [],
        served_name=SERVED_NAME,
    )


def plan(seed: int = 0) -> Plan:
    draw = Draw(seed, "baseline")
    request = draw.request("r", draw.image())
    return Plan((request, draw.request("s")), (replace_images(request, [draw.image()], "c"), draw.request("d")))


def test_the_aggregated_baseline_is_asked_again_and_again_each_time_anew(
    fake_server: FakeServer, tmp_path: Path
) -> None:
    asked = list(plan().requests)
    streamed = Request("r", asked[0].messages, stream=True)
    found, ticks = Baselines(), []
    ask_aggregated(found, fake_stack(fake_server.url, tmp_path), [streamed, asked[1]], lambda: ticks.append(1))
    assert len(ticks) == 2 * baseline.REPETITIONS
    salts = [body["cache_salt"] for _, body in fake_server.seen]
    assert len(set(salts)) == len(salts) == 2 * baseline.REPETITIONS
    assert not any(body["stream"] for _, body in fake_server.seen)
    assert {digest: len(runs) for digest, runs in found.arms["aggregated"].items()} == {
        request.digest(): baseline.REPETITIONS for request in asked
    }
    digests = [request.digest() for request in asked]
    assert BaselineAnswers("e-pd", tuple(asked), found.arms).floor().admitted == set(digests)
    assert set(found.first(digests[0])) == {"aggregated"}
    assert found.first("unknown") == {}


def test_a_sequence_is_asked_in_its_order_with_its_resets(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = Draw(0, "sequence")
    one, other = draw.request("one", draw.image()), draw.request("other", draw.image())
    steps = (
        script.step("reset", cache="mm"),
        script.send("loaded"),
        script.step("reset", cache="encoder"),
        script.send("as-aggregated"),
    )
    whole = Plan((one, other), steps=steps)
    done: list[str] = []
    stack: Any = SimpleNamespace(base_url="here", served_name="m", servers=[SimpleNamespace(name="s", url="s")])

    def ask(url: str, request: Request, rid: str, **options: Any) -> Answer:
        done.append(request.label)
        return Answer(request.label, rid, 200)

    def reset(url: str, cache: str) -> int:
        done.append(cache)
        return 404 if cache == "encoder" else 200

    monkeypatch.setattr(baseline.client, "send", ask)
    monkeypatch.setattr(baseline.faulting, "reset", reset)
    found = Baselines()
    ask_aggregated(found, stack, [draw.request("alone")], sequences=[whole])
    assert done == ["alone", "mm", "one", "encoder", "other"] * baseline.REPETITIONS
    assert len(found.arms["aggregated"][other.digest()]) == baseline.REPETITIONS
    # What could not be done to it makes it no baseline.
    assert set(found.unproven) == {one.digest(), other.digest()}
    assert "s did not empty its encoder cache" in found.unproven[other.digest()]
    impossible = replace(whole, steps=(*steps, script.step("restart", servers="all")))
    with pytest.raises(ValueError, match="cannot restart"):
        ask_aggregated(Baselines(), stack, [], sequences=[impossible])


class FakeDecode:
    """Writes into the journal what a decode server's KV recorder would, before it answers."""

    def __init__(self, fake: FakeServer, folder: Path, tokens: int) -> None:
        self.file = folder / "decode-0.kv-scheduler.1.ndjson"
        self.sequence = 0
        self.write("init", connector="x.ExampleConnector", block_size=32)

        def answer(handler: BaseHTTPRequestHandler) -> None:
            req = f"chatcmpl-{handler.headers['X-Request-Id']}-d-00000000"
            if tokens:
                self.write("kv-take", req=req, tokens=tokens)
            self.write("kv-new", req=req, computed=tokens, prompt=300, items=[])
            self.write("kv-injected", tokens=tokens)
            fake._answer(handler)

        fake.behave = answer

    def write(self, ev: str, **fields: Any) -> None:
        line = {
            "seq": self.sequence,
            "t": time.time(),
            "server": "decode-0",
            "side": "kv-scheduler",
            "ev": ev,
            **fields,
        }
        self.sequence += 1
        with self.file.open("a") as handle:
            handle.write(json.dumps(line) + "\n")


@pytest.mark.parametrize(("tokens", "problem"), [(288, None), (256, "kv-recompute"), (0, "kv-recompute")])
def test_a_pd_baseline_must_prove_its_kv(
    fake_server: FakeServer, tmp_path: Path, tokens: int, problem: str | None
) -> None:
    FakeDecode(fake_server, tmp_path, tokens)
    (request, _) = plan().requests
    found = Baselines()
    stack = fake_stack(fake_server.url, tmp_path)
    ask_aggregated(found, stack, [request])
    ask_pd(found, stack, [request], 2)
    digest = request.digest()
    assert len(found.arms["p-d"][digest]) == 2
    assert set(found.first(digest)) == {"aggregated", "p-d"}
    floor = BaselineAnswers("e-p-d", (request,), found.arms, found.unproven).floor()
    if problem is None:
        assert found.unproven == {}
        assert floor.admitted == {digest}
    else:
        assert problem in found.unproven[digest]
        assert floor.admitted == frozenset()
        assert problem in floor.rejected[digest]


def test_floor_requests_are_fixed_and_enough() -> None:
    drawn = floor_requests(3, "e-pd")
    assert [request.digest() for request in drawn] == [request.digest() for request in floor_requests(3, "e-pd")]
    assert len({request.digest() for request in drawn}) == baseline.FLOOR_PROMPTS >= 8
    assert floor_requests(3, "e-p-d")[0].digest() != drawn[0].digest() != floor_requests(4, "e-pd")[0].digest()


class TestSettle:
    """With blocks of 32 the file KV connector cannot serve prompts of 33, 65, … tokens."""

    @staticmethod
    def tokenizer(first: int, step: int, asked: list[Request] | None = None) -> Callable[[Request], Answer]:
        base = len(REQUEST.messages[0].parts)

        def ask(request: Request) -> Answer:
            if asked is not None:
                asked.append(request)
            length = first + step * (len(request.messages[-1].parts) - base)
            return Answer(request.label, "r", 200, tuple(range(length)))

        return ask

    def test_a_length_that_can_be_served_stays(self) -> None:
        asked: list[Request] = []
        assert settle(REQUEST, self.tokenizer(300, 4, asked), 32) == REQUEST
        assert len(asked) == 1

    def test_a_length_that_cannot_is_moved(self) -> None:
        assert settle(REQUEST, self.tokenizer(289, 4), 32) == lengthen(REQUEST)
        assert settle(REQUEST, self.tokenizer(257, 32), 33) == lengthen(REQUEST, 0)
        # Each step of this tokenizer is a whole block, so nothing helps.
        with pytest.raises(RuntimeError, match="does not change"):
            settle(REQUEST, self.tokenizer(289, 32), 32)

    def test_the_last_lengthening_is_tried(self) -> None:
        def ask(request: Request) -> Answer:
            last = request == lengthen(REQUEST, baseline.LENGTHENINGS)
            return Answer("l", "r", 200, tuple(range(300 if last else 289)))

        assert settle(REQUEST, ask, 32) == lengthen(REQUEST, baseline.LENGTHENINGS)

    def test_a_server_that_refuses_leaves_the_request(self) -> None:
        assert settle(REQUEST, lambda request: Answer("l", "r", 400), 32) == REQUEST

    def test_a_contrast_grows_with_its_request(self) -> None:
        """Else they would differ in the text too, and the power check would find that."""
        plain = plan()
        grown = settle_plan(plain, self.tokenizer_by_label({"r": 1, "s": 0}), 32)
        assert grown.requests == (lengthen(plain.requests[0]), plain.requests[1])
        assert grown.contrasts == (lengthen(plain.contrasts[0]), plain.contrasts[1])
        texts = [
            [p for p in r.messages[0].parts if not hasattr(p, "spec")] for r in (grown.requests[0], grown.contrasts[0])
        ]
        assert texts[0] == texts[1]

    def test_a_plan_without_requests_is_left(self) -> None:
        assert settle_plan(Plan(()), self.tokenizer(300, 4), 32) == Plan(())

    @staticmethod
    def tokenizer_by_label(lengthenings: dict[str, int]) -> Callable[[Request], Answer]:
        first: dict[str, int] = {}

        def ask(request: Request) -> Answer:
            parts = len(request.messages[-1].parts)
            grown = parts - first.setdefault(request.label, parts)
            return Answer("l", "r", 200, tuple(range(300 if grown >= lengthenings[request.label] else 289)))

        return ask
