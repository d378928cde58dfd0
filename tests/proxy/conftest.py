"""Fixtures: fake servers, and proxies in front of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import requests
from proxy_fakes import Fake, Reply, Running, stop_all

from epd_conformance.proxy.app import ProxyConfig, create_app
from epd_conformance.proxy.stages import Stages


@dataclass
class FakeStack:
    """Fake servers by role and a real proxy in front."""

    url: str = ""
    encode: list[Fake] = field(default_factory=list)
    prefill: list[Fake] = field(default_factory=list)
    decode: list[Fake] = field(default_factory=list)
    app: Any = None
    running: Any = None

    def chat(self, body: Any, headers: dict[str, str] | None = None, **options: Any) -> requests.Response:
        """POSTs a chat request to the proxy."""
        return requests.post(f"{self.url}/v1/chat/completions", json=body, headers=headers, timeout=10, **options)


MakeStack = Callable[..., FakeStack]


@pytest.fixture
def make_stack() -> Iterator[MakeStack]:
    """Builds fake stacks: sizes by role, a `stages` class, URLs instead of the fakes', options of ProxyConfig."""
    servers: list[Running] = []

    def build(
        encode: int = 2,
        prefill: int = 1,
        decode: int = 1,
        *,
        stages: type[Stages] = Stages,
        timeout_s: float = 5.0,
        urls: dict[str, list[str]] | None = None,
        fake_settings: dict[str, Any] | None = None,
        **options: Any,
    ) -> FakeStack:
        stack = FakeStack()
        for role, size in (("encode", encode), ("prefill", prefill), ("decode", decode)):
            for _ in range(size):
                fake = Fake()
                servers.append(Running(fake.app(), **(fake_settings or {})))
                fake.url = servers[-1].url
                if role == "prefill":
                    fake.reply = lambda seen: Reply(body={"kv_transfer_params": {"remote_port": 7}})
                getattr(stack, role).append(fake)
        config = ProxyConfig(
            **{
                role: (urls or {}).get(role, [fake.url for fake in getattr(stack, role)])
                for role in ("encode", "prefill", "decode")
            },
            timeout_s=timeout_s,
            **options,
        )
        stack.app = create_app(config, stages)
        stack.running = Running(stack.app)
        servers.append(stack.running)
        stack.url = servers[-1].url
        for server in servers:
            server.wait_until_started()
        return stack

    try:
        yield build
    finally:
        stop_all(servers)
