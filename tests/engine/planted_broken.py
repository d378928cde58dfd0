"""What must not be taken for a connector's fault: a subject that raises, a process that is killed, a model that is refused."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from planted_engine import PlainStore, PlainSubject


class RefusesTheModel(PlainStore):
    """Cannot be made for an encoder-decoder model, which is as good as promising it nothing."""

    def __init__(self, vllm_config: Any, role: Any) -> None:
        if vllm_config.model_config.is_encoder_decoder:
            raise ValueError("no encoder-decoder models")
        super().__init__(vllm_config, role)


class RefusesTheModelSubject(PlainSubject):
    connector = "RefusesTheModel"

    def connector_config(self, role: str, stack: Any) -> dict[str, Any]:
        return {**super().connector_config(role, stack), "ec_connector_module_path": "planted_broken"}


class OneServerOnly(PlainSubject):
    """Has no configuration for the second of two servers."""

    connector = "PlainStore"

    def connector_config(self, role: str, stack: Any) -> dict[str, Any]:
        if "other" in Path(stack.store).parts:
            raise RuntimeError("a defect of the subject")
        return super().connector_config(role, stack)


def killed(subject: Any, root: Path) -> None:
    """As the kernel ends a process where the machine has no memory left."""
    os.kill(os.getpid(), signal.SIGKILL)
