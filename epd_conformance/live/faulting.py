"""Carries out the cells with a fault: prime, damage the stored object, ask the consumer, heal, ask once more.

The victim is primed by hand and then sent past the encode servers, so that the damage lies between its encode and its prefill,
always and not by luck. Its twin goes the same way. Decides nothing: what happened goes into the cell's facts, for the judges in
`oracle.fault_judges`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import requests

from epd_conformance.connectors.barriers import POINTS, Barrier, arm
from epd_conformance.errors import StackError
from epd_conformance.faults.fault import Fault, Receipt, Target
from epd_conformance.faults.store import FAULTS
from epd_conformance.live import http
from epd_conformance.plans.plan import Image, Request
from epd_conformance.plans.windows import WINDOWS, Window
from epd_conformance.probe import StoreProbe
from epd_conformance.proxy.media import extract_items, item_metadata, primer_body, with_metadata
from epd_conformance.topology import claims
from epd_conformance.topology.spec import Role
from epd_conformance.topology.stack import Stack

if TYPE_CHECKING:
    from epd_conformance.live.session import Runner

# A producer may publish behind the answer to its primer, and a store behind a daemon show a write a little later. Long enough
# for a busy machine, and only where it never comes does anybody wait so long.
PUBLISHED_S = 5.0
# A server counts a request as running until the step after its last token; vLLM's workers spin up to a second a step on CPU.
IDLE_S = 5.0
# A connector may write behind the answer, also where it must not. The files of one item are written in milliseconds.
WRITTEN_S = 0.5
# Where a uuid that is an absolute path points to, with a number behind it. Fixed, so that a plan is the same on every machine.
OUTSIDE = "/tmp/epd-conformance-outside-"
_OUTSIDE_NAME = re.compile(r"epd-conformance-outside-[0-9a-f]{1,32}")


@dataclass(frozen=True)
class Means:
    """What a fault is done with."""

    probe: StoreProbe
    fault: Fault


def damaged(runner: Runner) -> None:
    """Send first, twin, victim and fresh request of a plan, with the plan's fault done to the victim's object.

    In a plan with a window twin and victim are held there, and the fault is done meanwhile.
    """
    first, twin, victim, fresh, *again = runner.plan.requests
    stack = runner.stack
    outcome: dict[str, Any] = {
        "rehearsed": False,
        "receipt": None,
        "verified": False,
        "began_at": None,
        "injected_at": None,
        "healed": False,
        "healed_at": None,
        "problem": "",
    }
    runner.facts["fault"] = outcome
    tools = None
    with _noting(outcome):
        tools = means(runner, runner.plan.fault)
    runner.send(stack.base_url, first)
    donor = key_of(runner, runner.answers[0].request_id)

    rid = uuid.uuid4().hex
    key, said = primed(runner, twin, rid, outcome)
    if tools is not None and key is not None:
        with _noting(outcome):
            await_object(tools.probe, key)
            tools.fault.rehearse(tools.probe, key)
            await_object(tools.probe, key)
            outcome["rehearsed"] = True
    _ask(runner, twin, rid, said, key, outcome)

    rid = uuid.uuid4().hex
    key, said = primed(runner, victim, rid, outcome)
    damage = _Damage(tools, key, donor, outcome)
    try:
        _ask(runner, victim, rid, said, key, outcome, damage.do)
        # Before it is healed: whoever has to live must do so with the damage still there.
        runner.facts["health"] = health(stack)
        if again:
            runner.send(stack.base_url, fresh)
        for request in again:
            runner.send(runner.stage.bypass, request, overrides=_short(runner, request, said))
    finally:
        damage.undo()
    if not again:
        runner.send(stack.base_url, fresh)
    runner.facts["busy"] = busy(stack)


def _ask(
    runner: Runner,
    request: Request,
    rid: str,
    said: dict[str, Any],
    key: str | None,
    outcome: dict[str, Any],
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Send a request past the encode servers; `meanwhile` is done before, or while it is held where the plan has a window."""

    def send() -> None:
        runner.send(runner.stage.bypass, request, rid=rid, overrides=_short(runner, request, said))

    if runner.plan.window is None:
        meanwhile()
        send()
        return
    barrier = None
    with _noting(outcome):
        barrier = _armed(runner, WINDOWS[runner.plan.window], key, rid)
    thread = threading.Thread(target=send, name="held-request")
    thread.start()
    try:
        if barrier is not None and barrier.wait(lambda: not thread.is_alive()):
            meanwhile()
    finally:
        if barrier is not None:
            barrier.open()
        thread.join()


def _armed(runner: Runner, window: Window, key: str | None, rid: str) -> Barrier:
    """The barrier of a window, for an item or, in a proxy, for a request. Raises StackError where there is no such point."""
    stack = runner.stack
    if stack.barriers is None or key is None:
        raise StackError(
            "nothing can be held: the servers have no points" if key else "nothing to hold: no item was saved"
        )
    if POINTS[window.point] == "proxy":
        return arm(stack.barriers, {"bypass"}, window.point, req=rid)
    return arm(stack.barriers, runner.roles.consumers, window.point, id=key, nth=window.nth)


@contextlib.contextmanager
def _noting(outcome: dict[str, Any]) -> Iterator[None]:
    """Around what a subject's own code does, which may raise anything; the first problem is the one that is told."""
    try:
        yield
    except Exception as error:
        outcome["problem"] = outcome["problem"] or f"{type(error).__name__}: {error}"[:2000]


def means(runner: Runner, kind: str | None) -> Means:
    """What a kind of damage is done with. Raises StackError where the subject gives no way to its store."""
    assert kind is not None, "a plan of this judge names its fault"
    info = runner.stack.info
    if info is None or runner.session.subject is None:
        raise StackError("the harness did not start these servers and does not know their store")
    probe = runner.session.subject.probe(info)
    if probe is None:
        raise StackError("the subject gives no probe, so nothing in its store can be damaged")
    return Means(probe, {**FAULTS, **runner.session.subject.faults(info)}[kind])


class _Damage:
    """The fault that is done to an object, and healed at the end; what became of it goes into `outcome`."""

    def __init__(self, tools: Means | None, key: str | None, donor: str | None, outcome: dict[str, Any]) -> None:
        self._tools = tools
        self._outcome = outcome
        self._target: Target | None = None
        self._receipt: Receipt | None = None
        if tools is not None and key is not None and donor is not None:
            # Now, since it may take longer than anything may be held.
            with _noting(outcome):
                await_object(tools.probe, key)
                self._target = Target(tools.probe, key, donor)

    def do(self) -> None:
        if self._tools is None or self._target is None:
            return
        fault, target = self._tools.fault, self._target
        with _noting(self._outcome):
            # By the harness's own clock: a receipt may be the subject's.
            self._outcome["began_at"] = time.time()
            receipt = self._receipt = fault.inject(target)
            self._outcome["receipt"] = receipt.to_json()
            self._outcome["verified"] = soon(lambda: fault.verify(target, receipt))
            self._outcome["injected_at"] = time.time()

    def undo(self) -> None:
        if self._tools is None or self._target is None or self._receipt is None:
            return
        target, receipt = self._target, self._receipt
        self._outcome["healed_at"] = time.time()
        with _noting(self._outcome):
            self._tools.fault.heal(target, receipt)
            self._outcome["healed"] = soon(lambda: target.probe.read(receipt.key) == receipt.before)


def soon(holds: Callable[[], bool]) -> bool:
    """Whether something holds within the time that a store may need."""
    deadline = time.monotonic() + PUBLISHED_S
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def await_object(probe: StoreProbe, key: str) -> None:
    if not soon(lambda: probe.read(key) is not None):
        raise StackError(f"the store has no object under {key}, {PUBLISHED_S:g} s after it was written")


def primed(runner: Runner, request: Request, rid: str, outcome: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """Have an encode server save the request's item, as the proxy does; the key under which it did, and what it said."""
    status, said = prime(runner.stack, request, rid, runner.salt(request, rid))
    key = key_of(runner, f"{rid}-e0")
    with _noting(outcome):
        if status != 200:
            raise StackError(f"the primer of {request.label!r} was answered with {status}")
        if key is None:
            raise StackError("no encode server's journal shows under which key it saved the item")
    return key, said


def _short(runner: Runner, request: Request, said: dict[str, Any]) -> dict[str, Any]:
    """What replaces the media of a request, where the plan sends metadata only."""
    return _replaced(runner, request, said) if runner.plan.metadata_only else {}


def _replaced(runner: Runner, request: Request, said: dict[str, Any]) -> dict[str, Any]:
    body = request.body(runner.stack.served_name)
    items = extract_items(body)
    return {"messages": with_metadata(body, items, item_metadata(said, items))["messages"]}


def referred(runner: Runner, request: Request) -> dict[str, Any]:
    """What replaces the media of a request: what an encode server says of its items, under the uuids of the plan.

    The encode server is asked without these uuids, so nothing is saved under them. Nothing is replaced where it says nothing.
    """
    nameless = replace(
        request,
        messages=tuple(
            replace(
                message,
                parts=tuple(replace(part, uuid=None) if isinstance(part, Image) else part for part in message.parts),
            )
            for message in request.messages
        ),
    )
    rid = uuid.uuid4().hex
    _, said = prime(runner.stack, nameless, rid, runner.salt(request, rid))
    return _replaced(runner, request, said)


def prime(stack: Stack, request: Request, rid: str, salt: str | None) -> tuple[int, dict[str, Any]]:
    """Send an encode server the request's first item; returns the status, 0 where no answer came, and `ec_transfer_params`."""
    encode = stack.of(Role.ENCODE)
    if not encode:
        return 0, {}
    body = request.body(stack.served_name, salt)
    primer = primer_body(body, extract_items(body)[0])
    try:
        # The id of the leg that the proxy would have sent.
        headers = {"X-Request-Id": f"{rid}-e0"}
        answer = http.post(f"{encode[0].url}/v1/chat/completions", json=primer, headers=headers, timeout=60)
        return answer.status_code, answer.json().get("ec_transfer_params") or {}
    except requests.RequestException:
        return 0, {}


def key_of(runner: Runner, rid: str) -> str | None:
    """The key of the first item that an encode server saw under a request id."""
    for event in runner.journal():
        if (
            event["ev"] == "request"
            and event["server"] in runner.roles.encode
            and rid in event["req"]
            and event["items"]
        ):
            return str(event["items"][0]["id"])
    return None


def health(stack: Stack) -> dict[str, int]:
    """The status of `/health` of every server; 0 where none comes."""
    return {server.name: _status(f"{server.url}/health") for server in stack.servers}


def busy(stack: Stack) -> dict[str, int]:
    """How many requests every server works on, without the servers that do not say."""
    counts = {server.name: _working_on(server.url) for server in stack.servers}
    return {name: count for name, count in counts.items() if count is not None}


def _status(url: str) -> int:
    try:
        return http.get(url, timeout=10).status_code
    except requests.RequestException:
        return 0


def _working_on(url: str) -> int | None:
    """How many requests a server runs or holds back by its own metrics, after a moment in which it may become idle."""
    deadline = time.monotonic() + IDLE_S
    while True:
        try:
            text = http.get(f"{url}/metrics", timeout=10).text
        except requests.RequestException:
            return None
        counts = [
            float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.startswith(("vllm:num_requests_running{", "vllm:num_requests_waiting{"))
        ]
        if not counts:
            return None
        if not any(counts) or time.monotonic() > deadline:
            return int(sum(counts))
        time.sleep(0.1)


def reset(url: str, cache: str) -> int:
    """Have a server empty a cache (`encoder`, `mm`, `prefix`); the status, 0 where no answer came.

    As long as requests hold blocks a server cannot, and says so: 409 where that does not end.
    """
    deadline = time.monotonic() + IDLE_S
    while True:
        try:
            answer = http.post(f"{url}/reset_{cache}_cache", timeout=30)
        except requests.RequestException:
            return 0
        if answer.status_code != 200 or not _refused(answer):
            return answer.status_code
        if time.monotonic() > deadline:
            return 409
        time.sleep(0.1)


def _refused(answer: requests.Response) -> bool:
    """`/reset_prefix_cache` answers 200 also where it did not: `{"success": false}` (entrypoints/serve/dev/cache/api_router.py)."""
    try:
        said = answer.json()
    except ValueError:
        return False
    return isinstance(said, dict) and said.get("success") is False


# -- uuids that would leave the store ----------------------------------------------------------------------------------


def confined(runner: Runner) -> None:
    """Send a harmless uuid, a hostile one at whose place a bait lies, and another hostile one over the whole path."""
    plain, baited, hostile = runner.plan.requests
    stack = runner.stack
    with _alone():
        runner.send(stack.base_url, plain)
        places = [_place(stack, str(uuid_)) for request in (baited, hostile) for uuid_ in request.uuids]
        try:
            bait = _lay_bait(stack, str(plain.uuids[0]), str(baited.uuids[0]), places[0])
            before = outside(stack, places)
            runner.send(runner.stage.bypass, baited)
            runner.send(stack.base_url, hostile)
            runner.facts |= {"health": health(stack), "busy": busy(stack)}
            time.sleep(WRITTEN_S)
            runner.facts |= {"bait": bait, "before": before, "after": outside(stack, places)}
        finally:
            for path in _at(stack, places):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One run at a time: the same cell of another run lays its bait at the same place, and would look like a server's work."""
    with (claims.folder() / "outside-turn").open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _place(stack: Stack, hostile: str) -> Path:
    """Where a hostile uuid leads if it is joined to the store's path. Raises ValueError for a uuid of another form.

    What lies there is removed in the end, so nobody's plan may choose it freely.
    """
    steps, _, name = hostile.rpartition("/")
    if steps not in ("..", "/tmp", "../" * 40 + "tmp") or not _OUTSIDE_NAME.fullmatch(name):
        raise ValueError(f"no uuid of this cell: {hostile[:200]!r}")
    return (stack.folder if steps == ".." else Path("/tmp")) / name


def _at(stack: Stack, places: Iterable[Path]) -> list[Path]:
    """What has a hostile uuid's name, also with something behind it, where it leads and in all folders above the store."""
    found: set[Path] = set()
    for place in places:
        for folder in {place.parent, *stack.store.parents}:
            with contextlib.suppress(OSError):  # a folder that may not be listed
                found.update(folder.glob(f"{place.name}*"))
    return sorted(found)


def _lay_bait(stack: Stack, plain: str, hostile: str, place: Path) -> list[str]:
    """Copy what the store keeps under a harmless uuid to where the same path leads with a hostile one; the paths made.

    Only a store that names its files by the uuid leaves a pattern to copy by; one that does not cannot be led astray by it.
    """
    made = []
    for path in sorted(stack.store.rglob("*")):
        parts = path.relative_to(stack.store).parts
        position = next((index for index, part in enumerate(parts) if plain in part), None)
        if position is None or not path.is_file():
            continue
        # As a connector would make it of the uuid.
        named = os.path.join(stack.store.joinpath(*parts[:position]), parts[position].replace(plain, hostile))  # noqa: PTH118
        copy = Path(os.path.normpath(named)).joinpath(*parts[position + 1 :])
        if not str(copy).startswith(str(place)):
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        made.append(str(copy.relative_to(place.parent)))
    return made


def outside(stack: Stack, places: Iterable[Path] = ()) -> dict[str, str]:
    """What lies outside the store, of all that a hostile uuid may lead to: relative path to digest (`folder` for one)."""
    found: dict[str, str] = {}
    own = {stack.store, stack.kv_store, stack.folder / "journal"}
    roots = {path: f"stack/{path.name}" for path in stack.folder.iterdir() if path not in own}
    for root in _at(stack, places):
        roots.setdefault(root, f"outside{root.parent}/{root.name}")
    for root, name in roots.items():
        for path in [root, *root.rglob("*")]:
            below = path.relative_to(root).as_posix()
            found[name if below == "." else f"{name}/{below}"] = _content(path)
    return found


def _content(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
    except OSError as error:
        return type(error).__name__
