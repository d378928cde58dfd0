"""A night as Markdown, short enough for a pull request or a chat. Pure.

What somebody has to do something about comes first: regressions, then what was not shown, then flaky and mended cells, then the
release. `summary.json` beside it has every cell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from epd_conformance.history.night import Finding, Night, ProfileNight
from epd_conformance.report.render_compare import ALIKE
from epd_conformance.verdict import Verdict

# More lines under one heading nobody reads in a chat.
MOST_LINES = 10
# As much of what was observed as says which failure it is.
MOST_LETTERS = 160


def markdown(night: Night) -> str:
    """The whole summary."""
    lines = [f"### Nightly `{night.subject}`, {night.started:%Y-%m-%d}: {night.words}", ""]
    lines += _about(night)
    lines += [
        "",
        "| profile | outcome | pass | fail | not shown | since last green | took |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [_row(profile) for profile in night.profiles]
    lines += _cells(night, "Regressions since the last green night", _based(lambda profile: profile.regressions))
    lines += _cells(night, "Fails, and there is nothing to compare with", _first(lambda profile: profile.regressions))
    lines += _not_run(night)
    lines += _cells(night, "Not shown any more", _based(lambda profile: profile.lost), _change)
    lines += _cells(night, "Not shown", _first(lambda profile: profile.lost), _change)
    lines += _cells(night, "Flaky (no regression, and not well)", lambda profile: profile.flaking, _tonight)
    lines += _cells(night, "Mended", lambda profile: profile.mended, observed=False)
    lines += _standing(night)
    lines += _hunt(night)
    lines += _release(night)
    lines += ["", f"Pages: `{night.out}/<profile>/report.html`, every cell: `{night.out}/summary.json`"]
    return "\n".join(lines) + "\n"


def _based(found: Callable[[ProfileNight], Sequence[Finding]]) -> Callable[[ProfileNight], Sequence[Finding]]:
    return lambda profile: found(profile) if profile.base is not None else ()


def _first(found: Callable[[ProfileNight], Sequence[Finding]]) -> Callable[[ProfileNight], Sequence[Finding]]:
    return lambda profile: found(profile) if profile.base is None else ()


def _about(night: Night) -> list[str]:
    """Versions, and what changed beside the verdicts since the last green night."""
    facts: dict[str, None] = {}
    changed: dict[str, None] = {}
    for profile in night.profiles:
        if (report := profile.report) is None:
            continue
        version = report.subject.implementation.version
        if version and str(report.run.certifies) == "connector":
            facts[f"version {version}"] = None
        if report.environment.vllm_version:
            facts[f"vLLM {report.environment.vllm_version}"] = None
        facts[f"suite {report.suite.version}"] = None
        facts[str(report.environment_class)] = None
        if profile.since_green is not None and profile.green is not None:
            before = profile.green.report.subject.implementation.version
            if before != version:
                changed[f"subject {before or 'unknown'} → {version or 'unknown'}"] = None
            changed |= dict.fromkeys(profile.since_green.warnings)
    lines = [", ".join(facts)] if facts else []
    if changed:
        lines += ["", "Changed since the last green night: " + "; ".join(changed)]
    if night.interrupted:
        lines += ["", "**The night was interrupted.**"]
    return lines


def _row(profile: ProfileNight) -> str:
    seconds = profile.seconds or (profile.stored.seconds if profile.stored is not None else None) or 0.0
    took = f"{seconds / 60:.0f} min" if seconds >= 60 else f"{seconds:.0f} s"
    report = profile.report
    if report is None:
        return f"| {profile.profile} | **did not run** | | | | | {took} |"
    counts = report.summary
    failed = counts[Verdict.FAIL] + counts[Verdict.KNOWN_FAILING]
    hidden = counts["expected"] - counts[Verdict.PASS] - failed
    outcome = f"{report.certified_outcome}{', cut short' if report.interrupted else ''}"
    if profile.since_green is not None and profile.green is not None:
        since = f"{profile.words} ({profile.green.name})"
    elif profile.since_release is not None and profile.release is not None:
        since = f"no green night yet; since {profile.release.name}: {profile.words}"
    else:
        since = f"no green night yet: {profile.words}"
    return f"| {profile.profile} | {outcome} | {counts[Verdict.PASS]} | {failed} | {hidden} | {since} | {took} |"


def _cells(
    night: Night,
    title: str,
    found: Callable[[ProfileNight], Sequence[Finding]],
    words: Callable[[Finding], str] | None = None,
    observed: bool = True,
) -> list[str]:
    """A heading and a line a cell; more than a few of one requirement that look alike are one line. Nothing where there is none."""
    every = [item for profile in night.profiles for item in found(profile)]
    if not every:
        return []
    lines = [_line(item, words or _past, observed) for item in _folded(every)]
    more = len(lines) - MOST_LINES
    lines = [*lines[:MOST_LINES], f"* and {more} more lines"] if more > 0 else lines
    return ["", f"**{title}: {len(every)}**", "", *lines]


def _folded(found: Sequence[Finding]) -> Iterator[Finding]:
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for item in found:
        groups.setdefault((item.cell.partition("[")[0], item.owner, item.change), []).append(item)
    for (requirement, _, _), group in groups.items():
        if len(group) > ALIKE:
            yield replace(group[0], cell=f"{requirement}, {len(group)} cells")
        else:
            yield from group


def _line(item: Finding, words: Callable[[Finding], str], observed: bool) -> str:
    line = f"* `{item.cell}` ({', '.join(word for word in (item.owner, words(item)) if word)})"
    return f"{line}: {_code(item.observed)}" if observed and item.observed else line


def _past(item: Finding) -> str:
    return item.past.words() if item.past is not None else item.change


def _change(item: Finding) -> str:
    return item.change


def _tonight(item: Finding) -> str:
    return f"{_past(item)}; {item.change} tonight"


def _standing(night: Night) -> list[str]:
    """Only counted: nothing about it is new, and it must not be forgotten."""
    counts = [f"{len(profile.standing)} in {profile.profile}" for profile in night.profiles if profile.standing]
    return ["", f"**Fails as before**: {', '.join(counts)}"] if counts else []


def _code(text: str) -> str:
    """Text of a server as a code span: nothing in it may be taken for Markdown."""
    cut = text if len(text) <= MOST_LETTERS else text[: MOST_LETTERS - 1] + "…"
    return "`" + cut.replace("`", "'") + "`"


def _not_run(night: Night) -> list[str]:
    lines = [
        f"* {profile.profile}: {_code(profile.said or 'it left no report')}"
        for profile in night.profiles
        if profile.report is None
    ]
    lines += [
        f"* {profile.profile} was cut short, {len(profile.unreached)} of {report.summary['expected']} cells did not run: "
        f"{_code(profile.said or 'see its report')}"
        for profile in night.profiles
        if (report := profile.report) is not None and report.interrupted
    ]
    lines += [f"* {profile.profile}: {note}" for profile in night.profiles for note in profile.remarks]
    return ["", "**Did not run, or not whole**", "", *lines] if lines else []


def _hunt(night: Night) -> list[str]:
    if night.hunted is None:
        return []
    head = {0: "nothing found", 1: "found something", 3: "no script passed"}.get(night.hunted.code, "did not run")
    shown = [f"    {line}" for line in night.hunted.lines[-MOST_LINES:]]
    return ["", f"**Hunt: {head}** (`{night.hunted.log}`)", *(["", *shown] if shown else [])]


def _release(night: Night) -> list[str]:
    lines = []
    for profile in night.profiles:
        since, release = profile.since_release, profile.release
        if night.releases and profile.report is not None and release is None:
            lines.append(
                f"* {profile.profile}: no report of this subject, profile, level, class and model is among the releases"
            )
        if since is None or release is None:
            continue
        counts = ", ".join(f"{count} {change}" for change, count in since.counts.items())
        bad = [cell.id for change in since.counts if change.regression for cell in since.of(change)]
        named = ": " + ", ".join(f"`{name}`" for name in bad[:3]) + (" …" if len(bad) > 3 else "") if bad else ""
        lines.append(f"* {profile.profile}, since {release.name}: {counts}{named}")
    return ["", "**Since the last release**", "", *lines] if lines else []
