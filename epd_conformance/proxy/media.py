"""Finds the media items of a chat request and writes the request that primes an encoder with one (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# In the order in which vLLM looks for them in a part without a usable `type`
# (`_parse_chat_message_content_mm_part` in vllm/renderers/chat_utils.py). `prompt_embeds` is missing on
# purpose: it is text that was embedded already and never crosses an encoder.
KEYED_KINDS = (
    "image_url",
    "image_embeds",
    "audio_embeds",
    "video_embeds",
    "audio_url",
    "input_audio",
    "video_url",
)

# vLLM also takes the Responses spelling of an image in a chat request; missing it would bypass the encode
# stage unseen.
MEDIA_KINDS = frozenset((*KEYED_KINDS, "input_image"))

# Fields of vLLM's `ChatCompletionRequest` (vllm/entrypoints/openai/chat_completion/protocol.py) that shape
# the text or the sampling and cannot change an encoding. A list of what is dropped, not of what is kept: a
# field that is new or a vendor's own then reaches the encode server, where at worst it is refused aloud;
# dropped, it could change the key of the item, and the consumer would encode again without a word.
PRIMER_DROPS = frozenset(
    {
        "add_generation_prompt",
        "add_special_tokens",
        "allowed_token_ids",
        "bad_words",
        "continue_final_message",
        "documents",
        "echo",
        "frequency_penalty",
        "ignore_eos",
        "include_reasoning",
        "include_stop_str_in_output",
        "kv_transfer_params",
        "length_penalty",
        "logit_bias",
        "logprob_token_ids",
        "logprobs",
        "max_completion_tokens",
        "min_p",
        "min_tokens",
        "mm_payload",
        "n",
        "parallel_tool_calls",
        "presence_penalty",
        "prompt_logprobs",
        "reasoning_effort",
        "repetition_detection",
        "repetition_penalty",
        "request_id",
        "response_format",
        "return_mm_kwargs",
        "return_prompt_text",
        "return_token_ids",
        "return_token_offsets",
        "return_tokens_as_token_ids",
        "routed_experts_prompt_start",
        "seed",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_token_ids",
        "stream_interval",
        "stream_options",
        "structured_outputs",
        "temperature",
        "thinking_token_budget",
        "tool_choice",
        "tools",
        "top_k",
        "top_logprobs",
        "top_p",
        "truncate_prompt_tokens",
        "truncation_side",
        "use_beam_search",
        "watermarking",
    }
)


@dataclass(frozen=True)
class MediaItem:
    """One media part of a chat request.

    `index` counts over all messages from 0; `message` and `part` are its place in
    `messages[message].content[part]`; `kind` is one of MEDIA_KINDS; `item` is the client's part itself,
    untouched.
    """

    index: int
    message: int
    part: int
    kind: str
    item: dict[str, Any]


def _kind(part: dict[str, Any]) -> str | None:
    """What vLLM takes this content part for, or None where it is no media.

    The `type` decides, unless it is missing or the part has a `uuid`: then the first known key does, as in
    vLLM.
    """
    kind = part.get("type")
    if kind is None or part.get("uuid") is not None:
        return next((key for key in KEYED_KINDS if key in part), None)
    return kind if isinstance(kind, str) and kind in MEDIA_KINDS else None


def extract_items(body: dict[str, Any]) -> list[MediaItem]:
    """All media items of a chat request, in the order in which they stand in it.

    `body["messages"]` must be a list of objects. Content that is a string, null or a list of strings holds no
    media.
    """
    items: list[MediaItem] = []
    for m, message in enumerate(body["messages"]):
        content = message.get("content")
        if not isinstance(content, list):
            continue
        for p, part in enumerate(content):
            if isinstance(part, dict) and (kind := _kind(part)) is not None:
                items.append(MediaItem(len(items), m, p, kind, part))
    return items


def primer_body(body: dict[str, Any], item: MediaItem) -> dict[str, Any]:
    """The request that makes an encode server encode `item` alone, under the key of the whole request.

    One user message with the client's part and no text. The `uuid` of the part stays as the client wrote it,
    and none is invented: a key made from a URL would survive a change of what lies behind it, and would not
    name the model. Everything that is not in PRIMER_DROPS is kept, so all that can change an encoding, its
    key or the routing is the same as on the other legs (`model`, `mm_processor_kwargs`, `media_io_kwargs`,
    `chat_template`, `chat_template_kwargs`, `priority`, `cache_salt`, `session_id`, `ec_transfer_params`,
    `vllm_xargs`, vendor fields).
    """
    kept = {key: value for key, value in body.items() if key not in PRIMER_DROPS}
    return {
        **kept,
        "messages": [{"role": "user", "content": [item.item]}],
        "stream": False,
        "max_tokens": 1,
    }
