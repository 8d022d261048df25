"""Vocabularies of the `tokenizers` library: a tokenizer.json, a GPT-2 style folder, or byte-level BPE trained here."""

from __future__ import annotations

import hashlib
import json
import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import get_worker_info

from shoal.data.packages import import_optional
from shoal.data.text.tokenizers.files import read_files, token_named
from shoal.data.text.tokenizers.interface import Ids, Learned, Spans, Tokenizer
from shoal.errors import ShoalError
from shoal.untrusted.tokenizer_files import check_tokenizer, check_tokenizer_file, check_tokenizer_folder, panic_is_an_error

END_OF_TEXT = "<|endoftext|>"
_KNOWN_ENDS = (END_OF_TEXT, "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "[SEP]", "<end_of_turn>")
_PIECE = 1_000_000
_CHUNK = 16_000_000
_LINE_END = re.compile(r"(?<=\S)\n(?=\S)")
BPE_VOCABULARY = 4096
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_CACHE_FORMAT = 1
"""Version of the cached file, a part of its name: one of another version is not found, and the tokenizer is trained again."""


class LibraryBasedTokenizer(Tokenizer):
    """A tokenizer of another library. Special tokens are never added, and are recognised inside a text."""

    _tokenizer: Any

    @property
    def opening(self) -> tuple[int, ...]:
        plain, with_specials = self.encode("a"), self._with_specials("a")
        return tuple(with_specials[: with_specials.index(plain[0])]) if plain and plain[0] in with_specials else ()

    def decode(self, ids: Iterable[int]) -> str:
        with panic_is_an_error(self.name):
            return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True))

    @abstractmethod
    def _with_specials(self, text: str) -> list[int]: ...


class LibraryTokenizer(LibraryBasedTokenizer):
    """A tokenizer of the `tokenizers` library. `config`: the content of its tokenizer_config.json."""

    def __init__(self, tokenizer: Any, *, name: str, config: Mapping[str, Any], files: Mapping[str, bytes] | None = None) -> None:
        check_tokenizer(tokenizer, name)
        self._tokenizer = tokenizer
        self.name, self.files = name, files or {}
        eos, pad = token_named(config, "eos_token"), token_named(config, "pad_token")
        vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self._eos = eos if eos in vocabulary else next((end for end in _KNOWN_ENDS if end in vocabulary), None)
        self._pad = pad if pad in vocabulary else None
        self.eos_id = vocabulary[self._eos] if self._eos is not None else None
        self.pad_id = vocabulary[self._pad] if self._pad is not None else self.eos_id or 0

    @property
    def special_tokens(self) -> dict[str, str]:
        named = {"eos_token": self._eos, "pad_token": self._pad}
        return super().special_tokens or {name: token for name, token in named.items() if token is not None}

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        pieces = [_pieces(text) for text in texts]
        flat = [piece for text in pieces for piece in text]
        ids = (np.asarray(encoding.ids, np.int32) for some in _in_chunks(flat) for encoding in self._encodings(some))
        return [np.concatenate([next(ids) for _ in text]) for text in pieces]

    def encode_learned(self, texts: Sequence[tuple[str, Spans]]) -> list[tuple[Ids, Learned]]:
        whole = [tuple(spans) == ((0, len(text)),) for text, spans in texts]
        plain = iter(self.encode_batch([text for (text, _), one in zip(texts, whole, strict=True) if one]))
        some = [(text, spans) for (text, spans), one in zip(texts, whole, strict=True) if not one]
        partly = iter(self._partly(some))
        return [(ids := next(plain), np.ones(len(ids), np.bool_)) if one else next(partly) for one in whole]

    def _partly(self, texts: Sequence[tuple[str, Spans]]) -> Iterator[tuple[Ids, Learned]]:
        spans = iter(one for _, one in texts)
        for some in _in_chunks([text for text, _ in texts]):
            for encoding in self._encodings(some, with_places=True):
                yield np.asarray(encoding.ids, np.int32), learned_tokens(encoding.offsets, next(spans))

    def as_json(self) -> str:
        return str(self._tokenizer.to_str())

    def _encodings(self, texts: list[str], with_places: bool = False) -> list[Any]:
        # A loader process may be a fork, and the library's threads do not survive a fork.
        with panic_is_an_error(self.name):
            if get_worker_info() is not None:
                return [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]
            encode = self._tokenizer.encode_batch if with_places else self._tokenizer.encode_batch_fast
            return list(encode(texts, add_special_tokens=False))

    def _with_specials(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def _made_files(self) -> dict[str, bytes]:
        """Files that transformers can read, too."""
        if "tokenizer.json" in self.files or "tokenizer_config.json" in self.files:
            return {}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self._eos, "pad_token": self._pad, "name": self.name}
        made = {"tokenizer.json": self._tokenizer.to_str(pretty=True), "tokenizer_config.json": json.dumps(config, indent=2)}
        return {name: text.encode() for name, text in made.items()}


class PretrainedTokenizer(LibraryBasedTokenizer):
    """A tokenizer that only transformers can read: a folder without a tokenizer.json."""

    def __init__(self, tokenizer: Any, name: str, files: Mapping[str, bytes]) -> None:
        if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
            check_tokenizer(backend, name)
        self._tokenizer = tokenizer
        self.name, self.files = name, files
        self.vocab_size = max(max(tokenizer.get_vocab().values()) + 1, len(tokenizer))
        self.eos_id: int | None = tokenizer.eos_token_id
        self.pad_id: int = next((i for i in (tokenizer.pad_token_id, self.eos_id) if i is not None), 0)

    def as_json(self) -> str | None:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return None if backend is None else str(backend.to_str())

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        # verbose=False: its warning about long texts does not apply, since texts are cut to sequences later.
        with panic_is_an_error(self.name):
            encoded = self._tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
        return [np.asarray(ids, np.int32) for ids in encoded["input_ids"]]

    def _with_specials(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])

    def _made_files(self) -> dict[str, bytes]:
        return {}


def learned_tokens(places: Sequence[tuple[int, int]], spans: Spans) -> Learned:
    """Which tokens have a letter within the ranges. `places`: the letters of each token; some libraries leave out the white space before
    them, which belongs to the token all the same."""
    if not places:
        return np.zeros(0, np.bool_)
    begin, end = np.asarray(places, np.int64).T
    begin = np.minimum(begin, np.concatenate([[0], np.maximum.accumulate(end)[:-1]]))
    learned = np.zeros(len(end), np.bool_)
    for first, after in spans:
        learned |= (begin < after) & (end > first)
    return learned


def _in_chunks(texts: Sequence[str]) -> Iterator[list[str]]:
    """Texts in lists of some megabytes, since the library's encodings take many times the memory of the ids."""
    chunk: list[str] = []
    size = 0
    for text in texts:
        chunk.append(text)
        size += len(text)
        if size >= _CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _pieces(text: str) -> list[str]:
    """A long text in parts, to bound the memory and to use several threads.

    It is cut only at line breaks without other white space around them, which no token of a vocabulary spans.
    """
    pieces, start = [], 0
    while len(text) - start > _PIECE and (cut := _LINE_END.search(text, start + _PIECE)):
        pieces.append(text[start : cut.end()])
        start = cut.end()
    return [*pieces, text[start:]]


def from_json(file: Path, name: str) -> LibraryTokenizer:
    """Load a tokenizer.json. Its end-of-text token is in the tokenizer_config.json of the same folder, or is a well-known one."""
    tokenizer = _read(file)
    config = _config(file.parent)
    _add_tokens(tokenizer, config)
    files = read_files(file.parent) if file.name == "tokenizer.json" else {}
    files = files | {"tokenizer.json": file.read_bytes()}
    return LibraryTokenizer(tokenizer, name=token_named(config, "name") or name, config=config, files=files)


def _read(file: Path) -> Any:
    """The tokenizer of a tokenizer.json. Raises ShoalError."""
    check_tokenizer_file(file)
    try:
        tokenizer = import_optional("tokenizers").Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises a bare Exception
        raise ShoalError(f"{file} is not a tokenizer of the `tokenizers` library: {error}") from error
    tokenizer.no_truncation()  # a tokenizer.json may contain both
    tokenizer.no_padding()
    return tokenizer


def _add_tokens(tokenizer: Any, config: Mapping[str, Any]) -> None:
    """Add the tokens that only tokenizer_config.json lists, as transformers does."""
    listed = config.get("added_tokens_decoder")
    known = tokenizer.get_vocab(with_added_tokens=True)
    added_token = import_optional("tokenizers").AddedToken
    for _, token in sorted(listed.items(), key=_number) if isinstance(listed, dict) else ():
        if isinstance(token, dict) and isinstance(content := token.get("content"), str) and content and content not in known:
            flags = {name: token[name] for name in _TOKEN_FLAGS if isinstance(token.get(name), bool)}
            tokenizer.add_tokens([added_token(content, **flags)])


def _number(item: tuple[str, Any]) -> int:
    return int(item[0]) if item[0].isdecimal() else 0


def _config(folder: Path) -> dict[str, Any]:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).is_file():
            check_tokenizer_file(folder / name)
            try:
                config = json.loads((folder / name).read_text(encoding="utf-8"))
            except (OSError, ValueError, RecursionError) as error:
                raise ShoalError(f"{folder / name} is damaged: {error}") from None
            if isinstance(config, dict) and (name.startswith("special") or config.get("eos_token")):
                return config
    return {}


def from_vocabulary_and_merges(folder: Path, name: str) -> LibraryTokenizer:
    """A folder in GPT-2's style: vocab.json and merges.txt, byte-level BPE."""
    library = import_optional("tokenizers")
    check_tokenizer_folder(folder)
    try:
        model = library.models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    except Exception as error:
        raise ShoalError(f"{folder}: vocab.json and merges.txt are no byte-level BPE: {error}") from error
    tokenizer = _byte_level(library, model)
    ends = [end for end in _KNOWN_ENDS if tokenizer.token_to_id(end) is not None]
    tokenizer.add_special_tokens(ends)
    return LibraryTokenizer(tokenizer, name=name, config=_config(folder), files=read_files(folder))


def _byte_level(library: Any, model: Any) -> Any:
    tokenizer = library.Tokenizer(model)
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    return tokenizer


def train_bpe(texts: Iterable[str], cache_dir: Path | None = None) -> LibraryTokenizer:
    """Byte-level BPE of up to 4096 ids, trained on the texts. Short texts give fewer. With `cache_dir` it is trained once per text."""
    texts = list(texts)
    if not any(texts):
        raise ShoalError("the tokenizer `bpe` needs a text to be trained on, and there is none")
    cached = cache_dir / f"bpe-{_fingerprint(texts)}.json" if cache_dir else None
    if cached is not None and cached.is_file():
        return LibraryTokenizer(_read(cached), name="bpe", config={"eos_token": END_OF_TEXT})
    library = import_optional("tokenizers")
    tokenizer = _byte_level(library, library.models.BPE())
    trainer = library.trainers.BpeTrainer(
        vocab_size=BPE_VOCABULARY,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([piece for text in texts for piece in _pieces(text)], trainer)
    if cached is not None:
        cached.parent.mkdir(parents=True, exist_ok=True)
        unfinished = cached.with_suffix(".part")
        tokenizer.save(str(unfinished))
        unfinished.replace(cached)
    return LibraryTokenizer(tokenizer, name="bpe", config={"eos_token": END_OF_TEXT})


def _fingerprint(texts: Sequence[str]) -> str:
    digest = hashlib.sha256(f"{_CACHE_FORMAT} {BPE_VOCABULARY}".encode())
    for text in texts:
        digest.update(hashlib.sha256(text.encode("utf-8")).digest())
    return digest.hexdigest()[:20]
