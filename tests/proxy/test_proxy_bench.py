"""The benchmark of the proxy: its arithmetic, and that its client and its server understand each other."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from proxy_fakes import wait_for

from epd_conformance.bench import proxy as bench
from epd_conformance.bench.proxy import Arm, Leg
from epd_conformance.errors import StackError


def arm(name: str, p50: float, rps: float) -> Arm:
    """An arm whose samples are all the same."""
    levels = bench.CLIENTS
    same = {clients: [value, value] for clients, value in dict.fromkeys(levels, p50).items()}
    return Arm(
        name, [], None, same, same, {clients: [rps] for clients in levels}, {clients: [1.0] for clients in levels}
    )


@pytest.mark.parametrize(("p50", "met"), [(2.0, True), (2.6, False)])
def test_added_latency_is_the_difference_and_one_client_has_a_goal(p50: float, met: bool) -> None:
    rows = {row.name: row for row in bench.added("x", arm("proxy", p50, 100), arm("direct", 1.0, 400), goal=True)}
    row = rows["x: added p50, 1 clients"]
    assert (row.value, row.baseline, row.met) == (round(p50 - 1, 4), 1.0, met)
    assert [found.met for name, found in rows.items() if found is not row] == [None] * (len(rows) - 1)
    assert rows["x: requests, 64 clients"].ratio == 0.25


@pytest.mark.parametrize(("rps", "met"), [(200.0, True), (199.0, False)])
def test_requests_a_second_have_a_goal_against_the_relay(rps: float, met: bool) -> None:
    rows = bench.against(arm("proxy", 1, rps), arm("relay", 1, 100), "x", goal=2.0)
    assert {row.met for row in rows if row.unit == "1/s"} == {met}


class FakeInThread:
    """The benchmark's server, in an event loop of its own."""

    def __init__(self) -> None:
        self.port = 0
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        server = self.loop.run_until_complete(self.loop.create_server(bench._FakeServer, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self.loop.run_forever()

    def __enter__(self) -> FakeInThread:
        self.thread.start()
        wait_for(lambda: self.port > 0, "the fake")
        return self

    def __exit__(self, *_: Any) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(5)


def test_a_sample_counts_requests_of_all_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SAMPLE_S", 0.5)
    monkeypatch.setattr(bench, "WARM_UP_S", 0.02)
    with FakeInThread() as fake:
        measured = Arm("direct", [Leg(fake.port, b"{}"), Leg(fake.port, b"x" * 200_000)])
        measured.wait_until_ready()
        measured.sample(4)
    assert measured.rps[4][0] > 4
    assert 0 < measured.p50[4][0] <= measured.p99[4][0]


def test_an_answer_that_is_no_200_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "HEAD", b"HTTP/1.1 500 X\r\ncontent-length: %d\r\n\r\n" % len(bench.ANSWER))
    monkeypatch.setattr(bench, "START_S", 0.1)
    with FakeInThread() as fake:
        broken = Arm("direct", [Leg(fake.port, b"{}")])
        with pytest.raises(StackError, match="500"):
            broken.wait_until_ready()
        with pytest.raises(StackError, match="500"):
            broken.sample(1)


def test_the_image_of_the_benchmark_is_the_same_in_every_run() -> None:
    assert bench.bodies() == bench.bodies()
    assert len(str(bench.bodies()[0])) > bench.IMAGE_BYTES
