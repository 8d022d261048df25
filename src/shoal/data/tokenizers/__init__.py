"""Text to token ids and back: bytes, characters, trained or pretrained vocabularies, behind one small interface."""

from shoal.data.tokenizers.interface import Tokenizer
from shoal.data.tokenizers.load import load_tokenizer

__all__ = ["Tokenizer", "load_tokenizer"]
