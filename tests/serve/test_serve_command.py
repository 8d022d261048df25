"""`shoal serve`: what it opens, and that it answers as `shoal generate` does."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from pathlib import Path

import httpx
import pytest
import torch

from shoal.cli.main import main
from shoal.config.load import ConfigFile, parse_override, resolve
from shoal.errors import ShoalError
from shoal.launch.start import address_of_first
from shoal.models.packed.layers import byte_count, number_count
from shoal.runs.trained_model import generate_text, open_run
from shoal.serve.batching.batching_engine import QueueFullError
from shoal.serve.load_model import open_served
from shoal.serve.model_pool import ModelPool
from shoal.serve.nodes.distributed_model import open_local_server, open_server
from shoal.serve.server import ModelServer
from shoal.transports.addresses import free_port
from tests.support.eventually import eventually
from tests.support.processes import HANG_S, processes_in, wait_for_line
from tests.support.small_service import running, small_served

TEXT = ["data.source.kind=text", "data.source.path=text.txt", "data.tokenizer=bytes", "data.sequence_length=16"]
SHORT = ["training.max_steps=3", "training.batch_size=2", "training.device=cpu"]
SMALL = ["model.kind=gpt", "model.hidden_size=16", "model.num_layers=1", "model.num_heads=2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was trained for a moment."""
    made = tmp_path_factory.mktemp("serve")
    (made / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    (made / "config.yaml").write_text("dialect: shoal\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        settings = [word for setting in [*TEXT, *SHORT, *SMALL] for word in ("--set", setting)]
        assert main(["train", "config.yaml", "--run-dir", "run", *settings]) == 0
    return made


def complete(port: int, name: str, prompt: str, **fields) -> str:
    body = {"model": name, "prompt": prompt, "max_tokens": 8, "seed": 4} | fields
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=HANG_S)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


@pytest.mark.parametrize("more", [[], ["--nodes", "2", "--set", "serving.spread=even"]], ids=["alone", "two local processes"])
def test_a_run_is_served_as_a_process_and_writes_what_generate_writes(folder, more):
    trained = open_run(str(folder / "run"), lambda text: None)
    expected = "".join(generate_text(trained, "the ", max_new_tokens=8, seed=4))
    with processes_in(folder) as processes:
        process = processes.start("serve", "run", "--port", "0", *more)
        port = int(wait_for_line(process, r"run answers at http://127.0.0.1:(\d+)/v1"))
        assert complete(port, "run", "the ") == expected


def test_whoever_comes_as_soon_as_the_address_is_known_is_let_in():
    service = ModelServer(ModelPool.of_one(small_served(), lambda text: None), "127.0.0.1", [0, 0])
    for port, listening in zip(service.ports, service.sockets, strict=True):
        with listening, socket.create_connection(("127.0.0.1", port), timeout=10):
            pass


def test_a_server_says_that_it_answers_only_when_its_model_does(monkeypatch):
    service = ModelServer(ModelPool.of_one(small_served(), lambda text: None), "127.0.0.1", [0])
    announced, asked = threading.Event(), []
    submit, is_open = service.engine.submit, threading.Event()

    def while_machines_are_missing(*jobs):
        asked.append(jobs)
        if not is_open.is_set():
            raise QueueFullError
        return submit(*jobs)

    monkeypatch.setattr(service.engine, "submit", while_machines_are_missing)
    thread = threading.Thread(target=service.run, args=(announced.set,))
    thread.start()
    try:
        eventually(lambda: len(asked) >= 2)
        assert not announced.is_set()
        is_open.set()
        assert announced.wait(HANG_S)
        assert httpx.get(f"http://127.0.0.1:{service.ports[0]}/v1/models", timeout=HANG_S).status_code == 200
    finally:
        service.stop()
        thread.join(HANG_S)


def test_a_server_that_is_terminated_closes_its_models_so_that_machines_learn_of_it(folder, monkeypatch):
    serve_until, close, closed = ModelServer.run, ModelPool.close, []
    monkeypatch.setattr(ModelServer, "run", lambda self, announce: serve_until(self, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    monkeypatch.setattr(ModelPool, "close", lambda self: closed.append(self) or close(self))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(folder / "run"), "--port", "0"])
    assert ended.value.code == 128 + signal.SIGTERM
    assert len(closed) == 1
    assert signal.getsignal(signal.SIGTERM) is before


def test_settings_of_the_run_can_be_changed_for_serving(folder):
    served = open_served([str(folder / "run")], [parse_override("serving.max_running=3")], lambda text: None)
    assert served.settings.max_running == 3


def test_a_run_is_served_with_packed_weights(folder):
    plain, packed = (
        open_served([str(folder / "run")], [parse_override(f"serving.weights={one}")], lambda text: None).model for one in ("auto", "int8")
    )
    ids = torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        assert (packed(ids) - plain(ids)).abs().max() <= 0.05 * plain(ids).abs().max()
    assert byte_count(packed) < 0.5 * byte_count(plain)
    assert number_count(packed) == number_count(plain)


def test_a_folder_of_hugging_face_is_served(tmp_path, shared_data):
    pytest.importorskip("transformers")
    config, tokens = story_folder(shared_data / "lm", tmp_path / "stories")
    served = open_served([str(tmp_path / "stories")], [parse_override("training.device=cpu")], lambda text: None)
    assert served.start_ids == (1,)
    with running(served) as service:
        body = {"model": "stories", "prompt": config["reference"]["prompt_ids"], "max_tokens": 40, "temperature": 0}
        answer = httpx.post(f"http://127.0.0.1:{service.ports[0]}/v1/completions", json=body, timeout=HANG_S).json()
    written = config["reference"]["greedy_ids"][:40]
    assert answer["choices"][0]["text"] == tokens.decode(written)


def story_folder(source: Path, folder: Path):
    """The smallest story model as Hugging Face keeps a Llama: its weights, and a vocabulary of words that are not joined."""
    import numpy as np
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, processors

    config = json.loads((source / "stories260K.config.json").read_text())
    with np.load(source / "stories260K.npz") as arrays:
        weights = {key: torch.from_numpy(array.astype(np.float32)) for key, array in arrays.items()}
    shape = transformers.LlamaConfig(
        vocab_size=config["vocab_size"],
        hidden_size=config["dim"],
        intermediate_size=config["hidden_dim"],
        num_hidden_layers=config["n_layers"],
        num_attention_heads=config["n_heads"],
        num_key_value_heads=config["n_kv_heads"],
        max_position_embeddings=config["max_seq_len"],
        rms_norm_eps=config["norm_eps"],
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.LlamaForCausalLM(shape)
    model.load_state_dict(llama_weights(weights, config), strict=False)
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(config["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single="w1 $0", special_tokens=[("w1", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return config, tokenizer


def llama_weights(arrays, config):
    """The names that Hugging Face gives them; it turns the two halves of a head where llama2.c turns neighbours."""

    def halves(matrix: torch.Tensor, heads: int) -> torch.Tensor:
        return matrix.view(heads, -1, 2, matrix.shape[1]).transpose(1, 2).reshape(matrix.shape)

    found = {"model.embed_tokens.weight": arrays["tok_embeddings"], "model.norm.weight": arrays["norm"]}
    found["lm_head.weight"] = arrays["tok_embeddings"]
    for i in range(config["n_layers"]):
        place = f"model.layers.{i}"
        found |= {
            f"{place}.input_layernorm.weight": arrays["attention_norm"][i],
            f"{place}.self_attn.q_proj.weight": halves(arrays["wq"][i], config["n_heads"]),
            f"{place}.self_attn.k_proj.weight": halves(arrays["wk"][i], config["n_kv_heads"]),
            f"{place}.self_attn.v_proj.weight": arrays["wv"][i],
            f"{place}.self_attn.o_proj.weight": arrays["wo"][i],
            f"{place}.post_attention_layernorm.weight": arrays["ffn_norm"][i],
            f"{place}.mlp.gate_proj.weight": arrays["w1"][i],
            f"{place}.mlp.up_proj.weight": arrays["w3"][i],
            f"{place}.mlp.down_proj.weight": arrays["w2"][i],
        }
    return found


def test_a_model_that_is_not_trained_or_not_there_is_refused():
    with pytest.raises(ShoalError, match="must be trained first"):
        open_served(["demo-gpt"], [], lambda text: None)
    with pytest.raises(ShoalError, match="there is no run or model at nowhere"):
        open_served(["nowhere"], [], lambda text: None)
    assert main(["serve", "nowhere"]) == 2


CLUSTER = """
host_ip: {{mini1: "{server}", mini2: "10.99.99.2"}}
port: {port}
num_workers: 1
workers: [mini2]
server: mini1
timeout: 30
causal_gpt2: {{hf_model_name: gpt2, num_nodes: 2, num_layers: 12}}
"""


def cluster(folder: Path, server: str, port: int, *overrides: str):
    (folder / "cluster.yaml").write_text(CLUSTER.format(server=server, port=port))
    return resolve([ConfigFile(str(folder / "cluster.yaml"))], [parse_override(one) for one in overrides]).run


def test_machines_join_where_the_clusters_file_says(tmp_path):
    port = free_port("127.0.0.1")
    run = cluster(tmp_path, "127.0.0.1", port)
    served = small_served()._replace(run=run, nodes=2)
    hosts = address_of_first(run, "--node-host")
    assert hosts == ("127.0.0.1",)  # mini2's entry is an address of mini2's own
    server, invitation = open_server(served, hosts)
    assert invitation.address == f"tcp://127.0.0.1:{port}"
    with pytest.raises(ShoalError, match=f"port {port}"):
        open_server(served._replace(name="another"), hosts)
    server.close()
    server, invitation = open_local_server(served)  # for processes of this machine
    assert not invitation.address.endswith(f":{port}")
    server.close()
    with pytest.raises(ShoalError, match="start it on mini1, or say --node-host"):
        address_of_first(cluster(tmp_path, "10.99.99.1", port), "--node-host")


@pytest.mark.parametrize(("given", "layers"), [("model.num_layers=6", 6), ("model.num_layers=null", None), ("causal_gpt2.num_layers=6", 6)])
def test_the_layers_of_a_clusters_file_can_be_overridden(tmp_path, given, layers):
    assert cluster(tmp_path, "127.0.0.1", 0).model.num_layers == 12
    assert cluster(tmp_path, "127.0.0.1", 0, given).model.num_layers == layers


def test_a_gguf_file_is_converted_once_and_keeps_its_weights(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    gguf = pytest.importorskip("gguf")
    import numpy as np

    from shoal.runs.converted_models import converted, demo_file

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    file = tmp_path / "small.gguf"
    weights = write_gguf(gguf, np, file)
    folder = converted(file)
    from safetensors.numpy import load_file

    found = load_file(folder / "model.safetensors")
    np.testing.assert_array_equal(found["model.embed_tokens.weight"], weights["token_embd.weight"])
    before = (folder / "config.json").stat().st_mtime_ns
    assert converted(file) == folder
    assert (folder / "config.json").stat().st_mtime_ns == before
    (tmp_path / "bad.gguf").write_bytes(b"no model")
    with pytest.raises(ShoalError, match="can be read"):
        converted(tmp_path / "bad.gguf")
    monkeypatch.setattr("shoal.runs.converted_models._PACKAGE", "no_such_package")
    with pytest.raises(ShoalError, match="pip install"):
        demo_file()


def write_gguf(gguf, np, file: Path):
    """A Llama with one layer, in the form of llama.cpp."""
    width, inner, words = 32, 48, 40
    writer, chance = gguf.GGUFWriter(str(file), "llama"), np.random.default_rng(0)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(words)
    letters = sorted(chr(ord("a") + i) for i in range(26))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<s>", "</s>", *letters, "ab", *(f"w{i}" for i in range(words - 29))])
    writer.add_token_types([3, 3, *([1] * (words - 2))])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    shapes = {"token_embd": (words, width), "output_norm": (width,), "output": (words, width), "blk.0.attn_norm": (width,)}
    shapes |= {f"blk.0.attn_{name}": (width, width) for name in ("q", "k", "v", "output")} | {"blk.0.ffn_norm": (width,)}
    shapes |= {"blk.0.ffn_gate": (inner, width), "blk.0.ffn_up": (inner, width), "blk.0.ffn_down": (width, inner)}
    weights = {f"{name}.weight": chance.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for name, value in weights.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights
