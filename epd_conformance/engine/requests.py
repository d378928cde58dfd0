"""Real `vllm.v1.request.Request`s with synthetic items: identifiers, positions and sparse placeholders, no media and no model."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

#: The token of text, and that of a placeholder. Their values mean nothing: no model runs.
TEXT, PLACEHOLDER = 1, 2


def make_request(
    request_id: str,
    items: Sequence[tuple[str, int, int]],
    *,
    media: Sequence[bool | None] = (),
    text: int = 1,
    max_tokens: int = 1,
    parameters: Any = None,
    priority: int = 0,
    block_hasher: Any = None,
) -> Request:
    """A request as the engine's core gets it.

    Args:
        items: (identifier, rows, gaps): as many embeddings, and tokens of the placeholder that are none, one before each of the
            first `gaps` rows.
        media: for each item True (media), False (placeholder metadata only, as `image_embeds` without a tensor gives) or None
            (no payload at all, `MultiModalFeatureSpec.data` is None); missing ones are True.
        text: tokens before the first, between any two and behind the last item.
        parameters: the request's `ec_transfer_params`, of any type.
    """
    features = []
    tokens = [TEXT] * text
    for index, (identifier, rows, gaps) in enumerate(items):
        length = rows + min(gaps, rows)
        position = PlaceholderRange(offset=len(tokens), length=length, is_embed=_mask(rows, min(gaps, rows)))
        has = media[index] if index < len(media) else True
        features.append(
            MultiModalFeatureSpec(
                data=None if has is None else _payload(rows, has),
                modality="image",
                identifier=identifier,
                mm_position=position,
                mm_hash=identifier,
            )
        )
        tokens += [PLACEHOLDER] * length + [TEXT] * text
    sampling = SamplingParams(
        max_tokens=max_tokens,
        ignore_eos=True,
        extra_args=None if parameters is None else {"ec_transfer_params": parameters},
    )
    return Request(
        request_id=request_id,
        prompt_token_ids=tokens or [TEXT],
        sampling_params=sampling,
        pooling_params=None,
        # Not the clock: requests arrive in the order of their ids.
        arrival_time=0.0,
        mm_features=features,
        priority=priority,
        block_hasher=block_hasher,
    )


def has_media(feature: MultiModalFeatureSpec) -> bool:
    """Whether an encoder could encode the item."""
    return feature.data is not None and "pixel_values" in feature.data


@functools.lru_cache(maxsize=256)
def _mask(rows: int, gaps: int) -> Any:
    """Which tokens of a placeholder are embeddings; None where all are, as most models give it."""
    import torch

    if not gaps:
        return None
    return torch.tensor([False, True] * gaps + [True] * (rows - gaps))


@functools.lru_cache(maxsize=256)
def _payload(rows: int, media: bool) -> MultiModalKwargsItem:
    """An item's payload: what sizes its placeholder, and pixels or none (models/qwen2_vl.py, `image_embeds` beside a grid)."""
    import torch

    field = MultiModalBatchedField()
    # Qwen2.5-VL merges two by two patches into one embedding.
    values: dict[str, Any] = {"image_grid_thw": torch.tensor([1, 2, 2 * rows])}
    if media:
        values["pixel_values"] = torch.zeros(1)
    else:
        values["image_embeds"] = None
    return MultiModalKwargsItem({name: MultiModalFieldElem(data=data, field=field) for name, data in values.items()})
