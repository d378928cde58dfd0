"""How scripted cells are carried out, over fake servers: in which order, what is written down, and that the store is put back."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import requests
import session_fakes
from test_faulting import Make, make  # noqa: F401

from epd_conformance.live import faulting, scripted
from epd_conformance.oracle.judges import judge
from epd_conformance.plans.steps import STEPS, step
from epd_conformance.verdict import Verdict


def records(facts: Any) -> list[tuple[str, bool, str]]:
    return [(record["do"], record["done"], record["problem"]) for record in facts["steps"]]


class TestSteps:
    def test_a_step_is_checked(self) -> None:
        assert step("reset", cache="mm") == {"do": "reset", "cache": "mm"}
        for wrong in ({"do": "reset"}, {"do": "reset", "cache": "kv"}, {"do": "fly"}, {"do": "prime", "how": "any"}):
            with pytest.raises(ValueError, match=r"step|one of"):
                step(**wrong)
        assert all(do in STEPS for do in ("send", "prime", "damage", "heal", "reset", "restart", "store"))


class TestScript:
    def test_a_purge(self, make: Make) -> None:  # noqa: F811
        world, run = make("EPD-STALE-006", "purged")
        evidence = run()
        assert world.happened == ["proxy first", "delete first", "proxy first", "proxy twin"]
        assert [(do, done) for do, done, _ in records(evidence.facts)] == [
            ("send", True),
            ("store", True),
            ("reset", True),
            ("send", True),
            ("send", True),
        ]
        assert evidence.facts["steps"][1]["removed"] == 1
        assert set(evidence.facts["steps"][2]["statuses"]) == {server.name for server in world.stage.stack.servers}
        assert all(record["at"] <= record["ended"] for record in evidence.facts["steps"])
        assert json.loads(json.dumps(evidence.facts)) == evidence.facts

    def test_a_probe_that_forgets_to_delete(self, make: Make) -> None:  # noqa: F811
        world, run = make("EPD-STALE-006", "purged")
        world.probe.delete = lambda key: None  # type: ignore[method-assign]
        done = records(run().facts)
        assert done[1] == ("store", False, "StackError: 1 objects are left of 1")
        # Everything else was done all the same.
        assert [do for do, _, _ in done] == ["send", "store", "reset", "send", "send"]

    def test_damage_between_primer_and_request(self, make: Make) -> None:  # noqa: F811
        world, run = make("EPD-STALE-008", "replaced")
        world.probe.save("other", b"other" * 8)
        evidence = run()
        assert [line for line in world.happened if "other" not in line][:4] == [
            "encode first",
            "write first",
            "consumer first",
            "write first",
        ]
        assert world.saw["consumer first"] == b"first" * 8, "the second time, healed"
        assert world.probe.objects["first"] == b"first" * 8
        assert all(done for _, done, _ in records(evidence.facts))
        assert evidence.facts["steps"][1]["receipt"]["key"] == "first"
        # Primed under the id of its request, and the same prompt with the same salt both times.
        assert world.encode.ids[0] == f"{evidence.answers[0].request_id}-e0"
        salts = [body["cache_salt"] for _, body in world.consumer.requests if body]
        assert salts[0] == salts[1]

    def test_a_restart_keeps_name_and_port(self, make: Make) -> None:  # noqa: F811
        world, run = make("EPD-STALE-003", "consumer")
        (consumer,) = [server for server in world.stage.stack.servers if "prefill" in server.name]
        before = (consumer.process, consumer.url)
        evidence = run()
        assert consumer.process is not before[0]
        assert consumer.url == before[1]
        assert evidence.facts["steps"][1] | {"at": 0, "ended": 0} == {
            "do": "restart", "at": 0, "ended": 0, "done": True, "problem": "", "servers": ["prefill_decode-0"]
        }  # fmt: skip

    def test_the_store_comes_back(self, make: Make) -> None:  # noqa: F811
        world, run = make("EPD-ERR-004", "removed")
        stack = world.stage.stack
        (stack.store / "object").write_text("kept")
        asked, read = world.asked, world.probe.read
        # As a probe of files does.
        world.probe.read = lambda key: read(key) if stack.store.exists() else None  # type: ignore[method-assign]

        def recreates(where: str, rid: str, body: dict[str, Any]) -> None:
            # What a connector does that makes its folder on every save.
            seen.append(stack.store.exists())
            stack.store.mkdir(exist_ok=True)
            (stack.store / "new").write_text("made meanwhile")
            asked(where, rid, body)

        seen: list[bool] = []
        world.asked = recreates  # type: ignore[method-assign]
        evidence = run()
        assert seen == [True, False, True]
        assert all(done for _, done, _ in records(evidence.facts))
        assert sorted(path.name for path in stack.store.iterdir()) == ["new", "object"]
        assert not stack.store.with_name("store-away").exists()

    def test_a_store_that_lies_elsewhere_is_not_removed(self, make: Make) -> None:  # noqa: F811
        world, run = make("EPD-ERR-004", "removed")
        done = records(run().facts)
        assert done[1][:2] == ("store", False)
        assert "the store lies elsewhere" in done[1][2]
        assert world.stage.stack.store.is_dir()

    def test_a_reset_that_a_server_refuses_is_none(self, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
        """vLLM answers 200 with `success: false` as long as requests hold blocks."""
        _, run = make("EPD-STALE-008", "replaced")
        asked: list[str] = []

        def post(url: str, **options: Any) -> Any:
            asked.append(url)
            answer = requests.Response()
            answer.status_code = 200
            answer._content = b'{"success": false}' if "prefix" in url else b""
            return answer

        monkeypatch.setattr(faulting.http, "post", post)
        statuses = [record.get("statuses") for record in run().facts["steps"] if record["do"] == "reset"]
        assert set(statuses[0].values()) == {200}
        assert set(statuses[1].values()) == {409}
        assert len(asked) > 4, "it was tried again"

    def test_a_cell_that_breaks_off_puts_the_store_back(self, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
        world, run = make("EPD-ERR-004", "removed")
        store = world.stage.stack.store
        (store / "object").write_text("kept")
        send, seen = scripted._Script._send, []

        def interrupted(self: Any, **fields: Any) -> None:
            seen.append(store.exists())
            if not seen[-1]:
                raise KeyboardInterrupt
            send(self, **fields)

        monkeypatch.setattr(scripted._Script, "_send", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run()
        assert seen == [True, False]
        assert (store / "object").read_text() == "kept"

    def test_a_reference_takes_the_place_of_the_media(self, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
        answer, said = session_fakes.completion, {"K": {"item_indices": [0], "metadata": {"grid": [1, 6, 8]}}}
        monkeypatch.setattr(session_fakes, "completion", lambda body: answer(body) | {"ec_transfer_params": said})
        world, run = make("EPD-SEC-003", "metadata")
        evidence = run()
        assert all(done for _, done, _ in records(evidence.facts))
        (primer,) = [body for _, body in world.encode.requests if body]
        (asked,) = [body for _, body in world.consumer.requests if body]
        (image,) = primer["messages"][0]["content"]
        assert image["type"] == "image_url", "the encode server got the image itself"
        assert "uuid" not in image, "so that nothing is saved under the name"
        name = evidence.plan.requests[1].uuids[0]
        assert {"type": "image_embeds", "image_embeds": {"grid": [1, 6, 8]}, "uuid": name} in asked["messages"][0][
            "content"
        ]
        assert world.encode.ids[0] != f"{evidence.answers[1].request_id}-e0"

    def test_without_anything_to_refer_to_the_media_are_sent(self, make: Make) -> None:  # noqa: F811
        world, run = make("EPD-SEC-003", "metadata")
        run()
        (asked,) = [body for _, body in world.consumer.requests if body]
        assert [part["type"] for part in asked["messages"][0]["content"]] == ["text", "image_url", "text"]

    def test_a_uuid_alone(self, make: Make) -> None:  # noqa: F811
        world, run = make("EPD-SEC-003", "uuid-alone")
        evidence = run()
        (asked,) = [body for _, body in world.consumer.requests if body]
        image = asked["messages"][0]["content"][1]
        assert image == {"type": "image_url", "image_url": None, "uuid": evidence.plan.requests[1].uuids[0]}
        assert not [body for _, body in world.encode.requests if body], "nobody was asked about it"

    def test_a_look_sees_what_was_put_beside_the_store(self, make: Make) -> None:  # noqa: F811
        world, run = make("EPD-SEC-002", "nul")
        folder, asked = world.stage.stack.folder, world.asked

        def leaves_something(where: str, rid: str, body: dict[str, Any]) -> None:
            (folder / "beside").write_text("by a connector")
            (folder / "store" / "in-it").write_text("by a connector")
            asked(where, rid, body)

        world.asked = leaves_something  # type: ignore[method-assign]
        first, last = [record["outside"] for record in run().facts["steps"] if record["do"] == "look"]
        assert {name for name in last if name not in first} == {"stack/beside"}


class TestAtOnce:
    def test_many_requests_are_under_way_when_the_encode_server_goes_on(self, make: Make) -> None:  # noqa: F811
        world, run = make("EPD-RACE-016", "img8")
        evidence = run()
        assert records(evidence.facts) == [("together", True, ""), ("send", True, "")]
        assert world.happened == ["proxy first"] * 8 + ["proxy twin"]
        assert [answer.label for answer in evidence.answers] == [one.label for one in evidence.plan.requests]
        (opened,) = [event for event in evidence.during if event["ev"] == "opened"]
        assert opened["why"] == "released"
        assert opened["req"] == evidence.answers[0].request_id
        # Sent while the first was held.
        assert all(one.started <= opened["t"] for one in evidence.answers[:8])

    def test_without_points_nothing_is_sent(self, make: Make) -> None:  # noqa: F811
        world, run = make("EPD-RACE-016", "img8")
        world.stage.stack.barriers = None
        evidence = run()
        assert records(evidence.facts)[0] == (
            "together", False, "StackError: nothing can be held: the servers have no points"
        )  # fmt: skip
        assert judge(evidence).verdict is Verdict.ERROR

    def test_several_primers_under_way_at_once(self, make: Make) -> None:  # noqa: F811
        world, run = make("EPD-RACE-017", "primed4")
        evidence = run()
        assert world.happened == ["encode first"] * 4 + ["consumer first", "proxy twin"]
        done = evidence.facts["steps"][0]
        # These fakes hold the first only; a real server that is held answers nobody.
        assert len(done["primers"]) == 4
        assert max(one["started"] for one in done["primers"]) <= done["opened_at"]
        assert done["opened_at"] <= max(one["ended"] for one in done["primers"])
        assert world.encode.ids[0] == f"{evidence.answers[0].request_id}-e0"

    @pytest.mark.parametrize(("point", "there"), [("saving", None), ("saved", b"first" * 8)])
    def test_a_reader_comes_while_the_writer_is_held(self, make: Make, point: str, there: bytes | None) -> None:  # noqa: F811
        world, run = make("EPD-RACE-018", point)
        # The key of an item with a client's name is that name.
        world.key = lambda image: image.get("uuid", "fresh")  # type: ignore[method-assign]
        seen: list[bytes | None] = []
        asked = world.asked

        def watched(where: str, rid: str, body: dict[str, Any]) -> None:
            if where == "consumer" and body:
                seen.append(next(iter(world.probe.objects.values()), None))
            asked(where, rid, body)

        world.asked = watched  # type: ignore[method-assign]
        evidence = run()
        assert [done for _, done, _ in records(evidence.facts)] == [True] * 6
        assert (seen[0] is None) is (there is None)
        assert seen[1] is not None
        held, opened = ([event["t"] for event in evidence.during if event["ev"] == kind] for kind in ("held", "opened"))
        assert held[0] <= evidence.answers[0].started <= opened[0] <= evidence.answers[1].started

    def test_a_cell_that_breaks_off_lets_its_server_go(self, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
        world, run = make("EPD-RACE-018", "saving")
        world.key = lambda image: image.get("uuid", "fresh")  # type: ignore[method-assign]

        def interrupted(self: Any, **fields: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(scripted._Script, "_send", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run()
        opened = [event for event in world.stage.stack.journal.read() if event["ev"] == "opened"]
        assert [event["why"] for event in opened] == ["released"]

    def test_a_purge_goes_on_under_the_requests(self, make: Make) -> None:  # noqa: F811
        world, run = make("EPD-RACE-009", "purged")
        world.key = lambda image: "item"  # type: ignore[method-assign, assignment]
        asked = world.asked

        def waits(where: str, rid: str, body: dict[str, Any]) -> None:
            asked(where, rid, body)
            purge = world.here.purging
            # An answer takes until the purge has been there.
            while purge is not None and world.probe.objects and not purge._over.is_set():
                time.sleep(0.002)

        begun = scripted.Purge.__init__

        def begin(self: Any, probe: Any) -> None:
            begun(self, probe)
            world.here.purging = self

        world.here.purging = None
        world.asked = waits  # type: ignore[method-assign]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scripted.Purge, "__init__", begin)
            evidence = run()
        done = evidence.facts["steps"]
        assert [(one["do"], one["done"]) for one in done] == [
            ("purge", True), ("together", True), ("purge", True), ("send", True)
        ]  # fmt: skip
        assert {key for key, _ in done[2]["removed"]} == {"item"}
        assert all(done[0]["at"] <= at <= done[2]["ended"] for _, at in done[2]["removed"])
        assert "item" in world.probe.objects, "the fresh one is left alone"
