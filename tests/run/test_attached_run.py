"""Runs against servers that something else started (fakes in threads): nothing passes that nobody saw, and nothing is touched."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attached_fakes import MODEL, Cluster, FakeLauncher, Journals, images
from run_fakes import Call, Ended

from epd_conformance import attachment as attachments
from epd_conformance.errors import StackError, UsageError
from epd_conformance.live import attached, suites
from epd_conformance.live.attached import AttachedSite, AttachedStack, copy_lines, look
from epd_conformance.live.case import Case
from epd_conformance.report import verify
from epd_conformance.report.verify import Kind
from epd_conformance.run import suites_folder
from epd_conformance.subject import ReferenceSubject
from epd_conformance.topology.spec import Shape, Topology
from epd_conformance.topology.stack import StackSpec

Make = Callable[..., Cluster]
# What is true of an answer alone. Beside it `kept-apart`, unless these servers answer before the next request comes.
PLAIN = {"stage-error", "as-direct", "refused", "ended"}
BY_ANSWER = {
    "e-pd": PLAIN | {"text-only", "not-begun", "passed-on", "order"},
    "e-p-d": PLAIN,
    "aggregated": set(),
}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr(attached, "Launcher", FakeLauncher)
    made: list[Cluster] = []

    def make(topology: str = "e-pd", **options: Any) -> Cluster:
        made.append(Cluster(tmp_path / f"cluster-{len(made)}", topology, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def attach(command: Call, tmp_path: Path) -> Call:
    """`attach(cluster, *words, **changes)`: `run --attach` against it."""

    def call(cluster: Cluster, *words: object, out: Path | None = None, **changes: Any) -> Ended:
        out = out or tmp_path / "out"
        return command("run", "--attach", cluster.file(**changes), "--out", out, *words, out=out)

    return call


def judge_of() -> dict[str, str]:
    cases = suites.collect(suites_folder())
    return {
        f"{name} {case.name}": case.judge for name, found in cases.items() for case in found if isinstance(case, Case)
    }


def by_judge(ended: Ended) -> dict[str, set[str]]:
    """The judges of the cells by their verdict with its reason."""
    judges = judge_of()
    found: dict[str, set[str]] = {}
    for cell in ended.cells.values():
        words = f"{cell['verdict']} {cell['reason']}".strip()
        found.setdefault(words, set()).add(judges[f"{cell['requirement']} {cell['case']}"])
    return found


# -- without journals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", BY_ANSWER)
def test_without_journals_only_answers_pass(topology: str, cluster: Make, attach: Call, tmp_path: Path) -> None:
    here = cluster(topology)
    ended = attach(here)
    assert ended.code == 3, ended.err
    found = by_judge(ended)
    assert found.pop("pass", set()) - {"kept-apart"} == BY_ANSWER[topology]
    assert found.pop("inconclusive not-exercised", set()) <= {"kept-apart"}
    # Nobody is blamed for what nobody wrote down, and the harness itself did not err.
    assert {words.split()[0] for words in found} <= {"inconclusive", "could-not-run"}
    if topology != "e-p-d":
        # These servers have no metrics.
        assert set(found) <= {"inconclusive not-journalled", "inconclusive not-counted", "could-not-run attached"}
    asked = [body for fake in (here.proxy, here.baseline, *here.servers.values()) for body in fake.bodies]
    assert {body["model"] for body in asked} <= {MODEL, "no-such-model"}
    assert verify.verify(tmp_path / "out").problems == ()


def test_only_a_proxy_is_known(cluster: Make, attach: Call, tmp_path: Path) -> None:
    here = cluster()
    ended = attach(here, encode=None, decode=None)
    found = by_judge(ended)
    assert found["pass"] - {"kept-apart"} == BY_ANSWER["e-pd"] - {"ended"}, "an encode server is asked by its address"
    assert {"miss", "encode-only"} <= found["could-not-run attached"]
    assert all(not fake.bodies for fake in here.servers.values())
    assert verify.verify(tmp_path / "out").problems == ()


def test_a_wrong_answer_fails_also_without_a_journal(cluster: Make, attach: Call, tmp_path: Path) -> None:
    def changed(body: Any, answer: dict[str, Any]) -> dict[str, Any]:
        if images(body):
            answer["choices"][0]["token_ids"][0] += 1
        return answer

    ended = attach(cluster(changed=changed))
    assert ended.code == 1
    assert by_judge(ended)["fail tokens-differ"] >= {"equality", "warm"}
    assert by_judge(ended)["fail answer-differs"] == {"as-direct"}
    assert by_judge(ended)["pass"] == BY_ANSWER["e-pd"] - {"as-direct"}
    assert verify.verify(tmp_path / "out").problems == ()


def test_the_report_says_what_is_known(cluster: Make, attach: Call) -> None:
    here = cluster()
    ended = attach(here, "--cell", f"EPD-TOK-001[e-pd/{MODEL.replace('/', '~')}/text]")
    assert ended.report is not None
    environment = ended.report["environment"]
    assert environment["details"]["attached"] is True
    assert environment["details"]["servers"]["encode-0"]["vllm"] == environment["vllmVersion"] == "0.32.0"
    assert environment["models"] == [{"id": MODEL, "digest": ""}]
    assert environment["flags"] == {}
    assert ended.report["environmentClass"] == "cuda"
    assert ended.report["subject"]["implementation"]["version"] == "1.2"
    assert "not known here" in " ".join(ended.out.split())
    (cell,) = [cell for cell in ended.cells.values() if cell["verdict"] != "could-not-run"]
    assert cell["verdict"] == "pass"
    assert cell["reproduce"].startswith("epd-conformance run --attach ")
    assert ended.report["run"]["seed"] != 0, "attached servers may hold the items of an earlier run"


# -- with journals -----------------------------------------------------------------------------------------------------


def test_journals_are_copied_as_evidence(cluster: Make, attach: Call, tmp_path: Path) -> None:
    """Servers, and what they wrote, are older than the run; that is nothing to complain about."""
    here = cluster()
    journals = Journals(tmp_path / "journals")
    journals.begin("encode-0", "prefill_decode-0", t=time.time() - 60)
    journals.write("encode-0", "worker", "save", time.time() - 50, id="k", digest="d", rows=1, width=1, seconds=0.1)
    journals.begin("baseline-0", t=time.time() - 60)
    label = MODEL.replace("/", "~")
    wanted = [f"EPD-INIT-001[e-pd/{label}/init]", f"EPD-ROLE-001[e-pd/{label}/encode]"]
    ended = attach(here, *[word for name in wanted for word in ("--cell", name)], journal=str(journals.folder))
    assert [ended.verdicts[name] for name in wanted] == ["pass", "pass"], ended.err
    copies = tmp_path / "out" / "stacks" / "e-pd" / "journal"
    assert {path.name for path in copies.iterdir()} == {
        f"{server}.{side}.7.ndjson" for server in ("encode-0", "prefill_decode-0") for side in ("scheduler", "worker")
    }
    assert (copies / "encode-0.worker.7.ndjson").read_bytes() == (
        journals.folder / "encode-0.worker.7.ndjson"
    ).read_bytes()
    assert verify.verify(tmp_path / "out").problems == ()
    # Work within the run that no cell accounts for is a different matter.
    line = {"seq": 2, "t": time.time(), "server": "encode-0", "side": "worker", "ev": "save", "id": "k", "digest": "d"}
    with (copies / "encode-0.worker.7.ndjson").open("a") as file:
        file.write(json.dumps(line) + "\n")
    kinds = {problem.kind for problem in verify.verify(tmp_path / "out").problems}
    assert kinds == {Kind.JOURNAL, Kind.ARTIFACT}


def test_only_whole_lines_are_copied(tmp_path: Path) -> None:
    source, target = tmp_path / "s", tmp_path / "t"
    source.mkdir()
    target.mkdir()
    path, copy = source / "encode-0.worker.1.ndjson", target / "encode-0.worker.1.ndjson"
    (source / "encode-1.worker.1.ndjson").write_text("other\n")
    path.write_text('{"a": 1}\n{"b"')
    copy_lines(source, target, ["encode-0"])
    assert copy.read_text() == '{"a": 1}\n'
    path.write_text('{"a": 1}\n{"b": 2}\n')
    copy_lines(source, target, ["encode-0"])
    copy_lines(source, target, ["encode-0"])
    assert copy.read_text() == path.read_text()
    assert list(target.iterdir()) == [copy]
    path.write_text("{}\n")
    with pytest.raises(StackError, match="cut short"):
        copy_lines(source, target, ["encode-0"])


def test_a_journal_that_is_not_theirs_is_refused(cluster: Make, tmp_path: Path) -> None:
    here = cluster()
    journals = Journals(tmp_path / "journals")
    found = attachments.load(here.file(journal=str(journals.folder)))
    with pytest.raises(UsageError, match=r"no `init` line of encode-0 \(scheduler\).*EPD_SERVER=encode-0"):
        look(found)
    journals.begin("encode-0", "prefill_decode-0", t=1.0)
    assert look(found)
    journals.numbers.clear()
    journals.begin("encode-0", t=2.0)
    with pytest.raises(UsageError, match="new folder"):
        look(found)


# -- what is not there -------------------------------------------------------------------------------------------------


def test_who_does_not_answer_is_named_at_the_start(cluster: Make, attach: Call, tmp_path: Path) -> None:
    here = cluster()
    here.servers["prefill_decode-0"].close()
    ended = attach(here)
    assert ended.code == 2
    assert len(ended.errors) == 1
    assert (
        f"prefill_decode-0 at {here.servers['prefill_decode-0'].url} does not answer (connection refused)" in ended.err
    )
    assert ended.report is None
    assert not (tmp_path / "out").exists()


def test_who_is_sick_or_another_is_named(cluster: Make) -> None:
    here = cluster()
    here.servers["encode-0"].health = 503
    with pytest.raises(UsageError, match=r"encode-0 at http.* answers /health with 503"):
        look(attachments.load(here.file()))
    here.servers["encode-0"].health = 200
    with pytest.raises(UsageError, match=f"serves {MODEL}, not another-name"):
        look(attachments.load(here.file(model="another-name")))
    here.proxy.close()
    with pytest.raises(UsageError, match=r"proxy at http.* does not answer"):
        look(attachments.load(here.file()))


@pytest.mark.parametrize(
    ("words", "subject", "said"),
    [
        (["--mode", "certify"], True, "cannot certify"),
        (["--profile", "e-p-d"], True, "--profile"),
        (["--model", "tiny-qwen2-vl"], True, "--model"),
        (["--device", "cuda"], True, "--device"),
        (["--boot", "plain"], True, "--boot"),
        (["--subject", "reference"], True, "[subject]"),
        ([], False, "[subject]"),
    ],
)
def test_options_that_say_nothing_here_are_refused(
    words: list[str], subject: bool, said: str, cluster: Make, attach: Call
) -> None:
    ended = attach(cluster(), *words, subject=subject)
    assert ended.code == 2
    assert len(ended.errors) == 1
    assert said in ended.errors[0]


def test_a_subject_of_the_command_line(cluster: Make, attach: Call) -> None:
    name = f"EPD-TOK-001[e-pd/{MODEL.replace('/', '~')}/text]"
    ended = attach(cluster(), "--subject", "reference", "--cell", name, subject=False)
    assert ended.verdicts[name] == "pass", ended.err
    assert "--subject reference" in ended.cells[name]["reproduce"]


def test_a_run_needs_a_subject_or_an_attachment(command: Call) -> None:
    ended = command("run")
    assert ended.code == 2
    assert "needs a subject" in ended.err


# -- the site ----------------------------------------------------------------------------------------------------------


def spec(topology: str = "e-pd", subject: bool = True) -> StackSpec:
    return StackSpec(topology, Topology.parse(topology), Shape(), subject=ReferenceSubject() if subject else None)


def site(cluster: Cluster, folder: Path, **changes: Any) -> AttachedSite:
    return AttachedSite(folder, look(attachments.load(cluster.file(**changes)))).__enter__()


def test_a_dead_server_is_named_and_nothing_is_started(cluster: Make, tmp_path: Path) -> None:
    here = cluster()
    with site(here, tmp_path / "o") as attached_site:
        (stack,) = attached_site.boot(spec())
        assert stack.dead() == []
        here.servers["encode-0"].close()
        with pytest.raises(StackError, match=r"the attached server encode-0 at .* does not answer"):
            stack.dead()
        assert stack.processes() == []
        assert attached_site.launcher.started == {}  # type: ignore[attr-defined]


def test_a_dead_server_makes_the_rest_of_the_run_errors(cluster: Make, attach: Call, tmp_path: Path) -> None:
    here = cluster()

    def changed(body: Any, answer: dict[str, Any]) -> dict[str, Any]:
        # As soon as the baselines are asked, and the stack for the first time.
        here.servers["encode-0"].health = 503
        return answer

    here.proxy.close()
    here.proxy = cluster(changed=changed).proxy
    label = MODEL.replace("/", "~")
    names = [f"EPD-TOK-001[e-pd/{label}/text]", f"EPD-TOK-002[e-pd/{label}/img1]"]
    ended = attach(here, *[word for name in names for word in ("--cell", name)])
    assert [ended.verdicts[name] for name in names] == ["error stack", "error stack"]
    assert all("the attached server encode-0" in ended.cells[name]["message"] for name in names)
    assert verify.verify(tmp_path / "out").problems == ()


def test_our_proxy_is_the_only_thing_that_ends(cluster: Make, tmp_path: Path) -> None:
    here = cluster("2e-1pd")
    with site(here, tmp_path / "o", proxy=None) as attached_site:
        launcher: FakeLauncher = attached_site.launcher  # type: ignore[assignment]
        baseline, stack = attached_site.boot(spec("aggregated", subject=False), spec("2e-1pd"))
        assert isinstance(stack, AttachedStack)
        assert baseline.base_url == here.baseline.url
        assert launcher.arguments["2e-1pd.proxy"][4:] == [
            *("--encode", here.servers["encode-0"].url, "--encode", here.servers["encode-1"].url),
            *("--decode", here.servers["prefill_decode-0"].url),
        ]
        attached_site.stop(stack)
        attached_site.stop(baseline)
        assert launcher.stopped == ["2e-1pd.proxy"]
        assert attached_site.stacks == []
        # A proxy of ours that died is started again, over the same servers and journals.
        (again,) = attached_site.boot(spec("2e-1pd"))
        assert again.folder == stack.folder
    assert look(attachments.load(here.file())), "the servers still answer"


def test_the_bypass_of_an_e_p_d_is_ours(cluster: Make, tmp_path: Path) -> None:
    here = cluster("e-p-d")
    with site(here, tmp_path / "o") as attached_site:
        (stack,) = attached_site.boot(spec("e-p-d"))
        assert stack.base_url == here.proxy.url
        assert attached_site.start_bypass(stack).startswith("http://127.0.0.1:")
    with site(here, tmp_path / "p", encode=None, prefill=None, decode=None) as attached_site:
        (stack,) = attached_site.boot(spec("e-p-d"))
        assert attached_site.start_bypass(stack) == ""


def test_the_block_size_is_that_of_the_servers(cluster: Make, tmp_path: Path) -> None:
    here = cluster("e-p-d")
    journals = Journals(tmp_path / "journals")
    journals.begin("encode-0", "prefill-0", t=1.0)
    journals.write("decode-0", "kv-scheduler", "init", 1.0, connector="x.Theirs", blocks=9, block_size=128)
    with site(here, tmp_path / "o", journal=str(journals.folder)) as attached_site:
        assert attached_site.block_size(Shape()) == 128
    with site(here, tmp_path / "p") as attached_site:
        assert attached_site.block_size(Shape()) == Shape().block_size
