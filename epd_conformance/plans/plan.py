"""Plans: everything that a cell sends, as data that can be written down, digested and replayed.

A plan is drawn from a seed and the cell's name before anything runs; nothing in it depends on what a server answers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from epd_conformance.errors import UsageError
from epd_conformance.plans.media import ImageSpec
from epd_conformance.plans.steps import AS_AGGREGATED, MUST_FAIL, PRIMING, sent

SCHEMA = "epd-conformance/plan/v1"

# Long enough to separate contents (on the tiny model all of 1770 random image pairs differ over 8 tokens), short enough for a
# tenth of a second.
TOKENS = 12

# Text behind the items. The KV of whole blocks only is handed over from prefill to decode; with at least one whole block of
# text behind them, all items lie in what is handed over. Sized for tokenizers with up to eight characters a token and
# blocks of 32 tokens.
TAIL = (
    "Look at everything shown above with care. Name what you see first, then what you see next, compare the parts with each "
    "other, count what can be counted, and say in plain words which of them you would pick and why you would pick it over the rest."
)


@dataclass(frozen=True)
class Text:
    """A piece of text in a message."""

    text: str

    def part(self) -> dict[str, Any]:
        return {"type": "text", "text": self.text}

    def to_json(self) -> dict[str, Any]:
        return {"text": self.text}


@dataclass(frozen=True)
class Image:
    """An image in a message; `uuid` is the client's own name for it, normally none, and a string but where that is tested."""

    spec: ImageSpec
    uuid: Any = None

    def part(self) -> dict[str, Any]:
        item: dict[str, Any] = dict(self.spec.item())
        if self.uuid is not None:
            item["uuid"] = self.uuid
        return item

    def to_json(self) -> dict[str, Any]:
        return {"image": self.spec.to_json(), **({"uuid": self.uuid} if self.uuid is not None else {})}


Part = Text | Image


@dataclass(frozen=True)
class Message:
    """One message of a conversation. Raises UsageError for an image in another turn than a user's: those are sent as text."""

    role: str
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        if self.role != "user" and any(isinstance(part, Image) for part in self.parts):
            raise UsageError(f"a message of role {self.role!r} has an image: put it into a user's message")

    def to_json(self) -> dict[str, Any]:
        return {"role": self.role, "parts": [part.to_json() for part in self.parts]}


@dataclass(frozen=True)
class Request:
    """One request. `label` names it within its plan; `salt` is a `cache_salt`, so that no prefix cache answers for it.

    `options`: fields of the body beside, or in the place of, those that each request has; None leaves one out.
    """

    label: str
    messages: tuple[Message, ...]
    max_tokens: int = TOKENS
    stream: bool = False
    salt: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def body(self, served_name: str, salt: str | None = None) -> dict[str, Any]:
        """The JSON of `/v1/chat/completions`. Temperature 0, ids instead of text, and log-probabilities for the margin."""
        messages = [
            {
                "role": message.role,
                # Many chat templates take an assistant's turn only as a string.
                "content": "".join(part.text for part in message.parts if isinstance(part, Text))
                if message.role != "user"
                else [part.part() for part in message.parts],
            }
            for message in self.messages
        ]
        body: dict[str, Any] = {
            "model": served_name,
            "messages": messages,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "seed": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "logprobs": True,
            "top_logprobs": 2,
            "stream": self.stream,
        }
        chosen = salt if salt is not None else self.salt
        if chosen is not None:
            body["cache_salt"] = chosen
        body |= self.options
        return {name: value for name, value in body.items() if value is not None}

    @property
    def images(self) -> list[ImageSpec]:
        """The images in the order of the conversation."""
        return [part.spec for message in self.messages for part in message.parts if isinstance(part, Image)]

    @property
    def uuids(self) -> list[Any]:
        """The client's names for the images, in the order of the conversation."""
        return [part.uuid for message in self.messages for part in message.parts if isinstance(part, Image)]

    def digest(self) -> str:
        """Identity of what is asked, without label, salt and stream: two requests with one digest must get one answer."""
        content = {
            "messages": [message.to_json() for message in self.messages],
            "max_tokens": self.max_tokens,
            **self._more(),
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "messages": [message.to_json() for message in self.messages],
            "max_tokens": self.max_tokens,
            "stream": self.stream,
            "salt": self.salt,
            **self._more(),
        }

    def _more(self) -> dict[str, Any]:
        # Only where there are some: a request without them is the one that it always was.
        return {"options": dict(self.options)} if self.options else {}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Request:
        return cls(
            label=data["label"],
            messages=tuple(
                Message(message["role"], tuple(_part(part) for part in message["parts"]))
                for message in data["messages"]
            ),
            max_tokens=data["max_tokens"],
            stream=data["stream"],
            salt=data["salt"],
            options=data.get("options", {}),
        )


def _part(data: dict[str, Any]) -> Part:
    if "text" in data:
        return Text(data["text"])
    return Image(ImageSpec.from_json(data["image"]), data.get("uuid"))


@dataclass(frozen=True)
class Plan:
    """What one cell does. `requests` go to the stack, in order; `contrasts` only to the baseline.

    Each contrast is another content (or order) that the case must tell apart from the request of the same index modulo the
    number of requests: where the baseline answers both alike, the case has no power. `fault` is the kind of damage that is
    done to the stored object of the victim's item, the third request's (`faults.store.FAULTS`). `metadata_only`: twin and
    victim reach the consumer with what the encode server said about their items in place of the media. `steps`: what a scripted
    cell does, in order (`plans.steps`); other cells have none. `at_once`: the requests are sent side by side. `window`: where the
    victim, and its twin, are held while the fault is done (`plans.windows`); without one the fault is done before the victim is
    sent.
    """

    requests: tuple[Request, ...]
    contrasts: tuple[Request, ...] = ()
    fault: str | None = None
    metadata_only: bool = False
    steps: tuple[Mapping[str, str], ...] = ()
    at_once: bool = False
    window: str | None = None

    @property
    def hows(self) -> tuple[str, ...]:
        """What is asked of each request of a scripted cell (`plans.steps`), in order."""
        return tuple(step["how"] for step in self.steps for _ in range(sent(step)))

    @property
    def compared(self) -> tuple[Request, ...]:
        """The requests that a baseline is asked too: all but those that must fail."""
        if not self.steps:
            return self.requests
        return tuple(request for request, how in zip(self.requests, self.hows, strict=False) if how not in MUST_FAIL)

    @property
    def sequence(self) -> bool:
        """Whether a baseline is asked the whole script, since what it answers depends on what came before.

        The contrasts of such a plan come in two rows of as many as it has requests (the second may be shorter): for a request
        whose answer depends on it, the two contents that it may be answered about.
        """
        return any(how in AS_AGGREGATED for how in self.hows)

    @property
    def primed(self) -> frozenset[int]:
        """The requests whose items are saved before they are sent, by hand: their ids are in a journal earlier."""
        if self.fault is not None:
            return frozenset({1, 2})  # the twin and the victim
        found, index, primed = set(), 0, False
        for step in self.steps:
            if primed and sent(step):
                found.add(index)
            primed = step["do"] in PRIMING or (primed and not sent(step))
            index += sent(step)
        return frozenset(found)

    @property
    def together(self) -> frozenset[int]:
        """The requests that are sent at once with the one before them."""
        if self.at_once:
            return frozenset(range(1, len(self.requests)))
        found: list[int] = []
        index = 0
        for step in self.steps:
            found += range(index + 1, index + sent(step))
            index += sent(step)
        return frozenset(found)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "requests": [request.to_json() for request in self.requests],
            "contrasts": [request.to_json() for request in self.contrasts],
            "fault": self.fault,
            "metadata_only": self.metadata_only,
            "steps": [dict(step) for step in self.steps],
            **({"at_once": True} if self.at_once else {}),
            **({"window": self.window} if self.window is not None else {}),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        if data.get("schema") != SCHEMA:
            raise ValueError(f"not a plan of schema {SCHEMA}: {data.get('schema')!r}")
        return cls(
            tuple(Request.from_json(request) for request in data["requests"]),
            tuple(Request.from_json(request) for request in data["contrasts"]),
            data["fault"],
            data["metadata_only"],
            tuple(data["steps"]),
            data.get("at_once", False),
            data.get("window"),
        )


class Draw:
    """Draws the contents of one cell: the same cell and seed give the same contents, two cells never share one."""

    def __init__(self, seed: int, cell: str) -> None:
        self._base = f"{seed}/{cell}"
        self._count = 0

    def number(self) -> int:
        """A fresh 48-bit number."""
        self._count += 1
        text = f"{self._base}/{self._count}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")

    def image(self, width: int = 112, height: int = 84) -> Image:
        """An image that no other cell uses. The default size is 4 × 3 patches of 28 pixels: 12 rows on Qwen2.5-VL."""
        return Image(ImageSpec(self.number(), width, height))

    def words(self, prefix: str = "Request") -> Text:
        """A short text that no other cell uses, so that no prefix cache can know the prompt."""
        return Text(f"{prefix} {self.number():012x}. ")

    def user(self, *parts: Part, tail: bool = True) -> Message:
        """A user's message: parts, and the tail that keeps every item inside whole KV blocks."""
        return Message("user", (*parts, *((Text(TAIL),) if tail else ())))

    def request(self, label: str, *parts: Part, stream: bool = False) -> Request:
        """A request of one user message that opens with fresh words."""
        return Request(label, (self.user(self.words(), *parts),), stream=stream)


def swap_images(request: Request, order: Sequence[int], label: str) -> Request:
    """The same request with its images in another order; `order` names every image once.

    An image keeps the client's name for it: the name of another content would be another case. Raises ValueError.
    """
    images = [part for message in request.messages for part in message.parts if isinstance(part, Image)]
    if sorted(order) != list(range(len(images))):
        raise ValueError(f"{list(order)} is no order of {len(images)} images")
    return replace_images(request, [images[index] for index in order], label)


def replace_images(request: Request, images: Iterable[Image], label: str) -> Request:
    """The same request with other images, as many as it has. Raises ValueError for another number."""
    fresh = list(images)
    if len(fresh) != len(request.images):
        raise ValueError(f"{len(fresh)} images for the {len(request.images)} of {request.label!r}")
    rest = iter(fresh)
    messages = tuple(
        replace(message, parts=tuple(next(rest) if isinstance(part, Image) else part for part in message.parts))
        for message in request.messages
    )
    return replace(request, label=label, messages=messages)


def other_images(draw: Draw, requests: Iterable[Request]) -> tuple[Request, ...]:
    """Contrasts to requests of one image: the same with an image that nobody else has, and without the client's name for it."""
    return tuple(replace_images(request, [draw.image()], f"{request.label}, other") for request in requests)


def lengthen(request: Request, times: int = 1) -> Request:
    """The same request, a little longer at its end: moves a prompt off a length that a KV connector cannot serve."""
    *before, last = request.messages
    return replace(request, messages=(*before, replace(last, parts=(*last.parts, *[Text(" So?")] * times))))
