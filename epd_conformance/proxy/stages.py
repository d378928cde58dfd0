"""The stages of a disaggregated request: what each is sent (pure functions), and sending it (`Stages`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from epd_conformance.connectors import barriers
from epd_conformance.proxy.media import (
    MediaItem,
    extract_items,
    item_metadata,
    merged_params,
    primer_body,
    with_metadata,
    with_uuids,
)
from epd_conformance.proxy.upstreams import CHAT_PATH, Answer, Leg, Stage, StageError, Upstreams, parsed
from epd_conformance.proxy.wire import Wire

# How many primers of one request are in flight at once. Enough to fill a batch on every encode server of a
# usual stack; few enough that one request with a thousand images neither opens a thousand sockets nor pushes
# all others back.
PRIMERS_IN_FLIGHT = 32

# Retries of the whole proxy: one for ten legs that were sent, and ten in reserve. A server that fails everything then costs a
# tenth more work, not twice as much.
RETRIES_A_LEG = 0.1
RETRIES_IN_RESERVE = 10.0

# Answers after which a leg may be sent again: the server, or what stands before it, says that the fault is its own.
RETRIED_STATUSES = frozenset({500, 502, 503, 504})

# Tells each server how many seconds are left, where a client or the configuration has set a deadline.
DEADLINE_HEADER = "x-epd-deadline-s"

# What only shapes the answer and costs the prefill server work for nothing; none of it can change the prompt.
PREFILL_DROPS = frozenset(
    {
        "echo",
        "logprob_token_ids",
        "logprobs",
        "prompt_logprobs",
        "stream_options",
        "top_logprobs",
        "use_beam_search",
    }
)


@dataclass
class Call:
    """One client request on its way through the stages.

    `headers` are the client's headers that every leg carries; `legs` grows by one entry a leg, in the order of sending;
    `items` are the media of `body`. `wire` is the request as it came, `deadline` a time of `time.monotonic`.

    Stages that change the request put another `body` here. The objects in the first one stand for the client's bytes and
    must stay as they are: a change inside them would not be sent.
    """

    request_id: str
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)
    legs: list[Leg] = field(default_factory=list)
    items: list[MediaItem] = field(default_factory=list)
    path: str = CHAT_PATH
    wire: Wire | None = None
    deadline: float | None = None
    # What encode servers reported, by the index of a primer's first item: its items, and their `ec_transfer_params`.
    reported: dict[int, tuple[Sequence[MediaItem], dict[str, Any]]] = field(default_factory=dict)
    # Servers that were chosen ahead of their turn, because an earlier stage had to know them.
    chosen: dict[Stage, str] = field(default_factory=dict)

    def leg(self, leg: Leg) -> Leg:
        """Books the leg and returns it."""
        self.legs.append(leg)
        return leg

    def dumps(self, body: dict[str, Any]) -> bytes:
        """A leg's body as JSON, with the client's own bytes wherever it holds the client's own objects."""
        return (self.wire or Wire(b"{}")).dumps(body)


def prefill_body(body: dict[str, Any]) -> dict[str, Any]:
    """What a prefill server is asked: the client's request, cut to the one token that ends a prefill.

    Overrides `stream`, `max_tokens`, `max_completion_tokens` (if present), `n` (if present) and
    `kv_transfer_params` (the request of vLLM's KV connectors to keep the blocks for another server), removes
    PREFILL_DROPS (`stream_options`, which vLLM refuses without a stream, and what only adds to an answer that nobody
    reads), and caps `min_tokens`, which vLLM refuses above `max_tokens`. All else stays: what shapes the prompt must be
    equal on both legs, and tools, `tool_choice` and `response_format` may.
    """
    cut = {key: value for key, value in body.items() if key not in PREFILL_DROPS}
    cut["stream"] = False
    cut["max_tokens"] = 1
    for key in ("max_completion_tokens", "n"):
        if key in cut:
            cut[key] = 1
    if isinstance(cut.get("min_tokens"), int) and cut["min_tokens"] > 1:
        cut["min_tokens"] = 1
    cut["kv_transfer_params"] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    return cut


def decode_body(body: dict[str, Any], prefill_response: dict[str, Any] | None) -> dict[str, Any]:
    """What a decode server is asked: the client's request, media included, plus what prefill handed over.

    `prefill_response` is the prefill server's whole answer, or None where there was no separate prefill.
    Media are not replaced by references: a server that finds its copy gone can then still encode them itself.
    """
    params = None if prefill_response is None else prefill_response.get("kv_transfer_params")
    return body if params is None else {**body, "kv_transfer_params": params}


def one_prompt(body: dict[str, Any]) -> bool:
    """Whether a completion request has a single prompt: text, or token ids.

    A prefill answer holds one `kv_transfer_params`, so the KV of several prompts cannot be handed over.
    """
    prompt = body.get("prompt")
    if not isinstance(prompt, list):
        return not isinstance(body.get("prompt_embeds"), list)
    return len(prompt) == 1 or all(isinstance(token, int) for token in prompt)


def with_parameters(body: dict[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The body with a leg's own parameters; an object under the same name is completed, all else replaced."""
    if not parameters:
        return body
    joined = dict(body)
    for key, value in parameters.items():
        before = joined.get(key)
        joined[key] = {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value
    return joined


class RetryBudget:
    """How many retries the proxy may still make, over all requests."""

    def __init__(self) -> None:
        self._left = RETRIES_IN_RESERVE

    def earn(self) -> None:
        """A leg is sent for the first time."""
        self._left = min(RETRIES_IN_RESERVE, self._left + RETRIES_A_LEG)

    def spend(self) -> bool:
        """Takes one retry; False where none is left."""
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Stages:
    """Runs the stages of a call, one method each. Subclass it to plant a defect or to serve a connector.

    Every method raises StageError where its upstream fails. The id of each leg is the request's id with a
    suffix, so that it can be found in a server's log (vLLM names the request `chatcmpl-<id>`): `-e<item>`,
    `-p`, `-d`.
    """

    def __init__(self, upstreams: Upstreams) -> None:
        self.upstreams = upstreams
        self.config = upstreams.config
        self.budget = RetryBudget()
        self.gate = barriers.own_gate("proxy")

    # --- what a subclass may want to say ---------------------------------------------------------------------------

    def parameters(self, stage: Stage, call: Call, items: Sequence[MediaItem], upstream: str) -> Mapping[str, Any]:
        """Fields that a connector needs in one leg, such as transfer ids and the address to push to; none by default.

        `items` are those of the leg: of the primer, or of the whole request. `upstream` is the server that gets the leg;
        `self.consumer(call)` the one that will load what an encode server makes. Objects such as `ec_transfer_params` are
        joined with what stands in the request already.
        """
        return {}

    def consumer(self, call: Call) -> str:
        """The server after the encode stage that this call will use."""
        return self.choose(call, "prefill" if self.upstreams.urls["prefill"] else "decode")

    # --- choosing and sending ----------------------------------------------------------------------------------------

    def choose(self, call: Call, role: Stage) -> str:
        """The server of this role for the call: the one whose turn it is when it is asked for first."""
        if role not in call.chosen:
            call.chosen[role] = self.upstreams.next_url(role)
        return call.chosen[role]

    async def send(self, call: Call, leg: Leg, body: dict[str, Any], others: Sequence[str] = ()) -> Answer:
        """Sends a leg; with `retries`, sends it again where no answer began.

        `others` are the servers to try next, in this order; without them it is the turn of the next one. Never after the
        head of an answer with 200: from then on bytes may have reached the client.
        """
        self.budget.earn()
        last = self.config.retries
        for attempt in range(last + 1):
            headers = call.headers
            if call.deadline is not None:
                headers = {**headers, DEADLINE_HEADER: f"{max(0.0, call.deadline - time.monotonic()):.3f}"}
            try:
                return await self.upstreams.post(call.leg(leg), call.dumps(body), headers, call.path)
            except StageError as error:
                again = error.kind in ("unreachable", "hung-up") or error.upstream_status in RETRIED_STATUSES
                if not again or attempt == last or not self.budget.spend():
                    raise
                self.upstreams.metrics.retries.labels(leg.stage).inc()
                url = others[attempt % len(others)] if others else self.upstreams.next_url(leg.stage)
                leg = Leg(leg.stage, url, leg.request_id, leg.item)
        raise AssertionError("unreachable: the last attempt returns or raises")

    # --- encode ---------------------------------------------------------------------------------------------------------

    def deal(self, items: Sequence[MediaItem]) -> list[tuple[str, list[MediaItem]]]:
        """Which server primes which items; one primer for each entry.

        Turns are dealt in item order, or, with `affinity`, by content. Items of one kind for one server share a primer up to
        `group_items`: vLLM counts the items of a primer in the order of their places, which is only the order of the parts
        where all are of a kind.
        """
        primers: list[tuple[str, list[MediaItem]]] = []
        open_ones: dict[tuple[str, str], list[MediaItem]] = {}
        for item in items:
            url = (
                self.upstreams.ranked("encode", item.key)[0]
                if self.config.affinity
                else self.upstreams.next_url("encode")
            )
            group = open_ones.get((url, item.modality))
            if group is None or len(group) >= self.config.group_items:
                group = open_ones[url, item.modality] = []
                primers.append((url, group))
            group.append(item)
        return primers

    async def encode(self, call: Call, items: list[MediaItem]) -> None:
        """Primes the encode servers, in parallel, with one item each unless they are grouped.

        All must succeed: the first failure cancels the others and is raised. Equal items are sent each on its
        own: to recognise them is the connector's duty, and is tested.
        """
        if self.config.metadata_only:
            call.body = with_uuids(call.body, items)
            call.items = items = extract_items(call.body)
        primers = self.deal(items)
        if len(primers) == 1:
            # A task group costs as much as everything else here, and most requests have one item.
            await self._prime(call, *primers[0])
            return
        room = asyncio.Semaphore(PRIMERS_IN_FLIGHT)

        async def prime(url: str, group: list[MediaItem]) -> None:
            async with room:
                await self._prime(call, url, group)

        try:
            async with asyncio.TaskGroup() as tasks:
                for url, group in primers:
                    tasks.create_task(prime(url, group))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _prime(self, call: Call, url: str, group: list[MediaItem]) -> None:
        if len(group) == 1:
            await self.encode_item(call, group[0], url)
        else:
            await self.encode_group(call, group, url)

    async def encode_item(self, call: Call, item: MediaItem, url: str) -> None:
        """Primes the encode server at `url` with one item and waits until it is done."""
        await self.encode_group(call, [item], url)

    async def encode_group(self, call: Call, items: Sequence[MediaItem], url: str) -> None:
        """Primes the encode server at `url` with items; keeps what it says about them."""
        first = items[0].index
        leg = Leg("encode", url, f"{call.request_id}-e{first}", first)
        body = with_parameters(primer_body(call.body, *items), self.parameters("encode", call, items, url))
        others = self.upstreams.ranked("encode", items[0].key)[1:] if self.config.affinity else ()
        answer = await self.send(call, leg, body, others)
        try:
            raw = await answer.read()
        finally:
            answer.close()
        # Looked for before it is parsed: most connectors report nothing.
        if b'"ec_transfer_params"' in raw and isinstance(said := parsed(raw), dict):
            params = said.get("ec_transfer_params")
            if isinstance(params, dict) and params:
                call.reported[first] = (items, params)

    # --- prefill and decode ---------------------------------------------------------------------------------------------

    async def prefill(self, call: Call) -> dict[str, Any]:
        """Runs the prefill leg; returns the answer, whose `kv_transfer_params` the decode leg needs."""
        leg = Leg("prefill", self.choose(call, "prefill"), f"{call.request_id}-p")
        answer = await self._consume(call, leg, prefill_body)
        try:
            return await answer.json_object()
        finally:
            answer.close()

    async def prefilled(self, call: Call) -> None:
        """Between prefill and decode: a harness that asked for it may hold one request here (connectors/barriers.py)."""
        if self.gate is not None and self.gate.armed:
            # Elsewhere, so that all other requests go on.
            await asyncio.to_thread(self.gate.reach, "prefilled", (), (call.request_id,))

    async def decode(self, call: Call, prefill_response: dict[str, Any] | None) -> Answer:
        """Starts the decode leg; returns when the server answered 200. The caller reads and closes it."""
        leg = Leg("decode", self.choose(call, "decode"), f"{call.request_id}-d")
        if self.upstreams.urls["prefill"]:
            body = decode_body(call.body, prefill_response)
            return await self.send(call, leg, with_parameters(body, self._own(leg, call)))
        return await self._consume(call, leg, lambda body: decode_body(body, prefill_response))

    def _own(self, leg: Leg, call: Call) -> Mapping[str, Any]:
        return self.parameters(leg.stage, call, call.items, leg.upstream)

    async def _consume(self, call: Call, leg: Leg, cut: Callable[[dict[str, Any]], dict[str, Any]]) -> Answer:
        """Sends the leg that loads what was encoded: with what the encode servers said, and, with `metadata_only`, with that
        instead of the media; a server that refuses those gets the media, once."""
        body = call.body
        answers = [call.reported[first] for first in sorted(call.reported)]
        if answers:
            params = merged_params(answers)
            body = with_parameters(body, {"ec_transfer_params": params})
        parameters = self._own(leg, call)
        if answers and self.config.metadata_only:
            metadata: dict[int, dict[str, Any]] = {}
            for items, params in answers:
                metadata.update(item_metadata(params, items))
            short = with_metadata(body, extract_items(body), metadata)
            if short is not body:
                try:
                    return await self._unrefused(call, leg, with_parameters(cut(short), parameters))
                except StageError as error:
                    if error.kind != "refused":
                        raise
                    self.upstreams.metrics.fallbacks.labels(leg.stage).inc()
                    leg = Leg(leg.stage, leg.upstream, leg.request_id)
        return await self.send(call, leg, with_parameters(cut(body), parameters))

    async def _unrefused(self, call: Call, leg: Leg, body: dict[str, Any]) -> Answer:
        """As `send`, for a leg that may be refused within a stream that has begun."""
        answer = await self.send(call, leg, body)
        try:
            await answer.refuse_stream_error()
        except BaseException:
            answer.close()
            raise
        return answer
