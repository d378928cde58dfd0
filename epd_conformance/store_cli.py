"""`epd-conformance store`: look at a store of the reference connector, check it, keep it small, throw a model's objects away.

Needs neither vLLM nor torch, and may be used while servers read and write the store.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from epd_conformance.connectors import reclaim
from epd_conformance.connectors.object_format import Header, ObjectError, show_key
from epd_conformance.errors import UsageError

app = typer.Typer(help="The reference connector's store: list, verify, reclaim, purge.", no_args_is_help=True)

RootArgument = Annotated[Path, typer.Argument(help="the folder that the servers share (`root`)")]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="only say what would be deleted")]

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {f"{unit}i": 1024 ** (power + 1) for power, unit in enumerate("kmgt")}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


@app.command("ls")
def list_objects(root: RootArgument, as_json: JsonOption = False) -> None:
    """List the objects, the most recently used first, and the sum for each model."""
    _check_root(root)
    rows: list[dict[str, Any]] = []
    for stored in sorted(reclaim.objects(root), key=lambda stored: -stored.used):
        row: dict[str, Any] = {"file": stored.path.relative_to(root).as_posix(), "bytes": stored.bytes}
        row["used"] = datetime.fromtimestamp(stored.used, UTC).isoformat(timespec="seconds")
        try:
            row |= _describe(reclaim.header_of(stored.path))
        except ObjectError as error:
            row["error"] = str(error.reason)
        rows.append(row)
    waste: list[dict[str, Any]] = [
        {"file": stored.path.relative_to(root).as_posix(), "bytes": stored.bytes}
        for stored in reclaim.quarantined(root)
    ]
    if as_json:
        print(json.dumps({"objects": rows, "quarantine": waste}, indent=2))
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("key", "model", "rows", "width", "dtype", "bytes", "used"):
        table.add_column(column, justify="right" if column in ("rows", "width", "bytes") else "left")
    models: dict[str, tuple[int, int]] = {}
    for row in rows:
        shown = row.get("error", "?") if "key" not in row else show_key(row["key"])
        model = row.get("model", "")
        count, size = models.get(model, (0, 0))
        models[model] = (count + 1, size + row["bytes"])
        cells = [str(row.get(name, "")) for name in ("rows", "width", "dtype", "bytes", "used")]
        table.add_row(shown, model[:16], *cells)
    # A pipe has no width; nothing is cut there.
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 300)
    console.print(table)
    for model, (count, size) in sorted(models.items()):
        console.print(f"{model or 'no valid object'}: {count} objects, {size} bytes")
    console.print(f"in quarantine: {len(waste)} files, {sum(item['bytes'] for item in waste)} bytes")


@app.command()
def verify(
    root: RootArgument,
    quarantine: Annotated[bool, typer.Option("--quarantine", help="move damaged objects out of the way")] = False,
    as_json: JsonOption = False,
) -> None:
    """Read every object whole and check it. Exit code 1 if one is bad."""
    _check_root(root)
    good = 0
    bad: list[dict[str, Any]] = []
    for stored in reclaim.objects(root):
        try:
            reclaim.inspect(root, stored.path)
            good += 1
        except ObjectError as error:
            if not stored.path.exists():  # deleted meanwhile
                continue
            entry = {"file": stored.path.relative_to(root).as_posix(), "reason": str(error.reason), "error": str(error)}
            if quarantine and (error.reason in reclaim.DAMAGED or stored.path.is_dir()):
                moved = reclaim.quarantine(root, stored.path, error.reason, stored.identity)
                entry["quarantine"] = moved.relative_to(root).as_posix() if moved else ""
            bad.append(entry)
    if as_json:
        print(json.dumps({"good": good, "bad": bad}, indent=2))
    else:
        for entry in bad:
            print(f"{entry['file']}: {entry['reason']}: {entry['error']}")
        print(f"{good} good, {len(bad)} bad")
    sys.exit(1 if bad else 0)


@app.command()
def gc(
    root: RootArgument,
    max_bytes: Annotated[str, typer.Option(help="largest size of the store, such as 500GB or 2TiB")] = "",
    max_age: Annotated[str, typer.Option(help="longest time since the last use, such as 12h or 7d")] = "",
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Delete what was not used for too long, then the least recently used until the rest fits, and dead temporary files."""
    _check_root(root)
    if not max_bytes and not max_age:
        raise UsageError("nothing to reclaim: give --max-bytes or --max-age")
    swept = reclaim.sweep(
        root,
        max_bytes=parse_size(max_bytes) if max_bytes else None,
        max_age_s=parse_age(max_age) if max_age else None,
        dry_run=dry_run,
    )
    _report(swept, dry_run, as_json)


@app.command()
def purge(
    root: RootArgument,
    model: Annotated[str, typer.Option(help="fingerprint (or its beginning) of the model whose objects go")] = "",
    keep_model: Annotated[str, typer.Option(help="fingerprint (or its beginning) of the only model that stays")] = "",
    everything: Annotated[bool, typer.Option("--all", help="the objects of all models")] = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Delete the objects of a model, such as after its weights were replaced. `ls` and the server's log name fingerprints."""
    _check_root(root)
    if sum(map(bool, (model, keep_model, everything))) != 1:
        raise UsageError("say what to delete: one of --model FINGERPRINT, --keep-model FINGERPRINT, --all")
    for given in filter(None, (model, keep_model)):
        if not re.fullmatch("[0-9a-f]{8,64}", given):
            raise UsageError(f"{given!r} is no model fingerprint: give at least its first 8 hex digits")
    swept = reclaim.purge(root, _selection(model, keep_model), dry_run=dry_run)
    _report(swept, dry_run, as_json)


def parse_size(text: str) -> int:
    """Bytes from text such as `500MB`, `2TiB`, `1000`. Raises UsageError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", text.strip().lower())
    if not match:
        raise UsageError(f"{text!r} is no size: write it like 500MB, 2TiB or 1000")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def parse_age(text: str) -> float:
    """Seconds from text such as `45s`, `12h`, `7d`. Raises UsageError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw])", text.strip().lower())
    if not match:
        raise UsageError(f"{text!r} is no time: write it like 45s, 30m, 12h, 7d or 2w")
    return float(match[1]) * _SECONDS[match[2]]


def _selection(model: str, keep_model: str) -> Callable[[Header], bool]:
    if model:
        return lambda header: header.model_fingerprint.startswith(model)
    if keep_model:
        return lambda header: not header.model_fingerprint.startswith(keep_model)
    return lambda header: True


def _check_root(root: Path) -> None:
    if not root.is_dir():
        raise UsageError(f"there is no store at {root}: give the folder that the servers have as `root`")


def _describe(header: Header) -> dict[str, Any]:
    return {
        "key": header.key,
        "model": header.model_fingerprint,
        "rows": header.rows,
        "width": header.width,
        "dtype": header.dtype,
        "creator": header.creator,
        "created": header.created,
    }


def _report(swept: reclaim.Swept, dry_run: bool, as_json: bool) -> None:
    if as_json:
        fields = {"objects": swept.objects, "bytes": swept.bytes, "temporaries": swept.temporaries}
        kept = {"keptObjects": swept.kept_objects, "keptBytes": swept.kept_bytes}
        print(json.dumps({**fields, **kept, "dryRun": dry_run}, indent=2))
        return
    did = "would delete" if dry_run else "deleted"
    extra = f" and {swept.temporaries} dead temporary files" if swept.temporaries else ""
    print(
        f"{did} {swept.objects} objects, {swept.bytes} bytes{extra}; "
        f"kept {swept.kept_objects} objects, {swept.kept_bytes} bytes"
    )
