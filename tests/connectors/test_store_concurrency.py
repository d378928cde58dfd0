"""Writers and readers of one key in several processes, and writers killed at any moment."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: objects hold torch tensors")

from stored_objects import load  # noqa: E402

from epd_conformance.connectors import object_format as of  # noqa: E402
from epd_conformance.connectors.object_format import Expectation, Header, ObjectError, Reason  # noqa: E402

FINGERPRINT = "ab" * 32
KEY = "shared/key"

# The writers run without torch, which takes seconds to import: they publish bytes that were encoded before.
WRITER = """
import sys
from pathlib import Path
from epd_conformance.connectors.object_format import publish
root, count, *files = sys.argv[1:]
objects = [Path(name).read_bytes() for name in files]
print("ready", flush=True)
sys.stdin.readline()
for turn in range(int(count)):
    publish(Path(root), "shared/key", objects[turn % len(objects)])
"""

# What must not be done: the final name, written in place. Shows that the tests below would notice.
IN_PLACE_WRITER = WRITER.replace(
    'publish(Path(root), "shared/key", objects[turn % len(objects)])',
    'path = Path(root, object_name("shared/key")); path.parent.mkdir(parents=True, exist_ok=True); '
    "path.write_bytes(objects[turn % len(objects)])",
).replace("import publish", "import object_name")


def object_bytes(seed: int, rows: int, width: int) -> tuple[bytes, torch.Tensor]:
    tensor = torch.rand(rows, width, generator=torch.Generator().manual_seed(seed))
    header = Header.of(tensor, key=KEY, model_fingerprint=FINGERPRINT, creator=f"seed {seed}")
    return of.encode(tensor, header), tensor


def writer(script: str, root: Path, count: int, files: list[Path]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(root), str(count), *map(str, files)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def start(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.close()


def stop(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def race(script: str, tmp_path: Path) -> tuple[set[int], set[Reason]]:
    """Several writers, one reader: which writers' objects were read, and why reads failed."""
    root = tmp_path / "root"
    root.mkdir()
    objects = [object_bytes(seed, rows=64, width=1024) for seed in range(3)]
    files = [tmp_path / f"{seed}.object" for seed in range(3)]
    for file, (data, _) in zip(files, objects, strict=True):
        file.write_bytes(data)
    # Each writer begins with another object.
    writers = [writer(script, root, 10_000_000, files[seed:] + files[:seed]) for seed in range(3)]
    seen: set[int] = set()
    failures: set[Reason] = set()
    try:
        for process in writers:
            start(process)
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            try:
                header, tensor = load(root, Expectation(KEY, FINGERPRINT, rows=64, dtype="float32"))
            except ObjectError as error:
                failures.add(error.reason)
                continue
            seed = int(header.creator.removeprefix("seed "))
            assert torch.equal(tensor, objects[seed][1])
            seen.add(seed)
        assert all(process.poll() is None for process in writers)
    finally:
        for process in writers:
            stop(process)
    return seen, failures


def test_readers_see_whole_objects_or_none(tmp_path: Path) -> None:
    seen, failures = race(WRITER, tmp_path)
    assert len(seen) > 1
    assert failures <= {Reason.MISSING}


def test_writing_in_place_would_be_seen(tmp_path: Path) -> None:
    _, failures = race(IN_PLACE_WRITER, tmp_path)
    assert failures & {Reason.TRUNCATED, Reason.CHECKSUM}


# Forks a writer, kills it after so many seconds, waits for its end and says so: starting Python anew for each of
# 200 kills would take most of the test's time.
KILLER = """
import os, signal, sys, time
from pathlib import Path
from epd_conformance.connectors.object_format import object_name, publish
root, count, *files = sys.argv[1:]
objects = [Path(name).read_bytes() for name in files]
print("ready", flush=True)
sys.stdin.readline()
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        for turn in range(int(count)):
            publish(Path(root), "shared/key", objects[turn % len(objects)])
    time.sleep(float(line))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    print("killed", flush=True)
"""

IN_PLACE_KILLER = KILLER.replace(
    'publish(Path(root), "shared/key", objects[turn % len(objects)])',
    'path = Path(root, object_name("shared/key")); path.parent.mkdir(parents=True, exist_ok=True); '
    "path.write_bytes(objects[turn % len(objects)])",
)


def kill_writers(script: str, tmp_path: Path, moments: int) -> tuple[int, Counter[str], set[int]]:
    """Kill a writer of 8 MiB objects at random moments of its work.

    Returns:
        How many writers were killed in the middle of a file; what was found under the key afterwards, each time: a
        whole object or the reason of its refusal; after which kills the key took no other object.
    """
    root = tmp_path / "root"
    root.mkdir()
    objects = [object_bytes(seed, rows=2048, width=1024) for seed in range(2)]
    files = [tmp_path / f"{seed}.object" for seed in range(2)]
    for file, (data, _) in zip(files, objects, strict=True):
        file.write_bytes(data)
    expect = Expectation(KEY, FINGERPRINT, rows=2048, dtype="float32")
    third, third_tensor = object_bytes(2, rows=4, width=1024)
    rng = random.Random(1)
    torn = 0
    found: Counter[str] = Counter()
    unusable: set[int] = set()
    process = writer(script, root, 10_000_000, files)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("go\n")
    try:
        for number in range(moments):
            process.stdin.write(f"{rng.uniform(0.0, 0.025)}\n")
            process.stdin.flush()
            assert process.stdout.readline() == "killed\n"
            for path in root.rglob("*.tmp"):
                torn += path.stat().st_size < len(objects[0][0])
                path.unlink()
            try:
                header, tensor = load(root, expect)
            except ObjectError as error:
                found[str(error.reason)] += 1
            else:
                right = torch.equal(tensor, objects[int(header.creator.removeprefix("seed "))][1])
                found["whole" if right else "wrong"] += 1
            of.publish(root, KEY, third)
            if not torch.equal(load(root, Expectation(KEY, FINGERPRINT, rows=4))[1], third_tensor):
                unusable.add(number)
    finally:
        stop(process)
    return torn, found, unusable


def test_a_killed_writer_never_leaves_a_wrong_object(tmp_path: Path) -> None:
    torn, found, unusable = kill_writers(KILLER, tmp_path, 200)
    assert sum(found.values()) == 200
    # `rows`: the writer was killed before its first object had its name, so the third one was still there.
    assert set(found) <= {"whole", "missing", "rows"}, found
    assert found["whole"] > 20, found
    assert torn > 20, "hardly any writer was killed while it wrote"
    assert not unusable


def test_killing_a_writer_in_place_would_be_seen(tmp_path: Path) -> None:
    _, found, _ = kill_writers(IN_PLACE_KILLER, tmp_path, 20)
    assert found["truncated"] or found["checksum"], found
