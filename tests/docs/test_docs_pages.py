"""The pages for people stay true: what they quote stands in the code, and the README leads to every one of them."""

from __future__ import annotations

import ast
import re
import string
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "epd_conformance"
TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"
README = ROOT / "README.md"

# Stands, on the page and in what is read from the code, for whatever a sentence is filled with.
GAP = "…"

# Verdicts that a cell shows as `verdict: reason`: only the reason is a text of its own in the code.
VERDICTS = ("error", "inconclusive")


def templates(source: str) -> list[str]:
    """The texts of a Python file, with a gap for whatever is filled in by an f-string or by `format`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else GAP for part in node.values]
            found.append("".join(str(part) for part in parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
            try:
                fields = list(string.Formatter().parse(node.value))
            except ValueError:
                continue
            found.append("".join(text + (GAP if name is not None else "") for text, name, _, _ in fields))
    return found


@cache
def said() -> tuple[str, ...]:
    """Everything that the package and the set-up can say."""
    code = [text for path in sorted(PACKAGE.rglob("*.py")) for text in templates(path.read_text(encoding="utf-8"))]
    return (*code, (ROOT / "scripts" / "setup").read_text(encoding="utf-8"))


def stands_in(quoted: str, texts: tuple[str, ...]) -> bool:
    """Whether one of the texts holds all parts of a quotation, in their order."""
    verdict, _, reason = quoted.partition(": ")
    if verdict in VERDICTS:
        return reason in texts
    pattern = re.compile(".*".join(re.escape(part) for part in quoted.split(GAP) if part.strip()), re.DOTALL)
    return any(pattern.search(text) for text in texts)


def headings() -> list[str]:
    """The quotations that are headings of the page."""
    return re.findall(r"^### `(.+)`$", TROUBLESHOOTING.read_text(encoding="utf-8"), re.MULTILINE)


def reasons() -> list[str]:
    """The reasons of `could-not-run`, in the table below its heading."""
    _, below = TROUBLESHOOTING.read_text(encoding="utf-8").split("### `could-not-run`")
    return re.findall(r"^\| `(.+?)` \|", below, re.MULTILINE)


def test_every_quoted_text_stands_in_the_code() -> None:
    assert [quoted for quoted in headings() if not stands_in(quoted, said())] == []
    assert [reason for reason in reasons() if reason not in said()] == []
    assert len(headings()) > 50 and len(reasons()) == 4, "the page has another form: these tests look at nothing"


@pytest.mark.parametrize(
    "quoted",
    [
        "vLLM is not installed at …",  # another word
        "port … is taken by another program: stop it or choose another harbour",  # another end
        "no free port above … and …: stop what listens there",  # another word between two gaps
        "inconclusive: locally-encoded",
    ],
)
def test_a_text_that_nobody_says_is_found(quoted: str) -> None:
    assert not stands_in(quoted, said())


def test_every_page_is_reached_from_the_readme() -> None:
    linked = set(re.findall(r"\]\((?:docs/)?([\w-]+\.md)[)#]", README.read_text(encoding="utf-8")))
    pages = {page.name for page in (ROOT / "docs").glob("*.md")}
    assert pages - linked == set()


def anchors(page: Path) -> set[str]:
    """What the headings of a page are called in a link, as GitHub calls them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path, text: str) -> list[str]:
    """The links of a page to files that are not there, or to headings that their page does not have."""
    broken = []
    for link in re.findall(r"\]\(([^()\s]+)\)", re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(f"{page.name}: {link}")
    return broken


def test_every_link_leads_somewhere() -> None:
    pages = [*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")]
    assert [link for page in pages for link in broken_links(page, page.read_text(encoding="utf-8"))] == []


def test_a_link_to_nowhere_is_found() -> None:
    text = (
        "[a](docs/cli.md#run) [b](docs/cli.md#nothing) [c](docs/gone.md) `[d](docs/code.md)` [e](https://example.com)"
    )
    assert broken_links(README, text) == ["README.md: docs/cli.md#nothing", "README.md: docs/gone.md"]
