"""Which models and adapters a command line names, what they take, and what is refused before anything is loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save_file

from shoal.cli.main import main
from shoal.config.load import parse_override
from shoal.config.schema.serving import Serving, bytes_of
from shoal.errors import ShoalError
from shoal.models.packed.layers import byte_count
from shoal.serve.backend import LocalBackend
from shoal.serve.batching.batching_engine import BatchingEngine
from shoal.serve.loaded_model import LoadedModel
from shoal.serve.model_pool import ModelPool
from shoal.serve.model_targets import open_pool, open_target, read_targets
from shoal.serve.serving_memory import answer_limit, cache_token_bytes, estimated_bytes, fitting_weights
from tests.serve.test_batching import Heard, alone, finish, job
from tests.serve.test_packed_serving import saved_folder
from tests.support.processes import HANG_S, processes_in, wait_for_line
from tests.support.small_service import small_model, small_served

CPU = [parse_override("training.device=cpu")]


def write_lora(folder: Path, base: str, width: int = 32) -> Path:
    """Adapters as peft saves them, without peft."""
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "base_model_name_or_path": base, "lora_alpha": 8, "r": 2}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    torch.manual_seed(4)
    place = "base_model.model.model.layers.0.self_attn.q_proj"
    matrices = {f"{place}.lora_A.weight": torch.randn(2, width), f"{place}.lora_B.weight": torch.randn(width, 2)}
    save_file(matrices, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders base, x/small, y/small, and two with adapters of base."""
    root = tmp_path_factory.mktemp("models")
    for name in ("base", "x/small", "y/small"):
        saved_folder(root / name, "llama", torch.float32)
    write_lora(root / "polite", str(root / "base"))
    write_lora(root / "rude", "somebody/base")
    write_lora(root / "elsewhere", "somebody/other")
    return root


def named(models: Path, *targets: str, adapters: tuple[str, ...] = ()) -> dict[str, list[str]]:
    found = read_targets([str(models / one) for one in targets], [one.replace("@", str(models)) for one in adapters])
    return {one.name: sorted(one.adapters) for one in found}


def test_models_are_named_by_their_folders_and_adapters_belong_to_their_base(models):
    assert named(models, "x/small", "base", "y/small", "polite", "rude") == {"x/small": [], "base": ["polite", "rude"], "y/small": []}
    assert named(models, "base", adapters=("kind=@/polite", "other=@/elsewhere")) == {"base": ["kind", "other"]}
    assert named(models, "base", "elsewhere") == {"base": [], "elsewhere": []}, "a base that is not served is merged with its adapters"


@pytest.mark.parametrize(
    ("targets", "adapters", "words"),
    [
        (("base", "base"), (), "the same model is named twice"),
        (("base", "polite"), ("polite=@/rude",), "there is an adapter 'polite' already"),
        (("base",), ("a+b=@/rude",), "write NAME=FOLDER"),
        (("base",), ("a=@/x",), "has no adapter_config.json"),
        (("base", "x/small"), ("a=@/elsewhere",), "its base is somebody/other, which is not among the models"),
    ],
)
def test_targets_that_do_not_go_together_are_refused(models, targets, adapters, words):
    with pytest.raises(ShoalError, match=words):
        named(models, *targets, adapters=adapters)


def test_what_cannot_be_served_together_is_refused_by_name(models, capsys):
    base, small = str(models / "base"), str(models / "x" / "small")
    device = ["--set", "training.device=cpu"]
    for words, arguments in (
        ("base is a model and .*demo-gpt a configuration", [base, "demo-gpt"]),
        ("--nodes spreads the layers of one model", [base, small, "--nodes", "2"]),
        (
            "base takes about [0-9.]+ kB, and serving.memory allows 50.0 kB .* never be loaded",
            [base, small, "--set", "serving.memory=50kB"],
        ),
        ("nowhere", [base, str(models / "nowhere")]),
        ("adapters are served by one machine", [base, "--adapter", f"a={models / 'polite'}", "--nodes", "2"]),
        ("serving.num_nodes to 1", [base, small, "--set", "serving.num_nodes=2"]),
        ("is no size", [base, "--set", "serving.memory=much"]),
        ("base takes about .* serving.memory allows 50.0 kB", [base, "--set", "serving.memory=50kB"]),
    ):
        assert main(["serve", *arguments, *device]) == 2, words

        assert re.search(words, capsys.readouterr().err), words


@pytest.mark.parametrize(("kind", "expected"), [("llama", ["bf16", "int8", "int4"]), ("mixtral", ["bf16"])])
@pytest.mark.parametrize("others", [(), ("small",)])
def test_a_model_that_is_too_large_names_only_weights_with_which_it_fits(kind, expected, others, tmp_path, capsys):
    for name, one in (("large", kind), ("small", "llama")):
        saved_folder(tmp_path / name, one, torch.float32)
    large = str(tmp_path / "large")
    most = estimated_bytes(large, "bf16")
    assert fitting_weights(large, "huggingface", most) == expected
    assert fitting_weights(large, "moe", most) == [], "its matrices stay as they are"
    targets = [large, *(str(tmp_path / name) for name in others)]
    for memory, words in (
        (most + 1, f"set serving.weights to {' or '.join(expected)}, or serving.memory to more"),
        (1000, "loaded; set serving.memory"),
    ):
        given = ["--set", f"serving.memory={memory / 1000}kB", "--set", "serving.weights=fp32", "--set", "training.device=cpu"]
        assert main(["serve", *targets, *given]) == 2
        assert words in capsys.readouterr().err


def test_sizes_are_estimated_from_files_before_a_model_is_loaded(models):
    for weights in ("fp32", "bf16", "int8", "auto"):
        served = open_target(read_targets([str(models / "base")], [])[0], [*CPU, parse_override(f"serving.weights={weights}")], print)
        assert byte_count(served.model) == pytest.approx(estimated_bytes(str(models / "base"), weights), rel=0.08)
    pool = open_pool(read_targets([str(models / one) for one in ("base", "x/small", "polite")], []), CPU, print, print)
    assert [state.name for state in pool.states()] == ["base", "small", "base+polite"]
    assert [state.loaded is not None for state in pool.states()] == [True, False, True]


def test_answers_at_once_follow_from_the_memory_beside_the_weights():
    auto, model = Serving(), small_model()
    assert cache_token_bytes(model) == 2 * 2 * 32 * 4
    assert answer_limit(auto, 10_000, 1000, on_gpu=False).answers == 10
    assert answer_limit(auto, float("inf"), 1000, on_gpu=False).answers == 16
    assert answer_limit(auto, 10**9, 10**6, on_gpu=True).answers == 64
    assert answer_limit(auto, -5, 1000, on_gpu=True).answers == 1
    assert answer_limit(Serving(max_running=100), 0, 1000, on_gpu=False).answers == 100
    served = small_served(model, prefix_cache_tokens=0)
    size = byte_count(model) + 5 * 256 * cache_token_bytes(model)
    loaded = LoadedModel(served, print, memory_bytes=size)
    assert loaded.limit == (5, "memory for the caches of 1,280 tokens, 256 for each answer")
    assert loaded.nbytes <= size
    shared = LoadedModel(small_served(model, prefix_cache_tokens=4096), print, memory_bytes=size)
    assert (shared.kept_tokens, shared.limit.answers) == (640, 2), "finished requests leave half of the memory to others"
    with pytest.raises(ShoalError, match="tiny takes about"):
        ModelPool.of_one(small_served(model, memory="10kB"), print)


def test_an_answer_waits_for_memory_and_is_the_same(models):
    model = small_model()
    backend = LocalBackend(model, memory_bytes=100 * cache_token_bytes(model))

    one = BatchingEngine(backend, most_running=8, most_waiting=8, clock=iter(range(10**6)).__next__)
    prompts, heard, most = [[5, 6, 7], [9] * 30, [1, 2]], [Heard() for _ in range(3)], 0
    for prompt, listener in zip(prompts, heard, strict=True):
        one.submit(job(prompt, listener, 40))
    while one.busy:
        one.step()
        most = max(most, len(one.running))
    assert most == 1, "43 and 70 tokens are more than 100"
    assert [told.tokens for told in heard] == [alone(model, prompt, 40) for prompt in prompts]
    large = Heard()
    one.submit(job([3] * 150, large, 4))
    finish(one)
    assert len(large.tokens) == 4, "one that is larger than all memory runs alone"


@pytest.mark.parametrize(("text", "size"), [("8GB", 8 * 10**9), ("1.5 GiB", 3 * 2**29), ("512mib", 2**29), ("auto", None)])
def test_a_size_is_a_number_and_a_unit(text, size):
    assert bytes_of(text) == size
    for wrong in ("8", "GB", "-1GB", "0GB", "8 bytes", "nan GB"):
        with pytest.raises(ValueError, match="is no size"):
            bytes_of(wrong)


def test_a_process_serves_several_models_and_adapters(models):
    with processes_in(models) as processes:
        process = processes.start("serve", "base", "x/small", "polite", "--port", "0", "--set", "training.device=cpu")
        port = int(wait_for_line(process, r"base, small, base\+polite answer at http://127.0.0.1:(\d+)/v1"))
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=HANG_S) as client:
            listed = {one["id"]: (one["parent"], one["loaded"]) for one in client.get("/v1/models").json()["data"]}
            assert listed == {"base": (None, True), "small": (None, False), "base+polite": ("base", True)}
            body = {"prompt": [3, 1, 4], "max_tokens": 12, "temperature": 0, "logit_bias": {}}
            answers = {name: client.post("/v1/completions", json=body | {"model": name}).json() for name in listed}
            texts = {name: answer["choices"][0]["text"] for name, answer in answers.items()}
            assert texts["base"] == texts["small"] != texts["base+polite"]
            assert answers["base+polite"]["model"] == "base+polite"
            assert client.get("/v1/models/small").json()["loaded"]
            assert 'shoal_written_tokens_total{model="base"} ' in client.get("/metrics").text
            refused = client.post("/v1/completions", json=body | {"model": "smal"})
            assert refused.status_code == 404
            assert "there are 'base', 'small', 'base+polite'" in refused.json()["error"]["message"]
