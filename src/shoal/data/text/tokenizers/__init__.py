"""Text to token ids and back: bytes, characters, trained or pretrained vocabularies, behind one small interface."""

from shoal.data.text.tokenizers.interface import Tokenizer
from shoal.data.text.tokenizers.lookup import load_tokenizer
from shoal.data.text.tokenizers.streaming import StreamedText, TokenTexts

__all__ = ["StreamedText", "TokenTexts", "Tokenizer", "load_tokenizer"]
