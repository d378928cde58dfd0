"""Steps: what a scripted cell does between its requests, as data. Pure.

A step is a JSON object with `do` and the fields below. The requests of the plan are sent in their order: one for each `send`, and
as many as it says for each `together`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Of `send`: how a request must be answered; in a script of which the baseline is asked the whole, not its requests one by one
#: (the second one may fail alone); and what it must fail of: an error of whatever kind, one after the connector gave the
#: request up, or a 4xx answer.
ANSWERED = ("loaded", "saved", "any", "contained")
AS_AGGREGATED = ("as-aggregated", "as-aggregated-or-fails")
MUST_FAIL = ("fails", "given-up", "refused")

#: Step -> its fields and their values; an empty tuple: any text.
STEPS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    # The next request goes to the stack as clients send it, or past the encode servers: as it is, as a `reference` (what an
    # encode server says of its item, in place of the media, under the uuid of the plan), or with the `uuid-alone`.
    # `how` is how its items must come to the consumer: loaded by this request; saved anew since the step before and loaded; or
    # as may be. `contained`: answered rightly, or failed alone. The hows of `AS_AGGREGATED` ask for what the aggregated server
    # answers when it is sent the script, those of `MUST_FAIL` for an error. `unjudged`: nothing is asked of the answer,
    # since a fault of somebody else's is in force.
    "send": {
        "way": ("proxy", "past-encode", "reference", "uuid-alone"),
        "how": (*ANSWERED, *AS_AGGREGATED, *MUST_FAIL, "unjudged"),
    },
    # As many requests as `count` go through the proxy at once: an encode server is held until all have been sent. `how`: each
    # is answered, its item loaded or held (`crossed`), and saved once by each encode server at most (`once`); or each is
    # answered, from wherever, or fails alone (`contained`).
    "together": {"count": (), "how": ("crossed", "once", "contained")},
    # An encode server saves the next request's item, as the proxy has it done.
    "prime": {},
    # The same, as often at once as `count` says; or by a request that is held before or after the call that saves, until `release`.
    "prime-together": {"count": ()},
    "prime-held": {"point": ("saving", "saved")},
    "release": {},
    # The object that was primed last, or that of the first request, is damaged (`faults.store.FAULTS`), or put back.
    "damage": {"kind": ()},
    "heal": {},
    # A cache of every server is emptied over the server's own route.
    "reset": {"cache": ("encoder", "mm", "prefix")},
    # Servers are ended and started again as they were, over the same store.
    "restart": {"servers": ("encode", "consumer", "all")},
    # All objects are removed through the probe; the store's folder is moved away; or it is as before again.
    "store": {"how": ("emptied", "removed", "mended")},
    # From `begin` to `end` objects are removed through the probe, in random order, as fast as it can.
    "purge": {"how": ("begin", "end")},
    # What lies beside the store is written down: from the first look of a script to its last nothing of it may change.
    "look": {},
}

#: Steps that hold somebody in a server.
HOLDING = frozenset({"together", "prime-together", "prime-held"})

#: Steps that have the next request's item saved by hand.
PRIMING = frozenset({"prime", "prime-together", "prime-held"})


def sent(one: Mapping[str, Any]) -> int:
    """How many requests of the plan a step sends."""
    return {"send": 1, "together": int(one.get("count", 0))}.get(one["do"], 0)


def step(do: str, **fields: str) -> Mapping[str, str]:
    """A step. Raises ValueError for what is none."""
    checked = {"do": do, **fields}
    check(checked)
    return checked


def send(how: str, way: str = "proxy") -> Mapping[str, str]:
    """The step that sends the next request."""
    return step("send", way=way, how=how)


def check(one: Mapping[str, Any]) -> None:
    """Raises ValueError for what is no step."""
    known = STEPS.get(one.get("do", ""))
    if known is None:
        raise ValueError(f"no step does {one.get('do')!r}: known are {', '.join(STEPS)}")
    if set(one) != {"do", *known}:
        raise ValueError(f"a step that does {one['do']!r} has the fields {', '.join(known) or 'none'}: {dict(one)}")
    for name, values in known.items():
        if values and one[name] not in values:
            raise ValueError(f"{name} of {one['do']!r} is one of {', '.join(values)}, not {one[name]!r}")
