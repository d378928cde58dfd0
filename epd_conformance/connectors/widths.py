"""How wide an encoder's rows must be, from the model's configuration alone.

vLLM measures the width on encode servers only (``mm_encoder_output_widths`` in config/ec_transfer.py); a consumer is not told,
and merges what it is given. Where it comes from, by family:

    - most (LLaVA, Idefics, SmolVLM, Gemma3, InternVL, Qwen2-VL, Qwen2.5-VL, Qwen2-Audio, MiniCPM, ...): the width of the
      language model's input embeddings, since the rows take the place of token embeddings;
    - DeepStack of the Qwen3-VL kind (Qwen3-VL, Qwen3.5, Qwen3-Omni's images and video, InternS1-Pro, Cohere Compass): that
      width once, and once more for each entry of the vision config's ``deepstack_visual_indexes``, side by side;
    - other models with a DeepStack of their own (Granite 4 Vision, MOSS-Audio): a multiple of that width, how many is not
      written in one place;
    - any model with video pruning (``--video-pruning-rate``): a few more columns with positions; not checked. The
      fingerprint, which must be equal, covers the setting.

Imports nothing of vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Widths:
    """Which widths are right.

    Attributes:
        embeds: of the language model's input embeddings. 0: any width is taken.
        visual: vectors side by side in a row of an image or a video; None: any number. other: the same for audio and all else.
    """

    embeds: int
    visual: int | None
    other: int | None

    def fits(self, width: int, modality: str) -> bool:
        """Whether rows of an item of this modality may have this width."""
        if not self.embeds:
            return True
        vectors = self.visual if modality in ("image", "video") else self.other
        if vectors is None:
            return width > 0 and width % self.embeds == 0
        return width == self.embeds * vectors

    def wanted(self, modality: str) -> str:
        """For a message: what would have been right."""
        vectors = self.visual if modality in ("image", "video") else self.other
        return f"a multiple of {self.embeds}" if vectors is None else str(self.embeds * vectors)


def widths_of(model_config: Any) -> Widths:
    """Read them out of vLLM's ``ModelConfig``."""
    multimodal = getattr(model_config, "multimodal_config", None)
    if getattr(multimodal, "video_pruning_rate", None):
        return Widths(0, None, None)
    embeds = int(model_config.get_inputs_embeds_size())
    levels = 0
    for config in _configs(getattr(model_config, "hf_config", None)):
        for name, value in vars(config).items():
            if not name.startswith("deepstack") or not value:
                continue
            if name != "deepstack_visual_indexes":
                return Widths(embeds, None, None)
            levels = len(value)
    return Widths(embeds, 1 + levels, 1)


def _configs(config: Any, depth: int = 0) -> list[Any]:
    """A Hugging Face configuration and those inside it (``vision_config``, ``thinker_config.vision_config``, ...)."""
    if not hasattr(config, "__dict__") or depth > 3:
        return []
    inner = [value for name, value in vars(config).items() if name.endswith("_config")]
    return [config, *(found for value in inner for found in _configs(value, depth + 1))]
