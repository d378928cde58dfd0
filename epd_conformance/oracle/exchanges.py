"""What a client sent and got where an `Answer` is too narrow: several choices, tools, refusals, other routes. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

PROXY = "proxy"
DIRECT = "direct"


@dataclass(frozen=True)
class Exchange:
    """One request and its answer. `to`: `proxy`, or `direct`: the aggregated server of the baseline, nothing before it.

    `request_id`: the X-Request-Id that was sent, empty where the client gave none. `status`: 0 where no answer came, see `error`.
    `headers`: those that say something about the request, lower case. `started` in seconds since the epoch.
    """

    label: str
    to: str
    request_id: str
    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str = ""
    error: str = ""
    started: float = 0.0
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def streams(self) -> bool:
        """Whether the answer is a stream of events."""
        return "event-stream" in self.headers.get("content-type", "")

    @property
    def whole(self) -> Any:
        """The JSON of the body; None where it is none."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    @property
    def reason(self) -> str:
        """A server's own words in a refusal; empty where there are none."""
        body = self.whole
        error = body.get("error") if isinstance(body, dict) else None
        words = error.get("message") if isinstance(error, dict) else None
        return words if isinstance(words, str) else ""


def read(facts: Mapping[str, Any]) -> list[Exchange]:
    """The exchanges of a cell's facts."""
    return [Exchange(**one) for one in facts.get("exchanges") or ()]


def said(exchange: Exchange) -> dict[str, Any]:
    """What a chat completion says, in one form for a whole answer and for a stream.

    `choices`: by index, each with `text`, `ids`, `logprobs` (token, value, and those of the others that were asked for), `finish`,
    `stop` and `calls` (name and arguments of tools); `prompt`: the ids of the prompt; `usage`: tokens of prompt and completion,
    None where nobody asked for them. Raises ValueError for what is no whole chat completion.
    """
    try:
        if not exchange.streams:
            body = json.loads(exchange.body)
            choices = {choice["index"]: _choice(choice, choice["message"]) for choice in body["choices"]}
            return {"choices": choices, "prompt": body.get("prompt_token_ids"), "usage": _usage(body.get("usage"))}
        return _joined(list(_events(exchange.body)))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no chat completion ({type(error).__name__}: {error})") from error


def _events(body: str) -> Iterator[Mapping[str, Any]]:
    for line in body.split("\n"):
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        if line.startswith("data:"):
            event = json.loads(data)
            if "error" in event:
                raise ValueError(f"the stream broke: {event['error']}"[:1000])
            yield event
    raise ValueError("the stream ended without [DONE]")


def _joined(events: list[Mapping[str, Any]]) -> dict[str, Any]:
    choices: dict[int, dict[str, Any]] = {}
    prompt, usage = None, None
    for event in events:
        prompt = event.get("prompt_token_ids") or prompt
        usage = _usage(event.get("usage")) or usage
        for choice in event["choices"]:
            part = _choice(choice, choice["delta"])
            whole = choices.setdefault(choice["index"], part)
            if whole is part:
                continue
            whole["text"] += part["text"]
            whole["ids"] += part["ids"]
            whole["logprobs"] += part["logprobs"]
            for place, (name, arguments) in enumerate(part["calls"]):
                # A piece without a name goes on with the call before.
                if name or place >= len(whole["calls"]):
                    whole["calls"].append([name, arguments])
                else:
                    whole["calls"][-1][1] += arguments
            for name in ("finish", "stop"):
                whole[name] = part[name] if part[name] is not None else whole[name]
    return {"choices": choices, "prompt": prompt, "usage": usage}


def _choice(choice: Mapping[str, Any], words: Mapping[str, Any]) -> dict[str, Any]:
    def entry(one: Mapping[str, Any]) -> list[Any]:
        return [one["token"], float(one["logprob"])]

    return {
        "text": words.get("content") or "",
        "ids": list(choice.get("token_ids") or ()),
        "logprobs": [
            [*entry(token), [entry(other) for other in token.get("top_logprobs") or ()]]
            for token in (choice.get("logprobs") or {}).get("content") or ()
        ],
        "calls": [
            [call["function"].get("name") or "", call["function"].get("arguments") or ""]
            for call in words.get("tool_calls") or ()
        ],
        "finish": choice.get("finish_reason"),
        "stop": choice.get("stop_reason"),
    }


def _usage(usage: Mapping[str, Any] | None) -> list[int] | None:
    return None if not usage else [usage["prompt_tokens"], usage["completion_tokens"]]


def difference(ours: Any, theirs: Any, slack: float, path: str = "") -> str | None:
    """Where two values differ, in words; None where they do not. Numbers with a point may differ by `slack`."""
    if isinstance(ours, float) and isinstance(theirs, float):
        # Asked this way round, a NaN is a difference.
        return None if abs(ours - theirs) <= slack else f"{path} is {ours}, and must be {theirs}"
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        parts = [(f"{path}.{name}" if path else f"{name}", ours[name], theirs[name]) for name in ours]
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        parts = [(f"{path}[{place}]", *pair) for place, pair in enumerate(zip(ours, theirs, strict=True))]
    else:
        return None if ours == theirs else f"{path} is {_short(ours)}, and must be {_short(theirs)}"
    return next((found for name, one, other in parts if (found := difference(one, other, slack, name))), None)


def _short(value: Any) -> str:
    text = f"{value!r}"
    return text if len(text) <= 300 else f"{text[:300]}…"
