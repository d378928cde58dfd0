"""What cannot be done is one sentence on stderr and exit code 2, before anything is started."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import run_fakes
from run_fakes import Call, Ended

from epd_conformance.runtime import vllm_info
from epd_conformance.topology import stack as stacks
from epd_conformance.topology.devices import Inventory

CELL = "EPD-TOK-002[e-pd/tiny-qwen2.5-vl/img1]"


def one_sentence(ended: Ended) -> str:
    """The one line that says what is wrong."""
    assert ended.code == 2, ended.err
    assert ended.report is None
    assert ended.out == ""
    lines = [line for line in ended.err.splitlines() if line and not line.startswith("[")]
    assert len(lines) == 1, ended.err
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("-k", "nomatch"), "no cell matches the selection"),
        (("-k", "(("), "expression"),
        (("--cell", "EPD-TOK-999[e-pd/tiny-qwen2.5-vl/img1]"), "no cell EPD-TOK-999[e-pd/tiny-qwen2.5-vl/img1]"),
        (("--cell", "EPD-TOK-002[e-p-d/tiny-qwen2.5-vl/img1]"), "no cell EPD-TOK-002[e-p-d"),
        (("--profile", "p-d"), "profile p-d has no requirement"),
        (("--profile", "0e-1pd"), "no profile '0e-1pd'"),
        (("--profile", "nonsense"), "no profile 'nonsense'"),
        (("--device", "tpu"), "no device 'tpu': use cpu or cuda"),
        (("--boot", "nonsense"), "no way to boot 'nonsense': use fork or plain"),
        (("--mode", "certify", "--cell", CELL), "--mode certify runs everything"),
        (("--mode", "certify", "-k", "one"), "--mode certify runs everything"),
        (("--mode", "certify", "--level", "core"), "--mode certify runs everything"),
    ],
)
def test_a_bad_request(fake_run: Call, words: tuple[str, ...], says: str, tmp_path: Path) -> None:
    assert says in one_sentence(fake_run(None, *words))
    assert not (tmp_path / "out").exists(), "nothing was begun"


@pytest.mark.parametrize("words", [("--level", "half"), ("--mode", "both"), ("--seed", "x"), ("--no-such-option",)])
def test_what_no_option_takes(fake_run: Call, words: tuple[str, ...]) -> None:
    ended = fake_run(None, *words)
    assert ended.code == 2
    assert words[0] in ended.err
    assert "Traceback" not in ended.err


def test_an_unknown_subject(fake_run: Call) -> None:
    assert "no subject is called 'nobody'" in one_sentence(fake_run(subject="nobody"))


def test_a_folder_that_is_not_empty(fake_run: Call, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kept").touch()
    assert "is not empty" in one_sentence(fake_run())
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["kept"]


def test_a_folder_that_cannot_be_made(fake_run: Call, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for wrong in (tmp_path / "file", tmp_path / "file" / "below"):
        assert "cannot be used for --out" in one_sentence(fake_run(None, "--out", wrong))


@pytest.mark.parametrize(("option", "name"), [("--junitxml", "file/x.xml"), ("--alluredir", "file")])
def test_a_report_below_a_file(fake_run: Call, tmp_path: Path, option: str, name: str) -> None:
    (tmp_path / "file").touch()
    assert "is no folder that can be written to" in one_sentence(fake_run(None, option, tmp_path / name))


def test_without_vllm(fake_run: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_info, "find", lambda: None)
    assert "vLLM is not installed" in one_sentence(fake_run())


def test_with_another_vllm(fake_run: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    old = vllm_info.VllmInfo("0.9.1", None, "vllm", "cuda", Path("/nowhere"))
    monkeypatch.setattr(vllm_info, "find", lambda: old)
    assert "vLLM 0.9.1 (/nowhere) is not certified" in one_sentence(fake_run())


def test_pytest_habits_are_no_part_of_a_run(fake_run: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "-n 2 -k nothing")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    assert fake_run().code == 0


# -- serve -------------------------------------------------------------------------------------------------------------


class FakeLauncher:
    """Starts nothing, and says so: no test of this file may get as far as a server."""

    def __init__(self, boot: Any, logs: Path, environment: Mapping[str, str]) -> None:
        self.boot = boot

    def __enter__(self) -> FakeLauncher:
        return self

    def close(self) -> None: ...

    def start(self, name: str, *_: object) -> Any:
        raise AssertionError(f"{name} was started")


@pytest.fixture
def fake_serve(command: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    run_fakes.install(monkeypatch.setattr)
    monkeypatch.setattr(stacks, "Launcher", FakeLauncher)
    monkeypatch.setattr(stacks, "_check_model", lambda model: None)
    inventory = Inventory(cores=2, memory_gib=1000.0, available_gib=1000.0)
    monkeypatch.setattr(stacks.Inventory, "read", classmethod(lambda cls, gpus=True: inventory))

    def call(*words: object) -> Ended:
        return command("serve", *words, "--out", tmp_path / "serve", "--memory-wait", "0")

    return call


def test_serve_on_a_port_that_is_taken(fake_serve: Call) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} is taken" in one_sentence(fake_serve("--port", port))
    with pytest.raises(AssertionError, match="was started"):
        raise AssertionError(fake_serve("--port", port).err)


def test_serve_on_what_is_no_port(fake_serve: Call) -> None:
    assert "70000 is no port" in one_sentence(fake_serve("--port", 70000))


@pytest.mark.parametrize(
    ("memory", "says"), [((2.0, 2.0), "this machine has 2.0 GiB"), ((1000.0, 1.0), "too little memory")]
)
def test_serve_without_memory(
    fake_serve: Call, monkeypatch: pytest.MonkeyPatch, memory: tuple[float, float], says: str
) -> None:
    inventory = Inventory(2, *memory)
    monkeypatch.setattr(stacks.Inventory, "read", classmethod(lambda cls, gpus=True: inventory))
    assert says in one_sentence(fake_serve())


def test_too_little_memory_ends_a_run(command: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in `serve`, but found by the first cell."""
    session = run_fakes.runs.Run.session
    run_fakes.install(monkeypatch.setattr)
    monkeypatch.setattr(run_fakes.runs.Run, "session", session)
    monkeypatch.setattr(stacks, "Launcher", FakeLauncher)
    monkeypatch.setattr(stacks, "_check_model", lambda model: None)
    monkeypatch.setattr(stacks.Inventory, "read", classmethod(lambda cls, gpus=True: Inventory(2, 4.0, 4.0)))
    out = tmp_path / "out"
    ended = command("run", "--subject", "reference", "--out", out, out=out)
    assert "this machine has 4.0 GiB" in one_sentence(ended)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--topology", "0e-1pd"), "'0e-1pd' is no topology"),
        (("--topology", "p-d", "--subject", "reference"), "p-d has no encode server"),
        (("--device", "tpu"), "no device 'tpu'"),
        (("--boot", "nonsense"), "no way to boot 'nonsense'"),
        (("--device", "cuda", "--boot", "fork"), "cannot be forked"),
        (("--device", "cuda"), "none was found"),
    ],
)
def test_serve_with_a_bad_request(fake_serve: Call, words: tuple[str, ...], says: str) -> None:
    assert says in one_sentence(fake_serve(*words))


def test_serve_without_vllm(fake_serve: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_info, "find", lambda: None)
    assert "vLLM is not installed" in one_sentence(fake_serve())
