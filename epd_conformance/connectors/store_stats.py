"""What the verified store counts, and how it reaches a server's log and ``/metrics``.

vLLM carries statistics of a connector to its API server (``distributed/ec_transfer/ec_connector/metrics.py``): those of the
SCHEDULER object after every step, those of a WORKER object with runner V2 directly, with V1 as worker metadata. Only a V1
encode server drops everything that its worker reports, so there the worker sends its counts to the SCHEDULER object through
a local datagram socket.

All values are sums over the time since they were last taken: adding them in any order gives the same.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorWorkerMetadata
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: name -> (help, whether it is counted by reason). In a mapping of statistics a count by reason is ``name:reason``.
COUNTERS: dict[str, tuple[str, bool]] = {
    "saves": ("Encoder outputs published in the store", False),
    "republished": ("Of the saves: outputs that were published again, because the object had gone or was bad", False),
    "save_failures": ("Encoder outputs that were not published", True),
    "loads": ("Encoder outputs put into the worker's encoder cache", False),
    "hits": ("Items that the engine asked for and was promised", False),
    "misses": ("Items that the engine asked for and was not promised: it encoded them", True),
    "refused": ("Stored objects that were looked at and not used", True),
    "unavailable_requests": ("Requests that failed, because an item had neither an object nor media", False),
    "quarantined": ("Damaged objects moved to quarantine", True),
    "reclaimed": ("Objects deleted for the limits of size and age", False),
    "saved_bytes": ("Bytes of the published outputs", False),
    "loaded_bytes": ("Bytes of the loaded outputs", False),
    "reclaimed_bytes": ("Bytes of the objects deleted for the limits", False),
    "save_seconds": ("Time spent publishing", False),
    "load_seconds": ("Time spent loading in the workers", False),
    "lookup_seconds": ("Time spent reading and verifying for look-ups", False),
    "step_wait_seconds": ("Time that scheduler steps waited for look-ups", False),
}

_MAIL_BYTES = 64 << 10  # far more than all names and numbers take


class StoreStats(ECConnectorStats):  # type: ignore[misc]
    """vLLM's container: ``data`` maps a counter's name, with ``:reason`` where it has one, to a number."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: ECConnectorStats) -> StoreStats:
        return StoreStats(dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, int | float]:
        """For the line that vLLM logs in each interval."""
        return {name: round(value, 4) for name, value in sorted(self.data.items())}

    def is_empty(self) -> bool:
        return not self.data


@dataclass
class WorkerTally(ECConnectorWorkerMetadata):  # type: ignore[misc]
    """The counts of one worker on their way to the SCHEDULER object."""

    data: dict[str, float]

    def aggregate(self, other: ECConnectorWorkerMetadata) -> WorkerTally:
        return WorkerTally(dict(Counter(self.data) + Counter(other.data)))


class Tally:
    """Counts of one process. Thread-safe.

    Attributes:
        total: everything since the start.
    """

    def __init__(self) -> None:
        self.total: dict[str, float] = {}
        self._taken: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, name: str, value: float = 1, reason: str = "") -> float:
        """Count; returns the new total."""
        full = f"{name}:{reason}" if reason else name
        with self._lock:
            total = self.total[full] = self.total.get(full, 0) + value
        return total

    def merge(self, data: dict[str, float]) -> None:
        """Add what another process counted."""
        for name, value in data.items():
            self.add(name, value)

    def take(self) -> dict[str, float]:
        """What was added since this was last called."""
        with self._lock:
            now = dict(self.total)
        data = {name: value - self._taken.get(name, 0) for name, value in now.items()}
        self._taken = now
        return {name: value for name, value in data.items() if value}


class Mailbox:
    """Counts from the workers of a V1 encode server to its SCHEDULER object, on this host.

    An abstract address (Linux) has no file and goes with its socket. Where there is none, or another server has the same
    ``engine_id``, nothing is sent and the saves are missing from the statistics.
    """

    def __init__(self, engine_id: str, *, receive: bool) -> None:
        self._address = f"\0epd-verified-store/{engine_id}"
        self._socket: socket.socket | None = None
        with contextlib.suppress(OSError, AttributeError):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            if receive:
                self._socket.bind(self._address)

    def send(self, data: dict[str, float]) -> bool:
        """Whether the receiver will get it. Never waits: the queue of a datagram socket is short."""
        if self._socket is None or not data:
            return False
        try:
            self._socket.sendto(json.dumps(data).encode(), self._address)
        except OSError:
            return False
        return True

    def receive(self) -> list[dict[str, float]]:
        """Everything that has come."""
        letters: list[dict[str, float]] = []
        while self._socket is not None:
            try:
                letter = json.loads(self._socket.recv(_MAIL_BYTES))
            except OSError:
                break
            except ValueError:
                continue
            if isinstance(letter, dict):
                known = {
                    name: value
                    for name, value in letter.items()
                    if name.partition(":")[0] in COUNTERS and isinstance(value, int | float)
                }
                letters.append(known)
        return letters

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class StorePromMetrics(ECConnectorPromMetrics):  # type: ignore[misc]
    """One Prometheus counter ``vllm:ec_store_<name>_total`` for each of ``COUNTERS``."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._counter_cls(
                name=f"vllm:ec_store_{name}",
                documentation=f"{text} by the verified store.",
                labelnames=[*labelnames, "reason"] if by_reason else labelnames,
            )
            for name, (text, by_reason) in COUNTERS.items()
        }
        for name, (_, by_reason) in COUNTERS.items():
            if not by_reason:  # there from the start, as zero
                for values in per_engine_labelvalues.values():
                    self._counters[name].labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for full, amount in transfer_stats_data.items():
            name, _, reason = full.partition(":")
            if name in COUNTERS and amount > 0:
                labels = [*values, reason] if COUNTERS[name][1] else values
                self._counters[name].labels(*labels).inc(amount)
