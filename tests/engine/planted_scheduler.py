"""Fakes: vLLM's Scheduler and EncoderCacheManager with one small defect each, which the judge of the scheduler layer must find.

A defect is a change of a method's source text, so that it breaks in one place what is right everywhere else. `MENDED` are the other
way round: what vLLM 0.32 breaks itself, put right in one place.
"""

from __future__ import annotations

from dataclasses import dataclass

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
MANAGER = "vllm.v1.core.encoder_cache_manager:EncoderCacheManager"
CONFIG = "vllm.config.ec_transfer:ECTransferConfig"


@dataclass(frozen=True)
class Planted:
    """`method` of `where` (module:class) with each text of `changes` replaced by the other; `plans` meet it."""

    what: str
    where: str
    method: str
    changes: tuple[tuple[str, str], ...]
    plans: tuple[str, ...] = ()


#: Requirement -> the defect that breaks it.
DEFECTS: dict[str, Planted] = {
    "EPD-ERR-011": Planted(
        "Expects to know every request that the connector names.",
        SCHEDULER,
        "finish_requests",
        (("request = self.requests.get(req_id)", "request = self.requests[req_id]"),),
        ("named-unknown", "named-ended"),
    ),
    "EPD-KEY-015": Planted(
        "Takes the engine id for something that is compiled.",
        CONFIG,
        "compute_hash",
        (("factors: list[Any] = []", "factors: list[Any] = [self.engine_id]"),),
    ),
    "EPD-KV-010": Planted(
        "Keeps the blocks of a request that was given up.",
        SCHEDULER,
        "_free_request_blocks",
        (
            (
                "def _free_request_blocks(self, request: Request):\n",
                "{0}    if request.status.name == 'FINISHED_ERROR':\n        return\n",
            ),
        ),
        ("given-up-computing",),
    ),
    "EPD-LIFE-014": Planted(
        "Will not make a step of less than four tokens in front of an item.",
        SCHEDULER,
        "_try_schedule_encoder_inputs",
        (("if num_computed_tokens + shift_computed_tokens < start_pos:", "if num_computed_tokens + 3 < start_pos:"),),
        ("adjacent-loaded-3", "adjacent-encoded-5"),
    ),
    "EPD-LIFE-015": Planted(
        "A request that waits keeps what it has found in the cache.",
        MANAGER,
        "free",
        (("for input_id in", "if request.status.name == 'WAITING':\n        return\n    for input_id in"),),
        ("crowd-held",),
    ),
    "EPD-LIFE-016": Planted(
        "Goes on by a token where an item has no room.",
        SCHEDULER,
        "_try_schedule_encoder_inputs",
        (
            (
                "                num_new_tokens = 0\n            break",
                "                num_new_tokens = 1\n            break",
            ),
        ),
        ("prefix-inside",),
    ),
    "EPD-LIFE-017": Planted(
        "Knows no `disable_chunked_mm_input`.",
        SCHEDULER,
        "_try_schedule_encoder_inputs",
        (("self.scheduler_config.disable_chunked_mm_input", "False"),),
        ("whole-8", "whole-9"),
    ),
    "EPD-LIFE-018": Planted(
        "Lets an entry go as soon as nobody holds it.",
        MANAGER,
        "free_encoder_input",
        (
            (
                "        self.num_freeable_slots += num_encoder_embeds",
                "        self.num_freeable_slots += num_encoder_embeds\n"
                "        self.num_free_slots += self.freeable.pop(mm_hash)\n"
                "        del self.cached[mm_hash], self.num_embeds_by_hash[mm_hash]\n"
                "        self.freed.append(mm_hash)",
            ),
        ),
        ("adjacent-loaded-3", "stripped"),
    ),
    "EPD-LIFE-019": Planted(
        "Gives an item back at its first occurrence.",
        MANAGER,
        "free_encoder_input",
        (("if any(", "if False and any("),),
        ("again-soon-6",),
    ),
    "EPD-LIFE-020": Planted(
        "Gives an item back when its step is scheduled, drafts and all.",
        SCHEDULER,
        "_update_after_schedule",
        (
            (
                "request.num_in_flight_tokens += num_scheduled_token",
                "request.num_in_flight_tokens += num_scheduled_token\n"
                "        if self.num_spec_tokens:\n            self._free_encoder_inputs(request)",
            ),
        ),
        ("drafts-64", "drafts-5"),
    ),
    "EPD-XFER-016": Planted(
        "Encodes without asking the connector.",
        SCHEDULER,
        "_try_schedule_encoder_inputs",
        (("self.ec_connector is not None and", "False and"),),
        ("ways",),
    ),
    "EPD-XFER-017": Planted(
        "Charges a load to the encoder's budget.",
        SCHEDULER,
        "_try_schedule_encoder_inputs",
        (
            (
                "external_load_encoder_input.append(i)\n",
                "external_load_encoder_input.append(i)\n            encoder_compute_budget -= num_encoder_embeds\n",
            ),
        ),
        ("loads-and-one-encode",),
    ),
    "EPD-XFER-018": Planted(
        "Tells of every occurrence of an item.",
        SCHEDULER,
        "_allocate_encoder_inputs",
        (
            (
                "    for input_id in duplicate_input_ids:\n",
                "    for input_id in duplicate_input_ids:\n        self.ec_connector.update_state_after_alloc(request, input_id)\n",
            ),
        ),
        ("ways",),
    ),
    "EPD-XFER-019": Planted(
        "Asks for metadata only where something is scheduled.",
        SCHEDULER,
        "schedule",
        (
            (
                "    if self.ec_connector is not None:\n        ec_meta",
                "    if self.ec_connector is not None and total_num_scheduled_tokens:\n        ec_meta",
            ),
        ),
        ("transfer-v1",),
    ),
    "EPD-XFER-020": Planted(
        "Looks at items from the beginning of the prompt.",
        SCHEDULER,
        "_try_schedule_encoder_inputs",
        (
            ("start=num_computed_tokens,", "start=0,"),
            ("start_idx_rel = max(0, num_computed_tokens - start_pos)", "start_idx_rel = 0"),
        ),
        ("prefix-covered",),
    ),
    "EPD-XFER-021": Planted(
        "Takes the payload for granted.",
        SCHEDULER,
        "_try_schedule_encoder_inputs",
        (
            (
                "item_identifier = mm_feature.identifier\n",
                "item_identifier = mm_feature.identifier\n        mm_feature.data['pixel_values']\n",
            ),
        ),
        ("stripped",),
    ),
    "EPD-XFER-022": Planted(
        "Counts tokens of placeholders as rows.",
        MANAGER,
        "allocate",
        (
            (
                "num_encoder_embeds = request.get_num_encoder_embeds(input_id)",
                "num_encoder_embeds = request.mm_features[input_id].mm_position.length",
            ),
        ),
        ("sparse",),
    ),
}

#: What vLLM 0.32 itself breaks -> how it would not.
MENDED: dict[str, Planted] = {
    "EPD-LIFE-017": Planted(
        "A step that begins at an item is no exception.",
        SCHEDULER,
        "_try_schedule_encoder_inputs",
        (("and num_computed_tokens < start_pos\n", "and num_computed_tokens <= start_pos\n"),),
        ("whole-5", "whole-6", "whole-7"),
    ),
    "EPD-LIFE-019": Planted(
        "Later occurrences count also where no step has come to them.",
        MANAGER,
        "free_encoder_input",
        (
            (
                "request.mm_features[other_id].identifier == mm_hash\n"
                "        for other_id in self.request_cached_ids.get(req_id, ())",
                "other.identifier == mm_hash for other in request.mm_features[input_id + 1 :]",
            ),
        ),
        ("again-later-1", "again-later-5"),
    ),
    "EPD-LIFE-020": Planted(
        "Steps under way do not count as computed.",
        SCHEDULER,
        "_free_encoder_inputs",
        (
            (
                "request.num_computed_tokens - request.num_output_placeholders",
                "request.num_computed_tokens - request.num_in_flight_tokens",
            ),
        ),
        ("ahead-split-3-soon", "ahead-split-3-late"),
    ),
}

#: What vLLM 0.32 breaks as it is, and the plans that show it.
BROKEN: dict[str, tuple[str, ...]] = {
    "EPD-LIFE-014": ("adjacent-lookahead-3", "adjacent-lookahead-64"),
    "EPD-LIFE-017": MENDED["EPD-LIFE-017"].plans,
    "EPD-LIFE-019": MENDED["EPD-LIFE-019"].plans,
    "EPD-LIFE-020": MENDED["EPD-LIFE-020"].plans,
    "EPD-RACE-012": ("preempted-with-encoded",),
}
