"""The fingerprint: differs wherever embeddings would, stays equal where they would not. No vLLM."""

from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from epd_conformance.connectors import fingerprint as fp
from epd_conformance.connectors.fingerprint import (
    ModelIdentity,
    fingerprint,
    model_fingerprint,
    model_identity,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def model_folder(folder: Path, weights: bytes = b"weights") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 8}')
    (folder / "preprocessor_config.json").write_text('{"max_pixels": 100}')
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def fake_config(model: str, **changes: Any) -> SimpleNamespace:
    multimodal = {"mm_processor_kwargs": None, "media_io_kwargs": {}, "video_pruning_rate": None}
    model_config = {"model": model, "revision": None, "dtype": "torch.bfloat16", "quantization": None}
    for name, value in changes.items():
        (multimodal if name in multimodal else model_config)[name] = value
    return SimpleNamespace(
        model_config=SimpleNamespace(**model_config, multimodal_config=SimpleNamespace(**multimodal)),
        load_config=SimpleNamespace(load_format="auto"),
    )


def digest_of(folder: Path) -> str:
    fingerprint.cache_clear()  # the same folder is read again
    return model_fingerprint(fake_config(str(folder)))


def test_a_copy_elsewhere_is_the_same_model(tmp_path: Path) -> None:
    assert digest_of(model_folder(tmp_path / "a")) == digest_of(model_folder(tmp_path / "b"))


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "preprocessor_config.json", "modeling_own.py", "tower/w.bin"]
)
def test_every_file_that_shapes_the_output_counts(tmp_path: Path, name: str) -> None:
    folder = model_folder(tmp_path / "a")
    before = digest_of(folder)
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes((path.read_bytes() if path.exists() else b"") + b" ")
    assert digest_of(folder) != before


@pytest.mark.parametrize("name", ["README.md", "chat_template.jinja", "tokenizer.json", ".cache/x.safetensors"])
def test_files_that_do_not_shape_it_do_not_count(tmp_path: Path, name: str) -> None:
    folder = model_folder(tmp_path / "a")
    before = digest_of(folder)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("x")
    assert digest_of(folder) == before


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "torch.float32"},
        {"quantization": "fp8"},
        {"mm_processor_kwargs": {"max_pixels": 1}},
        {"media_io_kwargs": {"video": {"num_frames": 4}}},
        {"video_pruning_rate": 0.5},
        {"hf_overrides": {"vision_config": {"depth": 1}}},
    ],
    ids=str,
)
def test_every_setting_counts(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = str(model_folder(tmp_path / "a"))
    assert model_fingerprint(fake_config(folder, **change)) != model_fingerprint(fake_config(folder))


def test_dummy_weights_count(tmp_path: Path) -> None:
    config = fake_config(str(model_folder(tmp_path / "a")))
    real = model_fingerprint(config)
    config.load_config.load_format = "safetensors"
    assert model_fingerprint(config) == real
    config.load_config.load_format = "dummy"
    assert model_fingerprint(config) != real


def test_order_and_device_of_processor_settings_do_not_count(tmp_path: Path) -> None:
    folder = str(model_folder(tmp_path / "a"))
    one = fake_config(folder, mm_processor_kwargs={"a": 1, "b": 2})
    two = fake_config(folder, mm_processor_kwargs={"b": 2, "a": 1, "device": "cuda"})
    assert model_fingerprint(one) == model_fingerprint(two)


def test_every_part_of_the_identity_counts() -> None:
    identity = ModelIdentity("org/none", COMMIT, "", "bfloat16", "", "{}")
    other = {field.name: "f" * 40 for field in dataclasses.fields(ModelIdentity)}
    digests = [fingerprint(dataclasses.replace(identity, **{name: value})) for name, value in other.items()]
    assert len({fingerprint(identity), *digests}) == 1 + len(other)


def test_a_hub_id_is_its_commit() -> None:
    class Resolved(str):  # as huggingface_hub's ResolvedRevision
        resolved = COMMIT

    by_branch = model_fingerprint(fake_config("org/none", revision=Resolved("main")))
    assert by_branch == model_fingerprint(fake_config("org/none", revision=COMMIT))
    assert by_branch != model_fingerprint(fake_config("org/none", revision="f" * 40))


def test_an_unknown_commit_is_refused_with_the_mend() -> None:
    with pytest.raises(ValueError, match=r"org/none.*--revision"):
        model_fingerprint(fake_config("org/none", revision="main"))


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither weights nor"):
        model_fingerprint(fake_config(str(tmp_path)))


def test_settings_that_are_not_json_are_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        model_identity(fake_config("org/none", revision=COMMIT, mm_processor_kwargs={"a": object()}))


def big_safetensors(path: Path, tensors: dict[str, bytes]) -> Path:
    header: dict[str, Any] = {}
    position = 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [position, position + len(data)]}
        position += len(data)
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + b"".join(tensors.values()))
    return path


def test_samples_of_a_large_file_see_every_tensor(tmp_path: Path) -> None:
    tensors = {f"t{index}": bytes(20_000) for index in range(10)}
    before = fp.file_digest(big_safetensors(tmp_path / "a.safetensors", tensors), full_bytes=1000)
    for name in tensors:
        trained = {**tensors, name: b"\1" * 20_000}
        assert fp.file_digest(big_safetensors(tmp_path / "b.safetensors", trained), full_bytes=1000) != before
    renamed = {name.upper(): data for name, data in tensors.items()}
    assert fp.file_digest(big_safetensors(tmp_path / "b.safetensors", renamed), full_bytes=1000) != before


def test_samples_of_another_large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp, "CHUNK_BYTES", 10)
    path = tmp_path / "a.bin"
    data = bytearray(100_000)
    path.write_bytes(data)
    before = fp.file_digest(path, full_bytes=1000)
    for position in (0, 99_999):
        changed = data.copy()
        changed[position] = 1
        path.write_bytes(changed)
        assert fp.file_digest(path, full_bytes=1000) != before
    (tmp_path / "broken.safetensors").write_bytes(b"\xff" * 100_000)  # no readable header: chunks, no error
    assert fp.file_digest(tmp_path / "broken.safetensors", full_bytes=1000) != before
