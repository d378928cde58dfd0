"""What runs in a child of the host: one step of the contract layer with a mutant in the place of a module.

Each function is for `Host.call`: it takes the subject and an empty folder, and returns JSON. The child has imported vLLM, and of
the connector at most what the harness itself needs, such as the format that the probe reads: the harness keeps those modules as
they are, and the connector gets new ones, of which one is the mutant.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import mmap
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from epd_conformance.engine import machine, measured
from epd_conformance.engine.findings import Finding
from epd_conformance.engine.plan import Plan
from epd_conformance.subject import Subject

#: The module attribute that says which mutant it is.
MARK = "__epd_mutant__"
#: Lines of a module, at most: what a tracer in a forked process has to say goes through shared memory of fixed size.
_LINES = 1 << 13

_active = ""
_seen: Lines | None = None


def step(
    subject: Subject,
    root: Path,
    *,
    modules: Sequence[str],
    plan: Mapping[str, Any] | None = None,
    check: str = "",
    changed: Mapping[str, Any] | None = None,
    mutant: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Carry out a plan or a directed check.

    Args:
        modules: the connector's, by dotted name, those that others import first.
        changed: arguments of the check that are not its usual ones.
        mutant: `name`, `module` and the `path` of its source; the child keeps it from the first call on. None: nothing is changed.

    Returns:
        `findings`, and whether the `active` mutant is what the connector has imported; or `broken`: why it cannot be imported.
    """
    if mutant is not None:
        problem = activate(modules, mutant)
        if problem:
            return {"broken": problem}
    # A mutant that lists the wrong folder lists an empty one.
    with contextlib.chdir(root):
        found = _carried(subject, root, plan, check, changed or {})
    active = mutant is None or getattr(sys.modules[mutant["module"]], MARK, "") == mutant["name"]
    return {"findings": [dataclasses.asdict(finding) for finding in found], "active": active}


def traced(
    subject: Subject,
    root: Path,
    *,
    modules: Sequence[str],
    plan: Mapping[str, Any] | None = None,
    check: str = "",
    changed: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """As `step` with nothing changed; also the `lines` that ran of each module, in all threads and forked processes."""
    global _seen
    if _seen is None:
        loaded = {name: importlib.import_module(name).__file__ or "" for name in modules}
        _seen = Lines(loaded)
    with _seen:
        found = _carried(subject, root, plan, check, changed or {})
    return {"findings": [dataclasses.asdict(finding) for finding in found], "lines": _seen.taken()}


def _carried(
    subject: Subject, root: Path, plan: Mapping[str, Any] | None, check: str, changed: Mapping[str, Any]
) -> list[Finding]:
    if plan is not None:
        return machine.run(Plan.from_json(plan), subject, root).findings
    one = measured.CHECKS[check]
    module, _, name = one.path.partition(":")
    function: Callable[..., dict[str, Any]] = getattr(importlib.import_module(module), name)
    return measured.findings(one.requirement, function(subject, root, **{**one.arguments, **changed}))


def activate(modules: Sequence[str], mutant: Mapping[str, str]) -> str:
    """Let the connector's modules be imported anew, one of them changed. Returns why that cannot be done."""
    global _active
    if _active == mutant["name"]:
        return ""
    for name in modules:
        sys.modules.pop(name, None)
    try:
        for name in modules:
            if name == mutant["module"]:
                _replace(name, mutant)
            else:
                importlib.import_module(name)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    _active = mutant["name"]
    return ""


def _replace(name: str, mutant: Mapping[str, str]) -> None:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ImportError(f"no module {name}")
    module: ModuleType = importlib.util.module_from_spec(spec)
    setattr(module, MARK, mutant["name"])
    sys.modules[name] = module
    source = Path(mutant["path"]).read_text(encoding="utf-8")
    exec(compile(source, spec.origin, "exec", dont_inherit=True), vars(module))
    parent, _, leaf = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], leaf, module)


class Lines:
    """A context manager: which lines of some files run meanwhile, here and in what is forked from here."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._base = {path: place * _LINES for place, path in enumerate(files.values())}
        self._names = list(files)
        self._memory = mmap.mmap(-1, len(files) * _LINES)

    def __enter__(self) -> Lines:
        self._memory[:] = bytes(len(self._memory))
        threading.settrace(self._called)
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)

    def taken(self) -> dict[str, list[int]]:
        found = {}
        for place, name in enumerate(self._names):
            part = self._memory[place * _LINES : (place + 1) * _LINES]
            found[name] = [line for line, ran in enumerate(part) if ran]
        return found

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename in self._base else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_lineno is not None:
            self._memory[self._base[frame.f_code.co_filename] + frame.f_lineno] = 1
        return self._line
