"""Real servers that are held at every point by a harness that is killed: each goes on and answers rightly. One boot."""

from __future__ import annotations

import multiprocessing
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from epd_conformance import subject
from epd_conformance.connectors.barriers import POINTS, arm
from epd_conformance.live import client
from epd_conformance.oracle.answers import Answer
from epd_conformance.plans.plan import Draw
from epd_conformance.run import Options, model_use
from epd_conformance.topology.spec import Shape, Topology
from epd_conformance.topology.stack import Site, Stack, StackSpec

pytestmark = [pytest.mark.live, pytest.mark.needs_vllm]

FORK = multiprocessing.get_context("fork")
# For a busy machine; a request takes a tenth of a second.
PATIENCE_S = 100.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("held")
    spec = StackSpec(
        "e-p-d",
        Topology.parse("e-p-d"),
        Shape(prefix_caching=False),
        subject=subject.load("reference"),
        barriers=True,
    )
    with Site(folder / "site", model_use(Options(subject="reference"))) as site:
        (booted,) = site.boot(spec)
        yield booted


def hold(folder: Path, server: str, point: str, order: dict[str, str], told: Any) -> None:
    """A harness that never lets go."""
    barrier = arm(folder, {server}, point, **order)
    told.send("armed")
    told.send(barrier.wait(lambda: False))
    time.sleep(PATIENCE_S)


def test_a_killed_harness_lets_every_server_go(stack: Stack) -> None:
    assert stack.barriers is not None
    draw = Draw(0, "held servers")
    for point, side in POINTS.items():
        image = replace(draw.image(), uuid=f"held-{point}")
        request, rid = draw.request(point, image), uuid.uuid4().hex
        server = "encode-0" if point in ("saving", "saved") else "proxy" if side == "proxy" else "prefill-0"
        ours, theirs = FORK.Pipe()
        order = {"req": rid} if side == "proxy" else {"id": image.uuid}
        holder = FORK.Process(target=hold, args=(stack.barriers, server, point, order, theirs), daemon=True)
        holder.start()
        assert ours.poll(PATIENCE_S)
        assert ours.recv() == "armed"
        mark = stack.journal.mark()
        answers: list[Answer] = []

        def ask(request: Any = request, rid: str = rid, answers: list[Answer] = answers) -> None:
            answers.append(client.send(stack.base_url, request, rid))

        thread = threading.Thread(target=ask)
        thread.start()
        assert ours.poll(PATIENCE_S), point
        assert ours.recv() is True
        assert not answers, "it is held"
        holder.kill()
        holder.join()
        thread.join(PATIENCE_S)
        assert [answer.status for answer in answers] == [200], point
        held, opened = (event for event in stack.journal.read(mark) if event["ev"] in ("held", "opened"))
        assert (held["server"], held["side"], held["point"]) == (server, side, point)
        assert opened["why"] == "closed"
    assert stack.dead() == []
    assert [event for event in stack.journal.read() if event["ev"] in ("lost", "raise")] == []
