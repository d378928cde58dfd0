"""`tiny-qwen2.5-vl`: a Qwen2.5-VL with random weights, 0.82 million parameters, as the files a server loads.

`files(seed)` is pure: the same seed gives the same bytes in every process, with every thread count and on
every machine. That is why nothing here asks torch or transformers, whose generators and writers promise no
such thing:

* a weight is made of integers from PCG64 (the raw stream, which NumPy promises to keep; the stream of its
  normal distribution it does not, and that one calls the C library's `exp` and `log`), and of operations that
  IEEE 754 rounds exactly one way: integer sums, one product, one conversion to float32;
* every parameter has a generator of its own, seeded from its name, so that no order matters;
* the JSON files are written as data.

The layout of the folder and the parameter names are those of transformers 5
(`Qwen2_5_VLForConditionalGeneration`).
"""

from __future__ import annotations

import json
import math
from typing import Any

import blake3
import numpy as np
import numpy.typing as npt
import safetensors.numpy

# Tokens of the Qwen2.5 family. Their place here is their id.
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

HIDDEN = 128  # two heads of 64, a head size that published models have
INTERMEDIATE = 256
HEADS = 2
VISION_HIDDEN = 64
VISION_INTERMEDIATE = 128
VISION_HEADS = 2
VISION_DEPTH = 2  # one block with windowed attention and one with full attention: both paths run
PATCH = 14
MERGE = 2  # 2x2 patches become one token: 28x28 pixels a token
TEMPORAL_PATCH = 2

# Limits of the processor in pixels: 4 to 64 tokens an image, whatever is sent, which keeps a request short.
MIN_PIXELS = (PATCH * MERGE) ** 2 * 4
MAX_PIXELS = (PATCH * MERGE) ** 2 * 64

# Standard deviation of a matrix is gain / sqrt(fan_in). Power decides the gains and the number of layers:
# different images must give different tokens, also with a long text behind the image. With a gain of 1.0 and
# two layers a text of 240 characters hides the image altogether. More layers and sharper queries (which let a
# late token look at a few places instead of averaging over all) mend that, but also enlarge rounding noise:
# at a query gain of 6.0 few answers in bfloat16 equal those in float32. Numbers in docs/models.md.
GAIN = 1.5
QUERY_GAIN = 3.0
LAYERS = 3

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] in ['image', 'image_url'] %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c['type'] in ['video', 'video_url'] %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif c['type'] == 'text' %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def files(seed: int) -> dict[str, bytes]:
    """All files of the model folder, by name. Weights are float32; only they depend on `seed`."""
    weights = {name: _weight(seed, name, shape) for name, shape in parameter_shapes().items()}
    return {
        "chat_template.jinja": CHAT_TEMPLATE.encode(),
        "config.json": _json(_config()),
        "generation_config.json": _json({"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}),
        # One metadata entry only: the writer keeps metadata in a hash map, whose order two entries would
        # show.
        "model.safetensors": safetensors.numpy.save(weights, metadata={"format": "pt"}),
        "preprocessor_config.json": _json(_preprocessor("image_processor_type", "Qwen2VLImageProcessor")),
        "tokenizer.json": _json(_tokenizer()),
        "tokenizer_config.json": _json(_tokenizer_config()),
        "video_preprocessor_config.json": _json(_preprocessor("video_processor_type", "Qwen2VLVideoProcessor")),
    }


def parameter_shapes() -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter, sorted by name."""
    vocabulary = len(_vocabulary())
    merged = VISION_HIDDEN * MERGE**2
    shapes: dict[str, tuple[int, ...]] = {
        "lm_head.weight": (vocabulary, HIDDEN),
        "model.embed_tokens.weight": (vocabulary, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "visual.patch_embed.proj.weight": (VISION_HIDDEN, 3, TEMPORAL_PATCH, PATCH, PATCH),
        "visual.merger.ln_q.weight": (VISION_HIDDEN,),
        **_linear("visual.merger.mlp.0", merged, merged),
        **_linear("visual.merger.mlp.2", HIDDEN, merged),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes[f"{at}.input_layernorm.weight"] = (HIDDEN,)
        shapes[f"{at}.post_attention_layernorm.weight"] = (HIDDEN,)
        for projection in ("q_proj", "k_proj", "v_proj"):
            shapes |= _linear(f"{at}.self_attn.{projection}", HIDDEN, HIDDEN)
        shapes[f"{at}.self_attn.o_proj.weight"] = (HIDDEN, HIDDEN)
        shapes[f"{at}.mlp.gate_proj.weight"] = (INTERMEDIATE, HIDDEN)
        shapes[f"{at}.mlp.up_proj.weight"] = (INTERMEDIATE, HIDDEN)
        shapes[f"{at}.mlp.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
    for block in range(VISION_DEPTH):
        at = f"visual.blocks.{block}"
        shapes[f"{at}.norm1.weight"] = (VISION_HIDDEN,)
        shapes[f"{at}.norm2.weight"] = (VISION_HIDDEN,)
        shapes |= _linear(f"{at}.attn.qkv", 3 * VISION_HIDDEN, VISION_HIDDEN)
        shapes |= _linear(f"{at}.attn.proj", VISION_HIDDEN, VISION_HIDDEN)
        shapes |= _linear(f"{at}.mlp.gate_proj", VISION_INTERMEDIATE, VISION_HIDDEN)
        shapes |= _linear(f"{at}.mlp.up_proj", VISION_INTERMEDIATE, VISION_HIDDEN)
        shapes |= _linear(f"{at}.mlp.down_proj", VISION_HIDDEN, VISION_INTERMEDIATE)
    return dict(sorted(shapes.items()))


def _linear(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def _weight(seed: int, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Biases are zero, norms one, matrices close to normal with standard deviation gain / sqrt(fan_in)."""
    if name.endswith(".bias"):
        return np.zeros(shape, np.float32)
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    entropy = int.from_bytes(blake3.blake3(f"{seed}/{name}".encode()).digest(), "big")
    raw = np.random.PCG64(entropy).random_raw(math.prod(shape))
    # The sum of four uniform 16-bit integers: bell-shaped, bounded at 3.5 standard deviations, and exact.
    total = sum(((raw >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int64) for shift in (0, 16, 32, 48))
    centred = 2 * np.asarray(total) - 4 * 0xFFFF
    deviation = 2 * math.sqrt(4 * (65536**2 - 1) / 12)
    gain = QUERY_GAIN if name.endswith(".q_proj.weight") else GAIN
    scale = gain / math.sqrt(math.prod(shape[1:])) / deviation
    return (centred * scale).astype(np.float32).reshape(shape)


def _vocabulary() -> dict[str, int]:
    """Special tokens, then one token for each byte as byte-level BPE writes it: 263 tokens, no merges.

    A printable Latin-1 byte stands for itself, the others for the code points from 256 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = [chr(code) for code in [*printable, *range(256, 512 - len(printable))]]
    return {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet])}


def _tokenizer() -> dict[str, Any]:
    """`tokenizer.json` of the tokenizers library, version 1.0 of its format."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index, token in enumerate(SPECIAL_TOKENS)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": _vocabulary(),
            "merges": [],
        },
    }


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "processor_class": "Qwen2_5_VLProcessor",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "extra_special_tokens": list(SPECIAL_TOKENS),
        "model_max_length": 4096,
    }


def _config() -> dict[str, Any]:
    ids = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "dtype": "float32",
        "tie_word_embeddings": False,
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "text_config": {
            "model_type": "qwen2_5_vl_text",
            "vocab_size": len(_vocabulary()),
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-05,
            "max_position_embeddings": 4096,
            # The three sections (time, height, width) add up to half a head.
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [8, 12, 12],
            },
            "tie_word_embeddings": False,
            "bos_token_id": ids["<|im_start|>"],
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
        },
        "vision_config": {
            "model_type": "qwen2_5_vl_vision",
            "depth": VISION_DEPTH,
            "hidden_size": VISION_HIDDEN,
            "num_heads": VISION_HEADS,
            "intermediate_size": VISION_INTERMEDIATE,
            "out_hidden_size": HIDDEN,
            "hidden_act": "silu",
            "in_channels": 3,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": TEMPORAL_PATCH,
            # Windows of 56x56 pixels: an image of 112x84 has several, so that windowed attention is not full.
            "window_size": 56,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        },
    }


def _preprocessor(kind: str, class_name: str) -> dict[str, Any]:
    """Settings of the image or video processor. Mean and deviation are CLIP's, as in every Qwen2.5-VL."""
    return {
        kind: class_name,
        "processor_class": "Qwen2_5_VLProcessor",
        "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": TEMPORAL_PATCH,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
