"""The proxy as a process: arguments, log lines, shutdown, and no socket left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import requests
from conftest import FakeStack, MakeStack
from proxy_fakes import Fake, Reply, chat, closed_port_url, image, one_server, stream_reply, wait_for
from test_proxy_faults import hang_up_after_sending

from epd_conformance.errors import UsageError
from epd_conformance.proxy import __main__ as main_module
from epd_conformance.proxy.__main__ import main
from epd_conformance.proxy.app import ProxyConfig, load_stages, make_config, serve
from epd_conformance.proxy.stages import Stages


@contextmanager
def proxy_process(log: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Starts `python -m epd_conformance.proxy`; yields the process and its address, as printed."""
    with log.open("wb") as stderr:
        process = subprocess.Popen([sys.executable, "-m", "epd_conformance.proxy", *arguments], stderr=stderr)
        try:
            pattern = re.compile(r"listening on (http://127\.0\.0\.1:\d+)")
            wait_for(lambda: pattern.search(log.read_text()) is not None, "the address", 20)
            found = pattern.search(log.read_text())
            assert found is not None
            yield process, found[1]
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def fake() -> Iterator[Fake]:
    """One fake server that plays every role."""
    fake = Fake()
    with one_server(fake.app()) as url:
        fake.url = url
        yield fake


def sockets(process: subprocess.Popen[bytes]) -> int:
    return len(psutil.Process(process.pid).net_connections(kind="all"))


def test_200_mixed_requests_leave_no_socket_behind(fake: Fake, tmp_path: Path) -> None:
    def reply(seen: object) -> Reply:
        turn = len(fake.seen) % 5
        if turn == 0:
            return Reply(status=500)
        if turn == 1:
            return Reply(content_type="text/event-stream", chunks=[b"data: "], breaks=True)
        if turn == 2:
            return stream_reply(1, 2)
        return Reply(body={})

    urls = ("--encode", fake.url, "--prefill", fake.url, "--decode", fake.url)
    with proxy_process(tmp_path / "log", *urls, "--timeout-s", "5") as (process, url):
        stack = FakeStack(url)
        # A first answer: the process is fully up, and has no upstream connection yet.
        assert requests.get(f"{url}/v1/completions", timeout=5).status_code == 405
        time.sleep(0.1)
        fds = psutil.Process(process.pid).num_fds()
        start = sockets(process)

        def one(number: int) -> int:
            if number % 10 == 0:
                return requests.post(f"{url}/v1/chat/completions", data=b"{", timeout=10).status_code
            parts = [image(str(i)) for i in range(number % 4)]
            return stack.chat(chat("hi", *parts, stream=number % 2 == 0)).status_code

        fake.reply = reply
        with ThreadPoolExecutor(16) as pool:
            statuses = set(pool.map(one, range(190)))
        assert {200, 400, 500} <= statuses
        fake.reply = lambda seen: Reply(hang=True)
        for number in range(10):
            seen = len(fake.seen)
            body = chat(image("a") if number % 2 else "hi")
            hang_up_after_sending(stack, body, lambda seen=seen: wait_for(lambda: len(fake.seen) > seen, "the call"))
        # Pooled sockets go after the 3 s of keep-alive, at the pool's next round.
        wait_for(lambda: sockets(process) <= start, "the sockets to go back to the start", 10)
        wait_for(lambda: psutil.Process(process.pid).num_fds() <= fds, "the descriptors to go back too", 5)


def test_sigterm_ends_it_within_2_s_even_with_open_requests(fake: Fake, tmp_path: Path) -> None:
    fake.reply = lambda seen: Reply(hang=True)
    with (
        proxy_process(tmp_path / "log", "--decode", fake.url) as (process, url),
        ThreadPoolExecutor(2) as pool,
    ):
        assert requests.get(f"{url}/health", timeout=5).status_code == 200
        hanging = pool.submit(FakeStack(url).chat, chat("hi"))
        wait_for(lambda: len(fake.seen) == 1, "the call")
        start = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.wait(5)
        # 2 s are promised; the third is for a machine that has other work to do.
        assert time.monotonic() - start < 3
        answer = hanging.result(5)
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, "the proxy was stopped")
        wait_for(lambda: fake.abandoned == 1, "the upstream call to be cancelled")


def test_sigterm_ends_an_open_stream_with_an_error_event(fake: Fake, tmp_path: Path) -> None:
    fake.reply = lambda seen: stream_reply(1, hang_after=True)
    with (
        proxy_process(tmp_path / "log", "--decode", fake.url) as (process, url),
        ThreadPoolExecutor(2) as pool,
    ):
        hanging = pool.submit(FakeStack(url).chat, chat("hi", stream=True))
        wait_for(lambda: len(fake.seen) == 1, "the call")
        time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert b'"the proxy was stopped"' in hanging.result(5).content.splitlines()[-2]
        process.wait(3)
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_sigterm_lets_a_short_request_finish(fake: Fake, tmp_path: Path) -> None:
    fake.reply = lambda seen: Reply(wait_s=0.4)
    with (
        proxy_process(tmp_path / "log", "--decode", fake.url) as (process, url),
        ThreadPoolExecutor(2) as pool,
    ):
        running_request = pool.submit(FakeStack(url).chat, chat("hi"))
        wait_for(lambda: len(fake.seen) == 1, "the call")
        process.send_signal(signal.SIGTERM)
        assert running_request.result(5).status_code == 200
        process.wait(5)


def test_one_log_line_a_request(fake: Fake, tmp_path: Path) -> None:
    log = tmp_path / "log"
    urls = ("--encode", fake.url, "--prefill", fake.url, "--decode", fake.url)
    with proxy_process(log, *urls) as (_, url):
        stack = FakeStack(url)
        stack.chat(chat(image("a"), image("b")), {"X-Request-Id": "good"})
        fake.reply = lambda seen: Reply(status=400)
        stack.chat(chat(image("a")), {"X-Request-Id": "bad"})
        fake.reply = lambda seen: Reply(hang=True)
        seen = len(fake.seen)
        hang_up_after_sending(stack, chat("hi"), lambda: wait_for(lambda: len(fake.seen) > seen, "the call"))
        wait_for(lambda: log.read_text().count("total=") == 3, "three lines")
    good, bad, gone = [line for line in log.read_text().splitlines() if "total=" in line]
    ms = r"\d+\.\d+ms"
    assert re.search(rf" good 200 encode=2x{ms} prefill=1x{ms} decode=1x{ms} total={ms}$", good)
    assert re.search(rf" bad 400 encode=1x{ms} total={ms} failed=encode$", bad)
    assert re.search(rf" [0-9a-f]{{32}} 499 prefill=1x{ms} total={ms}$", gone)


def test_stages_can_be_named_on_the_command_line(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planted.py").write_text(
        "from epd_conformance.proxy.stages import Stages\n"
        "class Skips(Stages):\n"
        "    async def encode(self, call, items):\n"
        "        pass\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    urls = ("--encode", fake.url, "--decode", fake.url)
    with proxy_process(tmp_path / "log", *urls, "--stages", "planted:Skips") as (_, url):
        assert FakeStack(url).chat(chat(image("a")), {"X-Request-Id": "r"}).status_code == 200
    assert fake.ids == ["r-d"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"decode": []}, "--decode"),
        ({"decode": ["localhost:8000"]}, "localhost:8000"),
        ({"decode": ["http://h:99999"]}, "99999"),
        ({"decode": ["http://h"], "encode": ["ftp://h"]}, "encode"),
        ({"decode": ["http://h"], "timeout_s": 0}, "timeout_s"),
        ({"decode": ["http://h"], "timout_s": 1}, "timout_s"),
    ],
)
def test_bad_configuration_is_one_sentence(fields: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_config(**fields)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_option_of_the_command_line_reaches_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[ProxyConfig] = []
    monkeypatch.setattr(main_module, "serve", lambda config, host, port, stages: got.append(config))
    expected = {
        "encode": ["http://e"],
        "prefill": ["http://p"],
        "decode": ["http://d"],
        "timeout_s": 7,
        "deadline_s": 8,
        "retries": 2,
        "affinity": True,
        "group_items": 4,
        "metadata_only": True,
        "max_body_bytes": 11,
        "max_item_bytes": 12,
        "media_hosts": ["h"],
        "media_private": True,
        "media_root": "/m",
        "media_fetch": True,
    }
    arguments: list[str] = []
    for name, value in expected.items():
        arguments.append(
            "--" + name.replace("_", "-").removesuffix("s") if name == "media_hosts" else f"--{name.replace('_', '-')}"
        )
        if value is not True:
            arguments.append(value[0] if isinstance(value, list) else str(value))
    assert main(arguments) == 0
    assert got == [ProxyConfig(**expected)]
    # No option is without a flag: the next one will be missed here.
    assert set(expected) == set(ProxyConfig.model_fields)
    assert main(["--decode", "http://d"]) == 0
    assert got[1] == ProxyConfig(decode=["http://d"])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"media_hosts": ["http://h"]}, "media_hosts"),
        ({"media_hosts": ["*.*.h"]}, "media_hosts"),
        ({"media_root": "here"}, "absolute"),
        ({"retries": -1}, "retries"),
        ({"group_items": 0}, "group_items"),
        ({"deadline_s": 0}, "deadline_s"),
    ],
)
def test_bad_options_are_one_sentence(fields: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make_config(decode=["http://h"], **fields)


def test_addresses_lose_their_trailing_slash() -> None:
    assert make_config(decode=["http://h:1/"]).decode == ["http://h:1"]


@pytest.mark.parametrize("name", ["nowhere:X", "json:Nothing", "json:JSONDecoder", "json", "", ":"])
def test_stages_that_cannot_be_loaded(name: str) -> None:
    with pytest.raises(UsageError):
        load_stages(name)
    assert load_stages(None) is Stages


def test_an_address_that_is_taken(fake: Fake) -> None:
    port = int(fake.url.rsplit(":", 1)[1])
    with pytest.raises(UsageError, match=f"127.0.0.1:{port}.*--port"):
        serve(make_config(decode=[closed_port_url()]), "127.0.0.1", port)


def test_bad_arguments_end_with_2_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--encode", "http://h"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_stack_has_independent_turns(make_stack: MakeStack) -> None:
    first, second = make_stack(decode=2), make_stack(decode=2)
    for stack in (first, second):
        stack.chat(chat("hi"))
    assert [len(f.seen) for f in (*first.decode, *second.decode)] == [1, 0, 1, 0]
