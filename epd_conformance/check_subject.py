"""`check-subject`: lints a subject in seconds, without booting a server.

Asks the subject as a run does, but twice and for two made stacks; lets vLLM load and construct the connector in a process of
its own (runtime/connector_child.py), where a hang or a crash is a finding; and tries the probe on an empty store. It finds what
would stop a run at once; it never says that a connector works.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from epd_conformance import configuration, observations
from epd_conformance import subject as subjects
from epd_conformance.configuration import CONFIG_KEYS, Configured
from epd_conformance.errors import UsageError
from epd_conformance.faults.fault import Fault
from epd_conformance.features import Feature
from epd_conformance.observations import State
from epd_conformance.probe import Rows, StoreProbe
from epd_conformance.subject import StackInfo, Subject
from epd_conformance.topology.spec import Role, Shape, Topology, ec_role, server_flags

MODEL = "tiny-qwen2.5-vl"
# A subject's own Python code answers from memory, or has to open a store: seconds are plenty.
CODE_LIMIT_S = 30.0
# From import to end, for one role. Constructing takes a second; connectors that wait for a peer give up after some ten.
CONSTRUCT_LIMIT_S = 60.0
# Importing vLLM takes 5 s on an idle machine, and ten times as long on a loaded one with a cold disk.
IMPORT_LIMIT_S = 300.0
# A branch is another connector every day (design: `version` is a released version).
BRANCHES = frozenset({"", "main", "master", "head", "trunk", "dev", "develop", "latest", "nightly"})
# Looks like the engine's identifiers: sha256 in hex.
KEY = hashlib.sha256(b"epd-conformance check-subject").hexdigest()
OTHER_KEY = hashlib.sha256(b"epd-conformance check-subject, no such object").hexdigest()


_RAISED = object()


@dataclass(frozen=True)
class Line:
    """One check: what it was, what became of it, why, and what to do about it."""

    check: str
    state: State
    words: str
    mend: str = ""

    def to_json(self) -> dict[str, str]:
        return {**asdict(self), "state": str(self.state)}

    def text(self) -> str:
        """For a person, in one line."""
        mend = f" → {self.mend}" if self.mend else ""
        return f"{self.state:<10}  {self.check}: {' '.join(self.words.split())}{mend}"


def exit_code(lines: Sequence[Line]) -> int:
    """1 where anything failed, else 0."""
    return int(any(line.state is State.FAIL for line in lines))


def check(name: str) -> list[Line]:
    """Everything that can be said about the subject called `name` (as in `--subject`).

    Raises UsageError where there is none, or it does not follow the interface.
    """
    subject = subjects.load(name)
    with tempfile.TemporaryDirectory(prefix="epd-check-") as folder:
        return _Check(name, subject, Path(folder).resolve()).run()


class _Check:
    def __init__(self, name: str, subject: Subject, folder: Path) -> None:
        self.name = name
        self.subject = subject
        self.folder = folder
        self.lines: list[Line] = []
        self.stack = 0

    def run(self) -> list[Line]:
        self._implementation()
        answers = self._configurations()
        found = self._in_vllm(answers)
        probe, info = self._probe_object()
        self._features(found, probe)
        self._round_trip(probe, info, found)
        self._faults(info)
        return self.lines

    def _say(self, check: str, state: State, words: str, mend: str = "") -> None:
        self.lines.append(Line(check, state, words, mend))

    # -- what the subject answers --------------------------------------------------------------------------------------

    def _implementation(self) -> None:
        about = self.subject.implementation
        if about.version.strip().lower() in BRANCHES:
            self._say("implementation", State.WARN, f"the version is {about.version!r}", "name a released version")
        elif not about.organization or not about.project:
            self._say("implementation", State.WARN, "organization or project is empty", "say who made the connector")
        else:
            self._say("implementation", State.OK, f"{about.organization} {about.project} {about.version}")

    def _topologies(self) -> list[Topology]:
        """Those that the subject's features admit."""
        declared = self.subject.features
        return [
            Topology.parse(name)
            for name, needed in (
                ("e-pd", None),
                ("e-p-d", Feature.KV_DISAGGREGATION),
                ("aggregated", Feature.EC_BOTH),
            )
            if needed is None or needed in declared
        ]

    def _info(self, topology: Topology, store: Path | None = None) -> StackInfo:
        """A made stack: an empty store of its own unless one is given, free ports."""
        self.stack += 1
        store = store or self.folder / f"stack-{self.stack}" / "store"
        store.mkdir(parents=True, exist_ok=True)
        return StackInfo(
            topology=topology.kind,
            sizes={str(role): count for role, count in topology.counts},
            model=str(self.folder / "model"),
            environment_class="cpu-v1",
            store=store,
            ports=_free_ports([name for name, _ in topology.servers()]),
        )

    def _configurations(self) -> list[tuple[Role, StackInfo, Configured]]:
        """The answers for each role of each topology, of the first asking; those that cannot be used are left out."""
        answers = []
        for topology in self._topologies():
            info, another = self._info(topology), self._info(topology)
            for role, _ in topology.counts:
                part = "ec_both" if role is Role.AGGREGATED else ec_role(role)
                if part is None:
                    continue
                where = f"configuration {topology}/{part}"
                first = self._ask(where, part, info, topology)
                if first is None:
                    continue
                self._look_at(where, first)
                answers.append((role, info, first))
                # Asked again, then by a subject that was asked nothing before, for a stack at another place.
                again = self._ask(where, part, info, topology)
                with self._guarded(where, "loading the subject again"):
                    fresh = subjects.load(self.name)
                    elsewhere = self._ask(where, part, another, topology, fresh)
                    self._same(where, first, again, "asked a second time")
                    self._same(where, first, elsewhere, "asked anew, for a stack with other paths and ports")
        return answers

    def _ask(
        self, where: str, role: str, info: StackInfo, topology: Topology, subject: Subject | None = None
    ) -> Configured | None:
        answer = None
        with self._guarded(where, "connector_config or launch"):
            answer = configuration.ask(subject or self.subject, role, info, topology.name)
        return answer  # noqa: RET504  # an exception is swallowed above

    def _same(self, where: str, first: Configured, other: Configured | None, when: str) -> None:
        if other is not None and (place := configuration.difference(first, other)) is not None:
            self._say(
                where,
                State.FAIL,
                f"{when}, it answers differently (`{place}`)",
                "let connector_config and launch depend on role and stack only: certify refuses a second answer",
            )

    def _look_at(self, where: str, answer: Configured) -> None:
        failed = False
        unknown = [key for key in answer.config if key not in CONFIG_KEYS]
        for key in unknown:
            failed = True
            self._say(
                where,
                State.FAIL,
                f"vLLM's ECTransferConfig has no `{key}`",
                "a connector's own keys go into ec_connector_extra_config",
            )
        if not isinstance(answer.config.get("ec_connector_extra_config", {}), dict):
            failed = True
            self._say(where, State.FAIL, "`ec_connector_extra_config` is no table", "make it a dict")
        for words in configuration.reserved(answer.launch):
            failed = True
            self._say(where, State.FAIL, f"launch: {words}", "leave it out")
        if not failed:
            self._say(where, State.OK, f"{answer.config['ec_connector']}, a JSON configuration that vLLM knows")

    # -- the connector in vLLM -----------------------------------------------------------------------------------------

    def _in_vllm(self, answers: Sequence[tuple[Role, StackInfo, Configured]]) -> list[dict[str, Any]]:
        """What the child process found, after it was said; empty where there was none."""
        # One try a role is enough: what differs between topologies is where servers are, and none are here.
        tries = {answer.role: (role, info, answer) for role, info, answer in reversed(answers)}
        if not tries:
            return []
        from epd_conformance.runtime import vllm_info

        if vllm_info.find() is None:
            words = "vLLM is not installed: the connector was neither loaded nor constructed"
            self._say("connector", State.NOT_PROBED, words)
            return []
        found, problem = self._child([tries[role] for role in sorted(tries, reverse=True)])
        if problem:
            self._say("connector", State.NOT_PROBED, problem)
        for role in sorted(tries, reverse=True):
            self._said_by_child(role, [line for line in found if line["role"] == role], bool(problem))
        self._unread(found)
        return found

    def _child(self, tries: Sequence[tuple[Role, StackInfo, Configured]]) -> tuple[list[dict[str, Any]], str]:
        """Lines of the child process, and why there may be too few."""
        from epd_conformance.models import zoo
        from epd_conformance.topology.stack import ModelUse, server_environment

        resolved = zoo.resolve(MODEL, zoo.default_cache())
        use = ModelUse(resolved.name, resolved.path_or_id, "float32", {"image": 1}, resolved.digest)
        request, results, log = (self.folder / name for name in ("request.json", "results.ndjson", "child.log"))
        request.write_text(
            json.dumps({"limit_s": CONSTRUCT_LIMIT_S, "tries": [self._try(*one, use.path) for one in tries]})
        )
        results.touch()
        command = [sys.executable, "-m", "epd_conformance.runtime.connector_child", str(request), str(results)]
        with log.open("wb") as output:
            child = subprocess.Popen(
                command,
                env=server_environment("cpu", use, None),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        problem = ""
        try:
            status = child.wait(IMPORT_LIMIT_S + len(tries) * CONSTRUCT_LIMIT_S)
            if status:
                last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:]
                problem = f"the process that imports vLLM ended with status {status}: {''.join(last)}"
        except subprocess.TimeoutExpired:
            problem = f"the process that imports vLLM did not end within {IMPORT_LIMIT_S:.0f} s"
        finally:
            # Whatever a connector has started is in the same session, unless it took pains to leave it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        return [json.loads(line) for line in results.read_text().splitlines()], problem

    def _try(self, role: Role, info: StackInfo, answer: Configured, model: str) -> dict[str, Any]:
        flags = server_flags(
            role,
            model=model,
            served_name="check",
            shape=Shape(),
            device="cpu",
            dtype="float32",
            media_limits={"image": 1},
            ec_config=answer.config,
            extra=tuple(answer.launch.arguments),
        )
        save = Feature.STORE_PROBE in self.subject.features and answer.role == "ec_producer"
        if save:
            self._saving = info
        return {
            "role": answer.role,
            "flags": list(flags),
            "environment": dict(answer.launch.environment),
            "config": answer.config,
            "save": KEY if save else "",
        }

    _saving: StackInfo | None = None
    """The stack whose producer was asked to save an object."""

    def _said_by_child(self, role: str, lines: Sequence[dict[str, Any]], broken: bool) -> None:
        for line in lines:
            if line["check"] in ("hooks", "keys", "save", "end"):
                continue
            mend = _MENDS.get(line["check"], "") if line["state"] != State.OK else ""
            self._say(f"{line['check']} as {role}", State(line["state"]), line["words"], mend)
        over = any(line["check"] == "end" or line["state"] == State.FAIL for line in lines)
        if not over and not broken:
            self._say(
                f"construction as {role}", State.FAIL, "the process ended itself with status 0", _MENDS["construction"]
            )

    def _unread(self, found: Sequence[dict[str, Any]]) -> None:
        """Keys that no object of a role has read: some connectors read at the first use, so this only warns."""
        lines = [line for line in found if line["check"] == "keys"]
        for line in lines:
            for key in line["unread"]:
                self._say(
                    f"extra configuration as {line['role']}",
                    State.WARN,
                    f"while it was constructed the connector was not seen to read {key!r}",
                    "correct the key, or leave it out; a run looks again",
                )
        if lines and not any(line["unread"] for line in lines):
            self._say("extra configuration", State.OK, "every key was read")

    # -- features and probe --------------------------------------------------------------------------------------------

    def _probe_object(self) -> tuple[object, StackInfo]:
        """What probe() gives, `_RAISED` where it gives nothing; and the stack that it was asked for."""
        info = self._saving or self._info(Topology.parse("e-pd"))
        probe: object = _RAISED
        with self._guarded("probe", "probe()"):
            probe = self.subject.probe(info)
        return probe, info

    def _features(self, found: Sequence[dict[str, Any]], probe: object) -> None:
        told = [line["hooks"] for line in found if line["check"] == "hooks"]
        hooks = {hook for one in told for hook in one} if told else None
        for finding in observations.features(self.subject.features, hooks=hooks, probe=probe):
            if finding.feature is Feature.STORE_PROBE and probe is _RAISED:
                continue  # said already
            self._say(f"feature {finding.feature}", finding.state, finding.words, finding.mend)

    def _round_trip(self, probe: object, info: StackInfo, found: Sequence[dict[str, Any]]) -> None:
        if not isinstance(probe, StoreProbe):
            return
        saved = next((line for line in found if line["check"] == "save"), None)
        with self._guarded("probe", "the probe"):
            problem = self._saved(probe, saved) or _plain(probe)
            if problem:
                self._say(
                    "probe",
                    State.FAIL,
                    problem,
                    "a probe gives back exactly what it was given, under the key it was given",
                )
            else:
                self._say("probe", State.OK, "keys, write, read and delete agree with each other")

    def _saved(self, probe: StoreProbe, saved: dict[str, Any] | None) -> str:
        """Tries `unseal` and `seal` on the object that the connector itself has saved; what is wrong, or nothing."""
        check = "probe on an object"
        if saved is None or saved["state"] != State.OK:
            why = saved["words"] if saved is not None else "no producer was constructed to save one"
            self._say(check, State.NOT_PROBED, why)
            return ""
        data = probe.read(KEY)
        if data is None:
            self._say(
                check, State.NOT_PROBED, "outside of a server the connector left no object under the key that it saved"
            )
            return ""
        wanted = Rows(base64.b64decode(saved["data"]), saved["rows"], saved["width"], saved["dtype"])
        known = probe.keys()
        if KEY not in known:
            return "keys() leaves out the key of an object that read() gives"
        if probe.unseal(data) != wanted:
            return "unseal() of an object does not give the encoder output that the connector saved"
        fewer = probe.seal(wanted.first(1), data)
        if probe.unseal(fewer) != wanted.first(1):
            return "unseal(seal(rows)) is not rows"
        if probe.unseal(probe.seal(wanted, data)) != wanted:
            return "unseal(seal(rows)) is not rows, with the rows of the object itself"
        self._say(check, State.OK, "unseal gives what the connector saved, and undoes seal")
        probe.delete(KEY)
        return ""

    def _faults(self, info: StackInfo) -> None:
        with self._guarded("faults", "faults()"):
            faults = self.subject.faults(info)
            wrong = [kind for kind, fault in faults.items() if not isinstance(fault, Fault) or fault.kind != kind]
            if wrong:
                words = f"faults() gives something under {wrong[0]!r} that is no Fault of this kind"
                self._say(
                    "faults", State.FAIL, words, "derive it from epd_conformance.Fault, and file it under its `kind`"
                )
            elif faults:
                self._say("faults", State.OK, f"own ways for {', '.join(sorted(faults))}")

    @contextlib.contextmanager
    def _guarded(self, check: str, what: str) -> Iterator[None]:
        """Around a subject's own code: an exception, an exit and a hang are findings."""
        try:
            with _limit(CODE_LIMIT_S):
                yield
        except UsageError as error:
            self._say(check, State.FAIL, str(error))
        except (Exception, SystemExit) as error:
            self._say(check, State.FAIL, f"{what} raised {type(error).__name__}: {error}", "mend the subject's code")


_MENDS = {
    "configuration": "correct the configuration",
    "import": "install the connector where the servers run, and correct ec_connector and ec_connector_module_path",
    "class": "follow vllm/distributed/ec_transfer/ec_connector/base.py",
    "command line": "correct the arguments that launch() gives",
    "construction": "see that the connector can be constructed where the servers run",
    "shutdown": "let shutdown() end cleanly",
}


def _plain(probe: StoreProbe) -> str:
    """Writes, reads and deletes; what is wrong, or nothing. The bytes are no object, and need not be one for a store."""
    # Longer than a buffer, with every byte value, and no text.
    first, second = bytes(range(256)) * 64, b"\x00" + bytes(reversed(range(256)))
    if probe.read(OTHER_KEY) is not None:
        return "read() of a key that was never written gives something"
    probe.write(KEY, first)
    if probe.read(KEY) != first:
        return "read() does not give the bytes that were written"
    if probe.read(OTHER_KEY) is not None:
        return "read() of another key gives what was written under one"
    probe.write(KEY, second)
    if probe.read(KEY) != second:
        return "write() does not replace what was there"
    probe.delete(KEY)
    if probe.read(KEY) is not None:
        return "read() still gives what was deleted"
    left = probe.keys()
    if KEY in left:
        return "keys() still has a key that was deleted"
    probe.delete(KEY)
    return ""


@contextlib.contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in here after some seconds. Python lets only the main thread have it; elsewhere there is no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: object) -> None:
        raise TimeoutError(f"it did not come to an end within {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _free_ports(names: Sequence[str]) -> dict[str, int]:
    """Ports that nobody listens on at this moment."""
    with contextlib.ExitStack() as held:
        ports = {}
        for name in names:
            one = held.enter_context(socket.socket())
            one.bind(("127.0.0.1", 0))
            ports[name] = int(one.getsockname()[1])
        return ports
