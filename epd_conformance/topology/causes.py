"""From the end of a server's log to the likely cause, in one sentence that says what to do."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

# Lines of a log that a person needs in an error message: enough for the last traceback, short enough to be read.
TAIL_LINES = 25
# A server that failed to boot has written some hundred kilobytes at most; one that ran all night may have written gigabytes.
READ_BYTES = 4 << 20

# What vLLM puts before a line: the process, and level, time and place.
_DECORATION = re.compile(
    r"^(?:\((?P<process>[^()]+ pid=\d+)\) )?(?:(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d-]+ [\d:.]+ \[[^\]]*\] ?)?"
)

# (pattern, words, whether the cause is what was asked for, or the machine: exit code 2)
# Most specific first: a connector that does not import also ends in "Engine core initialization failed".
_CAUSES: tuple[tuple[str, str, bool], ...] = (
    (r"^ModuleNotFoundError: No module named '([^']+)'", "the module {0!r} does not import in the server: install it in this environment, or mend the connector's module path", True),
    (r"getattr\(.*\n(?:[ ~^]+\n)?AttributeError: module '([^']+)' has no attribute '([^']+)'", "the module {0!r} has no {1!r}: check the class name in the connector's configuration", True),
    (r"^ImportError: (.+)", "an import failed in the server ({0}): mend that module", True),
    (r"Unsupported connector type: (\S+)", "vLLM knows no connector {0!r}: give its module in ec_connector_module_path", True),
    (r"operator torchvision::nms does not exist", "torchvision does not fit this torch: run `epd-conformance doctor`", True),
    (r"No available memory for the cache blocks|Free memory on device|CUDA out of memory", "the GPU has too little free memory: use fewer servers on one GPU or a larger one", True),
    (r"(?:Cannot|can't) allocate memory|^MemoryError|DefaultCPUAllocator: .*allocate", "the machine ran out of memory: use a smaller topology or stop something", True),
    (r"[Aa]ddress already in use", "the port is taken by another program: stop it or choose another port", True),
    (r"does not appear to have (?:a file|files) named|is not a local folder and is not a valid model identifier|Repo id must be|Invalid repository ID or local directory", "the model was not found: check --model (a zoo name, a folder with config.json, or a Hugging Face id that can be reached)", True),
    (r"error: unrecognized arguments: (.+)", "this vLLM does not know the arguments {0}: check the vLLM version with `epd-conformance doctor`", True),
    (r"error: argument (.+)", "vLLM refused an argument ({0}): correct it", True),
    (r"^\S*ValidationError: \d+ validation errors? for (\w+)", "vLLM refused the configuration ({0}): correct what the log names", True),
    (r"^ValueError: (.+)", "vLLM refused what it was given ({0}): see the log", False),
    # What vLLM says about another process' death hides the cause, so these sentences come last.
    (r"^(?!RuntimeError: (?:Engine core (?:init|proc)|Worker failed with error))(?:[\w.]*\.)?(?!EngineDeadError)(\w+(?:Error|Exception): .+)", "the server raised {0}: see the log", False),
    (r"^RuntimeError: Worker failed with error (.+)", "a worker failed with {0}: see the log", False),
    (r"^(?:[\w.]*\.)?(EngineDeadError: .+)", "the server raised {0}: see the log", False),
)  # fmt: skip
_COMPILED = tuple((re.compile(pattern, re.MULTILINE), words, usage) for pattern, words, usage in _CAUSES)


@dataclass(frozen=True)
class Cause:
    """Why a server ended. `usage`: bad input or a machine that cannot run what was asked, so no finding about anything."""

    sentence: str
    usage: bool


def _read(log: Path) -> str:
    try:
        with log.open("rb") as handle:
            handle.seek(max(0, log.stat().st_size - READ_BYTES))
            return handle.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def diagnose(log: Path, status: int | None) -> Cause:
    """The cause from the log, or from the exit status where the log tells nothing; `status` as of `Process`."""
    found = _find(_read(log).splitlines())
    if found is not None:
        return found[0]
    if status is not None and status < 0:
        if status == -9:
            return Cause(
                "it was killed by SIGKILL: by hand, by the kernel for want of memory, or with the guard of its run",
                False,
            )
        return Cause(f"it was killed by signal {-status}: see the log", False)
    return Cause("no known cause: see the log", False)


def _find(lines: list[str]) -> tuple[Cause, int] | None:
    """The cause, and the number of the line that tells it.

    Only what was said at level ERROR or without a level counts: vLLM warns of modules that it can do without.
    """
    said: list[str] = []
    numbers: list[int] = []
    for number, line in enumerate(lines):
        match = _DECORATION.match(line)
        assert match is not None, "every part is optional"
        if match["level"] in (None, "ERROR", "CRITICAL"):
            said.append(line[match.end() :])
            numbers.append(number)
    text = "\n".join(said)
    for pattern, words, usage in _COMPILED:
        matches = list(pattern.finditer(text))
        if matches:
            # The last one: earlier tracebacks are often handled ones.
            last = matches[-1]
            cause = Cause(words.format(*(group.strip()[:200] for group in last.groups())), usage)
            return cause, numbers[text.count("\n", 0, last.end())]
    return None


def likely_cause(log: Path, status: int | None) -> str:
    """The sentence of `diagnose`."""
    return diagnose(log, status).sentence


def excerpt(log: Path) -> str:
    """The lines of a log that lead up to its cause; its last lines where no cause is known.

    After the cause a dying server says much about its own shutdown, which nobody needs.
    """
    if not log.is_file():
        return "(no log)"
    lines = _read(log).splitlines()
    found = _find(lines)
    end = found[1] + 1 if found is not None else len(lines)
    # Which process said it at what time stands in the log; here it would only push the words out of sight.
    return "\n".join(_bare(line) for line in lines[max(0, end - TAIL_LINES) : end]) or "(the log is empty)"


def _bare(line: str) -> str:
    match = _DECORATION.match(line)
    return line[match.end() :] if match is not None else line
