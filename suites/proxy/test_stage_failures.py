"""Area PROXY on fake servers: stages that refuse, break, hang or are not there, and clients that leave."""

from __future__ import annotations

from epd_conformance.live.case import requirement
from epd_conformance.proxycheck.case import ProxyCase
from epd_conformance.proxycheck.plan import ARRANGEMENTS, Act, End, Plan, Role, Send, Step, chat, image, mark, once
from epd_conformance.pytest_plugin import CellUnderTest

EPD = ("proxy-e-p-d",)

# So short that a silent stage is waited for without boredom, so long that a busy machine answers in time.
LIMIT = {"timeout_s": 1.0}


def stands(role: Role) -> tuple[str, ...]:
    """The arrangements that have servers of a role."""
    return tuple(name for name, counts in ARRANGEMENTS.items() if role in counts)


def both() -> tuple[Send, Send]:
    """A request with an image, plain and streamed. No stage's name is in its labels: an error must not name it by accident."""
    labels = ("plain", "streamed")
    return Send(labels[0], chat(labels[0], image(labels[0]))), Send(
        labels[1], chat(labels[1], image(labels[1]), stream=True)
    )


def failing(role: Role, judge: str, status: int, reason: str) -> ProxyCase:
    plan = once(*both(), acts=(Act(role, status=status, reason=reason),))
    return ProxyCase(f"{role}-{status}", judge, plan, stands(role))


def down(role: Role, servers: tuple[str, ...]) -> ProxyCase:
    return ProxyCase(f"{role}-down", "one-error", Plan((Step(both(), down=servers),)), stands(role))


def stream(label: str) -> Send:
    return Send(label, chat(label, image(label), stream=True))


def ending(name: str, judge: str, role: Role, end: End, options: dict[str, object] | None = None) -> ProxyCase:
    return ProxyCase(name, judge, once(stream(name), acts=(Act(role, end=end),)), stands(role), options or {})


@requirement(
    "EPD-PROXY-003",
    failing("encode", "one-error", 500, "out of order"),
    failing("prefill", "one-error", 500, "out of order"),
    failing("decode", "one-error", 503, "out of order"),
    down("encode", ("encode-0", "encode-1")),
    down("prefill", ("prefill-0",)),
    down("decode", ("decode-0",)),
)
def test_a_failing_stage_is_one_clear_error(cell: CellUnderTest) -> None:
    cell.check()


@requirement(
    "EPD-PROXY-004",
    failing("encode", "refusal", 400, "the picture cannot be read"),
    failing("prefill", "refusal", 422, "the prompt is too long"),
    failing("decode", "refusal", 404, "no such model"),
    failing("decode", "refusal", 429, "too many requests"),
)
def test_a_refusal_keeps_status_and_reason(cell: CellUnderTest) -> None:
    cell.check()


@requirement(
    "EPD-PROXY-005",
    ProxyCase(
        "slow-decode",
        "after-acceptance",
        once(
            stream("accepted"),
            stream("refused"),
            acts=(
                Act("decode", holding=mark("refused"), status=503, reason="full", wait_s=0.15),
                Act("decode", wait_s=0.15),
            ),
        ),
    ),
)
def test_a_stream_begins_after_acceptance(cell: CellUnderTest) -> None:
    cell.check()


@requirement(
    "EPD-PROXY-006",
    ending("cut", "broken-stream", "decode", "cut"),
    ending("short", "broken-stream", "decode", "short"),
)
def test_a_broken_stream_ends_as_an_error(cell: CellUnderTest) -> None:
    cell.check()


@requirement(
    "EPD-PROXY-007",
    ProxyCase(
        "at-the-limit",
        "primed-and-right",
        # The servers close what was idle for 5 s, as vLLM's do.
        Plan(
            (
                Step(tuple(Send(f"warm{i}", chat(f"warm{i}", image(f"warm{i}"))) for i in range(2))),
                Step(tuple(Send(f"late{i}", chat(f"late{i}", image(f"late{i}"))) for i in range(2)), pause_s=4.7),
            )
        ),
    ),
)
def test_idle_connections_lose_no_request(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-PROXY-019", ending("cut", "no-second-try", "decode", "cut", {"retries": 2}))
def test_nothing_is_tried_again_after_the_first_byte(cell: CellUnderTest) -> None:
    cell.check()


@requirement(
    "EPD-PROXY-020",
    ending("encode", "in-time", "encode", "never", LIMIT),
    ending("prefill", "in-time", "prefill", "never", LIMIT),
    ending("decode", "in-time", "decode", "never", LIMIT),
    ending("stream", "in-time", "decode", "silent", LIMIT),
)
def test_a_silent_stage_ends_in_time(cell: CellUnderTest) -> None:
    cell.check()


def leaving(role: Role) -> ProxyCase:
    sends = (
        Send("plain", chat("plain", image("plain")), leaves=role),
        Send("streamed", chat("streamed", image("streamed"), stream=True), leaves=role),
    )
    return ProxyCase(role, "work-ends", once(*sends, acts=(Act(role, end="never"),)), stands(role))


@requirement(
    "EPD-PROXY-021",
    leaving("encode"),
    leaving("prefill"),
    leaving("decode"),
    ProxyCase(
        "stream",
        "work-ends",
        once(Send("stream", chat("stream", stream=True), leaves="decode"), acts=(Act("decode", end="silent"),)),
    ),
)
def test_a_client_that_leaves_frees_the_work(cell: CellUnderTest) -> None:
    cell.check()
