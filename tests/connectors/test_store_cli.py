"""`epd-conformance store`: what it prints, deletes and refuses."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from epd_conformance.connectors.object_format import Header, object_name, publish, repack
from epd_conformance.errors import UsageError
from epd_conformance.store_cli import app, parse_age, parse_size

MODELS = ["ab" * 32, "cd" * 32]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number, key in enumerate(["../evil", "nul\0", "lora:ab", "plain"]):
        header = Header(key, MODELS[number % 2], "float32", 1, 256, "", "test", "2026-01-01T00:00:00.000+00:00")
        path = publish(tmp_path, key, repack(header, bytes(1024)))
        moment = time.time() - 100 * (number + 1)
        os.utime(path, (moment, moment))
    return tmp_path


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(result.exception, UsageError):
        raise result.exception
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_ls_names_every_object_and_sums_up_models(root: Path) -> None:
    bad = root / object_name("bad")
    bad.parent.mkdir(parents=True, exist_ok=True)
    bad.write_bytes(b"garbage" * 10)
    code, text = run("ls", root)
    assert code == 0
    assert "'../evil'" in text
    assert "'nul\\x00'" in text
    assert f"{MODELS[0]}: 2 objects" in text
    document = json.loads(run("ls", root, "--json")[1])
    assert {row.get("key") for row in document["objects"]} == {"../evil", "nul\0", "lora:ab", "plain", None}
    assert [row["error"] for row in document["objects"] if "error" in row] == ["truncated"]


def test_verify_finds_and_quarantines_damage(root: Path) -> None:
    assert run("verify", root) == (0, "4 good, 0 bad\n")
    path = root / object_name("plain")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    code, text = run("verify", root)
    assert code == 1
    assert "checksum" in text
    assert "3 good, 1 bad" in text
    code, text = run("verify", root, "--quarantine", "--json")
    assert code == 1
    assert ".checksum." in json.loads(text)["bad"][0]["quarantine"]
    assert run("verify", root) == (0, "3 good, 0 bad\n")
    assert "in quarantine: 1 files" in run("ls", root)[1]


def test_gc_by_age_and_by_size(root: Path) -> None:
    assert "would delete 2 objects" in run("gc", root, "--max-age", "250s", "--dry-run")[1]
    assert "deleted 2 objects" in run("gc", root, "--max-age", "250s")[1]
    assert json.loads(run("gc", root, "--max-bytes", "0", "--json")[1])["keptObjects"] == 0


def test_purge_by_model(root: Path) -> None:
    assert "would delete 2 objects" in run("purge", root, "--model", MODELS[0][:8], "--dry-run")[1]
    assert "deleted 2 objects" in run("purge", root, "--keep-model", MODELS[0])[1]
    assert "deleted 0 objects" in run("purge", root, "--model", MODELS[1])[1]
    assert "deleted 2 objects" in run("purge", root, "--all")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ls", "/nowhere/at/all"], "there is no store at /nowhere/at/all"),
        (["gc", "."], "give --max-bytes or --max-age"),
        (["gc", ".", "--max-bytes", "many"], "'many' is no size"),
        (["gc", ".", "--max-age", "7"], "'7' is no time"),
        (["purge", "."], "say what to delete"),
        (["purge", ".", "--all", "--model", "abcdefab"], "say what to delete"),
        (["purge", ".", "--model", "abc"], "no model fingerprint"),
    ],
)
def test_bad_usage_is_one_sentence(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(*arguments)


def test_sizes_and_ages() -> None:
    assert [parse_size(text) for text in ("1000", "1.5kB", "2GiB", "3T")] == [1000, 1500, 2 << 30, 3 * 10**12]
    assert [parse_age(text) for text in ("45s", "30m", "12h", "7d", "2w")] == [45, 1800, 43200, 604800, 1209600]
