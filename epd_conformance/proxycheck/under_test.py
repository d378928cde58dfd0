"""The proxy under test: our own in this process, one that a command starts, or one that somebody else has started."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvicorn

import epd_conformance
from epd_conformance.errors import StackError, UsageError
from epd_conformance.features import Feature
from epd_conformance.proxy.app import create_app
from epd_conformance.proxy.config import ProxyConfig, make_config
from epd_conformance.proxycheck.case import FOREIGN_LIMIT_S, OWN_LIMIT_S, OWN_MAKER
from epd_conformance.proxycheck.plan import ARRANGEMENTS, ROLES, Role, servers_of
from epd_conformance.subject import Implementation, StackInfo, Subject

# Time that a proxy which a command starts has until it answers; one that somebody has to start by hand has longer.
COMMAND_S = 60.0
BY_HAND_S = 600.0

#: What every proxy can be asked for; what else is a feature is declared.
FEATURES = frozenset({Feature.KV_DISAGGREGATION, Feature.MULTI_PRODUCER, Feature.LORA})
OWN_FEATURES = FEATURES | {Feature.METADATA_ONLY}

App = Callable[[ProxyConfig], Any]

_PLACE = re.compile(r"\{(port|limit_s|(encode|prefill|decode)_(urls?)(?::([^{}]*))?)\}")


@dataclass(frozen=True)
class Foreign:
    """Somebody else's proxy: `command` starts it, or it runs at `url` with the fakes on these `ports` as its servers."""

    name: str = "proxy"
    command: str = ""
    url: str = ""
    ports: Mapping[Role, tuple[int, ...]] | None = None
    limit_s: float = FOREIGN_LIMIT_S
    features: frozenset[Feature] = FEATURES

    @property
    def arrangements(self) -> tuple[str, ...]:
        """Those that it can stand in."""
        if self.ports is not None:
            return ("proxy-e-p-d",) if self.ports.get("prefill") else ("proxy-e-pd",)
        whole = any(match[2] == "prefill" for match in _PLACE.finditer(self.command))
        return tuple(ARRANGEMENTS) if whole else ("proxy-e-pd",)

    def words(self) -> list[str]:
        """The options that name it again."""
        found = ["--subject", self.name, "--proxy-limit-s", f"{self.limit_s:g}"]
        found += [word for feature in sorted(self.features - FEATURES) for word in ("--proxy-feature", str(feature))]
        if self.ports is None:
            return [*found, "--proxy-command", self.command]
        ports = ",".join(f"{role}={','.join(map(str, ports))}" for role, ports in self.ports.items())
        return [*found, "--proxy-url", self.url, "--proxy-upstreams", ports]

    def to_json(self) -> dict[str, Any]:
        """How it was reached, for evidence."""
        ports = {role: list(ports) for role, ports in self.ports.items()} if self.ports is not None else None
        return {"name": self.name, "command": self.command, "url": self.url, "ports": ports, "limitS": self.limit_s}


class ProxySubject(Subject):
    """The proxy as what a run certifies: `given`, or our own. `standing`: the arrangements of the run."""

    def __init__(self, given: Foreign | None, standing: Sequence[str]) -> None:
        if given is None:
            self.implementation = Implementation(*OWN_MAKER, epd_conformance.__version__)
        else:
            self.implementation = Implementation("", given.name, "")
        features = OWN_FEATURES if given is None else given.features
        # What needs a prefill server cannot be shown where there is none.
        self.features = features if "proxy-e-p-d" in standing else features - {Feature.KV_DISAGGREGATION}

    def connector_config(self, role: str, stack: StackInfo) -> dict[str, Any]:
        raise UsageError("a proxy configures no connector: its servers are fakes")


def foreign(
    command: str, url: str, upstreams: str, limit_s: float | None, features: Sequence[str], name: str
) -> Foreign | None:
    """What the options say; None for our own proxy. Raises UsageError where they do not fit together."""
    if not command and not url:
        if upstreams or limit_s is not None or features:
            raise UsageError(
                "--proxy-upstreams, --proxy-limit-s and --proxy-feature are about somebody else's proxy: add "
                "--proxy-command or --proxy-url"
            )
        return None
    if command and url:
        raise UsageError("--proxy-command starts a proxy and --proxy-url names one that runs: give one of them")
    if command and upstreams:
        raise UsageError("--proxy-command gets the addresses of free ports: leave out --proxy-upstreams")
    if url and not upstreams:
        raise UsageError(
            "--proxy-url needs to know where the proxy looks for its servers: add --proxy-upstreams "
            "encode=9101,9102,decode=9104 (and prefill=…)"
        )
    declared = FEATURES | {_feature(word) for word in features}
    seconds = FOREIGN_LIMIT_S if limit_s is None else limit_s
    if not (math.isfinite(seconds) and seconds > 0):
        raise UsageError(f"--proxy-limit-s {seconds:g}: give seconds above 0")
    if command:
        words(command, 1, dict.fromkeys(ROLES, ("http://127.0.0.1:1",)), seconds)
        return Foreign(name or "proxy", command=command, limit_s=seconds, features=declared)
    try:
        parts = urlsplit(url)
        # A port that is none is noticed when it is asked for.
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise UsageError(f"--proxy-url {url!r} is no address: write http://HOST:PORT")
    ports = parse_ports(upstreams)
    return Foreign(name or "proxy", url=url.rstrip("/"), ports=ports, limit_s=seconds, features=declared)


def _feature(word: str) -> Feature:
    try:
        return Feature(word)
    except ValueError:
        raise UsageError(f"--proxy-feature {word!r} is no feature: see epd-conformance list --features") from None


def parse_ports(text: str) -> dict[Role, tuple[int, ...]]:
    """`encode=9101,9102,prefill=9103,decode=9104` as ports by role. Raises UsageError."""
    found: dict[Role, list[int]] = {}
    role: Role | None = None
    for word in text.split(","):
        named, equals, port = word.strip().rpartition("=")
        if equals:
            role = next((one for one in ROLES if one == named), None)
        if role is None or not port.isdecimal() or not 0 < int(port) < 65536:
            raise UsageError(f"--proxy-upstreams: {word!r} is not understood; write encode=9101,9102,decode=9104")
        found.setdefault(role, []).append(int(port))
    counts = {role: len(ports) for role, ports in found.items()}
    if counts not in [dict(wanted) for wanted in ARRANGEMENTS.values()]:
        raise UsageError(
            "--proxy-upstreams must name two encode servers, one decode server and, for e-p-d, one prefill server: "
            "encode=9101,9102,prefill=9103,decode=9104"
        )
    return {role: tuple(ports) for role, ports in found.items()}


def words(command: str, port: int, urls: Mapping[Role, Sequence[str]], limit_s: float) -> list[str]:
    """A command with the addresses filled in. Raises UsageError for one that lacks a place.

    `{port}`: where the proxy shall listen. `{encode_urls}`: all addresses with commas between; `{prefill_urls:none}`: the same, and
    `none` where there is no such server. A word with `{encode_url}` is repeated for each server, with the option before it.
    `{limit_s}`: the seconds of silence that the proxy shall bear.
    """
    try:
        given = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"--proxy-command cannot be split into words ({error}): correct its quotes") from None
    places = {match[0].strip("{}").partition(":")[0] for word in given for match in _PLACE.finditer(word)}
    for needed in ("encode", "decode"):
        if not places & {f"{needed}_urls", f"{needed}_url"}:
            raise UsageError(
                f"--proxy-command names no {needed} servers: write {{{needed}_urls}} or {{{needed}_url}} where they belong"
            )
    if "port" not in places:
        raise UsageError("--proxy-command does not say where the proxy listens: write {port} where it belongs")
    found: list[str] = []
    for word in given:
        place = next((match for match in _PLACE.finditer(word) if match[3]), None)
        servers = urls.get(_role(place[2]), ()) if place is not None else ()
        option = []
        if place is not None and word == place[0] and found and found[-1].startswith("-"):
            option = [found.pop()]
        if place is not None and place[3] == "url":
            for url in servers:
                found += [*option, word.replace(place[0], url)]
            continue
        if place is not None:
            value = ",".join(servers) or place[4]
            if value is None:
                # An option without a value: there is no such server.
                continue
            word = word.replace(place[0], value)
        found += [*option, word.replace("{port}", str(port)).replace("{limit_s}", f"{limit_s:g}")]
    return found


def _role(name: str) -> Role:
    return next(role for role in ROLES if role == name)


class OwnProxy:
    """Our own proxy in a thread, in front of these servers; it takes requests at `url` as soon as it is made."""

    def __init__(self, urls: Mapping[Role, Sequence[str]], options: Mapping[str, Any], app: App = create_app) -> None:
        roles = {role: list(found) for role, found in urls.items()}
        config = make_config(**roles, **{"timeout_s": OWN_LIMIT_S, **options})
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._server = uvicorn.Server(
            uvicorn.Config(
                app(config), http="httptools", lifespan="on", log_level="critical", timeout_graceful_shutdown=1
            )
        )
        self._thread = threading.Thread(target=self._server.run, args=([listener],), daemon=True)
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise StackError("our own proxy did not start")
            time.sleep(0.002)

    def tell(self) -> None:
        """Have it end; `wait` for it. Apart, so that several end at once: each looks ten times a second whether it shall."""
        self._server.should_exit = True

    def wait(self) -> None:
        self._thread.join(10)


@contextlib.contextmanager
def started(given: Foreign, urls: Mapping[Role, Sequence[str]], log: Path) -> Iterator[tuple[str, Callable[[], bool]]]:
    """A proxy that a command starts: its address, and whether it still runs. It and its children end with the context."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = words(given.command, port, urls, given.limit_s)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        try:
            process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        except OSError as error:
            raise UsageError(f"--proxy-command: {command[0]} cannot be started ({error.strerror})") from None
        try:
            yield f"http://127.0.0.1:{port}", lambda: process.poll() is None
        finally:
            # The group is the proxy's own: it began a session.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def fake_ports(given: Foreign | None, arrangement: str) -> dict[str, int]:
    """The port of each fake, 0 for any."""
    names = servers_of(ARRANGEMENTS[arrangement])
    if given is None or given.ports is None:
        return dict.fromkeys(names, 0)
    return {name: given.ports[_role(name.partition("-")[0])][int(name.partition("-")[2])] for name in names}
