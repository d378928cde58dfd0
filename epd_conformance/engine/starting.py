"""What happens before the first request: the import of the connector's module, a setting it does not know, a store it cannot use.

Each function is for `Host.call`, as those of `directed` are; what it tells is judged by `measured`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import socket
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from epd_conformance.engine import beacon, clock, configs
from epd_conformance.engine.events import describe
from epd_conformance.engine.plan import ItemSpec, Plan, ServerSpec
from epd_conformance.engine.site import Site
from epd_conformance.subject import Subject, load

ROLES = ("ec_producer", "ec_consumer")

#: A name that nobody gives a setting, and one that nobody gives a file.
UNKNOWN_SETTING = "epd_conformance_no_such_setting"
NO_FOLDER = "epd-conformance-no-folder"
#: Real seconds in which a connector may still say in a thread of its own what it found out about its store.
_SAYS_WITHIN_S = 1.0

#: Files of /dev that are no devices of anybody's: sources of bytes, the process's own streams, and memory.
_HARMLESS = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/std", "/dev/fd/", "/dev/shm/")
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000  # linux/sched.h


# ---- the import ----


def imports(name: str, root: Path) -> dict[str, Any]:
    """Import the connector's module and ask its class for statistics and metrics, as an API server does (v1/metrics/loggers.py).

    For a process in which nobody has imported it: takes the subject's name. `opened`: sockets and devices that were opened
    because of the connector, and not by a module of vLLM's own that it imports; `error`: what was raised; `offline`: whether the
    kernel let the network be taken away.
    """
    # What an API server has imported before.
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
    from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorLogging, ECConnectorProm

    os.environ.update(CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")
    offline = _leave_network()
    watch = _Watch()
    beacon.light("process.import")
    error, asked, own = "", False, set[str]()
    with watch:
        subject = load(name)
    site = _site(subject, root / "imports")
    connector = site.connector_config("ec_consumer")
    if path := connector.get("ec_connector_module_path"):
        own = {path[: at + 1] for at in range(len(path)) if path[at + 1 : at + 2] in ("", ".")}
    before = _descriptors()
    try:
        config = configs.make(connector, "ec_consumer")
        with watch:
            made = ECConnectorFactory.get_connector_class(config.ec_transfer_config)
            own.add(made.__module__)
            beacon.light("process.build_prom_metrics")
            ECConnectorLogging(config.ec_transfer_config)
            made.build_ec_connector_stats()
            ECConnectorProm(config, ["model_name", "engine"], {0: ["m", "0"]})
        asked = True
    except Exception as raised:
        error = describe(raised)
    finally:
        beacon.light("engine")
    opened = watch.because_of(own) + [one for one in _descriptors() if one not in before]
    return {"asked": asked, "error": error, "opened": sorted(set(opened)), "offline": offline}


class _Watch:
    """Sockets and devices that Python code opens within `with`, each with the modules on the stack, innermost first."""

    def __init__(self) -> None:
        self._on = False
        self._seen: list[tuple[str, list[str]]] = []
        sys.addaudithook(self._hook)

    def __enter__(self) -> None:
        self._on = True

    def __exit__(self, *_: object) -> None:
        self._on = False

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._on:
            return
        what = _opening(event, arguments)
        if what:
            modules: list[str] = []
            frame: FrameType | None = sys._getframe(1)
            while frame is not None:
                modules.append(str(frame.f_globals.get("__name__", "")))
                frame = frame.f_back
            self._seen.append((what, modules))

    def because_of(self, own: set[str]) -> list[str]:
        """What was opened under a module of these, unless a module of vLLM's engine stands in between."""
        found = []
        for what, modules in self._seen:
            at = next((index for index, module in enumerate(modules) if module in own), None)
            if at is not None and not any(map(_of_the_engine, modules[:at])):
                found.append(what)
        return found


def _of_the_engine(module: str) -> bool:
    return module.startswith("vllm.") and not module.startswith("vllm.distributed.ec_transfer")


def _opening(event: str, arguments: tuple[Any, ...]) -> str:
    """What an audit event opens, in words; empty for nothing that matters. A pair of local sockets is no connection."""
    if event == "open" and isinstance(arguments[0], str) and _is_device(arguments[0]):
        return arguments[0]
    if event == "socket.__new__" and arguments[1] != socket.AF_UNIX:
        return f"a socket of family {int(arguments[1])}"
    if event in ("socket.connect", "socket.bind"):
        return f"a socket ({event.partition('.')[2]} {arguments[1]!r})"
    return f"the address of {arguments[0]!r}" if event == "socket.getaddrinfo" else ""


def _is_device(path: str) -> bool:
    return path.startswith("/dev/") and not path.startswith(_HARMLESS)


def _descriptors() -> list[str]:
    """Sockets and devices that this process has open, whoever opened them."""
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
            if _is_device(path):
                found.append(path)
            if path.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as opened:
                    if opened.family != socket.AF_UNIX:
                        found.append(f"a socket of family {int(opened.family)}")
    return found


def _leave_network() -> bool:
    """Move this process into a network of its own that has no way out. Needs rights that not every kernel gives."""
    flags = _CLONE_NEWNET if os.geteuid() == 0 else _CLONE_NEWNET | _CLONE_NEWUSER
    return bool(ctypes.CDLL(None).unshare(flags) == 0)


# ---- both objects are made ----


def unknown_setting(subject: Subject, root: Path) -> dict[str, Any]:
    """Make the objects of each role with a setting that no connector knows.

    `usable`: the connector is made without it; `roles`: whether it was `refused`, and whether a warning has `named` it.
    """
    site = _site(subject, root / "unknown")
    told: dict[str, Any] = {"usable": True, "roles": {}}
    for role in ROLES:
        connector = site.connector_config(role)
        told["usable"] = told["usable"] and not _made(connector, role, "").error
        extra = {**connector.get("ec_connector_extra_config", {}), UNKNOWN_SETTING: 1}
        made = _made({**connector, "ec_connector_extra_config": extra}, role, UNKNOWN_SETTING)
        told["roles"][role] = {"refused": bool(made.error), "named": made.named}
    return told


def unusable_store(subject: Subject, root: Path) -> dict[str, Any]:
    """Make the objects of each role with a store whose folder cannot be made, since a file is in its way.

    `configured`: the connector is told of that folder; `roles`: the `error` that was raised, and whether it, or a warning, has
    `named` the folder.
    """
    site = _site(subject, root / "unusable")
    (site.root / NO_FOLDER).touch()
    site.stack = replace(site.stack, store=site.root / NO_FOLDER / "store")
    told: dict[str, Any] = {"configured": True, "roles": {}}
    for role in ROLES:
        try:
            connector = site.connector_config(role)
        except Exception:
            connector = {}
        if NO_FOLDER not in json.dumps(connector):
            return {"configured": False, "roles": {}}
        made = _made(connector, role, NO_FOLDER)
        told["roles"][role] = {"error": made.error, "named": made.named or NO_FOLDER in made.error}
    return told


def _site(subject: Subject, root: Path) -> Site:
    return Site(subject, Plan(tuple(map(ServerSpec, ROLES)), (ItemSpec("item-0", 0),), ()), root, configs.hidden_size())


class _Made:
    """Both objects of a server, made and shut down again; `error`: what was raised; `named`: whether a word was said."""

    error = ""
    named = False


def _made(connector: dict[str, Any], role: str, word: str) -> _Made:
    found = _Made()
    objects = []
    beacon.light("process.__init__")
    with _listening() as heard:
        try:
            config = configs.make(connector, role)
            for side in ("WORKER", "SCHEDULER"):
                objects.append(configs.connector(config, side))
                if side == "WORKER":
                    objects[-1].start_worker_services()
            end = clock.real() + _SAYS_WITHIN_S
            while word and not heard.warned_of(word) and clock.real() < end:
                time.sleep(0.05)
        except Exception as error:
            found.error = describe(error)
        for one in objects:
            with contextlib.suppress(Exception):
                one.shutdown()
        found.named = bool(word) and heard.warned_of(word)
    beacon.light("engine")
    return found


class _Heard(logging.Handler):
    """What was logged, by level, and what else was written to the process's output."""

    def __init__(self, output: int) -> None:
        super().__init__()
        self._output = output
        self._records: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append((record.levelno, record.getMessage()))

    def warned_of(self, word: str) -> bool:
        """Whether a warning has the word. Output that no logger made has no level: there it is taken for one."""
        levels = [level for level, text in self._records if word in text]
        if levels:
            return max(levels) >= logging.WARNING
        return word.encode() in os.pread(self._output, os.fstat(self._output).st_size, 0)


@contextlib.contextmanager
def _listening() -> Iterator[_Heard]:
    """Hear what is logged, warned of and written within, at the level that vLLM's loggers have by default or above."""
    output, streams = os.memfd_create("heard"), [os.dup(1), os.dup(2)]
    heard = _Heard(output)
    vllm = logging.getLogger("vllm")  # does not hand on to the root
    level = vllm.level
    for logger in (logging.getLogger(), vllm):
        logger.addHandler(heard)
    vllm.setLevel(logging.INFO)
    logging.captureWarnings(True)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            yield heard
    finally:
        for number, stream in enumerate(streams, 1):
            os.dup2(stream, number)
            os.close(stream)
        logging.captureWarnings(False)
        vllm.setLevel(level)
        for logger in (logging.getLogger(), vllm):
            logger.removeHandler(heard)
        os.close(output)
