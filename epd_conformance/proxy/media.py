"""Finds the media items of a chat request, writes the request that primes an encoder with one, and puts what the encode
server said about an item in its place (pure)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import blake3

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

Modality = Literal["image", "audio", "video"]

MODALITIES: Mapping[str, Modality] = {
    "image_url": "image",
    "image_embeds": "image",
    "input_image": "image",
    "audio_url": "audio",
    "audio_embeds": "audio",
    "input_audio": "audio",
    "video_url": "video",
    "video_embeds": "video",
}

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


# As chat requests spell a media part, and as the APIs of Responses and Messages do.
_ANY_KIND = MEDIA_KINDS | {"image"}


def holds_media(value: Any) -> bool:
    """Whether a JSON value of any API holds something that an encode server would have work with."""
    left = [value]
    while left:
        here = left.pop()
        if isinstance(here, dict):
            kind = here.get("type")
            if isinstance(kind, str) and kind in _ANY_KIND:
                return True
            left.extend(found for found in here.values() if isinstance(found, dict | list))
        elif isinstance(here, list):
            left.extend(found for found in here if isinstance(found, dict | list))
    return False


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

    @property
    def modality(self) -> Modality:
        """What kind of encoder it needs."""
        return MODALITIES[self.kind]

    @property
    def payload(self) -> Any:
        """The content, or the URL of it: what stands under the item's kind, without the `url` object around it."""
        # vLLM takes the Responses spelling with the URL under the usual key.
        value = self.item.get("image_url" if self.kind == "input_image" else self.kind)
        return value.get("url") if isinstance(value, dict) and self.kind.endswith("_url") else value

    @property
    def url(self) -> str | None:
        """The URL of the item, or None where it has none."""
        is_url = self.kind.endswith("_url") or self.kind == "input_image"
        return self.payload if is_url and isinstance(self.payload, str) else None

    @property
    def encoded_bytes(self) -> int:
        """Length of the content that stands in the request itself, other than as a URL."""
        value = self.payload
        if isinstance(value, dict):
            return sum(len(found) for found in value.values() if isinstance(found, str))
        return len(value) if isinstance(value, str) and self.url is None else 0

    @property
    def key(self) -> str:
        """What makes two items the same for the choice of an encode server: the client's `uuid`, else the content."""
        uuid = self.item.get("uuid")
        if uuid is not None:
            return f"uuid:{uuid}"
        value = self.payload
        return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


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


def primer_body(body: dict[str, Any], *items: MediaItem) -> dict[str, Any]:
    """The request that makes an encode server encode these items alone, under the keys of the whole request.

    One user message with the client's parts and no text. The `uuid` of a part stays as the client wrote it,
    and none is invented: a key made from a URL would survive a change of what lies behind it, and would not
    name the model. Everything that is not in PRIMER_DROPS is kept, so all that can change an encoding, its
    key or the routing is the same as on the other legs (`model`, `mm_processor_kwargs`, `media_io_kwargs`,
    `chat_template`, `chat_template_kwargs`, `priority`, `cache_salt`, `session_id`, `ec_transfer_params`,
    `vllm_xargs`, vendor fields).
    """
    kept = {key: value for key, value in body.items() if key not in PRIMER_DROPS}
    return {
        **kept,
        "messages": [{"role": "user", "content": [item.item for item in items]}],
        "stream": False,
        "max_tokens": 1,
    }


def replace_parts(body: dict[str, Any], parts: Mapping[tuple[int, int], dict[str, Any]]) -> dict[str, Any]:
    """The request with other parts at these places (message, part). Whatever is not on the way to one stays the same object."""
    changed = {message for message, _ in parts}
    messages = [
        {**message, "content": [parts.get((m, p), part) for p, part in enumerate(message["content"])]}
        if m in changed
        else message
        for m, message in enumerate(body["messages"])
    ]
    return {**body, "messages": messages}


def with_uuids(body: dict[str, Any], items: Sequence[MediaItem]) -> dict[str, Any]:
    """The request with a `uuid` on every item that has none and whose content stands in the request.

    Needed where items are replaced by what the encode server said: encode server and consumer must then come to the same
    key, and the consumer has no content to make one from. vLLM folds processor settings into the key itself, also with a
    `uuid` (`get_mm_hashes` in vllm/multimodal/processing/inputs.py), so the model and the content make it. An item behind
    an http URL gets none: what lies there may change.
    """
    named: dict[tuple[int, int], dict[str, Any]] = {}
    for item in items:
        url = item.url
        inline = item.encoded_bytes > 0 if url is None else url[:5].lower() == "data:"
        if item.item.get("uuid") is None and inline and not item.kind.endswith("_embeds"):
            content = json.dumps([body.get("model"), item.modality, item.payload], sort_keys=True).encode()
            named[item.message, item.part] = {**item.item, "uuid": blake3.blake3(content).hexdigest()}
    return replace_parts(body, named) if named else body


def with_metadata(
    body: dict[str, Any], items: Sequence[MediaItem], metadata: Mapping[int, dict[str, Any]]
) -> dict[str, Any]:
    """The request with items replaced by `metadata` (by item index), as vLLM takes them: `image_embeds` and friends.

    All items of a modality or none: vLLM refuses a request that mixes media and embeddings of one modality
    (`_resolve_items` in vllm/renderers/chat_utils.py). Items without a `uuid` stay too: nothing else names them.
    """
    whole = {item.modality for item in items if not metadata.get(item.index) or item.item.get("uuid") is None}
    parts: dict[tuple[int, int], dict[str, Any]] = {}
    for item in items:
        if item.modality not in whole:
            kind = f"{item.modality}_embeds"
            parts[item.message, item.part] = {"type": kind, kind: metadata[item.index], "uuid": item.item["uuid"]}
    return replace_parts(body, parts) if parts else body


def item_metadata(params: dict[str, Any], items: Sequence[MediaItem]) -> dict[int, dict[str, Any]]:
    """What an encode server's `ec_transfer_params` say about the items of its primer, by item index.

    vLLM's form (`collect_ec_item_metadata` in vllm/distributed/ec_transfer/ec_connector/utils.py): by key
    `{"item_indices": [...], "metadata": {...}}`, where the indices count the items of the primer. Everything else is ignored.
    Nothing where an index is beyond the items: then the server made more of them than we know (the sound of a video).
    """
    found: dict[int, dict[str, Any]] = {}
    for entry in params.values():
        if not isinstance(entry, dict) or not isinstance(entry.get("metadata"), dict):
            continue
        indices = entry.get("item_indices")
        for index in indices if isinstance(indices, list) else ():
            if not isinstance(index, int) or not 0 <= index < len(items):
                return {}
            found[items[index].index] = entry["metadata"]
    return found


def merged_params(answers: Sequence[tuple[Sequence[MediaItem], dict[str, Any]]]) -> dict[str, Any]:
    """The `ec_transfer_params` of all primers as one, for the stage that loads; `answers` in the order of the items.

    `item_indices` count the items of a primer there, and those of the whole request here. Lists under the same name are
    joined; of objects under the same name the later one's fields win.
    """
    merged: dict[str, Any] = {}
    for items, params in answers:
        for key, value in params.items():
            if isinstance(value, dict) and isinstance(indices := value.get("item_indices"), list):
                known = [items[i].index for i in indices if isinstance(i, int) and 0 <= i < len(items)]
                before = merged.get(key)
                earlier = before.get("item_indices", []) if isinstance(before, dict) else []
                value = {**value, "item_indices": [*earlier, *known]}
            before = merged.get(key)
            if isinstance(before, dict) and isinstance(value, dict):
                merged[key] = {**before, **value}
            elif isinstance(before, list) and isinstance(value, list):
                merged[key] = [*before, *value]
            else:
                merged[key] = value
    return merged
