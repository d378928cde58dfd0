"""Made-up stories of the cells that ask a proxy on real servers: what goes well, as `live/proxied.py` writes it down."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from made_evidence import PROMPT, Story, digest_of, good_answer

from epd_conformance.oracle.exchanges import DIRECT, PROXY, Exchange
from epd_conformance.plans.plan import Draw, Plan, Request, replace_images, swap_images

#: Those that keep what came back in the facts, and those that have answers.
EXCHANGED = ("as-direct", "refused", "not-begun", "passed-on", "one-token", "one-id", "work-ends")
ANSWERED = ("order", "prompt-tokens", "kept-apart", "media-only", "encoding-options")
REFUSAL = {"error": {"message": 'the prompt of "2049" tokens is too long', "code": 400}}
MODELS = {"data": [{"id": "epd-model", "created": 1, "max_model_len": 2048}]}


def plan(judge: str, images: int) -> Plan:
    draw = Draw(0, judge)
    request = draw.request("images", *[draw.image() for _ in range(images)])
    if judge == "as-direct":
        return Plan((replace(request, options={"n": 2}), replace(request, label="streamed", stream=True)))
    if judge in ("refused", "not-begun", "one-token", "one-id", "work-ends", "prompt-tokens", "media-only"):
        return Plan((request, draw.request("another", draw.image())))
    if judge == "passed-on":
        return Plan((draw.request("text"),))
    if judge == "encoding-options":
        named = replace(draw.request("first", replace(draw.image(), uuid="mine-7")), salt="one")
        return Plan((named, replace(named, label="same salt"), replace(named, label="other salt", salt="two")))
    if judge == "kept-apart":
        return Plan((request, draw.request("another", draw.image())), at_once=True)
    # Another order makes another prompt; of one image, another size does.
    contrast = swap_images(request, [*range(1, images), 0], "other order") if images > 1 else None
    return Plan((request,), (contrast or replace_images(request, [draw.image(168, 140)], "other size"),))


def whole(request: Request) -> str:
    """A completion with two choices."""
    choices = [
        {
            "index": index,
            "message": {"content": f"word {index}", "tool_calls": [{"function": {"name": "look", "arguments": "{}"}}]},
            "token_ids": [7, index],
            "logprobs": {
                "content": [{"token": "w", "logprob": -0.5, "top_logprobs": [{"token": "w", "logprob": -0.5}]}]
            },
            "finish_reason": "stop",
            "stop_reason": "e",
        }
        for index in range(2)
    ]
    usage = {"prompt_tokens": 3, "completion_tokens": 4}
    return json.dumps({"id": "chatcmpl-x", "prompt_token_ids": [1, 2, 3], "choices": choices, "usage": usage})


def stream(request: Request) -> str:
    """The same, event by event, as it comes to whoever asks for no usage."""
    events: list[dict[str, Any]] = []
    for choice in json.loads(whole(request))["choices"]:
        (call,) = choice["message"]["tool_calls"]
        tokens = choice["logprobs"]["content"]
        head = {"content": "wo", "tool_calls": [{"function": {"name": call["function"]["name"], "arguments": "{"}}]}
        tail = {"content": choice["message"]["content"][2:], "tool_calls": [{"function": {"arguments": "}"}}]}
        last = {"finish_reason": choice["finish_reason"], "stop_reason": choice["stop_reason"]}
        index, (first, second) = choice["index"], choice["token_ids"]
        events += [
            {"choices": [{"index": index, "delta": head, "token_ids": [first], "logprobs": {"content": tokens}}]},
            {"choices": [{"index": index, "delta": tail, "token_ids": [second], "logprobs": None, **last}]},
        ]
    events[0]["prompt_token_ids"] = [1, 2, 3]
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


def exchange(story: Story, label: str, to: str, body: str, status: int = 200, streams: bool = False) -> dict[str, Any]:
    rid = digest_of(f"{label}/{to}/{len(story.facts.get('exchanges', ()))}")[:32]
    headers = {"content-type": "text/event-stream" if streams else "application/json"}
    return Exchange(label, to, rid, status, headers | ({"x-request-id": rid} if to == PROXY else {}), body).to_json()


def carry(story: Story, judge: str) -> None:
    """Have a story's cell go well."""
    if judge in EXCHANGED:
        _exchanged(story, judge)
        return
    for number, request in enumerate(story.plan.requests):
        if judge == "media-only":
            story.prompt = PROMPT + 100 * number
        elif judge == "prompt-tokens":
            # As many as the made-up answers name.
            story.prompt = len(good_answer(request).prompt_ids)
        story.send(request)
    if judge == "kept-apart":
        began = story.answers[0].started
        story.answers[:] = [replace(answer, started=began, seconds=story.now - began) for answer in story.answers]
    if judge == "encoding-options":
        steps = [event for event in story.events if event["ev"] == "step" and event["server"] == story.consumer]
        steps[1]["new"][0]["computed"] = 288


def _exchanged(story: Story, judge: str) -> None:
    found: list[dict[str, Any]] = []
    story.facts["exchanges"] = found
    if judge == "passed-on":
        tokens = json.dumps({"count": 3, "tokens": [1, 2, 3]})
        for label, body in (("models", json.dumps(MODELS)), ("tokenize", tokens)):
            found += [exchange(story, label, to, body) for to in (PROXY, DIRECT)]
        return
    if judge == "work-ends":
        story.facts["left"] = [
            {"label": request.label, "status": 200, "working": True, "idle_s": 0.3, "generated": [5.0],
             "running": {story.consumer: 0.0}}
            for request in story.plan.requests
        ]  # fmt: skip
        return
    for request in story.plan.requests:
        if judge in ("refused", "not-begun"):
            named = {"error": {"message": f"decode answered 400: {REFUSAL['error']['message']}"}}
            found.append(exchange(story, request.label, PROXY, json.dumps(named), 400))
            found.append(exchange(story, request.label, DIRECT, json.dumps(REFUSAL), 400))
            continue
        body = stream(request) if request.stream else whole(request)
        found.append(exchange(story, request.label, PROXY, body, streams=request.stream))
        if judge == "as-direct":
            found += [exchange(story, request.label, DIRECT, whole(request)) for _ in range(2)]
        if judge == "one-id":
            rid = found[-1]["request_id"]
            story.prime(request, rid)
            story.consume(request, rid, "-p" if story.roles.decode else "-d", True)
            if story.roles.decode:
                story.decode(request, rid)
    if judge == "one-token":
        story.facts["generated"] = [{"prefill-0": [4.0 + n, 5.0 + n]} for n in range(len(story.plan.requests))]
