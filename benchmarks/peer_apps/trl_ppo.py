"""TRL 1.12's PPOTrainer as benchmarks/ppo.py asks for it, on a story model on a CPU, or benchmarks/gpu_ppo.py, on GPT-2 on a GPU. Prints
one line of JSON."""

from __future__ import annotations

import copy
import importlib.machinery
import json
import resource
import sys
import time
import types
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas  # noqa: F401  (before the stand-in, which it would ask for its version)
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, TrainerCallback

try:
    import datasets  # noqa: F401
except ImportError:  # the trainer imports it, and takes a list just as well

    class StandIn(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

    sys.modules["datasets"] = StandIn("datasets")
    sys.modules["datasets"].__spec__ = importlib.machinery.ModuleSpec("datasets", None)

from trl.experimental.ppo import PPOConfig, PPOTrainer


def pairs_of_halves(matrix: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of queries or keys as transformers rotates them: first halves, then second halves, in place of neighbours."""
    rows, columns = matrix.shape
    return matrix.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def weights_of(arrays: dict[str, torch.Tensor], heads: int, key_heads: int) -> dict[str, torch.Tensor]:
    found = {"embed_tokens.weight": arrays["tok_embeddings"], "norm.weight": arrays["norm"]}
    names = {
        "self_attn.v_proj": "wv",
        "self_attn.o_proj": "wo",
        "mlp.gate_proj": "w1",
        "mlp.up_proj": "w3",
        "mlp.down_proj": "w2",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for layer in range(len(arrays["wq"])):
        found[f"layers.{layer}.self_attn.q_proj.weight"] = pairs_of_halves(arrays["wq"][layer], heads)
        found[f"layers.{layer}.self_attn.k_proj.weight"] = pairs_of_halves(arrays["wk"][layer], key_heads)
        found |= {f"layers.{layer}.{theirs}.weight": arrays[ours][layer] for theirs, ours in names.items()}
    return found


def config_of(told: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=told["dim"],
        num_hidden_layers=told["n_layers"],
        num_attention_heads=told["n_heads"],
        num_key_value_heads=told["n_kv_heads"],
        intermediate_size=told["hidden_dim"],
        max_position_embeddings=told["max_seq_len"],
        rms_norm_eps=told["norm_eps"],
        vocab_size=told["vocab_size"],
        tie_word_embeddings=True,
        num_labels=1,
        pad_token_id=told["vocab_size"] - 1,
        bos_token_id=1,
        eos_token_id=None,
    )


class Counting(torch.nn.Module):
    """A reward that costs nothing: the share of an answer's tokens whose numbers are even."""

    base_model_prefix = "backbone"

    def __init__(self, prompt: int) -> None:
        super().__init__()
        self.backbone, self.score, self.prompt = self.share, torch.nn.Identity(), prompt

    def share(self, input_ids: torch.Tensor, **given: Any) -> Any:
        even = (input_ids % 2 == 0).float()
        even[:, : self.prompt] = 0
        places = (torch.arange(input_ids.shape[1], device=input_ids.device) - self.prompt + 1).clamp(min=1)
        return type("Out", (), {"hidden_states": [(even.cumsum(1) / places)[..., None]]})()


class Tokens:
    """What the trainer asks of a tokenizer."""

    def __init__(self, pad: int) -> None:
        self.pad_token_id, self.eos_token_id, self.padding_side = pad, pad, "left"


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([row["input_ids"] for row in rows])}


class Clock(TrainerCallback):
    """The time and the score of each update."""

    def __init__(self) -> None:
        self.times, self.scores = [now()], []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.times.append(now())

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        self.scores += [logs["objective/scores"]] if logs and "objective/scores" in logs else []


def now() -> float:
    """The processor's time; where a GPU computes, that of the clock when it is done."""
    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def story_models(asked: dict[str, Any]) -> tuple[Any, Any]:
    with np.load(asked["weights"]) as there:
        arrays = {name: torch.from_numpy(value.astype(np.float32)) for name, value in there.items()}
    told = json.loads(Path(asked["config"]).read_text())
    config = config_of(told)
    policy, value = LlamaForCausalLM(config), LlamaForSequenceClassification(config)
    found = weights_of(arrays, told["n_heads"], told["n_kv_heads"])
    policy.model.load_state_dict(found)
    policy.tie_weights()
    value.model.load_state_dict(found)
    torch.nn.init.zeros_(value.score.weight)
    if asked["shared"]:
        value.model = policy.model
    return policy, value


def gpt2_models(asked: dict[str, Any]) -> tuple[Any, Any]:
    """GPT-2 124M with weights at random, without dropout."""
    config = transformers.GPT2Config(
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, num_labels=1, pad_token_id=asked["pad"], bos_token_id=None, eos_token_id=None
    )
    policy, value = transformers.GPT2LMHeadModel(config), transformers.GPT2ForSequenceClassification(config)
    value.transformer.load_state_dict(policy.transformer.state_dict())
    torch.nn.init.zeros_(value.score.weight)
    if asked["shared"]:
        value.transformer = policy.transformer
    return policy, value


def main() -> None:
    asked = json.loads(sys.argv[1])
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        torch.set_num_threads(1)
    torch.manual_seed(asked["seed"])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    policy, value = story_models(asked) if "weights" in asked else gpt2_models(asked)
    args = PPOConfig(
        output_dir=asked["folder"],
        per_device_train_batch_size=asked["answers"],
        gradient_accumulation_steps=1,
        num_mini_batches=asked["answers"] // asked["mini"],
        num_ppo_epochs=asked["epochs"],
        total_episodes=asked["answers"] * asked["updates"],
        response_length=asked["length"],
        local_rollout_forward_batch_size=asked["answers"],
        learning_rate=asked["rate"],
        lr_scheduler_type="constant",
        kl_coef=asked["kl"],
        num_sample_generations=0,
        use_cpu=not on_gpu,
        bf16=on_gpu,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        seed=asked["seed"],
        disable_tqdm=True,
    )
    clock = Clock()
    data: Any = [{"input_ids": ids} for ids in asked["prompts"]]
    trainer = PPOTrainer(
        args=args,
        processing_class=Tokens(policy.config.pad_token_id),
        model=policy,
        ref_model=copy.deepcopy(policy),
        reward_model=Counting(len(asked["prompts"][0])),
        value_model=value,
        train_dataset=data,
        eval_dataset=data,
        data_collator=collate,
        callbacks=[clock],
    )
    clock.times = [now()]
    trainer.train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    spent = [later - earlier for earlier, later in pairwise(clock.times)]
    megabytes = torch.cuda.max_memory_allocated() / 2**20 if on_gpu else peak / 1024
    print(json.dumps({"spent": spent, "megabytes": megabytes, "scores": clock.scores}))


if __name__ == "__main__":
    main()
