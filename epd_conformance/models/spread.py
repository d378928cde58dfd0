"""How far apart a model's answers to different images are, measured against a running server.

Equal tokens prove something only where different images would have given different ones. This measures that
on the aggregated server: random images, one request each, and the share of all pairs whose tokens differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import requests

from epd_conformance.errors import StackError, UsageError
from epd_conformance.plans.media import ImageSpec

REQUEST_TIMEOUT_S = 120.0  # the first request of a cold CPU server takes seconds; a hung one must still end


@dataclass(frozen=True)
class Spread:
    """The result: shares are of `pairs`; margins are nats, best to second token, over all tokens."""

    images: int
    tokens: int
    pairs: int
    differing: int
    share: float
    first_token_share: float
    margin_min: float
    margin_p05: float
    margin_median: float


def measure(base_url: str, served_name: str, images: int = 60, tokens: int = 8, text: str = "describe") -> Spread:
    """Sends `images` chat requests, one random image and `text` each, and compares `tokens` greedy token ids.

    `base_url` is the server's root, such as `http://127.0.0.1:8000`. Raises StackError where an answer is not
    what was asked for, and UsageError for fewer than two images or one token.
    """
    if images < 2 or tokens < 1:
        raise UsageError(f"{images} images and {tokens} tokens: give at least 2 images and 1 token")
    ids: list[list[int]] = []
    margins: list[float] = []
    for seed in range(images):
        answer_ids, answer_margins = _ask(base_url.rstrip("/"), served_name, ImageSpec(seed), tokens, text)
        ids.append(answer_ids)
        margins += answer_margins
    return summarise(ids, margins)


def summarise(ids: Sequence[Sequence[int]], margins: Sequence[float]) -> Spread:
    """The spread of answers already taken: `ids` one list an image, equally long; `margins` in any order."""
    pairs = list(itertools.combinations(ids, 2))
    differing = sum(list(one) != list(other) for one, other in pairs)
    first = sum(one[0] != other[0] for one, other in pairs)
    p05, median = np.percentile(margins, [5, 50])
    return Spread(
        images=len(ids),
        tokens=len(ids[0]),
        pairs=len(pairs),
        differing=differing,
        share=differing / len(pairs),
        first_token_share=first / len(pairs),
        margin_min=min(margins),
        margin_p05=float(p05),
        margin_median=float(median),
    )


def _ask(base_url: str, served_name: str, image: ImageSpec, tokens: int, text: str) -> tuple[list[int], list[float]]:
    request = {
        "model": served_name,
        "messages": [{"role": "user", "content": [image.item(), {"type": "text", "text": text}]}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "logprobs": True,
        "top_logprobs": 2,
    }
    try:
        response = requests.post(f"{base_url}/v1/chat/completions", json=request, timeout=REQUEST_TIMEOUT_S)
    except requests.RequestException as error:
        raise StackError(f"{base_url} did not answer for image {image.seed}: {error}") from error
    if response.status_code != 200:
        raise StackError(f"{base_url} answered {response.status_code} for image {image.seed}: {response.text[:300]}")
    try:
        choice = response.json()["choices"][0]
        ids = [int(token) for token in choice["token_ids"]]
        # vLLM lists the sampled token first and adds it to the asked-for two where it is not among them:
        # sort.
        best = [
            sorted((top["logprob"] for top in entry["top_logprobs"]), reverse=True)
            for entry in choice["logprobs"]["content"]
        ]
        margins = [first - second for first, second, *_ in best]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise StackError(
            f"{base_url} answered without token ids and logprobs for image {image.seed}: {error!r}"
        ) from error
    if len(ids) != tokens or len(margins) != tokens:
        raise StackError(f"{base_url} gave {len(ids)} tokens for image {image.seed} where {tokens} were asked")
    return ids, margins
