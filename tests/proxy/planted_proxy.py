"""Proxies that are ours with one defect each: what a requirement of area PROXY must find.

A variant makes an application of a configuration, as `create_app` does. `VARIANTS` says which requirements it fails, and no others.
"""

from __future__ import annotations

import asyncio
import copy
import json
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from epd_conformance.errors import UsageError
from epd_conformance.proxy import stages as stages_module
from epd_conformance.proxy import upstreams as upstreams_module
from epd_conformance.proxy.app import create_app
from epd_conformance.proxy.config import ProxyConfig
from epd_conformance.proxy.media import MediaItem, extract_items, item_metadata
from epd_conformance.proxy.stages import Call, Stages, prefill_body
from epd_conformance.proxy.upstreams import Answer, Leg, StageError, Upstreams

App = Callable[[ProxyConfig], Any]
Send = Callable[[Mapping[str, Any]], Any]


def of(stages: type[Stages]) -> App:
    return lambda config: create_app(config, stages)


class Sends(Stages):
    """A defect in what one leg is sent."""

    def changed(self, stage: str, body: dict[str, Any], call: Call) -> dict[str, Any]:
        raise NotImplementedError

    async def send(self, call: Call, leg: Leg, body: dict[str, Any], others: Sequence[str] = ()) -> Answer:
        return await super().send(call, leg, self.changed(leg.stage, copy.deepcopy(body), call), others)


def parts_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    lists = [message["content"] for message in body.get("messages") or () if isinstance(message.get("content"), list)]
    return [part for parts in lists for part in parts if isinstance(part, dict)]


def without_media(body: dict[str, Any]) -> dict[str, Any]:
    for message in body.get("messages") or ():
        if isinstance(message.get("content"), list):
            message["content"] = [part for part in message["content"] if part not in parts_of(body) or "text" in part]
    return body


# -- encode ----------------------------------------------------------------------------------------------------------------------


class PrimesText(Stages):
    """Asks an encode server also where there is nothing to encode."""

    async def decode(self, call: Call, prefill_response: dict[str, Any] | None) -> Answer:
        if not call.items:
            leg = Leg("encode", self.upstreams.next_url("encode"), f"{call.request_id}-e")
            (await self.send(call, leg, {**call.body, "stream": False})).close()
        return await super().decode(call, prefill_response)


class PrimesTwice(Stages):
    async def encode_group(self, call: Call, items: Sequence[MediaItem], url: str) -> None:
        await super().encode_group(call, items, url)
        await super().encode_group(call, items, url)


class TextInPrimer(Sends):
    def changed(self, stage: str, body: dict[str, Any], call: Call) -> dict[str, Any]:
        if stage == "encode":
            body["messages"][0]["content"] += [part for part in parts_of(call.body) if "text" in part]
        return body


class GoesOnHalfPrimed(Stages):
    async def _prime(self, call: Call, url: str, group: list[MediaItem]) -> None:
        try:
            await super()._prime(call, url, group)
        except StageError:
            if len(call.items) == 1:
                raise


class AlwaysTheFirst(Stages):
    def __init__(self, upstreams: Upstreams) -> None:
        super().__init__(upstreams)
        upstreams.next_url = lambda role: upstreams.urls[role][0]  # type: ignore[method-assign]


class AlwaysTheLast(Stages):
    def __init__(self, upstreams: Upstreams) -> None:
        super().__init__(upstreams)
        upstreams.next_url = lambda role: upstreams.urls[role][-1]  # type: ignore[method-assign]


class NeverAgain(Stages):
    """Retries are asked for, and there are none."""

    def __init__(self, upstreams: Upstreams) -> None:
        super().__init__(upstreams)
        self.config = self.config.model_copy(update={"retries": 0})


class ForgetsWhatItSaw(Sends):
    """With affinity, takes an item that an encoder had before for one that need not be sent on."""

    def __init__(self, upstreams: Upstreams) -> None:
        super().__init__(upstreams)
        self.known: set[str] = set()

    def changed(self, stage: str, body: dict[str, Any], call: Call) -> dict[str, Any]:
        keys = {item.key for item in call.items}
        if self.config.affinity and stage == "decode":
            if keys and keys <= self.known:
                return without_media(body)
            self.known |= keys
        return body


# -- what a leg holds ------------------------------------------------------------------------------------------------------------


class PrefillWithoutTools(Sends):
    def changed(self, stage: str, body: dict[str, Any], call: Call) -> dict[str, Any]:
        return {name: value for name, value in body.items() if stage != "prefill" or name != "tools"}


class PrefillDecodes(Sends):
    """Caps one name of the limit, and not the other."""

    def changed(self, stage: str, body: dict[str, Any], call: Call) -> dict[str, Any]:
        if stage == "prefill" and call.body.get("max_completion_tokens"):
            body["max_completion_tokens"] = call.body["max_completion_tokens"]
        return body


class PrefillWithoutMedia(Sends):
    def changed(self, stage: str, body: dict[str, Any], call: Call) -> dict[str, Any]:
        return without_media(body) if stage == "prefill" else body


class EncodeWithoutOptions(Sends):
    def changed(self, stage: str, body: dict[str, Any], call: Call) -> dict[str, Any]:
        return {name: value for name, value in body.items() if stage != "encode" or name != "mm_processor_kwargs"}


class DecodeWithoutLogprobs(Sends):
    def changed(self, stage: str, body: dict[str, Any], call: Call) -> dict[str, Any]:
        return {name: value for name, value in body.items() if stage != "decode" or name != "top_logprobs"}


class UuidFromUrl(Sends):
    """An identity that outlives the content."""

    def changed(self, stage: str, body: dict[str, Any], call: Call) -> dict[str, Any]:
        for part in parts_of(body):
            if "http://" in json.dumps(part):
                part.setdefault("uuid", part["image_url"]["url"])
        return body


class SwapsItems(Sends):
    """The decode server gets the first two images in the wrong order."""

    def changed(self, stage: str, body: dict[str, Any], call: Call) -> dict[str, Any]:
        media = [part for part in parts_of(body) if "data:image" in json.dumps(part)]
        if stage == "decode" and len(media) > 1:
            media[0]["image_url"], media[1]["image_url"] = media[1]["image_url"], media[0]["image_url"]
        return body


class OneIdForNobody(Stages):
    async def send(self, call: Call, leg: Leg, body: dict[str, Any], others: Sequence[str] = ()) -> Answer:
        return await super().send(call, replace(leg, request_id=uuid.uuid4().hex), body, others)


class LosesTheHandover(Stages):
    async def decode(self, call: Call, prefill_response: dict[str, Any] | None) -> Answer:
        return await super().decode(call, None)


class SharesTheHandover(Stages):
    """The hand-over of whichever request prefill has answered last."""

    last: dict[str, Any] | None = None

    async def prefill(self, call: Call) -> dict[str, Any]:
        first = self.last is None
        self.last, before = await super().prefill(call), self.last
        return self.last if first or before is None else before


class LosesReports(Stages):
    async def encode(self, call: Call, items: list[MediaItem]) -> None:
        await super().encode(call, items)
        if not self.config.metadata_only:
            call.reported.clear()


class SharesTheBody(Stages):
    """Sends decode the request that came last, where three with two items are under way."""

    def __init__(self, upstreams: Upstreams) -> None:
        super().__init__(upstreams)
        self.pairs: list[Call] = []

    async def prefill(self, call: Call) -> dict[str, Any]:
        if len(call.items) == 2:
            self.pairs.append(call)
        return await super().prefill(call)

    async def decode(self, call: Call, prefill_response: dict[str, Any] | None) -> Answer:
        # Three: other cases send two such requests at once, and fail or not by which of them is first.
        shared = call in self.pairs and len(self.pairs) > 2
        try:
            return await super().decode(replace(call, body=self.pairs[-1].body) if shared else call, prefill_response)
        finally:
            self.pairs = [one for one in self.pairs if one is not call]


# -- references ------------------------------------------------------------------------------------------------------------------


class WayBackWithoutMedia(Stages):
    """Where references are refused, asks without the media."""

    async def _unrefused(self, call: Call, leg: Leg, body: dict[str, Any]) -> Answer:
        try:
            return await super()._unrefused(call, leg, body)
        except StageError:
            cut = without_media(copy.deepcopy(call.body))
            return await self.send(call, leg, prefill_body(cut) if leg.stage == "prefill" else cut)


class Mixes(Stages):
    """Replaces the items that have a reference, and leaves the others."""

    async def _consume(self, call: Call, leg: Leg, cut: Callable[[dict[str, Any]], dict[str, Any]]) -> Answer:
        if not self.config.metadata_only:
            return await super()._consume(call, leg, cut)
        body = copy.deepcopy(call.body)
        found: dict[int, dict[str, Any]] = {}
        for items, params in call.reported.values():
            found.update(item_metadata(params, items))
        for item in extract_items(body):
            if item.index in found:
                part = body["messages"][item.message]["content"][item.part]
                part.clear()
                part.update({"type": "image_embeds", "image_embeds": found[item.index]})
        try:
            return await self.send(call, leg, cut(body))
        except StageError:
            if len(found) < len(call.items):
                raise
            return await self.send(call, leg, cut(call.body))


# -- failures --------------------------------------------------------------------------------------------------------------------


class TriesAgain(Stages):
    """Asks decode again where its stream breaks."""

    async def decode(self, call: Call, prefill_response: dict[str, Any] | None) -> Answer:
        answer = await super().decode(call, prefill_response)
        plain = answer.chunks

        async def chunks() -> AsyncIterator[bytes]:
            try:
                async for chunk in plain():
                    yield chunk
            except StageError:
                again = await super(TriesAgain, self).decode(call, prefill_response)
                try:
                    async for chunk in again.chunks():
                        yield chunk
                finally:
                    again.close()

        answer.chunks = chunks  # type: ignore[method-assign]
        return answer


def rewriting(rewrite: Callable[[int, str, bytes], tuple[int, bytes]]) -> App:
    """What goes to the client goes through `rewrite(status, path, body)`; of a stream, piece by piece."""

    def make(config: ProxyConfig) -> Any:
        app = create_app(config)

        async def wrapped(scope: Any, receive: Any, send: Send) -> None:
            start: dict[str, Any] = {}
            streams = False

            async def changed(message: Mapping[str, Any]) -> None:
                nonlocal start, streams
                if message["type"] == "http.response.start":
                    start = dict(message)
                    streams = any(b"event-stream" in value for _, value in message["headers"])
                    if streams:
                        await send(message)
                    return
                status, body = rewrite(start["status"], scope["path"], message.get("body", b""))
                if not streams:
                    headers = [(name, value) for name, value in start["headers"] if name != b"content-length"]
                    if not start.get("sent"):
                        await send({**start, "status": status, "headers": headers})
                        start["sent"] = True
                await send({**message, "body": body})

            await app(scope, receive, send if scope["type"] != "http" else changed)

        return wrapped

    return make


def hides_the_stage(status: int, path: str, body: bytes) -> tuple[int, bytes]:
    if status < 400 or b"epd_stage_error" not in body:
        return status, body
    error = json.loads(body)["error"]
    kept = {name: error[name] for name in ("upstream_status", "upstream_body", "request_id")}
    return status, json.dumps({"error": kept}).encode()


def turns_into_500(status: int, path: str, body: bytes) -> tuple[int, bytes]:
    return (500 if 400 <= status < 500 and b'"upstream_status": 4' in body else status), body


def breaks_in_silence(status: int, path: str, body: bytes) -> tuple[int, bytes]:
    return status, b"" if status == 200 and b'data: {"error"' in body else body


def healthy_always(status: int, path: str, body: bytes) -> tuple[int, bytes]:
    return (200 if path == "/health" else status), body


def not_found(status: int, path: str, body: bytes) -> tuple[int, bytes]:
    return status, b'{"error": {"message": "not found"}}' if status == 404 else body


def no_tokenize(status: int, path: str, body: bytes) -> tuple[int, bytes]:
    return (404, b"") if path == "/tokenize" else (status, body)


def begins_at_once(config: ProxyConfig) -> Any:
    """Sends the head of a stream before anybody has accepted the request."""
    app = create_app(config)

    async def wrapped(scope: Any, receive: Any, send: Send) -> None:
        begun = False

        async def first() -> Any:
            nonlocal begun
            message = await receive()
            if not begun and message["type"] == "http.request" and b'"stream": true' in message.get("body", b""):
                begun = True
                headers = [(b"content-type", b"text/event-stream")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            return message

        async def rest(message: Mapping[str, Any]) -> None:
            if not (begun and message["type"] == "http.response.start"):
                await send(message)

        await app(scope, first if scope["type"] == "http" else receive, rest if scope["type"] == "http" else send)

    return wrapped


def deaf(config: ProxyConfig) -> Any:
    """Does not notice that a client has left."""
    app = create_app(config)

    async def wrapped(scope: Any, receive: Any, send: Send) -> None:
        async def stays() -> Any:
            message = await receive()
            while message["type"] == "http.disconnect":
                await asyncio.sleep(60)
            return message

        await app(scope, stays if scope["type"] == "http" else receive, send)

    return wrapped


def faults_on_odd_bodies(config: ProxyConfig) -> Any:
    """Takes every body for a JSON object."""
    app = create_app(config)

    async def wrapped(scope: Any, receive: Any, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/chat"):
            await app(scope, receive, send)
            return
        messages = [await receive()]
        while messages[-1].get("more_body"):
            messages.append(await receive())
        try:
            json.loads(b"".join(message.get("body", b"") for message in messages))["messages"]
        except (ValueError, RecursionError, KeyError, TypeError):
            await send({"type": "http.response.start", "status": 500, "headers": []})
            await send({"type": "http.response.body", "body": b"Internal Server Error"})
            return

        async def again() -> Any:
            return messages.pop(0) if messages else await receive()

        await app(scope, again, send)

    return wrapped


def refuses_everything(config: ProxyConfig) -> Any:
    """Asks no server, and answers 400 to whatever comes."""

    async def app(scope: Any, receive: Any, send: Send) -> None:
        if scope["type"] == "lifespan":
            for moment in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{moment}.complete"})
            return
        while (await receive()).get("more_body"):
            pass
        own = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"none")
        headers = [(b"content-type", b"application/json"), (b"x-request-id", own)]
        await send({"type": "http.response.start", "status": 400, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"error": {"message": "no"}}'})

    return app


def says_nothing_of_bypasses(config: ProxyConfig) -> Any:
    app = create_app(config)

    async def wrapped(scope: Any, receive: Any, send: Send) -> None:
        async def changed(message: Mapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [pair for pair in message["headers"] if pair[0] != b"x-epd-bypassed"]}
            await send(message)

        await app(scope, receive, changed if scope["type"] == "http" else send)

    return wrapped


def configured(**changed: Any) -> App:
    """Ours, whatever it was told in these fields."""
    return lambda config: create_app(config.model_copy(update=changed))


def patched(module: Any, name: str, value: Any) -> App:
    """Ours, with another constant while it runs."""

    def make(config: ProxyConfig) -> Any:
        # Undone when the test is over: see the fixture that uses it.
        if not hasattr(module, name):
            raise UsageError(f"{module.__name__} has no {name}: correct the variant")
        _patches.setattr(module, name, value)
        return create_app(config)

    return make


_patches = pytest.MonkeyPatch()


def undo() -> None:
    """Put patched constants back."""
    _patches.undo()


@dataclass(frozen=True)
class Variant:
    """A defect, and the numbers of the requirements that fail by it."""

    app: App
    fails: frozenset[str]


def variant(app: App, *fails: str) -> Variant:
    return Variant(app, frozenset(fails))


VARIANTS: dict[str, Variant] = {
    "primes text": variant(of(PrimesText), "001"),
    "primes twice": variant(of(PrimesTwice), "002", "007"),
    "hides the stage": variant(rewriting(hides_the_stage), "003", "027"),
    "turns 4xx into 500": variant(rewriting(turns_into_500), "004", "009", "028"),
    "begins at once": variant(begins_at_once, "003", "004", "005", "009", "027"),
    "breaks in silence": variant(rewriting(breaks_in_silence), "006"),
    "keeps idle connections": variant(patched(upstreams_module, "KEEP_ALIVE_S", 60.0), "007"),
    "text in primers": variant(of(TextInPrimer), "008"),
    "goes on half primed": variant(of(GoesOnHalfPrimed), "009"),
    "prefill without tools": variant(of(PrefillWithoutTools), "010"),
    "prefill decodes": variant(of(PrefillDecodes), "011"),
    "says nothing of bypasses": variant(says_nothing_of_bypasses, "012"),
    "encode without options": variant(of(EncodeWithoutOptions), "013"),
    "decode without logprobs": variant(of(DecodeWithoutLogprobs), "014"),
    "prefill without media": variant(of(PrefillWithoutMedia), "010", "013", "015"),
    "uuid from the URL": variant(of(UuidFromUrl), "016"),
    "way back without media": variant(of(WayBackWithoutMedia), "017"),
    "mixes media and references": variant(of(Mixes), "018"),
    "tries again": variant(of(TriesAgain), "019"),
    "waits for ever": variant(configured(timeout_s=1000.0), "020"),
    "deaf for leaving clients": variant(deaf, "021"),
    "never again": variant(of(NeverAgain), "022"),
    "healthy always": variant(rewriting(healthy_always), "023"),
    "one id for nobody": variant(of(OneIdForNobody), "024"),
    "one primer at a time": variant(patched(stages_module, "PRIMERS_IN_FLIGHT", 1), "025"),
    "forgets what it saw": variant(of(ForgetsWhatItSaw), "026"),
    "404 is not found": variant(rewriting(not_found), "004", "027"),
    "faults on odd bodies": variant(faults_on_odd_bodies, "028"),
    "no tokenize": variant(rewriting(no_tokenize), "029"),
    "always the first": variant(of(AlwaysTheFirst), "022", "030"),
    "loses the hand-over": variant(of(LosesTheHandover), "031"),
    "shares the hand-over": variant(of(SharesTheHandover), "031"),
    "loses reports": variant(of(LosesReports), "032"),
    "swaps items": variant(of(SwapsItems), "013", "033", "034"),
    "shares the body": variant(of(SharesTheBody), "034"),
    "any address": variant(configured(media_private=True, media_hosts=[], media_root="/"), "035"),
}

# What these do not do at all must not be shown: the requirements that stay open by it.
UNSHOWN: dict[str, tuple[App, frozenset[str]]] = {
    "always the last": (of(AlwaysTheLast), frozenset({"022"})),
    "media always": (configured(metadata_only=False), frozenset({"017", "018"})),
}
