"""What vLLM's Scheduler may do with encoder inputs: an independent model of requests and of the encoder cache. Pure.

It takes what `real_core` recorded, pass by pass, and what the plan says of the server; of the scheduler's own counters it believes
nothing that it can count itself. What it finds is the engine's: see the requirements of layer `scheduler`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from epd_conformance.engine.events import Event
from epd_conformance.engine.plan import ServerSpec

#: Requests of EPD-LIFE-015.
CROWD = 6
#: Passes in a row that schedule nothing though somebody may go on, until that is called a standstill: what one pass could not do
#: the next one cannot either, unless results have come in between, of at most two steps.
STANDSTILL = 8
#: Results of a request after which an entry that it no longer needs must be released. With asynchronous scheduling tokens of steps
#: under way are set off against what is computed, of two steps at most.
_GRACE, _GRACE_AHEAD = 1, 3

Found = Callable[[str, str, str, str, str], None]


@dataclass(frozen=True)
class Feature:
    """One occurrence of an item in a prompt. `mask`: a digit for each token of the placeholder, 1 where it is an embedding."""

    key: str
    offset: int
    mask: str
    stripped: bool

    @property
    def end(self) -> int:
        return self.offset + len(self.mask)

    @property
    def rows(self) -> int:
        return self.mask.count("1")

    @property
    def sparse(self) -> bool:
        return self.rows != len(self.mask)

    def takes(self, start: int, end: int) -> bool:
        """Whether computing the tokens from `start` to `end` of the prompt needs rows of the item."""
        return "1" in self.mask[max(start - self.offset, 0) : max(end - self.offset, 0)]


@dataclass
class Request:
    """A request as far as it went. `start`: where it was (re)started, None while it waits; `scheduled`, `computed`: how many tokens
    of it were given to the worker, and how many are computed for certain; `since`: the pass that preempted it last; `asked`: what
    the connector last said to its being scheduled; `excused`: the encoder cache was reset under it; `due`: how often it held
    an entry that it did not need any more."""

    prompt: int
    features: Sequence[Feature]
    start: int | None = None
    scheduled: int = 0
    computed: int = 0
    since: int = 0
    asked: bool | None = None
    excused: bool = False
    over: str = ""
    due: Counter[str] = field(default_factory=Counter)

    def touched(self) -> Iterator[Feature]:
        """The occurrences of which rows were needed since it was (re)started."""
        if self.start is not None:
            for feature in self.features:
                if feature.takes(self.start, self.scheduled):
                    yield feature

    def reads(self) -> Iterator[Feature]:
        """Those of them that are not computed to their end."""
        return (feature for feature in self.touched() if feature.end > self.computed)

    def returns(self) -> set[str]:
        """Items that it read and will read again, at a later occurrence."""
        touched = {feature.key for feature in self.touched()}
        return {feature.key for feature in self.features if feature.key in touched and feature.end > self.computed}


@dataclass
class Pass:
    """What was recorded within one scheduling pass.

    `asked`: computed tokens of the requests that the connector was asked about; `answers`: look-ups by request and key; `chosen`:
    rows that were chosen for a request to be encoded, and to be encoded or loaded; `spent`: rows of the budget that are taken;
    `took`, `told`: items of requests that got room, and that the connector heard of; `roomy`, `refused`: keys and items that there
    was room for, or none; `built`: calls of build_connector_meta.
    """

    asked: dict[str, int] = field(default_factory=dict)
    answers: dict[tuple[str, str], bool] = field(default_factory=dict)
    chosen: dict[str, tuple[int, int]] = field(default_factory=dict)
    spent: int = 0
    took: list[tuple[str, int]] = field(default_factory=list)
    told: list[tuple[str, int]] = field(default_factory=list)
    roomy: list[tuple[str, str]] = field(default_factory=list)
    refused: list[tuple[str, int]] = field(default_factory=list)
    built: int = 0
    loads: bool = False
    encodes: bool = False


@dataclass
class Server:
    """What is known of one server.

    `cache`: what is in its encoder cache, by key; `ghosts`: listed there, and neither encoded nor loaded; `lost`: keys that a step
    was scheduled for without their rows; `made_to_name`, `given_up`: requests named as unavailable that have ended, or had not;
    `used`: blocks of the KV cache that are taken; `kept`: the EC connector asked to keep some, for good; `consumed`: what was
    released since results were last taken in; `preempted_with`: key -> the request that took room for it and was preempted in the
    same pass; `still`: passes in a row without progress; `ways`: what passes have shown so far.
    """

    spec: ServerSpec
    requests: dict[str, Request] = field(default_factory=dict)
    cache: dict[str, Feature] = field(default_factory=dict)
    ghosts: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    made_to_name: set[str] = field(default_factory=set)
    given_up: set[str] = field(default_factory=set)
    used: int = 0
    kept: bool = False
    now: Pass = field(default_factory=Pass)
    consumed: list[tuple[str, int]] = field(default_factory=list)
    preempted_with: dict[str, str] = field(default_factory=dict)
    ways: set[str] = field(default_factory=set)
    passes: int = 0
    still: int = 0

    def rows(self) -> int:
        return sum(feature.rows for feature in self.cache.values())


class ScheduleJudge:
    """Takes events of all servers in order. `found(requirement, kind, expected, observed, server)` is called for what is not
    allowed, and `exercised` counts how often a requirement was put to the test."""

    def __init__(self, servers: Mapping[str, ServerSpec], found: Found, exercised: Counter[str]) -> None:
        self._servers = {name: Server(spec) for name, spec in servers.items()}
        self._found = found
        self._exercised = exercised

    def take(self, server: str, event: Event) -> None:
        handler = _HANDLERS.get(event[0])
        if handler is not None and server in self._servers:
            handler(self, server, self._servers[server], *event[1:])

    def owes(self, server: str, key: str) -> bool:
        """Whether it was the engine that let a step begin without an item's rows."""
        return key in self._servers[server].lost if server in self._servers else False

    def starves(self, server: str, request_id: str) -> bool:
        """Whether a request that came to no end waits for the engine, and not for the connector; found, if so."""
        state = self._servers.get(server)
        request = state.requests.get(request_id) if state is not None else None
        if state is None or request is None or not state.passes or request.over or request.asked is False:
            return False
        self._stands(server, state, request_id)
        return True

    def _stands(self, server: str, state: Server, request_id: str) -> None:
        if state.kept:
            return  # nobody knows what would go on if the connector had not asked for it
        request = state.requests[request_id]
        live = [other for other in state.requests.values() if not other.over]
        # Once several stand they are ended one by one, and the last one stands for what the first ones did.
        state.ways |= {"crowd stands"} if len(live) > 1 else set()
        requirement = "EPD-LIFE-015" if "crowd stands" in state.ways else "EPD-LIFE-014"
        observed = f"{request_id} stands at token {request.computed} of {request.prompt} in every step"
        self._found(requirement, "no progress", f"{request_id} comes to its end", observed, server)

    # ---- within a pass ----

    def _asked(self, server: str, state: Server, request_id: str, computed: int, answer: bool) -> None:
        state.now.asked[request_id] = computed
        state.requests[request_id].asked = answer

    def _lookup(self, server: str, state: Server, request_id: str, key: str, answer: bool) -> None:
        request = state.requests.get(request_id)
        if request is None:
            return
        now = state.now
        now.answers[request_id, key] = answer
        feature = next(feature for feature in request.features if feature.key == key)
        encoded, chosen = now.chosen.get(request_id, (0, 0))
        now.chosen[request_id] = encoded + (0 if answer else feature.rows), chosen + feature.rows
        if key in state.cache:
            expected = f"{key[:80]!r} comes from the encoder cache, which has it"
            self._found("EPD-XFER-016", "asked for a local item", expected, "has_cache_item was called", server)
        if self._covered(request, key, now.asked.get(request_id, 0)):
            self._touches_covered(server, key, "looked up")

    @staticmethod
    def _covered(request: Request, key: str, computed: int) -> bool:
        return all(feature.end <= computed for feature in request.features if feature.key == key)

    def _touches_covered(self, server: str, key: str, how: str) -> None:
        expected = f"{key[:80]!r} is left alone: its tokens are computed"
        self._found("EPD-XFER-020", f"covered and {how}", expected, f"it was {how}", server)

    def _room(
        self,
        server: str,
        state: Server,
        request_id: str,
        index: int,
        budget: int,
        pending: int,
        answer: bool,
        dropped: Sequence[str],
    ) -> None:
        request, now = state.requests[request_id], state.now
        feature = request.features[index]
        encoded, chosen = now.chosen.get(request_id, (0, 0))
        for key in dropped:
            if feature.rows + chosen <= state.spec.cache - state.rows():
                self._dropped_early(server, key, f"{feature.rows + chosen} rows fit beside what is there")
            self._dropped(server, state, key, feature.rows + chosen)
        left = state.spec.budget - now.spent - encoded
        # What got room and was not looked up is no load: it is left out, or encoded without asking.
        unasked = [key for name, key in now.roomy if name == request_id and (name, key) not in now.answers]
        if answer:
            now.roomy.append((request_id, feature.key))
        else:
            now.refused.append((request_id, index))
        if budget < left and not unasked:
            expected = f"{left} rows may still be encoded: {encoded + now.spent} are, and loads take none of the budget"
            self._found("EPD-XFER-017", "load charged to the budget", expected, f"{budget} may", server)
        if pending < chosen:
            expected = f"{chosen} rows are set aside for what {request_id} will load and encode"
            self._found("EPD-XFER-017", "load takes no room", expected, f"{pending} are", server)

    def _dropped(self, server: str, state: Server, key: str, needed: int) -> None:
        """An entry leaves the cache, for `needed` rows of something else."""
        gone = state.cache.pop(key, None)
        state.ghosts.discard(key)
        if gone is None:
            return
        readers = {
            name: request for name, request in state.requests.items() if not request.over and not request.excused
        }
        returned: set[str] = set()
        for name, request in readers.items():
            if any(feature.key == key for feature in request.reads()):
                requirement = "EPD-LIFE-020" if state.spec.asynchronous or state.spec.drafts else "EPD-LIFE-018"
                expected = f"{key[:80]!r} stays until the step that reads it for {name} is over"
                observed = f"evicted while {request.computed} tokens of {request.scheduled} are computed"
                self._found(requirement, "evicted while it is read", expected, observed, server)
                return
            returned |= request.returns()
        if key in returned:
            wanted = returned | {feature.key for request in readers.values() for feature in request.reads()}
            held = sum(state.cache[other].rows for other in wanted if other in state.cache)
            if held + gone.rows + needed <= state.spec.cache:
                expected = f"{key[:80]!r} stays: it occurs again, and the cache has room for it and all that is needed"
                self._found("EPD-LIFE-019", "evicted between occurrences", expected, "evicted", server)

    def _dropped_early(self, server: str, key: str, why: str) -> None:
        self._found("EPD-LIFE-018", "evicted without need", f"{key[:80]!r} stays: {why}", "evicted", server)

    def _took(self, server: str, state: Server, request_id: str, index: int) -> None:
        request, now = state.requests[request_id], state.now
        feature = request.features[index]
        now.took.append((request_id, index))
        state.cache[feature.key] = feature
        state.ghosts.discard(feature.key)
        state.lost.discard(feature.key)
        if now.answers.get((request_id, feature.key)):
            now.loads = True
        else:
            now.encodes = True
            now.spent += feature.rows
        if self._covered(request, feature.key, now.asked.get(request_id, 0)):
            self._touches_covered(server, feature.key, "loaded or encoded")

    def _told(self, server: str, state: Server, request_id: str, index: int) -> None:
        state.now.told.append((request_id, index))

    def _built(self, server: str, state: Server, scheduled: bool) -> None:
        state.now.built += 1

    # ---- a pass is over ----

    def _pass(self, server: str, state: Server, facts: Mapping[str, Any]) -> None:
        now, state.now = state.now, Pass()
        state.passes += 1
        self._unasked(server, state, facts["evicted"])
        for request_id, index in state.consumed:
            self._consumed_early(server, state, request_id, index)
        state.consumed.clear()
        self._told_right(server, state, now)
        self._asked_once(server, state, now, facts)
        self._preemptions(state, now, facts)
        for request_id, count in facts["tokens"].items():
            request = state.requests[request_id]
            start = facts["computed"][request_id]
            if request.start is None:
                request.start = start
                self._restarted(state, request_id, start)
            request.scheduled = start + count
            self._rows_at_hand(server, state, now, facts, request_id)
            if state.spec.whole_items:
                self._whole_items(server, request_id, request, start, start + count)
        for request_id, index in now.refused:
            self._no_part(state, facts, now, request_id, index)
        self._progress(server, state, now, facts)
        self._ways(state, now, facts)
        self._counted(server, state, now, facts)

    def _consumed_early(self, server: str, state: Server, request_id: str, index: int) -> None:
        """An item was released by a scheduling pass: only what was computed before may be."""
        request = state.requests[request_id]
        feature = request.features[index]
        if feature.end > request.computed and not request.over:
            requirement = "EPD-LIFE-020" if state.spec.asynchronous or state.spec.drafts else "EPD-LIFE-018"
            expected = f"{request_id} holds {feature.key[:80]!r} until the step that reads it is over"
            observed = f"released when {request.computed} tokens are computed, and the item ends at {feature.end}"
            self._found(requirement, "released before its step", expected, observed, server)

    def _told_right(self, server: str, state: Server, now: Pass) -> None:
        def keys(pairs: Sequence[tuple[str, int]]) -> Counter[tuple[str, str]]:
            return Counter((name, state.requests[name].features[index].key) for name, index in pairs)

        took, told = keys(now.took), keys(now.told)
        for pair in took | told:
            if took[pair] != 1 or told[pair] != 1:
                expected = (
                    f"update_state_after_alloc is called once for {pair[1][:80]!r} of {pair[0]}, which gets room once"
                )
                observed = f"called {told[pair]} times, room taken {took[pair]} times"
                self._found("EPD-XFER-018", "allocation told wrongly", expected, observed, server)
        state.ways |= {"load"} if now.loads else set()
        state.ways |= {"encode"} if now.encodes else set()
        if {"load", "encode"} <= state.ways:
            self._exercised["EPD-XFER-018"] += 1

    def _asked_once(self, server: str, state: Server, now: Pass, facts: Mapping[str, Any]) -> None:
        if now.built != 1:
            expected = "build_connector_meta is called once in a scheduling pass, whatever the pass schedules"
            observed = f"called {now.built} times in a pass of {sum(facts['tokens'].values())} tokens"
            self._found("EPD-XFER-019", "metadata asked wrongly", expected, observed, server)
        state.ways.add("step" if facts["tokens"] else "empty step")
        if {"step", "empty step"} <= state.ways:
            self._exercised["EPD-XFER-019"] += 1

    def _preemptions(self, state: Server, now: Pass, facts: Mapping[str, Any]) -> None:
        for request_id in facts["preempted"]:
            request = state.requests[request_id]
            request.start, request.scheduled, request.computed = None, 0, 0
            request.since, request.excused = facts["number"], False
        for request_id, index in now.took:
            key = state.requests[request_id].features[index].key
            encoded = index in facts["encodes"].get(request_id, ())
            if request_id in facts["preempted"]:
                state.preempted_with[key] = request_id
            if not encoded and not now.answers.get((request_id, key)):
                state.ghosts.add(key)

    def _restarted(self, state: Server, request_id: str, start: int) -> None:
        """A request begins, or begins anew, behind what the prefix cache has of it."""
        request = state.requests[request_id]
        covered = {feature.key for feature in request.features if self._covered(request, feature.key, start)}
        if start and covered - set(state.cache):
            # Otherwise the encoder cache may have been what kept them from being looked up.
            self._exercised["EPD-XFER-020"] += 1

    def _rows_at_hand(self, server: str, state: Server, now: Pass, facts: Mapping[str, Any], request_id: str) -> None:
        request = state.requests[request_id]
        start, end = facts["computed"][request_id], request.scheduled
        encoded = {request.features[index].key for index in facts["encodes"].get(request_id, ())}
        for feature in request.features:
            if not feature.takes(start, end):
                continue
            key = feature.key
            if key in state.cache and key not in state.ghosts:
                if state.preempted_with.get(key, request_id) != request_id:
                    self._exercised["EPD-RACE-012"] += 1
                if feature.stripped and key not in encoded:
                    self._exercised["EPD-XFER-021"] += 1
                continue
            state.lost.add(key)
            if key in state.ghosts:
                requirement, kind = "EPD-RACE-012", "neither encoded nor loaded"
                expected = (
                    f"{key[:80]!r} is encoded or loaded for {request_id}: the request that took room was preempted"
                )
            elif feature.offset < start:
                requirement, kind = "EPD-LIFE-016", "a part of an item without its rows"
                expected = f"no token of {request_id} is scheduled: there is no room for {key[:80]!r}"
            else:
                requirement, kind = "EPD-LIFE-018", "scheduled without its rows"
                expected = f"{key[:80]!r} is in the encoder cache for {request_id}"
            self._found(requirement, kind, expected, f"tokens {start} to {end} are scheduled without it", server)
        for key in encoded:
            feature = next(feature for feature in request.features if feature.key == key)
            if feature.stripped:
                # There is nothing to encode it from: whoever missed it has been judged by that.
                state.lost.add(key)
            asked = now.answers.get((request_id, key))
            if asked is not False:
                requirement = "EPD-XFER-021" if feature.stripped else "EPD-XFER-016"
                observed = (
                    "encoded, and has_cache_item said yes" if asked else "encoded, and nobody asked the connector"
                )
                expected = f"{key[:80]!r} is encoded only where the connector does not have it"
                self._found(requirement, "encoded without need", expected, observed, server)

    def _whole_items(self, server: str, request_id: str, request: Request, start: int, end: int) -> None:
        for feature in request.features:
            if start < feature.end and feature.offset < end and (feature.offset < start or end < feature.end):
                expected = (
                    f"a step takes all of {feature.key[:80]!r} of {request_id} or nothing (disable_chunked_mm_input)"
                )
                observed = f"tokens {start} to {end}, and the item has {feature.offset} to {feature.end}"
                self._found("EPD-LIFE-017", "a part of an item", expected, observed, server)
            elif feature.offset == end:
                self._exercised["EPD-LIFE-017"] += 1

    def _no_part(self, state: Server, facts: Mapping[str, Any], now: Pass, request_id: str, index: int) -> None:
        """There was no room for an item that the prefix cache ends in."""
        feature = state.requests[request_id].features[index]
        computed = now.asked.get(request_id, 0)
        waits = state.requests[request_id].start is None and request_id not in facts["tokens"]
        if waits and feature.offset < computed < feature.end:
            self._exercised["EPD-LIFE-016"] += 1

    def _progress(self, server: str, state: Server, now: Pass, facts: Mapping[str, Any]) -> None:
        if state.spec.blocks or facts["kv"]:
            state.ways.add("no block")
        waits = [name for name in now.asked if not state.requests[name].over]
        free = facts["limit"] > 0 and not facts["kv"] and all(state.requests[name].asked for name in waits)
        state.still = state.still + 1 if waits and free and not facts["tokens"] else 0
        if state.still == STANDSTILL:
            self._stands(server, state, waits[0])

    def _ways(self, state: Server, now: Pass, facts: Mapping[str, Any]) -> None:
        for request_id in facts["tokens"]:
            request = state.requests[request_id]
            took = {request.features[index].key for name, index in now.took if name == request_id}
            start = facts["computed"][request_id]
            if any(f.takes(start, request.scheduled) and f.key not in took for f in request.features):
                state.ways.add("local")
        if {"local", "load", "encode"} <= state.ways:
            self._exercised["EPD-XFER-016"] += 1

    def _counted(self, server: str, state: Server, now: Pass, facts: Mapping[str, Any]) -> None:
        room = state.spec.cache - state.rows()
        sparse = any(feature.sparse for feature in state.cache.values())
        if facts["room"] != room:
            requirement, kind = (
                ("EPD-XFER-022", "tokens for rows") if sparse else ("EPD-XFER-017", "room counted wrongly")
            )
            expected = f"{room} rows of the encoder cache are free: {state.rows()} of {state.spec.cache} are taken"
            self._found(requirement, kind, expected, f"{facts['room']} are", server)
        elif sparse:
            self._exercised["EPD-XFER-022"] += 1
        elif now.loads:
            self._exercised["EPD-XFER-017"] += 1

    # ---- its results are in ----

    def _settled(
        self,
        server: str,
        state: Server,
        number: int,
        ends: Mapping[str, int],
        held: Mapping[str, Sequence[str]],
        used: int,
    ) -> None:
        state.used = used
        state.consumed.clear()
        if state.made_to_name:
            # What the connector names is taken in with every step's results.
            self._exercised["EPD-ERR-011"] += 1
            state.made_to_name.clear()
        for request_id, end in ends.items():
            request = state.requests[request_id]
            if number > request.since:
                request.computed = max(request.computed, min(end, request.prompt))
        for request_id, request in state.requests.items():
            if request.over or request.start is None or request.excused:
                continue
            self._released(server, state, request_id, request, held, late=request_id in ends)

    def _released(
        self,
        server: str,
        state: Server,
        request_id: str,
        request: Request,
        held: Mapping[str, Sequence[str]],
        late: bool,
    ) -> None:
        reads = {feature.key for feature in request.reads()}
        touched = list(request.touched())
        for feature in touched:
            key = feature.key
            if key not in state.cache or key in state.ghosts:
                continue
            holds = request_id in held.get(key, ())
            if key in reads and not holds and not state.spec.asynchronous:
                again = sum(other.key == key for other in touched) > 1
                requirement = "EPD-LIFE-020" if state.spec.drafts else "EPD-LIFE-019" if again else "EPD-LIFE-018"
                expected = f"{request_id} holds {key[:80]!r} until the last of its tokens is computed"
                observed = f"released when {request.computed} tokens are, and the item ends at {feature.end}"
                self._found(requirement, "released early", expected, observed, server)
            last = max(other.end for other in request.features if other.key == key)
            if late and last + state.spec.lookahead <= request.computed:
                if holds:
                    request.due[key] += 1
                    if request.due[key] == (_GRACE_AHEAD if state.spec.asynchronous else _GRACE):
                        expected = f"{request_id} releases {key[:80]!r}: the last of its tokens is computed"
                        observed = f"held at {request.computed} tokens"
                        self._found("EPD-LIFE-018", "released late", expected, observed, server)
                else:
                    self._exercised["EPD-LIFE-018"] += 1
                    if state.spec.asynchronous or state.spec.drafts:
                        self._exercised["EPD-LIFE-020"] += 1
                    if sum(other.key == key for other in touched) > 1:
                        self._exercised["EPD-LIFE-019"] += 1

    # ---- between passes ----

    def _consumed(self, server: str, state: Server, request_id: str, index: int) -> None:
        state.consumed.append((request_id, index))

    def _queued(
        self, server: str, state: Server, request_id: str, prompt: int, features: Sequence[Sequence[Any]]
    ) -> None:
        state.requests[request_id] = Request(prompt, [Feature(*feature) for feature in features])

    def _unasked(self, server: str, state: Server, keys: Sequence[str]) -> None:
        """Entries left the cache between two passes, when nobody asks for room."""
        for key in keys:
            if key in state.cache:
                self._dropped_early(server, key, "nobody needed room")
                self._dropped(server, state, key, 0)

    def _cleared(self, server: str, state: Server, keys: Sequence[str] | None) -> None:
        """The harness took entries out of the cache; None: all of them, whoever holds them."""
        if keys is None:
            for request in state.requests.values():
                request.excused = True
        for key in list(state.cache) if keys is None else keys:
            state.cache.pop(key, None)
            state.ghosts.discard(key)

    def _made_to_name(self, server: str, state: Server, request_id: str) -> None:
        request = state.requests.get(request_id)
        if request is not None and not request.over:
            if request.start is not None or request.asked:
                state.given_up.add(request_id)
        else:
            state.made_to_name.add(request_id)

    def _named(self, server: str, state: Server, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if request_id in state.requests and not state.requests[request_id].over:
                state.given_up.add(request_id)

    def _finished(self, server: str, state: Server, request_id: str, status: str, problem: Any) -> None:
        request = state.requests.get(request_id)
        if request is None:
            return
        state.kept = state.kept or (problem is not None and problem[0] == "EPD-LIFE-003")
        if request_id in state.made_to_name:
            expected = f"{request_id} has ended, and nothing is done when the connector names it"
            self._found("EPD-ERR-011", "an ended request ended again", expected, f"request_finished, {status}", server)
        if request.over:
            return
        request.over = status
        whole = status in ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")
        first = request.features[:-1]
        for one, other in zip(first, request.features[1:], strict=True):
            apart = one.key != other.key and one.end == other.offset
            if whole and apart and one.rows + other.rows > state.spec.cache:
                self._exercised["EPD-LIFE-014"] += 1
        crowd = [other for other in state.requests.values() if len(other.features) > 1 and other.over]
        narrow = state.spec.cache <= sum(feature.rows for feature in request.features) and "no block" in state.ways
        if whole and narrow and len(crowd) >= CROWD and all(other.over for other in state.requests.values()):
            self._exercised["EPD-LIFE-015"] += 1

    def _idle(self, server: str, state: Server, seconds: float, pending: bool) -> None:
        if state.given_up and state.spec.kv_connector and not state.kept:
            self._exercised["EPD-KV-010"] += 1
            if state.used:
                expected = "an idle server holds no block of the KV cache, whoever was given up"
                self._found("EPD-KV-010", "blocks stay", expected, f"{state.used} blocks are held", server)

    def _broke(self, server: str, state: Server, where: str, error: str) -> None:
        live = [request for request in state.requests.values() if not request.over]
        if state.made_to_name and where != "schedule":
            requirement, expected = "EPD-ERR-011", "what the connector names and nobody knows is ignored"
        elif any(feature.stripped for request in live for feature in request.features):
            requirement, expected = "EPD-XFER-021", "an item without payload is scheduled as one with payload is"
        else:
            requirement, expected = "EPD-LIFE-014", "vLLM's Scheduler goes on"
        self._found(requirement, f"{where} raised", expected, error, server)

    def _gone(self, server: str, state: Server, keeps: bool) -> None:
        self._servers[server] = Server(state.spec)


_HANDLERS: Mapping[str, Any] = {
    "queued": ScheduleJudge._queued,
    "asked": ScheduleJudge._asked,
    "lookup": ScheduleJudge._lookup,
    "room": ScheduleJudge._room,
    "took": ScheduleJudge._took,
    "told": ScheduleJudge._told,
    "consumed": ScheduleJudge._consumed,
    "built": ScheduleJudge._built,
    "unasked": ScheduleJudge._unasked,
    "pass": ScheduleJudge._pass,
    "settled": ScheduleJudge._settled,
    "cleared": ScheduleJudge._cleared,
    "made-to-name": ScheduleJudge._made_to_name,
    "named": ScheduleJudge._named,
    "finished": ScheduleJudge._finished,
    "idle": ScheduleJudge._idle,
    "broke": ScheduleJudge._broke,
    "gone": ScheduleJudge._gone,
}

#: Events that only the scheduler layer records.
RECORDED = frozenset(
    {
        "queued",
        "asked",
        "room",
        "unasked",
        "took",
        "told",
        "consumed",
        "pass",
        "settled",
        "cleared",
        "made-to-name",
        "broke",
    }
)
