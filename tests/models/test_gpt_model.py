"""The transformer against the models of transformers, and what must hold of any causal language model."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from shoal.config.schema import model as schema
from shoal.errors import ShoalError
from shoal.models.gpt import Gpt
from shoal.models.layers.swiglu import swiglu

LLAMA = {"positions": "rotary", "feed_forward": "swiglu", "norm": "rms", "bias": False}
KINDS = [
    {},
    LLAMA,
    LLAMA | {"num_kv_heads": 2, "tied_embeddings": False},
    {"positions": "rotary", "num_kv_heads": 1, "intermediate_size": 20},
    {"feed_forward": "swiglu", "norm": "rms"},
]


def ids(*shape: int, vocab_size: int = 31, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def shaken(model: torch.nn.Module) -> torch.nn.Module:
    """With every weight moved, biases and norms too, so that a mix-up shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def test_swiglu_keeps_its_input_alone_and_has_the_gradient_of_autograd_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    inner, slope = (torch.randn(2, 5, width, generator=generator) for width in (16, 8))
    inner.requires_grad_()
    kept = set[int]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        found = swiglu(inner)
    assert kept == {inner.untyped_storage().data_ptr()}
    gate, content = inner.chunk(2, dim=-1)
    plain = F.silu(gate) * content
    assert torch.equal(found, plain)
    assert torch.equal(*(torch.autograd.grad(one, inner, slope)[0] for one in (found, plain)))
    vectorised = torch.func.vmap(torch.func.grad(lambda x: (swiglu(x) * slope[0]).sum()))(inner.detach())
    torch.testing.assert_close(vectorised[0], torch.autograd.grad((F.silu(gate) * content)[0], inner, slope[0])[0][0])


# --- the same numbers as transformers ---------------------------------------------------------------------------------


def gpt2_weights(theirs: torch.nn.Module) -> dict[str, torch.Tensor]:
    """GPT-2's names to ours; its matrices stand the other way round."""
    state = theirs.state_dict()
    weights = {
        "token_embedding.weight": state["transformer.wte.weight"],
        "position_embedding.weight": state["transformer.wpe.weight"],
    }
    layers = {
        "ln_1": "attention_norm",
        "attn.c_attn": "attention.query_key_value",
        "attn.c_proj": "attention.output",
        "ln_2": "feed_forward_norm",
        "mlp.c_fc": "feed_forward.up",
        "mlp.c_proj": "feed_forward.down",
    }
    for i in range(theirs.config.n_layer):
        for name, ours in layers.items():
            for part in ("weight", "bias"):
                tensor = state[f"transformer.h.{i}.{name}.{part}"]
                weights[f"blocks.{i}.{ours}.{part}"] = tensor.T if tensor.dim() == 2 else tensor
    return weights | {f"norm.{part}": state[f"transformer.ln_f.{part}"] for part in ("weight", "bias")}


def test_logits_equal_gpt2():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=97, n_positions=32, n_embd=48, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0)
    theirs = shaken(transformers.GPT2LMHeadModel(config))
    ours = Gpt(schema.Gpt(hidden_size=48, num_layers=3, num_heads=4, max_seq_len=32), 97).eval()
    ours.load_state_dict(gpt2_weights(theirs))
    tokens = ids(3, 20, vocab_size=97)
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-5, rtol=0)


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows for pairs (i, i + half), as transformers has them, to rows for pairs (2i, 2i + 1)."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)


def llama_weights(theirs: torch.nn.Module) -> dict[str, torch.Tensor]:
    state, config = theirs.state_dict(), theirs.config
    weights = {
        "token_embedding.weight": state["model.embed_tokens.weight"],
        "norm.weight": state["model.norm.weight"],
        "output.weight": state["lm_head.weight"],
    }
    for i in range(config.num_hidden_layers):
        attention, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        query = interleaved(state[attention + "q_proj.weight"], config.num_attention_heads)
        key = interleaved(state[attention + "k_proj.weight"], config.num_key_value_heads)
        weights |= {
            f"blocks.{i}.attention.query_key_value.weight": torch.cat([query, key, state[attention + "v_proj.weight"]]),
            f"blocks.{i}.attention.output.weight": state[attention + "o_proj.weight"],
            f"blocks.{i}.feed_forward.up.weight": torch.cat([state[mlp + "gate_proj.weight"], state[mlp + "up_proj.weight"]]),
            f"blocks.{i}.feed_forward.down.weight": state[mlp + "down_proj.weight"],
            f"blocks.{i}.attention_norm.weight": state[f"model.layers.{i}.input_layernorm.weight"],
            f"blocks.{i}.feed_forward_norm.weight": state[f"model.layers.{i}.post_attention_layernorm.weight"],
        }
    return weights


def test_logits_equal_llama_with_grouped_heads():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 80}
    config = transformers.LlamaConfig(
        **sizes, vocab_size=97, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, rms_norm_eps=1e-4
    )
    theirs = shaken(transformers.LlamaForCausalLM(config))
    settings = schema.Gpt(**sizes, **LLAMA, num_layers=3, num_heads=6, num_kv_heads=2, max_seq_len=32, norm_eps=1e-4, tied_embeddings=False)
    ours = Gpt(settings, 97).eval()
    ours.load_state_dict(llama_weights(theirs))
    tokens = ids(3, 20, vocab_size=97)
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-5, rtol=0)


# --- what must hold ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", KINDS)
def test_a_later_token_does_not_change_earlier_logits(make_gpt, settings):
    model = make_gpt(**settings)
    tokens = ids(2, 12)
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 31
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(after[:, :7], before[:, :7], atol=1e-6, rtol=0)
    assert ((after[:, 7:] - before[:, 7:]).abs().amax(-1) > 1e-4).all()  # and every later one does change


@pytest.mark.parametrize("settings", KINDS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(make_gpt, settings, side):
    model = make_gpt(**settings)
    rows = [ids(5, seed=2), ids(9, seed=3)]
    lengths = [(9 - len(row), 0) if side == "left" else (0, 9 - len(row)) for row in rows]
    tokens = torch.stack([F.pad(row, padding, value=30) for row, padding in zip(rows, lengths, strict=True)])
    mask = torch.stack([F.pad(torch.ones_like(row), padding) for row, padding in zip(rows, lengths, strict=True)])
    with torch.no_grad():
        padded = model(tokens, attention_mask=mask)
        assert padded.isfinite().all()
        for i, row in enumerate(rows):
            torch.testing.assert_close(padded[i][mask[i].bool()], model(row[None])[0], atol=1e-5, rtol=0)


def test_padding_and_cache_together(make_gpt):
    model = make_gpt()
    tokens, mask = ids(2, 10), torch.ones(2, 10)
    mask[0, :4] = 0
    cache = model.new_cache(10)
    with torch.no_grad():
        whole = model(tokens, attention_mask=mask)
        parts = [model(tokens[:, a:b], cache=cache, attention_mask=mask[:, :b]) for a, b in [(0, 6), (6, 9), (9, 10)]]
    torch.testing.assert_close(torch.cat(parts, dim=1)[mask.bool()], whole[mask.bool()], atol=1e-5, rtol=0)


@pytest.mark.parametrize("settings", KINDS)
def test_logits_are_hidden_times_output_weight(make_gpt, settings):
    model = make_gpt(**settings)
    tokens = ids(2, 8)
    with torch.no_grad():
        torch.testing.assert_close(model.hidden(tokens) @ model.output_weight.T, model(tokens))


def test_tied_and_untied_output(make_gpt):
    tied, untied = make_gpt(), make_gpt(tied_embeddings=False)
    assert tied.output_weight is tied.token_embedding.weight
    assert untied.output_weight is not untied.token_embedding.weight
    assert sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters()) == 31 * 24


def test_the_number_of_parameters_is_gpt2s():
    with torch.device("meta"):
        model = Gpt(schema.Gpt(hidden_size=768, num_layers=12, num_heads=12, max_seq_len=1024), 50257)
    assert sum(p.numel() for p in model.parameters()) == 124_439_808


def test_no_bias_is_no_bias(make_gpt):
    assert not [name for name, _ in make_gpt(bias=False).named_parameters() if "bias" in name]
    assert len([name for name, _ in make_gpt().named_parameters() if "bias" in name]) == 2 * 6 + 1


def test_initial_weights_are_gpt2s():
    torch.manual_seed(0)
    model = Gpt(schema.Gpt(hidden_size=128, num_layers=8, num_heads=4), 500)
    for name, parameter in model.named_parameters():
        residual = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
        if parameter.dim() == 2:
            assert parameter.std().item() == pytest.approx(0.02 / math.sqrt(16) if residual else 0.02, rel=0.05), name
        else:
            assert (parameter == (0.0 if name.endswith("bias") else 1.0)).all(), name
    assert model(ids(2, 8)).std() < 0.5  # a new model is unsure of everything


def test_dropout_only_while_training(make_gpt):
    model, tokens = make_gpt(dropout=0.5), ids(2, 8)
    assert torch.equal(model(tokens), model(tokens))
    model.train()
    assert not torch.equal(model(tokens), model(tokens))


def gradients(model: Gpt, tokens: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(5)
    model.zero_grad()
    F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("settings", [{"dropout": 0.1}, LLAMA])
def test_checkpointed_gradients_are_the_same(make_gpt, settings):
    model, tokens, calls = make_gpt(**settings).train(), ids(2, 12), []
    model.blocks[0].feed_forward.register_forward_pre_hook(lambda *_: calls.append(1))
    plain = gradients(model, tokens)
    assert len(calls) == 1
    model.gradient_checkpointing(True)
    for expected, found in zip(plain, gradients(model, tokens), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-5)
    assert len(calls) == 3  # once more, and again in the backward pass
    model.gradient_checkpointing(False)
    gradients(model, tokens)
    assert len(calls) == 4


def test_dropout_stays_off_when_a_pass_in_evaluation_is_computed_again(make_gpt):
    model, tokens = make_gpt(dropout=0.5).eval(), ids(2, 12)
    plain = gradients(model, tokens)
    model.gradient_checkpointing(True)
    model.zero_grad()
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    model.train()
    loss.backward()
    for expected, parameter in zip(plain, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected, atol=1e-7, rtol=1e-5)


@pytest.mark.whole
@pytest.mark.parametrize("settings", [{"dropout": 0.1}, LLAMA | {"num_kv_heads": 2}])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiles_into_one_graph(make_gpt, settings, checkpointing):
    model, tokens = make_gpt(**settings).train(), ids(2, 12)
    model.gradient_checkpointing(checkpointing)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=keep, fullgraph=True)
    compiled(tokens).sum().backward()
    compiled(tokens).sum().backward()
    assert len(graphs) == 1


@pytest.mark.parametrize("settings", KINDS[:2])
def test_bfloat16_is_near(make_gpt, settings):
    model, tokens = make_gpt(**settings), ids(2, 12)
    with torch.no_grad():
        expected = model(tokens)
        with torch.autocast("cpu", torch.bfloat16):
            mixed = model(tokens)
        low = copy.deepcopy(model).to(torch.bfloat16)(tokens)
    for found in (mixed, low):
        assert found.dtype == torch.bfloat16
        assert (found - expected).norm() < 0.03 * expected.norm()


def test_too_long_a_sequence_is_refused(make_gpt):
    with pytest.raises(ShoalError, match=r"17 tokens does not fit the model.*model.max_seq_len: 16"):
        make_gpt()(ids(1, 17))


def test_rotary_needs_even_heads(make_gpt):
    with pytest.raises(ShoalError, match=r"a head has 5 numbers.*model.hidden_size 20.*model.num_heads 4"):
        make_gpt(hidden_size=20, num_heads=4, positions="rotary")
