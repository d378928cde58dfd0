"""Stacks of servers that something else started: asked, never started, stopped or reset.

Only our own proxy, where one is needed, is started and ended here. The journals that the attached servers write, if any, are
copied into the run's folder line by line as they are read, so that what was judged is what lies there as evidence.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from epd_conformance.attachment import Attachment, Given, Need
from epd_conformance.connectors.journal import Journal
from epd_conformance.errors import StackError, UsageError
from epd_conformance.live import http
from epd_conformance.live.layout import Layout
from epd_conformance.report import schema, verify_journal
from epd_conformance.subject import StackInfo
from epd_conformance.topology.claims import Ports
from epd_conformance.topology.devices import Placement
from epd_conformance.topology.launcher import Boot, Launcher, Process
from epd_conformance.topology.spec import Role, Shape, Topology
from epd_conformance.topology.stack import AnySite, Server, Stack, StackSpec

# A server that works at a long batch still answers these paths at once: they do not go through its engine loop's queue.
ANSWER_S = 10.0
# Our proxy starts in under a second, and the servers behind it were healthy a moment ago.
PROXY_READY_S = 30.0


@dataclass
class AttachedServer(Server):
    """A server that runs somewhere. Its `process` stands for it in logs, and has no pid."""

    address: str = ""

    @property
    def url(self) -> str:
        return self.address


@dataclass
class AttachedStack(Stack):
    """Servers that run already. `source` is the journal folder that they write to, None for none."""

    source: Path | None = None

    @property
    def journal(self) -> Journal:
        """The copy in the run's folder, with everything that the servers have written by now."""
        target = self.folder / "journal"
        target.mkdir(parents=True, exist_ok=True)
        if self.source is not None:
            copy_lines(self.source, target, [server.name for server in self.servers])
        return Journal(target)

    @property
    def store(self) -> Path:
        return self.info.store if self.info is not None else super().store

    def processes(self) -> list[Process]:
        """Only what was started here."""
        return [*self.helpers, *([self.proxy] if self.proxy else [])]

    def dead(self) -> list[Process]:
        """Processes of ours that have ended. Raises StackError for an attached server that does not answer.

        Nobody here knows how it ended, and nobody may start it again: it is no finding about the subject.
        """
        for server in self.servers:
            if server.url and (complaint := _unhealthy(server.url)) is not None:
                raise StackError(f"the attached server {server.name} at {server.url} {complaint}: start it again")
        return super().dead()


def copy_lines(source: Path, target: Path, servers: Iterable[str]) -> None:
    """Copy what was added to the journals of these servers since the last time, whole lines only.

    A half line would become the end of a mark, and the other half a torn line. Raises StackError where a file has become
    shorter: what was judged before is gone then.
    """
    names = set(servers)
    for path in sorted(source.glob("*.ndjson")):
        if path.name.partition(".")[0] not in names:
            continue
        copy = target / path.name
        have = copy.stat().st_size if copy.exists() else 0
        try:
            with path.open("rb") as handle:
                if os.fstat(handle.fileno()).st_size < have:
                    raise StackError(f"the journal {path} was cut short while the run went on: leave it alone")
                handle.seek(have)
                fresh = handle.read()
        except OSError as error:
            raise StackError(f"the journal {path} cannot be read any more ({error.strerror})") from error
        if whole := fresh[: fresh.rfind(b"\n") + 1]:
            with copy.open("ab") as handle:
                handle.write(whole)


# -- looking -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """What the servers of an attachment said when they were looked at: `servers` by name, for the report."""

    attachment: Attachment
    given: Given
    servers: Mapping[str, dict[str, Any]]

    def environment(self) -> schema.EnvironmentInfo:
        """What is known of the environment: what the servers say. Flags, patches and the model's bytes are not."""
        attachment = self.attachment
        versions = sorted({str(server["vllm"]) for server in self.servers.values() if server.get("vllm")})
        return schema.EnvironmentInfo(
            vllm_version=", ".join(versions),
            models=(schema.ModelInfo(id=attachment.model),),
            details={
                "attached": True,
                "servers": {name: dict(server) for name, server in self.servers.items()},
                "journal": attachment.journal is not None,
                "proxy": attachment.proxy or ("none" if attachment.topology.kind == "aggregated" else "ours"),
            },
        )


def look(attachment: Attachment) -> Found:
    """Ask every address who is there, and read the journals.

    Raises UsageError, naming address and answer, where one does not answer, serves another model, or where a journal is not
    that of these servers.
    """
    servers = {}
    for name, url in attachment.urls().items():
        servers[name] = _look_at_server(name, url, attachment.model)
    servers["baseline"] = _look_at_server("baseline", attachment.baseline, attachment.model)
    for name, address in (("proxy", attachment.proxy), ("baseline_pd", attachment.baseline_pd)):
        if address is not None:
            servers[name] = _look_at_proxy(name, address, attachment.model)
    needs = {Need.SERVERS} if attachment.direct else set()
    if attachment.journal is not None:
        _look_at_journals("journal", attachment.journal, Layout(attachment.topology).connected, ("scheduler", "worker"))
        needs.add(Need.JOURNAL)
    if attachment.pd_journal is not None:
        _look_at_journals("pd_journal", attachment.pd_journal, ["decode-0"], ("kv-scheduler", "kv-worker"))
    if attachment.store is not None:
        needs.add(Need.STORE)
    if attachment.topology.kind == "aggregated" and _has_route(f"{attachment.decode[0]}/reset_encoder_cache"):
        needs.add(Need.RESET)
    return Found(attachment, Given(frozenset(needs)), servers)


def _look_at_server(name: str, url: str, model: str) -> dict[str, Any]:
    if (complaint := _unhealthy(url)) is not None:
        raise UsageError(f"{name} at {url} {complaint}: start it, or correct its address")
    known = {"url": url, "vllm": _json(f"{url}/version").get("version", "")}
    listed = _json(f"{url}/v1/models")
    return known | _served(name, url, model, listed)


def _look_at_proxy(name: str, url: str, model: str) -> dict[str, Any]:
    """A proxy need not have the paths of a server, but it must answer, and not with a failure."""
    try:
        answer = http.get(f"{url}/v1/models", timeout=ANSWER_S)
    except requests.RequestException as error:
        raise UsageError(
            f"{name} at {url} does not answer ({_cause(error)}): start it, or correct its address"
        ) from error
    if answer.status_code >= 500:
        raise UsageError(f"{name} at {url} answers /v1/models with {answer.status_code}: see what its servers do")
    listed = _json(f"{url}/v1/models") if answer.status_code == 200 else {}
    return {"url": url} | (_served(name, url, model, listed) if listed else {})


def _served(name: str, url: str, model: str, listed: Mapping[str, Any]) -> dict[str, Any]:
    entries = [entry for entry in listed.get("data") or () if isinstance(entry, dict)]
    mine = next((entry for entry in entries if entry.get("id") == model), None)
    if mine is None:
        others = ", ".join(str(entry.get("id")) for entry in entries) or "no model"
        raise UsageError(f"{name} at {url} serves {others}, not {model}: correct `model` or the address")
    return {"model": {key: mine[key] for key in ("id", "root", "max_model_len") if key in mine}}


def _look_at_journals(key: str, folder: Path, servers: Iterable[str], sides: tuple[str, ...]) -> None:
    files = verify_journal.read_files(folder)
    for name, words in verify_journal.broken_files(files):
        raise UsageError(
            f"`{key}`: {folder / name}: {words}: give every start of the servers a new folder, and one server a name"
        )
    begun = {(event["server"], event["side"]) for lines in files.values() for event in lines if event["ev"] == "init"}
    for server in servers:
        for side in sides:
            if (server, side) not in begun:
                raise UsageError(
                    f"`{key}`: {folder} holds no `init` line of {server} ({side}): start it with the recording connector, "
                    f"EPD_JOURNAL and EPD_SERVER={server}, or leave `{key}` out"
                )


def _unhealthy(url: str) -> str | None:
    """What is wrong with a server, as a clause; None if it is healthy."""
    try:
        status = http.get(f"{url}/health", timeout=ANSWER_S).status_code
    except requests.RequestException as error:
        return f"does not answer ({_cause(error)})"
    return None if status == 200 else f"answers /health with {status}"


def _cause(error: requests.RequestException) -> str:
    """A refused connection in two words, not as the five nested exceptions that it is."""
    if isinstance(error, requests.Timeout):
        return f"nothing within {ANSWER_S:g} s"
    if isinstance(error, requests.ConnectionError):
        return "connection refused" if "refused" in str(error) else "no connection"
    return type(error).__name__


def _json(url: str) -> dict[str, Any]:
    """The JSON object at an address; empty where there is none."""
    try:
        found = http.get(url, timeout=ANSWER_S).json()
    except (requests.RequestException, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _has_route(url: str) -> bool:
    """Whether a server takes POST at an address: asked with GET, which changes nothing, it says 405 where it does."""
    try:
        return http.get(url, timeout=ANSWER_S).status_code == 405
    except requests.RequestException:
        return False


# -- the site ----------------------------------------------------------------------------------------------------------


class AttachedSite(AnySite):
    """The stacks of an attachment. Leaving it ends our proxies, and nothing else."""

    def __init__(self, folder: Path, found: Found, *, say: Callable[[str], None] = lambda _: None) -> None:
        """`folder`: logs, and copies of the journals, are kept under it."""
        self.folder = folder
        self.found = found
        self.attachment = found.attachment
        self.say = say
        self.environment = dict(os.environ)
        self.launcher = Launcher(Boot.PLAIN, folder / "logs", self.environment)
        self.ports = Ports()
        self.ready_s = PROXY_READY_S
        self.stacks: list[Stack] = []

    @property
    def environment_class(self) -> str:
        return str(self.attachment.environment_class)

    def patches(self) -> list[dict[str, str]]:
        """None: whoever started the servers knows them."""
        return []

    def block_size(self, shape: Shape) -> int:
        """As the decode server's KV connector wrote it down; the harness's own where nobody did."""
        if self.attachment.journal is None:
            return shape.block_size
        blocks = [
            int(event["block_size"])
            for event in Journal(self.attachment.journal).read()
            if event["ev"] == "init" and event["side"] == "kv-scheduler"
        ]
        return blocks[-1] if blocks else shape.block_size

    def boot(self, *specs: StackSpec) -> list[Stack]:
        """The stacks that the specs stand for: with a subject the attached one, without it a baseline."""
        stacks = [self._attach(spec) for spec in specs]
        self.stacks.extend(stacks)
        return list(stacks)

    def restart(self, stack: Stack, servers: Sequence[Server]) -> None:
        """Raises StackError: what the harness did not start it does not end."""
        raise StackError("the servers are not the harness's own: they are not restarted")

    def start_bypass(self, stack: Stack) -> str:
        """As of any site; no address where only somebody's proxy is known."""
        return super().start_bypass(stack) if self.attachment.direct else ""

    def _attach(self, spec: StackSpec) -> Stack:
        attachment = self.attachment
        stack = AttachedStack(spec, self.folder / "stacks" / spec.name, served_name=attachment.model)
        if spec.subject is None and spec.topology.kind == "p-d":
            assert attachment.baseline_pd is not None  # e-p-d, whose attachment has one
            stack.source = attachment.pd_journal
            stack.base_url = attachment.baseline_pd
            self._servers(stack, {})
        elif spec.subject is None:
            stack.base_url = attachment.baseline
            self._servers(stack, {"aggregated-0": attachment.baseline})
        else:
            stack.source = attachment.journal
            self._servers(stack, attachment.urls())
            stack.info = self._info(spec.topology)
            self._front(stack)
        # Folders that a cell names as evidence are there, also where nobody writes a journal.
        _ = stack.journal
        return stack

    def _servers(self, stack: Stack, urls: Mapping[str, str]) -> None:
        connected = Layout(stack.spec.topology).connected if stack.spec.subject is not None else []
        recorded = self.attachment.journal is not None
        for name, role in stack.spec.topology.servers():
            full = f"{stack.spec.name}.{name}"
            log = self.folder / "logs" / f"{full}.log"
            log.write_text(
                f"attached: {urls.get(name, 'somewhere behind a proxy')}; its log is kept where it was started\n"
            )
            stack.servers.append(
                AttachedServer(
                    name,
                    role,
                    port=0,
                    process=Process(full, 0, log),
                    flags=(),
                    placement=Placement(words="attached"),
                    expects=("scheduler", "worker") if recorded and name in connected else (),
                    address=urls.get(name, ""),
                )
            )

    def _info(self, topology: Topology) -> StackInfo | None:
        if self.attachment.store is None:
            return None
        return StackInfo(
            topology=topology.kind,
            sizes={str(role): count for role, count in topology.counts},
            model=self.attachment.model,
            environment_class=self.environment_class,
            store=self.attachment.store,
            ports={},
        )

    def _front(self, stack: Stack) -> None:
        if self.attachment.proxy is not None:
            stack.base_url = self.attachment.proxy
        elif stack.spec.topology.kind == "aggregated":
            stack.base_url = stack.of(Role.AGGREGATED)[0].url
        else:
            self.start_proxy(stack)
            assert stack.proxy is not None
            try:
                self.wait_for(stack.proxy, stack.base_url)
            except BaseException:
                self.stop(stack)
                raise
            self.say(f"our proxy stands at {stack.base_url}")
