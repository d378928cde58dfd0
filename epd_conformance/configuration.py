"""What a subject configures: asked once per role and stack, checked, made comparable, and remembered.

Paths and ports differ between two stacks of the same axes, so they are put back to placeholders (`{store}`,
`{port:encode-0}`) before anything is compared or written down. Pure but for the calls of the subject's own code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epd_conformance.errors import UsageError
from epd_conformance.subject import LaunchOptions, StackInfo, Subject

# The fields of vLLM 0.32.0's ECTransferConfig (config/ec_transfer.py) that can be given; `ec_role` the harness fills in.
CONFIG_KEYS = (
    "ec_connector",
    "ec_connector_module_path",
    "ec_connector_extra_config",
    "ec_buffer_device",
    "ec_buffer_size",
    "ec_ip",
    "ec_port",
    "ec_role",
    "engine_id",
)

# Arguments that the harness gives (topology/spec.py), and why a subject must not: its own come last, and would win.
RESERVED_ARGUMENTS: dict[str, str] = {
    "--model": "the model is that of the run; another one would be compared with the wrong baseline",
    "--revision": "the commit of the model is that of the run",
    "--served-model-name": "requests name the model by it",
    "--host": "servers listen on the loopback interface only",
    "--port": "the harness has claimed a port",
    "--uds": "the harness reaches servers by port",
    "--api-key": "the harness' requests carry no key",
    "--root-path": "the harness reaches the routes where vLLM puts them",
    "--ec-transfer-config": "it is made from connector_config, and holds the recorder",
    "--kv-transfer-config": "the KV connector is the harness' own, and holds the recorder",
    "--dtype": "both arms of a comparison compute in the same type",
    "--seed": "both arms of a comparison draw the same numbers",
    "--max-model-len": "both arms of a comparison shape batches alike",
    "--max-num-seqs": "both arms of a comparison shape batches alike",
    "--max-num-batched-tokens": "both arms of a comparison shape batches alike",
    "--block-size": "both arms of a comparison have the same blocks",
    "--limit-mm-per-prompt": "the encoder cache of both arms is sized by it",
    "--trust-request-mm-kwargs": "both arms of a comparison take the same requests",
    "--no-trust-request-mm-kwargs": "both arms of a comparison take the same requests",
    "--enforce-eager": "both arms of a comparison run the same kernels",
    "--no-enforce-eager": "both arms of a comparison run the same kernels",
    "--mm-encoder-only": "it makes a server an encode server, and follows from the role",
    "--no-mm-encoder-only": "it makes a server an encode server, and follows from the role",
    "--enable-prefix-caching": "both arms of a comparison have the same caches",
    "--no-enable-prefix-caching": "both arms of a comparison have the same caches",
    "--load-format": "both arms of a comparison load the same weights",
    "--hf-overrides": "both arms of a comparison run the same model",
    "--worker-cls": "it replaces a part of the engine, whose own outcome would then be another's",
    "--worker-extension-cls": "it replaces a part of the engine, whose own outcome would then be another's",
    "--scheduler-cls": "it replaces a part of the engine, whose own outcome would then be another's",
    "--middleware": "it could answer in place of the engine",
    "--config": "a file of options would set others of these unseen",
}
# Environment that the harness gives (topology/stack.py), and why a subject must not.
RESERVED_ENVIRONMENT: dict[str, str] = {
    "EPD_JOURNAL": "the recorder writes there",
    "EPD_SERVER": "the recorder names its server by it",
    "PYTHONPATH": "the repairs of the environment reach the servers by it",
    "CUDA_VISIBLE_DEVICES": "the harness has placed the servers on the devices",
    "VLLM_PORT": "all servers would take the same internal ports",
    "VLLM_API_KEY": "the harness' requests carry no key",
    "VLLM_USE_V2_MODEL_RUNNER": "both arms of a comparison have the same runner",
    "VLLM_BATCH_INVARIANT": "both arms of a comparison compute alike",
    "OMP_NUM_THREADS": "both arms of a comparison sum in the same order",
    "TORCHDYNAMO_DISABLE": "both arms of a comparison run the same kernels",
    "VLLM_CPU_KVCACHE_SPACE": "both arms of a comparison have the same blocks",
    "VLLM_SERVER_DEV_MODE": "the harness resets caches by its routes",
}


@dataclass(frozen=True)
class Configured:
    """What a subject answered for one role of one stack; `normal` is the same with placeholders in place of paths and ports."""

    topology: str
    role: str
    config: dict[str, Any]
    launch: LaunchOptions
    normal: dict[str, Any]
    """`{"config": …, "arguments": […], "environment": {…}}`."""


def ask(subject: Subject, role: str, stack: StackInfo, topology: str) -> Configured:
    """Ask a subject for one role. `topology` is named with its sizes, such as `2e-1pd`.

    Raises UsageError where the subject's code raises, or what it returns cannot be given to a server.
    """
    config = _call(subject.connector_config, "connector_config", role, stack)
    if not isinstance(config, Mapping):
        raise UsageError(_returned("connector_config", role, f"a {type(config).__name__}", "a dict"))
    # A copy by way of JSON: that is how it reaches a server, and the subject cannot change it afterwards.
    try:
        config = json.loads(json.dumps(dict(config), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            _returned("connector_config", role, f"what is no JSON ({error})", "JSON values only")
        ) from error
    if not isinstance(config.get("ec_connector"), str) or not config["ec_connector"]:
        raise UsageError(
            f"the subject's connector_config({role!r}, …) names no `ec_connector`: return the JSON of --ec-transfer-config"
        )
    config["ec_role"] = role
    launch = _call(subject.launch, "launch", role, stack)
    _check_launch(launch, role)
    whole = {"config": config, "arguments": list(launch.arguments), "environment": dict(launch.environment)}
    return Configured(topology, role, config, launch, normalised(whole, stack))


def _call(method: Callable[[str, StackInfo], Any], name: str, role: str, stack: StackInfo) -> Any:
    try:
        return method(role, stack)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:  # a subject's own code may raise anything
        raise UsageError(
            f"the subject's {name}({role!r}, …) raised {type(error).__name__} ({error}): mend it"
        ) from error


def _returned(name: str, role: str, what: str, wanted: str) -> str:
    return f"the subject's {name}({role!r}, …) returned {what}: return {wanted}"


def _check_launch(launch: object, role: str) -> None:
    if not isinstance(launch, LaunchOptions):
        raise UsageError(_returned("launch", role, f"a {type(launch).__name__}", "epd_conformance.LaunchOptions"))
    arguments, environment = launch.arguments, launch.environment
    if isinstance(arguments, str) or not isinstance(arguments, Sequence):
        raise UsageError(_returned("launch", role, f"the arguments {arguments!r}", "a list of strings"))
    for argument in arguments:
        if not isinstance(argument, str) or "\0" in argument:
            raise UsageError(_returned("launch", role, f"the argument {argument!r}", "strings only"))
    if not isinstance(environment, Mapping):
        raise UsageError(_returned("launch", role, f"the environment {environment!r}", "a dict of strings"))
    for name, value in environment.items():
        if not isinstance(name, str) or not name or "=" in name or not isinstance(value, str) or "\0" in name + value:
            raise UsageError(
                _returned("launch", role, f"the environment entry {name!r}", "names and values that are text")
            )


def reserved(launch: LaunchOptions) -> list[str]:
    """What launch options would override that the harness sets itself: a clause each, with the reason."""
    found = []
    for argument in launch.arguments:
        if not argument.startswith("--"):
            continue
        # As vLLM's parser reads it: underscores for dashes, `--option=value`, `--option.key`, and any unambiguous beginning.
        option = re.split(r"[=.]", argument, maxsplit=1)[0].replace("_", "-")
        for name, reason in RESERVED_ARGUMENTS.items():
            # No option of vLLM 0.32.0's is the beginning of one of these, so any beginning can only mean one of them.
            if len(option) > 2 and name.startswith(option):
                found.append(f"the argument {option} overrides {name}: {reason}")
                break
    found += [
        f"the environment variable {name} overrides the harness' own: {RESERVED_ENVIRONMENT[name]}"
        for name in launch.environment
        if name in RESERVED_ENVIRONMENT
    ]
    return found


def normalised(value: Any, stack: StackInfo) -> Any:
    """A JSON value with what belongs to this machine and stack put back to placeholders.

    `{store}`, `{stack}` (the folder that the store lies in), `{model}` where it is a path, and `{port:<server>}`; a number that
    is one of the stack's ports becomes that text.
    """
    texts = {str(stack.store): "{store}"}
    if stack.store.parent != Path(stack.store.anchor):
        texts[str(stack.store.parent)] = "{stack}"
    if Path(stack.model).is_absolute():
        texts[stack.model] = "{model}"
    ports = {str(port): f"{{port:{server}}}" for server, port in stack.ports.items()}
    pattern = "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True))
    if ports:
        pattern += rf"|(?<![\w.])(?:{'|'.join(ports)})(?![\w.])"
    known = texts | ports

    def put_back(item: Any) -> Any:
        if isinstance(item, str):
            return re.sub(pattern, lambda match: known[match[0]], item)
        if isinstance(item, dict):
            return {put_back(key): put_back(inner) for key, inner in item.items()}
        if isinstance(item, list):
            return [put_back(inner) for inner in item]
        if isinstance(item, int) and not isinstance(item, bool):
            return ports.get(str(item), item)
        return item

    return put_back(value)


def difference(one: Configured, other: Configured) -> str | None:
    """Where two answers for the same axes part, as a path such as `config.ec_connector_extra_config.depth`; None if nowhere.

    Two leaves are alike where they are equal with placeholders, or as given where no folder is in them: a timeout of 40000 ms
    must not differ because 40000 was, once, somebody's port.
    """
    return _part(_whole(one), one.normal, _whole(other), other.normal, "")


def _whole(one: Configured) -> dict[str, Any]:
    return {"config": one.config, "arguments": list(one.launch.arguments), "environment": dict(one.launch.environment)}


def _part(given: Any, normal: Any, other: Any, other_normal: Any, path: str) -> str | None:
    if isinstance(normal, dict) and isinstance(other_normal, dict):
        raw = dict(zip(normal, given.values(), strict=False))
        other_raw = dict(zip(other_normal, other.values(), strict=False))
        for key in {**normal, **other_normal}:
            here = f"{path}.{key}" if path else key
            if key not in normal or key not in other_normal:
                return here
            if (found := _part(raw[key], normal[key], other_raw[key], other_normal[key], here)) is not None:
                return found
        return None
    if isinstance(normal, list) and isinstance(other_normal, list):
        if len(normal) != len(other_normal):
            return path
        parts = zip(given, normal, other, other_normal, strict=True)
        places = (_part(*part, f"{path}[{index}]") for index, part in enumerate(parts))
        return next((place for place in places if place is not None), None)
    # 1 and True, or 1 and 1.0, are different JSON.
    if (type(normal), normal) == (type(other_normal), other_normal):
        return None
    by_chance = (type(given), given) == (type(other), other) and not _PATHS.search(f"{normal}{other_normal}")
    return None if by_chance else path


# A subject that gives one stack's folder to the next gives the same text twice, and that is no chance.
_PATHS = re.compile(r"\{(store|stack|model)\}")


class Configurations:
    """Remembers what a subject answered for each topology and role of a run."""

    def __init__(self, *, strict: bool = False, warn: Callable[[str], None] = lambda _: None) -> None:
        """`strict`: refuse what is not fair or not twice the same (certify); else it is told to `warn`."""
        self._strict = strict
        self._warn = warn
        self._known: dict[tuple[str, str], Configured] = {}

    def __iter__(self) -> Iterator[Configured]:
        """What was answered first for each topology and role, in the order of asking."""
        return iter(self._known.values())

    def ask(self, subject: Subject, role: str, stack: StackInfo, topology: str) -> Configured:
        """Ask for one role of a stack that is about to be booted.

        Raises UsageError for an answer that no server can be given; in strict mode also for one that differs from an earlier
        one for the same axes, and for one that overrides what the harness sets.
        """
        answer = ask(subject, role, stack, topology)
        first = self._known.setdefault((topology, role), answer)
        name = type(subject).__name__
        if first is answer:
            for words in reserved(answer.launch):
                self._object(f"the subject {name}, as {role} in {topology}: {words}")
        elif (place := difference(first, answer)) is not None:
            self._object(
                f"the subject {name} answers differently for {role} in {topology} when asked again (`{place}`): "
                "let connector_config and launch depend on role and stack only"
            )
        return answer

    def _object(self, words: str) -> None:
        if self._strict:
            raise UsageError(words)
        self._warn(words)
