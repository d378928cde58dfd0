"""What one cell does: requests to the proxy, step by step, and what the fake servers do with their share of them. Pure data."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

# In a plan it stands for the address where the fakes serve the media that `Step.media` names.
MEDIA_HOST = "{media}"

Role = Literal["encode", "prefill", "decode"]
ROLES: tuple[Role, ...] = ("encode", "prefill", "decode")

#: How many servers of each role stand behind the proxy, by the name that stands where others have a topology; without prefill
#: servers the decode server does both. Two encode servers: with one, neither turns nor primers side by side could be seen.
ARRANGEMENTS: Mapping[str, Mapping[Role, int]] = {
    "proxy-e-pd": {"encode": 2, "decode": 1},
    "proxy-e-p-d": {"encode": 2, "prefill": 1, "decode": 1},
}

End = Literal["whole", "cut", "short", "silent", "hang-up", "never"]
"""How a fake ends an answer.

`whole`: as it should. `cut`: the connection breaks after the first part. `short`: a stream without its mark of the end.
`silent`: nothing more after the first part. `hang-up`: the connection is closed instead of an answer. `never`: no answer at all.
"""


@dataclass(frozen=True)
class Act:
    """What the fakes of a role do with requests that hold the text `holding` (each request, where it is empty).

    `server`: only the one with this number. `wait_s`: seconds before the head of the answer. `status` 400 or above is a refusal
    with `reason` as its message. `reports`: an encode server says where each item is (`ec_transfer_params`), of the items whose
    part holds the text `reported` (each, where it is empty). The first act that fits counts.
    """

    role: Role
    holding: str = ""
    server: int | None = None
    status: int = 200
    reason: str = ""
    wait_s: float = 0.0
    end: End = "whole"
    reports: bool = False
    reported: str = ""


@dataclass(frozen=True)
class Send:
    """One request of a client. `label` is unique in the plan and stands in the request's texts and media.

    `body` is sent as JSON, `raw` (where `body` is None) as it is. `named`: the client gives an id of its own. `leaves`: the client
    closes its connection as soon as a server of this role has the request.
    """

    label: str
    body: Any = None
    path: str = CHAT
    raw: str = ""
    method: Literal["POST", "GET"] = "POST"
    named: bool = True
    leaves: Role | Literal[""] = ""

    def content(self) -> bytes:
        """The bytes of the body; `MEDIA_HOST` is still in them."""
        return self.raw.encode() if self.body is None else json.dumps(self.body).encode()

    @property
    def streams(self) -> bool:
        """Whether it asks for a stream."""
        return isinstance(self.body, dict) and self.body.get("stream") is True


@dataclass(frozen=True)
class Step:
    """Requests that are sent at once, after `pause_s` seconds of nothing.

    `media`: what the fakes serve under /media/NAME from here on. `down`: servers, such as `encode-1`, that take no connection in
    this step. `ill`: roles whose servers say at /health that they are not well.
    """

    sends: tuple[Send, ...]
    pause_s: float = 0.0
    media: Mapping[str, str] = field(default_factory=dict)
    down: tuple[str, ...] = ()
    ill: tuple[Role, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Steps, one after the other, and what the fakes do meanwhile."""

    steps: tuple[Step, ...]
    acts: tuple[Act, ...] = ()

    @property
    def sends(self) -> list[Send]:
        """All requests, in order."""
        return [send for step in self.steps for send in step.sends]

    def to_json(self) -> dict[str, Any]:
        """The plan as it stands in evidence."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return found

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """Raises KeyError or TypeError for what is no plan."""
        steps = [
            Step(
                tuple(Send(**send) for send in step["sends"]),
                step["pause_s"],
                step["media"],
                tuple(step["down"]),
                tuple(step["ill"]),
            )
            for step in data["steps"]
        ]
        return cls(tuple(steps), tuple(Act(**act) for act in data["acts"]))


def once(*sends: Send, acts: tuple[Act, ...] = ()) -> Plan:
    """A plan of one step."""
    return Plan((Step(sends),), acts)


def servers_of(counts: Mapping[Role, int]) -> list[str]:
    """The names of the servers, such as `encode-0`."""
    return [f"{role}-{number}" for role in ROLES for number in range(counts.get(role, 0))]


# -- what clients send -----------------------------------------------------------------------------------------------------------


def mark(label: str) -> str:
    """The words that tell a request's text from that of all others."""
    return f"about-{label}."


def marks(send: Send) -> list[str]:
    """The texts by which a leg of a request is known: its words, and its media, of which a primer holds nothing else."""
    found = [mark(send.label)]
    messages = send.body.get("messages") if isinstance(send.body, dict) else None
    for message in messages or ():
        for part in message["content"] if isinstance(message.get("content"), list) else ():
            for value in part.values():
                payload = value.get("url", value.get("data")) if isinstance(value, dict) else None
                if isinstance(payload, str):
                    found.append(payload)
    return found


def png(name: str) -> str:
    """A PNG of one pixel that is another for each name, as a `data:` URL."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    # Stored, not compressed: the bytes then do not depend on the version of zlib, and evidence can be compared.
    pixel = b"\x78\x01\x01\x02\x00\xfd\xff\x00\x00\x00\x02\x00\x01"
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0))
    whole = b"\x89PNG\r\n\x1a\n" + head + chunk(b"tEXt", b"Comment\0" + name.encode()) + chunk(b"IDAT", pixel)
    return "data:image/png;base64," + base64.b64encode(whole + chunk(b"IEND", b"")).decode()


def image(name: str, **more: Any) -> dict[str, Any]:
    """A content part with an image of its own."""
    return {"type": "image_url", "image_url": {"url": png(name)}, **more}


def audio(name: str) -> dict[str, Any]:
    """A content part with sound; what is in it is nobody's affair here."""
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(name.encode()).decode(), "format": "wav"}}


def video(name: str) -> dict[str, Any]:
    """A content part with a video; what is in it is nobody's affair here."""
    return {
        "type": "video_url",
        "video_url": {"url": "data:video/mp4;base64," + base64.b64encode(name.encode()).decode()},
    }


def text(words: str) -> dict[str, Any]:
    """A content part with text."""
    return {"type": "text", "text": words}


def chat(label: str, *parts: dict[str, Any], stream: bool = False, **fields: Any) -> dict[str, Any]:
    """A chat request: a system message, and a user's with these parts and the request's own words behind them."""
    messages = [
        {"role": "system", "content": f"system words {mark(label)}"},
        {"role": "user", "content": [*parts, text(f"what is this {mark(label)}")]},
    ]
    return (
        {"model": "fake-model", "messages": messages, "max_tokens": 4} | ({"stream": True} if stream else {}) | fields
    )


def images(label: str, count: int) -> list[dict[str, Any]]:
    """So many images of one request."""
    return [image(f"{label}-{number}") for number in range(count)]
