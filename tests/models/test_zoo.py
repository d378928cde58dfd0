"""Building, resolving and identifying models, and where they are kept."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import blake3
import pytest

from epd_conformance.errors import UsageError
from epd_conformance.models import MODELS, build, default_cache, digest, resolve, zoo

NAME = "tiny-qwen2.5-vl"


def tree(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def builder_process(directory: Path, **environment: str) -> subprocess.Popen[bytes]:
    code = "import sys; from pathlib import Path; from epd_conformance.models import resolve;"
    code += f"print(resolve({NAME!r}, Path(sys.argv[1])).built)"
    return subprocess.Popen(
        [sys.executable, "-c", code, str(directory)], env=os.environ | environment, stdout=subprocess.PIPE
    )


def test_seed_0_has_the_recorded_digest(tmp_path: Path) -> None:
    built = build(NAME, tmp_path / "m")
    assert built.digest == digest(built.path) == MODELS[NAME].digest
    assert json.loads((built.path / "epd-model.json").read_text()) == {
        "name": NAME,
        "seed": 0,
        "digest": built.digest,
        "generator": zoo.GENERATOR_VERSION,
    }


def test_another_seed_is_another_model(tmp_path: Path) -> None:
    one, two = build(NAME, tmp_path / "1", seed=1), build(NAME, tmp_path / "2", seed=2)
    assert len({one.digest, two.digest, MODELS[NAME].digest}) == 3
    different = {name for name, content in tree(one.path).items() if content != tree(two.path)[name]}
    assert different == {"model.safetensors", "epd-model.json"}


def test_bytes_do_not_depend_on_threads_or_hash_seed(tmp_path: Path) -> None:
    processes = [
        builder_process(tmp_path / threads, OMP_NUM_THREADS=threads, PYTHONHASHSEED=hash_seed)
        for threads, hash_seed in (("1", "1"), ("4", "99"))
    ]
    assert [process.communicate()[0].strip() for process in processes] == [b"True", b"True"]
    first, second = (tree(next((tmp_path / threads).iterdir())) for threads in ("1", "4"))
    assert first == second
    assert len(first) == len(MODELS[NAME].builder(0)) + 1


def test_a_model_that_does_not_come_out_as_recorded_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, NAME, dataclasses.replace(MODELS[NAME], digest="0" * 64))
    with pytest.raises(UsageError, match="is recorded"):
        build(NAME, tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_the_same_model_is_left_alone_and_another_replaced(tmp_path: Path) -> None:
    first = build(NAME, tmp_path / "m")
    stamp = (first.path / "model.safetensors").stat().st_mtime_ns
    assert (first.built, build(NAME, first.path).built) == (True, False)
    assert (first.path / "model.safetensors").stat().st_mtime_ns == stamp
    replaced = build(NAME, first.path, seed=1)
    assert replaced.built and digest(first.path) == replaced.digest != first.digest


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_damaged_model_is_mended(tmp_path: Path, damage: str) -> None:
    built = build(NAME, tmp_path / "m")
    weights = built.path / "model.safetensors"
    if damage == "truncated":
        os.truncate(weights, 1000)
    else:
        weights.unlink()
    assert build(NAME, built.path).built
    assert digest(built.path) == MODELS[NAME].digest
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    assert build(NAME, tmp_path).built
    assert not list(tmp_path.parent.glob(f".{tmp_path.name}.*"))


def test_foreign_folders_are_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"not a zoo model \(holds notes.txt\)"):
        build(NAME, tmp_path)
    assert tree(tmp_path) == {"notes.txt": b"mine"}


def test_a_model_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"has no epd-model\.json"):
        build(NAME, tmp_path)


def test_a_file_added_to_a_zoo_model_is_never_deleted(tmp_path: Path) -> None:
    built = build(NAME, tmp_path / "m")
    (built.path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"holds notes\.txt"):
        build(NAME, built.path, seed=1)
    assert (built.path / "notes.txt").read_text() == "mine"


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m").write_text("")
    with pytest.raises(UsageError, match=r"m is not a folder"):
        build(NAME, tmp_path / "m")
    with pytest.raises(UsageError, match="below is not a folder"):
        build(NAME, tmp_path / "m" / "below")


def test_a_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(self: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    with pytest.raises(UsageError, match="No space left"):
        build(NAME, tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_two_processes_build_one_model(tmp_path: Path) -> None:
    processes = [builder_process(tmp_path) for _ in range(4)]
    said = [process.communicate()[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    assert sorted(said) == [b"False"] * 3 + [b"True"]
    assert [path.name for path in tmp_path.iterdir()] == [f"{NAME}-{MODELS[NAME].digest[:12]}"]


@pytest.mark.parametrize("found", [0, 1], ids=["same-model", "another-model"])
def test_a_builder_that_comes_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: int) -> None:
    """The other process finishes between the look at the folder and the renaming."""
    target = tmp_path / "m"
    real_beside = zoo._beside

    def other_first(path: Path) -> Path:
        monkeypatch.setattr(zoo, "_beside", real_beside)
        build(NAME, path, seed=found)
        return real_beside(path)

    monkeypatch.setattr(zoo, "_beside", other_first)
    assert build(NAME, target).built is (found == 1)
    assert digest(target) == MODELS[NAME].digest
    assert list(tmp_path.iterdir()) == [target]


def test_resolve_builds_a_zoo_model_once(tmp_path: Path) -> None:
    first, second = resolve(NAME, tmp_path / "cache"), resolve(NAME, tmp_path / "cache")
    assert (first.built, second.built) == (True, False)
    assert first.path_or_id == second.path_or_id == str(tmp_path / "cache" / f"{NAME}-{first.digest[:12]}")  # type: ignore[index]
    assert (first.digest, first.modalities) == (MODELS[NAME].digest, ("image", "video"))


def test_resolve_takes_a_folder_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "mine").mkdir(parents=True)
    (tmp_path / "org" / "mine" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    found = resolve("org/mine", tmp_path / "cache")  # also where it looks like a Hugging Face id
    assert found.path_or_id == str(tmp_path / "org" / "mine")
    assert (found.digest, found.modalities, found.built) == (digest(Path("org/mine")), None, False)
    assert not (tmp_path / "cache").exists()


def test_a_folder_counts_as_the_zoo_s_only_by_its_digest(tmp_path: Path) -> None:
    seed_0, seed_1 = build(NAME, tmp_path / "0"), build(NAME, tmp_path / "1", seed=1)
    assert resolve(str(seed_0.path), tmp_path).modalities == ("image", "video")
    (seed_1.path / "epd-model.json").write_bytes((seed_0.path / "epd-model.json").read_bytes())
    assert resolve(str(seed_1.path), tmp_path).modalities is None


def test_resolve_passes_a_hub_id_on(tmp_path: Path) -> None:
    found = resolve("Qwen/Qwen2.5-VL-3B-Instruct", tmp_path)
    assert (found.path_or_id, found.digest) == ("Qwen/Qwen2.5-VL-3B-Instruct", None)


def test_resolve_takes_a_commit_for_the_digest_of_a_hub_id(tmp_path: Path) -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    found = resolve(f"Qwen/Qwen2.5-VL-3B-Instruct@{commit}", tmp_path)
    assert (found.path_or_id, found.revision) == ("Qwen/Qwen2.5-VL-3B-Instruct", commit)
    assert found.digest == f"commit:{commit}"


@pytest.mark.parametrize(
    "model",
    ["org/name@main", "org/name@0123", "", "nonsense", "a/b/c", "/no/such/folder", "./x", "org/", "../x", "ö/x"],
)
def test_resolve_refuses_the_rest_and_lists_the_zoo(tmp_path: Path, model: str) -> None:
    with pytest.raises(UsageError, match=r"the zoo holds tiny-qwen2\.5-vl") as caught:
        resolve(model, tmp_path)
    assert repr(model) in str(caught.value) and "did you mean" not in str(caught.value)


@pytest.mark.parametrize("ask", [lambda n, d: resolve(n, d), lambda n, d: build(n, d / "m")])
def test_a_slip_of_the_pen_is_pointed_out(tmp_path: Path, ask: Callable[[str, Path], object]) -> None:
    with pytest.raises(UsageError, match=r"did you mean tiny-qwen2\.5-vl\?"):
        ask("tiny-qwen2-vl", tmp_path)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"without config\.json"):
        resolve(str(tmp_path), tmp_path)


def test_digest_is_what_its_documentation_says(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b").write_bytes(b"BB")
    (tmp_path / "a").write_bytes(b"A")
    expected = blake3.blake3(b"1 a 1\nA" + b"5 sub/b 2\nBB").hexdigest()
    assert digest(tmp_path) == expected
    (tmp_path / "epd-model.json").write_text("{}")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "lock").write_text("x")
    (tmp_path / ".gitattributes").write_text("x")
    assert digest(tmp_path) == expected


def test_every_change_changes_the_digest(tmp_path: Path) -> None:
    def folder(name: str, files: dict[str, bytes]) -> str:
        for file, content in files.items():
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / file).write_bytes(content)
        return digest(tmp_path / name)

    digests = [
        folder("base", {"a": b"xy", "b": b"z"}),
        folder("content", {"a": b"xz", "b": b"z"}),
        folder("renamed", {"a": b"xy", "c": b"z"}),
        folder("moved", {"a": b"x", "b": b"yz"}),
        folder("added", {"a": b"xy", "b": b"z", "c": b""}),
        folder("joined", {"a": b"xy1 b 1\nz"}),
    ]
    assert len(set(digests)) == len(digests)


def test_digest_follows_links(tmp_path: Path) -> None:
    (tmp_path / "plain" / "folder").mkdir(parents=True)
    (tmp_path / "plain" / "a").write_bytes(b"A")
    (tmp_path / "plain" / "folder" / "b").write_bytes(b"B")
    (tmp_path / "linked").mkdir()
    for name in ("a", "folder"):
        (tmp_path / "linked" / name).symlink_to(tmp_path / "plain" / name)
    assert digest(tmp_path / "linked") == digest(tmp_path / "plain")


def test_digest_refuses_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no model in"):
        digest(tmp_path / "absent")
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(UsageError, match="cannot read"):
        digest(tmp_path)


@pytest.fixture
def homeless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user whose home cannot be written, not even by root, since it is below a file."""
    (tmp_path / "file").write_text("")
    (tmp_path / "tmp").mkdir()
    monkeypatch.delenv("EPD_CONFORMANCE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "file" / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path


def test_cache_in_the_order_of_precedence(homeless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fallback = homeless / "tmp" / f"epd-conformance-{os.getuid()}"
    assert default_cache() == default_cache() == fallback
    assert fallback.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("HOME", str(homeless / "home"))
    assert default_cache() == homeless / "home" / ".cache" / "epd-conformance"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_cache() == homeless / "home" / ".cache" / "epd-conformance"
    monkeypatch.setenv("XDG_CACHE_HOME", str(homeless / "xdg"))
    assert default_cache() == homeless / "xdg" / "epd-conformance"
    monkeypatch.setenv("EPD_CONFORMANCE_CACHE", str(homeless / "own"))
    assert default_cache() == homeless / "own"
    assert (homeless / "own").is_dir()


def test_no_home_at_all(homeless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert default_cache().parent == homeless / "tmp"


def test_read_only_file_system(homeless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder exists and nothing can be written into it, as in a container with a read-only root."""
    (homeless / "xdg" / "epd-conformance").mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(homeless / "xdg"))
    real = tempfile.TemporaryFile

    def refuse(*, dir: Path) -> object:
        if dir == homeless / "xdg" / "epd-conformance":
            raise OSError(30, "Read-only file system")
        return real(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    assert default_cache().parent == homeless / "tmp"


def test_an_explicit_cache_that_cannot_be_written_is_an_error(homeless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPD_CONFORMANCE_CACHE", str(homeless / "file" / "cache"))
    with pytest.raises(UsageError, match=r"EPD_CONFORMANCE_CACHE is .*cannot be written"):
        default_cache()


def test_a_planted_fallback_is_refused(homeless: Path) -> None:
    (homeless / "elsewhere").mkdir()
    (homeless / "tmp" / f"epd-conformance-{os.getuid()}").symlink_to(homeless / "elsewhere")
    with pytest.raises(UsageError, match="set EPD_CONFORMANCE_CACHE"):
        default_cache()
