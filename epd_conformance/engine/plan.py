"""Engine plans: a JSON list of operations that fixes everything a run of the state machine does.

Every list of operations can be executed: indices are taken modulo what exists, and an operation that has nothing to act on does
nothing. So a plan stays valid when a shrinker, or a person, takes operations out.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from epd_conformance.engine.content import DTYPES, Content
from epd_conformance.errors import UsageError

SCHEMA = "epd-conformance/engine-plan/v1"
ROLES = ("ec_producer", "ec_consumer", "ec_both")
RUNNERS = ("v1", "v2")
KV = ("", "refuse", "preempt", "preempt-last")
DAMAGES = (
    "deleted",
    "truncated",
    "empty",
    "garbage",
    "code",
    "replaced",
    "one-row",
    "rows-missing",
    "rows-added",
    "width",
    "dtype",
    "flipped-bit",
    "zero-tail",
    "scribbled",
    "cut-in-place",
)
STORE_FAULTS = ("full", "read-only", "removed")
#: No fault: a store whose files take their time to open, as over a network.
SLOW = "slow"
#: Where in a step a damage may fall: between look-up and allocation, or between allocation and load.
WINDOWS = ("alloc", "load")

#: Operation -> its fields with the value that a missing one has.
OPERATIONS: dict[str, dict[str, Any]] = {
    # A request arrives. `items`: indices into the plan's items; `media`: "all", "none", "odd" (every second item has none) or
    # "stripped" (no payload of any kind, as for what the engine has seen before); `text`: tokens before, between and behind the
    # items; `tokens`: how many are generated; `params`: ec_transfer_params; `priority`: the lower, the sooner.
    "request": {"server": 0, "items": [], "media": "all", "text": 1, "tokens": 1, "params": None, "priority": 0},
    # `times` engine steps of at most `tokens` tokens. `kv` "refuse": the KV cache has no room for a waiting request;
    # "preempt": none for the first running one, "preempt-last": none for the last running one; a request is preempted for it.
    # `during`: a damage within the first step.
    "step": {"server": 0, "tokens": 64, "times": 1, "kv": "", "during": None, "watch": False},
    # Steps until the server has nothing to do, at most `LIMIT_RUN`.
    "run": {"server": 0, "tokens": 64},
    # The items are encoded by a producer and then asked for on a consumer (-1: on none), each as one request that runs to its end.
    "transfer": {"items": [0], "producer": 0, "consumer": 0, "media": "all"},
    "abort": {"server": 0, "request": 0},
    # The client's end of a request that the engine has forgotten already.
    "again": {"server": 0, "request": 0},
    # All entries of the encoder cache that nobody holds leave it, in a step of their own, or (`same_pass`) in the next pass: one
    # that is asked for there is allocated anew while the worker still has its tensor (`get_freed_mm_hashes`).
    "evict": {"server": 0, "same_pass": False},
    "reset": {"server": 0},
    "damage": {"item": 0, "how": "deleted"},
    "store": {"fault": ""},
    "restart": {"server": 0, "graceful": True},
    "wait": {"seconds": 1},
    # The connector is made to name a request as unavailable: one of `UNAVAILABLE`.
    "name": {"server": 0, "who": "unknown"},
}

#: One that nobody knows; the last one that has ended; the last one that has not.
UNAVAILABLE = ("unknown", "ended", "live")

LIMIT_RUN = 64


@dataclass(frozen=True)
class ServerSpec:
    """One server of the plan. `cache`: rows that its encoder cache holds; `budget`: rows it may encode in a step.

    `ranks`: WORKER objects for the one SCHEDULER object; `asynchronous`: step N+1 is scheduled before the results of step N are
    known; `late`: the worker executes a step only after the next one was scheduled.

    What follows is for vLLM's own Scheduler; the core of the contract layer knows nothing of it. `blocks`: of the KV cache
    (0: more than any plan needs); `prefix_caching`, `whole_items` (`disable_chunked_mm_input`) and `priority` (the scheduling
    policy) as vLLM's options; `drafts`: speculative tokens of each step, half of which are accepted; `lookahead`: tokens behind a
    chunk that the drafter reads (1 with EAGLE); `kv_connector`: the blocks of what has ended are kept until they were sent.
    """

    role: str
    runner: str = "v1"
    ranks: int = 1
    asynchronous: bool = False
    late: bool = False
    cache: int = 64
    budget: int = 64
    blocks: int = 0
    prefix_caching: bool = False
    whole_items: bool = False
    priority: bool = False
    drafts: int = 0
    lookahead: int = 0
    kv_connector: bool = False


@dataclass(frozen=True)
class ItemSpec:
    """One item. Its identifier is `key` behind `pad` times the letter x; `{outside}` in it is a folder outside the store.

    `gaps`: tokens of the placeholder that are no embeddings, one in front of each of the first so many rows. `strided`: the
    encoder's output is not contiguous. Rows are as wide as the model's encoder makes them: vLLM measures that width at start, and
    a connector may hold every object against it.
    """

    key: str
    seed: int
    rows: int = 4
    gaps: int = 0
    pad: int = 0
    strided: bool = False

    def identifier(self, outside: str) -> str:
        return "x" * self.pad + self.key.replace("{outside}", outside)

    def content(self, hidden: int, dtype: str) -> Content:
        return Content(self.seed, self.rows, hidden, dtype)


@dataclass(frozen=True)
class Plan:
    """Servers, items and operations. `apart`: every object of every server lives in a process of its own."""

    servers: tuple[ServerSpec, ...]
    items: tuple[ItemSpec, ...]
    operations: tuple[Mapping[str, Any], ...]
    dtype: str = "float32"
    apart: bool = False
    shutdown: str = field(default="worker-first")

    def __post_init__(self) -> None:
        if not self.servers or not self.items:
            raise UsageError("an engine plan needs at least one server and one item")
        for server in self.servers:
            if server.role not in ROLES or server.runner not in RUNNERS or server.ranks < 1:
                raise UsageError(f"an engine plan has no such server: {server}")
            if min(server.cache, server.budget) < max(item.rows for item in self.items):
                # The front end refuses such a request (v1/engine/input_processor.py).
                raise UsageError(f"an item of the plan is larger than the encoder cache or budget of {server}")
        if self.dtype not in DTYPES:
            raise UsageError(f"an engine plan has no dtype {self.dtype!r}: known are {', '.join(DTYPES)}")
        for item in self.items:
            _check_key(item)
        for operation in self.operations:
            _check(operation)

    def with_operations(self, operations: Sequence[Mapping[str, Any]]) -> Plan:
        return replace(self, operations=tuple(operations))

    def server_names(self) -> list[str]:
        """What events call the servers, such as `producer-0`."""
        return [f"{server.role.removeprefix('ec_')}-{index}" for index, server in enumerate(self.servers)]

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON. Fields that have their usual value are left out, so that a shrunk plan is short."""
        usual = ServerSpec("")
        return {
            "schema": SCHEMA,
            "servers": [_differing(asdict(server), {**asdict(usual), "role": None}) for server in self.servers],
            "items": [
                _differing(asdict(item), {**asdict(ItemSpec("", 0)), "key": None, "seed": None}) for item in self.items
            ],
            "operations": [dict(operation) for operation in self.operations],
            **_differing({"dtype": self.dtype, "apart": self.apart, "shutdown": self.shutdown}, _USUAL),
        }

    def to_text(self) -> str:
        return json.dumps(self.to_json(), ensure_ascii=True)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """Raises UsageError for anything that is no engine plan."""
        if data.get("schema") != SCHEMA:
            raise UsageError(f"this is no engine plan: its schema is {data.get('schema')!r} and should be {SCHEMA!r}")
        try:
            return cls(
                servers=tuple(ServerSpec(**server) for server in data["servers"]),
                items=tuple(ItemSpec(**item) for item in data["items"]),
                operations=tuple(data["operations"]),
                **{name: data[name] for name in _USUAL if name in data},
            )
        except (TypeError, KeyError) as error:
            raise UsageError(f"the engine plan cannot be read ({error}): write it as `Plan.to_json` does") from error


_USUAL: dict[str, Any] = {"dtype": "float32", "apart": False, "shutdown": "worker-first"}


def argument(operation: Mapping[str, Any], name: str) -> Any:
    """A field of an operation, or the value that it has when it is missing."""
    return operation.get(name, OPERATIONS[operation["op"]][name])


def _differing(values: dict[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value != usual.get(name)}


def _check_key(item: ItemSpec) -> None:
    """A connector that takes a key for a path may write where it leads: never beside the folder of the plan."""
    path = posixpath.normpath(posixpath.join("/plan/stack/store", item.identifier("/plan/outside")))
    if not path.startswith("/plan/"):
        raise UsageError(
            f"the key {item.key!r} leads out of the plan's folder: write {{outside}} for a place beside the store"
        )


def _check(operation: Mapping[str, Any]) -> None:
    name = operation.get("op")
    if name not in OPERATIONS:
        raise UsageError(f"no operation is called {name!r}: known are {', '.join(OPERATIONS)}")
    unknown = set(operation) - set(OPERATIONS[name]) - {"op"}
    if unknown:
        raise UsageError(
            f"operation {name!r} has no field {sorted(unknown)[0]!r}: it has {', '.join(OPERATIONS[name])}"
        )
    if name == "damage" and argument(operation, "how") not in DAMAGES:
        raise UsageError(f"no damage is called {operation.get('how')!r}: known are {', '.join(DAMAGES)}")
    if name == "store" and argument(operation, "fault") not in ("", *STORE_FAULTS, SLOW):
        raise UsageError(
            f"no fault of the store is called {operation.get('fault')!r}: known are {', '.join((*STORE_FAULTS, SLOW))}"
        )
    if name == "name" and argument(operation, "who") not in UNAVAILABLE:
        raise UsageError(f"nobody is called {operation.get('who')!r}: known are {', '.join(UNAVAILABLE)}")
    if name == "step":
        during = argument(operation, "during")
        if argument(operation, "kv") not in KV or (
            during is not None and (during.get("at") not in WINDOWS or during.get("how") not in DAMAGES)
        ):
            raise UsageError(
                f"a step cannot be done as {dict(operation)}: kv is one of {KV}, during.at one of {WINDOWS}"
            )
