"""A site and its stacks: what is refused before anything starts, what happens when a server fails, what `stop` gives back.

Stand-ins (standin_server.py) play vLLM's server and the proxy; test_live_stack.py does it with the real ones.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from topology_residue import GONE_S, Traces, marked, new_token, wait_until

from epd_conformance.errors import StackError, UsageError
from epd_conformance.features import Feature
from epd_conformance.subject import Implementation, LaunchOptions, StackInfo, Subject
from epd_conformance.topology import stack as stacks
from epd_conformance.topology.claims import bindable
from epd_conformance.topology.devices import Gpu, Inventory
from epd_conformance.topology.launcher import Boot
from epd_conformance.topology.spec import Shape, Topology
from epd_conformance.topology.stack import ModelUse, Site, StackSpec, server_environment

ROOMY = Inventory(cores=2, memory_gib=1000.0, available_gib=1000.0)
E_PD = Topology.parse("e-pd")


class TestedSubject(Subject):
    __test__ = False
    implementation = Implementation("nobody", "nothing", "1")
    features: frozenset[Feature] = frozenset()

    def connector_config(self, role: str, stack: StackInfo) -> dict[str, Any]:
        return {"ec_connector": "Theirs"}

    def launch(self, role: str, stack: StackInfo) -> LaunchOptions:
        return LaunchOptions(environment={"PYTHONPATH": str(Path(__file__).parent)})


def spec(name: str = "s", topology: Topology = E_PD, **more: Any) -> StackSpec:
    return StackSpec(name, topology, Shape(), subject=TestedSubject(), recorder=False, **more)


@pytest.fixture
def token() -> Iterator[str]:
    token = new_token()
    yield token
    for pid in marked(token):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def model(tmp_path: Path) -> ModelUse:
    folder = tmp_path / "a model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return ModelUse("test", str(folder), "float32", {"image": 1})


MakeSite = Callable[..., Site]


@pytest.fixture
def make_site(token: str, tmp_path: Path, model: ModelUse, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeSite]:
    """Sites of stand-ins; each is closed at the end and must have left nothing."""
    monkeypatch.setattr(stacks, "VLLM_SERVER", "standin_server")
    monkeypatch.setattr(stacks, "PROXY", "standin_server")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    made: list[Site] = []

    def make(**options: Any) -> Site:
        chosen: dict[str, Any] = {"boot": Boot.PLAIN, "inventory": ROOMY, "cache": tmp_path, "ready_s": 20.0}
        site = Site(tmp_path / "a run", model, **(chosen | options))
        made.append(site)
        return site.__enter__()

    yield make
    for site in made:
        site.close()
    # A server that was being started when the guard was killed is known to nobody, and ends itself once Python is up.
    natural = all(site.launcher._guard.returncode == 0 for site in made)
    traces = Traces(token, scratch=tuple(str(site.launcher.scratch) for site in made))
    traces.assert_gone(0.0 if natural else GONE_S)


def test_a_stack_comes_up_and_its_stop_gives_everything_back(make_site: MakeSite, token: str) -> None:
    site = make_site()
    first, second = site.boot(spec("one"), spec("two", Topology.parse("aggregated")))
    assert [server.name for server in first.servers] == ["encode-0", "prefill_decode-0"]
    assert all(server.ready_after_s is not None for server in first.servers)
    assert second.base_url == second.servers[0].url
    assert first.dead() == second.dead() == []
    bypass = site.start_bypass(first)
    ports = list(first.ports)
    assert len(marked(token)) == 1 + 2 + 1 + 1 + 1, "guard, two servers, proxy, bypass, the other stack's server"
    site.stop(first)
    assert len(marked(token)) == 1 + 1
    assert site.stacks == [second]
    with pytest.raises(requests.ConnectionError):
        requests.get(bypass, timeout=2)
    assert [site.ports.take_exactly(port) for port in ports] == ports, "a run that boots all night keeps no ports"


def test_hundreds_of_boots_hold_no_descriptors(make_site: MakeSite) -> None:
    site = make_site()
    counts = []
    for _ in range(3):
        (stack,) = site.boot(spec())
        site.stop(stack)
        counts.append(len(list(Path("/proc/self/fd").iterdir())))
    assert counts[0] == counts[1] == counts[2]


def test_a_second_stack_of_a_name_shares_nothing_with_the_first(make_site: MakeSite) -> None:
    """Journals, stores and logs of another boot would pass for those of this one."""
    site = make_site()
    (first,) = site.boot(spec("e-pd"))
    site.stop(first)
    (second,) = site.boot(spec("e-pd"))
    assert second.folder.name == "e-pd-2"
    assert second.servers[0].process.log.name == "e-pd-2.encode-0.log"


def test_a_clients_proxy_settings_do_not_reach_the_loopback(
    make_site: MakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens on the discard port
    monkeypatch.delenv("no_proxy", raising=False)
    make_site().boot(spec())


# -- servers that fail -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["encode-0", "prefill_decode-0", "proxy"])
def test_a_server_that_dies_while_waiting_fails_the_boot_at_once(
    who: str, make_site: MakeSite, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_DIES", who)
    site = make_site(ready_s=600.0)
    began = time.monotonic()
    with pytest.raises(StackError) as raised:
        site.boot(spec())
    assert time.monotonic() - began < 10
    first, *rest = str(raised.value).splitlines()
    assert first == f"s.{who} ended with exit code 1: the server raised RuntimeError: of no use: see the log"
    assert rest[-1] == "RuntimeError: of no use"
    assert len(marked(token)) == 1, "the guard alone: the others of the stack are stopped"
    assert site.stacks == []
    monkeypatch.delenv("STANDIN_DIES")


def test_a_death_by_bad_input_is_a_usage_error(make_site: MakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_DIES", "encode-0")
    monkeypatch.setenv("STANDIN_SAYS", "ModuleNotFoundError: No module named 'theirs'")
    with pytest.raises(UsageError, match=r"^s.encode-0 ended .*: the module 'theirs' does not import in the server: "):
        make_site().boot(spec())


def test_what_is_not_ready_in_time_is_named_with_its_log(
    make_site: MakeSite, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_SILENT", "encode-0")
    site = make_site(ready_s=1.0)
    with pytest.raises(StackError) as raised:
        site.boot(spec())
    assert str(raised.value).splitlines()[0] == "s.encode-0 not ready within 1 s: no known cause: see the log"
    assert len(marked(token)) == 1


def test_what_was_started_is_stopped_when_the_next_cannot_be(make_site: MakeSite, token: str, tmp_path: Path) -> None:
    site = make_site()
    (tmp_path / "a run" / "logs" / "s.prefill_decode-0.log").mkdir(parents=True)
    with pytest.raises(StackError, match="could not spawn"):
        site.boot(spec())
    assert len(marked(token)) == 1
    assert site.ports._held == {}


def test_the_end_of_the_guard_ends_the_wait(make_site: MakeSite, token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_SILENT", "encode-0")
    site = make_site(ready_s=600.0)

    def kill_the_guard() -> None:
        wait_until(lambda: len(marked(token)) >= 4, "the stack to be started")
        os.kill(site.launcher.guard_pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_the_guard)
    killer.start()
    with pytest.raises(StackError, match="guard"):
        site.boot(spec())
    killer.join()


# -- refused before anything starts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", ["aggregated", "e-pd"])
def test_a_port_that_is_taken(topology: str, make_site: MakeSite, token: str) -> None:
    site = make_site()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(
            UsageError, match=f"port {port} is taken by another program: stop it or choose another port"
        ):
            site.boot(spec(topology=Topology.parse(topology), port=port))
    assert len(marked(token)) == 1
    assert not list((site.folder / "logs").glob("s.*"))
    (stack,) = site.boot(spec(topology=Topology.parse(topology), port=port))
    assert stack.base_url == f"http://127.0.0.1:{port}"
    assert not bindable(port)


def test_too_little_memory(make_site: MakeSite, token: str) -> None:
    small = Inventory(cores=2, memory_gib=24.0, available_gib=5.0)
    site = make_site(inventory=small, memory_wait_s=0.0)
    with pytest.raises(UsageError) as raised:
        site.boot(spec())
    assert re.fullmatch(
        r"too little memory: 2 servers need 6 GiB \(3 GiB each\) and 5.0 GiB of 24.0 GiB are free; waited 0 s: stop "
        r"something or use a smaller topology",
        str(raised.value),
    )
    with pytest.raises(UsageError, match=r"9 servers need 27 GiB .* this machine has 24.0 GiB: use a smaller topology"):
        site.boot(spec(topology=Topology.parse("1e-8pd")))
    assert len(marked(token)) == 1
    assert not list((site.folder / "logs").glob("s.*"))


def test_no_gpu_and_too_little_of_one(make_site: MakeSite, token: str) -> None:
    with pytest.raises(UsageError, match="--device cuda needs a GPU and none was found"):
        make_site(device="cuda").boot(spec())
    tight = Inventory(cores=2, memory_gib=24.0, available_gib=24.0, gpus=(Gpu(0, "L4", 4.0),))
    with pytest.raises(UsageError, match=r"too little GPU memory: 2 servers on L4 would have 1.8 GiB each of 4 GiB"):
        make_site(device="cuda", inventory=tight).boot(spec())
    assert len(marked(token)) == 2, "two guards"


@pytest.mark.parametrize(("gpus", "in_turn"), [(1, True), (2, False)])
def test_servers_that_share_a_gpu_start_one_after_the_other(
    gpus: int, in_turn: bool, make_site: MakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM measures free GPU memory while it starts, and takes what a neighbour allocates meanwhile for its own."""
    monkeypatch.setenv("STANDIN_SLOW", "0.5")
    cards = tuple(Gpu(index, "H200", 140.0) for index in range(gpus))
    site = make_site(device="cuda", inventory=Inventory(cores=2, memory_gib=24.0, available_gib=24.0, gpus=cards))
    (stack,) = site.boot(spec())
    first, second = stack.servers
    assert (second.process.started - first.process.started >= 0.5) is in_turn
    assert first.placement.flags == ("--gpu-memory-utilization", "0.45" if in_turn else "0.90")


def test_no_forking_on_gpu(tmp_path: Path, model: ModelUse) -> None:
    with pytest.raises(UsageError, match=r"cannot be forked .*: use --boot plain"):
        Site(tmp_path, model, device="cuda", boot=Boot.FORK, inventory=ROOMY)


@pytest.mark.parametrize("local", [True, False])
def test_a_folder_without_a_model(local: bool, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"no model in the folder {tmp_path}: name one that holds config.json"):
        Site(tmp_path, ModelUse("m", str(tmp_path), "float32", {}, local=local), inventory=ROOMY)


def test_a_subject_without_a_connector(make_site: MakeSite, token: str) -> None:
    class Empty(TestedSubject):
        def connector_config(self, role: str, stack: StackInfo) -> dict[str, Any]:
            return {}

    with pytest.raises(UsageError, match="names no `ec_connector`: return the JSON of --ec-transfer-config"):
        make_site().boot(StackSpec("s", E_PD, Shape(), subject=Empty()))
    assert len(marked(token)) == 1


# -- the environment of servers ----------------------------------------------------------------------------------------


def test_a_home_that_cannot_be_written_is_not_used(
    model: ModelUse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/dev/null/home")  # not even root can make it
    monkeypatch.delenv("HF_HOME", raising=False)
    environment = server_environment("cpu", model, tmp_path)
    for name in ("HF_HOME", "VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT"):
        assert environment[name].startswith(f"{tmp_path}/"), name


def test_a_callers_settings_do_not_reach_servers(
    model: ModelUse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VLLM_API_KEY", "VLLM_PORT", "VLLM_USE_V2_MODEL_RUNNER", "VLLM_BATCH_INVARIANT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    environment = server_environment("cpu", model, tmp_path)
    assert not {"VLLM_API_KEY", "VLLM_PORT", "VLLM_USE_V2_MODEL_RUNNER", "VLLM_BATCH_INVARIANT"} & environment.keys()
    assert environment["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_lifeline_and_repairs_are_on_the_path_of_servers_on_every_device(
    device: str, model: ModelUse, tmp_path: Path
) -> None:
    first = Path(server_environment(device, model, tmp_path)["PYTHONPATH"].split(os.pathsep)[0])
    assert (first / "sitecustomize.py").is_file()
    assert (first / "_epd_lifeline.py").is_file()
