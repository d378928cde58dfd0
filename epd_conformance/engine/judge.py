"""What is allowed: an independent model of the items, and the findings that follow from what a run recorded. Pure.

The judge knows what each identifier shows, who saved it, and what the harness did to it since; it asks the connector nothing. Of
a saved item whose object nobody touched it expects the bytes; of one that was damaged, a miss or the bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from epd_conformance.engine.content import Content, expected_digest
from epd_conformance.engine.events import Event
from epd_conformance.engine.findings import DAMAGE_REQUIREMENT, HOOK_REQUIREMENT, Finding
from epd_conformance.engine.plan import Plan, ServerSpec
from epd_conformance.engine.schedule_judge import RECORDED, ScheduleJudge


@dataclass
class Item:
    """What is known of one identifier.

    `saved`: when a producer last returned from saving it, in the run's own time; None: never. `sure`: nothing has happened since
    that could have cost it. `damage`: what the harness did to the object since; `window`: where in a step, for the step it was
    done in. `vouched`: a producer said that it has it after the damage, and so did not encode it; `primed`: a producer encoded and
    saved it again. `left`: it has left its producer's cache since it was saved.
    """

    content: Content
    saved: int | None = None
    saved_by: str = ""
    sure: bool = False
    damage: str = ""
    window: str = ""
    vouched: bool = False
    primed: bool = False
    left: bool = False


@dataclass
class Request:
    """What is known of one request: when it arrived, which items came with media, and whether its parameters are junk."""

    server: str
    arrived: int
    media: Mapping[str, bool]
    hostile: bool = False
    over: bool = False
    deferred: int = 0


@dataclass
class Seen:
    """What a server's workers hold and held, by key.

    `holds`: digest of what is or was in the cache; `loads`: keys that were loaded rightly once; `evicted`: keys that left it;
    `promised`: whether the last promise followed a preemption; `loading`: keys of the loads that are under way;
    `gone`: promised and never there.
    """

    holds: dict[str, str] = field(default_factory=dict)
    loads: set[str] = field(default_factory=set)
    evicted: set[str] = field(default_factory=set)
    promised: dict[str, bool] = field(default_factory=dict)
    loading: list[str] = field(default_factory=list)
    gone: set[str] = field(default_factory=set)


class Judge:
    """Takes events of all servers in order; `findings` grows. `operation` is the plan's operation that is being done."""

    def __init__(
        self,
        contents: Mapping[str, Content],
        producers: frozenset[str],
        consumers: frozenset[str],
        servers: Mapping[str, ServerSpec] | None = None,
    ) -> None:
        """`contents`: by identifier. `producers`, `consumers`: names of servers; one may be both. `servers`: what the plan says of
        them, for the judge of vLLM's own Scheduler."""
        self.items = {key: Item(content) for key, content in contents.items()}
        self.requests: dict[str, Request] = {}
        self.findings: list[Finding] = []
        #: Requirement -> how often it was put to the test: its situation came about, and what it asks for was looked at.
        self.exercised: Counter[str] = Counter()
        self.operation = -1
        self.store_fault = ""
        # When it came, how often a look-up or a save met it, and which items were saved for the first time meanwhile.
        self._broke = 0
        self._met = 0
        self._first_saved: set[str] = set()
        self.time = 0
        self._producers = producers
        self._consumers = consumers
        self._key_of_digest = {expected_digest(content): key for key, content in contents.items()}
        self._seen: dict[str, Seen] = {name: Seen() for name in producers | consumers}
        self._watching = False
        self._pathlike = False
        self._shut: set[tuple[str, str]] = set()
        self._engine = ScheduleJudge(servers or {}, self.found, self.exercised)

    def arrived(self, request_id: str, server: str, media: Mapping[str, bool], hostile: bool) -> None:
        self.time += 1
        self.requests[request_id] = Request(server, self.time, media, hostile)

    def restarted(self, server: str, keeps: bool) -> None:
        """A server starts anew. `keeps`: what it saved outlives it."""
        self._seen[server] = Seen()
        if not keeps:
            for item in self.items.values():
                if item.saved_by == server:
                    item.sure = False

    def store_broke(self, fault: str) -> None:
        """The store is full, read-only or removed from now on; empty: mended."""
        self.store_fault = fault
        self._broke, self._met, self._first_saved = self.time, 0, set()

    def found(self, requirement: str, kind: str, expected: str, observed: str, server: str = "") -> None:
        self.findings.append(Finding(requirement, kind, expected, observed, server, self.operation))

    def take(self, server: str, event: Event) -> None:
        """Judge one event of a server. Raises ValueError for one of an unknown kind: it may be what should be found."""
        self.time += 1
        handler = _HANDLERS.get(event[0])
        if handler is not None:
            handler(self, server, *event[1:])
        elif event[0] not in RECORDED:
            raise ValueError(f"no event is called {event[0]!r}")
        self._engine.take(server, event)

    # ---- the engine's side ----

    def _raised(self, server: str, side: str, hook: str, error: str, about: Sequence[str]) -> None:
        requirement, kind = HOOK_REQUIREMENT.get(hook, "EPD-INIT-006"), f"{hook} raised"
        expected = f"{side}.{hook} returns"
        if side == "process":
            requirement, kind, expected = "EPD-INIT-006", "process ended", "the process of the object goes on"
        elif hook == "start_load_caches" and (blame := self._blame(server)):
            requirement, kind = blame
            expected = "a miss, or the bytes that were saved"
        elif hook == "save_caches" and server not in self._producers:
            requirement, expected = "EPD-ROLE-011", "save_caches on a consumer returns and publishes nothing"
        elif self.store_fault and hook in (
            "save_caches",
            "has_cache_item",
            "ensure_cache_available",
            "start_save_caches",
        ):
            requirement = _STORE_REQUIREMENT[self.store_fault]
            kind, expected = (
                f"{kind}, store {self.store_fault}",
                f"{side}.{hook} returns though the store is {self.store_fault}",
            )
        elif hook in ("ensure_cache_available", "request_finished") and any(
            request.hostile and not request.over and request.server == server for request in self.requests.values()
        ):
            requirement, expected = "EPD-SEC-004", f"{hook} returns for ec_transfer_params of any kind"
        elif damaged := next(
            (item for key in about if (item := self.items.get(key)) is not None and item.damage), None
        ):
            requirement, kind = self._of_damage(damaged), f"{kind}, object {damaged.damage}"
            expected = f"{side}.{hook} returns, whatever lies in the item's place"
        self.found(requirement, kind, expected, f"{error} in {side}.{hook}", server)

    def _blame(self, server: str) -> tuple[str, str] | None:
        """Whose fault it is that a step's loads failed: that of an object that was damaged, most recent window first."""
        for key in self._seen[server].loading:
            item = self.items.get(key)
            if item is not None and item.window:
                requirement = "EPD-RACE-001" if item.window == "alloc" else "EPD-RACE-002"
                what = "deleted" if item.damage == "deleted" else "damaged"
                return requirement, f"{what} before {'allocation' if item.window == 'alloc' else 'the load'}"
        for key in self._seen[server].loading:
            item = self.items.get(key)
            if item is not None and item.damage:
                return self._of_damage(item), f"{item.damage}, then promised"
        return None

    def _of_damage(self, item: Item) -> str:
        return DAMAGE_REQUIREMENT[item.damage]

    def _returned(self, server: str, side: str, hook: str, problem: str) -> None:
        requirement = HOOK_REQUIREMENT.get(hook, "EPD-INIT-006")
        self.found(
            requirement, f"{hook} returned nonsense", f"{side}.{hook} returns what the engine uses", problem, server
        )

    def _lookup(self, server: str, request_id: str, key: str, answer: bool) -> None:
        item, request = self.items.get(key), self.requests.get(request_id)
        if item is None:
            return
        if server not in self._consumers:
            if answer and item.damage:
                item.vouched = True
            return
        self._looked_up(item, request, key)
        item.window = ""
        if answer or self.store_fault:
            return
        # What a request was told when it arrived may stand for it: only what was there before counts.
        known = item.saved is not None and (request is None or item.saved < request.arrived)
        if known and item.sure:
            self.found(
                "EPD-KEY-001",
                "saved and not found",
                f"has_cache_item({key[:80]!r}) is True: {item.saved_by} saved it and nothing happened to it since",
                "False",
                server,
            )
        elif known and item.vouched:
            self.found(
                "EPD-INTEG-014",
                "vouched for and lost",
                "after the item was primed again, its object is whole",
                f"the producer said that it has the item ({item.damage}), so nothing was encoded; the consumer misses it",
                server,
            )

    def _looked_up(self, item: Item, request: Request | None, key: str) -> None:
        """Which requirements a consumer's look-up puts to the test, whatever it answers."""
        asked = self.exercised
        if self._watching:
            asked["EPD-KEY-002"] += 1
        if self.store_fault:
            self._met += 1
            return
        if item.damage and item.window == "":
            with_media = request is None or request.media.get(key, True)
            asked[self._of_damage(item) if with_media or item.damage != "deleted" else "EPD-ERR-002"] += 1
            if item.damage == "code":
                asked["EPD-SEC-005"] += 1
        if item.vouched or item.primed:
            asked["EPD-INTEG-014"] += 1
        if item.saved is not None and item.sure and (request is None or item.saved < request.arrived):
            asked["EPD-KEY-001"] += 1
        if any(other is not item and other.saved is not None for other in self.items.values()):
            asked["EPD-KEY-003"] += 1

    def _deferred(
        self, server: str, request_id: str, running: bool, computed: int, pending: list[str], unencodable: list[str]
    ) -> None:
        request = self.requests.get(request_id)
        if request is None:
            return
        request.deferred += 1
        if unencodable:
            self.exercised["EPD-ERR-002"] += 1
        if running and not pending:
            self.exercised["EPD-LIFE-008"] += 1
            self.found(
                "EPD-LIFE-008",
                "decode deferred",
                "a running request whose items are all computed goes on",
                f"ensure_cache_available({request_id}, {computed}) is False",
                server,
            )

    def _promise(self, server: str, request_id: str, key: str, again: bool) -> None:
        self._seen[server].promised[key] = again
        request = self.requests.get(request_id)
        if request is not None and request.deferred:
            self.exercised["EPD-LIFE-006"] += 1

    def _went_on(self, server: str, request_id: str) -> None:
        self.exercised["EPD-LIFE-008"] += 1

    def _loading(self, server: str, keys: list[str]) -> None:
        self._seen[server].loading = keys
        self.exercised["EPD-XFER-011"] += 1
        for key in keys:
            item = self.items.get(key)
            if item is not None and item.window:
                self.exercised["EPD-RACE-001" if item.window == "alloc" else "EPD-RACE-002"] += 1
            if self._seen[server].promised.get(key, False):
                self.exercised["EPD-LIFE-002"] += 1

    def _built(self, server: str, scheduled: bool) -> None:
        self.exercised["EPD-XFER-012"] += 1
        if scheduled:
            self.exercised["EPD-XFER-013"] += 1

    def _metadata(self, server: str, requirement: str, problem: str) -> None:
        expected = (
            "build_connector_meta leaves the scheduler output as it was"
            if requirement == "EPD-XFER-013"
            else "build_connector_meta returns a picklable object on every step"
        )
        self.found(requirement, "metadata", expected, problem, server)

    def _named(self, server: str, request_ids: list[str]) -> None:
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is None or request.over or request.hostile:
                continue
            bare = [key for key, media in request.media.items() if not media]
            if request.deferred:
                self.exercised["EPD-LIFE-006"] += 1
            if bare:
                self.exercised["EPD-ERR-002"] += 1
            if any(not self.items[key].sure or self.store_fault for key in bare if key in self.items):
                continue
            requirement = "EPD-KEY-001" if bare else "EPD-ERR-001"
            why = "its items were saved and are whole" if bare else "its media are at hand"
            self.found(
                requirement, "given up without need", f"{request_id} is served: {why}", "named as unavailable", server
            )

    def _finished(self, server: str, request_id: str, status: str, problem: tuple[str, str] | None) -> None:
        self.exercised["EPD-LIFE-003"] += 1
        self.exercised["EPD-LIFE-005"] += 1
        if request_id in self.requests:
            request = self.requests[request_id]
            if request.over or not request.media or status != "FINISHED_LENGTH_CAPPED":
                self.exercised["EPD-LIFE-004"] += 1
            if request.hostile:
                self.exercised["EPD-SEC-004"] += 1
            request.over = True
        if problem is not None:
            requirement, text = problem
            expected = (
                "request_finished returns (False, parameters or None)"
                if requirement == "EPD-LIFE-003"
                else "parameters come back equal from JSON and msgpack"
            )
            self.found(requirement, "request_finished", expected, text, server)

    # ---- the workers' side ----

    def _loaded(
        self, server: str, rank: int, key: str, digest: str, shape: list[int], dtype: str, device: str, asked: bool
    ) -> None:
        item, seen = self.items.get(key), self._seen[server]
        if not asked or item is None:
            self.found(
                "EPD-XFER-012",
                "unasked load",
                "a load puts only items into the cache that this step took room for",
                f"{key[:80]!r} was put there: nobody will ever free it",
                server,
            )
            return
        content = item.content
        seen.holds[key] = digest
        fits = shape == list(content.shape) and dtype == content.dtype and device == "cpu"
        right = digest == expected_digest(content)
        if item.saved is not None and not item.damage:
            self.exercised["EPD-XFER-001"] += 1
            self.exercised["EPD-XFER-006"] += 1
            if key in seen.evicted and key in seen.loads:
                self.exercised["EPD-XFER-015"] += 1
            if item.left:
                self.exercised["EPD-XFER-010"] += 1
        if fits and right:
            seen.loads.add(key)
            if item.saved is None and not item.damage:
                self.found(
                    "EPD-ROLE-011",
                    "nobody saved it",
                    "only producers publish",
                    f"{key[:80]!r} was loaded though only a consumer has encoded it",
                    server,
                )
            return
        what = f"{shape} {dtype} on {device}" if not fits else "other bytes of the right shape"
        other = self._key_of_digest.get(digest)
        if other is not None and other != key:
            what = f"the rows of {other[:80]!r}"
        if item.damage:
            requirement, kind = self._of_damage(item), f"{item.damage}, then loaded"
        elif other is not None and other != key:
            requirement, kind = "EPD-KEY-003", "another item's rows"
        elif not fits:
            requirement, kind = "EPD-XFER-006", "does not fit"
        elif key in seen.loads:
            requirement, kind = "EPD-XFER-015", "other bytes when loaded again"
        else:
            requirement, kind = "EPD-XFER-001", "other bytes than saved"
        expected = f"{list(content.shape)} {content.dtype} on cpu, the bytes that were saved"
        self.found(requirement, kind, expected, f"{key[:80]!r}: {what}", server)
        if item.vouched:
            expected = "after the item was primed again, its object is whole"
            self.found(
                "EPD-INTEG-014", "vouched for and bad", expected, f"{key[:80]!r}: {what} ({item.damage})", server
            )

    def _missing(self, server: str, rank: int, key: str) -> None:
        again = self._seen[server].promised.get(key, False)
        requirement, kind = self._blame(server) or ("EPD-XFER-011", "promised and not there")
        if again and requirement == "EPD-XFER-011":
            requirement = "EPD-LIFE-002"
        elif key in self._seen[server].loads and requirement == "EPD-XFER-011":
            requirement = "EPD-XFER-015"
        self._seen[server].gone.add(key)
        self.found(
            requirement,
            kind,
            "every item that this step promised is in the cache when start_load_caches returns",
            f"{key[:80]!r} is not (rank {rank})",
            server,
        )

    def _lost(self, server: str, rank: int, key: str) -> None:
        if key in self._seen[server].gone or self._engine.owes(server, key):
            return  # found already: it was never there
        self.found(
            "EPD-XFER-011",
            "gone when merged",
            "what is in the encoder cache stays there until the engine evicts it",
            f"{key[:80]!r} is not there when its rows are merged (rank {rank})",
            server,
        )

    def _unencodable(self, server: str, request_id: str, key: str) -> None:
        self.found(
            "EPD-ERR-002",
            "no object, no media",
            "a request whose item has neither an object nor media is held back and then given up",
            f"{request_id} was let through: the engine would encode {key[:80]!r} and die",
            server,
        )

    def _used(self, server: str, rank: int, key: str, digest: str) -> None:
        held = self._seen[server].holds.get(key)
        item = self.items.get(key)
        if held is not None and item is not None and item.damage and key in self._seen[server].loads:
            self.exercised["EPD-XFER-007"] += 1
        # Rows that were wrong from the start have been found already.
        if held is None or digest == held:
            return
        self.found(
            "EPD-XFER-007",
            "rows changed in the cache",
            "rows in the encoder cache keep their bytes",
            f"{key[:80]!r} is merged with other bytes than it came with",
            server,
        )

    def _encoded(self, server: str, rank: int, key: str) -> None:
        item = self.items.get(key)
        if item is not None:
            self._seen[server].holds[key] = expected_digest(item.content)

    def _saved(self, server: str, rank: int, key: str, published: list[str]) -> None:
        item = self.items.get(key)
        if "/" in key or ".." in key:
            self._pathlike = True
        if server not in self._producers:
            self.exercised["EPD-ROLE-011"] += 1
            if published:
                expected = "save_caches on a consumer publishes nothing"
                self.found("EPD-ROLE-011", "consumer publishes", expected, f"new in the store: {published[0]}", server)
            return
        if item is None:
            return
        if self.store_fault and item.saved is None:
            self._first_saved.add(key)
        item.saved, item.saved_by = self.time, server
        item.left = False
        if self.store_fault:
            item.sure = False
            self._met += 1
        else:
            item.primed = item.primed or bool(item.damage)
            item.sure, item.damage, item.window, item.vouched = True, "", "", False

    def _evicted(self, server: str, key: str, reset: bool) -> None:
        self._seen[server].evicted.add(key)
        item = self.items.get(key)
        if item is not None and item.saved_by == server:
            item.left = True

    def _store(self, server: str, requirement: str, what: str) -> None:
        expected = {
            "EPD-KEY-002": "a look-up leaves the store as it was, and writes nowhere else",
            "EPD-SEC-001": "nothing outside the store is touched",
            "EPD-SEC-005": "an object that is loaded runs no code",
        }[requirement]
        self.found(requirement, "store changed", expected, what, server)

    def _damaged(self, server: str, key: str, how: str, window: str) -> None:
        item = self.items[key]
        item.sure, item.damage, item.window, item.vouched, item.primed = False, how, window, False, False

    # ---- what the harness says of itself ----

    def _arrived(self, server: str, request_id: str, media: Mapping[str, bool], hostile: bool) -> None:
        self.arrived(request_id, server, media, hostile)

    def _operation(self, server: str, number: int) -> None:
        self.operation = number

    def _booted(self, server: str) -> None:
        self.exercised["EPD-INIT-001"] += 1

    def _gone(self, server: str, keeps: bool) -> None:
        for request in self.requests.values():
            if request.server == server:
                request.over = True
        self._shut = {shut for shut in self._shut if shut[0] != server}
        self.restarted(server, keeps)

    def _fault(self, server: str, fault: str) -> None:
        self.store_broke(fault if fault in _STORE_REQUIREMENT else "")

    def _absent(self, server: str, keys: list[str]) -> None:
        """A fault of the store counts where it shows: in an object that is gone with it, or in one that could not be written."""
        if self.store_fault == "removed":
            there = [item for key in keys if (item := self.items[key]).sure]
            showed = any(item.saved is not None and item.saved <= self._broke for item in there)
        else:
            showed = not self._first_saved.isdisjoint(keys)
        if self.store_fault and showed:
            self.exercised[_STORE_REQUIREMENT[self.store_fault]] += self._met

    def _watch(self, server: str, begins: bool) -> None:
        self._watching = begins

    def _merged(self, server: str, reported: bool) -> None:
        if reported:
            self.exercised["EPD-OBS-002"] += 1

    def _swept(self, server: str) -> None:
        if self._pathlike:
            self.exercised["EPD-SEC-001"] += 1

    def _shutdown(self, server: str, side: str) -> None:
        if (server, side) in self._shut:
            self.exercised["EPD-LIFE-010"] += 1
        self._shut.add((server, side))

    def _stuck(self, server: str, request_id: str, seconds: float) -> None:
        request = self.requests[request_id]
        if self._engine.starves(server, request_id):
            return
        if request.deferred:
            self.found(
                "EPD-LIFE-006",
                "deferred for ever",
                "a deferred request is let through, or named as unavailable, within the connector's time limit",
                f"{request_id} has been deferred {request.deferred} times and {seconds:.0f} s",
                server,
            )

    def _idle(self, server: str, seconds: float, pending: bool) -> None:
        self.exercised["EPD-LIFE-009"] += 1
        if pending:
            self.found(
                "EPD-LIFE-009",
                "never idle",
                "has_pending_push_work is False once nothing is under way",
                f"True {seconds:.0f} s after the last request ended",
                server,
            )


def judge_of(plan: Plan, keys: Sequence[str], hidden: int) -> Judge:
    """A judge for the events of a plan. `keys`: the identifiers of its items; `hidden`: width of the language model."""
    names = plan.server_names()
    return Judge(
        {key: item.content(hidden, plan.dtype) for key, item in zip(keys, plan.items, strict=True)},
        frozenset(name for name, spec in zip(names, plan.servers, strict=True) if spec.role != "ec_consumer"),
        frozenset(name for name, spec in zip(names, plan.servers, strict=True) if spec.role != "ec_producer"),
        dict(zip(names, plan.servers, strict=True)),
    )


_STORE_REQUIREMENT = {"full": "EPD-ERR-003", "read-only": "EPD-ERR-004", "removed": "EPD-ERR-004"}

_HANDLERS: Mapping[str, Any] = {
    "raised": Judge._raised,
    "returned": Judge._returned,
    "lookup": Judge._lookup,
    "deferred": Judge._deferred,
    "promised": Judge._promise,
    "loading": Judge._loading,
    "encoded": Judge._encoded,
    "metadata": Judge._metadata,
    "named": Judge._named,
    "finished": Judge._finished,
    "loaded": Judge._loaded,
    "missing": Judge._missing,
    "lost": Judge._lost,
    "unencodable": Judge._unencodable,
    "used": Judge._used,
    "saved": Judge._saved,
    "evicted": Judge._evicted,
    "store": Judge._store,
    "damaged": Judge._damaged,
    "built": Judge._built,
    "went-on": Judge._went_on,
    "merged": Judge._merged,
    "watch": Judge._watch,
    "shutdown": Judge._shutdown,
    "arrived": Judge._arrived,
    "operation": Judge._operation,
    "booted": Judge._booted,
    "gone": Judge._gone,
    "fault": Judge._fault,
    "absent": Judge._absent,
    "swept": Judge._swept,
    "stuck": Judge._stuck,
    "idle": Judge._idle,
}
