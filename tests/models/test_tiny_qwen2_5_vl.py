"""The files of tiny-qwen2.5-vl: weights as promised, and loadable by the libraries that a server uses."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from epd_conformance.models import build, tiny_qwen2_5_vl
from epd_conformance.runtime import repairs, vllm_info

# Loads the folder as transformers does for a server and prints what was found. In a process of its own: the
# import takes seconds, and torch must not be loaded into the process of the other tests.
LOAD = """
import json, sys
import numpy as np
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer
folder = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(folder)
processor = AutoProcessor.from_pretrained(folder)
model, info = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
text = "h\\u00e9llo <|im_start|>"
message = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}]
prompt = processor.apply_chat_template(message, add_generation_prompt=True)
image = np.zeros((84, 112, 3), np.uint8)
inputs = processor(text=[prompt], images=[image], return_tensors="np")
print(json.dumps({
    "config": type(AutoConfig.from_pretrained(folder)).__name__,
    "processor": type(processor).__name__,
    "model": type(model).__name__,
    "problems": sorted(map(str, [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]])),
    "vocabulary": len(tokenizer),
    "ids": tokenizer(text)["input_ids"],
    "round_trip": tokenizer.decode(tokenizer(text)["input_ids"]) == text,
    "prompt": prompt,
    "image_tokens": int((np.asarray(inputs["input_ids"]) == 5).sum()),
    "grid": np.asarray(inputs["image_grid_thw"]).tolist(),
}))
"""


def load(folder: Path) -> dict[str, Any]:
    environment = os.environ | repairs.server_environment(os.environ)
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    loaded: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return loaded


def weights(seed: int = 0) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    loaded: dict[str, Any] = safetensors.numpy.load(tiny_qwen2_5_vl.files(seed)["model.safetensors"])
    return loaded


def test_weights_have_the_promised_shapes_and_scale() -> None:
    for name, weight in weights().items():
        assert weight.dtype == np.float32
        assert weight.shape == tiny_qwen2_5_vl.parameter_shapes()[name]
        if name.endswith(".bias"):
            assert not weight.any()
        elif weight.ndim == 1:
            assert (weight == 1).all()
        else:
            gain = 3.0 if "q_proj" in name else 1.5
            expected = gain / math.sqrt(math.prod(weight.shape[1:]))
            # The standard error of a deviation over 4096 values, the smallest matrix, is 1.1 %: five of them.
            assert weight.std() == pytest.approx(expected, rel=0.055), name
            assert abs(weight.mean()) < 5 * expected / math.sqrt(weight.size), name


def test_no_two_matrices_are_related() -> None:
    first = {w.ravel()[:64].tobytes() for w in weights().values() if w.ndim > 1}
    assert len(first) == sum(w.ndim > 1 for w in weights().values())


def test_a_weight_depends_on_its_own_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    before = weights()
    monkeypatch.setattr(tiny_qwen2_5_vl, "LAYERS", 1)
    after = weights()
    assert set(after) < set(before)
    assert all((before[name] == weight).all() for name, weight in after.items())


def test_some_weights_bit_for_bit() -> None:
    """Guards the recipe, where the digest of the folder would change with any file."""
    head = weights()["lm_head.weight"].ravel()[:3]
    assert [value.hex() for value in head.astype(float).tolist()] == [
        "0x1.b09cc80000000p-3",
        "0x1.3861b80000000p-4",
        "0x1.93df200000000p-3",
    ]


def test_the_tokenizer_covers_every_byte_once() -> None:
    vocabulary = json.loads(tiny_qwen2_5_vl.files(0)["tokenizer.json"])["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(263))
    assert sum(len(token) == 1 for token in vocabulary) == 256


@pytest.mark.needs_vllm
@pytest.mark.skipif(
    vllm_info.package_directory("transformers") is None or vllm_info.package_directory("torch") is None,
    reason="transformers and torch, which come with vLLM, are not installed",
)
def test_transformers_loads_everything(tmp_path: Path) -> None:
    model = build("tiny-qwen2.5-vl", tmp_path / "m")
    found = load(model.path)
    assert found.pop("ids")[-1] == 1
    assert found == {
        "config": "Qwen2_5_VLConfig",
        "processor": "Qwen2_5_VLProcessor",
        "model": "Qwen2_5_VLForConditionalGeneration",
        "problems": [],
        "vocabulary": 263,
        "round_trip": True,
        "prompt": "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>a<|im_end|>\n<|im_start|>assistant\n",
        "image_tokens": 12,
        "grid": [[1, 6, 8]],
    }

    # The negative control: one parameter under another name is two problems.
    path = model.path / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    tensors["visual.other.weight"] = tensors.pop("visual.merger.ln_q.weight")
    safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
    assert len(load(model.path)["problems"]) == 2
