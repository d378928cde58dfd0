"""The catalogue as a page of documentation, `docs/requirements.md`: a pure function of the catalogue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from epd_conformance.catalogue.loader import Catalogue, labels, load, not_testable
from epd_conformance.catalogue.model import EnvironmentClass, NotTestable, Requirement, Status
from epd_conformance.verdict import Level, Owner

# In a checkout; an installed package has no page.
PAGE = Path(__file__).parents[2] / "docs" / "requirements.md"

AREAS: dict[str, str] = {
    "INIT": "what has to stand before the first request",
    "ROLE": "what a server of each role runs, holds and returns",
    "XFER": "what crosses from the encode server to the consumer",
    "TOK": "the same answers, token for token",
    "KEY": "what names an item, and what a name must tell apart",
    "INTEG": "objects that are damaged or are not what they should be",
    "STALE": "objects and caches that were right once",
    "RACE": "what happens at the same time",
    "LIFE": "allocation, deferral, preemption, release and the end",
    "ERR": "failures of the store, the servers and the client",
    "PROXY": "what stands between the client and the servers",
    "KV": "what crosses from prefill to decode",
    "OBS": "what can be seen from outside",
    "SEC": "what a client, or whoever can write to the store, must not be able to do",
    "LOAD": "many requests at once, and many in a row",
}
"""Every area, in the order of the page."""

KINDS: dict[str, str] = {
    "I": (
        "what vLLM's engine assumes of an EC connector: invariants read from scheduler, runners and connector base class "
        "of vLLM 0.32.0"
    ),
    "S": "what encoder disaggregation in vLLM is meant to do: lines of an analysis of its design",
    "C": "what goes wrong, or may, with a file-based connector on vLLM 0.32.0: situations read in the code or seen on servers",
    "B": "public fault reports of vLLM and of software around it",
}
"""What the first letter of a label means; `labels.toml` says what each label is."""

_INTRO = """\
# Requirements

<!-- Written by `python -m epd_conformance.catalogue`; edit epd_conformance/catalogue/ instead. -->

Everything that the suite asks, in numbered sentences. `epd-conformance list` prints the same in a terminal.

* **Level**, as in RFC 2119. Only MUST decides an outcome; SHOULD and MAY are run, counted and printed.
* **Owner**: who has to mend it. Each owner has an outcome of its own.
* **Status**: `active` has a test and counts. `planned` has none yet: a report says how many there are, and counts them as
  nothing else.
* **Layer**: the cheapest one that shows it. `contract`: the connector's objects in process. `scheduler`: vLLM's scheduler
  without a model. `proxy`: a proxy in front of fake servers. `live`: real servers behind a proxy. A requirement of the first
  three does not depend on how servers are arranged: where others have topologies it has its layer's name. One of `contract` that
  plans show is asked in `scheduler` as well; so is a live one in any layer that it has beside its topologies.
* **Level of a run**: `core` (the path works and answers are equal) or `full` (everything).
* **Needs**: features that a subject must declare; without them the requirement is listed as not verified.
* **Only on**: environment classes, where not all of them can show it.
* **Covers**: what the requirement was made from; [the last section](#where-the-requirements-come-from) says what the labels
  mean.

An id that was released keeps its level, owner and sentence for good.
"""


def render(
    catalogue: Catalogue | None = None,
    untestable: Sequence[NotTestable] | None = None,
    explained: dict[str, str] | None = None,
) -> str:
    """The whole page as Markdown; by default of the catalogue, its untestable statements and its labels as shipped."""
    catalogue = load() if catalogue is None else catalogue
    untestable = not_testable() if untestable is None else untestable
    explained = labels() if explained is None else explained
    parts = [_INTRO, _counts(catalogue)]
    for area, about in AREAS.items():
        items = [item for item in catalogue if item.area == area]
        if items:
            parts.append(f"## {area}: {about}\n")
            parts += [_requirement(item) for item in items]
    parts.append("## Not testable\n\nWhat belongs to the subject, and no test of this suite can show.\n")
    parts += [_not_testable(item) for item in untestable]
    parts.append(_origins(catalogue, untestable, explained))
    return "\n".join(parts)


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def _counts(catalogue: Catalogue) -> str:
    head = ["area", *Status, *Level, *Owner]

    def row(name: str, items: list[Requirement]) -> list[object]:
        statuses, levels, owners = (
            Counter(getattr(item, key) for item in items) for key in ("status", "level", "owner")
        )
        counts = [*(statuses[s] for s in Status), *(levels[level] for level in Level), *(owners[o] for o in Owner)]
        return [name, *(count or "" for count in counts)]

    rows = [row(area, items) for area in AREAS if (items := [item for item in catalogue if item.area == area])]
    return _table(head, [*rows, row("all", list(catalogue))])


def _requirement(item: Requirement) -> str:
    facts = [
        f"**{item.level}** · {item.owner} · {item.status} · {item.layer} · {item.conformance}",
        ", ".join(item.topologies),
    ]
    if item.features:
        facts.append("needs " + ", ".join(f"`{feature}`" for feature in item.features))
    if set(item.environments) != set(EnvironmentClass):
        facts.append("only on " + ", ".join(item.environments))
    if item.covers:
        facts.append("covers " + ", ".join(item.covers))
    lines = [" · ".join(facts), item.sentence, item.rationale, f"Source: {item.source} · since {item.since}"]
    return f"### {item.id} {item.title}\n\n" + "\n\n".join(lines) + "\n"


def _not_testable(item: NotTestable) -> str:
    covers = f" (part of {', '.join(item.covers)})" if item.covers else ""
    return f"**{item.title}**{covers}: “{item.statement}” {item.reason} Instead: {item.instead}\n"


def _origins(catalogue: Catalogue, untestable: Sequence[NotTestable], explained: dict[str, str]) -> str:
    parts = [
        "## Where the requirements come from\n",
        "Four collections of facts were turned into requirements. Each line says what a label stands for and which "
        "requirements answer for it; “in part not testable” means that something of it stands in the section above.\n",
    ]
    left_out = {label for item in untestable for label in item.covers}
    for kind, about in KINDS.items():
        rows = []
        for label, text in explained.items():
            if label.startswith(kind):
                who = [item.id for item in catalogue if label in item.covers]
                rows.append([label, text, ", ".join(who + ["in part not testable"] * (label in left_out))])
        parts += [f"### {kind}: {about}\n", _table(["label", "what", "requirements"], rows)]
    return "\n".join(parts)
