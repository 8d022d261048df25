"""The base class of Shoal's own transformers: embeddings, blocks, the last normalisation, the output matrix and the KV cache.

A block adds the outputs of two parts to the residual stream: an attention and a feed-forward, which each model chooses layer by layer. A
part reads further inputs from `LayerInputs`. It returns its side outputs instead of storing them, so that activation checkpointing, which
runs a block twice, reports them once, and so that engines which gather parameters block by block see every tensor that leaves a block.

Shapes: B batch, L tokens, S tokens seen (L and those in the cache), D width, V vocabulary, C tokens of context.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.config.schema import model as schema
from shoal.errors import ShoalError
from shoal.models.generation.kv_cache import KeyValueCache, LayerCache
from shoal.models.layers.documents import PackedDocuments, needs_mask, packed_documents
from shoal.models.layers.embedding import TokenEmbedding
from shoal.models.layers.recompute import recomputed
from shoal.models.layers.rotary import Rotary

INITIAL_STD = 0.02
NEVER = 2**62
"""A position that no token reaches: marks context vectors that must not be read."""
SideOutputs = dict[str, Tensor]
"""Outputs of a part besides the residual stream, by name: auxiliary losses, and figures to record."""


class AuxiliaryLoss(NamedTuple):
    """A loss of the network itself, which the task adds to its own loss."""

    name: str
    weight: float
    value: Tensor
    """Mean over the tokens that count in the loss. A stage with some of the layers gives their share of it."""


class LookAhead(NamedTuple):
    """What predicts the token after the next."""

    value: Tensor
    """Input of the output matrix [B, L, D]; or logits [B, L, V], where the model computes those of the next token."""
    is_logits: bool
    weight: float
    """Of its loss."""


class SideChannel:
    """Inputs of a model besides the tokens of a batch, and outputs besides the logits."""

    def __init__(self, counted_BL: Tensor | None = None, rows_R: Tensor | None = None, **columns: Tensor) -> None:
        """`columns`: batch columns of the texts to read; for these rows only, if `rows_R` is given."""
        self.counted_BL, self.rows_R = counted_BL, rows_R
        """True where a token counts in the loss."""
        self.columns = columns
        self.losses: list[AuxiliaryLoss] = []
        self.output_weight: Tensor | None = None
        """The tied output matrix for this pass: see `embedding.py`. None: use the model's own."""
        self.ahead: LookAhead | None = None
        self.figures: dict[str, Tensor] = {}
        """Scalars, means over the tokens that count; those of a layer are named `layers/3/dropped`."""


class EncodedContext(NamedTuple):
    """Encoded texts that cross-attention layers attend to."""

    states_BCD: Tensor
    first_BC: Tensor
    """The first position of the sequence that may attend to each vector."""
    since: ContextUpdate | None = None
    """The difference from an earlier context; None: there is no earlier one."""

    def with_rows(self, rows_R: Tensor, new: EncodedContext) -> EncodedContext:
        """A copy with the vectors of some rows replaced, and widened if the new ones are more."""
        width = max(self.first_BC.shape[1], new.first_BC.shape[1])
        states_BCD, first_BC = (one.clone() for one in self.widened(width))
        states_RCD, first_RC = new.widened(width)
        states_BCD[rows_R], first_BC[rows_R] = states_RCD.to(states_BCD.dtype), first_RC
        return EncodedContext(states_BCD, first_BC, ContextUpdate(self.first_BC, rows_R))

    def widened(self, width: int) -> tuple[Tensor, Tensor]:
        """Vectors and first positions, padded to a width with vectors that no token may read."""
        missing = width - self.first_BC.shape[1]
        return F.pad(self.states_BCD, (0, 0, 0, missing)), F.pad(self.first_BC, (0, missing), value=NEVER)


class ContextUpdate(NamedTuple):
    """The difference of a context from an earlier one."""

    earlier_BC: Tensor
    """`first_BC` of the earlier context, which identifies it."""
    rows_R: Tensor
    """The rows that changed."""


_ONE_BY_ONE = 17
"""Tokens after others that at most attend one by one on a CPU. A kernel for several at once adds in another order, and products with
weights in few bits make a large difference of a small one: a token's logits would depend on how many are computed together."""


class LayerInputs(NamedTuple):
    """Inputs of every layer besides the residual stream."""

    turns: Tensor | None
    """Cosines and sines of the rotary positions."""
    mask: Tensor | None
    """True where a token attends to another, [L, S] or [B, 1, L, S]; None: see `causal`."""
    causal: bool
    """Without a mask: whether there is no token before these. If there is, they attend one by one."""
    input_ids_BL: Tensor
    counted_BL: Tensor | None = None
    """True where a token counts in the loss; None: losses and figures are not wanted."""
    context: EncodedContext | None = None
    past: int = 0
    """Tokens in the cache."""
    real_BS: Tensor | None = None
    """False at padding; None: no row is padded on the left."""
    documents: PackedDocuments | None = None
    """The documents of packed rows, where attention is computed without a mask."""


class Variant(NamedTuple):
    """What other families of models compute differently; see `huggingface/as_gpt.py`."""

    head_size: int | None = None
    """Width of a head; None: hidden_size / num_heads."""
    biased_heads: bool = False
    """The projection to queries, keys and values has a bias, whatever `settings.bias` says."""
    gelu_gate: bool = False
    """The gate of SwiGLU is GELU (tanh) instead of SiLU."""
    one_plus_norms: bool = False
    """Normalisations multiply by 1 + weight."""
    embedding_scale: float = 1.0
    """Factor of the token embeddings, but not of the output matrix."""


PLAIN = Variant()


class BlockPart(nn.Module):
    """An attention or a feed-forward. Its first output is added to the residual stream."""

    def forward(self, x_BLD: Tensor, inputs: LayerInputs, cache: LayerCache | None = None) -> tuple[Tensor, SideOutputs]:
        raise NotImplementedError

    def initialise(self, std: float) -> None:
        """Initialise the weights that are not in Linear or Embedding layers."""

    def last_weights(self) -> list[Tensor]:
        """The output projections onto the residual stream: they start smaller in deeper models."""
        raise NotImplementedError


PackedBlocks = Callable[[nn.Module, Tensor, LayerInputs, KeyValueCache], Tensor | None]
"""The residual stream after all blocks of a model; None: they are computed one by one."""
Parts = Callable[[int], tuple[BlockPart, BlockPart]]
"""The attention and the feed-forward of a layer, by its number."""


class Block(nn.Module):
    """Pre-norm transformer block: attention and feed-forward, each added to the residual stream."""

    def __init__(self, settings: schema.Transformer, attention: BlockPart, feed_forward: BlockPart, variant: Variant = PLAIN) -> None:
        super().__init__()
        self.attention_norm = norm(settings, variant)
        self.attention = attention
        self.feed_forward_norm = norm(settings, variant)
        self.feed_forward = feed_forward

    def forward(self, x_BLD: Tensor, inputs: LayerInputs, cache: LayerCache | None = None) -> tuple[Tensor, SideOutputs]:
        attended_BLD, outputs = self.attention(self.attention_norm(x_BLD), inputs, cache)
        x_BLD = x_BLD + attended_BLD
        fed_BLD, more = self.feed_forward(self.feed_forward_norm(x_BLD), inputs, cache)
        return x_BLD + fed_BLD, {**outputs, **more}


class Trunk(nn.Module):
    """The language model: embeddings, blocks, a last normalisation, the output matrix."""

    joins_rows = True
    """Whether the caches of several requests can be joined into one."""
    new_beside = SideChannel
    """Makes a value for the argument `beside` of `forward` and `hidden`."""

    def __init__(
        self,
        settings: schema.Transformer,
        vocab_size: int,
        parts: Parts,
        initial_std: float = INITIAL_STD,
        reader: Any = None,
        variant: Variant = PLAIN,
    ) -> None:
        """`reader` encodes the texts that cross-attention layers attend to: see `cross_attention.py`."""
        super().__init__()
        self.reader = reader
        self.memory: Any = None
        """Episodes that the layers above `memory.layer` attend to: see `episodic_memory.py`."""
        width = settings.hidden_size
        self.vocab_size, self.max_seq_len, self.dropout = vocab_size, settings.max_seq_len, settings.dropout
        self.checkpointing = False
        self.packed_output: Callable[[Tensor], Tensor] | None = None
        """A faster product with the output matrix: see `kernels/cpu_packing.py`."""
        self.packed_blocks: PackedBlocks | None = None
        """Computes all blocks for a few new tokens, where that is faster: see `packed/compiled_blocks.py`."""
        self.first, self.last, self.depth = 0, settings.num_layers, settings.num_layers
        """The layers [first, last) that this object has, of how many: see `only`."""
        self.dense_layers = 0
        """The first layers, which give no side outputs that are losses."""
        self.loss_weights: dict[str, float] = {}
        """Weights of the side outputs that are losses; all others are figures."""
        self.token_embedding, self.embedding_scale = TokenEmbedding(vocab_size, width), variant.embedding_scale
        learned = settings.positions == "learned"
        self.position_embedding = nn.Embedding(settings.max_seq_len, width) if learned else None
        self.rotary = None if learned else Rotary(settings.max_seq_len, variant.head_size or _rotary_head_size(settings))
        self.blocks: Any = nn.ModuleList(Block(settings, *parts(layer), variant) for layer in range(settings.num_layers))
        self.norm = norm(settings, variant)
        self.output = None if settings.tied_embeddings else nn.Linear(width, vocab_size, bias=False)
        initialise(self, initial_std, initial_std / math.sqrt(2 * len(self.blocks)))

    def forward(self, input_ids_BL: Tensor, **given: Any) -> Tensor:
        """Logits [B, L, V]. `given`: see `hidden`."""
        logits_BLV, beside = self.project(self.hidden(input_ids_BL, **given)), given.get("beside")
        if beside is not None and beside.ahead is not None:  # outside of this method the output matrix may be sharded
            beside.ahead = LookAhead(self.project(beside.ahead.value), True, beside.ahead.weight)
        return logits_BLV

    def hidden(
        self,
        input_ids_BL: Tensor,
        *,
        cache: KeyValueCache | None = None,
        attention_mask: Tensor | None = None,
        beside: SideChannel | None = None,
        document_lengths: Tensor | None = None,
    ) -> Tensor:
        """Input of the output matrix: logits = hidden @ output_weight.T. `attention_mask` [B, S] is 0 at padding, on either side, the
        tokens in the cache counted. `beside` has further inputs, and collects the side outputs. `document_lengths` [B, M]: tokens of each
        document of packed rows, which do not attend to each other."""
        x_BLD = self.embed(input_ids_BL, cache.length if cache else 0, attention_mask, beside, document_lengths)
        given: dict[str, Any] = {"cache": cache, "attention_mask": attention_mask, "beside": beside, "document_lengths": document_lengths}
        return self.norm(self.through(x_BLD, input_ids_BL, **given))

    def through(
        self,
        x_BLD: Tensor,
        input_ids_BL: Tensor,
        *,
        cache: KeyValueCache | None = None,
        attention_mask: Tensor | None = None,
        beside: SideChannel | None = None,
        document_lengths: Tensor | None = None,
    ) -> Tensor:
        """The residual stream after these layers. Losses of a part of the layers are scaled by its share of all layers."""
        past, length = cache.length if cache else 0, input_ids_BL.shape[1]
        if document_lengths is None:
            inputs = _layer_inputs(input_ids_BL, self._turns(past, length, attention_mask if cache else None), past, attention_mask)
        else:
            inputs = self._packed_inputs(x_BLD, input_ids_BL, packed_documents(document_lengths, length))
        context = self._context(input_ids_BL, beside, cache)
        inputs = inputs._replace(counted_BL=beside.counted_BL if beside else None, context=context, past=past, real_BS=attention_mask)
        if cache is not None and self.packed_blocks is not None and self.memory is None:
            through_BLD = self.packed_blocks(self.blocks, x_BLD, inputs, cache)
            if through_BLD is not None:
                return through_BLD
        outputs: list[SideOutputs] = []
        embedded_BLD, inputs = x_BLD, self._remember(-1, x_BLD, inputs, cache)
        for i, block in enumerate(self.blocks.children()):
            if self.checkpointing and cache is None and torch.is_grad_enabled():
                x_BLD, own = recomputed(block, block, x_BLD, inputs)
            else:
                x_BLD, own = block(x_BLD, inputs, cache.layers[i] if cache else None)
            outputs.append(own)
            inputs = self._remember(i, x_BLD, inputs, cache)
        if beside is not None:
            self.record_outputs(outputs, beside)
            self.look_ahead(embedded_BLD, x_BLD, inputs, beside)
        return x_BLD

    def look_ahead(self, embedded_BLD: Tensor, x_BLD: Tensor, inputs: LayerInputs, beside: SideChannel) -> None:
        """Predict more than the next token; a hook for mixtures. `embedded_BLD`, `x_BLD`: before the first layer, after the last."""

    def expect_documents_apart(self) -> None:
        """Raises ShoalError if the model cannot keep the documents of packed rows apart."""
        if self.reader is not None or self.memory is not None:
            raise ShoalError(
                "data.packing: a model with cross-attention, retrieval or an episodic memory reads for a row as a whole, and a packed row "
                "holds several documents: set data.packing to stream, or data.batching to dynamic"
            )

    def _packed_inputs(self, x_BLD: Tensor, input_ids_BL: Tensor, documents: PackedDocuments) -> LayerInputs:
        """The inputs of the layers for packed rows."""
        turns = self.rotary.turns_SP2[documents.positions_BL] if self.rotary is not None else None
        dropout = max(getattr(part, "weights_dropout", 0.0) for part in self.modules()) if self.training else 0.0
        autocast = torch.get_autocast_dtype(x_BLD.device.type) if torch.is_autocast_enabled(x_BLD.device.type) else x_BLD.dtype
        if needs_mask(documents, autocast, dropout):
            return LayerInputs(turns, documents.mask(), False, input_ids_BL)
        return LayerInputs(turns, None, True, input_ids_BL, documents=documents)

    def only(self, first: int, last: int) -> Self:
        """The layers [first, last) alone, without what stands before and after them. Parameters are shared, and keep their names."""
        part = self._with("rotary")
        part.blocks = nn.ModuleDict({str(layer): self.blocks[layer] for layer in range(first, last)})
        part.first, part.last = first, last
        return part

    def ends(self, before: bool, after: bool) -> Self:
        """The embeddings (`before`), the last normalisation and the output matrix (`after`), as in `only`. A tied matrix is in both."""
        names = ["token_embedding"] if before or self.output is None else []
        return self._with(*names, *(["position_embedding"] if before else []), *(["norm", "output"] if after else []))

    def _with(self, *names: str) -> Self:
        """A copy that has only these modules. A plain shallow copy would share the table of modules with the original."""
        part = copy.copy(self)
        part._modules = {name: module for name, module in self._modules.items() if name in names}
        return part

    def _remember(self, layer: int, x_BLD: Tensor, inputs: LayerInputs, cache: KeyValueCache | None) -> LayerInputs:
        """At the memory's layer: add recalled episodes to the context of the layers above, and in training let the memory record."""
        if self.memory is None or layer != self.memory.layer:
            return inputs
        if self.training and cache is None and torch.is_grad_enabled():
            self.memory.watch(x_BLD)
        return inputs._replace(context=self.memory.recall(x_BLD, inputs, cache))

    def _context(self, input_ids_BL: Tensor, beside: SideChannel | None, cache: KeyValueCache | None) -> EncodedContext | None:
        """The encoded context of the batch. In decoding it is kept in the cache until a new one is given."""
        if self.reader is None:
            return None
        if beside is not None and beside.columns:
            context: EncodedContext = self.reader.read(beside.columns, self.token_embedding)
            if beside.rows_R is not None:
                assert cache is not None
                context = cache.context.with_rows(beside.rows_R, context)
        elif cache is not None:
            return cache.context
        elif self.training:
            context = self.reader.read_nothing(input_ids_BL, self.token_embedding)
        else:
            return None
        if cache is not None:
            cache.context = context
        return context

    def record_outputs(self, outputs: list[SideOutputs], beside: SideChannel) -> None:
        """Collect the side outputs of the layers: losses as their mean over the layers, scalars as figures of their layer."""
        for name, weight in self.loss_weights.items():
            values = [own[name] for own in outputs if name in own]
            if values:
                beside.losses.append(AuxiliaryLoss(name, weight, torch.stack(values).sum() / (self.depth - self.dense_layers)))
        for layer, own in enumerate(outputs, self.first):
            beside.figures |= {f"layers/{layer}/{name}": value.detach() for name, value in own.items() if not value.dim()}

    def embed(
        self,
        input_ids_BL: Tensor,
        past: int = 0,
        attention_mask: Tensor | None = None,
        beside: SideChannel | None = None,
        document_lengths: Tensor | None = None,
        positions_BL: Tensor | None = None,
    ) -> Tensor:
        """Embed the tokens: the residual stream before the first layer. `positions_BL`: their positions, where rows differ in them."""
        length = past + input_ids_BL.shape[1]
        if length > self.max_seq_len and positions_BL is None:
            self._check_length(_longest_row(length, attention_mask if past else None, document_lengths))
        x_BLD: Tensor
        if beside is not None and self.output is None and self.token_embedding.can_lend:
            x_BLD, beside.output_weight = self.token_embedding(input_ids_BL, lends=True)
        else:
            x_BLD = self.token_embedding(input_ids_BL)
        if self.embedding_scale != 1:
            x_BLD = x_BLD * self.embedding_scale
        if self.position_embedding is not None:
            # With padding on the left, positions count from the first real token. The module is called in both cases: processes that shard
            # its weights must gather them in the same order, whether or not their rows are padded
            if positions_BL is not None:
                positions = positions_BL
            elif document_lengths is not None:
                positions = packed_documents(document_lengths, length).positions_BL
            elif attention_mask is not None:
                positions = _positions(attention_mask)[:, past:]
            else:
                positions = torch.arange(past, length, device=x_BLD.device)
            x_BLD = x_BLD + self.position_embedding(positions)
        if torch.is_autocast_enabled(x_BLD.device.type):
            # The residual stream is read and written more than anything else: half the bytes
            x_BLD = x_BLD.to(torch.get_autocast_dtype(x_BLD.device.type))
        return F.dropout(x_BLD, self.dropout, self.training)

    def _check_length(self, length: int) -> None:
        if length > self.max_seq_len:
            raise ShoalError(f"a sequence of {length} tokens does not fit the model (model.max_seq_len: {self.max_seq_len})")

    def _turns(self, past: int, length: int, mask_BS: Tensor | None) -> Tensor | None:
        """Rotary cosines and sines of the new tokens. With a cache, rows that are padded differently have positions of their own."""
        if self.rotary is None or mask_BS is None:
            return self.rotary(past, length) if self.rotary is not None else None
        return self.rotary.turns_SP2[_positions(mask_BS)[:, past:]]

    @property
    def output_weight(self) -> Tensor:
        return self.token_embedding.weight if self.output is None else self.output.weight

    def last_hidden(self, x_BLD: Tensor) -> Tensor:
        """The last hidden states, as `hidden` gives them, from the residual stream after the last layer."""
        found_BLD: Tensor = self.norm(x_BLD)
        return found_BLD

    def logits(self, x_BLD: Tensor) -> Tensor:
        """Logits [B, L, V] from the residual stream after the last layer."""
        return self.project(self.last_hidden(x_BLD))

    def project(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states."""
        return F.linear(hidden, self.output_weight) if self.packed_output is None else self.packed_output(hidden)

    def gradient_checkpointing(self, enabled: bool) -> None:
        """Whether the backward pass computes each block's activations again instead of keeping them."""
        self.checkpointing = enabled

    def new_cache(self, capacity: int) -> KeyValueCache:
        return KeyValueCache(len(self.blocks), capacity)

    def next_logits(
        self, input_ids_BL: Tensor, cache: KeyValueCache, attention_mask: Tensor | None = None, beside: SideChannel | None = None
    ) -> Tensor:
        """Logits [B, V] of the next token; these tokens are appended to the cache. `beside`: texts to read from now on."""
        last_BD = self.hidden(input_ids_BL, cache=cache, attention_mask=attention_mask, beside=beside)[:, -1]
        value_head: Any = getattr(self, "value_head", None)
        if value_head is not None:
            cache.value_B = value_head(last_BD)
        return self.project(last_BD)


def initialise(network: nn.Module, std: float, last_std: float) -> None:
    """As GPT-2: the output projections onto the residual stream have a smaller standard deviation."""
    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, BlockPart):
            module.initialise(std)
    for part in network.modules():
        if isinstance(part, BlockPart):
            for weight in part.last_weights():
                nn.init.normal_(weight, std=last_std)


class RmsNorm(nn.RMSNorm):
    """In half precision torch's fused kernel wants the weight in the type of the input."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class OnePlusRmsNorm(nn.RMSNorm):
    """RMS normalisation that multiplies by 1 + weight, in float32: half precision has few numbers near 1."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).to(x.dtype)


class FullPrecisionLinear(nn.Linear):
    """A linear layer of a router or gate: its weights are not rounded, whatever the precision of other layers."""

    full_precision = True


def norm(settings: schema.Transformer, variant: Variant = PLAIN) -> nn.Module:
    """RMSNorm has no bias to begin with."""
    if variant.one_plus_norms:
        return OnePlusRmsNorm(settings.hidden_size, eps=settings.norm_eps)
    if settings.norm == "rms":
        return RmsNorm(settings.hidden_size, eps=settings.norm_eps)
    return nn.LayerNorm(settings.hidden_size, eps=settings.norm_eps, bias=settings.bias)


def _rotary_head_size(settings: schema.Transformer) -> int:
    size = settings.hidden_size // settings.num_heads
    if size % 2:
        raise ShoalError(
            f"rotary positions turn pairs, but a head has {size} numbers (model.hidden_size {settings.hidden_size} / "
            f"model.num_heads {settings.num_heads}); choose sizes with an even quotient, or model.positions: learned"
        )
    return size


def _positions(attention_mask: Tensor) -> Tensor:
    """Positions [B, S], counted from the first real token."""
    return (attention_mask.long().cumsum(1) - 1).clamp(min=0)


def _longest_row(length: int, attention_mask: Tensor | None, document_lengths: Tensor | None) -> int:
    """Tokens of the longest row or document. Rows of a cache may have fewer tokens than the cache has columns."""
    if document_lengths is not None:
        return int(document_lengths.max())
    return length if attention_mask is None else int(attention_mask.sum(1).max())


def _layer_inputs(input_ids_BL: Tensor, turns: Tensor | None, past: int, attention_mask: Tensor | None) -> LayerInputs:
    """Attention masks. None where the kernel's causal mask suffices, or where each token attends to all before it."""
    length = input_ids_BL.shape[1]
    few = length == 1 or (length <= _ONE_BY_ONE and input_ids_BL.device.type == "cpu")
    if attention_mask is None and (past == 0 or few):
        return LayerInputs(turns, None, past == 0, input_ids_BL)
    if attention_mask is not None and past and length == 1:  # a token that was just written is no padding, and sees all before it
        return LayerInputs(turns, attention_mask.bool()[:, None, None, :], False, input_ids_BL)
    seen_LS = torch.ones(length, past + length, dtype=torch.bool, device=input_ids_BL.device).tril(past)
    if attention_mask is None:
        return LayerInputs(turns, seen_LS, False, input_ids_BL)
    # Padding attends to itself: a row that attends to nothing would give NaN
    itself_LS = seen_LS.triu(past)
    return LayerInputs(turns, (seen_LS & attention_mask.bool()[:, None, None, :]) | itself_LS, False, input_ids_BL)
