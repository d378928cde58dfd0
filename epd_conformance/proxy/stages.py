"""The stages of a disaggregated request: what each is sent (pure functions), and sending it (`Stages`)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from epd_conformance.proxy.media import MediaItem, primer_body
from epd_conformance.proxy.upstreams import Answer, Leg, Upstreams

# How many primers of one request are in flight at once. Enough to fill a batch on every encode server of a
# usual stack; few enough that one request with a thousand images neither opens a thousand sockets nor pushes
# all others back.
PRIMERS_IN_FLIGHT = 32


@dataclass
class Call:
    """One client request on its way through the stages.

    `headers` are the client's headers that every leg carries; `legs` grows by one entry a leg, in the order
    of sending.
    """

    request_id: str
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)
    legs: list[Leg] = field(default_factory=list)

    def leg(self, leg: Leg) -> Leg:
        """Books the leg and returns it."""
        self.legs.append(leg)
        return leg


def prefill_body(body: dict[str, Any]) -> dict[str, Any]:
    """What a prefill server is asked: the client's request, cut to the one token that ends a prefill.

    Overrides `stream`, `max_tokens`, `max_completion_tokens` (if present), `n` (if present) and
    `kv_transfer_params` (the request of vLLM's KV connectors to keep the blocks for another server), removes
    `stream_options`, which vLLM refuses without a stream, and caps `min_tokens`, which vLLM refuses above
    `max_tokens`. All else stays: what shapes the prompt must be equal on both legs.
    """
    cut = {key: value for key, value in body.items() if key != "stream_options"}
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


class Stages:
    """Runs the stages of a call, one method each. Subclass it to plant a defect or to serve a connector.

    Every method raises StageError where its upstream fails. The id of each leg is the request's id with a
    suffix, so that it can be found in a server's log (vLLM names the request `chatcmpl-<id>`): `-e<item>`,
    `-p`, `-d`.
    """

    def __init__(self, upstreams: Upstreams) -> None:
        self.upstreams = upstreams

    async def encode(self, call: Call, items: list[MediaItem]) -> None:
        """Primes the encode servers with one item each, in parallel; turns are dealt in item order.

        All must succeed: the first failure cancels the others and is raised. Equal items are sent each on its
        own: to recognise them is the connector's duty, and is tested.
        """
        room = asyncio.Semaphore(PRIMERS_IN_FLIGHT)

        async def prime(item: MediaItem, url: str) -> None:
            async with room:
                await self.encode_item(call, item, url)

        try:
            async with asyncio.TaskGroup() as group:
                for item in items:
                    group.create_task(prime(item, self.upstreams.next_url("encode")))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def encode_item(self, call: Call, item: MediaItem, url: str) -> None:
        """Primes the encode server at `url` with one item and waits until it is done."""
        leg = call.leg(Leg("encode", url, f"{call.request_id}-e{item.index}", item.index))
        answer = await self.upstreams.post(leg, primer_body(call.body, item), call.headers)
        try:
            await answer.read()
        finally:
            answer.close()

    async def prefill(self, call: Call) -> dict[str, Any]:
        """Runs the prefill leg; returns the answer, whose `kv_transfer_params` the decode leg needs."""
        leg = call.leg(Leg("prefill", self.upstreams.next_url("prefill"), f"{call.request_id}-p"))
        answer = await self.upstreams.post(leg, prefill_body(call.body), call.headers)
        try:
            return await answer.json_object()
        finally:
            answer.close()

    async def decode(self, call: Call, prefill_response: dict[str, Any] | None) -> Answer:
        """Starts the decode leg; returns when the server answered 200. The caller reads and closes it."""
        leg = call.leg(Leg("decode", self.upstreams.next_url("decode"), f"{call.request_id}-d"))
        return await self.upstreams.post(leg, decode_body(call.body, prefill_response), call.headers)
