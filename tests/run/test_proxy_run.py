"""The profile `proxy` from the options to the report, `verify` and `replay` of it; ours, and one that somebody else starts."""

from __future__ import annotations

import json
import shlex
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from run_fakes import Call, Ended

from epd_conformance.catalogue import ConformanceLevel
from epd_conformance.errors import UsageError
from epd_conformance.features import Feature
from epd_conformance.proxycheck import under_test
from epd_conformance.proxycheck.under_test import OwnProxy, foreign, parse_ports, words
from epd_conformance.report import schema, verify_proxy
from epd_conformance.report.verify import verify
from epd_conformance.verdict import Mode

ORDER = "EPD-PROXY-033[proxy-e-p-d/fake-model/four]"
REFUSAL = "EPD-PROXY-004[proxy-e-p-d/fake-model/decode-404]"
TWO = ("--cell", ORDER, "--cell", REFUSAL)

OURS = shlex.join(
    [
        *(sys.executable, "-m", "epd_conformance.proxy", "--port", "{port}", "--timeout-s", "{limit_s}"),
        *("--encode", "{encode_url}", "--prefill", "{prefill_url}", "--decode", "{decode_url}"),
    ]
)


@pytest.fixture
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fakes need none."""
    from epd_conformance.runtime import vllm_info

    monkeypatch.setattr(vllm_info, "require", lambda: pytest.fail("vLLM was asked for"))


@pytest.fixture
def ours(command: Call, no_vllm: None, tmp_path: Path) -> Callable[..., tuple[Ended, Path]]:
    """`ours("--cell", ...)`: a run of the profile, and its folder."""

    def call(*more: object) -> tuple[Ended, Path]:
        out = tmp_path / "out"
        return command("run", "--profile", "proxy", "--out", out, *more, out=out), out

    return call


def test_a_run_needs_no_subject_and_certifies_the_proxy(ours: Callable[..., tuple[Ended, Path]]) -> None:
    ended, out = ours(*TWO)
    assert ended.code == 3, "some of the expected cells were not asked for"
    assert {name: ended.verdicts[name] for name in (ORDER, REFUSAL)} == dict.fromkeys((ORDER, REFUSAL), "pass")
    assert ended.report is not None
    assert ended.report["run"]["certifies"] == "proxy"
    assert ended.report["subject"]["name"] == "proxy"
    assert ended.report["environment"]["details"]["fakes"] is True
    assert len(ended.cells) > 90
    found = verify(out)
    assert found.ok, found.lines()


def evidence(out: Path, cell: str) -> Path:
    name = cell.replace("[", "_").replace("/", "_").replace("]", "")
    return out / "cells" / f"{name}.json"


def refusal_lost(data: dict[str, Any]) -> None:
    for got in data["got"]:
        got["status"] = 500


def answer_dropped(data: dict[str, Any]) -> None:
    data["got"].pop()


def plan_changed(data: dict[str, Any]) -> None:
    data["plan"]["acts"] = []


def judge_changed(data: dict[str, Any]) -> None:
    data["judge"] = "right"


def other_options(data: dict[str, Any]) -> None:
    data["proxy"]["options"] = {"retries": 9}


def other_proxy(data: dict[str, Any]) -> None:
    data["proxy"] = {"name": "else", "command": "", "url": "", "ports": None, "limitS": 1000.0}


def other_limit(data: dict[str, Any]) -> None:
    data["limit_s"] = 1000.0


def nothing_seen(data: dict[str, Any]) -> None:
    data["seen"] = []


def strange_server(data: dict[str, Any]) -> None:
    data["seen"][0]["server"] = "encode-7"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (refusal_lost, "verdict is pass in the result, and the evidence gives fail"),
        (answer_dropped, "does not hold one answer to each request"),
        (plan_changed, "its plan is not the one of the suite"),
        (judge_changed, "its judge is right in its evidence"),
        (other_options, "the run asked our own with {}"),
        (other_proxy, "the run asked our own with {}"),
        (other_limit, "its limit is 1000 s, and must be 20 s"),
        (nothing_seen, "verdict is pass in the result, and the evidence gives inconclusive"),
        (strange_server, "is no server of it"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_changed_evidence_is_found(
    ours: Callable[..., tuple[Ended, Path]], change: Callable[[Any], None], says: str
) -> None:
    _, out = ours(*TWO)
    path = evidence(out, REFUSAL)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    assert any(says in problem.words for problem in verify(out).problems), verify(out).lines()


def test_a_cell_is_carried_out_again(ours: Callable[..., tuple[Ended, Path]], command: Call) -> None:
    _, out = ours(*TWO)
    again = command("replay", evidence(out, ORDER), "--repeat", "2", "--json")
    assert again.code == 0
    told = json.loads(again.out)
    assert [one["verdict"] for one in (told["before"], *told["now"])] == ["pass"] * 3
    refused = command("replay", evidence(out, ORDER), "--model", "other")
    assert (refused.code, "leave out --model" in refused.err) == (2, True)


def test_a_command_starts_somebody_elses_proxy(ours: Callable[..., tuple[Ended, Path]], command: Call) -> None:
    ended, out = ours(*TWO, "--subject", "theirs", "--proxy-command", OURS, "--proxy-limit-s", "5")
    assert {name: ended.verdicts[name] for name in (ORDER, REFUSAL)} == dict.fromkeys((ORDER, REFUSAL), "pass")
    assert ended.report is not None
    assert ended.report["subject"]["name"] == "theirs"
    assert "listening on" in (out / "logs" / "proxy.log").read_text()
    assert "metadata_only" in json.dumps(ended.report["notVerified"])
    assert verify(out).ok
    assert command("replay", evidence(out, ORDER)).code == 0, "the evidence says how it was started"
    path = evidence(out, ORDER)
    for name, value in (("name", "else"), ("limitS", 1000.0), ("own", True)):
        data = json.loads(path.read_text())
        path.write_text(json.dumps({**data, "proxy": {**data["proxy"], name: value}}))
        assert not verify(out).ok, name
        path.write_text(json.dumps(data))


STARTED = schema.RunStart(
    suite=schema.SuiteInfo(version="1", catalogue="c"),
    run=schema.RunInfo(
        id="r",
        mode=Mode.DEVELOP,
        profile="proxy",
        level=ConformanceLevel.FULL,
        seed=0,
        command=("epd-conformance", "run", "--proxy-url", "http://h:1"),
        started=datetime.now(UTC),
    ),
    subject=schema.SubjectInfo(name="theirs"),
    environment_class="cpu-v1",
    results=schema.Results(),
)
OUR_SUBJECT = schema.SubjectInfo(
    name="proxy",
    implementation=schema.ImplementationInfo(
        organization="epd-conformance", project="epd-conformance proxy", version="1"
    ),
)


@pytest.mark.parametrize(
    ("mode", "command", "subject", "says"),
    [
        (Mode.DEVELOP, STARTED.run.command, STARTED.subject, ""),
        (Mode.CERTIFY, STARTED.run.command, STARTED.subject, "a certificate of somebody else's proxy"),
        (Mode.DEVELOP, ("x", "run"), STARTED.subject, "its command asked for our own"),
        (Mode.CERTIFY, ("x", "run"), OUR_SUBJECT, ""),
        (Mode.DEVELOP, ("x", "run", "--proxy-command=y"), OUR_SUBJECT, "asked for somebody else's"),
        (Mode.DEVELOP, ("x", "run"), OUR_SUBJECT.model_copy(update={"name": "p"}), "its subject is p 1"),
    ],
)
def test_whose_proxy_it_was_fits_the_command(
    mode: Mode, command: tuple[str, ...], subject: schema.SubjectInfo, says: str
) -> None:
    run = STARTED.run.model_copy(update={"mode": mode, "command": command})
    found = list(verify_proxy.subject_problems(STARTED.model_copy(update={"run": run, "subject": subject})))
    assert (len(found), says in "".join(found)) == (1 if says else 0, True), found


def test_without_a_place_for_prefill_it_stands_as_e_pd(ours: Callable[..., tuple[Ended, Path]]) -> None:
    cell = REFUSAL.replace("e-p-d", "e-pd")
    ended, _ = ours("--cell", cell, "--proxy-command", OURS.replace("--prefill '{prefill_url}'", ""))
    assert ended.verdicts[cell] == "pass"
    assert {record["topology"] for record in ended.cells.values()} == {"proxy-e-pd"}
    assert not any("EPD-PROXY-031" in name for name in ended.cells), "there is no hand-over to show"


def test_a_command_that_ends_at_once_is_no_report(ours: Callable[..., tuple[Ended, Path]]) -> None:
    ended, _ = ours("--proxy-command", "false {port} {encode_urls} {decode_urls}")
    assert (ended.code, ended.report) == (2, None)
    assert "the proxy does not answer" in ended.err
    assert "logs/proxy.log" in ended.err


@pytest.fixture
def free_ports() -> Iterator[list[int]]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    yield ports


def test_a_proxy_that_somebody_starts_by_hand(ours: Callable[..., tuple[Ended, Path]], free_ports: list[int]) -> None:
    """The fakes stand where they were asked to, and the run waits for the proxy."""
    e0, e1, d0 = (f"http://127.0.0.1:{port}" for port in free_ports)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    proxies: list[Any] = []

    def start() -> None:
        import subprocess

        command = words(OURS, port, {"encode": [e0, e1], "decode": [d0]}, 5)
        proxies.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))

    threading.Timer(0.5, start).start()
    upstreams = f"encode={free_ports[0]},{free_ports[1]},decode={free_ports[2]}"
    cell = REFUSAL.replace("e-p-d", "e-pd")
    try:
        ended, out = ours("--cell", cell, "--proxy-url", f"http://127.0.0.1:{port}", "--proxy-upstreams", upstreams)
    finally:
        for proxy in proxies:
            proxy.terminate()
            proxy.wait(10)
    assert ended.verdicts[cell] == "pass"
    assert "waiting for the proxy at" in ended.err
    assert verify(out).ok


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--subject", "reference"), "the profile proxy asks about the proxy"),
        (("--model", "/elsewhere"), "the profile proxy has no servers: leave out --model"),
        (("--examples", "4"), "--examples says how many plans the profiles contract, scheduler draw"),
        (("--proxy-url", "http://h:1"), "add --proxy-upstreams"),
        (("--proxy-url", "h:1", "--proxy-upstreams", "decode=1"), "is no address"),
        (("--proxy-url", "http://h:xx", "--proxy-upstreams", "decode=1"), "is no address"),
        (("--proxy-url", "http://h:70000", "--proxy-upstreams", "decode=1"), "is no address"),
        (("--proxy-url", "http://[h:1", "--proxy-upstreams", "decode=1"), "is no address"),
        (("--proxy-url", "http://h:1", "--workers", "2"), "leave out --workers"),
        (("--proxy-upstreams", "decode=1"), "add --proxy-command or --proxy-url"),
        (("--proxy-command", "x {port}"), "names no encode servers"),
        (("--proxy-command", "x {encode_urls} {decode_urls}"), "where the proxy listens"),
        (("--proxy-command", "x 'y"), "cannot be split into words"),
        (("--proxy-command", OURS, "--mode", "certify"), "nobody here knows which version"),
        (("--proxy-command", OURS, "--proxy-limit-s", "0"), "give seconds above 0"),
        (("--proxy-command", OURS, "--proxy-limit-s", "nan"), "give seconds above 0"),
        (("--proxy-command", OURS, "--proxy-limit-s", "inf"), "give seconds above 0"),
        (("--proxy-command", OURS, "--proxy-feature", "wings"), "is no feature"),
        (("--proxy-command", "/nowhere/x {port} {encode_urls} {decode_urls}"), "/nowhere/x cannot be started"),
    ],
)
def test_bad_options_are_one_sentence(
    ours: Callable[..., tuple[Ended, Path]], given: tuple[str, ...], says: str
) -> None:
    ended, _ = ours(*given)
    assert (ended.code, ended.report) == (2, None)
    assert says in ended.err
    assert len(ended.errors) == 1, ended.err


def test_a_proxy_of_another_profile_is_refused(command: Call) -> None:
    ended = command("run", "--subject", "reference", "--profile", "e-pd", "--proxy-command", OURS)
    assert (ended.code, "are for the profile proxy" in ended.err) == (2, True)


def test_the_cells_of_the_profile_are_listed(command: Call) -> None:
    listed = command("list", "--cells", "--profile", "proxy-e-pd").out.split()
    assert REFUSAL.replace("e-p-d", "e-pd") in listed
    assert all("[proxy-e-pd/fake-model/" in cell for cell in listed)


# -- the words of a command ------------------------------------------------------------------------------------------------------

URLS = {"encode": ["http://e0", "http://e1"], "decode": ["http://d0"]}


@pytest.mark.parametrize(
    ("template", "filled"),
    [
        ("p {port} {encode_urls} {decode_urls}", "p 7 http://e0,http://e1 http://d0"),
        ("p -p {port} --e {encode_url} --d={decode_url}", "p -p 7 --e http://e0 --e http://e1 --d=http://d0"),
        ("p :{port} {encode_urls} --pre {prefill_urls} {decode_urls}", "p :7 http://e0,http://e1 http://d0"),
        (
            "p {port} {encode_urls} --pre {prefill_urls:off} {decode_urls}",
            "p 7 http://e0,http://e1 --pre off http://d0",
        ),
        ("p {port} {encode_urls} --pre {prefill_url} {decode_urls} {limit_s}", "p 7 http://e0,http://e1 http://d0 2.5"),
    ],
)
def test_addresses_are_filled_in(template: str, filled: str) -> None:
    assert words(template, 7, URLS, 2.5) == filled.split()


@pytest.mark.parametrize(
    "text",
    ["", "encode=1", "encode=1,2,decode=x", "encode=1,2,decode=70000", "encode=1,2,3,decode=4", "store=1", "1,2"],
)
def test_ports_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="--proxy-upstreams"):
        parse_ports(text)
    assert parse_ports("encode=1,2,prefill=3,decode=4") == {"encode": (1, 2), "prefill": (3,), "decode": (4,)}


def test_the_options_that_name_a_proxy_name_it_again() -> None:
    given = foreign(OURS, "", "", 5, ["metadata_only"], "theirs")
    assert given is not None
    assert given.features == under_test.FEATURES | {Feature.METADATA_ONLY}
    told = given.words()
    assert foreign(told[told.index("--proxy-command") + 1], "", "", 5, ["metadata_only"], "theirs") == given
    by_hand = foreign("", "http://h:1/", "encode=1,2,decode=3", None, [], "")
    assert by_hand is not None
    assert by_hand.words()[-4:] == ["--proxy-url", "http://h:1", "--proxy-upstreams", "encode=1,2,decode=3"]


def test_our_own_proxy_ends() -> None:
    proxy = OwnProxy({"encode": [], "prefill": [], "decode": ["http://127.0.0.1:9"]}, {})
    proxy.tell()
    proxy.wait()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(proxy.url.rpartition(":")[2])), 1)
