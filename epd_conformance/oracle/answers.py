"""What a client saw of one request: the raw material of the token and log-probability oracles, as it is kept in evidence."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

# The one `error` of an answer that does not speak against the stack: it may never have been asked for ids.
NO_IDS = "the answer holds no token ids"
# How the `error` of a stream begins that ends with an error event: its client was told.
TOLD = "the stream ends with an error: "


@dataclass(frozen=True)
class Answer:
    """One answer. `status` is the HTTP status (0: no answer at all, see `error`).

    `error` says why a 200 is no answer to compare: the body is no completion, a stream broke off, or `NO_IDS`.

    `prompt_ids` and `ids` are token ids; `logprobs` the chosen tokens' log-probabilities, `margins` the distance of each to
    the second best, both in nats. `body` keeps an error body as text. `request_id` is what was sent as X-Request-Id.
    `started` is the moment of sending in seconds since the epoch, the clock of the journals, `seconds` how long it took.
    """

    label: str
    request_id: str
    status: int
    prompt_ids: tuple[int, ...] = ()
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    margins: tuple[float, ...] = ()
    finish_reason: str | None = None
    error: str | None = None
    body: str | None = None
    started: float = 0.0
    seconds: float = 0.0
    streamed: bool = False

    @property
    def failed(self) -> bool:
        """Whether its client was told that the request failed; not where it waited in vain, or a connection broke."""
        return self.status >= 400 or (self.error or "").startswith(TOLD)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Answer:
        values = dict(data)
        for name in ("prompt_ids", "ids", "logprobs", "margins"):
            values[name] = tuple(values[name])
        return cls(**values)


def from_completion(label: str, request_id: str, body: Any) -> Answer:
    """Read a chat completion that was asked for with `return_token_ids` and `top_logprobs` 2.

    A 200 without token ids is no answer to compare, and says so in `error`: comparing text instead would hide differences.
    An *empty* list of ids is an answer, and a wrong one. Raises ValueError for what is no chat completion.
    """
    try:
        (choice,) = body["choices"]
        ids = choice.get("token_ids")
        prompt = body.get("prompt_token_ids")
        logprobs, margins = read_logprobs((choice.get("logprobs") or {}).get("content"))
        return Answer(
            label=label,
            request_id=request_id,
            status=200,
            prompt_ids=read_ids(prompt),
            ids=read_ids(ids),
            logprobs=logprobs,
            margins=margins,
            finish_reason=choice.get("finish_reason"),
            error=None if ids is not None and prompt is not None else NO_IDS,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no chat completion ({type(error).__name__}: {error})") from error


def read_ids(ids: Any) -> tuple[int, ...]:
    """Token ids of a body; none for null. Raises TypeError for what is no list of integers."""
    if not all(type(token) is int for token in ids or ()):
        raise TypeError("token ids that are no integers")
    return tuple(ids or ())


def read_logprobs(content: list[dict[str, Any]] | None) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Chosen log-probabilities and top-1 margins from `logprobs.content`; a margin is 0 where only one was reported.

    Raises KeyError, TypeError or ValueError for a content of another form.
    """
    logprobs: list[float] = []
    margins: list[float] = []
    for token in content or ():
        logprobs.append(float(token["logprob"]))
        top = sorted((float(entry["logprob"]) for entry in token.get("top_logprobs") or ()), reverse=True)
        margins.append(top[0] - top[1] if len(top) > 1 else 0.0)
    return tuple(logprobs), tuple(margins)
