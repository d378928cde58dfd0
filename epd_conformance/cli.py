"""The command line. Every verb is thin: it reads options, calls one function, prints, and sets the exit code (design §6).

0 conformant · 1 nonconformant · 2 usage or environment, no report could be made · 3 incomplete.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Generator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console, RenderableType

import epd_conformance
from epd_conformance import catalogue as catalogues
from epd_conformance import subject as subjects
from epd_conformance.catalogue import ConformanceLevel
from epd_conformance.catalogue.model import topology_kind
from epd_conformance.errors import StackError, UsageError
from epd_conformance.features import Feature
from epd_conformance.history_cli import app as history_app
from epd_conformance.history_cli import nightly
from epd_conformance.store_cli import app as store_app
from epd_conformance.verdict import Mode

app = typer.Typer(
    name="epd-conformance",
    help="Certifies vLLM's disaggregated encoder: are the answers still the same, token for token?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
models_app = typer.Typer(help="The zoo of tiny models that are made by code.", no_args_is_help=True)
app.add_typer(models_app, name="models")
app.add_typer(store_app, name="store")
app.add_typer(history_app, name="history")
app.command("nightly")(nightly)

SubjectOption = Annotated[
    str, typer.Option("--subject", help="reference, vllm-example, an entry point, module:Class, or file.toml")
]
ModelOption = Annotated[
    str, typer.Option("--model", help="a zoo name, a folder, or org/name[@commit] of the Hugging Face hub")
]
DeviceOption = Annotated[str, typer.Option("--device", help="cpu or cuda")]
DtypeOption = Annotated[str, typer.Option("--dtype", help="float32 on cpu and the model's own on cuda, unless given")]
BootOption = Annotated[str, typer.Option("--boot", help="fork (CPU only, fast) or plain")]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON")]
WaitOption = Annotated[float, typer.Option("--memory-wait", help="seconds to wait for memory that other runs hold")]

TINY = "tiny-qwen2.5-vl"


def main() -> NoReturn:
    """Entry point of the console script: an error that a person can act on is one message and exit code 2."""
    try:
        app()
    except (UsageError, StackError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except Exception:
        # Python's own exit code, 1, would read as "nonconformant".
        traceback.print_exc()
        sys.exit(2)
    sys.exit(0)


def _version(wanted: bool) -> None:
    if wanted:
        print(epd_conformance.__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="print it")] = False,
) -> None:
    pass


@app.command()
def run(
    subject: SubjectOption = "",
    profile: Annotated[
        str, typer.Option(help="contract, scheduler, proxy, aggregated, e-pd, e-p-d, all, or sizes such as 2e-1pd")
    ] = "e-pd",
    level: Annotated[ConformanceLevel, typer.Option(help="core: the path works and answers are equal")] = (
        ConformanceLevel.FULL
    ),
    device: DeviceOption = "cpu",
    model: ModelOption = TINY,
    dtype: DtypeOption = "",
    mode: Annotated[Mode, typer.Option(help="certify accepts nothing but the whole expected set")] = Mode.DEVELOP,
    out: Annotated[Path | None, typer.Option(help="folder for report, evidence and logs (default: runs/…)")] = None,
    seed: Annotated[
        int | None, typer.Option(help="draws the contents of every cell (default: 0; with --attach a new one)")
    ] = None,
    examples: Annotated[
        int | None, typer.Option(help="plans that the profiles contract and scheduler draw (default: by mode)")
    ] = None,
    boot: BootOption = "",
    attach: Annotated[
        Path | None, typer.Option(help="TOML file: run against servers that something else started")
    ] = None,
    cell: Annotated[list[str] | None, typer.Option(help="run only this cell (may be repeated)")] = None,
    keyword: Annotated[str, typer.Option("-k", help="run only tests that match, as in pytest (develop mode)")] = "",
    proxy_command: Annotated[
        str,
        typer.Option(help="profile proxy: starts your proxy, with {port}, {encode_urls}, {decode_urls} … filled in"),
    ] = "",
    proxy_url: Annotated[str, typer.Option(help="profile proxy: where your proxy runs (with --proxy-upstreams)")] = "",
    proxy_upstreams: Annotated[
        str, typer.Option(help="ports where it looks for its servers, such as encode=9101,9102,decode=9104")
    ] = "",
    proxy_limit_s: Annotated[
        float | None, typer.Option(help="seconds of a server's silence that it bears (60)")
    ] = None,
    proxy_feature: Annotated[
        list[str] | None, typer.Option(help="a feature that it has, such as metadata_only (may be repeated)")
    ] = None,
    known: Annotated[
        Path | None, typer.Option(help="TOML file of known deviations, waivers and flaky cells (develop mode)")
    ] = None,
    memory_wait: WaitOption = 600.0,
    workers: Annotated[
        int, typer.Option("--workers", "-n", min=0, help="processes that share the topologies (needs pytest-xdist)")
    ] = 0,
    junitxml: Annotated[Path | None, typer.Option(help="also write the results as JUnit XML")] = None,
    alluredir: Annotated[Path | None, typer.Option(help="also write Allure results (needs allure-pytest)")] = None,
    as_json: JsonOption = False,
) -> None:
    """Run the suites against a subject, print the verdicts and write the report."""
    from epd_conformance.report import render_text
    from epd_conformance.report.writer import PAGE_NAME, REPORT_NAME

    if topology_kind(profile) == "proxy":
        subject = subject or "proxy"
    if not subject and attach is None:
        raise UsageError("a run needs a subject: add --subject reference (or your own), or --attach")
    arguments = ["--profile", profile, "--level", level, "--device", device, "--model", model]
    arguments += ["--mode", mode, "--memory-wait", str(memory_wait)]
    arguments += ["--seed", str(seed)] if seed is not None else []
    arguments += ["--examples", str(examples)] if examples is not None else []
    for option, value in (("--subject", subject), ("--dtype", dtype), ("--boot", boot), ("-k", keyword)):
        arguments += [option, value] if value else []
    for option, value in (
        ("--proxy-command", proxy_command),
        ("--proxy-url", proxy_url),
        ("--proxy-upstreams", proxy_upstreams),
        ("--proxy-limit-s", "" if proxy_limit_s is None else str(proxy_limit_s)),
    ):
        # A value that begins with a dash is one all the same.
        arguments += [f"{option}={value}"] if value else []
    for feature in proxy_feature or ():
        arguments += ["--proxy-feature", feature]
    for option, path in (("--out", out), ("--attach", attach), ("--known", known), ("--junitxml", junitxml)):
        arguments += [option, str(path)] if path else []
    if workers and proxy_url:
        raise UsageError(
            "--proxy-url has its fake servers on fixed ports, which one process can have: leave out --workers"
        )
    if junitxml is not None:
        _writable("--junitxml", junitxml, junitxml.absolute().parent)
    if alluredir is not None:
        _writable("--alluredir", alluredir, alluredir.absolute())
    if workers:
        arguments += [*_plugin("xdist", "pytest-xdist", "--workers"), "-n", str(workers)]
    if alluredir is not None:
        arguments += [*_plugin("allure_pytest", "allure-pytest", "--alluredir"), "--alluredir", str(alluredir)]
    for wanted in cell or ():
        arguments += ["--cell", wanted]
    keep = _pytest(arguments)
    if keep.report is None:
        raise typer.Exit(2)
    try:
        if as_json:
            print(json.dumps(keep.report.to_disk(), indent=2))
        else:
            render_text.print_report(keep.report)
            print(f"report: {keep.run.out / REPORT_NAME}")
            if (page := keep.run.out / PAGE_NAME).is_file():
                print(f"page: {page}")
        sys.stdout.flush()
    except BrokenPipeError:
        # Who reads only the first line (`| head -1`) must not turn the exit code into 1, "nonconformant".
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115
    raise typer.Exit(keep.code)


def _writable(option: str, given: Path, folder: Path) -> None:
    """Raises UsageError where a folder is none that can be made or written to: pytest would end with a traceback, after the run."""
    there = next(one for one in (folder, *folder.parents) if one.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UsageError(f"{option} {given}: {there} is no folder that can be written to: choose another")


def _plugin(name: str, package: str, option: str) -> list[str]:
    """The arguments that load a pytest plug-in, which a run does not do by itself. Raises UsageError where it is missing."""
    if importlib.util.find_spec(name) is None:
        raise UsageError(f"{option} needs the package {package}: pip install {package}")
    return ["-p", name]


class _Keep:
    """A pytest plug-in object that hands out what the session made."""

    def __init__(self) -> None:
        self.report: Any = None
        self.run: Any = None
        self.code = 2

    def pytest_unconfigure(self, config: Any) -> None:
        from epd_conformance.pytest_plugin import REPORT, RUN

        self.report = config.stash.get(REPORT, None)
        self.run = config.stash.get(RUN, None)

    def pytest_collectreport(self, report: Any) -> None:
        # Without pytest's own terminal nobody else would say that a suite does not import.
        if report.failed:
            print(f"error: {report.nodeid} was not collected\n{report.longrepr}", file=sys.stderr)

    def pytest_keyboard_interrupt(self, excinfo: Any) -> None:
        import pytest

        # An error of usage ends the session this way; a person's Ctrl-C needs no words.
        if isinstance(excinfo.value, pytest.exit.Exception):
            print(f"error: {excinfo.value}", file=sys.stderr)

    def pytest_internalerror(self, excrepr: Any) -> None:
        print(f"error: the harness itself failed\n{excrepr}", file=sys.stderr)


def _pytest(arguments: list[str]) -> _Keep:
    """Run the suites in this process, silently: progress goes to stderr by itself."""
    import pytest

    from epd_conformance.run import suites_folder

    class Keep(_Keep):
        @pytest.hookimpl(wrapper=True)
        def pytest_cmdline_main(self) -> Generator[None, Any, Any]:
            try:
                return (yield)
            except pytest.UsageError as error:
                print(f"error: {error}", file=sys.stderr)
                return pytest.ExitCode.USAGE_ERROR

    keep = Keep()
    # The suites may lie in read-only site-packages.
    sys.dont_write_bytecode = True
    # What a person has set for pytest on tests of their own (-n, -x, --cov, plug-ins that reorder) is no part of a run.
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
        os.environ.pop(name, None)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    fixed = [str(suites_folder()), "-p", "epd_conformance.pytest_plugin", "-p", "no:terminal", "-s"]
    code = pytest.main([*fixed, *arguments], plugins=[keep])
    # Without a report there is only one thing to say, whatever pytest's own code is.
    keep.code = int(code) if keep.report is not None else 2
    return keep


@app.command("list")
def list_(
    area: Annotated[str, typer.Option(help="only this area, such as TOK")] = "",
    owner: Annotated[str, typer.Option(help="only this owner: connector, engine or proxy")] = "",
    topology: Annotated[str, typer.Option(help="only what applies to this topology")] = "",
    status: Annotated[str, typer.Option(help="only active ones (with a test) or planned ones")] = "",
    level: Annotated[str, typer.Option(help="only MUST, SHOULD or MAY")] = "",
    layer: Annotated[str, typer.Option(help="only this layer of testing: contract, scheduler, proxy or live")] = "",
    feature: Annotated[str, typer.Option(help="only what is asked of subjects with this feature")] = "",
    features: Annotated[bool, typer.Option("--features", help="list the features a subject may declare")] = False,
    cells: Annotated[bool, typer.Option("--cells", help="list the cells of a profile")] = False,
    not_testable: Annotated[
        bool, typer.Option("--not-testable", help="list what no test of this suite can show, and why")
    ] = False,
    subject: SubjectOption = "",
    profile: Annotated[str, typer.Option(help="the profile whose cells are listed")] = "all",
    as_json: JsonOption = False,
) -> None:
    """List requirements, features, cells, or what cannot be tested. Needs no vLLM."""
    from epd_conformance import listing

    wanted = {
        "area": area,
        "owner": owner,
        "topology": topology,
        "status": status,
        "level": level,
        "layer": layer,
        "feature": feature,
    }
    if features + cells + not_testable > 1:
        raise UsageError("--features, --cells and --not-testable are three lists: ask for one at a time")
    if (features or not_testable) and any(wanted.values()):
        chosen = next(name for name, value in wanted.items() if value)
        raise UsageError(f"--{chosen} chooses requirements, and this is another list: leave it out")
    catalogue = catalogues.load()
    rows: list[Any]
    shown: RenderableType | None
    if features:
        rows = [{"feature": str(one), "description": one.description} for one in Feature]
        shown = listing.features()
    elif not_testable:
        untestable = catalogues.not_testable()
        rows = [item.model_dump(mode="json") for item in untestable]
        shown = listing.not_testable(untestable)
    elif cells:
        found = {item.id for item in listing.choose(catalogue, **wanted)}
        subject = subject or ("proxy" if topology_kind(profile) == "proxy" else "reference")
        keep = _pytest(["--subject", subject, "--profile", profile, "--collect-only"])
        if keep.run is None:
            raise typer.Exit(2)
        rows = [
            {"cell": cell.id}
            for cell in keep.run.collected
            if cell.requirement in found and (not topology or cell.pair[1] == topology.lower())
        ]
        shown = None
    else:
        some = listing.choose(catalogue, **wanted)
        rows = [item.model_dump(mode="json") for item in some]
        shown = listing.requirements(some)
    if as_json:
        print(json.dumps(rows, indent=2))
    elif shown is None:
        # Plain lines: an id is there to be copied, and must not be folded where the terminal is narrower.
        print("\n".join(row["cell"] for row in rows))
    else:
        Console(highlight=False).print(shown)


@app.command("check-subject")
def check_subject(
    subject: Annotated[str, typer.Argument(help="as --subject of run: a name, module:Class, or file.toml")],
    as_json: JsonOption = False,
) -> None:
    """Lint a subject in seconds, without booting a server: configuration, connector class, features, probe."""
    from epd_conformance import check_subject as checks

    lines = checks.check(subject)
    text = "\n".join(line.text() for line in lines)
    print(json.dumps([line.to_json() for line in lines], indent=2) if as_json else text)
    raise typer.Exit(checks.exit_code(lines))


@app.command()
def doctor(
    model: Annotated[str | None, typer.Option(help="also look at this model")] = None, as_json: JsonOption = False
) -> None:
    """Say what is missing on this machine and how to mend it."""
    from epd_conformance.runtime import doctor as doctors

    diagnosis = doctors.diagnose(model)
    if as_json:
        print(json.dumps(diagnosis.to_json(), indent=2))
    else:
        doctors.render(diagnosis)
    raise typer.Exit(doctors.exit_code(diagnosis))


@app.command()
def verify(
    directory: Annotated[Path, typer.Argument(help="the folder of a run (its --out)")], as_json: JsonOption = False
) -> None:
    """Compute a run's verdicts again from its raw evidence, and hold its report against them."""
    from epd_conformance.report.verify import verify as check

    # It imports the suites, which may lie in read-only site-packages.
    sys.dont_write_bytecode = True
    found = check(directory)
    print(json.dumps(found.to_json(), indent=2) if as_json else "\n".join(found.lines()))
    raise typer.Exit(0 if found.ok else 1)


@app.command()
def replay(
    plan: Annotated[
        Path, typer.Argument(help="a cell's evidence (cells/*.json in the folder of a run), or an engine plan")
    ],
    subject: Annotated[str, typer.Option(help="as in run (default: the run's)")] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda (default: the run's)")] = "",
    model: Annotated[str, typer.Option(help="as in run (default: the run's)")] = "",
    dtype: Annotated[str, typer.Option(help="as in run (default: the run's)")] = "",
    boot: Annotated[str, typer.Option(help="fork (CPU only, fast) or plain (default: the run's)")] = "",
    seed: Annotated[int | None, typer.Option(help="draws the noise floor's prompts (default: the run's)")] = None,
    out: Annotated[Path | None, typer.Option(help="folder for evidence and logs (default: runs/…)")] = None,
    profile: Annotated[str, typer.Option(help="of an engine plan alone: contract (default) or scheduler")] = "",
    repeat: Annotated[int, typer.Option(help="carry it out so often: is it flaky, or broken?")] = 1,
    restart: Annotated[bool, typer.Option("--restart", help="start the servers again before each repetition")] = False,
    memory_wait: WaitOption = 600.0,
    as_json: JsonOption = False,
) -> None:
    """Carry out one cell's plan again, as it stands in the evidence, and judge it anew: 0 pass, 1 fail, 3 neither."""
    from dataclasses import replace

    from epd_conformance import replay as replays
    from epd_conformance.engine import replaying
    from epd_conformance.proxycheck import replaying as proxy_replaying

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    if (before_fakes := proxy_replaying.read(plan)) is not None:
        unused = {"subject": subject, "device": device, "model": model, "dtype": dtype, "boot": boot, "out": out}
        if given := [option for option, value in unused.items() if value]:
            raise UsageError(f"{plan} is about a proxy before fake servers: leave out --{given[0]}")
        judged = proxy_replaying.replay(before_fakes, repeat, say)
        text = "\n".join(proxy_replaying.lines(before_fakes, judged))
        print(json.dumps(proxy_replaying.to_json(before_fakes, judged), indent=2) if as_json else text)
        raise typer.Exit(proxy_replaying.exit_code(judged))
    if (without_servers := replaying.read(plan, profile)) is not None:
        for option, value in (("device", device), ("model", model), ("dtype", dtype), ("boot", boot), ("out", out)):
            if value:
                raise UsageError(f"{plan} is carried out without servers: leave out --{option}")
        found = replaying.replay(without_servers, subject, repeat, say)
        text = "\n".join(replaying.lines(without_servers, found))
        print(json.dumps(replaying.to_json(without_servers, found), indent=2) if as_json else text)
        raise typer.Exit(1 if replaying.failed(without_servers, found) else 0)
    if profile:
        raise UsageError(f"{plan} is no engine plan: leave out --profile")
    recorded = replays.read(plan)
    options = replace(recorded.options, out=out, memory_wait_s=memory_wait)
    if device and device != options.device:
        # What the run had fitted its own device.
        options = replace(options, device=device, dtype="", boot="")
    options = replace(
        options,
        subject=subject or options.subject,
        model=model or options.model,
        dtype=dtype or options.dtype,
        boot=boot or options.boot,
        seed=options.seed if seed is None else seed,
    )
    signal.signal(signal.SIGTERM, _interrupt)
    folder, results = replays.replay(recorded, options, repeat=repeat, restart=restart, say=say)
    if as_json:
        print(json.dumps(replays.to_json(recorded, folder, results), indent=2))
    else:
        print("\n".join(replays.lines(recorded, folder, results)))
    raise typer.Exit(replays.exit_code(replays.worst(results)))


@app.command()
def hunt(
    subject: SubjectOption = "reference",
    topology: Annotated[str, typer.Option(help="e-pd or e-p-d")] = "e-pd",
    time_budget: Annotated[str, typer.Option(help="no further script is begun after so long: 90s, 30m, 8h")] = "5m",
    seed: Annotated[int, typer.Option(help="the same one draws the same scripts")] = 0,
    restarts: Annotated[bool, typer.Option("--restarts", help="let scripts end and start servers too")] = False,
    device: DeviceOption = "cpu",
    model: ModelOption = TINY,
    dtype: DtypeOption = "",
    boot: BootOption = "",
    out: Annotated[Path | None, typer.Option(help="folder for evidence and logs (default: runs/…)")] = None,
    memory_wait: WaitOption = 600.0,
    as_json: JsonOption = False,
) -> None:
    """Draw scripts of requests, damage, repairs and resets, carry them out on real servers, and shrink what fails."""
    from epd_conformance import hunting
    from epd_conformance.run import Options

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    if seed < 0:
        raise UsageError(f"--seed {seed}: give 0 or more")
    options = Options(
        subject=subject,
        device=device,
        model=model,
        dtype=dtype,
        boot=boot,
        out=out,
        seed=seed,
        memory_wait_s=memory_wait,
    )
    signal.signal(signal.SIGTERM, _interrupt)
    found = hunting.hunt(options, topology, hunting.seconds(time_budget), restarts=restarts, say=say)
    print(json.dumps(hunting.to_json(found), indent=2) if as_json else "\n".join(hunting.lines(found, options)))
    raise typer.Exit(found.exit_code)


@app.command()
def compare(
    old: Annotated[Path, typer.Argument(help="the folder of a run, or its report.json")],
    new: Annotated[Path, typer.Argument(help="the same of a later run, or of another connector's")],
    as_json: JsonOption = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="print Markdown")] = False,
) -> None:
    """Say what changed between two runs, cell by cell; exit code 1 if something got worse."""
    from epd_conformance.report import render_compare
    from epd_conformance.report.compare import compare as compared
    from epd_conformance.report.writer import read_report

    if as_json and as_markdown:
        raise UsageError("--json and --markdown are two formats: ask for one")
    found = compared(read_report(old), read_report(new))
    if as_json:
        print(json.dumps(found.to_json(), indent=2))
    elif as_markdown:
        print(render_compare.markdown(found), end="")
    else:
        render_compare.print_comparison(found)
    raise typer.Exit(1 if found.regressions else 0)


@app.command("render")
def render_html(
    directory: Annotated[Path, typer.Argument(help="the folder of a run (its --out)")],
    out: Annotated[Path | None, typer.Option(help="the file to write (default: report.html in that folder)")] = None,
    history: Annotated[
        list[Path] | None,
        typer.Option(help="the folder of another run, or a history file of nightly, for the trend (may be repeated)"),
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="then show it in a browser, at an address of this machine, until Ctrl-C")
    ] = False,
) -> None:
    """Make one HTML file of a run: outcome, matrices, every cell with its evidence; it needs no network."""
    from epd_conformance.history.trend import of_series
    from epd_conformance.report import html
    from epd_conformance.report.writer import PAGE_NAME

    databases = [path for path in history or () if path.is_file() and path.suffix != ".json"]
    folders = [path for path in history or () if path not in databases]
    page = html.read_page(
        directory, folders, lambda report: [point for path in databases for point in of_series(path, report)]
    )
    out = out or (directory if directory.is_dir() else directory.parent) / PAGE_NAME
    text = html.render(page)
    try:
        html.save(out, text)
    except OSError as error:
        raise UsageError(f"{out} cannot be written ({error.strerror}): choose another place with --out") from error
    print(out)
    if serve:
        from epd_conformance.serve_page import serve as show

        show(text, lambda line: print(line, file=sys.stderr, flush=True))


@app.command()
def publish(
    directory: Annotated[Path, typer.Argument(help="the folder of a run (its --out)")],
    destination: Annotated[Path, typer.Argument(help="a new folder for report, summary and evidence")],
    readme: Annotated[
        Path | None, typer.Option(help="a README whose table of reports is made anew from the destination's parent")
    ] = None,
) -> None:
    """Make of a run something to give away: no folder of this machine in it, and evidence that still verifies."""
    from epd_conformance.report import publish as publishing

    # It imports the suites, which may lie in read-only site-packages.
    sys.dont_write_bytecode = True
    report = publishing.publish(directory, destination, readme)
    print(f"published {report.subject.name} to {destination}")


@app.command()
def serve(
    topology: Annotated[str, typer.Option(help="aggregated, e-pd, p-d, e-p-d, or sizes such as 2e-1pd")] = "e-pd",
    subject: Annotated[
        str, typer.Option(help="as in run (default: reference); with aggregated, one server that is ec_both")
    ] = "",
    device: DeviceOption = "cpu",
    model: ModelOption = TINY,
    dtype: DtypeOption = "",
    boot: BootOption = "",
    port: Annotated[int, typer.Option(help="where clients connect (default: a free port)")] = 0,
    out: Annotated[Path | None, typer.Option(help="folder for logs, journals and stores (default: runs/…)")] = None,
    memory_wait: WaitOption = 600.0,
    as_json: JsonOption = False,
) -> None:
    """Boot a topology and keep it until Ctrl-C; prints the address for clients."""
    from epd_conformance.run import Options, fresh_folder, model_use
    from epd_conformance.runtime import vllm_info
    from epd_conformance.topology.spec import Shape, Topology
    from epd_conformance.topology.stack import Site, StackSpec

    parsed = Topology.parse(topology)
    wanted = subject or ("reference" if parsed.has_ec else "")
    if subject and parsed.kind == "p-d":
        raise UsageError("p-d has no encode server and so no EC connector: leave out --subject")
    chosen = subjects.load(wanted) if wanted else None
    options = Options(subject=wanted, device=device, model=model, dtype=dtype, boot=boot)
    how = options.how()
    vllm_info.require()
    signal.signal(signal.SIGTERM, _interrupt)

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    site = Site(
        fresh_folder(out, f"serve-{parsed.name}"),
        model_use(options),
        device=device,
        boot=how,
        say=say,
        memory_wait_s=memory_wait,
    )
    try:
        with site:
            spec = StackSpec(
                parsed.name, parsed, Shape(prefix_caching=not parsed.has_kv), subject=chosen, port=port or None
            )
            (stack,) = site.boot(spec)
            if as_json:
                servers = [{"name": s.name, "role": str(s.role), "url": s.url} for s in stack.servers]
                print(json.dumps({"url": stack.base_url, "servers": servers, "folder": str(site.folder)}), flush=True)
            else:
                for server in stack.servers:
                    print(f"  {server.name:<18} {server.url}", flush=True)
                print(f"serving {parsed.name} at {stack.base_url} (model epd-model); Ctrl-C ends it", flush=True)
            while not (dead := stack.dead()):
                time.sleep(0.5)
            raise StackError(dead[0].obituary())
    except KeyboardInterrupt:
        say("ended")


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    help="Run the proxy alone, in front of servers that something else started; --help shows its options.",
)
def proxy(context: typer.Context) -> None:
    """One place says what the options are: the proxy's own."""
    from epd_conformance.proxy.__main__ import main as serve_proxy

    raise typer.Exit(serve_proxy(context.args))


@models_app.command("build")
def models_build(
    name: Annotated[str, typer.Argument(help="a zoo name, such as tiny-qwen2.5-vl")],
    directory: Annotated[Path, typer.Argument(help="a new or empty folder")],
    seed: Annotated[int, typer.Option(help="other weights for another seed")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Make a tiny model by code: the same bytes everywhere."""
    from epd_conformance.models import zoo

    built = zoo.build(name, directory, seed)
    if as_json:
        print(json.dumps({"name": built.name, "path": str(built.path), "seed": built.seed, "digest": built.digest}))
    else:
        print(f"{built.name} (seed {built.seed}) at {built.path}, digest {built.digest}")


@models_app.command("list")
def models_list(as_json: JsonOption = False) -> None:
    """List the zoo."""
    from epd_conformance.models import zoo

    specs = list(zoo.MODELS.values())
    if as_json:
        print(json.dumps([{"name": s.name, "description": s.description, "digest": s.digest} for s in specs], indent=2))
        return
    for spec in specs:
        print(f"{spec.name}: {spec.description}")


if __name__ == "__main__":
    main()
