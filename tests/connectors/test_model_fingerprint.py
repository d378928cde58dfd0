"""The fingerprint: differs wherever embeddings would, stays equal where they would not. No vLLM."""

from __future__ import annotations

import dataclasses
import json
import os
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
#: What was computed when `fingerprint/1` was written. Another value needs another number in its place, or servers of two versions
#: take each other's objects for those of another model.
GOLDEN = {
    "folder": "b253b982006bda3b8203ba0ecaff1cdfd631eb185d67b802f4f2bacd618b2f34",
    "file": "f551fbf85330e4b59fca4ab7f5882e721827f4256e80a887c05b21a24adeffd2",
    "hub": "9a720e6811142093dd75f04a136f2c164a404d7a92c0da201ce6f80f9faceb60",
    "adapter": "7874992483b89054893315c14e4fdd023c7a497ca3f706c1076a4488db0d9855",
    "adapter by name": "911f94662fbfda8e8ba1e434ba6f0b1ebde5a514bee4686890032ee42a4a50f7",
    "whole": "0620358752ff96f5f4d59dd0663b31361407aba406f04a45b787b885316e97db",
    "tensors": "aef23b5c59a14c51c11ad31e6da260fd8923eec88631f4389522e63423bf36c8",
    "chunks": "e632582ab361c8c18dda5e4546bdb52fde47cabb74367262bbc3990cfb027ce1",
}


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
    "name",
    [
        "model.safetensors",
        "config.json",
        "params.json",
        "preprocessor_config.json",
        "processor_config.json",
        "video_preprocessor_config.json",
        "model.safetensors.index.json",
        "modeling_own.py",
        "tower/w.bin",
        "w.pt",
        "w.pth",
        "w.gguf",
    ],
)
def test_every_file_that_shapes_the_output_counts(tmp_path: Path, name: str) -> None:
    folder = model_folder(tmp_path / "a")
    before = digest_of(folder)
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes((path.read_bytes() if path.exists() else b"") + b" ")
    assert digest_of(folder) != before


@pytest.mark.parametrize(
    "name", ["README.md", "chat_template.jinja", "tokenizer.json", "my_config.json", ".cache/x.safetensors", ".x.bin"]
)
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
    # By its name alone: the first bytes of others are no length, and might be taken for that of gigabytes.
    named = [big_safetensors(tmp_path / name, {"t": bytes(20_000)}) for name in ("b.safetensors", "b.gguf")]
    assert len({fp.file_digest(one, full_bytes=1000) for one in named}) == 2


# ---- what two versions of this connector must agree on, or they share nothing ----


def test_the_fingerprint_of_a_folder_is_always_the_same(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "a")
    (folder / "tower").mkdir()
    (folder / "tower" / "w.bin").write_bytes(b"more")
    (folder / "dir.bin").mkdir()
    assert model_fingerprint(fake_config(str(folder))) == GOLDEN["folder"]
    assert model_fingerprint(fake_config(str(folder / "model.safetensors"))) == GOLDEN["file"]


def test_the_fingerprint_of_a_hub_id_is_always_the_same() -> None:
    identity = ModelIdentity("org/none", COMMIT, "s3://w", "float16", "fp8", '{"a":1}')
    assert fingerprint(identity) == GOLDEN["hub"]


def test_the_fingerprint_of_an_adapter_is_always_the_same(tmp_path: Path) -> None:
    for name, content in (("adapter_config.json", "{}"), ("b.safetensors", "b"), ("a.bin", "a"), ("README.md", "x")):
        (tmp_path / name).write_text(content)
    assert fp.adapter_fingerprint("ab" * 32, str(tmp_path)) == GOLDEN["adapter"]
    (tmp_path / "README.md").write_text("y")
    assert fp.adapter_fingerprint("ab" * 32, str(tmp_path)) == GOLDEN["adapter"]
    (tmp_path / "a.bin").write_text("z")
    os.utime(tmp_path / "a.bin", (1, 1))
    assert fp.adapter_fingerprint("ab" * 32, str(tmp_path)) != GOLDEN["adapter"]
    assert fp.adapter_fingerprint("ab" * 32, "org/adapter") == GOLDEN["adapter by name"]


def test_the_digest_of_a_file_is_always_the_same(tmp_path: Path) -> None:
    """Whole, by its tensors, and by chunks where it has none that can be read."""
    path = tmp_path / "a.safetensors"
    tensors = {"one": bytes(range(256)) * 40, "two": b"2" * 100, "empty": b""}
    whole = fp.file_digest(big_safetensors(path, tensors))
    assert whole == GOLDEN["whole"]
    assert fp.file_digest(path, path.stat().st_size) == whole
    by_tensors = fp.file_digest(path, path.stat().st_size - 1)
    assert by_tensors == GOLDEN["tensors"]
    # Of each tensor the first page counts, and nothing behind it.
    start = path.stat().st_size - sum(map(len, tensors.values()))
    for position, counts in ((start + 4095, True), (start + 4096, False)):
        data = bytearray(path.read_bytes())
        data[position] ^= 1
        (tmp_path / "b.safetensors").write_bytes(data)
        assert (fp.file_digest(tmp_path / "b.safetensors", 10) != by_tensors) is counts


def test_the_digest_of_a_huge_file_is_always_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    with path.open("wb") as file:
        for number in range(65):
            file.seek(number * (1 << 20))
            file.write(bytes([number]) * (1000 if number < 64 else 1))
    assert fp.file_digest(path) == GOLDEN["chunks"]


def raw_safetensors(path: Path, header: bytes, length: int | None = None, rest: int = 100) -> str:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + bytes(rest))
    return fp.file_digest(path, 10)


def test_a_header_that_cannot_be_read_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp, "CHUNK_BYTES", 4)
    path = tmp_path / "a.safetensors"
    entry = b'{"t": {"data_offsets": [0, 100]}, "__metadata__": {"a": "b"}}'
    by_tensors = raw_safetensors(path, entry)
    asked: list[int] = []
    real = fp._samples
    monkeypatch.setattr(fp, "_samples", lambda *args: asked.append(len(found := list(real(*args)))) or iter(found))
    assert raw_safetensors(path, entry) == by_tensors
    assert asked == [2], "the header and one tensor; the metadata are none"
    asked.clear()
    for header, length, rest in (
        (b"[1]", None, 100),
        (b"{", None, 100),
        (b"{}", None, 100),
        (b'{"t": 1}', None, 100),
        (b'{"t": {}}', None, 100),
        (b'{"t": {"data_offsets": [0]}}', None, 100),
        (b'{"t": {"data_offsets": ["x", 1]}}', None, 100),
        (b"", None, 100),
        (entry, 1 << 40, 100),
    ):
        raw_safetensors(path, header, length, rest)
    path.write_bytes(b"short")
    fp.file_digest(path, 1)
    assert asked == [fp.CHUNKS] * 10
    asked.clear()
    raw_safetensors(path, b'{"t": {"data_offsets": [0, 0]}}', rest=0)
    assert asked == [2]


# ---- what of vLLM's configuration counts ----


def test_the_identity_of_a_configuration() -> None:
    def override(config: Any) -> Any:
        return config

    config = fake_config(
        "org/none",
        revision=COMMIT,
        dtype="torch.float16",
        quantization="fp8",
        mm_processor_kwargs={"b": 1, "a": 2, "device": "cpu"},
        media_io_kwargs={"video": {"num_frames": 4}},
        video_pruning_rate=0.5,
    )
    config.model_config.multimodal_config.video_pruning_method = "evs"
    config.model_config.hf_overrides = override
    config.model_config.model_weights = "s3://bucket/w"
    config.load_config.load_format = "dummy"
    found = model_identity(config)
    assert found == ModelIdentity("org/none", COMMIT, "s3://bucket/w", "float16", "fp8", found.settings)
    assert found.settings == (
        '{"dummy_weights":true,'
        f'"hf_overrides":"{__name__}.test_the_identity_of_a_configuration.<locals>.override",'
        '"media_io_kwargs":{"video":{"num_frames":4}},'
        '"mm_processor_kwargs":{"a":2,"b":1},"video_pruning_method":"evs","video_pruning_rate":0.5}'
    )


def test_the_identity_of_a_configuration_that_says_little(tmp_path: Path) -> None:
    """Of a text model, and of another version of vLLM; a folder has no commit, whatever the revision."""
    folder = str(model_folder(tmp_path / "a"))
    few = SimpleNamespace(model_config=SimpleNamespace(model=folder, dtype="float32", revision=COMMIT))
    found = model_identity(few)
    assert found == ModelIdentity(folder, "", "", "float32", "", found.settings)
    assert found.settings == (
        '{"dummy_weights":false,"hf_overrides":{},"media_io_kwargs":{},"mm_processor_kwargs":{},'
        '"video_pruning_method":"","video_pruning_rate":0}'
    )
    nothing = fake_config(folder, media_io_kwargs=None, hf_overrides=None)
    nothing.model_config.model_weights = None
    nothing.load_config = None
    assert model_identity(nothing) == found.__class__(folder, "", "", "bfloat16", "", found.settings)
    assert model_identity(SimpleNamespace(model_config=SimpleNamespace(model="org/none", dtype="x"))).commit == ""


@pytest.mark.parametrize(("revision", "asked"), [(None, None), ("main", "main")])
def test_the_local_cache_knows_the_commit_of_a_branch(
    monkeypatch: pytest.MonkeyPatch, revision: str | None, asked: str | None
) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed: its cache is asked")
    name = [COMMIT]

    def snapshot_download(model: str, *, revision: str | None, local_files_only: bool) -> str:
        assert (model, revision, local_files_only) == ("org/none", asked, True)
        return f"/cache/snapshots/{name[0]}"

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    config = fake_config("org/none", revision=revision)
    assert model_identity(config).commit == COMMIT
    name[0] = "main"
    assert model_identity(config).commit == ""
