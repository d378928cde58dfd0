"""What an EC connector may be able to do beyond the core: a subject declares it, everything else is off.

A feature exists only where a requirement needs it. What a subject does not declare is listed under
`notVerified` of the report and never passed; the core (one or several images, one producer, raw media in
every request) has no feature.
"""

from __future__ import annotations

from enum import StrEnum


class Feature(StrEnum):
    """One optional ability of a subject; `description` says what declaring it promises."""

    KV_DISAGGREGATION = "kv_disaggregation"
    EC_BOTH = "ec_both"
    METADATA_ONLY = "metadata_only"
    ASYNC_TRANSFER = "async_transfer"
    MULTI_PRODUCER = "multi_producer"
    MULTI_CONSUMER = "multi_consumer"
    PERSISTENT_STORE = "persistent_store"
    STORE_PROBE = "store_probe"
    FILE_STORE = "file_store"
    LORA = "lora"
    STATS = "stats"

    @property
    def description(self) -> str:
        """What a subject promises that declares this feature, in one sentence."""
        return DESCRIPTIONS[self]


DESCRIPTIONS: dict[Feature, str] = {
    Feature.KV_DISAGGREGATION: (
        "The connector works on servers that also carry a KV connector, so that prefill and decode may be "
        "separate servers (e-p-d)."
    ),
    Feature.EC_BOTH: "The connector takes `ec_role: ec_both`: one server is producer and consumer at once.",
    Feature.METADATA_ONLY: (
        "A request may carry an item's identifier and placeholder metadata instead of its media; there is "
        "then nothing to encode locally, and a lost object must fail that request alone."
    ),
    Feature.ASYNC_TRANSFER: (
        "The connector defers a request through `ensure_cache_available` until its items have arrived, "
        "instead of loading within the step; its deferral must be bounded, since the scheduler's is not."
    ),
    Feature.MULTI_PRODUCER: "Several encode servers may save at the same time, also the same identifier.",
    Feature.MULTI_CONSUMER: "Several consumers may load the same object, at once and one after the other.",
    Feature.PERSISTENT_STORE: (
        "What was saved outlives the server that saved it: a restarted server meets objects from before."
    ),
    Feature.STORE_PROBE: (
        "The subject gives a probe (keys, read, write, delete) that reaches its store without the connector."
    ),
    Feature.FILE_STORE: (
        "Every stored object is one file that the harness can reach, and the subject's probe names it (`file`)."
    ),
    Feature.LORA: (
        "Requests with LoRA adapters on the vision tower or its projector are kept apart, answered rightly."
    ),
    Feature.STATS: "The connector returns statistics through vLLM's EC statistics and metrics hooks.",
}

FEATURE_OF_TOPOLOGY: dict[str, Feature] = {
    # A single server with an EC connector is producer and consumer at once.
    "aggregated": Feature.EC_BOTH,
    # An EC connector that never met a KV connector may refuse to start beside one (ECMooncakeConnector has no
    # address for a separate prefill server), so a third of the servers is something to declare, not something
    # to assume.
    "e-p-d": Feature.KV_DISAGGREGATION,
}
"""Topologies that a subject must opt into, and the feature that does it."""
