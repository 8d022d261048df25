"""The training data: sources, batching, loading."""

from typing import ClassVar, Literal, Union

from shoal.config.fields import NonNegativeInt, PositiveFloat, PositiveInt, Section
from shoal.config.parts import Part

CHAT_TEMPLATES = ("chatml", "llama3", "qwen", "plain")
"""Chat templates that come with Shoal, for models that have none."""


class DataSource(Part, noun="data source"):
    """Where samples come from. Built by a function of settings, run and `DataRequest`; it returns `Data` or a list of `TextPart`."""

    has_pairs: ClassVar[bool] = False
    """Whether it holds pairs of a chosen and a rejected answer."""

    @property
    def gives(self) -> str:
        """`text` or `images`."""
        return "text"


class Builtin(DataSource, built_by="shoal.data.load_data:load_builtin"):
    """Real data that comes with Python packages, so that everything runs with no download."""

    kind: Literal["builtin"] = "builtin"
    name: Literal["digits", "python-source", "zen"] = "digits"
    """`digits`: 1,797 handwritten digits of 8 × 8; `python-source`: the text of Python's standard library; `zen`: the Zen of Python, 64
    times, which a small network memorises in a minute."""

    @property
    def gives(self) -> str:
        return "images" if self.name == "digits" else "text"


class Mnist(DataSource, built_by="shoal.data.images.mnist:load_mnist"):
    """Files in MNIST's idx format."""

    kind: Literal["mnist"] = "mnist"
    gives = "images"
    path: str = "data/mnist"
    """Folder with the four idx files, gzipped or not; downloaded there when missing."""


class Images(DataSource, built_by="shoal.data.images.source:load_images"):
    """A folder or a zip file of images, such as CelebA."""

    kind: Literal["images"] = "images"
    gives = "images"
    path: str = "data/images"
    """Folder, or .zip or .npz file."""
    download: str | None = None
    """Data set of the hub to download when nothing is at the path."""
    serve: bool = False
    """Send the images to workers that lack them, through the database (transport postgres, strategy workunits)."""


class Text(DataSource, built_by="shoal.data.text.sources:open_files"):
    """Text files (.txt, .jsonl, gzipped or not), or a folder of them."""

    kind: Literal["text"] = "text"
    path: str
    """File or folder."""
    text_field: str | None = None
    """Field of a JSON line that holds the text; null: detected."""
    context_field: str | None = None
    """Field with a context text for cross-attention; null: `context`, where there is one and model.cross_attention.enabled."""


class HubDataset(DataSource, built_by="shoal.data.text.sources:open_hub"):
    """A data set of the Hugging Face hub, or a local copy of one."""

    kind: Literal["huggingface"] = "huggingface"
    name: str
    """Name on the hub, or a folder."""
    subset: str | None = None
    """Configuration name, or a slice such as `train[:1000]`."""
    text_field: str | None = None
    """Column that holds the text; null: detected."""
    context_field: str | None = None
    """Column with a context text for cross-attention; null: `context`, where there is one and model.cross_attention.enabled."""


class Wikitext(DataSource, built_by="shoal.data.text.sources:open_wiki"):
    """WikiText-2 (Merity et al.)."""

    kind: Literal["wikitext"] = "wikitext"
    path: str | None = None
    """Folder with its files; null: from the hub."""


class Snli(DataSource, built_by="shoal.data.text.sources:open_pairs"):
    """The Stanford Natural Language Inference corpus, as text."""

    kind: Literal["snli"] = "snli"
    path: str | None = None
    """Folder with its files; null: from the hub."""


class Preferences(DataSource, built_by="shoal.data.text.load_text:load_preferences"):
    """Pairs of a chosen and a rejected answer, one JSON object a line: texts, or lists of messages, which a chat template renders; with a
    field `prompt`, or as whole dialogues that share their beginning. The task language-modelling learns the chosen answers. For the loss
    kto also single answers: `prompt`, `completion` and `label`, which is true for a good answer."""

    kind: Literal["preferences"] = "preferences"
    has_pairs = True
    path: str
    """File with the pairs, or a folder of such files."""
    chosen_field: str = "chosen"
    """Field of the better answer."""
    rejected_field: str = "rejected"
    """Field of the worse answer."""
    context_field: str | None = None
    """Field with a context text for cross-attention; null: `context`, where there is one and model.cross_attention.enabled."""


class MixturePart(Section):
    """One source of a mixture."""

    source: Union[Builtin, Text, HubDataset, Wikitext, Snli]
    weight: PositiveFloat | None = None
    """How often it is drawn, relative to the others; null: in proportion to its size."""


class Mixture(DataSource, built_by="shoal.data.text.sources:open_mixture"):
    """Several sources, drawn from by weight."""

    kind: Literal["mixture"] = "mixture"
    parts: tuple[MixturePart, ...]


class LiveData(DataSource, built_by="shoal.data.user_data:refuse_live_data"):
    """Data that a Python program passes: `shoal.train(data=…)`."""

    kind: Literal["live"] = "live"
    gives = "samples"


class FactoryData(DataSource, built_by="shoal.data.user_data:refuse_live_data"):
    """Data that a Python function returns."""

    kind: Literal["factory"] = "factory"
    gives = "samples"
    function: str
    """`module:function`, called without arguments; it returns a list, a data set or another iterable."""
    eval_function: str | None = None
    """The same for held-out data; null: none."""
    collate: str | None = None
    """`module:function`, called with a list of samples; it returns a batch. null: samples are stacked."""


class Mixing(Section):
    """How the sources of a mixture, or the files of a folder of texts, are balanced."""

    enabled: bool = False
    """Draw by weight; otherwise the sources follow each other."""
    temperature: PositiveFloat = 1.0
    """Weights are taken to the power 1/temperature: above 1 lifts the small sources."""


class Loader(Section):
    """How batches reach the device."""

    num_workers: NonNegativeInt = 0
    """Processes that load ahead; 0 loads in the training process."""
    drop_last: bool = True
    """Drop a last batch that is not full."""
    pin_memory: bool = True
    """Use pinned memory on the way to a GPU."""
    prefetch_factor: PositiveInt = 2
    """Batches each process loads ahead."""
    persistent_workers: bool = True
    """Keep the processes between epochs."""


class Data(Section):
    """Where samples come from and how they become batches."""

    source: DataSource | None = None
    """null: a built-in source that fits the model."""
    tokenizer: str | None = None
    """`bytes`, `bpe` (trained on the data), a name on the hub, or a path; null: the model's own, else bytes."""
    chat_template: str | None = None
    """Template that renders conversations: `chatml`, `llama3`, `qwen`, `plain`, or a file; null: the one that the model came with."""
    chat_time: str | None = None
    """The time that templates read with strftime_now, as 2026-11-19T10:00:00; null: when the run begins. It stays the same for the run."""
    learn_from: Literal["assistant", "completion", "all"] = "assistant"
    """What the model learns to write. `assistant`: the assistant's turns of a conversation, and the completion after a prompt.
    `completion`: all that follows the prompt; where rows do not separate it, the last turn of the assistant. `all`: the prompts, too."""
    sequence_length: PositiveInt | None = None
    """Tokens in a training sequence; null: model.max_seq_len; for a Hugging Face model 128."""
    batching: Literal["packed", "dynamic", "padded"] = "packed"
    """`packed`: several texts in a sequence, see packing; `dynamic`: padded to the longest of the batch; `padded`: to the full length."""
    packing: Literal["documents", "stream"] | None = None
    """What fills packed sequences. `documents`: whole texts, each with positions of its own and attention inside it only; none is cut but
    one that is longer than a sequence (see truncation). `stream`: all texts joined and cut to length; a token attends to the texts before
    its own. null: `documents` for conversations, otherwise `stream`."""
    padding_side: Literal["right", "left"] = "right"
    """Where padding goes."""
    truncation: bool = True
    """Cut a text that is too long; otherwise it is split into several samples. Texts that are packed as a stream are all split."""
    streaming: bool = False
    """Read as a stream instead of loading all of it."""
    shuffle_buffer: PositiveInt = 10_000
    """Samples a stream is shuffled over."""
    shuffle_seed: NonNegativeInt | None = None
    """Seed of the order of samples; null: the run's seed."""
    reshuffle_each_epoch: bool = True
    """A new order each epoch; otherwise the same again."""
    max_samples: PositiveInt | None = None
    """Most samples to use, training and evaluation together; null: all."""
    max_train_samples: PositiveInt | None = None
    """Most samples to train on; null: all."""
    max_eval_samples: PositiveInt | None = None
    """Most samples to evaluate on; null: all."""
    mixing: Mixing = Mixing()
    loader: Loader = Loader()
