"""Which model made an embedding: a digest of everything on a server that decides what its encoder puts out.

The engine's key of an item names the item, at best also the model's path; neither weights nor dtype nor the
server's processor settings are in it, and with a client's uuid nothing of the model is. Two servers may share
an object exactly if their fingerprints are equal, so the fingerprint must differ wherever the embeddings
would, and should not differ where they would not (a path, a port, a chat template), or the servers never
share anything.

In it:
    - the weights and what shapes them: for a local folder the content of its weight, config, processor and
      code files, independent of where the folder lies; for a hub id the id and the commit;
    - dtype, quantization, config overrides, and whether the weights are dummies;
    - the server-level settings that change rows or pixels under an unchanged key (``--mm-processor-kwargs``),
      the pruning of video rows, and ``--media-io-kwargs``.
Items that were encoded under a LoRA adapter of the tower have a fingerprint of their own, made of this one and the
adapter's files: vLLM puts the adapter's name into the key, not its weights.

Not in it: ``--limit-mm-per-prompt`` (a consumer without a tower sets it to 0);
the device, parallelism and attention backend of the encoder (these change rounding, not identity).

Importing this needs neither vLLM nor torch.
"""

from __future__ import annotations

import functools
import json
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import blake3

#: Files up to this size are hashed whole: every config and processor file, every file of a tiny model. blake3
#: takes about 20 ms for it on one core, so a model in thousands of small shards still starts in seconds. Of a
#: larger file the size and samples are hashed: a server must not read hundreds of gigabytes twice before it
#: starts.
FULL_HASH_BYTES = 64 << 20

#: Of a large safetensors file the header and the first so many bytes of every tensor are hashed. Training
#: changes nearly every element of the tensors it touches, so one page a tensor tells a fine-tune from its
#: base even if only the projector was trained; a few pages are read for each layer. An edit of single
#: elements elsewhere escapes.
TENSOR_SAMPLE_BYTES = 4096

#: Of a large file of another kind: so many chunks of so many bytes, evenly spaced, first and last included
#: (16 MiB).
CHUNKS = 64
CHUNK_BYTES = 256 << 10

_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
# `.py`: code that comes with the model and runs with it (--trust-remote-code).
_CODE_SUFFIXES = frozenset({".py"})
_CONFIG_NAMES = re.compile(r"(config|params|(\w*pre)?processor_config|.*\.index)\.json")
_ADAPTER_CONFIG = "adapter_config.json"
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class ModelIdentity:
    """What the fingerprint is made of. Plain strings, so that it can be compared, cached and tested without
    vLLM.

    Attributes:
        model: a local folder or file, or a hub id.
        commit: of a hub id, 40 hex digits; empty for a local model.
        weights_url: where the weights lie if not under ``model`` (object stores); empty otherwise.
        dtype: of the model, for example ``bfloat16``. quantization: vLLM's name, or empty.
        settings: canonical JSON of the row-changing settings, see ``canonical``.
    """

    model: str
    commit: str
    weights_url: str
    dtype: str
    quantization: str
    settings: str


def model_fingerprint(vllm_config: Any) -> str:
    """The fingerprint of the model that a server runs: 64 hex digits. Computed once per process and model.

    Args:
        vllm_config: vLLM's ``VllmConfig``.

    Raises:
        ValueError: the model cannot be identified; the message says what mends it.
    """
    return fingerprint(model_identity(vllm_config))


@functools.lru_cache(maxsize=8)
def fingerprint(identity: ModelIdentity) -> str:
    """The fingerprint of an identity: 64 hex digits. Reads the files of a local model.

    Raises:
        ValueError: the model is neither a local folder or file with weights, nor a hub id with a commit.
    """
    local = Path(identity.model)
    if local.exists():
        weights = "files:" + files_digest(local)
    elif identity.commit:
        weights = f"hub:{identity.model}@{identity.commit}"
    else:
        raise ValueError(
            f"The model {identity.model!r} cannot be identified, so its embeddings cannot be shared safely: "
            "it is no local folder and its commit is not known; start the server with --revision COMMIT or "
            "a local folder."
        )
    parts = [weights, identity.weights_url, identity.dtype, identity.quantization, identity.settings]
    return blake3.blake3(json.dumps(["fingerprint/1", *parts]).encode()).hexdigest()


def adapter_fingerprint(model: str, adapter: str) -> str:
    """The fingerprint of what a model's tower puts out under a LoRA adapter: 64 hex digits.

    Args:
        model: the fingerprint of the model. adapter: the adapter's folder or, where it is not a local one, its name,
            which then stands for its weights.
    """
    folder = Path(adapter)
    if not folder.is_dir():
        return str(blake3.blake3(json.dumps(["adapter/1", model, "name:" + adapter]).encode()).hexdigest())
    files = sorted(path for path in folder.iterdir() if path.suffix in _WEIGHT_SUFFIXES or path.name == _ADAPTER_CONFIG)
    state = tuple((str(path), status.st_size, status.st_mtime_ns) for path in files for status in [path.stat()])
    return _adapter_fingerprint(model, state)


@functools.lru_cache(maxsize=256)
def _adapter_fingerprint(model: str, state: tuple[tuple[str, int, int], ...]) -> str:
    listing = [[Path(name).name, size, file_digest(Path(name))] for name, size, _ in state]
    return str(blake3.blake3(json.dumps(["adapter/1", model, listing]).encode()).hexdigest())


def model_identity(vllm_config: Any) -> ModelIdentity:
    """Read the identity out of vLLM's configuration (``config/model.py``, ``config/multimodal.py``).

    Raises:
        ValueError: a setting has a value that is not JSON.
    """
    model_config = vllm_config.model_config
    multimodal = getattr(model_config, "multimodal_config", None)
    model = str(model_config.model)
    processor = dict(getattr(multimodal, "mm_processor_kwargs", None) or {})
    # vLLM folds the processor's device in here (config/multimodal.py, fold_mm_processor_device).
    processor.pop("device", None)
    overrides = getattr(model_config, "hf_overrides", None) or {}
    if callable(overrides):
        overrides = f"{overrides.__module__}.{overrides.__qualname__}"
    load_format = getattr(getattr(vllm_config, "load_config", None), "load_format", None)
    settings = {
        "mm_processor_kwargs": processor,
        "media_io_kwargs": getattr(multimodal, "media_io_kwargs", None) or {},
        "video_pruning_rate": getattr(multimodal, "video_pruning_rate", None) or 0,
        "video_pruning_method": str(getattr(multimodal, "video_pruning_method", "")),
        "hf_overrides": overrides,
        "dummy_weights": load_format == "dummy",
    }
    return ModelIdentity(
        model=model,
        commit="" if Path(model).exists() else _commit(model, getattr(model_config, "revision", None)),
        weights_url=str(getattr(model_config, "model_weights", "") or ""),
        dtype=str(model_config.dtype).removeprefix("torch."),
        quantization=str(getattr(model_config, "quantization", None) or ""),
        settings=canonical(settings),
    )


def canonical(settings: dict[str, Any]) -> str:
    """JSON with sorted keys: equal for equal settings in any order.

    Raises:
        ValueError: a value is not JSON, so two servers could not be compared.
    """
    try:
        return json.dumps(settings, sort_keys=True, separators=(",", ":"))
    except TypeError as error:
        raise ValueError(f"A server setting cannot be compared between servers, give it as JSON: {error}") from error


def files_digest(model: Path) -> str:
    """Digest of the relative names, sizes and content of the files that decide what a local model puts out.

    Raises:
        ValueError: there is no such file.
    """
    if model.is_file():
        files = {"": model}
    else:
        # Hidden folders hold the bookkeeping of download tools: times, locks.
        files = {
            path.relative_to(model).as_posix(): path
            for path in sorted(model.rglob("*"))
            if _matters(path) and not any(part.startswith(".") for part in path.relative_to(model).parts)
        }
    if not files:
        raise ValueError(
            f"The model folder {model} holds neither weights nor a config.json; give the folder of a model."
        )
    listing = [[name, path.stat().st_size, file_digest(path)] for name, path in sorted(files.items())]
    return str(blake3.blake3(json.dumps(listing).encode()).hexdigest())


def file_digest(path: Path, full_bytes: int = FULL_HASH_BYTES) -> str:
    """Digest of a file's content: whole up to ``full_bytes``, of samples above."""
    hasher = blake3.blake3()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= full_bytes:
            while chunk := file.read(1 << 20):
                hasher.update(chunk)
        else:
            for offset, length in _samples(file, size, path.suffix):
                file.seek(offset)
                hasher.update(file.read(length))
    return str(hasher.hexdigest())


def _matters(path: Path) -> bool:
    wanted = path.suffix in _WEIGHT_SUFFIXES | _CODE_SUFFIXES or _CONFIG_NAMES.fullmatch(path.name) is not None
    return wanted and path.is_file()


def _samples(file: BinaryIO, size: int, suffix: str) -> Iterator[tuple[int, int]]:
    """(offset, length) of what is hashed of a large file."""
    tensors = _tensor_ranges(file, size) if suffix == ".safetensors" else None
    if tensors:
        header_end = min(start for start, _ in tensors)
        yield 0, header_end
        yield from ((start, min(TENSOR_SAMPLE_BYTES, end - start)) for start, end in tensors)
        return
    for index in range(CHUNKS):
        yield (size - CHUNK_BYTES) * index // (CHUNKS - 1), CHUNK_BYTES


def _tensor_ranges(file: BinaryIO, size: int) -> list[tuple[int, int]] | None:
    """Byte ranges of a safetensors file's tensors; None if its header cannot be read."""
    try:
        (length,) = struct.unpack("<Q", file.read(8))
        if 8 + length > size:
            return None
        header = json.loads(file.read(length))
        offsets = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        return sorted((8 + length + int(start), 8 + length + int(end)) for start, end in offsets)
    except (struct.error, ValueError, TypeError, KeyError, AttributeError):
        return None


def _commit(model: str, revision: Any) -> str:
    """The commit of a hub id, or an empty string if it cannot be told.

    vLLM resolves the revision at start (``resolve_revision`` in transformers_utils/repo_utils.py) to a str
    that carries the commit as ``resolved``, and leaves it as it was if that fails; then the local cache still
    knows which commit a branch was downloaded at.
    """
    resolved = str(getattr(revision, "resolved", None) or revision or "")
    if _COMMIT.fullmatch(resolved):
        return resolved
    try:
        from huggingface_hub import snapshot_download

        folder = snapshot_download(model, revision=resolved or None, local_files_only=True)
    except Exception:
        # Whatever the reason (no such package, no cache, no valid id): the commit is not known.
        return ""
    name = Path(folder).name
    return name if _COMMIT.fullmatch(name) else ""
