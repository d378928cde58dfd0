"""The file itself: nothing of a run becomes markup, nothing is fetched, and it stays below its size."""

from __future__ import annotations

import base64
import hashlib
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jinja2
import pytest
import requests
from made_page import DAMAGED, HOSTILE, TOKENS

from epd_conformance import cli, serve_page
from epd_conformance.report.html import Page, render, write
from epd_conformance.report.html.page import build
from epd_conformance.report.html.write import LIMIT

VOID = {"meta", "img", "br", "input", "link"}


class Parsed(HTMLParser):
    """Every tag with its attributes, and the text that a reader sees without opening anything."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.content: dict[str, list[str]] = {}
        self.seen = ""
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._open:
            self.content.setdefault(self._open[-1], []).append(data)
        if not {"details", "script", "style", "title"} & set(self._open):
            self.seen += data


def problems(text: str) -> Iterator[str]:
    """What a hostile run could have brought onto the page."""
    parsed = Parsed(text)
    names = [tag for tag, _ in parsed.tags]
    if names.count("script") != 1 or names.count("style") != 1:
        yield "another script or style"
    for tag, attributes in parsed.tags:
        for name, value in attributes.items():
            if name.startswith("on") or name == "style":
                yield f"{tag} {name}"
            if name in ("src", "href", "action", "data") and not (value or "").startswith(
                ("data:image/png;base64,", "#")
            ):
                yield f"{tag} {name}={value}"


@pytest.fixture(scope="module")
def hostile(page: Page) -> Page:
    """A run whose subject, warnings, cells and evidence are full of markup."""
    report = page.report
    subject = report.subject.model_copy(update={"name": HOSTILE, "features": (HOSTILE,)})
    environment = report.environment.model_copy(update={"vllm_version": HOSTILE, "devices": (HOSTILE,)})
    requirements = tuple(
        item.model_copy(
            update={
                "cells": tuple(
                    cell.model_copy(
                        update={
                            "observed": HOSTILE,
                            "case": HOSTILE,
                            "reason": HOSTILE,
                            "message": HOSTILE,
                            "reproduce": HOSTILE,
                        }
                    )
                    for cell in item.cells
                )
            }
        )
        for item in report.requirements
    )
    report = report.model_copy(
        update={"subject": subject, "environment": environment, "requirements": requirements, "warnings": (HOSTILE,)}
    )
    evidences = {view.record.id: view.shown.cell.to_json() for view in page.cells if view.shown.cell is not None}
    for data in evidences.values():
        data["answers"] = [{**answer, "label": HOSTILE, "error": HOSTILE} for answer in data["answers"]]
        data["during"] = [{**event, "server": HOSTILE} for event in data["during"]]
    return build(report, evidences, {"logs/e-pd.prefill_decode-0.log": [HOSTILE]})


def test_nothing_of_a_run_becomes_markup(hostile: Page) -> None:
    text = render(hostile)
    assert list(problems(text)) == []
    assert Parsed(text).seen.count(HOSTILE) > 3, "it is shown as the text that it is"


def test_the_check_would_see_an_escape_that_is_missing(hostile: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = jinja2.Environment

    def trusting(**options: Any) -> jinja2.Environment:
        return whole(**{**options, "autoescape": False})

    monkeypatch.setattr(jinja2, "Environment", trusting)
    monkeypatch.setattr(write, "_template", write._template.__wrapped__)
    assert "another script or style" in set(problems(render(hostile)))


def test_only_its_own_style_and_script_are_allowed(text: str) -> None:
    parsed = Parsed(text)
    policy = next(a["content"] for t, a in parsed.tags if a.get("http-equiv") == "Content-Security-Policy") or ""
    assert policy.startswith("default-src 'none';")
    for tag in ("style", "script"):
        digest = base64.b64encode(hashlib.sha256("".join(parsed.content[tag]).encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy and "http" not in policy


def test_the_summary_is_there_without_scripts(page: Page, text: str) -> None:
    """Outcome, counts, what is not verified and the whole matrix stand in the document itself."""
    seen = " ".join(Parsed(text).seen.split())
    assert "nonconformant" in seen and page.headline in seen
    assert f"{page.report.summary['executed']} of {page.report.summary['expected']} expected cells ran" in seen
    for item in page.report.requirements:
        assert item.id in seen
    links = [a["href"] for t, a in Parsed(text).tags if t == "a" and "square" in (a.get("class") or "")]
    places = {a["id"] for _, a in Parsed(text).tags if a.get("id")}
    # Each cell in the matrix, those with a fault once more, and each leads somewhere.
    assert len(links) == len(page.cells) + sum(len(c) for row in page.fault_rows for c in row.cells.values())
    assert {link[1:] for link in links if link} <= places


def test_passes_lose_their_details_first_and_the_page_says_so(page: Page, text: str) -> None:
    whole = len(text.encode())
    assert whole < LIMIT
    assert "To stay below" not in text
    smaller = render(page, whole - 1)
    assert len(smaller.encode()) < whole
    assert "cells that pass are shown without their details" in smaller
    assert smaller.count("first divergence") == text.count("first divergence") > 0
    assert smaller.count('class="timeline"') == sum(
        view.shown.timeline is not None for view in page.cells if not view.passed
    )
    barest = render(page, 1)
    assert "every cell is shown without its details" in barest
    assert TOKENS in barest and f"what {TOKENS} expects" in barest


def test_the_verb_writes_the_page(
    failing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(*words: object) -> int:
        monkeypatch.setattr("sys.argv", ["epd-conformance", "render", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert isinstance(ended.value.code, int)
        return ended.value.code

    out = tmp_path / "page.html"
    assert call(failing, "--out", out) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert DAMAGED in out.read_text()
    assert list(tmp_path.iterdir()) == [out], "nothing is left beside it"
    for words, said in (
        ((tmp_path,), "give the directory of a run"),
        ((failing, "--out", tmp_path / "none" / "page.html"), "choose another place with --out"),
        ((failing, "--history", tmp_path), "give the directory of a run"),
    ):
        assert call(*words) == 2
        error = capsys.readouterr().err
        assert said in error and len(error.strip().splitlines()) == 1


def test_a_page_with_half_a_character_can_be_written(page: Page, tmp_path: Path) -> None:
    """A hostile uuid may hold half a surrogate pair, which is no text in a file."""
    write.save(tmp_path / "page.html", write.render(replace(page, headline="before \ud800 after")))
    assert "before ? after" in (tmp_path / "page.html").read_text()


def test_only_the_page_is_served(failing: Path) -> None:
    said: list[str] = []
    threading.Thread(target=serve_page.serve, args=("<p>the page", said.append, lambda _: None), daemon=True).start()
    while not said:
        time.sleep(0.01)
    found = re.search(r"http://127\.0\.0\.1:\d+/", said[0])
    assert found is not None
    assert requests.get(found[0], timeout=30).text == "<p>the page"
    assert requests.get(f"{found[0]}report.json", timeout=30).status_code == 404
