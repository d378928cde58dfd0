"""Topologies as data: what is one, what is none, and the flags of each role."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_conformance.errors import UsageError
from epd_conformance.topology.spec import MOST_PER_ROLE, Role, Shape, Topology, ec_role, kv_role, server_flags

KINDS = {
    "aggregated": [Role.AGGREGATED],
    "e-pd": [Role.ENCODE, Role.PREFILL_DECODE],
    "p-d": [Role.PREFILL, Role.DECODE],
    "e-p-d": [Role.ENCODE, Role.PREFILL, Role.DECODE],
}
sizes = st.integers(1, MOST_PER_ROLE)
sized = st.one_of(
    st.tuples(st.just("e-pd"), sizes, sizes),
    st.tuples(st.just("p-d"), sizes, sizes),
    st.tuples(st.just("e-p-d"), sizes, sizes, sizes),
)


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_is_a_topology_of_one_server_a_role(kind: str) -> None:
    topology = Topology.parse(kind)
    assert topology.kind == topology.name == str(topology) == kind
    assert topology.counts == tuple((role, 1) for role in KINDS[kind])
    assert topology.servers() == [(f"{role}-0", role) for role in KINDS[kind]]
    assert topology.has_kv is (Role.DECODE in KINDS[kind])
    assert topology.has_ec is (Role.ENCODE in KINDS[kind])


@given(sized)
def test_sizes_are_kept_and_can_be_read_again(drawn: tuple[Any, ...]) -> None:
    kind, *counts = drawn
    text = "-".join(f"{count}{part}" for count, part in zip(counts, kind.split("-"), strict=True))
    topology = Topology.parse(text)
    assert topology.kind == kind
    assert [count for _, count in topology.counts] == counts
    assert topology.name == (kind if set(counts) == {1} else text)
    assert Topology.parse(topology.name) == topology
    names = [name for name, _ in topology.servers()]
    assert len(names) == len(set(names)) == sum(counts)


def test_case_and_blanks_around_do_not_matter() -> None:
    assert Topology.parse(" 2E-1PD\n") == Topology.parse("2e-1pd")


@pytest.mark.parametrize(
    "text",
    [
        *("", "-", "e", "pd", "epd", "e-", "e-pd-", "-e-pd", "e--pd", "E|PD", "1aggregated", "2aggregated"),
        *("1e", "1p-1e", "1pd-1e", "1e-1d", "1e-1d-1p", "1e-1pd-1d", "1e-1e-1pd", "1e-1p-1d-1pd", "e-1pd", "1 e-1pd"),
        *("0e-1pd", "-1e-1pd", "65e-1pd", "200e-1pd", "1.5e-1pd", "２e-1pd", "²e-1pd", "9" * 5000 + "e-1pd"),
    ],
)
def test_anything_else_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(UsageError) as raised:
        Topology.parse(text)
    message = str(raised.value)
    assert message.startswith(repr(text)[:30]), "it names the thing"
    assert "use aggregated, e-pd, p-d or e-p-d" in message, "and the mend"
    assert "\n" not in message
    assert len(message) < 300


@given(st.text(max_size=40))
def test_no_text_does_anything_but_parse_or_be_refused(text: str) -> None:
    try:
        topology = Topology.parse(text)
    except UsageError as error:
        assert "\n" not in str(error)
    else:
        assert topology.kind in KINDS


def test_roles_on_the_connectors() -> None:
    assert {role: ec_role(role) for role in Role} == {
        Role.ENCODE: "ec_producer",
        Role.PREFILL: "ec_consumer",
        Role.PREFILL_DECODE: "ec_consumer",
        Role.DECODE: None,
        Role.AGGREGATED: None,
    }
    assert {role: kv_role(role) for role in Role} == {
        Role.ENCODE: None,
        Role.PREFILL: "kv_producer",
        Role.PREFILL_DECODE: None,
        Role.DECODE: "kv_consumer",
        Role.AGGREGATED: None,
    }


def flags(role: Role, device: str = "cpu", **changes: Any) -> tuple[str, ...]:
    arguments: dict[str, Any] = {
        "model": "/models/a b",
        "served_name": "m",
        "shape": Shape(),
        "device": device,
        "dtype": "float32",
        "media_limits": {"image": 4},
    }
    return server_flags(role, **(arguments | changes))


COMMON = (
    *("--model", "/models/a b", "--served-model-name", "m", "--dtype", "float32", "--max-model-len", "2048"),
    *("--max-num-seqs", "8", "--max-num-batched-tokens", "4096", "--seed", "0"),
    *("--limit-mm-per-prompt", '{"image": 4}', "--trust-request-mm-kwargs"),
)
CPU = ("--enforce-eager", "--block-size", "32")


@pytest.mark.parametrize(
    ("role", "device", "more"),
    [
        (Role.AGGREGATED, "cpu", CPU),
        (Role.PREFILL, "cpu", CPU),
        (Role.ENCODE, "cpu", (*CPU, "--mm-encoder-only")),
        (Role.AGGREGATED, "cuda", ()),
        (Role.DECODE, "cuda", ()),
        (Role.ENCODE, "cuda", ("--mm-encoder-only",)),
    ],
)
def test_flags_of_a_role(role: Role, device: str, more: tuple[str, ...]) -> None:
    assert flags(role, device) == (*COMMON, *more)


@pytest.mark.parametrize("role", Role)
def test_prefix_caching_is_switched_off_where_there_is_a_cache(role: Role) -> None:
    # An encode server has no KV cache, and so nothing to switch off.
    off = "--no-enable-prefix-caching" in flags(role, shape=Shape(prefix_caching=False))
    assert off is (role is not Role.ENCODE)
    assert "--no-enable-prefix-caching" not in flags(role)


def test_batch_shaping_flags_are_the_same_for_every_role() -> None:
    """Rule 4 of a fair comparison: matched baselines."""
    shaping = ("--max-model-len", "--max-num-seqs", "--max-num-batched-tokens", "--seed", "--dtype")
    seen = {tuple(given[given.index(flag) + 1] for flag in shaping) for given in map(flags, Role)}
    assert len(seen) == 1


def test_a_model_without_media_gets_no_limit() -> None:
    assert "--limit-mm-per-prompt" not in flags(Role.AGGREGATED, media_limits={})


def test_connector_configurations_are_json_and_extra_comes_last() -> None:
    ec, kv = {"ec_connector": "Ours", "ec_role": "ec_producer"}, {"kv_connector": "Theirs"}
    given = flags(Role.PREFILL, ec_config=ec, kv_config=kv, extra=("--max-num-seqs", "2"))
    assert json.loads(given[given.index("--ec-transfer-config") + 1]) == ec
    assert json.loads(given[given.index("--kv-transfer-config") + 1]) == kv
    assert given[-2:] == ("--max-num-seqs", "2"), "the subject's own arguments win"
