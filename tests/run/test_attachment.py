"""The attachment file: what is refused in one sentence, and which cells an attachment can carry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from epd_conformance import attachment as attachments
from epd_conformance.attachment import Given, Need
from epd_conformance.errors import UsageError
from epd_conformance.features import Feature
from epd_conformance.oracle.judges import JUDGES
from epd_conformance.verdict import Verdict

GOOD: dict[str, Any] = {
    "topology": "e-pd",
    "model": "m",
    "environment_class": "cuda",
    "baseline": "http://h:1",
    "encode": ["http://h:2"],
    "decode": ["http://h:3/"],
}
E_P_D = {"topology": "e-p-d", "prefill": ["http://h:4"], "baseline_pd": "http://h:5"}

# They lay files beside the store, restart servers, and hold one at a point that only servers of the harness have.
OWN_SERVERS = {"confined", "scripted", "in-window"}


def write(folder: Path, **changes: Any) -> Path:
    table = {key: value for key, value in {**GOOD, **changes}.items() if value is not None}
    path = folder / "urls.toml"
    subject = table.pop("subject", {})
    lines = [f"{key} = {json.dumps(value)}" for key, value in table.items()]
    lines += ["[subject]", *(f"{key} = {json.dumps(value)}" for key, value in subject.items())] if subject else []
    path.write_text("\n".join(lines) + "\n")
    return path


def test_servers_are_named_as_their_journals_are(tmp_path: Path) -> None:
    found = attachments.load(write(tmp_path))
    assert found.urls() == {"encode-0": "http://h:2", "prefill_decode-0": "http://h:3"}
    found = attachments.load(
        write(tmp_path, topology="2e-1pd", encode=["http://h:2", "http://h:6"], proxy="http://h:7")
    )
    assert found.urls() == {"encode-0": "http://h:2", "encode-1": "http://h:6", "prefill_decode-0": "http://h:3"}
    found = attachments.load(write(tmp_path, **E_P_D))
    assert list(found.urls()) == ["encode-0", "prefill-0", "decode-0"]
    found = attachments.load(write(tmp_path, topology="aggregated", encode=None))
    assert found.urls() == {"aggregated-0": "http://h:3"}


def test_a_proxy_alone_is_enough(tmp_path: Path) -> None:
    found = attachments.load(write(tmp_path, encode=None, decode=None, proxy="http://h:7"))
    assert found.urls() == {}
    assert not found.direct


def test_folders_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "j").mkdir()
    assert attachments.load(write(tmp_path, journal="j")).journal == tmp_path / "j"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"encodee": ["http://h:2"]}, "`encodee`: no such key"),
        ({"topology": "e-x"}, "no topology"),
        ({"topology": "p-d"}, "no encode server"),
        ({"environment_class": "tpu"}, "environment_class"),
        ({"baseline": None}, "`baseline`"),
        ({"baseline": "h:1"}, "no server address"),
        ({"baseline": "http://me:secret@h:1"}, "credentials"),
        ({"encode": []}, "wants 1 in `encode`, and the list has 0"),
        ({"prefill": ["http://h:4"]}, "wants 0 in `prefill`, and the list has 1"),
        ({"topology": "2e-1pd"}, "wants 2 in `encode`"),
        ({**E_P_D, "baseline_pd": None}, "add `baseline_pd`"),
        ({"baseline_pd": "http://h:5"}, "leave out `baseline_pd`"),
        ({"topology": "aggregated", "encode": None, "proxy": "http://h:7"}, "no proxy"),
        ({"journal": "nowhere"}, "no folder"),
        ({"store": ".", "subject": {"organization": "o", "project": "p", "version": "1"}}, "no probe"),
    ],
)
def test_what_does_not_fit_is_one_sentence(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        attachments.load(write(tmp_path, **changes))
    text = str(refused.value)
    assert words in text
    assert "\n" not in text
    assert "urls.toml" in text
    assert "secret" not in text


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        attachments.load(tmp_path / "no.toml")
    (tmp_path / "bad.toml").write_text("topology = e-pd")
    with pytest.raises(UsageError, match="is not TOML"):
        attachments.load(tmp_path / "bad.toml")


def test_the_subject_table(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_text(
        path.read_text() + '[subject]\norganization="o"\nproject="p"\nversion="1"\nfeatures=["store_probe"]'
    )
    described = attachments.load(path).subject
    assert described is not None
    subject = attachments.AttachedSubject(described)
    assert subject.implementation.project == "p"
    assert subject.features == {Feature.STORE_PROBE}
    path.write_text(path.read_text().replace("store_probe", "store_prob"))
    with pytest.raises(UsageError, match="features"):
        attachments.load(path)


ALL = frozenset(Need)
# Those that pass without a journal, and those that a journal alone cannot make possible.
FREE = {"text-only", "stage-error"}


def test_each_judge_has_been_thought_of() -> None:
    refused = {judge for judge in JUDGES if Given(ALL).refusal(judge) is not None}
    assert refused == OWN_SERVERS, "a new judge needs a line in the table of needs, or stays out on purpose"
    unknown = Given(ALL).refusal("of tomorrow")
    assert unknown is not None
    assert (unknown.verdict, unknown.reason) == (Verdict.COULD_NOT_RUN, "attached")


@pytest.mark.parametrize("need", Need)
def test_what_is_missing_is_named(need: Need) -> None:
    refused = {
        judge: found
        for judge in JUDGES
        if judge not in OWN_SERVERS and (found := Given(ALL - {need}).refusal(judge)) is not None
    }
    assert refused
    assert FREE.isdisjoint(refused)
    for found in refused.values():
        assert found.expected == need
        wanted = (
            (Verdict.INCONCLUSIVE, "not-journalled") if need is Need.JOURNAL else (Verdict.COULD_NOT_RUN, "attached")
        )
        assert (found.verdict, found.reason) == wanted
