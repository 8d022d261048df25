"""The data of a run: images, text, streams and mixtures, as batches whose position can be saved and restored."""

from shoal.data.fake_data import is_local, make_fake_data
from shoal.data.feed import ShardFeed
from shoal.data.fingerprint import fingerprint, local_fingerprint
from shoal.data.interfaces import Batch, Feed, Samples, SampleStream
from shoal.data.load_data import load
from shoal.data.loaded_data import Data, Info
from shoal.data.retrieval.augmented_samples import RetrievalSamples, RetrievalStream
from shoal.data.retrieval.finder import PassageFinder
from shoal.data.retrieval.load_index import open_finder, retrieval_of
from shoal.data.text.preferences import PreferencePairs, Prompt, answer_samples, read_prompts
from shoal.data.text.run_tokenizer import PromptEncoder
from shoal.data.text.sources import reads_context
from shoal.data.text.tokenizers import StreamedText, Tokenizer, TokenTexts, load_tokenizer
from shoal.data.unit_feed import UnitBatches

__all__ = [
    "Batch",
    "Data",
    "Feed",
    "Info",
    "PassageFinder",
    "PreferencePairs",
    "Prompt",
    "PromptEncoder",
    "RetrievalSamples",
    "RetrievalStream",
    "SampleStream",
    "Samples",
    "ShardFeed",
    "StreamedText",
    "TokenTexts",
    "Tokenizer",
    "UnitBatches",
    "answer_samples",
    "fingerprint",
    "is_local",
    "load",
    "load_tokenizer",
    "local_fingerprint",
    "make_fake_data",
    "open_finder",
    "read_prompts",
    "reads_context",
    "retrieval_of",
]
