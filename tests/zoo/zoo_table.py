"""The table of the zoo: which requirements find which connector. `python tests/zoo/zoo_table.py [NAME ...]` makes it anew,
and its page.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

from epd_conformance import catalogue
from epd_conformance.engine import measured
from epd_conformance.engine.corpus import corpus
from epd_conformance.engine.hosted import Carried, Host
from epd_conformance.engine.pool import Pool, Told
from epd_conformance.features import Feature

HERE = Path(__file__).parent
PATHS = [str(HERE), str(HERE.parent / "engine")]
TABLE = HERE / "table.json"
PAGE = HERE.parents[1] / "docs" / "zoo.md"

#: Connectors that are right: everything else in their module is one change away from one of them.
RIGHT = ("PlainStore", "SealedStore", "WaitingStore", "CountingStore")

#: All checks but that of a slow store, for which a store that is asked within the step is no right one; tests/engine has that.
_ALL = [name for name in measured.CHECKS if name != "slow-store"]

#: Whose defect shows only in a directed check, and which; the others are not asked, since races take seconds.
CHECKED = {
    "WritesInPlace": ("race", "race-of-two"),
    "KeepsRequests": ("growth",),
    "KeepsFiles": ("growth",),
    "IgnoresTheModel": ("encoder-decoder",),
    "AsksOnImport": ("import",),
    "AsksForMetrics": ("import",),
    "TakesAnySetting": ("unknown-setting",),
    "SilentAboutItsStore": ("unusable-store",),
    "WaitsForItsStore": ("slow-store",),
    "PlainStore": tuple(_ALL),
    "SealedStore": tuple(_ALL),
}

#: Found in tests/engine only: what is about a damaged store has its like in `zoo_sealed`, and one that eats a gigabyte in each plan
#: takes minutes. One that saves in a thread is right or not as its thread is quick or not.
LEFT_OUT = frozenset(
    {"Aside", "Eats", "LongSave", "SharedMapping", "Unpickler", "LooksByTouching", "RaisesWhenFull", "GivesUpOnce"}
)

#: Seconds that a plan may take, on a busy machine too; and where it is known that a hook hangs.
LIMIT_S, HANGS_S = 60.0, 3.0


def connectors() -> dict[str, str]:
    """Name -> module, of every connector of the zoo, in the order of the modules. Read and not imported: they need vLLM."""
    found: dict[str, str] = {}
    known = {"PlainStore"}
    for module in ("planted_engine", "zoo_sealed"):
        for node in _classes(module):
            bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
            if node.name in known or bases & known:
                known.add(node.name)
                if node.name not in LEFT_OUT:
                    found[node.name] = module
    return found


def _classes(module: str) -> list[ast.ClassDef]:
    path = next(Path(folder) / f"{module}.py" for folder in PATHS if (Path(folder) / f"{module}.py").exists())
    return [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]


def caught(host: Host, name: str, module: str, features: frozenset[Feature]) -> list[str]:
    """The requirements that a connector fails, by the corpus and its checks; without those that its subject is not asked for."""
    subject = f"{module}:{name}_"
    asked = asked_of(features)
    limit = HANGS_S if name == "Hangs" else LIMIT_S
    pool = Pool(0, 0, "")
    plans, told = [], []
    for plan_name, plan in corpus(features).items():
        plans.append(host.carry(plan, subject=subject, keep=plan_name, limit_s=limit).evidence)
        pool = Pool(0, 0, "", tuple(one for one in plans if one is not None))
        if pool.plans[-1].death is not None and pool.hung():
            break
    for check_name in CHECKED.get(name, ()):
        check = measured.CHECKS[check_name]
        answer = host.call(check.path, check.arguments, subject=subject, bare=check.bare, limit_s=LIMIT_S)
        told.append(Told(check_name, death=answer.death) if isinstance(answer, Carried) else Told(check_name, answer))
    found = Pool(0, 0, "", pool.plans, tuple(told)).findings(asked)
    return sorted(requirement for requirement in found if requirement in asked)


def asked_of(features: frozenset[Feature]) -> frozenset[str]:
    """The requirements that the profile `contract` asks of a subject with these features."""
    chosen = catalogue.load().select(
        topologies=["contract"], environment=catalogue.EnvironmentClass.CPU_V1, features=features
    )
    return frozenset(item.id for item, _ in chosen.pairs)


def page(table: dict[str, list[str]]) -> str:
    """docs/zoo.md."""
    titles = {item.id: item.title for item in catalogue.load()}
    about = {
        node.name: ast.get_docstring(node) or ""
        for module in ("planted_engine", "zoo_sealed")
        for node in _classes(module)
    }
    lines = [
        "# The zoo",
        "",
        "<!-- Written by `python tests/zoo/zoo_table.py`. -->",
        "",
        f"{len(table) - len(RIGHT)} broken connectors, each one small change away from a right one, and {len(RIGHT)} right ones. "
        "The table says which requirements of the profile `contract` find which, by the fixed plans alone; a test holds it to be "
        "exact. The connectors lie in `tests/engine/planted_engine.py` and `tests/zoo/zoo_sealed.py`.",
        "",
        "| connector | what is wrong with it | requirements that find it |",
        "|---|---|---|",
    ]
    for name, found in table.items():
        text = " ".join(about[name].split()) if name not in RIGHT else "nothing"
        lines.append(f"| `{name}` | {text} | {', '.join(found) or 'none'} |")
    every = sorted({requirement for found in table.values() for requirement in found})
    lines += ["", "## By requirement", "", "| requirement | | found broken in |", "|---|---|---|"]
    for requirement in every:
        names = [f"`{name}`" for name, found in table.items() if requirement in found]
        some = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        lines.append(f"| {requirement} | {titles[requirement]} | {some} |")
    return "\n".join(lines) + "\n"


def read() -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


def features_of(host: Host, name: str, module: str) -> frozenset[Feature]:
    """What a connector's subject declares: asked in a child, since its module imports vLLM."""
    return frozenset(Feature(one) for one in host.call("zoo_asked:features", subject=f"{module}:{name}_"))


def main(names: list[str]) -> None:
    """Make the table anew for these connectors; for all, where none is named."""
    before = read() if names else {}
    table: dict[str, list[str]] = {}
    with Host("planted_engine:PlainStore_", paths=PATHS) as host:
        for name, module in connectors().items():
            if names and name not in names:
                table[name] = before[name]
                continue
            table[name] = caught(host, name, module, features_of(host, name, module))
            host.recycle()
            print(name, *table[name], file=sys.stderr, flush=True)
    TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(table), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
