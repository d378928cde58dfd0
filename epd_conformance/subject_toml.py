"""Subjects as TOML files: what `Subject` says in Python, as data. docs/subjects.md shows one with every key.

Strings may hold placeholders (`{store}`, `{port:encode-0}`, …), which become the values of the stack that is configured. An
unknown key or placeholder is an error that names the nearest known one: a setting that silently does nothing looks like one
that works.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from epd_conformance.errors import UsageError
from epd_conformance.faults.fault import Fault
from epd_conformance.features import Feature
from epd_conformance.probe import StoreProbe
from epd_conformance.subject import Implementation, LaunchOptions, StackInfo, Subject, imported
from epd_conformance.toml_file import read_toml
from epd_conformance.topology.spec import Role, ec_role

ROLES = ("ec_producer", "ec_consumer", "ec_both")
# Placeholders of one value each, and those that name one of several after a colon.
PLAIN = ("store", "model", "topology", "environment_class", "role")
NAMED = ("port", "size")
# What looks like a placeholder. JSON inside an argument does not: a quote follows its brace.
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]+)(?::([^{}\"]*))?\}")


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ImplementationTable(_Table):
    """`[implementation]`: as `Implementation`."""

    organization: str
    project: str
    version: str
    url: str = ""
    contact: str = ""


class ConnectorTable(_Table):
    """`[connector]`: the JSON of `--ec-transfer-config`. The keys are those of vLLM 0.32.0's ECTransferConfig but `ec_role`."""

    ec_connector: str = ""
    ec_connector_module_path: str = ""
    ec_connector_extra_config: dict[str, Any] = {}
    ec_buffer_device: str = ""
    ec_buffer_size: float = 0.0
    ec_ip: str = ""
    ec_port: int | str = 0
    engine_id: str = ""


class LaunchTable(_Table):
    """`[launch]`: further arguments and environment of the servers."""

    arguments: list[str] = []
    environment: dict[str, str] = {}


class RoleTable(_Table):
    """`[role.<ec_role>]`: what differs for one role; tables are merged key by key, arguments come behind the common ones."""

    connector: ConnectorTable = ConnectorTable()
    launch: LaunchTable = LaunchTable()


class RolesTable(_Table):
    """`[role]`."""

    ec_producer: RoleTable = RoleTable()
    ec_consumer: RoleTable = RoleTable()
    ec_both: RoleTable = RoleTable()


class SubjectFile(_Table):
    """A whole file."""

    implementation: ImplementationTable
    connector: ConnectorTable
    features: list[str] = []
    launch: LaunchTable = LaunchTable()
    role: RolesTable = RolesTable()
    probe: str = ""
    """`module:Class`, called with the StackInfo; gives a StoreProbe."""
    faults: list[str] = Field(default=[])
    """`module:Class` each, called with the StackInfo; each gives a Fault."""


class TomlSubject(Subject):
    """The subject that a file describes."""

    def __init__(self, path: Path, file: SubjectFile) -> None:
        """Raises UsageError for a feature or placeholder that does not exist."""
        self.path = path
        self._file = file
        self.implementation = Implementation(**file.implementation.model_dump())
        self.features = frozenset(_feature(path, name) for name in file.features)
        if not file.connector.ec_connector:
            raise UsageError(f"{path}: [connector] names no `ec_connector`: add the name of the connector's class")
        _check_values(path, file.model_dump(exclude_unset=True), "")

    def connector_config(self, role: str, stack: StackInfo) -> dict[str, Any]:
        common = self._file.connector.model_dump(exclude_unset=True)
        own = self._own(role).connector.model_dump(exclude_unset=True)
        filled: dict[str, Any] = _filled(self.path, _merged(common, own), role, stack)
        return filled

    def launch(self, role: str, stack: StackInfo) -> LaunchOptions:
        common, own = self._file.launch, self._own(role).launch
        return LaunchOptions(
            arguments=tuple(str(_filled(self.path, text, role, stack)) for text in (*common.arguments, *own.arguments)),
            environment={
                name: str(_filled(self.path, value, role, stack))
                for name, value in {**common.environment, **own.environment}.items()
            },
        )

    def probe(self, stack: StackInfo) -> StoreProbe | None:
        if not self._file.probe:
            return None
        found: StoreProbe = self._made(self._file.probe, stack, "probe", StoreProbe)
        return found

    def faults(self, stack: StackInfo) -> Mapping[str, Fault]:
        made = [self._made(name, stack, "faults", Fault) for name in self._file.faults]
        return {fault.kind: fault for fault in made}

    def _own(self, role: str) -> RoleTable:
        found: RoleTable = getattr(self._file.role, role)
        return found

    def _made(self, name: str, stack: StackInfo, key: str, wanted: type) -> Any:
        make: Callable[[StackInfo], Any] = imported(name, f"{self.path}: `{key}`")
        made = make(stack)
        if not isinstance(made, wanted):
            raise UsageError(
                f"{self.path}: `{key}`: {name} gives no epd_conformance.{wanted.__name__}: derive it from it"
            )
        return made


def read(path: Path) -> TomlSubject:
    """The subject in a TOML file. Raises UsageError, in one sentence that names file and key, for what does not fit."""
    data = read_toml(path, f"the subject {path}", "docs/subjects.md")
    try:
        file = SubjectFile.model_validate(data)
    except ValidationError as error:
        raise UsageError(_words(path, error)) from error
    return TomlSubject(path, file)


def _words(path: Path, error: ValidationError) -> str:
    # What stands in the way of all else first: a wrong key is often a required one that was misspelt.
    first = min(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
    # A union says in a last part which of its members did not fit.
    where = [str(part) for part in first["loc"] if part not in ("int", "str")]
    if first["type"] == "extra_forbidden":
        if where[-1] == "ec_role":
            return f"{path}: `{'.'.join(where)}` is filled in by the harness: leave it out"
        known = _known(where[:-1])
        return f"{path}: unknown key `{'.'.join(where)}`: {_nearest(where[-1], known)}"
    if first["type"] == "missing":
        return f"{path}: `{'.'.join(where)}` is missing: add it"
    wanted = first["msg"].removeprefix("Input should be ")
    return f"{path}: `{'.'.join(where)}` is {first['input']!r:.80} and should be {wanted}"


def _known(where: Iterable[str]) -> list[str]:
    """The keys of the table at a place."""
    table: Any = SubjectFile
    for part in where:
        table = table.model_fields[part].annotation
    return list(table.model_fields)


def _nearest(wrong: str, known: Iterable[str]) -> str:
    every = list(known)
    close = difflib.get_close_matches(wrong, every, n=1, cutoff=0.5)
    return f"did you mean `{close[0]}`?" if close else f"known are {', '.join(every)}"


def _feature(path: Path, name: str) -> Feature:
    try:
        return Feature(name)
    except ValueError:
        raise UsageError(f"{path}: `features` names {name!r}, which is none: {_nearest(name, list(Feature))}") from None


def _check_values(path: Path, value: Any, where: str) -> None:
    """Everything that can be said about values before there is a stack: JSON types, placeholders that exist."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check_values(path, inner, f"{where}.{key}" if where else key)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _check_values(path, inner, f"{where}[{index}]")
    elif isinstance(value, str):
        for match in _PLACEHOLDER.finditer(value):
            name, which = match[1], match[2]
            if name not in (PLAIN if which is None else NAMED):
                forms = [*PLAIN, *(f"{one}:…" for one in NAMED)]
                raise UsageError(
                    f"{path}: `{where}` holds {match[0]}, which is no placeholder: {_nearest(name, forms)}"
                )
    elif not isinstance(value, bool | int | float):
        raise UsageError(f"{path}: `{where}` is a {type(value).__name__}, which is no JSON: write it as text")


def _merged(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(common)
    for key, value in own.items():
        before = merged.get(key)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        merged[key] = _merged(before, value) if both else value  # type: ignore[arg-type]  # mypy does not follow `both`
    return merged


def _filled(path: Path, value: Any, role: str, stack: StackInfo) -> Any:
    """A value with its placeholders filled in; text that is nothing but one keeps the type of what it stands for."""
    if isinstance(value, Mapping):
        return {key: _filled(path, inner, role, stack) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled(path, inner, role, stack) for inner in value]
    if not isinstance(value, str):
        return value
    whole = _PLACEHOLDER.fullmatch(value)
    if whole is not None:
        return _stands_for(path, whole, role, stack)
    return _PLACEHOLDER.sub(lambda match: str(_stands_for(path, match, role, stack)), value)


def _stands_for(path: Path, match: re.Match[str], role: str, stack: StackInfo) -> str | int:
    name, which = match[1], match[2]
    if name in ("port", "size"):
        values = _ports(stack) if name == "port" else dict(stack.sizes)
        if which not in values:
            raise UsageError(
                f"{path}: {match[0]} is not there in {stack.topology}, which has {', '.join(values)}: correct the name, or set the "
                "key under [role.…] for the roles that have it"
            )
        return values[which]
    if name == "role":
        return role
    value = getattr(stack, name)
    return str(value)


def _ports(stack: StackInfo) -> dict[str, int]:
    """Side ports by server name (`encode-0`), and by what a server is to the connector (`ec_consumer-0`), which holds in every
    topology; an aggregated server is producer and consumer."""
    ports = dict(stack.ports)
    for server, port in stack.ports.items():
        name, _, number = server.rpartition("-")
        part = "ec_both" if name == Role.AGGREGATED else ec_role(Role(name))
        for alias in ROLES if part == "ec_both" else (part,) if part else ():
            ports.setdefault(f"{alias}-{number}", port)
    return ports
