"""Real `VllmConfig`s for the servers of an engine plan, and the connector objects that vLLM's factory makes from them.

A configuration takes seconds once (the model's architecture is inspected) and milliseconds from then on, so one is made for each
role, runner and dtype, and copied for each object: two objects of a server share no memory in vLLM either.
"""

from __future__ import annotations

import copy
import functools
import os
from typing import Any

from epd_conformance.errors import UsageError
from epd_conformance.models import default_cache, resolve

MODEL = "tiny-qwen2.5-vl"


def prepare() -> None:
    """What has to be set before vLLM is imported in a process: repairs, no network, one thread (forking needs that)."""
    for name, value in {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        # Otherwise every configuration says what the CPU platform changed in it.
        "VLLM_LOGGING_LEVEL": "ERROR",
    }.items():
        os.environ.setdefault(name, value)
    from epd_conformance.runtime import repairs

    repairs.install()


@functools.cache
def _base(model: str, role: str, runner: str, dtype: str, asynchronous: bool, encoder_decoder: bool) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=model,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=4096,
        max_num_seqs=8,
        max_num_batched_tokens=4096,
        mm_encoder_only=role == "ec_producer",
        # Resolved again for each object; here so that vLLM draws its conclusions from the role.
        ec_transfer_config={"ec_connector": "ECExampleConnector", "ec_role": role},
    )
    config = arguments.create_engine_config()
    if config.use_v2_model_runner != (runner == "v2"):
        # On the CPU build V2 needs Triton's interpreter to run, but a connector only asks which runner there is.
        config.__class__ = _of_runner(type(config), runner == "v2")
    # The CPU platform switches it off (platforms/cpu.py); the order of calls is what is wanted here.
    config.scheduler_config.async_scheduling = asynchronous
    if encoder_decoder:
        config.model_config.__class__ = _encoder_decoder(type(config.model_config))
    return config


def _of_runner(base: type, v2: bool) -> type:
    return type(base.__name__, (base,), {"use_v2_model_runner": property(lambda self: v2)})


def _encoder_decoder(base: type) -> type:
    return type(base.__name__, (base,), {"is_encoder_decoder": property(lambda self: True)})


def make(
    connector: dict[str, Any],
    role: str,
    *,
    runner: str = "v1",
    dtype: str = "float32",
    asynchronous: bool = False,
    encoder_decoder: bool = False,
    engine_id: str | None = None,
    model: str | None = None,
) -> Any:
    """A server's `VllmConfig` with this `--ec-transfer-config` (`ec_role` is filled in).

    Raises UsageError where vLLM does not take the connector's configuration.
    """
    from vllm.config import ECTransferConfig

    base = _base(model or model_path(), role, runner, dtype, asynchronous, encoder_decoder)
    config = copy.copy(base)
    config.model_config = copy.copy(base.model_config)
    config.scheduler_config = copy.copy(base.scheduler_config)
    config.cache_config = copy.copy(base.cache_config)
    try:
        config.ec_transfer_config = ECTransferConfig(**{**connector, "ec_role": role, "engine_id": engine_id})
    except (TypeError, ValueError) as error:
        raise UsageError(f"vLLM does not take the subject's connector_config for {role} ({error}): mend it") from error
    return config


@functools.cache
def model_path() -> str:
    """The folder of the tiny model, built where it is not there."""
    return resolve(MODEL, default_cache()).path_or_id


def hidden_size() -> int:
    """Width of the language model's embeddings: an encoder output is a multiple of it wide."""
    return int(_base(model_path(), "ec_both", "v1", "float32", False, False).model_config.get_inputs_embeds_size())


def connector(config: Any, role: str) -> Any:
    """The SCHEDULER or WORKER object that vLLM's own factory makes (distributed/ec_transfer/ec_connector/factory.py)."""
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

    return ECConnectorFactory.create_connector(config, ECConnectorRole[role])


def warm() -> None:
    """Make every configuration that plans ask for, before processes are forked from this one."""
    for role in ("ec_producer", "ec_consumer", "ec_both"):
        for runner in ("v1", "v2"):
            for asynchronous in (False, True):
                for dtype in ("float32", "bfloat16"):
                    _base(model_path(), role, runner, dtype, asynchronous, False)
