"""The mutants of a module: mutmut's operators on libcst's tree, less what can make no difference. Pure.

mutmut is taken as a library of operators only: it would run pytest on functions behind trampolines, while here a mutant is a
whole module that a process of its own imports instead of the right one. Left out, because no behaviour depends on them:

- type annotations, imports, what stands under `TYPE_CHECKING`, docstrings, and arguments of decorators;
- texts for people: lines of a log, and every literal of several words (messages of exceptions, help of metrics);
- of the three mutants of a string the two that only change its case, which mostly are the same to whoever compares it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import libcst as cst
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators

#: Without an argument each of them raises whatever it is used for.
_ALWAYS_RAISE = ("len", "isinstance")

_WORDS = re.compile(r"[A-Za-z]\S* \S*[A-Za-z]|[A-Za-z] $|^ [A-Za-z]")


@dataclass(frozen=True)
class Mutant:
    """One small change of a module.

    Attributes:
        module: its dotted name.
        function: the qualified name of the function that is changed; empty for what runs when the module is imported.
        line: the first changed line.
        before, after: the changed lines, with single spaces.
        source: the module with the change.
        lines: those of the changed statement: it runs if one of them does.
    """

    module: str
    function: str
    line: int
    operator: str
    before: str
    after: str
    source: str = field(repr=False)
    lines: range

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What stays the same when other lines of the module change."""
        return self.module, self.function, self.before, self.after


def mutants_of(module: str, source: str, left_out: Collection[str] = ()) -> list[Mutant]:
    """Every mutant of a module, in the order of its lines. `left_out`: qualified names of functions and classes."""
    tree = cst.parse_module(source)
    finder = _Finder(tree)
    wrapper = MetadataWrapper(tree, unsafe_skip_copy=True)
    wrapper.visit(finder)
    statements = _Statements(source)
    old = source.splitlines(keepends=True)
    seen = {source}
    found = []
    for place, operator, code in finder.found:
        start, end = place.start, place.end
        changed = old[start.line - 1][: start.column] + code + old[end.line - 1][end.column :]
        text = "".join([*old[: start.line - 1], changed, *old[end.line :]])
        function, lines = statements.at(start.line)
        if text in seen or any(function == name or function.startswith(f"{name}.") for name in left_out):
            continue
        seen.add(text)
        line, before, after = _change(start.line, old[start.line - 1 : end.line], changed.splitlines(keepends=True))
        found.append(Mutant(module, function, line, operator, before, after, text, lines))
    return sorted(found, key=lambda mutant: (mutant.line, mutant.operator, mutant.after))


class _Finder(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, tree: cst.Module) -> None:
        super().__init__()
        self._tree = tree
        #: (place of a node, name of the operator, what stands there instead)
        self.found: list[tuple[CodeRange, str, str]] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.Annotation | cst.Decorator | cst.Import | cst.ImportFrom) or _is_text(node):
            return False
        if isinstance(node, cst.If) and isinstance(node.test, cst.Name) and node.test.value == "TYPE_CHECKING":
            return False
        if isinstance(node, cst.Expr) and (isinstance(node.value, cst.BaseString) or _is_log(node.value)):
            return False
        for kind, operator in mutation_operators:
            if isinstance(node, kind):
                self._take(node, operator.__name__.removeprefix("operator_"), operator(node))
        return True

    def _take(self, node: cst.CSTNode, operator: str, changed: Iterable[cst.CSTNode]) -> None:
        made = list(changed)
        if operator == "string":
            made = made[:1]
        if operator == "arg_removal" and isinstance(node, cst.Call):
            if isinstance(node.func, cst.Name) and node.func.value in _ALWAYS_RAISE:
                return
            made = [one for one in made if isinstance(one, cst.Call) and not _lacks_text(node, one)]
        place = self.get_metadata(PositionProvider, node)
        assert isinstance(place, CodeRange)
        for one in made:
            # The place of an expression is within its parentheses.
            bare = one.with_changes(lpar=(), rpar=()) if getattr(node, "lpar", ()) else one
            self.found.append((place, operator, self._tree.code_for_node(bare)))


def _is_text(node: cst.CSTNode) -> bool:
    """Whether it is a literal of several words."""
    if isinstance(node, cst.ConcatenatedString):
        return _is_text(node.left) or _is_text(node.right)
    if isinstance(node, cst.FormattedString):
        texts = [part.value for part in node.parts if isinstance(part, cst.FormattedStringText)]
        return any(_WORDS.search(text) for text in texts)
    return isinstance(node, cst.SimpleString) and bool(_WORDS.search(node.raw_value))


def _is_log(node: cst.BaseExpression) -> bool:
    """Whether it is a line for the log: `logger.warning(...)`, or `self._warn(...)`, which says it once."""
    if not (
        isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and isinstance(node.func.value, cst.Name)
    ):
        return False
    return node.func.value.value == "logger" or (node.func.value.value, node.func.attr.value) == ("self", "_warn")


def _lacks_text(call: cst.Call, changed: cst.Call) -> bool:
    """Whether a text is what the changed call lacks."""
    return any(_is_text(arg.value) for arg in call.args if arg not in changed.args)


class _Statements:
    """The statement, and the function, that a line belongs to."""

    def __init__(self, source: str) -> None:
        self._own: list[tuple[range, str]] = []
        self._collect(ast.parse(source).body, "", "")

    def at(self, line: int) -> tuple[str, range]:
        holding = [(len(lines), lines, function) for lines, function in self._own if line in lines]
        _, lines, function = min(holding, key=lambda found: found[0])
        return function, lines

    def _collect(self, body: Sequence[ast.AST], outside: str, function: str) -> None:
        """`outside`: the qualified name of what holds the body; `function`: the same if it is, or is in, a function."""
        for node in body:
            inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, _HOLDERS)]
            first = min((_first_line(child) for child in inner), default=None)
            start, end = node.lineno, node.end_lineno or node.lineno  # type: ignore[attr-defined]
            lines = range(start, end + 1) if first is None else range(start, max(first, start + 1))
            self._own.append((lines, function))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{outside}.{node.name}".lstrip(".")
                self._collect(node.body, name, name)
            elif isinstance(node, ast.ClassDef):
                self._collect(node.body, f"{outside}.{node.name}".lstrip("."), function)
            else:
                self._collect(inner, outside, function)


_HOLDERS = (ast.stmt, ast.excepthandler, ast.match_case)


def _first_line(node: ast.AST) -> int:
    decorators: Sequence[ast.expr] = getattr(node, "decorator_list", ())
    line: int = node.lineno  # type: ignore[attr-defined]
    return min([line, *(decorator.lineno for decorator in decorators)])


def _change(line: int, old: list[str], new: list[str]) -> tuple[int, str, str]:
    """The first changed line, and the lines that are changed, before and after."""
    while len(old) > 1 and len(new) > 1 and old[-1] == new[-1]:
        old, new = old[:-1], new[:-1]
    while len(old) > 1 and len(new) > 1 and old[0] == new[0]:
        line, old, new = line + 1, old[1:], new[1:]
    return line, _joined(old), _joined(new)


def _joined(lines: Sequence[str]) -> str:
    return " ".join(" ".join(lines).split())


def spread(mutants: Sequence[Mutant], number: int) -> list[Mutant]:
    """So many of them, in an order of which every beginning is evenly spread over all: the same every time."""
    # Multiples of the golden ratio, less their whole part, never come close together.
    order = sorted(range(len(mutants)), key=lambda index: index * _GOLDEN % 1)
    return [mutants[index] for index in order[:number]]


_GOLDEN = (5**0.5 - 1) / 2


def sources(modules: Mapping[str, Collection[str]]) -> Iterator[Mutant]:
    """The mutants of modules that can be imported, without importing them. `modules`: name -> what is left out of it."""
    import importlib.util
    from pathlib import Path

    for module, left_out in modules.items():
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(module)
        yield from mutants_of(module, Path(spec.origin).read_text(encoding="utf-8"), left_out)
