"""Barriers: named points in a server at which the harness can stop one item or one request, once, and let it go on.

A fault that must hit a window (between look-up and allocation, say) is done while the server waits at the window's point, never
after a sleep. Two halves, both of the standard library only: the *gate* in each server process, and `arm` for the harness.

A gate listens on a unix socket of its own. The harness connects, names a point and an item or a request, and is told when that
has come there. The point opens when the harness says so, when the connection ends (the harness died), or after `OPENS_S`; the
journal gets a line `held` and a line `opened` that says which it was. One order is one hit. Without `EPD_BARRIERS` in its
environment a process has no gate at all; without an order the cost of a point is one look at an attribute.

A point of the scheduler stops the whole engine core, one of the worker the step. So while a point is held, ask nothing of that
server that needs an answer: touch files, or talk to other servers.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from epd_conformance.connectors.journal import JournalWriter
from epd_conformance.errors import StackError

# Set in a server's environment by the stack: the folder of the gates' sockets. Its path must be short (a unix socket's has at
# most 107 bytes).
FOLDER = "EPD_BARRIERS"
# Longer than anything that the harness does while a point is held (files: milliseconds; a request to another server: a tenth
# of a second), shorter than what anybody in the server waits for the engine (the executor gives up after 300 s).
OPENS_S = 10.0
# A gate answers at once; it may be some lines of start-up behind the journal line that says that its server is there.
GATE_S = 5.0

#: Point -> the side that has it.
POINTS: Mapping[str, str] = {
    "looked-up": "scheduler",  # after `has_cache_item` has said yes
    "allocated": "scheduler",  # after `update_state_after_alloc`
    "scheduled": "scheduler",  # after the n-th `build_connector_meta` of a step that schedules the request
    "loading": "worker",  # before a `start_load_caches` whose metadata name the item
    "loaded": "worker",  # after the `start_load_caches` that put it into the encoder cache
    "saving": "worker",  # before its `save_caches`
    "saved": "worker",  # after it
    "prefilled": "proxy",  # our proxy has the answer of the prefill server, and has not asked the decode server
}


class _Order:
    """What the harness waits for on one connection."""

    def __init__(self, asked: Mapping[str, Any], connection: socket.socket) -> None:
        self.point = str(asked["point"])
        self.id, self.req, self.left = asked.get("id"), asked.get("req"), int(asked.get("nth", 1))
        self.opened = threading.Event()
        self.why = "timeout"
        self._connection = connection

    def wants(self, point: str, ids: Container[str], reqs: Iterable[str]) -> bool:
        if point != self.point:
            return False
        return self.id in ids if self.id is not None else any(str(self.req) in req for req in reqs)

    def open(self, why: str) -> None:
        if not self.opened.is_set():
            self.why = why
            self.opened.set()

    def tell(self, **words: Any) -> None:
        # Whoever is gone is told nothing; the end of its connection opens the point.
        with contextlib.suppress(OSError):
            _send(self._connection, words)


class Gate:
    """The points of one side of one process. `armed` is all that is looked at as long as nobody has ordered anything."""

    armed = False

    def __init__(self, folder: Path, journal: JournalWriter) -> None:
        """Raises OSError where the socket cannot be made."""
        self._journal = journal
        self._order: _Order | None = None
        self._listener = socket.socket(socket.AF_UNIX)
        # Short, and another one for each process and side.
        self._listener.bind(str(folder / f"{journal.server}.{journal.side[0]}{os.getpid()}"))
        self._listener.listen()
        threading.Thread(target=self._serve, name="epd-barriers", daemon=True).start()

    def reach(self, point: str, ids: Container[str] = (), reqs: Iterable[str] = (), **about: Any) -> None:
        """A point is reached with these items and requests (the server's own ids): wait there, if that was ordered.

        `about` goes into the journal's `held` line. Never raises for what the harness does.
        """
        order = self._order
        if order is None or not order.wants(point, ids, reqs):
            return
        order.left -= 1
        if order.left > 0:
            return
        self._order, self.armed = None, False
        began = time.monotonic()
        at = {"point": point, "id": order.id, "req": order.req}
        self._journal.write("held", **at, **about)
        order.tell(held=True)
        order.opened.wait(OPENS_S)
        why = order.why
        self._journal.write("opened", **at, why=why, seconds=time.monotonic() - began)
        order.tell(opened=why)

    def _serve(self) -> None:
        """One harness after the other; a second one waits until the first has closed."""
        while True:
            connection, _ = self._listener.accept()
            order: _Order | None = None
            with connection, contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                _send(connection, {"server": self._journal.server, "side": self._journal.side})
                for words in _messages(connection):
                    if words.get("open") and order is not None:
                        order.open("released")
                    elif "point" in words:
                        order = self._order = _Order(words, connection)
                        self.armed = True
                        order.tell(armed=True)
            # Its connection is over, whatever ended it: nothing is armed any more, and nobody is held.
            self._order, self.armed = None, False
            if order is not None:
                order.open("closed")


def gate(journal: JournalWriter) -> Gate | None:
    """The gate of this side of this process; None where no harness asked for one. Raises OSError."""
    folder = os.environ.get(FOLDER)
    return Gate(Path(folder), journal) if folder else None


def own_gate(side: str) -> Gate | None:
    """As `gate`, for a process that has no journal yet."""
    return gate(JournalWriter(side)) if os.environ.get(FOLDER) else None


# -- the hooks of a recording EC connector, with points ----------------------------------------------------------------------


def _looked_up(hook: Callable[..., Any]) -> Callable[..., Any]:
    def has_cache_item(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = hook(self, *args, **kwargs)
        if self._epd_gate is not None and self._epd_gate.armed and found:
            with self._epd_look("has_cache_item"):
                identifier = kwargs["identifier"] if "identifier" in kwargs else args[0]
                self._epd_gate.reach("looked-up", (identifier,), (self._epd_request or "",))
        return found

    return has_cache_item


def _allocated(hook: Callable[..., Any]) -> Callable[..., Any]:
    def update_state_after_alloc(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = hook(self, *args, **kwargs)
        if self._epd_gate is not None and self._epd_gate.armed:
            with self._epd_look("update_state_after_alloc"):
                request = kwargs["request"] if "request" in kwargs else args[0]
                index = kwargs["index"] if "index" in kwargs else args[1]
                self._epd_gate.reach("allocated", (request.mm_features[index].identifier,), (request.request_id,))
        return result

    return update_state_after_alloc


def _scheduled(hook: Callable[..., Any]) -> Callable[..., Any]:
    def build_connector_meta(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = hook(self, *args, **kwargs)
        if self._epd_gate is not None and self._epd_gate.armed:
            with self._epd_look("build_connector_meta"):
                output = kwargs["scheduler_output"] if "scheduler_output" in kwargs else args[0]
                running = output.scheduled_cached_reqs
                computed = dict(zip(running.req_ids, running.num_computed_tokens, strict=True))
                computed |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
                for req, tokens in output.num_scheduled_tokens.items():
                    ids = self._epd_seen.get(req, ())
                    self._epd_gate.reach("scheduled", ids, (req,), computed=computed.get(req), tokens=tokens)
        return result

    return build_connector_meta


def _loaded(hook: Callable[..., Any]) -> Callable[..., Any]:
    def start_load_caches(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._epd_gate is None or not self._epd_gate.armed:
            return hook(self, *args, **kwargs)
        before: set[str] = set()
        with self._epd_look("start_load_caches"):
            cache = kwargs["encoder_cache"] if "encoder_cache" in kwargs else args[0]
            before = set(cache)
            self._epd_gate.reach("loading", _Named(self._connector_metadata))
        result = hook(self, *args, **kwargs)
        with self._epd_look("start_load_caches"):
            self._epd_gate.reach("loaded", set(cache) - before)
        return result

    return start_load_caches


class _Named(Container[str]):
    """The items that a step's metadata name. They are the connector's own affair, but have no other name to load one by."""

    def __init__(self, metadata: Any) -> None:
        self._metadata = metadata

    def __contains__(self, identifier: object) -> bool:
        return str(identifier).encode("utf-8", "surrogatepass") in pickle.dumps(self._metadata)


def _saved(hook: Callable[..., Any]) -> Callable[..., Any]:
    def save_caches(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._epd_gate is None or not self._epd_gate.armed:
            return hook(self, *args, **kwargs)
        ids: tuple[str, ...] = ()
        with self._epd_look("save_caches"):
            ids = (kwargs["mm_hash"] if "mm_hash" in kwargs else args[1],)
            self._epd_gate.reach("saving", ids)
        result = hook(self, *args, **kwargs)
        with self._epd_look("save_caches"):
            self._epd_gate.reach("saved", ids)
        return result

    return save_caches


_WITH_POINTS: Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "has_cache_item": _looked_up,
    "update_state_after_alloc": _allocated,
    "build_connector_meta": _scheduled,
    "start_load_caches": _loaded,
    "save_caches": _saved,
}


def with_points(hooks: Mapping[str, Any]) -> dict[str, Any]:
    """The recorded hooks with their points around them; as they are where no harness asked for a gate."""
    if not os.environ.get(FOLDER):
        return dict(hooks)
    return {name: _WITH_POINTS[name](hook) if name in _WITH_POINTS else hook for name, hook in hooks.items()}


# -- the harness ---------------------------------------------------------------------------------------------------------------


class Barrier:
    """A point that is armed in some servers, for one hit. Closing it, or the death of its process, opens it."""

    def __init__(self, connections: Sequence[socket.socket]) -> None:
        self._connections = list(connections)
        self._held: socket.socket | None = None

    def wait(self, over: Callable[[], bool]) -> bool:
        """Wait until something is held; False where `over` says that nothing will come any more, or every server ended."""
        waiting = list(self._connections)
        while waiting:
            # Asked before the sockets are: what is over by now may have been held before.
            ended = over()
            ready, _, _ = select.select(waiting, [], [], 0.05)
            for connection in ready:
                words = _receive(connection)
                if words is None:
                    waiting.remove(connection)
                elif words.get("held"):
                    self._held = connection
                    return True
            if ended and not ready:
                return False
        return False

    def open(self) -> None:
        """Let go on what is held, and wait until it does; whatever else is armed is not any more."""
        if self._held is not None:
            with contextlib.suppress(OSError):
                _send(self._held, {"open": True})
                self._held.settimeout(GATE_S)
                while (words := _receive(self._held)) is not None and "opened" not in words:
                    pass
        self.close()

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


def arm(folder: Path, servers: Collection[str], point: str, *, id: str = "", req: str = "", nth: int = 1) -> Barrier:
    """Arm a point in each of these servers (journal names) for an item's identifier, or for a client's request id.

    Of several ranks of a server one waits. `nth`: at the n-th time. Raises StackError where a server has no such gate.
    """
    wanted = {"point": point, "nth": nth, **({"id": id} if id else {"req": req})}
    found: dict[str, socket.socket] = {}
    deadline = time.monotonic() + GATE_S
    try:
        while set(found) != set(servers):
            if time.monotonic() > deadline:
                missing = ", ".join(sorted(set(servers) - set(found)))
                raise StackError(f"{missing}: no {POINTS[point]} there listens for a barrier")
            for path in sorted(folder.iterdir()):
                _try(path, POINTS[point], servers, found)
        for connection in found.values():
            _send(connection, wanted)
            if not (_receive(connection) or {}).get("armed"):
                raise StackError(f"the point {point!r} could not be armed")
            connection.settimeout(None)
    except (OSError, StackError) as error:
        for connection in found.values():
            connection.close()
        raise error if isinstance(error, StackError) else StackError(f"a barrier's gate went away: {error}") from error
    return Barrier(list(found.values()))


def _try(path: Path, side: str, servers: Collection[str], found: dict[str, socket.socket]) -> None:
    """Connect to a gate, and keep the connection if it is one that is wanted and not found yet."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(GATE_S)
    try:
        connection.connect(str(path))
        hello = _receive(connection) or {}
    except OSError:
        hello = {}  # of a process that has ended, or is about to
    if hello.get("side") == side and hello["server"] in servers and hello["server"] not in found:
        found[hello["server"]] = connection
    else:
        connection.close()


def _send(connection: socket.socket, words: Mapping[str, Any]) -> None:
    connection.sendall((json.dumps(words) + "\n").encode())


def _receive(connection: socket.socket) -> dict[str, Any] | None:
    """The next message; None at the end. Messages are short and few: read byte by byte, none is read with another."""
    line = b""
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte:
            return None
        line += byte
    words = json.loads(line)
    return words if isinstance(words, dict) else {}


def _messages(connection: socket.socket) -> Iterable[dict[str, Any]]:
    while (words := _receive(connection)) is not None:
        yield words
