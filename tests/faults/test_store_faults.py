"""The faults of the store, done through both probes to real objects: what they leave, and that they are seen and undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from epd_conformance.connectors import object_format, reclaim
from epd_conformance.connectors.object_format import Expectation, Header, ObjectError, Reason
from epd_conformance.connectors.probes import ExampleStoreProbe, VerifiedStoreProbe
from epd_conformance.errors import StackError
from epd_conformance.faults.damage import SEALED
from epd_conformance.faults.fault import Fault, Receipt, Target, digest
from epd_conformance.faults.store import FAULTS
from epd_conformance.probe import Rows, StoreProbe

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

KEY, DONOR = "k" * 64, "d" * 64
ROWS, WIDTH = 12, 16
EVERY = sorted(FAULTS)
# `folder` is no other bytes.
BYTES = [kind for kind in EVERY if kind != "folder"]
HOSTILE = ["", "..", "../x", "/etc/x", "a/../../x", "a\0b", "é" * 200, "x" * 5000, "\ud800", "a//b", "."]

Make = Callable[[str], StoreProbe]


def tensor(seed: int, dtype: str = "float32"):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, WIDTH, generator=generator).to(getattr(torch, dtype))


def verified(root: Path, dtype: str) -> StoreProbe:
    for seed, key in enumerate((KEY, DONOR)):
        rows = tensor(seed, dtype)
        header = Header.of(rows, key=key, model_fingerprint="f" * 64, creator="a test")
        object_format.publish(root, key, object_format.encode(rows, header))
    return VerifiedStoreProbe(root)


def example(root: Path, dtype: str) -> StoreProbe:
    for seed, key in enumerate((KEY, DONOR)):
        (root / key).mkdir(parents=True)
        safetensors_torch.save_file({"ec_cache": tensor(seed, dtype)}, root / key / ExampleStoreProbe.FILE)
    return ExampleStoreProbe(root)


@pytest.fixture(params=[verified, example])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """A store with two objects, and its probe; asked for by dtype."""
    root = tmp_path / "store"
    root.mkdir()
    yield lambda dtype="float32": request.param(root, dtype)
    # Nothing of a fault may stay beside the objects.
    left = {path.suffix for path in root.rglob("*") if path.is_file()}
    assert left <= {object_format.SUFFIX}


def bytes_of(rows) -> bytes:
    return rows.contiguous().view(torch.uint8).numpy().tobytes()


def read_back(probe: StoreProbe, root: Path, key: str):
    """The tensor under a key, read as the connector of that store reads it."""
    if isinstance(probe, ExampleStoreProbe):
        return safetensors_torch.load_file(root / key / ExampleStoreProbe.FILE)["ec_cache"]
    return object_format.decode(probe.read(key))[1]


class TestFaults:
    @pytest.mark.parametrize("kind", BYTES)
    def test_injected_seen_and_healed(self, make: Make, kind: str) -> None:
        probe, fault = make("float32"), FAULTS[kind]
        target = Target(probe, KEY, DONOR)
        before, donor = probe.read(KEY), probe.read(DONOR)
        receipt = fault.inject(target)
        assert (receipt.kind, receipt.key, receipt.before) == (kind, KEY, before)
        assert receipt.after == probe.read(KEY) != before
        assert fault.verify(target, receipt)
        assert probe.read(DONOR) == donor
        fault.heal(target, receipt)
        assert probe.read(KEY) == before
        assert not fault.verify(target, receipt), "what is healed is not there any more"
        said = receipt.to_json()
        assert said["before"] == {"sha256": digest(before), "bytes": len(before or b"")}
        assert (said["after"]["sha256"] is None) is (kind == "deleted")

    def test_what_each_leaves(self, make: Make, tmp_path: Path) -> None:
        root, probe = tmp_path / "store", make("float32")
        target = Target(probe, KEY, DONOR)
        before = probe.read(KEY) or b""

        def left(kind: str) -> bytes | None:
            receipt = FAULTS[kind].inject(target)
            try:
                return probe.read(KEY)
            finally:
                FAULTS[kind].heal(target, receipt)

        assert left("deleted") is None
        assert left("truncated") == before[: len(before) // 2]
        assert left("replaced") == probe.read(DONOR)
        FAULTS["one-row"].inject(target)
        row = read_back(probe, root, KEY)
        assert row.shape == (1, WIDTH)
        assert torch.equal(row[0], tensor(0)[0])

    @pytest.mark.parametrize(
        ("kind", "dtype", "shape"),
        [
            ("rows-missing", "float32", (ROWS - 1, WIDTH)),
            ("no-rows", "float32", (0, WIDTH)),
            ("rows-added", "float32", (ROWS + 1, WIDTH)),
            ("width", "bfloat16", (ROWS, WIDTH // 2)),
            ("width-one", "float32", (ROWS, 1)),
            ("dtype", "float32", (ROWS, WIDTH)),
            ("dtype", "bfloat16", (ROWS, WIDTH)),
            ("half", "bfloat16", (ROWS, WIDTH)),
            ("half", "float16", (ROWS, WIDTH)),
            ("eight-bit", "float32", (ROWS, WIDTH)),
        ],
    )
    def test_sealed_objects_are_well_formed_and_other(
        self, make: Make, tmp_path: Path, kind: str, dtype: str, shape: tuple[int, int]
    ) -> None:
        probe = make(dtype)
        FAULTS[kind].inject(Target(probe, KEY, DONOR))
        found, whole = read_back(probe, tmp_path / "store", KEY), tensor(0, dtype)
        assert found.shape == shape
        rows, width = min(shape[0], ROWS), min(shape[1], WIDTH)
        if kind in ("dtype", "half", "eight-bit"):
            assert found.dtype != whole.dtype
            # An eighth is what two bits of mantissa lose at most when they are cut off.
            assert torch.allclose(found.float(), whole.float(), rtol=0.26, atol=1e-4)
            return
        assert found.dtype == whole.dtype
        assert torch.equal(found[:rows, :width], whole[:rows, :width])

    @pytest.mark.parametrize(
        ("kind", "left"), [("not-a-number", "nan"), ("zero-tail", "zeros"), ("flipped-bit", "near")]
    )
    def test_damage_among_the_rows_keeps_the_form(self, make: Make, kind: str, left: str) -> None:
        probe = make("float32")
        before = probe.read(KEY) or b""
        FAULTS[kind].inject(Target(probe, KEY, DONOR))
        after = probe.read(KEY) or b""
        assert len(after) == len(before)
        # Past the checksum, which finds all of these.
        at = before.find(bytes_of(tensor(0)))
        rows = torch.frombuffer(bytearray(after[at : at + ROWS * WIDTH * 4]), dtype=torch.float32).view(ROWS, WIDTH)
        if left == "nan":
            assert rows.isnan().sum() == 2
        elif left == "zeros":
            assert torch.equal(rows[ROWS // 2 :], torch.zeros(ROWS // 2, WIDTH))
            assert torch.equal(rows[: ROWS // 2], tensor(0)[: ROWS // 2])
        else:
            assert (rows != tensor(0)).sum() == 1
        assert after[:at] == before[:at]

    def test_an_object_without_plain_rows_is_not_damaged_among_them(self, make: Make) -> None:
        probe = make("float32")
        before = probe.read(KEY)
        probe.unseal = lambda data: Rows(b"x" * 64, 1, 16, "float32")  # type: ignore[method-assign]
        with pytest.raises(StackError, match=r"Subject\.faults"):
            FAULTS["flipped-bit"].inject(Target(probe, KEY, DONOR))
        assert probe.read(KEY) == before

    def test_a_folder_in_the_place_of_a_file(self, make: Make) -> None:
        probe, fault = make("float32"), FAULTS["folder"]
        target = Target(probe, KEY, DONOR)
        before, path = probe.read(KEY), probe.file(KEY)
        assert path is not None
        receipt = fault.inject(target)
        assert path.is_dir()
        assert fault.verify(target, receipt)
        # A connector may have moved the folder away.
        for heal_over in (True, False):
            if not heal_over:
                path.unlink()
            fault.heal(target, receipt)
            assert probe.read(KEY) == before
            assert not fault.verify(target, receipt)

    def test_a_store_without_files_has_no_folders_in_it(self, make: Make) -> None:
        probe = make("float32")
        before, path = probe.read(KEY), probe.file(KEY)
        assert path is not None
        probe.read = lambda key: before  # type: ignore[method-assign]
        probe.file = lambda key: None  # type: ignore[method-assign]
        with pytest.raises(StackError, match="file_store"):
            FAULTS["folder"].inject(Target(probe, KEY, DONOR))
        assert path.read_bytes() == before

    @pytest.mark.parametrize("kind", EVERY)
    def test_the_rehearsal_leaves_the_rows(self, make: Make, tmp_path: Path, kind: str) -> None:
        probe = make("bfloat16")
        before = probe.read(KEY)
        FAULTS[kind].rehearse(probe, KEY)
        assert torch.equal(read_back(probe, tmp_path / "store", KEY), tensor(0, "bfloat16"))
        if kind not in SEALED:
            assert probe.read(KEY) == before

    @pytest.mark.parametrize("kind", EVERY)
    def test_where_nothing_is_stored_nothing_is_done(self, make: Make, kind: str) -> None:
        probe = make("float32")
        keys = sorted(probe.keys())
        with pytest.raises(StackError, match="no object under x"):
            FAULTS[kind].inject(Target(probe, "x", DONOR))
        with pytest.raises(StackError, match="no object under x"):
            FAULTS[kind].rehearse(probe, "x")
        assert sorted(probe.keys()) == keys

    def test_without_a_donor_nothing_is_replaced(self, make: Make) -> None:
        probe = make("float32")
        before = probe.read(KEY)
        with pytest.raises(StackError, match="no object under nobody"):
            FAULTS["replaced"].inject(Target(probe, KEY, "nobody"))
        assert probe.read(KEY) == before

    @pytest.mark.parametrize("kind", BYTES)
    def test_a_probe_that_writes_nowhere_is_not_verified(self, make: Make, kind: str) -> None:
        probe = make("float32")
        before = probe.read(KEY)
        probe.write = lambda key, data: None  # type: ignore[method-assign]
        probe.delete = lambda key: None  # type: ignore[method-assign]
        target, fault = Target(probe, KEY, DONOR), FAULTS[kind]
        receipt = fault.inject(target)
        assert not fault.verify(target, receipt)
        assert probe.read(KEY) == before

    def test_damage_that_changes_nothing_is_not_verified(self, make: Make) -> None:
        probe = make("float32")
        probe.write(DONOR, probe.read(KEY) or b"")
        target = Target(probe, KEY, DONOR)
        assert not FAULTS["replaced"].verify(target, FAULTS["replaced"].inject(target))
        data = probe.read(KEY) or b""
        probe.write(KEY, probe.seal(probe.unseal(data).first(1), data))
        assert not FAULTS["one-row"].verify(target, FAULTS["one-row"].inject(target)), "it has one row anyhow"

    def test_an_object_that_was_not_there_is_deleted_again(self, make: Make) -> None:
        """A subject's own fault may make an object."""

        class Made(Fault):
            kind = "made"

            def inject(self, target: Target) -> Receipt:
                target.probe.write(target.key, b"new")
                return Receipt(self.kind, target.key, None, b"new")

        probe = make("float32")
        target = Target(probe, "n" * 64, DONOR)
        receipt = Made().inject(target)
        assert Made().verify(target, receipt)
        Made().heal(target, receipt)
        assert probe.read(target.key) is None


class TestProbes:
    def test_keys(self, make: Make) -> None:
        probe = make("float32")
        assert sorted(probe.keys()) == sorted([KEY, DONOR])
        probe.delete(KEY)
        probe.delete(KEY)
        assert probe.keys() == [DONOR]
        assert probe.read(KEY) is None

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_unseal_and_seal(self, make: Make, tmp_path: Path, dtype: str) -> None:
        probe = make(dtype)
        data = probe.read(KEY) or b""
        rows = probe.unseal(data)
        assert (rows.rows, rows.width, rows.dtype) == (ROWS, WIDTH, dtype)
        assert rows.data == bytes_of(tensor(0, dtype))
        again = probe.seal(rows, data)
        assert probe.unseal(again) == rows
        probe.write(KEY, again)
        assert torch.equal(read_back(probe, tmp_path / "store", KEY), tensor(0, dtype))
        # Other rows, in the form of the first object.
        other = Rows(bytes_of(tensor(1, dtype)[:5]), 5, WIDTH, dtype)
        probe.write(KEY, probe.seal(other, data))
        assert torch.equal(read_back(probe, tmp_path / "store", KEY), tensor(1, dtype)[:5])

    def test_rows(self) -> None:
        rows = Rows(bytes(range(12)), 3, 2, "float16")
        assert rows.first(1) == Rows(bytes(range(4)), 1, 2, "float16")
        assert rows.first(3) == rows
        with pytest.raises(ValueError, match="no first 4"):
            rows.first(4)
        with pytest.raises(ValueError, match="are no 5 rows"):
            Rows(bytes(12), 5, 2, "float16")


class TestVerifiedStore:
    def expect(self, rows: int | None = ROWS) -> Expectation:
        return Expectation(KEY, "f" * 64, rows, "float32")

    def reason(self, root: Path, expect: Expectation) -> Reason | None:
        try:
            object_format.verify_header(reclaim.inspect(root, root / object_format.object_name(KEY)), expect)
        except ObjectError as error:
            return error.reason
        return None

    @pytest.mark.parametrize(
        ("kind", "reason"),
        [
            ("deleted", Reason.MISSING),
            ("truncated", Reason.TRUNCATED),
            ("replaced", Reason.KEY),
            ("one-row", Reason.ROWS),
        ],
    )
    def test_each_fault_is_refused_for_what_it_is(self, tmp_path: Path, kind: str, reason: Reason) -> None:
        probe = verified(tmp_path, "float32")
        assert self.reason(tmp_path, self.expect()) is None
        target = Target(probe, KEY, DONOR)
        receipt = FAULTS[kind].inject(target)
        assert self.reason(tmp_path, self.expect()) is reason
        if kind == "one-row":
            # Nothing but the number of rows is wrong with it: whoever does not count them takes it.
            assert self.reason(tmp_path, self.expect(rows=None)) is None
            assert self.reason(tmp_path, self.expect(rows=1)) is None
        FAULTS[kind].heal(target, receipt)
        assert self.reason(tmp_path, self.expect()) is None

    def test_a_broken_object_has_no_key(self, tmp_path: Path) -> None:
        probe = verified(tmp_path, "float32")
        FAULTS["truncated"].inject(Target(probe, KEY, DONOR))
        assert probe.keys() == [DONOR]

    @pytest.mark.parametrize("key", HOSTILE)
    def test_hostile_keys_stay_in_the_store(self, tmp_path: Path, key: str) -> None:
        root = tmp_path / "a" / "store"
        root.mkdir(parents=True)
        probe = verified(root, "float32")
        like = probe.read(KEY) or b""
        header, payload = object_format.unpack(like)
        probe.write(key, object_format.repack(replace(header, key=key), payload))
        assert sorted(probe.keys()) == sorted([KEY, DONOR, key])
        assert object_format.unpack(probe.read(key) or b"")[0].key == key
        assert [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_relative_to(root)] == []
        probe.delete(key)
        assert sorted(probe.keys()) == sorted([KEY, DONOR])


class TestExampleStore:
    @pytest.mark.parametrize("key", ["..", "../x", "/etc/x", "a/../..", "a/../../x"])
    def test_a_key_that_leads_out_of_the_store_is_refused(self, tmp_path: Path, key: str) -> None:
        """The connector would follow it; a probe that deletes folders must not."""
        root = tmp_path / "a" / "store"
        root.mkdir(parents=True)
        probe = example(root, "float32")
        (root.parent / "x").mkdir()
        (root.parent / "x" / ExampleStoreProbe.FILE).write_bytes(b"precious")
        before = sorted(tmp_path.rglob("*"))
        for use in (probe.read, probe.delete, lambda key: probe.write(key, b"x")):
            with pytest.raises(ValueError, match="leads out of the store"):
                use(key)
        assert sorted(tmp_path.rglob("*")) == before

    @pytest.mark.parametrize("key", ["", "."])
    def test_an_object_in_the_root_itself_goes_alone(self, tmp_path: Path, key: str) -> None:
        """The connector writes one there for such a uuid."""
        probe = example(tmp_path, "float32")
        probe.write(key, b"root")
        assert set(probe.keys()) == {".", KEY, DONOR}
        assert probe.read(key) == b"root"
        probe.delete(key)
        assert set(probe.keys()) == {KEY, DONOR}

    def test_a_key_with_a_slash_is_a_folder_deeper(self, tmp_path: Path) -> None:
        probe = example(tmp_path, "float32")
        probe.write("lora:a/b", b"x")
        assert "lora:a/b" in probe.keys()  # noqa: SIM118
        probe.delete("lora:a/b")
        assert probe.read("lora:a/b") is None

    def test_it_reads_what_the_connector_writes_with_metadata(self, tmp_path: Path) -> None:
        (tmp_path / KEY).mkdir()
        rows = tensor(3)
        path = tmp_path / KEY / ExampleStoreProbe.FILE
        safetensors_torch.save_file({"ec_cache": rows}, path, metadata={"format": "pt"})
        found = ExampleStoreProbe(tmp_path).unseal(path.read_bytes())
        assert found == Rows(bytes_of(rows), ROWS, WIDTH, "float32")
