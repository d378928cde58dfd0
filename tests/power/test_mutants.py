"""What is changed in a module and what is not, and that an explanation meets the mutant that it is about."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

pytest.importorskip("mutmut")

from epd_conformance.errors import UsageError
from epd_conformance.power import explained, reference
from epd_conformance.power.mutants import Mutant, mutants_of, sources, spread

SOURCE = '''\
"""Says what it is for."""
from __future__ import annotations
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from elsewhere import Thing
LIMIT: int = 3

class Box:
    @cached(size=4)
    def far(self, size: int | None) -> bool:
        """Says what it does."""
        if size is None:
            logger.warning("no size %s", size + 1)
            raise ValueError(f"give a size, not {size + 1}", 7)
        return (
            size
            > LIMIT
        )

def text() -> str:
    return "word"
'''


def changes(source: str = SOURCE, **options: list[str]) -> set[tuple[str, int, str]]:
    return {(one.function, one.line, one.after) for one in mutants_of("a.module", source, **options)}


def test_a_module_is_changed_where_it_does_something() -> None:
    assert changes() == {
        ("", 6, "LIMIT: int = 4"),
        ("", 6, "LIMIT: int = None"),
        ("Box.far", 12, "if size is not None:"),
        ("Box.far", 14, 'raise ValueError(f"give a size, not {size + 1}", 8)'),
        ("Box.far", 14, 'raise ValueError(f"give a size, not {size + 1}", None)'),
        ("Box.far", 14, 'raise ValueError(f"give a size, not {size + 1}", )'),
        ("Box.far", 16, "size >= LIMIT"),
        ("text", 21, 'return "XXwordXX"'),
    }


def test_a_function_can_be_left_out() -> None:
    assert {function for function, *_ in changes(left_out=["Box"])} == {"", "text"}


def test_a_mutant_knows_the_lines_of_its_statement() -> None:
    lines = {one.line: one.lines for one in mutants_of("a.module", SOURCE)}
    assert lines == {6: range(6, 7), 12: range(12, 13), 14: range(14, 15), 16: range(15, 19), 21: range(21, 22)}


def test_its_key_does_not_change_with_other_lines() -> None:
    moved = SOURCE.replace("LIMIT", "MORE = f()\n\nLIMIT", 1)
    keys = {one.key for one in mutants_of("a.module", SOURCE)}
    assert keys < {one.key for one in mutants_of("a.module", moved)}


def test_every_beginning_is_spread_over_all() -> None:
    mutants = [Mutant("m", "f", line, "o", "", str(line), "", range(0)) for line in range(1000)]
    lines = [one.line for one in spread(mutants, 1000)]
    assert sorted(lines) == list(range(1000))
    assert lines[:20] == [one.line for one in spread(mutants, 20)]
    assert {line // 100 for line in lines[:20]} == set(range(10))


def test_every_mutant_of_the_reference_connector_is_another_program() -> None:
    """A splice at a wrong place would make most of them no programs at all."""
    found = [one for one in sources(reference.MODULES) if one.module.endswith((".pins", ".widths"))]
    original = {
        one.module: ast.dump(ast.parse(Path(*one.module.split(".")).with_suffix(".py").read_text(encoding="utf-8")))
        for one in found
    }
    dumped = [(one.module, ast.dump(ast.parse(one.source))) for one in found]
    assert len(found) > 200
    assert all(original[module] != text for module, text in dumped)


def test_an_explanation_is_about_one_change_or_those_of_like_lines(tmp_path: Path) -> None:
    path = tmp_path / "survivors.toml"
    path.write_text(
        '[[survivor]]\nmodule = "module"\nfunction = "Box.far"\nkind = "equivalent"\nwhy = "w"\n'
        'before = "if size is None:"\nafter = "if size is not None:"\n'
        '[[survivor]]\nmodule = "module"\nfunction = "text"\npart = "word"\nkind = "accepted"\nwhy = "w"\n'
        '[[survivor]]\nmodule = "module"\nfunction = "gone"\npart = "word"\nkind = "equivalent"\nwhy = "w"\n'
        '[[survivor]]\nmodule = "module"\nfunction = "*"\npart = "raise "\nkind = "equivalent"\nwhy = "w"\n',
        encoding="utf-8",
    )
    known = explained.read(path)
    mutants = mutants_of("a.module", SOURCE)
    told = {one.after for one in mutants if explained.explanation_of(one, known)}
    raised = 'raise ValueError(f"give a size, not {size + 1}", '
    assert told == {"if size is not None:", 'return "XXwordXX"', f"{raised})", f"{raised}8)", f"{raised}None)"}
    assert [one.function for one in explained.stale(known, mutants)] == ["gone"]


@pytest.mark.parametrize("function", ["*", "Box.far"])
def test_a_whole_module_or_function_is_not_explained_at_once(tmp_path: Path, function: str) -> None:
    path = tmp_path / "survivors.toml"
    path.write_text(
        f'[[survivor]]\nmodule = "m"\nfunction = "{function}"\nkind = "equivalent"\nwhy = "w"\n', encoding="utf-8"
    )
    with pytest.raises(UsageError, match=r"give a change .* or a part of the lines"):
        explained.read(path)


@pytest.mark.parametrize("missing", ["kind", "why", "after"])
def test_half_an_explanation_is_refused(tmp_path: Path, missing: str) -> None:
    whole = {"module": "m", "function": "f", "kind": "equivalent", "why": "w", "before": "b", "after": "a"}
    lines = [f'{name} = "{value}"' for name, value in whole.items() if name != missing]
    path = tmp_path / "survivors.toml"
    path.write_text("\n".join(["[[survivor]]", *lines]), encoding="utf-8")
    with pytest.raises(UsageError, match=missing):
        explained.read(path)
