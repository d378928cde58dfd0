"""An installation knows whether its files are the released ones; a checkout does not, and says so."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from epd_conformance import release


def tree(root: Path, wheel: bool) -> tuple[Path, Path]:
    """A small package and its suites, as they lie in a checkout or in a wheel; returns both folders."""
    package = root / "epd_conformance"
    beside = package if wheel else root
    for path, text in (
        (package / "run.py", "run = 1\n"),
        (package / "catalogue" / "tok.toml", "a = 1\n"),
        (package / "live" / "suites.py", "a module of the package, not the suites\n"),
        (package / "report" / "schema.json", "{}\n"),
        (beside / "suites" / "live" / "test_tokens.py", "def test(): ...\n"),
        (beside / "fixtures" / "known.toml", "b = 1\n"),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return package, beside / "suites"


def test_a_wheel_has_the_digest_of_its_checkout(tmp_path: Path) -> None:
    checkout = release.digest(*tree(tmp_path / "checkout", wheel=False))
    assert checkout == release.digest(*tree(tmp_path / "wheel", wheel=True))
    assert checkout.startswith("sha256:") and len(checkout) == 71


@pytest.mark.parametrize("wheel", [True, False])
@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (lambda package, suites: (package / "run.py").write_text("run = 2\n"), True),
        (lambda package, suites: (package / "catalogue" / "tok.toml").unlink(), True),
        (lambda package, suites: (package / "live" / "suites.py").write_text(""), True),
        (lambda package, suites: (suites / "live" / "test_tokens.py").write_text(""), True),
        (lambda package, suites: (suites / "live" / "test_more.py").touch(), True),
        (lambda package, suites: (suites / "live").rename(suites / "other"), True),
        (lambda package, suites: (suites.parent / "fixtures" / "known.toml").write_text("c = 1\n"), False),
        (lambda package, suites: (package / "run.pyc").touch(), False),
    ],
)
def test_what_the_digest_sees(tmp_path: Path, change: Callable[[Path, Path], object], seen: bool, wheel: bool) -> None:
    package, suites = tree(tmp_path, wheel)
    before = release.digest(package, suites)
    change(package, suites)
    assert (release.digest(package, suites) != before) is seen


def test_modified(tmp_path: Path) -> None:
    package, suites = tree(tmp_path, wheel=True)
    now = release.digest(package, suites)
    assert release.modified(package, now) is None, "nothing says what was released"
    (package / release.DIGEST_NAME).write_text(now + "\n")
    assert release.modified(package, now) is False
    assert release.digest(package, suites) == now, "the file does not change what it is about"
    shutil.copy(package / "run.py", package / "another.py")
    assert release.modified(package, release.digest(package, suites)) is True
