"""From a log to a cause: excerpts as vLLM 0.32 writes them, the rule of the most specific, and what is a usage error."""

from __future__ import annotations

from pathlib import Path

import pytest

from epd_conformance.topology import causes
from epd_conformance.topology.causes import diagnose, excerpt, likely_cause

ERROR = "(EngineCore pid=4711) ERROR 11-30 12:00:01 [core.py:1203] "
# What every boot that fails in the engine ends with, whatever the cause.
END = """\
(APIServer pid=4700) Traceback (most recent call last):
(APIServer pid=4700)   File "/venv/lib/python3.11/site-packages/vllm/v1/engine/utils.py", line 1003, in wait_for_engine_startup
(APIServer pid=4700)     raise RuntimeError(
(APIServer pid=4700) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""
# What a healthy start may say as well.
NOISE = """\
(APIServer pid=4700) WARNING 11-30 12:00:00 [registry.py:40] Ignored: ModuleNotFoundError: No module named 'flash_attn'
(APIServer pid=4700) INFO 11-30 12:00:00 [utils.py:233] non-default args: {'model': '/m'}
(EngineCore pid=4711) WARNING 11-30 12:00:00 [interface.py:1] ImportError: libcuda.so.1 is not here
"""


def traceback(*lines: str) -> str:
    return "".join(f"{ERROR}{line}\n" for line in lines)


CASES = [
    (
        traceback("Traceback (most recent call last):", "ModuleNotFoundError: No module named 'no_such_module_xyz'"),
        "the module 'no_such_module_xyz' does not import",
        True,
    ),
    (
        traceback(
            '  File "factory.py", line 73, in get_connector_class',
            "    connector_cls = getattr(connector_module, connector_name)",
            "                    ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
            "AttributeError: module 'their.connector' has no attribute 'Conector'",
        ),
        "the module 'their.connector' has no 'Conector': check the class name",
        True,
    ),
    (
        traceback("    x = torch.nope()", "AttributeError: module 'torch' has no attribute 'nope'"),
        "the server raised AttributeError: module 'torch' has no attribute 'nope'",
        False,  # the connector's own fault, and none of the user's
    ),
    (
        traceback("ImportError: cannot import name 'ECBase' from 'vllm.distributed' (/venv/__init__.py)"),
        "an import failed in the server (cannot import name 'ECBase'",
        True,
    ),
    (traceback("ValueError: Unsupported connector type: Nope"), "vLLM knows no connector 'Nope'", True),
    ("RuntimeError: operator torchvision::nms does not exist\n", "torchvision does not fit this torch", True),
    (
        traceback("ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"),
        "the GPU has too little free memory",
        True,
    ),
    (
        traceback("ValueError: Free memory on device cuda:0 (3.1/79.2 GiB) on startup is less than desired"),
        "the GPU has too little free memory",
        True,
    ),
    (
        traceback("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
        "the GPU has too little",
        True,
    ),
    ("OSError: [Errno 12] Cannot allocate memory\n", "the machine ran out of memory", True),
    (
        traceback("RuntimeError: [enforce fail at alloc_cpu.cpp:1] . DefaultCPUAllocator: can't allocate memory"),
        "the machine ran out of memory",
        True,
    ),
    (
        "(APIServer pid=1) OSError: [Errno 98] Address already in use\n",
        "the port is taken by another program: stop it or choose another port",
        True,
    ),
    (
        "OSError: /models/x does not appear to have a file named config.json. Checkout 'https://huggingface.co/x'\n",
        "the model was not found: check --model",
        True,
    ),
    (
        "OSError: nobody/nothing is not a local folder and is not a valid model identifier listed on the hub\n",
        "the model was not found: check --model",
        True,
    ),
    (
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        "  Value error, Invalid repository ID or local directory specified: 'x'.\n",
        "the model was not found: check --model",
        True,
    ),
    (
        "api_server.py: error: unrecognized arguments: --warp-speed 9\n",
        "this vLLM does not know the arguments --warp-speed 9",
        True,
    ),
    (
        "api_server.py: error: argument --dtype: invalid choice: 'float7'\n",
        "vLLM refused an argument (--dtype: invalid choice: 'float7'): correct it",
        True,
    ),
    (
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig\n  Value error, no.\n",
        "vLLM refused the configuration (VllmConfig): correct what the log names",
        True,
    ),
    (traceback("ValueError: the store is not a folder"), "vLLM refused what it was given (the store is not", False),
    (traceback("KeyError: 'grid'"), "the server raised KeyError: 'grid'", False),
    (
        traceback("torch.AcceleratorError: CUDA error: an illegal memory access was encountered"),
        "the server raised AcceleratorError: CUDA error",
        False,
    ),
    (
        traceback("RuntimeError: Worker failed with error 'the load fails', please check the stack trace above"),
        "a worker failed with 'the load fails'",
        False,
    ),
]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "server.log"


@pytest.mark.parametrize(("text", "sentence", "usage"), CASES, ids=[case[1][:40] for case in CASES])
def test_the_cause_is_found_behind_noise_and_before_the_end(text: str, sentence: str, usage: bool, log: Path) -> None:
    log.write_text(NOISE + text + END)
    cause = diagnose(log, 1)
    assert cause.sentence.startswith(sentence)
    assert cause.usage is usage
    assert "\n" not in cause.sentence
    assert likely_cause(log, 1) == cause.sentence


def test_every_pattern_has_an_excerpt() -> None:
    """A pattern that no excerpt reaches may as well not be there."""
    reached = set()
    for _, sentence, _ in CASES:
        for _, words, _ in causes._CAUSES:
            before, _, _ = words.partition("{")
            if sentence.startswith(before) or before.startswith(sentence):
                reached.add(words)
    assert {words for _, words, _ in causes._CAUSES} == reached


def test_the_most_specific_cause_wins_wherever_it_stands(log: Path) -> None:
    specific = traceback("ModuleNotFoundError: No module named 'theirs'")
    general = traceback("ValueError: bad", "RuntimeError: worse")
    for text in (specific + general, general + specific):
        log.write_text(text)
        assert likely_cause(log, 1).startswith("the module 'theirs' does not import")


def test_of_two_alike_the_last_wins(log: Path) -> None:
    log.write_text("KeyError: 'handled long ago'\nKeyError: 'the end'\n")
    assert likely_cause(log, 1) == "the server raised KeyError: 'the end': see the log"


def test_warnings_are_no_cause(log: Path) -> None:
    log.write_text(NOISE)
    assert diagnose(log, 1) == causes.Cause("no known cause: see the log", usage=False)


def test_braces_in_a_log_are_text(log: Path) -> None:
    log.write_text("ValueError: {0} {config!r} {\n")
    assert "({0} {config!r} {)" in likely_cause(log, 1)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (-9, "it was killed by SIGKILL: by hand, by the kernel for want of memory, or with the guard of its run"),
        (-11, "it was killed by signal 11: see the log"),
        (1, "no known cause: see the log"),
        (None, "no known cause: see the log"),
    ],
)
def test_without_words_in_the_log_the_status_tells(status: int | None, words: str, log: Path) -> None:
    assert likely_cause(log, status) == words, "no log at all"
    log.write_bytes(b"\xff\xfe started\n")
    assert diagnose(log, status) == causes.Cause(words, usage=False)


def test_without_a_cause_the_excerpt_is_the_end_of_the_log(log: Path) -> None:
    assert excerpt(log) == "(no log)"
    log.touch()
    assert excerpt(log) == "(the log is empty)"
    log.write_text("\n".join(str(number) for number in range(100)))
    assert excerpt(log).splitlines() == [str(number) for number in range(100 - causes.TAIL_LINES, 100)]


def test_the_excerpt_ends_with_the_cause_and_not_with_the_shutdown(log: Path) -> None:
    """As vLLM logs a connector that raises in a worker: the cause, then two sentences about it, then the shutdown."""
    worker = "(Worker pid=7) ERROR 11-30 12:53:31 [multiproc_executor.py:1063] "
    engine = "(EngineCore pid=6) ERROR 11-30 12:53:31 [core.py:1512] "
    server = "(APIServer pid=5) ERROR 11-30 12:53:31 [vllm_error.py:54] "
    lines = [
        f"{worker}    raise RuntimeError('the load fails')",
        f"{worker}RuntimeError: the load fails",
        f"{engine}RuntimeError: Worker failed with error 'the load fails', please check the stack trace above",
        f"{server}vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above).",
        *("INFO: shutting down" for _ in range(50)),
    ]
    log.write_text("\n".join(lines))
    assert likely_cause(log, 0) == "the server raised RuntimeError: the load fails: see the log"
    assert excerpt(log) == "    raise RuntimeError('the load fails')\nRuntimeError: the load fails"
    log.write_text("\n".join(lines[2:]))
    assert likely_cause(log, 0).startswith("a worker failed with 'the load fails'")
    log.write_text("\n".join(lines[3:]))
    assert likely_cause(log, 0).startswith("the server raised EngineDeadError")


def test_a_log_of_a_whole_night_is_read_from_its_end(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causes, "READ_BYTES", 200)
    log.write_text("ModuleNotFoundError: No module named 'old'\n" + "x" * 300 + "\nKeyError: 'now'\n")
    assert likely_cause(log, 1) == "the server raised KeyError: 'now': see the log"
