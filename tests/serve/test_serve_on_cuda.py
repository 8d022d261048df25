"""A model on a GPU is served with the text that it writes on the CPU: alone, in our own layers, and spread over machines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.models.huggingface.as_gpt import gpt_conversion
from shoal.runs.trained_model import generate_text, open_run
from shoal.serve.load_model import open_served
from shoal.serve.nodes.weights import WeightStore
from tests.serve.test_batching import VOCABULARY, Heard, engine, finish, hugging_face, job, make_model
from tests.serve.test_nodes import LENGTHS, PROMPTS, make, spread
from tests.serve.test_nodes import alone as one_by_one
from tests.serve.test_serve_command import SMALL, TEXT, complete
from tests.support.processes import processes_in, wait_for_line

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
SHORT = ["training.max_steps=3", "training.batch_size=2", "training.device=cuda"]


def written(model: torch.nn.Module) -> list[list[int]]:
    """What four requests write that come one after the other."""
    one, heard = engine(model), [Heard() for _ in range(4)]
    for prompt, listener in zip(([3, 1, 4], list(range(VOCABULARY)), [8], [1, 5, 9, 2]), heard, strict=True):
        one.submit(job(prompt, listener, 15))
        one.step()
    finish(one)
    return [listener.tokens for listener in heard]


@pytest.mark.parametrize("kind", ["learned", "rotary", "moe", "lstm", "gpt2", "llama", "qwen2"])
def test_requests_write_on_a_gpu_what_they_write_on_the_cpu(kind: str) -> None:
    model = make_model(kind)  # in double precision: hardly ever are two tokens equally likely
    expected = written(model)
    assert written(model.cuda()) == expected


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2"])
def test_our_own_layers_compute_a_model_of_hugging_face_on_a_gpu(kind: str) -> None:
    torch.manual_seed(1)
    model = hugging_face(kind).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    own = gpt_conversion(model)
    assert own is not None
    made = own.convert(WeightStore(model.state_dict()).get).cuda()
    assert written(made.double()) == written(model.double())


@pytest.mark.parametrize("kind", ["gpt", "hash", "llama"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_layers_on_machines_with_a_gpu_write_the_same(kind: str, device: str) -> None:
    """`device`: that of the server's own layers. Machines that join take the GPU."""
    model, described = make(kind)
    expected = one_by_one(model, PROMPTS, LENGTHS)
    with spread(model.to(device), described, ["one", "two"]) as (spread_out, _):
        heard = [Heard() for _ in PROMPTS]
        for prompt, length, listener in zip(PROMPTS, LENGTHS, heard, strict=True):
            spread_out.submit(job(prompt, listener, length))
            spread_out.step()
        finish(spread_out)
    assert [listener.tokens for listener in heard] == expected


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was trained on a GPU for a moment."""
    made = tmp_path_factory.mktemp("serve")
    (made / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    (made / "config.yaml").write_text("dialect: shoal\n")
    with processes_in(made) as processes:
        settings = [word for setting in [*TEXT, *SHORT, *SMALL, "model.num_layers=2"] for word in ("--set", setting)]
        code, output = processes.run("train", "config.yaml", "--run-dir", "run", *settings)
        assert code == 0, output
    return made


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_a_run_is_served_from_a_gpu_as_a_user_starts_it(folder: Path, nodes: str) -> None:
    trained = open_run(str(folder / "run"), lambda text: None)
    assert next(trained.task.players["model"].parameters()).is_cuda
    assert next(open_served([str(folder / "run")], [], lambda text: None).model.parameters()).is_cuda
    trained.task.players["model"].cpu()
    expected = "".join(generate_text(trained, "the ", max_new_tokens=8, seed=4))
    with processes_in(folder) as processes:
        process = processes.start("serve", "run", "--port", "0", "--nodes", nodes)
        port = int(wait_for_line(process, r"run answers at http://127.0.0.1:(\d+)/v1"))
        assert complete(port, "run", "the ") == expected
