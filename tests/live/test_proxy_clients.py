"""The clients that people use, against real servers behind the proxy: `openai`, plain `requests`, `vllm bench serve`. One boot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from epd_conformance import subject
from epd_conformance.plans.media import ImageSpec
from epd_conformance.run import Options, model_use
from epd_conformance.topology.spec import Shape, Topology
from epd_conformance.topology.stack import SERVED_NAME, Site, StackSpec

pytestmark = [pytest.mark.live, pytest.mark.needs_vllm]

PROMPTS = 4

# As its console script does; that one needs a distribution of the name `vllm`, and the CPU build has another.
BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@dataclass(frozen=True)
class Servers:
    """A live e-pd stack and its aggregated baseline."""

    proxy: str
    baseline: str
    model: str
    folder: Path
    environment: dict[str, str]

    def primed(self) -> float:
        """How many encode legs the proxy has sent."""
        text = requests.get(f"{self.proxy}/metrics", timeout=10).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        legs = [one for one in samples if one.name == "epd_proxy_legs_total" and one.labels["stage"] == "encode"]
        return sum(one.value for one in legs)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("clients")
    model = model_use(Options(subject="reference"))
    with Site(folder / "site", model) as site:
        stack, baseline = site.boot(
            StackSpec("e-pd", Topology.parse("e-pd"), Shape(), subject=subject.load("reference")),
            StackSpec("other", Topology.parse("aggregated"), Shape()),
        )
        yield Servers(stack.base_url, baseline.base_url, str(model.path), folder, dict(site.environment))
        assert stack.dead() == [], "no client ends a server"


def messages(seed: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [ImageSpec(seed).item(), {"type": "text", "text": "What is this?"}]}]


def test_the_openai_client(servers: Servers) -> None:
    openai = pytest.importorskip("openai")
    before = servers.primed()

    def asked(url: str, picture: int, **more: Any) -> Any:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        given = {"model": SERVED_NAME, "messages": messages(picture), "max_tokens": 8, "temperature": 0}
        return client.chat.completions.create(**(given | more))

    # Several choices of a greedy request would be refused.
    options: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "n": 2, "seed": 3, "temperature": 0.5}
    ours, theirs = (asked(url, 1, **options) for url in (servers.proxy, servers.baseline))
    assert [choice.message.content for choice in ours.choices] == [choice.message.content for choice in theirs.choices]
    assert len(ours.choices) == 2
    assert ours.choices[0].logprobs == theirs.choices[0].logprobs
    assert ours.usage == theirs.usage

    chunks = list(asked(servers.proxy, 2, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == asked(servers.baseline, 2).choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 8

    client = openai.OpenAI(base_url=f"{servers.proxy}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == [SERVED_NAME]
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        client.chat.completions.create(model="no-such-model", messages=messages(3))
    # The refused one never got to an encoder's end, and was sent all the same.
    assert servers.primed() - before == 3


def test_plain_requests(servers: Servers) -> None:
    body = {"model": SERVED_NAME, "messages": messages(4), "max_tokens": 6, "temperature": 0, "return_token_ids": True}
    before = servers.primed()
    ours, theirs = (
        requests.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
        for url in (servers.proxy, servers.baseline)
    )
    assert ours["choices"][0]["token_ids"] == theirs["choices"][0]["token_ids"]
    assert ours["prompt_token_ids"] == theirs["prompt_token_ids"]
    with requests.post(
        f"{servers.proxy}/v1/chat/completions", json={**body, "stream": True}, stream=True, timeout=60
    ) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]"
    ids = [
        number
        for line in lines[:-1]
        for choice in json.loads(line)["choices"]
        for number in choice.get("token_ids") or ()
    ]
    assert ids == theirs["choices"][0]["token_ids"]
    assert servers.primed() - before == 2


def test_vllm_bench_serve(servers: Servers) -> None:
    result = servers.folder / "bench.json"
    words = {
        "--backend": "openai-chat",
        "--base-url": servers.proxy,
        "--endpoint": "/v1/chat/completions",
        "--model": SERVED_NAME,
        "--tokenizer": servers.model,
        "--dataset-name": "random-mm",
        "--num-prompts": PROMPTS,
        "--random-input-len": 12,
        "--random-output-len": 4,
        "--random-mm-base-items-per-request": 1,
        "--random-mm-bucket-config": "{(56, 56, 1): 1.0}",
        "--result-filename": result.name,
        "--result-dir": result.parent,
    }
    before = servers.primed()
    command = [sys.executable, "-c", BENCH, *(str(word) for pair in words.items() for word in pair), "--save-result"]
    environment = {**os.environ, **servers.environment}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]
    told = json.loads(result.read_text())
    assert (told["completed"], told.get("failed", 0)) == (PROMPTS, 0), told
    # Some versions send one request more, to see whether anybody is there.
    assert PROMPTS <= servers.primed() - before <= PROMPTS + 1
