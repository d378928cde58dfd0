"""From the end of a server's log to the likely cause, in one sentence that says what to do."""

from __future__ import annotations

import re
from pathlib import Path

# Lines of a log that a person needs in an error message: enough for the last traceback, short enough to be read.
TAIL_LINES = 25

# Most specific first: a connector that does not import also ends in "Engine core initialization failed".
_CAUSES: tuple[tuple[str, str], ...] = (
    (r"ModuleNotFoundError: No module named '([^']+)'", "the module {0!r} does not import in the server: install it in this environment, or mend the connector's module path"),
    (r"AttributeError: (?:module '([^']+)' has no attribute|Class) '?([\w.:]+)'?", "the module {0!r} has no {1!r}: check the class name in the connector's configuration"),
    (r"ImportError: (.+)", "an import failed in the server ({0}): mend that module"),
    (r"Unsupported connector type: (\S+)", "vLLM knows no connector {0!r}: give its module in ec_connector_module_path"),
    (r"operator torchvision::nms does not exist", "torchvision does not fit this torch: run `epd-conformance doctor`"),
    (r"No available memory for the cache blocks|Free memory on device", "the GPU has too little free memory: use fewer servers on one GPU or a larger one"),
    (r"(?:Cannot|can't) allocate memory|MemoryError|DefaultCPUAllocator: .*allocate", "the machine ran out of memory: use a smaller topology or stop something"),
    (r"[Aa]ddress already in use", "the port is taken by another program: stop it or choose another port"),
    (r"(?:does not appear to have a file named|is not a local folder and is not a valid model identifier|Repo id must be)", "the model was not found: check --model (a zoo name, a folder with config.json, or a Hugging Face id that can be reached)"),
    (r"error: unrecognized arguments: (.+)", "this vLLM does not know the arguments {0}: check the vLLM version with `epd-conformance doctor`"),
    (r"error: argument (.+)", "vLLM refused an argument: {0}"),
    (r"ValueError: (.+)", "vLLM refused the configuration: {0}"),
    (r"(?:RuntimeError|AssertionError|KeyError|TypeError): (.+)", "the server raised {0}"),
)  # fmt: skip


def tail(log: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log, or a sentence that it is empty."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "(no log)"
    return "\n".join(text.splitlines()[-lines:]) or "(the log is empty)"


def likely_cause(log: Path, status: int | None) -> str:
    """One sentence from the log, or from the exit status where the log tells nothing."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    # The last match of the most specific pattern: earlier tracebacks are often handled ones.
    for pattern, words in _CAUSES:
        matches = list(re.finditer(pattern, text))
        if matches:
            groups = [(group or "").strip()[:200] for group in matches[-1].groups()]
            return words.format(*groups)
    if status is not None and status < 0:
        if status == -9:
            return "it was killed by SIGKILL (by hand, or by the kernel for want of memory)"
        return f"it was killed by signal {-status}"
    return "no known cause: see the log"
