"""Generated scripts: requests, damage, repairs, purges, resets and restarts in any order, drawn and made into plans. Pure.

What is drawn is a list of operations. Any list makes a valid plan, and so does a list of which some are taken out, since an
operation that has no sense where it stands is left out. So a failure is made smaller by taking operations out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from epd_conformance.drawing import draw as drawn
from epd_conformance.plans.plan import Draw, Image, Plan, Request, replace_images
from epd_conformance.plans.steps import step

#: `("send", items, way)`, `("spoil", item, kind)`, `("heal",)`, `("purge",)`, `("reset", cache)`, `("restart", servers)`.
Operation = tuple[str, ...]

#: Items of a script, by letter; few, so that they meet again and again.
ITEMS = "abc"
#: One item, and two in both orders: a request fails or not as a whole.
_SENT = (*ITEMS, "ab", "ba")
#: The kinds of damage that any store with a probe can be done (`faults.store.FAULTS`).
KINDS = (
    "deleted", "truncated", "last-byte-missing", "empty", "garbage", "replaced",
    "one-row", "rows-missing", "rows-added", "no-rows", "width", "width-one", "dtype", "half",
)  # fmt: skip
#: Operations before and after the damage that every script has, at most: each costs a request or two, a second on a slow machine.
BEFORE, AFTER = 3, 5
#: The first and the last item, which nothing is done to. Both must cross, or the script would show nothing.
FIRST, LAST = "y", "z"
#: Lists that are drawn for one that is taken: Hypothesis begins with simple ones.
_TRIES = 12


def operations(restarts: bool = False) -> st.SearchStrategy[list[Operation]]:
    """Lists of operations, with damage in each; with `restarts`, servers are ended too, which takes seconds."""
    sends = st.tuples(st.just("send"), st.sampled_from(_SENT), st.sampled_from(("proxy", "past-encode")))
    spoils = st.tuples(st.just("spoil"), st.sampled_from(ITEMS), st.sampled_from(KINDS))
    resets = st.tuples(st.just("reset"), st.sampled_from(("encoder", "mm", "prefix")))
    kinds: list[st.SearchStrategy[Operation]] = [
        sends, sends, spoils, spoils, st.just(("heal",)), resets, st.just(("purge",)),
    ]  # fmt: skip
    if restarts:
        kinds.append(st.tuples(st.just("restart"), st.sampled_from(("encode", "consumer", "all"))))
    any_of_them = st.one_of(kinds)
    before, after = st.lists(any_of_them, max_size=BEFORE), st.lists(any_of_them, min_size=2, max_size=AFTER)
    return st.builds(lambda first, damage, then: [*first, damage, *then], before, spoils, after)


def script(given: Sequence[Operation]) -> Callable[[Draw], Plan]:
    """What draws the plan of given operations."""
    return lambda draw: compiled(given, draw)


def random_script(draw: Draw) -> Plan:
    """The plan of operations that are drawn too."""
    return compiled(drawn(operations(), _TRIES, draw.number())[-1], draw)


@dataclass
class _State:
    """What is known of the store. `held`: items that an encode server's cache may hold, so that it does not save them again."""

    present: set[str] = field(default_factory=set)
    held: set[str] = field(default_factory=set)
    spoilt: str = ""

    def saved(self, item: str) -> None:
        if item not in self.held:
            self.held.add(item)
            self.present.add(item)


def compiled(given: Sequence[Operation], draw: Draw) -> Plan:
    """The plan of a list of operations.

    The contents depend on the draw and on the items' letters alone, so that whoever asks for the same items asks the same, in a
    shorter list too. A request whose item is damaged at that time may fail (`contained`); every other one must be answered.
    """
    images = {letter: draw.image() for letter in (FIRST, *ITEMS, LAST)}
    others = {letter: draw.image() for letter in (FIRST, *ITEMS, LAST)}
    opening = {letters: draw.words() for letters in (FIRST, *_SENT, LAST)}
    state, steps, requests, contrasts = _State(), [], [], []

    def ask(letters: str, way: str, how: str) -> None:
        request = Request(letters, (draw.user(opening[letters], *(images[letter] for letter in letters)),))
        contrast: list[Image] = [others[letter] for letter in letters]
        requests.append(request)
        contrasts.append(replace_images(request, contrast, f"{letters}, other"))
        steps.append(step("send", way=way, how=how))
        if way == "proxy":
            for letter in letters:
                state.saved(letter)

    ask(FIRST, "proxy", "loaded")
    for operation in given:
        _carry(operation, state, steps, ask)
    ask(LAST, "proxy", "loaded")
    return Plan(tuple(requests), tuple(contrasts), steps=tuple(steps))


def _carry(
    operation: Operation, state: _State, steps: list[Mapping[str, str]], ask: Callable[[str, str, str], None]
) -> None:
    """Append the steps of an operation, if it has a sense where it stands."""
    do, *fields = operation
    if do == "send":
        letters, way = fields
        ask(letters, way, "contained" if state.spoilt and state.spoilt in letters else "any")
    elif do == "spoil":
        item, kind = fields
        can_be_saved = item in state.present or item not in state.held
        if not state.spoilt and can_be_saved and (kind != "replaced" or state.present - {item}):
            steps += [step("prime"), step("damage", kind=kind)]
            state.saved(item)
            state.spoilt = item
            ask(item, "past-encode", "contained")
    elif do == "heal":
        if state.spoilt:
            steps.append(step("heal"))
            state.spoilt = ""
    elif do == "purge":
        if state.present and not state.spoilt:
            steps.append(step("store", how="emptied"))
            state.present.clear()
    elif do == "reset":
        (cache,) = fields
        steps.append(step("reset", cache=cache))
        if cache == "encoder":
            state.held.clear()
    elif do == "restart":
        (servers,) = fields
        steps.append(step("restart", servers=servers))
        if servers != "consumer":
            state.held.clear()
    else:
        raise ValueError(f"no operation {do!r}")
