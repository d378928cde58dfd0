"""Writers and readers of one key in several processes, and writers killed at any moment."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: objects hold torch tensors")

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
                header, tensor, _ = of.load(root, Expectation(KEY, FINGERPRINT, rows=64, dtype="float32", width=1024))
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


def test_a_killed_writer_never_leaves_a_wrong_object(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    objects = [object_bytes(seed, rows=2048, width=1024) for seed in range(2)]  # 8 MiB each
    files = [tmp_path / f"{seed}.object" for seed in range(2)]
    for file, (data, _) in zip(files, objects, strict=True):
        file.write_bytes(data)
    expect = Expectation(KEY, FINGERPRINT, rows=2048, dtype="float32", width=1024)
    moments = random.Random(1)
    torn = 0
    for _ in range(20):
        process = writer(WRITER, root, 10_000_000, files)
        start(process)
        time.sleep(moments.uniform(0.0, 0.03))
        os.kill(process.pid, signal.SIGKILL)
        stop(process)
        leftovers = list(root.rglob("*.tmp"))
        torn += sum(path.stat().st_size < len(objects[0][0]) for path in leftovers)
        for path in leftovers:
            path.unlink()
        try:
            header, tensor, _ = of.load(root, expect)
        except ObjectError as error:
            assert error.reason is Reason.MISSING
            continue
        assert torch.equal(tensor, objects[int(header.creator.removeprefix("seed "))][1])
    assert torn, "no writer was killed while it wrote: nothing was tested"
    of.publish(root, KEY, objects[0][0])  # the key is still usable
    assert torch.equal(of.load(root, expect)[1], objects[0][1])
