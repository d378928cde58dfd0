"""Which widths an encoder's rows may have, by family."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from epd_conformance.connectors.widths import Widths, widths_of


def config(hf: Any = None, pruning: float | None = None) -> Any:
    return SimpleNamespace(
        hf_config=hf,
        multimodal_config=SimpleNamespace(video_pruning_rate=pruning),
        get_inputs_embeds_size=lambda: 64,
    )


DEEPSTACK = SimpleNamespace(depth=27, deepstack_visual_indexes=[5, 11, 17])
FAMILIES = {
    "plain": (config(), {"image": [64], "audio": [64]}),
    "qwen2.5-vl": (config(SimpleNamespace(vision_config=SimpleNamespace(depth=3))), {"image": [64], "video": [64]}),
    "qwen3-vl": (config(SimpleNamespace(vision_config=DEEPSTACK)), {"image": [256], "video": [256], "audio": [64]}),
    "qwen3-omni": (
        config(SimpleNamespace(thinker_config=SimpleNamespace(vision_config=DEEPSTACK))),
        {"image": [256], "video": [256], "audio": [64]},
    ),
    "no levels": (
        config(SimpleNamespace(vision_config=SimpleNamespace(deepstack_visual_indexes=[]))),
        {"image": [64]},
    ),
    "granite4": (config(SimpleNamespace(deepstack_layer_map=[[1, 2]])), {"image": [64, 128, 192, 256]}),
    "bare": (SimpleNamespace(get_inputs_embeds_size=lambda: 64), {"image": [64], "audio": [64]}),
    "levels of more than vision": (
        config(SimpleNamespace(deepstack_visual_indexes=[1], audio_config=SimpleNamespace(deepstack_audio=[2]))),
        {"image": [64, 128, 192, 256], "audio": [64, 128, 192, 256]},
    ),
    "deep inside": (
        config(
            SimpleNamespace(
                depth=3,
                thinker_config=SimpleNamespace(inner_config=SimpleNamespace(vision_config=DEEPSTACK)),
                vision=DEEPSTACK,
            )
        ),
        {"image": [256], "audio": [64]},
    ),
    "pruned": (config(pruning=0.5), {"image": [1, 64, 68, 256], "video": [1, 64, 68, 256]}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_widths_of_a_family(family: str) -> None:
    model_config, right = FAMILIES[family]
    widths = widths_of(model_config)
    for modality, allowed in right.items():
        for width in (0, 1, 32, 64, 68, 128, 192, 256):
            assert widths.fits(width, modality) is (width in allowed or (family == "pruned" and width >= 0)), width
        assert widths.wanted(modality)


def test_a_configuration_that_holds_itself_ends() -> None:
    loop = SimpleNamespace()
    loop.text_config = loop
    assert widths_of(config(loop)).fits(64, "image")


def test_a_multiple_of_a_width_of_one() -> None:
    assert [Widths(1, None, 1).fits(width, "image") for width in (0, 1, 2)] == [False, True, True]
