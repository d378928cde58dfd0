"""Stacks of real vLLM servers with the tiny model: that they come up, and that nothing survives the end of their owner."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from live_owner import tiny
from topology_residue import TOKEN, Traces, alive, marked, new_token, wait_until

from epd_conformance.errors import UsageError
from epd_conformance.features import Feature
from epd_conformance.runtime import vllm_info
from epd_conformance.subject import Implementation, StackInfo, Subject
from epd_conformance.topology import guard
from epd_conformance.topology.launcher import Boot
from epd_conformance.topology.spec import Shape, Topology
from epd_conformance.topology.stack import Site, StackSpec

pytestmark = [
    pytest.mark.live,
    pytest.mark.needs_vllm,
    pytest.mark.skipif(vllm_info.package_directory("vllm") is None, reason="vLLM is not installed"),
]

# A SIGKILLed stack is gone in about a second here; the rest is for a busy machine.
GONE_S = 20.0
# Three times what a boot takes here when nothing else runs.
BOOT_S = 120.0


def healthy(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=5).status_code == 200
    except requests.RequestException:
        return False


@dataclass
class Story:
    """One run of an owner, from its boot to its end by SIGKILL; what was seen on the way."""

    booted: dict[str, Any]
    healthy_at_first: list[str]
    healthy_without_warmed_parent: list[str]
    answered_without_warmed_parent: bool
    more: dict[str, Any]
    healthy_more: bool
    marked_before_the_end: int
    left: list[str]
    gone_after: float
    children_of_init: list[int]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """Boot, kill the warmed parent, boot more, kill the owner: one boot serves all that is asserted below."""
    folder = tmp_path_factory.mktemp("a run")
    token = new_token()
    with (folder / "owner.log").open("wb") as log:
        owner = subprocess.Popen(
            [sys.executable, "-m", "live_owner", str(folder / "with spaces")],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert owner.stdin is not None
    assert owner.stdout is not None
    try:
        line = owner.stdout.readline()
        assert line, (folder / "owner.log").read_text()
        booted = json.loads(line)
        urls = {"proxy": booted["url"], **booted["servers"]}
        healthy_at_first = [name for name, url in urls.items() if healthy(url)]

        os.kill(booted["warmed"], signal.SIGKILL)
        wait_until(lambda: not alive(booted["warmed"]), "the warmed parent to be gone")
        time.sleep(0.5)  # what would take servers along would do so at once
        healthy_without = [name for name, url in urls.items() if healthy(url)]
        answer = requests.post(
            f"{booted['url']}/v1/chat/completions",
            json={"model": "epd-model", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
            timeout=60,
        )
        owner.stdin.write("more\n")
        owner.stdin.flush()
        line = owner.stdout.readline()
        assert line, (folder / "owner.log").read_text()
        more = json.loads(line)
        healthy_more = healthy(more["url"])

        traces = Traces(
            token,
            (*booted["ports"], *more["ports"]),
            (*booted["blocks"], *more["blocks"]),
            (booted["scratch"],),
        )
        before = len(marked(token))
        assert len([one for one in traces.left() if one.startswith("/dev/shm/")]) == len(traces.blocks) > 0
        owner.kill()
        owner.wait()
        began = time.monotonic()
        while (left := traces.left()) and time.monotonic() - began < GONE_S:
            time.sleep(0.05)
        yield Story(
            booted,
            healthy_at_first,
            healthy_without,
            answer.status_code == 200,
            more,
            healthy_more,
            before,
            left,
            time.monotonic() - began,
            [pid for pid in booted["pids"] + more["pids"] if alive(pid)],
        )
    finally:
        owner.kill()
        owner.wait()
        # The guard first gets its time: killed with the rest, it would leave the shared memory.
        deadline = time.monotonic() + GONE_S
        while marked(token) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in marked(token):
            os.kill(pid, signal.SIGKILL)
        os.environ.pop(TOKEN)


def test_the_stack_came_up_and_both_sides_of_the_connector_were_seen(story: Story) -> None:
    assert story.healthy_at_first == ["proxy", "encode-0", "prefill_decode-0"]
    assert story.booted["sides"] == [
        "encode-0 scheduler",
        "encode-0 worker",
        "prefill_decode-0 scheduler",
        "prefill_decode-0 worker",
    ]


def test_servers_outlive_their_warmed_parent_and_a_new_one_boots_more(story: Story) -> None:
    assert story.healthy_without_warmed_parent == ["proxy", "encode-0", "prefill_decode-0"]
    assert story.answered_without_warmed_parent
    assert story.healthy_more
    assert story.more["warmed"] != story.booted["warmed"]


def test_nothing_survives_the_sigkill_of_the_owner(story: Story) -> None:
    assert story.marked_before_the_end >= 1 + 1 + 1 + 3 * 3 + 1, "owner, guard, warmed parent, three servers, the proxy"
    assert story.left == []
    assert story.children_of_init == []
    assert story.gone_after < GONE_S


class NoSuchModule(Subject):
    """A subject whose connector's module is not installed."""

    implementation = Implementation("nobody", "nothing", "1")
    features: frozenset[Feature] = frozenset()

    def connector_config(self, role: str, stack: StackInfo) -> dict[str, Any]:
        return {"ec_connector": "Theirs", "ec_connector_module_path": "no_such_module_xyz"}


class NoSuchClass(NoSuchModule):
    """A subject whose connector's module lacks the class."""

    def connector_config(self, role: str, stack: StackInfo) -> dict[str, Any]:
        return {"ec_connector": "Theirs", "ec_connector_module_path": "json"}


def test_a_connector_that_does_not_import_fails_the_boot_at_once(tmp_path: Path) -> None:
    token = new_token()
    with Site(tmp_path / "with spaces", tiny()) as site:
        site.launcher.wait_warm()
        for subject, words in (
            (
                NoSuchModule(),
                "the module 'no_such_module_xyz' does not import in the server: install it in this environment",
            ),
            (NoSuchClass(), "the module 'json' has no 'Theirs': check the class name in the connector's configuration"),
        ):
            for recorder in (True, False):
                began = time.monotonic()
                with pytest.raises(UsageError) as raised:
                    site.boot(StackSpec("bad", Topology.parse("e-pd"), Shape(), subject=subject, recorder=recorder))
                assert time.monotonic() - began < 60, "well before the ready timeout of 240 s"
                first, second, *log = str(raised.value).splitlines()
                assert words in first
                assert first.startswith("bad")
                assert second.startswith("--- from ")
                assert len(log) > 5
                left = marked(token)
                assert set(left) == {site.launcher.guard_pid, site.launcher.zygote_pid}, "nothing is left running"
        traces = Traces(token, scratch=(str(site.launcher.scratch),))
    traces.assert_gone(0.0)


def test_nothing_survives_the_sigkill_of_the_guard(tmp_path: Path) -> None:
    """With a plain start, the only one on GPU: engine core and worker are spawned, and nobody but the lifeline ends them."""
    token = new_token()
    with Site(tmp_path / "with spaces", tiny(), boot=Boot.PLAIN) as site:
        (stack,) = site.boot(StackSpec("plain", Topology.parse("aggregated"), Shape()))
        (server,) = stack.servers
        pids = site.launcher.tree(server.process)
        assert len(pids) >= 3, "API server, engine core, worker"
        blocks = [Path(path).name for path in guard.shared_memory(pids)]
        assert {block[:3] for block in blocks} == {"psm", "sem"}, "message queues, and semaphores of spawned processes"
        os.kill(site.launcher.guard_pid, signal.SIGKILL)
        Traces(token, (server.port,), tuple(blocks)).assert_gone(GONE_S)
    Traces(token, scratch=(str(site.launcher.scratch),)).assert_gone(0.0)
