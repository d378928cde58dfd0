"""Reads the catalogue from TOML, refuses what is wrong in it by file and id, and answers questions about
it."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from epd_conformance.catalogue.model import (
    ConformanceLevel,
    EnvironmentClass,
    Layer,
    NotTestable,
    Requirement,
    Status,
)
from epd_conformance.catalogue.selection import NotVerified, Selection
from epd_conformance.errors import UsageError
from epd_conformance.features import FEATURE_OF_TOPOLOGY, Feature

REQUIREMENTS = Path(__file__).parent / "requirements"
LABELS = Path(__file__).parent / "labels.toml"
NOT_TESTABLE = Path(__file__).parent / "not_testable.toml"

ModelT = TypeVar("ModelT", bound=BaseModel)


class Catalogue:
    """All requirements, sorted by id. Iterates over `Requirement`; `catalogue["EPD-TOK-001"]` looks one
    up."""

    def __init__(self, requirements: Collection[Requirement]) -> None:
        self._by_id = {item.id: item for item in sorted(requirements, key=lambda item: item.id)}

    def __iter__(self) -> Iterator[Requirement]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, requirement_id: object) -> bool:
        return requirement_id in self._by_id

    def __getitem__(self, requirement_id: str) -> Requirement:
        """The requirement of that id; raises `UsageError` for one that the catalogue does not hold."""
        try:
            return self._by_id[requirement_id]
        except KeyError:
            raise UsageError(
                f"the catalogue holds no requirement {requirement_id}; `epd-conformance list` shows them all"
            ) from None

    @property
    def areas(self) -> tuple[str, ...]:
        """The areas that occur, sorted, such as `("INIT", "KV", "TOK")`."""
        return tuple(sorted({item.area for item in self}))

    def digest(self) -> str:
        """`sha256:<hex>` over everything that every requirement says; changes when any meaning does."""
        content = json.dumps([item.model_dump(mode="json") for item in self], sort_keys=True, ensure_ascii=True)
        return "sha256:" + hashlib.sha256(content.encode()).hexdigest()

    def select(
        self,
        *,
        topologies: Collection[str],
        environment: EnvironmentClass,
        features: Collection[Feature] = (),
        level: ConformanceLevel = ConformanceLevel.FULL,
        layers: Collection[Layer] = tuple(Layer),
    ) -> Selection:
        """What a run of these topologies, layers and level has to show, and what it cannot show and why.

        A requirement outside the asked-for topologies, layers or level appears in neither list: the report's
        profile and level say that. One that is `planned`, of another environment class, or in need of a
        feature that was not declared is listed as not verified.
        """
        pairs: list[tuple[Requirement, str]] = []
        gaps: list[NotVerified] = []
        for item in self:
            asked = [topology for topology in item.topologies if topology in topologies]
            too_deep = level is ConformanceLevel.CORE and item.conformance is ConformanceLevel.FULL
            if not asked or too_deep or item.layer not in layers:
                continue
            if item.status is Status.PLANNED:
                gaps.append(NotVerified("planned", item.id, "no test yet"))
                continue
            if environment not in item.environments:
                classes = ", ".join(item.environments)
                gaps.append(NotVerified("environment", item.id, f"shown on {classes} only, not on {environment}"))
                continue
            for topology in asked:
                needed = set(item.features)
                if topology in FEATURE_OF_TOPOLOGY:
                    needed.add(FEATURE_OF_TOPOLOGY[topology])
                missing = sorted(needed - set(features))
                if missing:
                    detail = f"{topology}: the subject does not declare {', '.join(missing)}"
                    gaps.append(NotVerified("feature", item.id, detail))
                else:
                    pairs.append((item, topology))
        return Selection(tuple(pairs), tuple(gaps))


def load(directory: Path | None = None) -> Catalogue:
    """Reads every `<area>.toml` of `directory` (default: the one in this package) into a `Catalogue`.

    A file holds a list of tables `[[requirement]]`, all of the area that its name says (`tok.toml`:
    `EPD-TOK-…`). Raises `UsageError`, naming file and id, for anything that is wrong.
    """
    folder = directory or REQUIREMENTS
    files = sorted(folder.glob("*.toml"))
    if not files:
        raise UsageError(f"{folder} holds no requirements: expected files such as tok.toml in it")
    known = labels()
    found: dict[str, tuple[Path, Requirement]] = {}
    for path in files:
        for number, table in enumerate(_tables(path, "requirement"), start=1):
            item = _item(path, table, Requirement, table.get("id", f"requirement number {number}"))
            if item.area.lower() != path.stem:
                raise UsageError(f"{path.name}: {item.id} belongs into {item.area.lower()}.toml")
            if item.id in found:
                raise UsageError(
                    f"{path.name}: {item.id} is defined twice (also in {found[item.id][0].name}); "
                    "give one of them another number"
                )
            _explained(path, item.id, item.covers, known)
            found[item.id] = (path, item)
    return Catalogue([item for _, item in found.values()])


def not_testable(path: Path | None = None) -> tuple[NotTestable, ...]:
    """What no test of this suite can show, and why, in the order of the file (default: the one in this package).

    Raises `UsageError`, naming file and title, for anything that is wrong.
    """
    path = path or NOT_TESTABLE
    known = labels()
    found: dict[str, NotTestable] = {}
    for number, table in enumerate(_tables(path, "not_testable"), start=1):
        item = _item(path, table, NotTestable, table.get("title", f"entry number {number}"))
        if item.title in found:
            raise UsageError(f"{path.name}: `{item.title}` stands in it twice")
        _explained(path, item.title, item.covers, known)
        found[item.title] = item
    return tuple(found.values())


def labels() -> dict[str, str]:
    """Every label that `covers` may name, and what it stands for: `{"I1": "construction in …", …}`.

    Four kinds, in this order: `I` contract, `S` analysis, `C` failures, `B` public reports.
    """
    return {label: text for group in _document(LABELS).values() for label, text in group.items()}


def _document(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise UsageError(f"{path.name} is not valid TOML: {exc}") from exc


def _tables(path: Path, kind: str) -> list[dict[str, Any]]:
    document = _document(path)
    tables = document.pop(kind, None)
    if document:
        raise UsageError(f"{path.name}: unknown key `{next(iter(document))}`; only [[{kind}]] tables may stand in it")
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise UsageError(f"{path.name} holds no [[{kind}]] table")
    return tables


def _item(path: Path, table: dict[str, Any], model: type[ModelT], name: str) -> ModelT:
    try:
        return model.model_validate(table)
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        message = str(first["msg"]).removeprefix("Value error, ")
        raise UsageError(f"{path.name}: {name}: {f'`{where}`: ' if where else ''}{message}") from exc


def _explained(path: Path, name: str, covers: Collection[str], known: Collection[str]) -> None:
    for label in covers:
        if label not in known:
            raise UsageError(f"{path.name}: {name}: `covers` names {label}, which {LABELS.name} does not explain")
