"""Models: networks and their sizes."""

from typing import ClassVar, Literal

from shoal.config.fields import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, PositiveShare, Section, Share
from shoal.config.parts import Part


class Model(Part, noun="model"):
    """The network or networks that are trained. Built by a function of settings, run and data shapes; it returns them by name."""

    learns: ClassVar[tuple[str, ...]] = ()
    """Tasks that the model can learn; the first is the default."""


class Mlp(Model, built_by="shoal.models.mlp:players"):
    """Fully connected layers, each normalised, with ReLU between them, for images and other flat inputs."""

    kind: Literal["mlp"] = "mlp"
    learns = ("classification",)
    input_dim: PositiveInt | None = None
    """Numbers per sample; null: as many as the data has."""
    hidden_sizes: tuple[PositiveInt, ...] = (128,)
    """Width of each hidden layer."""
    output_dim: PositiveInt | None = None
    """Number of classes; null: as many as the data has."""


class Lstm(Model, built_by="shoal.models.lstm:players"):
    """A recurrent language model."""

    kind: Literal["lstm"] = "lstm"
    learns = ("language-modelling", "reward", "dpo", "ppo")
    vocab_size: PositiveInt | None = None
    """Number of tokens; null: as many as the tokenizer has."""
    hidden_size: PositiveInt = 128
    """Width of the embedding and of the recurrent state."""
    num_layers: PositiveInt = 1
    """Recurrent layers."""
    dropout: Share = 0.0
    """Share of activations dropped between layers while training."""


class Transformer(Model, shared=True):
    """Settings that gpt and moe share."""

    learns = ("language-modelling", "reward", "dpo", "ppo")
    vocab_size: PositiveInt | None = None
    """Number of tokens; null: as many as the tokenizer has."""
    hidden_size: PositiveInt = 256
    """Width of the residual stream."""
    num_layers: PositiveInt = 6
    """Transformer blocks."""
    num_heads: PositiveInt = 4
    """Attention heads; must divide hidden_size."""
    num_kv_heads: PositiveInt | None = None
    """Key and value heads (grouped-query attention); null: one per attention head."""
    intermediate_size: PositiveInt | None = None
    """Width of the feed-forward layer; null: 4 × hidden_size."""
    max_seq_len: PositiveInt = 128
    """Longest sequence, in tokens."""
    positions: Literal["learned", "rotary"] = "learned"
    """Position encoding."""
    feed_forward: Literal["gelu", "swiglu"] = "gelu"
    """Activation of the feed-forward layer."""
    norm: Literal["layer", "rms"] = "layer"
    """Normalisation before each layer."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the variance in every normalisation."""
    bias: bool = True
    """Bias terms in linear layers and normalisations."""
    qk_norm: Literal["none", "head", "width"] = "none"
    """RMS normalisation of queries and keys before the rotary positions: each head by itself (as Qwen 3), or all heads together (as
    OLMoE)."""
    tied_embeddings: bool = True
    """Use the embedding matrix as output matrix too."""
    dropout: Share = 0.0
    """Share of activations dropped while training."""


class Gpt(Transformer, built_by="shoal.models.gpt:players"):
    """A decoder-only transformer."""

    kind: Literal["gpt"] = "gpt"


class Experts(Section):
    """Mixture of experts in the feed-forward layers."""

    count: PositiveInt = 8
    """Experts per layer."""
    per_token: PositiveInt = 2
    """Experts that see each token."""
    intermediate_size: PositiveInt | None = None
    """Width of each expert; null: model.intermediate_size."""
    shared_size: PositiveInt | None = None
    """Width of the shared expert, which sees every token beside the chosen experts; null: there is none. Several shared experts are one
    expert of their widths together."""
    shared_gate: bool = False
    """Multiply the output of the shared expert by a sigmoid gate of the token."""
    dense_layers: NonNegativeInt = 0
    """The first layers, which have one feed-forward layer of model.intermediate_size instead of experts."""
    capacity_factor: PositiveFloat | None = 1.25
    """Capacity of each expert while training, as a multiple of an even share; tokens beyond it are dropped and counted. Null: no limit."""
    router: Literal["switch", "gshard", "hash", "stochastic", "sigmoid-bias", "expert-choice", "soft"] = "switch"
    """How experts are chosen for a token: the most probable (switch), the two most probable, the second at random (gshard), by a fixed
    table of token ids (hash), drawn by probability (stochastic), or by scores with biases that follow the loads (sigmoid-bias).
    expert-choice and soft depend on later tokens and are refused for causal models."""
    scores: Literal["softmax", "sigmoid"] | None = None
    """How the logits of the router become gates; null: sigmoid for the router sigmoid-bias, softmax for the others."""
    normalise_gates: bool | None = None
    """Divide the gates of a token's experts by their sum; null: yes, if a token has several experts."""
    aux_loss_weight: NonNegativeFloat = 0.01
    """Weight of the load-balancing loss, which is the mean over the layers. A deep model that drops many tokens needs more: 0.01 for each
    layer. The router hash has no such loss."""
    z_loss_weight: NonNegativeFloat = 0.0
    """Weight of the loss that keeps a router's logits small: the mean square of their logsumexp."""
    bias_step: PositiveFloat = 0.001
    """Change of the router's biases after each step (sigmoid-bias)."""


class MixtureOfHeads(Section):
    """A router activates a share of the attention heads for each token."""

    enabled: bool = False
    active_share: PositiveShare = 0.75
    """Share of the heads that are active for a token, shared heads included."""
    shared_heads: NonNegativeInt | None = None
    """Heads that are active for every token; null: a quarter of them, at least one."""
    balance_weight: NonNegativeFloat = 0.01
    """Weight of the loss that spreads the tokens over the routed heads."""


class MixtureOfActivations(Section):
    """A learned gate blends relu, gelu, silu and mish in the feed-forward layers."""

    enabled: bool = False


class CrossAttention(Section):
    """Attention to an encoded context beside the input: a context text, retrieved passages, or episodes of a memory."""

    enabled: bool = False
    every_layers: PositiveInt = 2
    """One layer in this many attends to the context, counted back from the last; also for retrieval and memory."""
    encoder_layers: PositiveInt = 1
    """Bidirectional layers that encode the context."""


class Retrieval(Section):
    """Passages found by dense retrieval, fused through cross-attention."""

    enabled: bool = False
    passages: str | None = None
    """File with one passage a line, or a folder of texts; null: the training text."""
    index: str | None = None
    """Folder of an index that `shoal index` built; null: the run builds one from the passages and keeps it in output_dir/retrieval."""
    encoder: Literal["minilm", "words"] = "minilm"
    """How passages are compared: `minilm` by meaning (needs shoal[rag]), `words` by their words. An existing index has its own encoder."""
    top_k: PositiveInt = 4
    """Passages found for each chunk."""
    chunk_size: PositiveInt = 64
    """Tokens of a chunk. Passages that are found for a chunk are read by the following chunks."""
    passage_words: PositiveInt = 64
    """Words of a passage in an index that the run builds."""
    passage_tokens: PositiveInt = 128
    """Tokens that the model reads from the beginning of each passage."""
    max_passages: PositiveInt = 100_000
    """Most passages in an index that the run builds; the first ones of the texts."""


class EpisodicMemory(Section):
    """A bounded memory of hidden states of past sequences: kept by importance, recalled by similarity, replayed in training."""

    enabled: bool = False
    capacity: PositiveInt = 1024
    """Episodes kept."""
    top_k: PositiveInt = 4
    """Episodes recalled for each chunk."""
    chunk_size: PositiveInt = 64
    """Tokens of a chunk. Episodes that are recalled for a chunk are read by the following chunks."""
    vectors: PositiveInt = 4
    """Vectors of an episode: a sequence is cut into this many stretches, and each vector is the mean hidden state of one."""
    replay_rate: Share = 0.1
    """Replayed sequences, as a share of a batch."""
    replay_weight: PositiveFloat = 1.0
    """Weight of a replayed token in the loss, relative to a new one."""


class Mtp(Section):
    """Multi-token prediction: in training one more block predicts the token after the next. Exports and servers leave it out."""

    enabled: bool = False
    loss_weight: PositiveFloat = 0.3
    """Weight of its loss."""


class Moe(Transformer, built_by="shoal.models.moe:players"):
    """A decoder-only transformer with mixture-of-experts layers."""

    kind: Literal["moe"] = "moe"
    hidden_size: PositiveInt = 768
    num_layers: PositiveInt = 16
    num_heads: PositiveInt = 12
    intermediate_size: PositiveInt | None = None
    """Width of the feed-forward layers, and of each expert without a width of its own; null: 4 × hidden_size."""
    max_seq_len: PositiveInt = 2048
    positions: Literal["learned", "rotary"] = "rotary"
    feed_forward: Literal["gelu", "swiglu"] = "swiglu"
    norm: Literal["layer", "rms"] = "rms"
    bias: bool = False
    attention_dropout: Share = 0.0
    """Share of attention weights dropped while training."""
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of the initial weights."""
    experts: Experts = Experts()
    mtp: Mtp = Mtp()
    mixture_of_heads: MixtureOfHeads = MixtureOfHeads()
    mixture_of_activations: MixtureOfActivations = MixtureOfActivations()
    cross_attention: CrossAttention = CrossAttention()
    retrieval: Retrieval = Retrieval()
    episodic_memory: EpisodicMemory = EpisodicMemory()


class Dcgan(Model, built_by="shoal.models.dcgan:players"):
    """A generator and a discriminator of convolutions (players `generator` and `discriminator`)."""

    kind: Literal["dcgan"] = "dcgan"
    learns = ("gan",)
    latent_dim: PositiveInt = 100
    """Length of the noise vector."""
    generator_features: PositiveInt = 64
    """Feature maps of the generator's last hidden layer; earlier ones have more."""
    discriminator_features: PositiveInt = 64
    """Feature maps of the discriminator's first layer; later ones have more."""
    image_size: PositiveInt = 64
    """Height and width of an image."""
    channels: PositiveInt | None = None
    """1 for grey, 3 for colour; null: as in the data."""


class Lora(Section):
    """LoRA: train small low-rank matrices beside frozen weights."""

    rank: PositiveInt = 8
    """Rank of the matrices."""
    alpha: PositiveFloat = 16.0
    """Scale of their output, divided by the rank, or by its square root with `rslora`."""
    rslora: bool = False
    """Rank-stabilised LoRA: alpha is divided by the square root of the rank, so that a high rank does not weaken the update."""
    dora: bool = False
    """DoRA: learn the norm of each row of the changed weight apart from its direction; slower, and often better at a low rank."""
    dropout: Share = 0.0
    """Share of their input dropped while training."""
    target_modules: tuple[str, ...] = ()
    """Names of the layers that get one; empty: the library's choice for the model, and of a mixture the layers of the attention."""


class HuggingFace(Model, built_by="shoal.models.huggingface.build:players"):
    """Any causal language model of the Hugging Face hub, or a local copy of one."""

    kind: Literal["huggingface"] = "huggingface"
    learns = ("language-modelling", "reward", "dpo", "ppo")
    pretrained: str
    """Name on the hub, or a folder: the architecture and the tokenizer."""
    weights: str | None = None
    """Name or folder of the weights; null: the same as `pretrained`."""
    from_scratch: bool = False
    """Start from random weights instead of the pretrained ones."""
    num_layers: PositiveInt | None = None
    """Expected number of transformer blocks; another number is an error. null: not checked."""
    lora: Lora | None = None
    """Fine-tune with LoRA; null: train all weights."""
    load: Literal["fp32", "bf16", "int8", "nf4"] = "fp32"
    """Storage of the frozen weights under LoRA: 4, 2, about 1 or about 0.56 bytes each. int8 has a scale per row, nf4 (QLoRA's 4-bit type)
    one per 64 weights; embeddings and the output matrix are then bf16. Experts of mixtures may be bf16 alone. Adapters,
    their gradients and the computation are unchanged."""
    layers: Literal["auto", "own", "original"] = "auto"
    """Whose layers train: Shoal's own, which are faster and compute the same (Llama, Mistral, Qwen 2 and 3, Gemma, GPT-2, Mixtral,
    Qwen2-MoE, Qwen3-MoE, OLMoE), or those of transformers. auto: own where they compute the same, also under LoRA; a line at the start says
    why those of transformers are kept.
    Exports are the same with both."""


class LiveModel(Model, built_by="shoal.models.build:refuse_live_model"):
    """A network that a Python program passes: `shoal.train(model=…)`."""

    kind: Literal["live"] = "live"


class FactoryModel(Model, built_by="shoal.models.build:refuse_live_model"):
    """A network that a Python function returns."""

    kind: Literal["factory"] = "factory"
    function: str
    """`module:function`, called without arguments; it returns a torch.nn.Module."""
    loss: str | None = None
    """`module:function`, called with the model and a batch; it returns the loss. null: the usual loss for such a batch."""
