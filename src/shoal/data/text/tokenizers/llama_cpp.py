"""The vocabulary of a tokenizer in the form that llama.cpp reads from a GGUF file.

llama.cpp has its own code for a few kinds of vocabularies. Byte-level BPE (`gpt2`) needs the name of the rule that cuts a text into words;
SentencePiece (`llama`) merges by the scores of pieces instead of a list of merges.

Holds: a vocabulary is written only if llama.cpp's code gives the same ids; all others are refused with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shoal.data.text.tokenizers.for_transformers import library_form
from shoal.data.text.tokenizers.interface import Tokenizer
from shoal.errors import ShoalError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
"""Types of tokens, as llama.cpp numbers them."""
_SPACE = "▁"
_PREPEND = {"type": "Prepend", "prepend": _SPACE}
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
_MERGE_THAT_NEVER_APPLIES = "<|endoftext|> <|endoftext|>"
"""llama.cpp demands a list of merges that is not empty."""
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(False)]}


class WordRule(NamedTuple):
    """How a byte-level vocabulary cuts a text into words, as the `tokenizers` library describes it."""

    pre_tokenizer: dict[str, Any]
    ignore_merges: bool = False
    """A word of the vocabulary is found as a whole, whatever its merges give."""


WORD_RULES = {
    "gpt-2": WordRule(_byte_level(True)),
    "smollm": WordRule({"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _byte_level(True)]}),
    "llama-bpe": WordRule(_split(_WORDS % "{1,3}"), ignore_merges=True),
    "qwen2": WordRule(_split(_WORDS % "")),
}
"""By llama.cpp's name, `tokenizer.ggml.pre`."""
_SAME_RULES = {
    **dict.fromkeys(("llama3", "llama-v3", "falcon3", "pixtral"), "llama-bpe"),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2"), "qwen2"),
    **dict.fromkeys(("starcoder", "refact", "command-r", "codeshell"), "smollm"),
    **dict.fromkeys(("mpt", "olmo", "phi-2", "jina-es", "jina-de"), "gpt-2"),
}
"""Other names that llama.cpp has for these rules."""


def with_word_rule(content: dict[str, Any], name: str) -> dict[str, Any] | None:
    """The content of a tokenizer.json with the rule that llama.cpp calls by this name; None: the rule is not known."""
    rule = WORD_RULES.get(_SAME_RULES.get(name, name))
    if rule is None:
        return None
    return content | {"pre_tokenizer": rule.pre_tokenizer, "model": content["model"] | {"ignore_merges": rule.ignore_merges}}


class LlamaCppVocabulary(NamedTuple):
    """The fields below `tokenizer` of a GGUF file."""

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float] | None
    merges: list[str] | None
    ids: dict[str, int]
    """Special ids: bos, eos, unknown, padding."""
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    template: str | None
    notes: list[str]
    """What llama.cpp does otherwise in rare texts, for the user."""


def vocabulary_for_llama_cpp(tokenizer: Tokenizer, size: int) -> LlamaCppVocabulary:
    """`size`: rows of the model's embedding. Raises ShoalError where llama.cpp would give other ids."""
    content = library_form(tokenizer).as_json()
    parts: dict[str, Any] = json.loads(content) if content is not None else {}
    if (parts.get("model") or {}).get("type") != "BPE" or tokenizer.vocab_size > size:
        raise _refusal(tokenizer, "it is no BPE vocabulary" if tokenizer.vocab_size <= size else "it has more ids than the model has rows")
    model: dict[str, Any] = parts["model"]
    vocabulary: dict[str, int] = model["vocab"]
    added: list[dict[str, Any]] = parts.get("added_tokens") or []
    merges = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    notes = [f"llama.cpp ignores {name} of the token {token['content']}" for token in added for name in _ignored(token)]
    pieces = bool(model.get("byte_fallback"))
    pre, prefix = _sentence_pieces(tokenizer, parts, vocabulary, merges) if pieces else (_rule(tokenizer, parts, notes), False)
    tokens, types = _tokens(vocabulary, added, model.get("unk_token") if pieces else None, size)
    add_bos, add_eos = _added_around(tokenizer, parts)
    return LlamaCppVocabulary(
        model="llama" if pieces else "gpt2",
        pre=pre,
        tokens=tokens,
        types=types,
        scores=_scores(tokens, vocabulary, merges) if pieces else None,
        merges=None if pieces else [" ".join(merge) for merge in merges] or [_MERGE_THAT_NEVER_APPLIES],
        ids=_special_ids(tokenizer, tokens),
        add_bos=add_bos,
        add_eos=add_eos,
        add_space_prefix=prefix,
        template=tokenizer.chat_templates.get("default"),
        notes=notes,
    )


def _refusal(tokenizer: Tokenizer, reason: str) -> ShoalError:
    return ShoalError(f"llama.cpp does not read the vocabulary of the tokenizer {tokenizer.name} to the same ids: {reason}")


def _ignored(token: Mapping[str, Any]) -> list[str]:
    return [name for name in ("lstrip", "rstrip", "single_word") if token.get(name)]


def _rule(tokenizer: Tokenizer, parts: Mapping[str, Any], notes: list[str]) -> str:
    """llama.cpp's name of the rule that cuts texts into words."""
    found = _without_defaults(parts.get("pre_tokenizer"))
    normalizer = parts.get("normalizer")
    if normalizer not in (None, {"type": "NFC"}):
        raise _refusal(tokenizer, f"its normalizer is {_short(normalizer)}")
    if normalizer is not None:
        notes.append("llama.cpp does not normalise texts to NFC, as this tokenizer does: give it composed letters")
    ignores = bool(parts["model"].get("ignore_merges"))
    plain = not any(parts["model"].get(name) for name in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"))
    if found == _without_defaults(_byte_level(False)) and not parts["model"]["merges"]:
        return "gpt-2"  # without merges no rule changes the ids
    for name, rule in WORD_RULES.items():
        if found == _without_defaults(rule.pre_tokenizer) and ignores == rule.ignore_merges and plain:
            return name
    raise _refusal(
        tokenizer, f"it cuts texts into words by a rule that is none of {', '.join(WORD_RULES)}: {_short(parts.get('pre_tokenizer'))}"
    )


def _short(part: Any) -> str:
    return json.dumps(part)[:200]


def _without_defaults(part: Any) -> Any:
    """A pre-tokenizer without the settings that change no ids."""
    if isinstance(part, dict):
        kept = {key: _without_defaults(value) for key, value in part.items() if key != "trim_offsets"}
        inner = kept.get("pretokenizers")
        return inner[0] if kept.get("type") == "Sequence" and isinstance(inner, list) and len(inner) == 1 else kept
    return [_without_defaults(one) for one in part] if isinstance(part, list) else part


def _sentence_pieces(
    tokenizer: Tokenizer, parts: Mapping[str, Any], vocabulary: Mapping[str, int], merges: Sequence[tuple[str, ...]]
) -> tuple[str, bool]:
    """The name of the rule, and whether a space is put before a text. Raises ShoalError where scores cannot replace the merges."""
    steps = parts.get("normalizer") or {"type": "Sequence", "normalizers": []}
    steps = steps["normalizers"] if steps.get("type") == "Sequence" else [steps]
    before = parts.get("pre_tokenizer")
    metaspace = before if isinstance(before, dict) and before.get("type") == "Metaspace" else {}
    if metaspace.get("replacement") == _SPACE and not metaspace.get("split", True) and not steps:
        prefix = metaspace.get("prepend_scheme", "always") != "never"
    elif _splits_nothing(before) and steps in ([_PREPEND, _REPLACE], [_REPLACE]):
        prefix = _PREPEND in steps
    else:
        raise _refusal(tokenizer, f"it writes spaces by a rule of its own: {_short(parts.get('normalizer'))}, {_short(before)}")
    missing = [f"<0x{byte:02X}>" for byte in range(256) if f"<0x{byte:02X}>" not in vocabulary]
    if missing or parts["model"].get("ignore_merges"):
        raise _refusal(tokenizer, f"it has no piece {missing[0]}" if missing else "it finds whole words before it merges")
    known, groups = set(merges), [left + right for left, right in merges]
    changes = [piece for number, piece in enumerate(groups) if number == 0 or groups[number - 1] != piece]
    special = {token["content"] for token in parts.get("added_tokens") or []}
    splits = ((piece[:cut], piece[cut:]) for piece in vocabulary if piece not in special for cut in range(1, len(piece)))
    lacking = any(pair not in known and pair[0] in vocabulary and pair[1] in vocabulary for pair in splits)
    if len(changes) != len(set(changes)) or lacking:
        raise _refusal(tokenizer, "its merges are not those that scores of pieces give, as SentencePiece has them")
    return "default", prefix


def _splits_nothing(before: Any) -> bool:
    """Whether a pre-tokenizer finds nothing to cut: spaces have been replaced before it."""
    split_at_space = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    return before in (None, split_at_space)


def _tokens(
    vocabulary: Mapping[str, int], added: Sequence[Mapping[str, Any]], unknown: str | None, size: int
) -> tuple[list[str], list[int]]:
    """The text and the type of every id. Ids without a token get a name."""
    tokens, types = [f"[PAD{number}]" for number in range(size)], [_UNUSED] * size
    for text, number in vocabulary.items():
        is_byte = unknown is not None and len(text) == len("<0x00>") and text.startswith("<0x") and text.endswith(">")
        tokens[number], types[number] = text, _BYTE if is_byte else _NORMAL
    for token in added:
        tokens[token["id"]], types[token["id"]] = token["content"], _CONTROL if token.get("special") else _USER_DEFINED
    if unknown is not None and unknown in vocabulary:
        types[vocabulary[unknown]] = _UNKNOWN
    return tokens, types


def _scores(tokens: Sequence[str], vocabulary: Mapping[str, int], merges: Sequence[tuple[str, ...]]) -> list[float]:
    """Scores in the order of the merges: llama.cpp merges the two neighbours whose joined piece has the highest."""
    ranks: dict[str, int] = {}
    for left, right in merges:
        ranks.setdefault(left + right, len(ranks))
    return [-float(ranks.get(token, len(ranks))) if token in vocabulary else 0.0 for token in tokens]


def _added_around(tokenizer: Tokenizer, parts: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether the tokenizer puts its first special id before a text, and its end after it. Raises ShoalError for more than these."""
    opening, processor = tokenizer.opening, parts.get("post_processor")
    if len(opening) > 1:
        raise _refusal(tokenizer, f"it puts {len(opening)} ids before every text")
    steps = processor.get("processors", [processor]) if isinstance(processor, dict) else []
    templates = [step for step in steps if isinstance(step, dict) and step.get("type") == "TemplateProcessing"]
    ends = [step for step in templates if step.get("single") and "SpecialToken" in step["single"][-1] and len(step["single"]) > 1]
    return bool(opening), bool(ends) and "Sequence" not in ends[0]["single"][-1]


def _special_ids(tokenizer: Tokenizer, tokens: Sequence[str]) -> dict[str, int]:
    numbers = {text: number for number, text in enumerate(tokens)}
    named = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    special = tokenizer.special_tokens
    found = {kind: numbers[text] for kind, key in named.items() if (text := special.get(key)) is not None and text in numbers}
    if tokenizer.eos_id is not None:
        found["eos"] = tokenizer.eos_id
    if tokenizer.opening:
        found["bos"] = tokenizer.opening[0]
    if "eos" in found:
        found.setdefault("bos", found["eos"])  # llama.cpp assumes 11 otherwise
    return found
