"""How cells with a fault are carried out, over fake servers: in which order, with which ids, and what the facts say if not."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from session_fakes import FakeLauncher, FakeServer
from test_live_session import Scene, Watched

from epd_conformance.connectors.barriers import POINTS
from epd_conformance.faults.fault import Fault, Receipt, Target
from epd_conformance.faults.store import Deleted
from epd_conformance.live import faulting, suites
from epd_conformance.live.session import PlannedCell
from epd_conformance.oracle.cell import CellEvidence
from epd_conformance.oracle.fault_judges import fault_record
from epd_conformance.oracle.judges import judge
from epd_conformance.probe import Rows, StoreProbe
from epd_conformance.subject import ReferenceSubject
from epd_conformance.topology import stack as stacks
from epd_conformance.verdict import Owner, Verdict

SUITE = suites.installed()


def planned(requirement: str, name: str, topology: str) -> PlannedCell:
    case = SUITE.case(requirement, name)
    assert case is not None
    return PlannedCell(f"{requirement}[{topology}/fake/{name}]", topology, Owner.CONNECTOR, case)


class Probe(StoreProbe):
    """A store in memory that says what is done to it. `broken` are methods that raise; `late` seconds until a write shows."""

    def __init__(self, happened: list[str]) -> None:
        self.objects: dict[str, bytes] = {}
        self.happened = happened
        self.broken: set[str] = set()
        self.late = 0.0
        self._coming: list[tuple[float, str, bytes | None]] = []

    def _called(self, name: str) -> None:
        if name in self.broken:
            raise ConnectionError(f"{name} is broken")
        now = time.monotonic()
        for moment, key, data in list(self._coming):
            if moment <= now:
                self._coming.remove((moment, key, data))
                self._put(key, data)

    def _put(self, key: str, data: bytes | None) -> None:
        if data is None:
            self.objects.pop(key, None)
        else:
            self.objects[key] = data

    def save(self, key: str, data: bytes | None) -> None:
        """What a producer, or a write, does."""
        if self.late:
            self._coming.append((time.monotonic() + self.late, key, data))
        else:
            self._put(key, data)

    def keys(self) -> list[str]:
        return list(self.objects)

    def read(self, key: str) -> bytes | None:
        self._called("read")
        return self.objects.get(key)

    def write(self, key: str, data: bytes) -> None:
        self._called("write")
        self.happened.append(f"write {key}")
        self.save(key, data)

    def delete(self, key: str) -> None:
        self._called("delete")
        self.happened.append(f"delete {key}")
        self.save(key, None)

    def unseal(self, data: bytes) -> Rows:
        self._called("unseal")
        return Rows(data, len(data) // 4, 4, "float8_e4m3fn")

    def seal(self, rows: Rows, like: bytes) -> bytes:
        self._called("seal")
        return rows.data


class Subject(ReferenceSubject):
    """The reference with another probe, and perhaps faults of its own."""

    def __init__(self, probe: StoreProbe | None, own: Mapping[str, Fault] | None = None) -> None:
        self._probe, self._own = probe, own or {}

    def probe(self, stack: Any) -> StoreProbe:
        return self._probe  # type: ignore[return-value]

    def faults(self, stack: Any) -> Mapping[str, Fault]:
        return self._own


class World:
    """A stack of fake servers with one store; whoever is primed saves an object named by the image."""

    def __init__(self, here: Scene, topology: str) -> None:
        self.here = here
        self.happened: list[str] = []
        self.probe = Probe(self.happened)
        self.saw: dict[str, bytes | None] = {}
        self.saves = True
        self.journals = True
        self.comes_by = True
        self.passed: dict[str, bytes | None] = {}
        here.session.subject = Subject(self.probe)
        self.stage = here.session.stage(topology)
        name = self.stage.stack.spec.name
        consumer = "bypass" if topology == "e-p-d" else "prefill_decode-0"
        for server, told in (("proxy", "proxy"), ("encode-0", "encode"), (consumer, "consumer")):
            fake = here.fake(f"{name}.{server}")
            fake.requests = Watched(lambda item, told=told, fake=fake: self.asked(told, fake.ids[-1], item[1]))  # type: ignore[assignment]
        self.encode, self.consumer, self.proxy = (
            here.fake(f"{name}.{server}") for server in ("encode-0", consumer, "proxy")
        )
        self.labels: dict[str, str] = {}

    def asked(self, where: str, rid: str, body: dict[str, Any]) -> None:
        if not body:
            return  # a route that resets a cache
        (image,) = [
            part
            for message in body["messages"]
            for part in message["content"]
            if isinstance(part, dict) and part["type"] != "text"
        ]
        key = self.key(image)
        self.happened.append(f"{where} {key}")
        self.saw[f"{where} {key}"] = self.probe.objects.get(key)
        if where in ("proxy", "encode") and self.journals:
            leg = rid if where == "encode" else f"{rid}-e0"
            self.encode.write("scheduler", "request", req=f"chatcmpl-{leg}-00abcdef", items=[{"id": key}], prompt=9)
        if where in ("proxy", "encode") and self.saves:
            self._reach(self.encode, "scheduled", key, rid)
            self._reach(self.encode, "saving", key, rid)
            self.probe.save(key, (key * 8).encode())
            self._reach(self.encode, "saved", key, rid)
        if where == "consumer" and self.comes_by:
            for point in POINTS:
                if self._reach(self.consumer, point, key, rid):
                    self.passed[f"{point} {key}"] = self.probe.objects.get(key)

    def _reach(self, fake: FakeServer, point: str, key: str, rid: str) -> bool:
        """A fake comes to a point, if it has it."""
        gate = fake.gates.get(POINTS[point])
        if gate is not None:
            gate.reach(point, (key,), (f"chatcmpl-{rid}-0",))
        return gate is not None

    def key(self, image: dict[str, Any]) -> str:
        """`first`, `twin` … for what the plan calls so."""
        text = json.dumps(image, sort_keys=True)
        if text not in self.labels:
            self.labels[text] = image_name(len(self.labels))
        return self.labels[text]


def image_name(number: int) -> str:
    return ("first", "twin", "victim", "fresh")[number]


Make = Callable[..., tuple[World, Callable[[], CellEvidence]]]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """A world, and what carries its cell out."""
    monkeypatch.setattr(stacks, "Launcher", FakeLauncher)
    monkeypatch.setattr(faulting, "PUBLISHED_S", 0.4)
    monkeypatch.setattr(faulting, "IDLE_S", 0.2)
    made: list[Scene] = []

    def world(requirement: str = "EPD-INTEG-002", name: str = "replaced", topology: str = "e-pd") -> Any:
        cell = planned(requirement, name, topology)
        made.append(Scene(tmp_path / f"scene-{len(made)}", [cell]))
        here = World(made[-1], topology)
        return here, lambda: made[-1].session.run(cell)

    yield world
    for scene in made:
        scene.site.close()


def outcome(evidence: CellEvidence) -> dict[str, Any]:
    found = evidence.facts["fault"]
    assert isinstance(found, dict)
    return found


class TestDamaged:
    @pytest.mark.parametrize("topology", ["e-pd", "e-p-d"])
    @pytest.mark.parametrize(
        ("requirement", "name", "done"),
        [
            ("EPD-ERR-001", "deleted", "delete"),
            ("EPD-INTEG-001", "truncated", "write"),
            ("EPD-INTEG-002", "replaced", "write"),
            ("EPD-INTEG-003", "one-row", "write"),
        ],
    )
    def test_the_fault_lies_between_encode_and_prefill(
        self, make: Make, requirement: str, name: str, done: str, topology: str
    ) -> None:
        world, run = make(requirement, name, topology)
        evidence = run()
        assert world.happened == [
            "proxy first",
            "encode twin",
            "write twin",
            "consumer twin",
            "encode victim",
            f"{done} victim",
            "consumer victim",
            "write victim",
            "proxy fresh",
        ]
        whole = b"victim" * 8
        left = {"deleted": None, "truncated": whole[:24], "replaced": b"first" * 8, "one-row": whole[:4]}
        assert world.saw["consumer victim"] == left[name]
        assert world.saw["consumer twin"] == b"twin" * 8
        assert world.probe.objects["victim"] == whole
        assert [answer.label for answer in evidence.answers] == ["first", "twin", "victim", "fresh"]
        found = outcome(evidence)
        assert (found["rehearsed"], found["verified"], found["healed"], found["problem"]) == (True, True, True, "")
        assert (found["receipt"]["kind"], found["receipt"]["key"]) == (name, "victim")
        assert found["injected_at"] <= evidence.answers[2].started <= found["healed_at"] <= evidence.answers[3].started
        names = {server.name for server in world.stage.stack.servers}
        assert evidence.facts["health"] == dict.fromkeys(names, 200)
        assert evidence.facts["busy"] == dict.fromkeys(names, 0)
        assert json.loads(json.dumps(evidence.facts)) == evidence.facts
        record = fault_record(evidence)
        assert record is not None
        assert record.injected == 1

    def test_primer_and_request_are_one_call_in_two_legs(self, make: Make) -> None:
        world, run = make()
        evidence = run()
        primed = [body for _, body in world.encode.requests]
        asked = [body for _, body in world.consumer.requests]
        salts = [body["cache_salt"] for body in asked]
        assert [body["cache_salt"] for body in primed] == salts
        assert world.encode.ids == [f"{rid}-e0" for rid in world.consumer.ids]
        assert world.consumer.ids == [answer.request_id for answer in evidence.answers[1:3]]
        assert salts == [f"cell-{rid}" for rid in world.consumer.ids]
        everything = [*asked, *(body for _, body in world.proxy.requests)]
        assert len({body["cache_salt"] for body in everything}) == 4
        # As the proxy primes: the item alone, one token.
        assert all(body["max_tokens"] == 1 and len(body["messages"][0]["content"]) == 1 for body in primed)

    def test_a_late_object_is_waited_for(self, make: Make) -> None:
        """A producer that publishes behind its answer, and a store that shows a write a little later, are right."""
        world, run = make()
        world.probe.late = 0.15
        found = outcome(run())
        assert (found["rehearsed"], found["verified"], found["healed"], found["problem"]) == (True, True, True, "")

    def test_a_subjects_own_fault_is_used(self, make: Make) -> None:
        class Own(Deleted):
            kind = "replaced"

            def inject(self, target: Target) -> Receipt:
                world.happened.append(f"own {target.key} {target.donor}")
                return super().inject(target)

        world, run = make()
        world.here.session.subject = Subject(world.probe, {"replaced": Own()})
        found = outcome(run())
        assert "own victim first" in world.happened
        assert found["receipt"]["kind"] == "replaced"
        assert found["receipt"]["after"] == {"sha256": None, "bytes": None}

    def problem(self, evidence: CellEvidence) -> str:
        """What stands in the facts of a cell whose fault was not done; all requests were sent all the same."""
        assert len(evidence.answers) == 4
        assert set(evidence.facts) == {"fault", "health", "busy"}
        found = outcome(evidence)
        assert not (found["rehearsed"] and found["receipt"] and found["verified"] and found["healed"])
        return str(found["problem"])

    def test_no_probe(self, make: Make) -> None:
        world, run = make()
        world.here.session.subject = Subject(None)
        assert "the subject gives no probe" in self.problem(run())
        assert not any(line.startswith(("write", "delete")) for line in world.happened)

    def test_a_probe_that_cannot_be_made(self, make: Make) -> None:
        class Broken(ReferenceSubject):
            def probe(self, stack: Any) -> Any:
                raise RuntimeError("no address")

        world, run = make()
        world.here.session.subject = Broken()
        assert self.problem(run()) == "RuntimeError: no address"

    def test_servers_that_something_else_started(self, make: Make) -> None:
        world, run = make()
        world.stage.stack.info = None
        assert "did not start these servers" in self.problem(run())

    def test_no_key(self, make: Make) -> None:
        world, run = make()
        world.journals = False
        assert "no encode server's journal shows under which key" in self.problem(run())

    def test_an_object_that_never_appears(self, make: Make) -> None:
        world, run = make()
        world.saves = False
        assert "the store has no object under twin, 0.4 s after" in self.problem(run())

    def test_a_primer_that_fails(self, make: Make) -> None:
        world, run = make()
        world.encode.status, world.saves = 500, False
        assert "the primer of 'twin' was answered with 500" in self.problem(run())

    @pytest.mark.parametrize(
        ("name", "broken"),
        [
            ("replaced", "read"),
            ("replaced", "write"),
            ("one-row", "unseal"),
            ("one-row", "seal"),
            ("deleted", "delete"),
        ],
    )
    def test_a_probe_that_raises(self, make: Make, name: str, broken: str) -> None:
        requirement = {"replaced": "EPD-INTEG-002", "one-row": "EPD-INTEG-003", "deleted": "EPD-ERR-001"}[name]
        world, run = make(requirement, name)
        world.probe.broken = {broken}
        evidence = run()
        assert self.problem(evidence) == f"ConnectionError: {broken} is broken"
        assert outcome(evidence)["receipt"] is None
        assert world.probe.objects["victim"] == b"victim" * 8

    def test_a_store_that_breaks_after_the_damage(self, make: Make) -> None:
        world, run = make()
        asked = world.asked

        def told(item: Any) -> None:
            asked("consumer", world.consumer.ids[-1], item[1])
            if len(world.consumer.ids) == 2:
                world.probe.broken.add("write")

        world.consumer.requests.told = told  # type: ignore[attr-defined]
        evidence = run()
        assert self.problem(evidence) == "ConnectionError: write is broken"
        assert outcome(evidence)["verified"] is True
        assert outcome(evidence)["healed"] is False

    def test_a_fault_that_is_not_seen_is_healed_all_the_same(self, make: Make) -> None:
        class Blind(Deleted):
            kind = "replaced"

            def verify(self, target: Target, receipt: Receipt) -> bool:
                raise TimeoutError("no answer")

        world, run = make()
        world.here.session.subject = Subject(world.probe, {"replaced": Blind()})
        evidence = run()
        assert self.problem(evidence) == "TimeoutError: no answer"
        assert outcome(evidence)["verified"] is False
        assert outcome(evidence)["healed"] is True
        assert world.probe.objects["victim"] == b"victim" * 8

    def test_a_probe_that_writes_nowhere(self, make: Make) -> None:
        world, run = make()
        world.probe.save = lambda key, data: world.probe.objects.setdefault(key, data or b"")  # type: ignore[method-assign]
        assert self.problem(run()) == ""
        assert world.saw["consumer victim"] == b"victim" * 8

    def test_how_the_servers_are_afterwards(self, make: Make) -> None:
        world, run = make()
        world.encode.health, world.encode.busy = 503, None
        world.consumer.busy = 1
        facts = run().facts
        assert facts["health"] == {"encode-0": 503, "prefill_decode-0": 200}
        assert facts["busy"] == {"prefill_decode-0": 2}, "one running, one waiting; and who does not say is left out"

    def test_a_server_that_becomes_idle_in_time_is_idle(self, make: Make) -> None:
        world, run = make()
        world.consumer.busy = 1
        world.proxy.requests.told = lambda item: threading.Timer(0.1, setattr, (world.consumer, "busy", 0)).start()  # type: ignore[attr-defined]
        assert run().facts["busy"]["prefill_decode-0"] == 0

    def test_a_server_that_died_under_the_victim(self, make: Make) -> None:
        world, run = make()
        asked = world.asked

        def told(item: Any) -> None:
            asked("consumer", world.consumer.ids[-1], item[1])
            if len(world.consumer.ids) == 2:
                world.consumer.killed_by_request = True

        world.consumer.requests.told = told  # type: ignore[attr-defined]
        evidence = run()
        assert evidence.answers[2].status == 0
        assert [death["name"] for death in evidence.deaths] == ["e-pd.prefill_decode-0"]
        assert evidence.facts["health"]["prefill_decode-0"] == 0
        assert "prefill_decode-0" not in evidence.facts["busy"]
        assert outcome(evidence)["healed"] is True


# -- uuids that would leave the store ----------------------------------------------------------------------------------


class Store:
    """A connector's behaviour at the three requests: `saves` what it does for a uuid that a producer saves."""

    def __init__(self, here: Scene, name: str, saves: Callable[[Path, str], None]) -> None:
        self.stage = here.session.stage("e-pd")
        self.root = self.stage.stack.store
        self.plan = self.stage.plans[name]
        self.uuids = [str(request.uuids[0]) for request in self.plan.requests]
        self.at_lookup: list[str] = []
        self.saves = saves
        here.fake("e-pd.proxy").requests = Watched(lambda item: self.saves(self.root, uuid_of(item[1])))  # type: ignore[assignment]
        here.fake("e-pd.prefill_decode-0").requests = Watched(lambda _: self.look())  # type: ignore[assignment]

    def look(self) -> None:
        self.at_lookup = sorted(str(path) for path in self.outside())

    def outside(self) -> list[Path]:
        """What lies anywhere under the names of this cell's hostile uuids; another run may have others in /tmp."""
        names = [f"epd-conformance-outside-{uuid.rpartition('-')[2]}*" for uuid in self.uuids[1:]]
        folders = (self.stage.stack.folder.parent, Path("/tmp"))
        return [path for name in names for folder in folders for path in folder.glob(name)] + [
            path for name in names for path in self.stage.stack.folder.rglob(name)
        ]


def uuid_of(body: dict[str, Any]) -> str:
    return str(next(part["uuid"] for part in body["messages"][0]["content"] if "uuid" in part))


def harmless(root: Path, uuid: str) -> None:
    """Names its files by the uuid where that is harmless, and leaves the others."""
    if "/" not in uuid:
        (root / uuid).mkdir()
        (root / uuid / "data.bin").write_bytes(b"rows")


CASES = ("parent", "absolute", "root")
MakeStore = Callable[..., tuple[Store, Callable[[], CellEvidence]]]


@pytest.fixture
def confined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeStore]:
    monkeypatch.setattr(stacks, "Launcher", FakeLauncher)
    monkeypatch.setattr(faulting, "WRITTEN_S", 0.1)
    made: list[Scene] = []
    stores: list[Store] = []

    def world(name: str, saves: Callable[[Path, str], None] = harmless) -> Any:
        cell = planned("EPD-SEC-001", name, "e-pd")
        made.append(Scene(tmp_path / f"scene-{len(made)}", [cell]))
        stores.append(store := Store(made[-1], cell.id, saves))
        return store, lambda: made[-1].session.run(cell)

    yield world
    for scene in made:
        scene.site.close()
    assert [path for store in stores for path in store.outside()] == [], "nothing may be left"


def changed(evidence: CellEvidence) -> dict[str, str | None]:
    before, after = evidence.facts["before"], evidence.facts["after"]
    return {path: after.get(path) for path in {*before, *after} if before.get(path) != after.get(path)}


class TestConfined:
    @pytest.mark.parametrize("name", CASES)
    def test_a_bait_lies_where_the_uuid_leads_and_is_taken_away(self, confined: MakeStore, name: str) -> None:
        store, run = confined(name)
        evidence = run()
        number = store.uuids[1].rpartition("-")[2]
        assert evidence.facts["bait"] == [f"epd-conformance-outside-{number}/data.bin"]
        (bait,) = [path for path in store.at_lookup if number in path]
        assert (store.root / store.uuids[1]).resolve() == Path(bait).resolve()
        assert changed(evidence) == {}
        assert any(path.endswith(f"{number}/data.bin") for path in evidence.facts["before"])
        assert [answer.label for answer in evidence.answers] == ["harmless", "baited", "hostile"]
        assert set(evidence.facts) == {"bait", "before", "after", "health", "busy"}
        assert all(str(store.root) not in path for path in evidence.facts["before"])

    @pytest.mark.parametrize("name", CASES)
    def test_what_follows_the_uuid_is_seen(self, confined: MakeStore, name: str) -> None:
        def joined(root: Path, uuid: str) -> None:
            (root / uuid).mkdir(parents=True)
            (root / uuid / "data.bin").write_bytes(b"rows")

        _, run = confined(name, joined)
        found = changed(run())
        assert len(found) == 2
        assert "folder" in found.values()

    @pytest.mark.parametrize("name", CASES)
    def test_so_is_a_name_with_an_ending(self, confined: MakeStore, name: str) -> None:
        def joined(root: Path, uuid: str) -> None:
            (root / f"{uuid}.bin").write_bytes(b"rows")

        store, run = confined(name, joined)
        evidence = run()
        number = store.uuids[1].rpartition("-")[2]
        assert evidence.facts["bait"] == [f"epd-conformance-outside-{number}.bin"]
        assert len(changed(evidence)) == 1

    def test_so_is_what_is_written_behind_the_answer(self, confined: MakeStore) -> None:
        def later(root: Path, uuid: str) -> None:
            threading.Timer(0.03, harmless if "/" not in uuid else joined, (root, uuid)).start()

        def joined(root: Path, uuid: str) -> None:
            (root / f"{uuid}.bin").write_bytes(b"rows")

        _, run = confined("absolute", later)
        assert len(changed(run())) == 1

    def test_so_is_a_bait_that_is_changed_or_removed(self, confined: MakeStore) -> None:
        for spoil in (lambda path: path.write_bytes(b"other"), lambda path: path.unlink()):
            store, run = confined("parent")
            baits = store.stage.stack.folder

            def told(root: Path, uuid: str, spoil: Any = spoil, baits: Path = baits) -> None:
                harmless(root, uuid)
                if "/" in uuid:
                    spoil(next(baits.glob("epd-conformance-outside-*/data.bin")))

            store.saves = told
            assert len(changed(run())) == 1

    def test_so_is_what_climbs_from_a_deeper_folder(self, confined: MakeStore) -> None:
        """A store of its own below the stack's, two folders deep: `..` then ends beside the stack's, or in it."""

        def deeper(root: Path, uuid: str) -> None:
            (root / "a").mkdir(exist_ok=True)
            (root.parent / uuid).mkdir(parents=True)

        _, run = confined("parent", deeper)
        assert list(changed(run()).values()) == ["folder"]

    def test_a_store_that_hashes_its_names_gets_no_bait(self, confined: MakeStore) -> None:
        def hashed(root: Path, uuid: str) -> None:
            (root / f"{hash(uuid):x}").write_bytes(b"rows")

        _, run = confined("absolute", hashed)
        evidence = run()
        assert (evidence.facts["bait"], changed(evidence)) == ([], {})

    def test_a_bait_is_laid_outside_only(self, confined: MakeStore) -> None:
        """A folder deeper, the uuid leads to another place in the store: nothing of ours may lie there."""

        def deeper(root: Path, uuid: str) -> None:
            (root / "shard").mkdir(exist_ok=True)
            (root / "shard" / uuid.replace("/", "_")).write_bytes(b"rows")

        store, run = confined("parent", deeper)
        assert run().facts["bait"] == []
        assert [path.name for path in store.root.iterdir()] == ["shard"]

    def test_what_lay_there_before_changes_nothing(self, confined: MakeStore) -> None:
        store, run = confined("absolute")
        left = Path(store.uuids[2])
        left.mkdir()
        (left / "of a killed run").write_bytes(b"x")
        evidence = run()
        assert changed(evidence) == {}
        assert not left.exists()

    def test_another_run_of_the_same_cell_waits(self, confined: MakeStore) -> None:
        """Its bait would look like a server's work: same seed, same cell, same uuid."""
        _, run = confined("absolute")
        with faulting._alone():
            thread = threading.Thread(target=run)
            thread.start()
            thread.join(0.5)
            assert thread.is_alive()
        thread.join(20)
        assert not thread.is_alive()

    @pytest.mark.parametrize("uuid", ["..", "../..", "/tmp", "../x", "/etc/epd-conformance-outside-0", "x",
                                      "/tmp/epd-conformance-outside-0/../../etc", "../epd-conformance-outside-"])  # fmt: skip
    def test_a_plan_cannot_name_another_place(self, confined: MakeStore, uuid: str) -> None:
        """What lies there is removed in the end."""
        store, _ = confined("absolute")
        with pytest.raises(ValueError, match="no uuid of this cell"):
            faulting._place(store.stage.stack, uuid)


class TestWindows:
    @pytest.mark.parametrize(
        ("requirement", "name", "topology", "before"),
        [
            ("EPD-RACE-001", "looked-up-deleted", "e-pd", "looked-up"),
            ("EPD-RACE-013", "allocated-replaced", "e-pd", "allocated"),
            ("EPD-RACE-014", "loaded-deleted", "e-pd", "loaded"),
            ("EPD-RACE-004", "prefilled-deleted", "e-p-d", "prefilled"),
        ],
    )
    def test_the_fault_lies_in_its_window(
        self, make: Make, requirement: str, name: str, topology: str, before: str
    ) -> None:
        world, run = make(requirement, name, topology)
        evidence = run()
        found = outcome(evidence)
        assert (found["rehearsed"], found["verified"], found["healed"], found["problem"]) == (True, True, True, "")
        # The request was sent while the object was whole, and came back from its point when it was not.
        whole = b"victim" * 8
        # Another request for it came, while it was away.
        assert world.saw["consumer victim"] == (None if before == "loaded" else whole)
        assert world.passed[f"{before} victim"] in (None, b"first" * 8)
        assert world.passed[f"{before} twin"] == b"twin" * 8
        assert world.probe.objects["victim"] == whole
        held, opened = (
            [event for event in evidence.during if event["ev"] == kind and event["point"] == before]
            for kind in ("held", "opened")
        )
        assert [event["why"] for event in opened] == ["released", "released"], "twin and victim"
        assert held[1]["t"] <= found["began_at"] <= found["injected_at"] <= opened[1]["t"]
        labels = ["first", "twin", "victim", "fresh", *(["again"] if before == "loaded" else [])]
        assert [answer.label for answer in evidence.answers] == labels
        assert evidence.answers[2].started <= held[1]["t"]
        assert json.loads(json.dumps(evidence.facts)) == evidence.facts

    def test_whoever_does_not_come_by_is_not_held_and_nothing_is_done(self, make: Make) -> None:
        world, run = make("EPD-RACE-001", "looked-up-deleted")
        world.comes_by = False
        evidence = run()
        assert outcome(evidence)["receipt"] is None
        assert "delete victim" not in world.happened
        assert judge(evidence).verdict is Verdict.ERROR

    def test_without_the_injection_the_cell_is_an_error(self, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        """And a server that is held when the harness is in trouble is let go."""
        _, run = make("EPD-RACE-001", "looked-up-deleted")
        monkeypatch.setattr(faulting._Damage, "do", lambda self: None)
        evidence = run()
        assert [event["why"] for event in evidence.during if event["ev"] == "opened"] == ["released"] * 2
        found = judge(evidence)
        assert (found.verdict, found.reason) == (Verdict.ERROR, "barrier")

    def test_servers_without_points_make_it_an_error(self, make: Make) -> None:
        world, run = make("EPD-RACE-001", "looked-up-deleted")
        world.stage.stack.barriers = None
        evidence = run()
        assert outcome(evidence)["problem"] == "StackError: nothing can be held: the servers have no points"
        found = judge(evidence)
        assert (found.verdict, found.reason) == (Verdict.ERROR, "barrier")
        assert "no points" in found.observed

    def test_only_runs_with_such_cells_have_points(self, make: Make) -> None:
        with_points, _ = make("EPD-RACE-001", "looked-up-deleted")
        without, _ = make("EPD-ERR-001", "deleted")
        assert with_points.stage.stack.barriers is not None
        assert without.stage.stack.barriers is None
        assert without.consumer.gates == {}
