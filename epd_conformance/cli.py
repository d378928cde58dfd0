"""The command line. Every verb is thin: it reads options, calls one function, prints, and sets the exit code (design §6).

0 conformant · 1 nonconformant · 2 usage or environment, no report could be made · 3 incomplete.
"""

from __future__ import annotations

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
from rich.console import Console
from rich.table import Table

import epd_conformance
from epd_conformance import catalogue as catalogues
from epd_conformance import subject as subjects
from epd_conformance.catalogue import ConformanceLevel
from epd_conformance.errors import StackError, UsageError
from epd_conformance.features import Feature
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

SubjectOption = Annotated[
    str, typer.Option("--subject", help="reference, vllm-example, an entry point, or module:Class")
]
ModelOption = Annotated[str, typer.Option("--model", help="a zoo name, a folder, or a Hugging Face id")]
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
    subject: SubjectOption,
    profile: Annotated[str, typer.Option(help="aggregated, e-pd, e-p-d, all, or sizes such as 2e-1pd")] = "e-pd",
    level: Annotated[ConformanceLevel, typer.Option(help="core: the path works and answers are equal")] = (
        ConformanceLevel.FULL
    ),
    device: DeviceOption = "cpu",
    model: ModelOption = TINY,
    dtype: DtypeOption = "",
    mode: Annotated[Mode, typer.Option(help="certify accepts nothing but the whole expected set")] = Mode.DEVELOP,
    out: Annotated[Path | None, typer.Option(help="folder for report, evidence and logs (default: runs/…)")] = None,
    seed: Annotated[int, typer.Option(help="draws the contents of every cell")] = 0,
    boot: BootOption = "",
    cell: Annotated[list[str] | None, typer.Option(help="run only this cell (may be repeated)")] = None,
    keyword: Annotated[str, typer.Option("-k", help="run only tests that match, as in pytest (develop mode)")] = "",
    memory_wait: WaitOption = 600.0,
    as_json: JsonOption = False,
) -> None:
    """Run the suites against a subject, print the verdicts and write the report."""
    from epd_conformance.report import render_text
    from epd_conformance.report.writer import REPORT_NAME

    arguments = ["--subject", subject, "--profile", profile, "--level", level, "--device", device, "--model", model]
    arguments += ["--mode", mode, "--seed", str(seed), "--memory-wait", str(memory_wait)]
    for option, value in (("--dtype", dtype), ("--boot", boot), ("--out", str(out) if out else ""), ("-k", keyword)):
        arguments += [option, value] if value else []
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
        sys.stdout.flush()
    except BrokenPipeError:
        # Who reads only the first line (`| head -1`) must not turn the exit code into 1, "nonconformant".
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115
    raise typer.Exit(keep.code)


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
    features: Annotated[bool, typer.Option("--features", help="list the features a subject may declare")] = False,
    cells: Annotated[bool, typer.Option("--cells", help="list the cells of a profile")] = False,
    subject: SubjectOption = "reference",
    profile: Annotated[str, typer.Option(help="the profile whose cells are listed")] = "all",
    as_json: JsonOption = False,
) -> None:
    """List requirements, features or cells. Needs no vLLM."""
    found = [
        item
        for item in catalogues.load()
        if (not area or item.area == area.upper())
        and (not owner or item.owner == owner)
        and (not topology or topology in item.topologies)
    ]
    if not found:
        raise UsageError("no requirement matches: `epd-conformance list` without options shows all of them")
    if features:
        rows = [{"feature": str(feature), "description": feature.description} for feature in Feature]
    elif cells:
        keep = _pytest(["--subject", subject, "--profile", profile, "--collect-only"])
        if keep.run is None:
            raise typer.Exit(2)
        wanted = {item.id for item in found}
        rows = [
            {"cell": cell.id}
            for cell in keep.run.collected
            if cell.requirement in wanted and (not topology or cell.pair[1] == topology)
        ]
    else:
        rows = [
            {"id": item.id, "level": str(item.level), "owner": str(item.owner), "status": str(item.status)}
            | {"topologies": ", ".join(item.topologies), "sentence": item.sentence}
            for item in found
        ]
        if as_json:
            print(json.dumps([item.model_dump(mode="json") for item in found], indent=2))
            return
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    if cells and not features:
        # Plain lines: a table would cut an id off where the terminal is narrower.
        print("\n".join(row["cell"] for row in rows))
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in rows[0]:
        table.add_column(name, overflow="fold", no_wrap=name in ("id", "feature"))
    for row in rows:
        table.add_row(*row.values())
    # Without markup: cell ids hold brackets.
    Console(highlight=False, markup=False).print(table)


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

    found = check(directory)
    print(json.dumps(found.to_json(), indent=2) if as_json else "\n".join(found.lines()))
    raise typer.Exit(0 if found.ok else 1)


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


@app.command()
def proxy(
    decode: Annotated[list[str], typer.Option(help="a decode (or prefill+decode) server's URL; may be repeated")],
    encode: Annotated[list[str] | None, typer.Option(help="an encode server's URL; may be repeated")] = None,
    prefill: Annotated[list[str] | None, typer.Option(help="a prefill server's URL; may be repeated")] = None,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one and prints it")] = 0,
    timeout_s: Annotated[float | None, typer.Option(help="seconds that an upstream may stay silent")] = None,
) -> None:
    """Run the proxy alone, in front of servers that something else started."""
    from epd_conformance.proxy.app import ProxyConfig, make_config
    from epd_conformance.proxy.app import serve as serve_proxy

    silent = timeout_s if timeout_s is not None else ProxyConfig.model_fields["timeout_s"].default
    config = make_config(encode=encode or [], prefill=prefill or [], decode=decode, timeout_s=silent)
    serve_proxy(config, host, port, None)


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
