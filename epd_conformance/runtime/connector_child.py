"""Constructs a connector's two objects as a server would, without a server: for `check-subject`.

Run as `python -m epd_conformance.runtime.connector_child REQUEST RESULTS`, in a session of its own, by check_subject only.
REQUEST is a JSON file, `{"limit_s", "tries": [{"role", "flags", "environment", "config", "save"}]}`; to RESULTS one JSON line is
appended for each thing found, so that what was found before a crash is not lost: `{"role", "check", "state", "words", …}`.

vLLM is imported once; each role then has a process of its own, forked, with its environment and a time limit: what a vendor's
code does to the process (exit, a signal, a hang) is a finding.
"""

from __future__ import annotations

import base64
import gc
import inspect
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

# Rows of the object that a producer is asked to save.
ROWS = 4


class _Told(Exception):
    """A finding ends the try; it is written already."""


class Tell:
    """Appends findings about one role to the results file."""

    def __init__(self, path: str, role: str) -> None:
        self._path = path
        self._role = role

    def __call__(self, check: str, state: str, words: str, **more: Any) -> None:
        line = json.dumps({"role": self._role, "check": check, "state": state, "words": words[:2000], **more})
        with Path(self._path).open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    @contextmanager
    def trying(self, check: str, what: str) -> Iterator[None]:
        """An exception, also `sys.exit`, becomes the finding that `what` failed, and ends the try."""
        try:
            yield
        except _Told:
            raise
        except BaseException as error:
            # Not where the import system itself raises.
            frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith("<")]
            place = f"{frames[-1].filename}:{frames[-1].lineno}"
            self(check, "fail", f"{what} raised {type(error).__name__}: {error} ({place})")
            raise _Told from error


def import_vllm() -> None:
    """Everything that the tries share: imported once, before anything is forked."""
    import torch
    import vllm.distributed.parallel_state
    import vllm.engine.arg_utils
    import vllm.entrypoints.launchers.cli_args
    import vllm.v1.core.sched.output  # noqa: F401
    from vllm.platforms import current_platform

    # One thread makes forking safe.
    torch.set_num_threads(1)
    if current_platform.device_type == "cpu":
        from epd_conformance.topology.zygote import inspect_in_process

        # Else the first look at a model class imports vLLM once more, in a subprocess.
        inspect_in_process()
    if torch.cuda.is_initialized():
        raise RuntimeError("importing vLLM initialized CUDA, and a process that did so cannot be forked")


def try_role(tell: Tell, wanted: Mapping[str, Any]) -> None:
    """Everything that is looked at for one role; findings go to `tell`."""
    from vllm.config import ECTransferConfig
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorRole
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

    from epd_conformance.connectors.observed import ObservedDict
    from epd_conformance.observations import own_hooks

    with tell.trying("configuration", "vLLM's ECTransferConfig"):
        transfer = ECTransferConfig(**wanted["config"])
    with tell.trying("import", "loading the connector's class"):
        connector: Any = ECConnectorFactory.get_connector_class(transfer)
    _look_at_class(tell, connector, ECConnectorBase)
    tell("hooks", "ok", "", hooks=own_hooks(connector, ECConnectorBase))
    config = _vllm_config(tell, wanted["flags"])
    extra = ObservedDict(config.ec_transfer_config.ec_connector_extra_config)
    config.ec_transfer_config.ec_connector_extra_config = extra
    made = {}
    for role in (ECConnectorRole.SCHEDULER, ECConnectorRole.WORKER):
        if role is ECConnectorRole.WORKER:
            _join_alone(config)
        with tell.trying("construction", f"constructing the {role.name} object"):
            made[role] = connector(config, role)
    tell("construction", "ok", "constructed as SCHEDULER and as WORKER")
    if wanted["save"]:
        _save(tell, made[ECConnectorRole.SCHEDULER], made[ECConnectorRole.WORKER], config, wanted["save"])
    tell("keys", "ok", "", given=list(extra.given), unread=extra.unread)
    for role, made_object in made.items():
        with tell.trying("shutdown", f"shutdown() of the {role.name} object"):
            made_object.shutdown()


def _look_at_class(tell: Tell, connector: Any, base: type) -> None:
    if not isinstance(connector, type):
        tell("class", "fail", f"what vLLM loads is a {type(connector).__name__} and no class")
        raise _Told
    name = f"{connector.__module__}.{connector.__qualname__}"
    missing = sorted(getattr(connector, "__abstractmethods__", ()))
    if missing:
        tell("class", "fail", f"{name} leaves out {', '.join(missing)}, which vLLM calls")
        raise _Told
    if not issubclass(connector, base):
        tell("class", "warn", f"{name} is no subclass of vLLM's ECConnectorBase, and lacks what a later release adds")
    try:
        inspect.signature(connector).bind(object(), object())
    except TypeError as error:
        tell("class", "fail", f"{name} cannot be called as vLLM does, connector(vllm_config, role): {error}")
        raise _Told from error
    except ValueError:
        pass  # a class of C code tells no signature
    tell("class", "ok", name)


def _vllm_config(tell: Tell, flags: list[str]) -> Any:
    """vLLM's own configuration from a server's command line."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    with tell.trying("command line", "vLLM, reading the server's command line,"):
        parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(flags)
        return AsyncEngineArgs.from_cli_args(parsed).create_engine_config()


def _join_alone(config: Any) -> None:
    """A group of one, as a worker has when its connector is constructed (gpu_worker.py)."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment

    meeting = f"file://{tempfile.mkdtemp()}/meeting"
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, meeting, 0, "gloo")
        ensure_model_parallel_initialized(1, 1)


def _save(tell: Tell, scheduler: Any, worker: Any, config: Any, key: str) -> None:
    """Let a producer save one object, for the probe to be tried on. Outside of a server it may do nothing or fail."""
    import torch
    from vllm.v1.core.sched.output import SchedulerOutput

    width = int(config.model_config.get_inputs_embeds_size())
    rows = torch.arange(ROWS * width, dtype=torch.float32).reshape(ROWS, width) / 7
    rows = rows.to(config.model_config.dtype)
    try:
        worker.bind_connector_metadata(scheduler.build_connector_meta(SchedulerOutput.make_empty()))
        worker.save_caches(encoder_cache={key: rows}, mm_hash=key)
        worker.clear_connector_metadata()
    except Exception as error:
        tell("save", "not probed", f"outside of a server it does not save: {type(error).__name__}: {error}")
        return
    data = rows.contiguous().view(torch.uint8).numpy().tobytes()
    tell(
        "save",
        "ok",
        "",
        key=key,
        rows=ROWS,
        width=width,
        dtype=str(rows.dtype).removeprefix("torch."),
        data=base64.b64encode(data).decode(),
    )


def run(request: Mapping[str, Any], results: str) -> None:
    """Fork one process for each try, one after the other, and say what became of those that did not end by themselves."""
    for wanted in request["tries"]:
        tell = Tell(results, wanted["role"])
        child = os.fork()
        if child == 0:
            _in_child(tell, wanted)
        deadline = time.monotonic() + request["limit_s"]
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                tell("construction", "fail", f"did not come to an end within {request['limit_s']:.0f} s")
                break
            time.sleep(0.02)
        else:
            status = os.waitstatus_to_exitcode(ended[1])
            if status < 0:
                tell("construction", "fail", f"the process died of signal {-status} ({signal.Signals(-status).name})")
            elif status > 0:
                tell("construction", "fail", f"the process ended itself with status {status}")


def _in_child(tell: Tell, wanted: Mapping[str, Any]) -> NoReturn:
    gc.disable()
    os.environ.update(wanted["environment"])
    try:
        with suppress(_Told):
            try_role(tell, wanted)
        # A vendor's own `os._exit(0)` must not look like the end.
        tell("end", "ok", "")
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    from epd_conformance.runtime import repairs

    repairs.install()
    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    import_vllm()
    run(asked, sys.argv[2])
