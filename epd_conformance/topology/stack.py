"""Stacks: running topologies. One `Site` owns the processes of a run; each `Stack` in it is servers, proxy, store and journal."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import requests

from epd_conformance.configuration import Configurations
from epd_conformance.connectors import barriers
from epd_conformance.connectors.journal import DIRECTORY, SERVER, Journal
from epd_conformance.connectors.names import MODULE as RECORDING
from epd_conformance.connectors.names import ec_name, kv_name
from epd_conformance.errors import StackError, UsageError
from epd_conformance.runtime import repairs
from epd_conformance.subject import LaunchOptions, StackInfo, Subject
from epd_conformance.topology import causes
from epd_conformance.topology.claims import Memory, Ports
from epd_conformance.topology.devices import Inventory, Placement, assign
from epd_conformance.topology.launcher import Boot, Launcher, Process
from epd_conformance.topology.spec import Role, Shape, Topology, ec_role, kv_role, server_flags
from epd_conformance.topology.zygote import FORK_CONTEXT

VLLM_SERVER = "vllm.entrypoints.openai.api_server"
PROXY = "epd_conformance.proxy"
SERVED_NAME = "epd-model"

# From start to ready. On CPU a plain start takes half a minute alone and more beside others, and the first boot of an
# architecture inspects it in a subprocess (79 s were seen for three servers at once). On GPU a large checkpoint is read.
READY_S = {"cpu": 240.0, "cuda": 1200.0}
# How long to wait for memory that other runs hold: as long as a short run of theirs takes.
MEMORY_WAIT_S = 600.0


@dataclass(frozen=True)
class ModelUse:
    """Which model the servers load and how: `path` is a folder or a hub id, `limits` the most items of each modality."""

    name: str
    path: str
    dtype: str
    limits: Mapping[str, int]
    digest: str | None = None
    local: bool = True
    revision: str | None = None


@dataclass(frozen=True)
class StackSpec:
    """One stack to boot.

    `subject` is None for a baseline. `recorder` False gives the connectors to vLLM as they are, without journals.
    `stages` names another proxy stage class (`module:Class`), for the negative controls that plant a proxy defect.
    `port` is where clients connect; a free one unless given. `barriers`: its recorders and proxies get points at which they can be
    held (connectors/barriers.py); others have none.
    """

    name: str
    topology: Topology
    shape: Shape
    subject: Subject | None = None
    recorder: bool = True
    stages: str | None = None
    port: int | None = None
    barriers: bool = False


@dataclass
class Server:
    """One running vLLM server."""

    name: str
    role: Role
    port: int
    process: Process
    flags: tuple[str, ...]
    placement: Placement
    expects: tuple[str, ...] = ()
    ready_after_s: float | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    """What its environment has beyond that of all servers."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@dataclass
class Stack:
    """A running topology. `base_url` is where a client sends its requests: the proxy, or the only server.

    `served_name` is what its servers call the model.
    """

    spec: StackSpec
    folder: Path
    servers: list[Server] = field(default_factory=list)
    proxy: Process | None = None
    base_url: str = ""
    helpers: list[Process] = field(default_factory=list)
    info: StackInfo | None = None
    """What its subject was told about it."""
    ports: list[int] = field(default_factory=list)
    served_name: str = SERVED_NAME
    barriers: Path | None = None
    """The folder of the gates' sockets, where it has any."""

    @property
    def journal(self) -> Journal:
        return Journal(self.folder / "journal")

    @property
    def store(self) -> Path:
        return self.folder / "store"

    @property
    def kv_store(self) -> Path:
        return self.folder / "kv"

    def of(self, *roles: Role) -> list[Server]:
        """Servers that have one of these roles."""
        return [server for server in self.servers if server.role in roles]

    def dead(self) -> list[Process]:
        """Processes of this stack that have ended."""
        return [process for process in self.processes() if not process.alive]

    def processes(self) -> list[Process]:
        """Everything that was started for this stack: proxies first, so that no request reaches a server that is ending."""
        return [
            *self.helpers,
            *([self.proxy] if self.proxy else []),
            *(server.process for server in self.servers),
        ]


class AnySite(ABC):
    """Where the stacks of a session come from: started here (`Site`), or by something else (live/attached.py).

    What both do: proxies, and the end of what was started. A context manager: when it is left, or its process dies, nothing
    of what it started is left.
    """

    environment: Mapping[str, str]
    launcher: Launcher
    ports: Ports
    ready_s: float
    stacks: list[Stack]

    def __enter__(self) -> Self:
        try:
            self.launcher.__enter__()
        except BaseException:
            self.close_claims()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.launcher.close()
        self.close_claims()

    def close_claims(self) -> None:
        """Give back what was claimed of the machine."""
        self.ports.close()

    @property
    @abstractmethod
    def environment_class(self) -> str:
        """What a certificate from this site is valid for (design §6)."""

    @abstractmethod
    def patches(self) -> list[dict[str, str]]:
        """Every deviation from an untouched vLLM that is known to be in force in the servers of this site."""

    @abstractmethod
    def boot(self, *specs: StackSpec) -> list[Stack]:
        """Running stacks for these specs, in their order. Raises UsageError or StackError."""

    def block_size(self, shape: Shape) -> int:
        """Tokens in a KV block of servers that were asked for with this shape."""
        return shape.block_size

    @abstractmethod
    def restart(self, stack: Stack, servers: Sequence[Server]) -> None:
        """End servers of a stack and start them again as they were. Raises UsageError or StackError."""

    def stop(self, stack: Stack) -> None:
        """End a stack's processes; its logs, journals and stores stay."""
        for process in stack.processes():
            with contextlib.suppress(StackError):
                self.launcher.stop(process)
        self.ports.release(stack.ports)
        stack.ports.clear()
        if stack in self.stacks:
            self.stacks.remove(stack)

    def _port(self, stack: Stack, asked: int | None = None) -> int:
        port = self.ports.take_exactly(asked) if asked else self.ports.take()
        stack.ports.append(port)
        return port

    def start_proxy(self, stack: Stack) -> None:
        """Start the stack's proxy, in front of all its servers."""
        port = stack.spec.port or self._port(stack)
        arguments = ["--host", "127.0.0.1", "--port", str(port)]
        for role, option in (
            (Role.ENCODE, "--encode"),
            (Role.PREFILL, "--prefill"),
            (Role.DECODE, "--decode"),
            (Role.PREFILL_DECODE, "--decode"),
        ):
            for server in stack.of(role):
                arguments += [option, server.url]
        if stack.spec.stages:
            arguments += ["--stages", stack.spec.stages]
        stack.proxy = self.launcher.start(f"{stack.spec.name}.proxy", PROXY, arguments, _held(stack, "proxy"))
        stack.base_url = f"http://127.0.0.1:{port}"

    def start_bypass(self, stack: Stack) -> str:
        """Start a second proxy that knows no encode server, for requests that shall not be primed; returns its address."""
        port = self._port(stack)
        arguments = ["--host", "127.0.0.1", "--port", str(port)]
        for role, option in ((Role.PREFILL, "--prefill"), (Role.DECODE, "--decode")):
            for server in stack.of(role):
                arguments += [option, server.url]
        process = self.launcher.start(f"{stack.spec.name}.bypass", PROXY, arguments, _held(stack, "bypass"))
        stack.helpers.append(process)
        url = f"http://127.0.0.1:{port}"
        self.wait_for(process, url)
        return url

    def wait_for(self, process: Process, url: str) -> None:
        """Wait until a proxy that was started here, and so every server behind it, is healthy."""
        deadline = time.monotonic() + self.ready_s
        while not _healthy(url):
            if not process.alive:
                raise process.failure()
            if time.monotonic() > deadline:
                raise StackError(f"{process.name} not ready within {self.ready_s:.0f} s\n{causes.excerpt(process.log)}")
            time.sleep(0.05)


class Site(AnySite):
    """All processes of one run. A context manager: when it is left, or its process dies, nothing of it is left."""

    def __init__(
        self,
        folder: Path,
        model: ModelUse,
        *,
        device: str = "cpu",
        boot: Boot = Boot.FORK,
        inventory: Inventory | None = None,
        say: Callable[[str], None] = lambda _: None,
        ready_s: float | None = None,
        memory_wait_s: float = MEMORY_WAIT_S,
        cache: Path | None = None,
        configurations: Configurations | None = None,
    ) -> None:
        """`folder`: logs, journals and stores are kept under it. `say`: receives one line of progress at a time.

        `inventory`: what to believe about the machine; read, and before each boot read again, unless given.
        `configurations`: what remembers the answers of the subjects; unless given, differing ones are only said.
        Raises UsageError where the model is a folder that holds none, or the device cannot be booted so.
        """
        if device == "cuda" and boot is Boot.FORK:
            raise UsageError("servers on GPU cannot be forked from a parent that imported CUDA: use --boot plain")
        self.folder = folder
        self.model = model
        self.device = device
        _check_model(model)
        self._stated = inventory
        self.inventory = inventory or Inventory.read(gpus=device == "cuda")
        self.say = say
        self.ready_s = ready_s or READY_S[device]
        self.memory_wait_s = memory_wait_s
        self.environment = server_environment(device, model, cache)
        self.launcher = Launcher(boot, folder / "logs", self.environment)
        self.ports = Ports()
        self.memory = Memory()
        self.configurations = configurations or Configurations(warn=lambda words: say(f"warning: {words}"))
        self.stacks: list[Stack] = []

    def close_claims(self) -> None:
        super().close_claims()
        self.memory.close()

    @property
    def environment_class(self) -> str:
        return "cuda" if self.device == "cuda" else "cpu-v1"

    def patches(self) -> list[dict[str, str]]:
        return repairs.in_force(*([FORK_CONTEXT] if self.launcher.boot is Boot.FORK else []))

    # -- boot ----------------------------------------------------------------------------------------------------------

    def boot(self, *specs: StackSpec) -> list[Stack]:
        """Boot stacks side by side and wait until each is ready.

        Raises UsageError where they do not fit the machine or a server dies of what it was asked for (causes.py says
        which deaths those are), StackError where one does not come up for another reason. Then everything that these stacks
        had started is stopped.

        A stack of the name of an earlier one gets another (`e-pd-2`): folder, journals and logs are its own.
        """
        specs = tuple(replace(spec, name=self._unused(spec.name)) for spec in specs)
        names = [(f"{spec.name}.{name}", role) for spec in specs for name, role in spec.topology.servers()]
        placements = assign(names, self.inventory, self.device)
        if self.device == "cpu":
            self.memory.admit(len(names), self.memory_wait_s, self.say, self._machine)
        began = time.monotonic()
        stacks: list[Stack] = []
        try:
            for spec in specs:
                stacks.append(Stack(spec, self.folder / "stacks" / spec.name))
                if spec.port:
                    # Before anything is started: it may be taken.
                    self._port(stacks[-1], spec.port)
            for stack in stacks:
                self._start(stack, placements, began)
            if self.launcher.boot is Boot.FORK:
                self.say(f"starting {len(names)} servers from a warmed parent")
            self._wait(
                [(stack, server) for stack in stacks for server in stack.servers],
                [stack for stack in stacks if stack.proxy is not None],
                began,
            )
        except BaseException:
            for stack in stacks:
                self.stop(stack)
            raise
        finally:
            self.memory.promise(0.0)
        self.stacks.extend(stacks)
        self.say(f"{len(names)} servers ready after {time.monotonic() - began:.1f} s")
        return stacks

    def restart(self, stack: Stack, servers: Sequence[Server]) -> None:
        """End servers, each by its own shutdown, and start them as they were: same ports, same store.

        Raises StackError, or UsageError, where one does not come up again.
        """
        began = time.monotonic()
        for server in servers:
            self.launcher.stop(server.process, graceful=True)
        for server in servers:
            server.process = self._serve(server.process.name, server.flags, server.port, server.environment)
        self._wait([(stack, server) for server in servers], [stack] if stack.proxy is not None else [], began)
        self.say(f"{len(servers)} servers started again after {time.monotonic() - began:.1f} s")

    def _machine(self) -> Inventory:
        return self._stated or Inventory.read(gpus=False)

    def _unused(self, name: str) -> str:
        further = (f"{name}-{number}" for number in itertools.count(2))
        return next(free for free in itertools.chain([name], further) if not (self.folder / "stacks" / free).exists())

    def _start(self, stack: Stack, placements: Mapping[str, Placement], began: float) -> None:
        """Start the processes of a stack; what has been started stands in `stack` when this raises."""
        spec = stack.spec
        for directory in ("journal", "store", "kv"):
            (stack.folder / directory).mkdir(parents=True, exist_ok=True)
        if spec.barriers:
            # Not in the stack's folder: the path of a socket must be short.
            stack.barriers = Path(tempfile.mkdtemp(prefix="b", dir=self.launcher.scratch))
        side_ports = {name: self._port(stack) for name, _ in spec.topology.servers()} if spec.subject else {}
        info = StackInfo(
            topology=spec.topology.kind,
            sizes={str(role): count for role, count in spec.topology.counts},
            model=self.model.path,
            environment_class=self.environment_class,
            store=stack.store,
            ports=side_ports,
        )
        stack.info = info
        configured = self._configure(spec, info)
        for name, role in spec.topology.servers():
            full = f"{spec.name}.{name}"
            config, launch = configured.get(role, (None, None))
            kv, kv_environment = self._kv(stack, role) if spec.topology.has_kv else (None, {})
            expects: tuple[str, ...] = ()
            if config is not None:
                expects += ("scheduler", "worker")
            if kv is not None:
                expects += ("kv-scheduler", "kv-worker")
            placement = placements[full]
            flags = server_flags(
                role,
                model=self.model.path,
                served_name=SERVED_NAME,
                shape=spec.shape,
                device=self.device,
                dtype=self.model.dtype,
                media_limits=self.model.limits,
                ec_config=_recorded_ec(config) if config is not None and spec.recorder else config,
                kv_config=_recorded_kv(kv) if kv is not None and spec.recorder else kv,
                extra=(
                    *(("--revision", self.model.revision) if self.model.revision else ()),
                    *placement.flags,
                    *(launch.arguments if launch else ()),
                ),
            )
            direct = spec.port if spec.topology.kind == "aggregated" else None
            port = direct or self._port(stack)
            environment = {
                DIRECTORY: str(stack.folder / "journal"),
                SERVER: name,
                **_held(stack, name),
                **placement.environment,
                **kv_environment,
                **(launch.environment if launch else {}),
            }
            process = self._serve(full, flags, port, environment)
            expected = expects if spec.recorder else ()
            server = Server(name, role, port, process, flags, placement, expected, environment=environment)
            stack.servers.append(server)
            if _shares_gpu(full, placements):
                # While it starts vLLM measures how much GPU memory is taken, and counts what a neighbour takes as its own.
                self._wait([(stack, server)], [], began)
        if spec.topology.kind == "aggregated":
            stack.base_url = stack.servers[0].url
        else:
            self.start_proxy(stack)

    def _serve(self, name: str, flags: Sequence[str], port: int, environment: Mapping[str, str]) -> Process:
        arguments = [*flags, "--host", "127.0.0.1", "--port", str(port)]
        return self.launcher.start(name, VLLM_SERVER, arguments, environment)

    def _configure(self, spec: StackSpec, info: StackInfo) -> dict[Role, tuple[dict[str, Any], LaunchOptions]]:
        """Ask the subject once for each role; the same answer serves every server of the role."""
        configured: dict[Role, tuple[dict[str, Any], LaunchOptions]] = {}
        if spec.subject is None:
            return configured
        for role, _ in spec.topology.counts:
            part = "ec_both" if role is Role.AGGREGATED else ec_role(role)
            if part is not None:
                answer = self.configurations.ask(spec.subject, part, info, spec.topology.name)
                configured[role] = (answer.config, answer.launch)
        return configured

    def _kv(self, stack: Stack, role: Role) -> tuple[dict[str, Any] | None, dict[str, str]]:
        """KV configuration and environment of a role: vLLM's file connector on CPU, NIXL on GPU."""
        part = kv_role(role)
        if part is None:
            return None, {}
        if self.device == "cpu":
            return {
                "kv_connector": "ExampleConnector",
                "kv_role": part,
                "kv_connector_extra_config": {"shared_storage_path": str(stack.kv_store)},
            }, {}
        return {"kv_connector": "NixlConnector", "kv_role": part}, {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self._port(stack)),
        }

    # -- readiness -----------------------------------------------------------------------------------------------------

    def _wait(self, waiting: list[tuple[Stack, Server]], proxies: list[Stack], began: float) -> None:
        """Wait until servers and proxies are ready; empties both lists."""
        deadline = time.monotonic() + self.ready_s
        told = began
        while waiting or proxies:
            for stack, server in list(waiting):
                if not server.process.alive:
                    raise server.process.failure()
                if _healthy(server.url) and _lists_model(server.url) and self._connected(stack, server):
                    server.ready_after_s = time.monotonic() - began
                    waiting.remove((stack, server))
                    self.launcher.tree(server.process)  # its shared memory exists by now, and is noted
            for stack in list(proxies):
                assert stack.proxy is not None
                if not stack.proxy.alive:
                    raise stack.proxy.failure()
                # Its health is that of all its servers, so it comes last by itself.
                if _healthy(stack.base_url):
                    proxies.remove(stack)
            if not waiting and not proxies:
                return
            now = time.monotonic()
            if now > deadline:
                self._too_late([server for _, server in waiting], proxies)
            if now - told > 15:
                told = now
                self.say(f"waiting for {', '.join(server.process.name for _, server in waiting) or 'the proxy'}")
            time.sleep(0.1)

    def _connected(self, stack: Stack, server: Server) -> bool:
        """Whether each connector object that this server must have has written its first line."""
        if not server.expects:
            return True
        seen = {
            event["side"] for event in stack.journal.read() if event["server"] == server.name and event["ev"] == "init"
        }
        return seen.issuperset(server.expects)

    def _too_late(self, servers: Sequence[Server], proxies: Sequence[Stack]) -> None:
        names = [server.process.name for server in servers] + [f"{stack.spec.name}.proxy" for stack in proxies]
        logs = [server.process.log for server in servers] or [stack.proxy.log for stack in proxies if stack.proxy]
        raise StackError(
            f"{', '.join(names)} not ready within {self.ready_s:.0f} s: {causes.likely_cause(logs[0], None)}\n"
            f"--- from {logs[0]}\n{causes.excerpt(logs[0])}"
        )


def _held(stack: Stack, name: str) -> dict[str, str]:
    """What a process of a stack with barriers is told besides, to have a gate and to write down what it held."""
    if stack.barriers is None:
        return {}
    return {barriers.FOLDER: str(stack.barriers), DIRECTORY: str(stack.folder / "journal"), SERVER: name}


def _recorded_ec(config: Mapping[str, Any]) -> dict[str, Any]:
    name = ec_name(config["ec_connector"], config.get("ec_connector_module_path"))
    return {**config, "ec_connector": name, "ec_connector_module_path": RECORDING}


def _recorded_kv(config: Mapping[str, Any]) -> dict[str, Any]:
    name = kv_name(config["kv_connector"], config.get("kv_connector_module_path"))
    return {**config, "kv_connector": name, "kv_connector_module_path": RECORDING}


def _shares_gpu(name: str, placements: Mapping[str, Placement]) -> bool:
    gpu = placements[name].environment.get("CUDA_VISIBLE_DEVICES")
    others = [one.environment.get("CUDA_VISIBLE_DEVICES") for other, one in placements.items() if other != name]
    return gpu is not None and gpu in others


def _check_model(model: ModelUse) -> None:
    """Refuse at once what every server would refuse half a minute later."""
    if (model.local or Path(model.path).is_absolute()) and not (Path(model.path) / "config.json").is_file():
        raise UsageError(f"no model in the folder {model.path}: name one that holds config.json and weights")


def _get(url: str) -> requests.Response:
    with requests.Session() as session:
        # A proxy for the outside world, set in the environment, does not know our loopback interface.
        session.trust_env = False
        return session.get(url, timeout=2)


def _healthy(url: str) -> bool:
    try:
        return _get(f"{url}/health").status_code == 200
    except requests.RequestException:
        return False


def _lists_model(url: str) -> bool:
    try:
        listed = _get(f"{url}/v1/models").json()
        return any(model.get("id") == SERVED_NAME for model in listed.get("data", ()))
    except (requests.RequestException, ValueError, AttributeError):
        return False


def server_environment(device: str, model: ModelUse, cache: Path | None) -> dict[str, str]:
    """The complete environment of every server: the caller's, and what makes servers quiet, equal and able to start."""
    from epd_conformance.models.zoo import default_cache

    environment = dict(os.environ)
    # A caller's own setting of what shapes numbers or batches would make two machines incomparable.
    for name in ("VLLM_USE_V2_MODEL_RUNNER", "VLLM_BATCH_INVARIANT", "OMP_NUM_THREADS", "VLLM_LOGGING_LEVEL"):
        environment.pop(name, None)
    # The first makes servers ask everybody for a key, the second gives all of them the same internal ports; the last is a stack's.
    for name in ("VLLM_API_KEY", "VLLM_PORT", barriers.FOLDER):
        environment.pop(name, None)
    folder = cache or default_cache()
    environment |= {
        "VLLM_NO_USAGE_STATS": "1",
        # Routes that reset caches; servers listen on the loopback interface only.
        "VLLM_SERVER_DEV_MODE": "1",
        "DO_NOT_TRACK": "1",
        # Where vLLM keeps what it learned of an architecture; HOME may be read-only.
        "VLLM_CACHE_ROOT": str(folder / "vllm"),
        "VLLM_CONFIG_ROOT": str(folder / "vllm-config"),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    home = Path(environment.get("HOME", "/nonexistent"))
    if "HF_HOME" not in environment and not os.access(home, os.W_OK):
        environment["HF_HOME"] = str(folder / "huggingface")
    if model.local:
        # Nothing needs the network then, and a name that looks like a hub id must not cause a look-up.
        environment["HF_HUB_OFFLINE"] = "1"
    if device == "cpu":
        environment |= {
            # Also spares vLLM's check that a share of all memory is free, which fails beside other servers.
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # vLLM compiles one small function (v1/sample/ops/logprobs.py counts ranks) even when told to be eager; with
            # Inductor's C++ backend that costs 15 s at the first request that asks for log-probabilities, and a compiler.
            "TORCHDYNAMO_DISABLE": "1",
            # One thread makes forking safe, and the sum of floats independent of the number of cores.
            "OMP_NUM_THREADS": "1",
            # By default every server's worker would be bound to the same core.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
    return environment | repairs.server_environment(environment)
