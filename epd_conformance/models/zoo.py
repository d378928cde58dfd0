"""The zoo: which models the harness can make itself, where they are put, and what a model folder's digest is.

A zoo model is a function from a seed to file contents, so that a folder is either complete and known by its
digest, or it is rebuilt. Models from elsewhere (a folder, a Hugging Face id) pass through `resolve`
untouched.
"""

from __future__ import annotations

import difflib
import errno
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import blake3

from epd_conformance.errors import UsageError
from epd_conformance.models import tiny_qwen2_5_vl

# Raised whenever a builder's bytes change on purpose; stands in epd-model.json beside the digest.
GENERATOR_VERSION = 1
MARKER = "epd-model.json"
CACHE_VARIABLE = "EPD_CONFORMANCE_CACHE"

# Twelve hexadecimal digits, 48 bits: enough to tell the few models of one cache apart, short enough to read.
_PREFIX_DIGITS = 12

# `org/name` as the Hugging Face hub admits it.
_HUB_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<commit>[0-9a-f]{40}))?", re.ASCII)


@dataclass(frozen=True)
class ModelSpec:
    """A model of the zoo. `digest` is that of seed 0; `builder` gives the folder's files for a seed."""

    name: str
    description: str
    modalities: tuple[str, ...]
    digest: str
    builder: Callable[[int], dict[str, bytes]]


@dataclass(frozen=True)
class BuiltModel:
    """A zoo model on disk; `built` is False where the folder already held exactly these files."""

    name: str
    path: Path
    seed: int
    digest: str
    built: bool


@dataclass(frozen=True)
class ResolvedModel:
    """What `--model` meant. `path_or_id` is what a server is given; `built` says that this call wrote it.

    `digest` and `modalities` are None where they are not known. `revision` is the commit of an id that was given with one; its
    digest is then `commit:<revision>`, since a commit fixes every file.
    """

    name: str
    path_or_id: str
    digest: str | None
    modalities: tuple[str, ...] | None
    built: bool
    revision: str | None = None


MODELS: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        ModelSpec(
            name="tiny-qwen2.5-vl",
            description="Qwen2.5-VL with random weights, 0.82 million parameters, for images and videos.",
            modalities=("image", "video"),
            digest="ff9587f6c1767c3654a64be6ac88693af7890fcf30aa4681bc532c9c9183b298",
            builder=tiny_qwen2_5_vl.files,
        ),
    )
}


def build(name: str, directory: Path, seed: int = 0) -> BuiltModel:
    """Makes the zoo model `name` in `directory`, all or nothing.

    The files are written beside `directory` and renamed into place, so that no reader and no second builder
    ever sees half a model. A folder that holds this very model already is left alone; another or a damaged
    zoo model is replaced.

    Raises UsageError for an unknown name, a folder with anything in it that is not a zoo model, a place that
    cannot be written, and where seed 0 does not come out as the recorded bytes.
    """
    spec = _spec(name)
    contents = spec.builder(seed)
    made = _digest_of_contents(contents)
    if seed == 0 and made != spec.digest:
        raise UsageError(
            f"{name} came out with digest {made} where {spec.digest} is recorded, so results would not "
            "compare with anybody's: install the NumPy and safetensors versions this release was tested with"
        )
    target = directory.expanduser().resolve()
    marker = {"name": name, "seed": seed, "digest": made, "generator": GENERATOR_VERSION}
    try:
        _check_replaceable(target, set(contents))
        if _holds(target, made):
            return BuiltModel(name, target, seed, made, built=False)
        target.parent.mkdir(parents=True, exist_ok=True)
        staged = _beside(target)
        try:
            # Not tempfile.mkdtemp, whose folders nobody else may read: servers may run as another user.
            staged.mkdir()
            for file, content in contents.items():
                (staged / file).write_bytes(content)
            (staged / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
            published = _publish(staged, target, made)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    except OSError as error:
        raise UsageError(f"cannot write {name} to {target}: {error.strerror or error}") from error
    return BuiltModel(name, target, seed, made, built=published)


def resolve(model: str, cache: Path) -> ResolvedModel:
    """Finds out what `model` names: a zoo model, else a folder with config.json, else an id `org/name` or `org/name@commit`.

    A zoo model is built into `cache/<name>-<digest prefix>` if it is not there; several processes may do that
    at once. A folder is taken as it is; it counts as a zoo model's seed 0 only if its digest says so. An id
    is passed on unseen. Raises UsageError for everything else.
    """
    if spec := MODELS.get(model):
        done = build(model, cache / f"{model}-{spec.digest[:_PREFIX_DIGITS]}")
        return ResolvedModel(model, str(done.path), done.digest, spec.modalities, done.built)
    path = Path(model).expanduser()
    if model and path.is_dir():
        if not (path / "config.json").is_file():
            raise UsageError(f"{model} is a folder without config.json: name a folder that holds a model")
        found = digest(path)
        modalities = next((spec.modalities for spec in MODELS.values() if spec.digest == found), None)
        full = path.absolute()
        return ResolvedModel(full.name, str(full), found, modalities, built=False)
    if (match := _HUB_ID.fullmatch(model)) and not path.exists():
        commit = match["commit"]
        return ResolvedModel(
            model, match["id"], f"commit:{commit}" if commit else None, None, built=False, revision=commit
        )
    raise _unknown(
        model, "a model of the zoo, a folder with config.json or a Hugging Face id `org/name` or `org/name@commit`"
    )


def digest(directory: Path) -> str:
    """BLAKE3 of a model folder, 64 hexadecimal digits.

    Hashed is, for every file in the order of its relative name (as UTF-8, with `/` between folders), the line
    `<length of the name> <name> <length of the content>\\n`, all lengths in bytes, and then the content. Left
    out are epd-model.json and everything hidden (a name beginning with a dot), such as a downloader's
    book-keeping. Links are followed. Raises UsageError where there is no file to hash or one cannot be read.
    """
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    try:
        names = _model_files(directory)
        for name in sorted(names, key=str.encode):
            path = directory / name
            hasher.update(_header(name, path.stat().st_size))
            hasher.update_mmap(path)
    except OSError as error:
        raise UsageError(f"cannot read the model in {directory}: {error}") from error
    if not names:
        raise UsageError(f"there is no model in {directory}: name a folder that holds one")
    return str(hasher.hexdigest())


def default_cache() -> Path:
    """The folder in which zoo models are kept, created if need be.

    It is $EPD_CONFORMANCE_CACHE; else $XDG_CACHE_HOME/epd-conformance; else ~/.cache/epd-conformance; and
    where that cannot be written (a container with a read-only home) a private folder of this user under the
    system's temporary folder. Raises UsageError where $EPD_CONFORMANCE_CACHE itself cannot be written, since
    somebody meant it, and where the temporary folder belongs to another user, who could put in models of his
    own.
    """
    if asked := os.environ.get(CACHE_VARIABLE):
        chosen = Path(asked).expanduser().absolute()
        if not _writable(chosen):
            raise UsageError(f"{CACHE_VARIABLE} is {asked}, which cannot be written: name a writable folder")
        return chosen
    base = _user_cache()
    if base and _writable(base / "epd-conformance"):
        return base / "epd-conformance"
    fallback = Path(tempfile.gettempdir(), f"epd-conformance-{os.getuid()}")
    try:
        fallback.mkdir(mode=0o700, exist_ok=True)
        ours = not fallback.is_symlink() and fallback.stat().st_uid == os.getuid()
    except OSError:
        ours = False
    if not ours:
        raise UsageError(f"no cache folder can be written, not even {fallback}: set {CACHE_VARIABLE}")
    return fallback


def _spec(name: str) -> ModelSpec:
    if spec := MODELS.get(name):
        return spec
    raise _unknown(name, "a model of the zoo")


def _unknown(model: str, expected: str) -> UsageError:
    close = difflib.get_close_matches(model, MODELS, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return UsageError(f"{model!r} is not {expected}: {hint}the zoo holds {', '.join(sorted(MODELS))}")


def _header(name: str, size: int) -> bytes:
    encoded = name.encode()
    return b"%d %s %d\n" % (len(encoded), encoded, size)


def _digest_of_contents(contents: dict[str, bytes]) -> str:
    """`digest` of a folder that would hold exactly these files."""
    hasher = blake3.blake3()
    for name in sorted(contents, key=str.encode):
        hasher.update(_header(name, len(contents[name])))
        hasher.update(contents[name])
    return str(hasher.hexdigest())


def _model_files(directory: Path) -> list[str]:
    """Relative names of all files that count for the digest, unsorted."""
    names = []
    for folder, folders, files in os.walk(directory, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        names += [Path(folder, name).relative_to(directory).as_posix() for name in files if not name.startswith(".")]
    return [name for name in names if name != MARKER]


def _check_replaceable(target: Path, files: set[str]) -> None:
    """Raises UsageError unless `target` is absent, empty, or a zoo model with nothing else in it."""
    try:
        names = {entry.name for entry in target.iterdir()}
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise UsageError(f"{target} is not a folder: name a new one for the model") from None
    foreign = sorted(names - files - {MARKER})
    if names and (MARKER not in names or foreign):
        what = f"holds {foreign[0]}" if foreign else f"has no {MARKER}"
        raise UsageError(f"{target} is not a zoo model ({what}): name a new or an empty folder")


def _holds(target: Path, expected: str) -> bool:
    try:
        return (target / MARKER).is_file() and digest(target) == expected
    except UsageError:  # unreadable, empty, or replaced by another process meanwhile: then it has to be made
        return False


def _beside(target: Path) -> Path:
    return target.parent / f".{target.name}.{secrets.token_hex(8)}"


def _publish(staged: Path, target: Path, made: str) -> bool:
    """Renames `staged` to `target`; False where another process put the same model there first."""
    while True:
        try:
            staged.rename(target)  # POSIX: replaces nothing but an empty folder
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return True
        if _holds(target, made):
            return False
        outdated = _beside(target)
        try:
            target.rename(outdated)
        except FileNotFoundError:
            continue  # somebody else moved it away
        shutil.rmtree(outdated, ignore_errors=True)


def _user_cache() -> Path | None:
    """The user's cache folder by the XDG specification, which ignores relative values; None if homeless."""
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if xdg.is_absolute():
        return xdg
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        return None


def _writable(directory: Path) -> bool:
    """Whether a file can be made there; asking for permissions is not enough on a read-only file system."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError:
        return False
