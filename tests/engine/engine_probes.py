"""What tests run inside a child of the host, where vLLM is imported: functions of `Host.call`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import Phase, given, seed, settings

from epd_conformance.engine import configs, machine, requests, sides
from epd_conformance.engine.corpus import corpus
from epd_conformance.engine.plan import Plan
from epd_conformance.engine.real_core import scheduler_core
from epd_conformance.engine.schedule_judge import RECORDED
from epd_conformance.engine.server import contract_core
from epd_conformance.engine.strategies import plans
from epd_conformance.features import Feature
from epd_conformance.subject import Subject

FEATURES = frozenset({Feature.EC_BOTH, Feature.MULTI_CONSUMER, Feature.METADATA_ONLY, Feature.STORE_PROBE})


def trace(plan: Plan, subject: Subject, root: Path, make_core: Any) -> list[str]:
    """Every call of every hook, with what tells calls apart: request, item, tokens, and the steps' numbers."""
    calls: list[Any] = []
    original = sides.Side._guarded

    def guarded(self: Any, hook: str, function: Any, *arguments: Any, **keywords: Any) -> Any:
        result = original(self, hook, function, *arguments, **keywords)
        shown = [_shown(argument) for argument in (*arguments, *keywords.values())]
        calls.append([self.name, hook, shown, result if isinstance(result, bool) else None])
        return result

    sides.Side._guarded = guarded  # type: ignore[method-assign]
    try:
        outcome = machine.run(plan, subject, root, make_core=make_core, keep_events=True, explain=False)
    finally:
        sides.Side._guarded = original  # type: ignore[method-assign]
    # What only one of the two cores records says nothing about the calls.
    events = [event[1] for event in outcome.events if event[1][0] not in {"raised", *RECORDED}]
    # Identifiers may hold the folder of the run.
    return [repr(shown).replace(str(root), "ROOT") for shown in (*calls, *events)]


def _shown(argument: Any) -> Any:
    if hasattr(argument, "request_id"):
        return [argument.request_id, argument.num_computed_tokens, argument.num_preemptions, argument.status.name]
    if hasattr(argument, "num_scheduled_tokens"):
        return [
            argument.num_scheduled_tokens,
            argument.scheduled_encoder_inputs,
            argument.free_encoder_mm_hashes,
            sorted(argument.finished_req_ids),
            [new.req_id for new in argument.scheduled_new_reqs],
            argument.scheduled_cached_reqs.req_ids,
            argument.scheduled_cached_reqs.num_computed_tokens,
            argument.scheduled_cached_reqs.num_output_tokens,
        ]
    if isinstance(argument, dict):
        return sorted(argument)
    return sorted(argument) if isinstance(argument, set) else argument if isinstance(argument, str | int) else None


def first_difference(subject: Subject, root: Path, *, examples: int, fault: str = "") -> str:
    """Where the core of the contract layer and vLLM's Scheduler call a hook differently, or ""; in the corpus and drawn plans.

    `fault`: changes the core, to show that a difference would be seen.
    """
    from epd_conformance.engine.core import Core

    if fault == "free-first":
        Core._free_request = _frees_first  # type: ignore[method-assign]
    compared = 0
    for name, plan in {**corpus(FEATURES, apart=False), **_drawn(examples)}.items():
        traces = []
        for core in (contract_core, scheduler_core):
            compared += 1
            traces.append(trace(plan, subject, root / f"{compared}", core))
        if traces[0] != traces[1]:
            pairs = zip(*traces, strict=False)
            return f"{name}: {next((pair for pair in pairs if pair[0] != pair[1]), 'events or length')}"
    return ""


def _frees_first(self: Any, request: Any) -> None:
    self.ec_connector.update_state_after_free(request, 0) if request.mm_features else None
    self.ec_connector.request_finished(request)
    self.encoder_cache_manager.free(request)
    self.finished_req_ids.add(request.request_id)
    del self.requests[request.request_id]


def _drawn(examples: int) -> dict[str, Plan]:
    found: dict[str, Plan] = {}

    @settings(max_examples=examples, deadline=None, database=None, phases=(Phase.generate,))
    @seed(5)
    @given(plans(FEATURES, "everything"))
    def draw(plan: Plan) -> None:
        found[f"drawn-{len(found)}"] = plan

    draw()
    return found


def request_shape(subject: Subject, root: Path) -> dict[str, Any]:
    """What the request factory makes of sparse, bare and payload-less items."""
    made = requests.make_request("r", [("a", 4, 2), ("b", 2, 0), ("c", 1, 0)], media=[True, False, None], text=2)
    features = made.mm_features
    return {
        "tokens": made.num_prompt_tokens,
        "positions": [[f.mm_position.offset, f.mm_position.length, f.mm_position.get_num_embeds()] for f in features],
        "media": [requests.has_media(feature) for feature in features],
        "data": [None if feature.data is None else sorted(feature.data) for feature in features],
    }


def config_facts(subject: Subject, root: Path) -> dict[str, Any]:
    """What a connector can ask of the configurations that it is given."""
    config = {"ec_connector": "ECExampleConnector", "ec_connector_extra_config": {"x": str(root)}}
    made = {
        name: configs.make(config, role, runner=runner, asynchronous=ahead, dtype=dtype, encoder_decoder=decoder)
        for name, role, runner, ahead, dtype, decoder in (
            ("producer", "ec_producer", "v1", False, "float32", False),
            ("consumer", "ec_consumer", "v2", True, "bfloat16", False),
            ("whisper", "ec_consumer", "v1", False, "float32", True),
        )
    }
    first = made["producer"]
    again = configs.make(config, "ec_producer", engine_id="e")
    return {
        "v2": [value.use_v2_model_runner for value in made.values()],
        "encode_only": [value.is_mm_encoder_only for value in made.values()],
        "ahead": [value.scheduler_config.async_scheduling for value in made.values()],
        "dtype": [str(value.model_config.dtype) for value in made.values()],
        "encoder_decoder": [value.model_config.is_encoder_decoder for value in made.values()],
        "shared": first.ec_transfer_config is again.ec_transfer_config or first.model_config is again.model_config,
        "engine": again.ec_transfer_config.engine_id,
    }


def together_and_apart(subject: Subject, root: Path) -> list[bool]:
    """Whether a plan shows the same events when every object lives in a process of its own."""
    plan = corpus(FEATURES)["transfer-v1"]
    kept = []
    for apart in (False, True):
        outcome = machine.run(replace(plan, apart=apart), subject, root / str(apart), keep_events=True)
        kept.append([[name, list(event)] for name, event in outcome.events])
    return [kept[0] == kept[1], len(kept[0]) > 20]
