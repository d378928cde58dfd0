"""What a fake server answers: a function of the prompt alone, so that whoever changes the prompt on the way shows. Pure.

It stands in for a model: equal prompts, options and media give equal answers, anything else gives another. The right answer to a
client's request is therefore known without any server; it is the baseline of every comparison.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from epd_conformance.proxycheck.plan import COMPLETIONS

# Tokens that a media item takes in the prompt.
ITEM_TOKENS = 16

# The longest answer: enough to see a limit that is not kept.
LONGEST = 8

MEDIA = ("image_url", "input_audio", "audio_url", "video_url")
REFERENCES = {"image_embeds": "image", "audio_embeds": "audio", "video_embeds": "video"}
MODALITY = {"image_url": "image", "input_audio": "audio", "audio_url": "audio", "video_url": "video"} | REFERENCES

# What shapes a prompt or the choice of tokens, besides messages and prompt; a missing field and an explicit null are the same.
SHAPING = (
    "model", "mm_processor_kwargs", "media_io_kwargs", "chat_template_kwargs", "tools", "tool_choice", "response_format",
    "structured_outputs", "seed", "temperature", "stop", "logit_bias",
)  # fmt: skip

#: The name of the model that is none.
FAKE_MODEL = "fake-model"

MODELS = {"object": "list", "data": [{"id": FAKE_MODEL, "object": "model", "owned_by": "epd-conformance fakes"}]}

#: What lies behind a URL, for an item with this `uuid` (None: it has none).
Contents = Callable[[str, str | None], str]


class Refused(Exception):
    """A request that a server of this kind does not take; `status` is the answer's."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def digest(value: Any) -> str:
    """A short digest of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


# Under this name Qwen2-VL's encoder reports the size of an image; the fakes write there which image it was.
GRID = "image_grid_thw"


def numbers(value: Any) -> list[int]:
    """The numbers of nested lists, which a proxy may have flattened."""
    if isinstance(value, list):
        return [number for inner in value for number in numbers(inner)]
    return [value] if isinstance(value, int) else []


@dataclass(frozen=True)
class Item:
    """A media item of a request: its part, and the kind of it (`image_url`, ..., or a reference, `image_embeds`, ...)."""

    kind: str
    part: Mapping[str, Any]

    @property
    def modality(self) -> str:
        return MODALITY[self.kind]

    @property
    def reference(self) -> bool:
        return self.kind in REFERENCES

    @property
    def payload(self) -> str:
        """What the part holds: a URL, or the content. Raises Refused where it holds neither."""
        value = self.part.get(self.kind)
        if isinstance(value, dict):
            value = value.get("url", value.get("data"))
        if not isinstance(value, str) or not value:
            raise Refused(f"{self.kind} holds no media")
        return value

    def content(self, contents: Contents) -> list[int]:
        """What identifies the content, in the form of a grid: an encode server reports it. Raises Refused where there is none."""
        if self.reference:
            value = self.part[self.kind]
            grid = numbers(value.get(GRID)) if isinstance(value, dict) else []
            if len(grid) != 3:
                raise Refused(f"{self.kind} refers to nothing")
            return grid
        uuid = self.part.get("uuid")
        key = digest(contents(self.payload, uuid if isinstance(uuid, str) else None))
        return [1, int(key[:8], 16), int(key[8:], 16)]


def items(body: Mapping[str, Any]) -> list[Item]:
    """The media items of a chat request, in order. Raises Refused for what is no chat request."""
    found = []
    for part in _parts(body):
        kind = next((kind for kind in (*MEDIA, *REFERENCES) if kind in part), None)
        if kind is not None:
            found.append(Item(kind, part))
        elif not isinstance(part.get("text"), str):
            raise Refused("a content part is neither text nor media")
    return found


def _parts(body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise Refused("messages must be a list")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Refused("a message must be an object with a role")
        content = message.get("content")
        if isinstance(content, list):
            for part in content:
                if not isinstance(part, dict):
                    raise Refused("a content part must be an object")
                yield part
        elif content is not None and not isinstance(content, str):
            raise Refused("content must be text or a list")


def prompt(body: Any, path: str, contents: Contents) -> Any:
    """The prompt that a server sees in a request: what two requests must agree in to be answered alike. Raises Refused."""
    if not isinstance(body, dict):
        raise Refused("the body must be an object")
    options = {name: body[name] for name in SHAPING if body.get(name) is not None}
    if path == COMPLETIONS:
        if not isinstance(body.get("prompt"), str | list):
            raise Refused("prompt must be text or a list")
        return [options, body["prompt"]]
    found = items(body)
    kinds: dict[str, set[bool]] = {}
    for item in found:
        kinds.setdefault(item.modality, set()).add(item.reference)
    if any(len(both) > 1 for both in kinds.values()):
        raise Refused("Mixing raw image and embedding inputs is not allowed")
    identities = iter([item.content(contents) for item in found])
    messages = []
    for message in body["messages"]:
        content = message.get("content")
        if isinstance(content, list):
            content = [part["text"] if isinstance(part.get("text"), str) else [next(identities)] for part in content]
        messages.append({**message, "content": content})
    return [options, messages]


def prompt_tokens(body: Mapping[str, Any], path: str) -> int:
    """How many tokens the prompt has: its words, and a fixed number for each item. Raises Refused."""
    if path == COMPLETIONS:
        given = body.get("prompt")
        return len(given.split()) if isinstance(given, str) else len(given or ())
    texts = [message["content"] for message in body["messages"] if isinstance(message.get("content"), str)]
    texts += [str(part["text"]) for part in _parts(body) if isinstance(part.get("text"), str)]
    return sum(len(words.split()) for words in texts) + ITEM_TOKENS * len(items(body))


def limit(body: Mapping[str, Any], path: str) -> int | None:
    """The most tokens that a request asks for, under whichever name counts for its API; None: no limit."""
    names = ("max_tokens",) if path == COMPLETIONS else ("max_completion_tokens", "max_tokens")
    given = next((body[name] for name in names if body.get(name) is not None), None)
    return given if isinstance(given, int) else None


def answer(body: Mapping[str, Any], path: str, contents: Contents, request_id: str) -> dict[str, Any]:
    """The answer to a request, as vLLM words it. Raises Refused."""
    key = digest(prompt(body, path, contents))
    asked = limit(body, path)
    length = LONGEST if asked is None else min(asked, LONGEST)
    choices = []
    count = body.get("n") if isinstance(body.get("n"), int) else 1
    for index in range(count or 1):
        ids = [int(digest([key, index, step])[:4], 16) for step in range(length)]
        words = " ".join(f"w{number}" for number in ids)
        choice: dict[str, Any] = {"index": index, "finish_reason": "length", "token_ids": ids}
        choice |= {"text": words} if path == COMPLETIONS else {"message": {"role": "assistant", "content": words}}
        if body.get("logprobs"):
            choice["logprobs"] = {"content": [{"token": f"w{number}", "logprob": -number / 65536} for number in ids]}
        choices.append(choice)
    kind = "text_completion" if path == COMPLETIONS else "chat.completion"
    usage = {"prompt_tokens": prompt_tokens(body, path), "completion_tokens": length * len(choices)}
    return {"id": request_id, "object": kind, "model": body.get("model"), "choices": choices, "usage": usage}


def tokenized(body: Any) -> dict[str, Any]:
    """The answer of /tokenize."""
    words = str(body.get("prompt") if isinstance(body, dict) else body).split()
    return {"count": len(words), "tokens": [len(word) for word in words], "max_model_len": 4096}


def events(body: Mapping[str, Any], path: str, whole: Mapping[str, Any]) -> list[bytes]:
    """The same answer as a stream: an event for each token, the usage where it was asked for, and the mark of the end."""
    found: list[Any] = []
    for choice in whole["choices"]:
        for number, token in enumerate(choice["token_ids"]):
            piece = ("" if number == 0 else " ") + f"w{token}"
            delta = {"text": piece} if path == COMPLETIONS else {"delta": {"content": piece}}
            logprobs = choice.get("logprobs")
            said = {"logprobs": {"content": [logprobs["content"][number]]}} if logprobs else {}
            found.append([{"index": choice["index"], **delta, **said}])
    head = {"id": whole["id"], "object": f"{whole['object']}.chunk", "model": whole["model"]}
    lines = [{**head, "choices": choices} for choices in found]
    if isinstance(body.get("stream_options"), dict) and body["stream_options"].get("include_usage"):
        lines.append({**head, "choices": [], "usage": whole["usage"]})
    return [*(f"data: {json.dumps(line)}\n\n".encode() for line in lines), b"data: [DONE]\n\n"]


# -- what a client makes of an answer --------------------------------------------------------------------------------------------


def data_lines(text: str) -> list[str]:
    """The data of the events of a stream."""
    return [line[5:].strip() for line in text.split("\n") if line.startswith("data:")]


def said(text: str, streamed: bool) -> dict[str, Any] | None:
    """What an answer says, whether it was streamed or not: texts and log-probabilities by choice, and usage. None for what is
    no whole answer."""
    try:
        if not streamed:
            return _said([json.loads(text)])
        lines = data_lines(text)
        if not lines or lines[-1] != "[DONE]":
            return None
        return _said([json.loads(line) for line in lines[:-1]])
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _said(pieces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    texts: dict[str, str] = {}
    logprobs: dict[str, list[Any]] = {}
    usage = None
    for piece in pieces:
        usage = piece.get("usage") or usage
        for choice in piece["choices"]:
            index = str(choice["index"])
            words = choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content") or ""
            texts[index] = texts.get(index, "") + words
            if choice.get("logprobs"):
                logprobs.setdefault(index, []).extend(choice["logprobs"]["content"])
    return {"texts": texts, "logprobs": logprobs, "usage": usage}


def right(body: Mapping[str, Any], path: str, contents: Contents, streamed: bool) -> dict[str, Any] | None:
    """What the right answer to a client's request says: the one that a server gives that is asked directly."""
    whole = answer(body, path, contents, "")
    if not streamed:
        return said(json.dumps(whole), False)
    return said(b"".join(events(body, path, whole)).decode(), True)
