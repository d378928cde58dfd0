"""What the proxy counts and times, in Prometheus' text format.

One registry an app, so that two proxies in one process keep apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics import MetricWrapperBase

# From what an idle proxy adds to what a long generation takes.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


M = TypeVar("M", bound=MetricWrapperBase)


class Series(Generic[M]):
    """A metric's series by their labels; remembered, because a request touches a dozen and finding one takes longer than
    counting in it."""

    def __init__(self, metric: M) -> None:
        self._metric = metric
        self._known: dict[tuple[object, ...], M] = {}

    def labels(self, *values: object) -> M:
        """The series with these label values, in the order in which the metric names them."""
        known = self._known.get(values)
        if known is None:
            known = self._known[values] = self._metric.labels(*values)
        return known


class Metrics:
    """The series. `stage` is encode, prefill, decode or proxy; `kind` of a failure is refused, unreachable, hung-up, silent,
    broken or malformed; `status` is an HTTP status, 499 for a client that went away."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Series[Counter]:
            return Series(Counter(f"epd_proxy_{name}", text, labels, registry=self.registry))

        def gauge(name: str, text: str, *labels: str) -> Series[Gauge]:
            return Series(Gauge(f"epd_proxy_{name}", text, labels, registry=self.registry))

        def histogram(name: str, text: str, *labels: str) -> Series[Histogram]:
            return Series(Histogram(f"epd_proxy_{name}", text, labels, registry=self.registry, buckets=SECONDS))

        self.requests = counter("requests", "Client requests that have ended", "route", "status")
        self.request_seconds = histogram("request_seconds", "From the body's arrival to the answer's end", "route")
        self.requests_in_flight = gauge("requests_in_flight", "Client requests that have not ended", "route")
        self.items = counter("items", "Media items of requests that were orchestrated", "kind")
        self.legs = counter(
            "legs", "Requests to upstream servers, by the status of the answer", "stage", "upstream", "status"
        )
        self.legs_in_flight = gauge(
            "legs_in_flight", "Requests to upstream servers that have not ended", "stage", "upstream"
        )
        self.stage_seconds = histogram("stage_seconds", "Time that a request spent in a stage", "stage")
        self.failures = counter(
            "upstream_failures", "Requests to upstream servers that failed", "stage", "upstream", "kind"
        )
        self.retries = counter("retries", "Legs that were sent again", "stage")
        self.fallbacks = counter(
            "fallbacks", "Requests whose items were sent whole after metadata alone was refused", "stage"
        )
        self.bypasses = counter("bypasses", "Requests that decode servers answered without the stages before", "reason")
        self.healthy = gauge("upstream_healthy", "1 where the server's /health answered 200", "role", "upstream")

    def render(self, health: Mapping[Any, list[dict[str, Any]]]) -> bytes:
        """All series as text; `health` is what `Upstreams.health` returned just now."""
        for role, servers in health.items():
            for server in servers:
                self.healthy.labels(role, server["url"]).set(server["healthy"])
        return generate_latest(self.registry)
