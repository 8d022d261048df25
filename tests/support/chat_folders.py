"""Small tokenizers with the chat templates of real model families, as folders; generated conversations; templates with marks by hand."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

_TEXT = "the quick brown fox asks what a lazy dog answers, and 12 friends of theirs say: well, well.\n\nHello there! How are you?\n" * 3


class Family(NamedTuple):
    """The template and the special tokens of a model family."""

    template: str
    marked: str
    """The same with generation marks around what the assistant writes, the end of its turn included."""
    specials: tuple[str, ...]
    config: dict[str, Any]
    """Of tokenizer_config.json."""
    starts_with: str = ""
    """What the tokenizer puts before every text."""
    has_system: bool = True


SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] "
    "+ '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% endif %}"
)
_SMOLLM2_MARKED = SMOLLM2.replace(
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}",
    "{{'<|im_start|>' + message['role'] + '\n'}}{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] "
    "+ '<|im_end|>' }}{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}",
)
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
    "{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
_LLAMA3_MARKED = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% if loop.index0 == 0 %}{{ bos_token }}{% endif %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}{% else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
_QWEN_HEAD = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' }}
    {%- endif %}
    {{- "\\n\\n# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first)
        or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' }}MARK{{- message.content + '<|im_end|>' }}END{{- '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role + '\\n' }}{% generation %}
        {%- if message.content %}
            {{- message.content + '\\n' }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '<tool_call>\\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
_PLAIN_TURN = "{{- message.content + '<|im_end|>' }}"
_MARKED_TURN = (
    "{% if message.role == 'assistant' %}{% generation %}" + _PLAIN_TURN + "{% endgeneration %}{% else %}" + _PLAIN_TURN + "{% endif %}"
)
QWEN25 = _QWEN_HEAD.replace("MARK", "").replace("END{{", "{{").replace("{% generation %}", "").replace("{% endgeneration %}", "")
_QWEN25_MARKED = _QWEN_HEAD.replace("MARK" + _PLAIN_TURN + "END", _MARKED_TURN)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{% for message in "
    "messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate "
    "user/assistant/user/assistant/...') }}{% endif %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set "
    "role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
_GEMMA_MARKED = GEMMA.replace(
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}",
    "{{ '<start_of_turn>' + role + '\n' }}{% if role == 'model' %}{% generation %}{{ message['content'] | trim + '<end_of_turn>' }}"
    "{% endgeneration %}{% else %}{{ message['content'] | trim + '<end_of_turn>' }}{% endif %}{{ '\n' }}",
)
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CHATML_MARKED = CHATML.replace(
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}",
    "{{'<|im_start|>' + message['role'] + '\n'}}{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] "
    "+ '<|im_end|>' }}{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}",
)
QWEN3 = """{%- set ns = namespace(searching=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" and ns.searching %}
        {%- set ns.searching = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {%- set thought = message.content.split('</think>')[0].split('<think>')[-1].strip('\\n') if '</think>' in message.content else '' %}
        {%- if loop.index0 > ns.last_query_index %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought + '\\n</think>\\n\\n' + content + '<|im_end|>\\n' }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""As in Qwen 3, earlier answers are rendered without their thoughts."""
_IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_LLAMA_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
FAMILIES = {
    "smollm2": Family(SMOLLM2, _SMOLLM2_MARKED, _IM, {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}),
    "llama3": Family(
        LLAMA3, _LLAMA3_MARKED, _LLAMA_TOKENS, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}, "<|begin_of_text|>"
    ),
    "qwen25": Family(QWEN25, _QWEN25_MARKED, _IM, {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}),
    "gemma": Family(
        GEMMA,
        _GEMMA_MARKED,
        ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
        {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>", "add_bos_token": True},
        "<bos>",
        has_system=False,
    ),
    "chatml": Family(CHATML, _CHATML_MARKED, _IM, {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}),
}


def write_tokenizer(folder: Path, name: str, *, template: str | None = None, in_config: bool = False, trim_offsets: bool = False) -> Path:
    """The files of a tokenizer with the special tokens of a family. `template`: another template than the family's; `in_config`: where
    older models have it; `trim_offsets`: the places of tokens leave out white space before them, as in Llama 3."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    family = FAMILIES[name]
    folder.mkdir(parents=True, exist_ok=True)
    if name == "gemma":  # SentencePiece's form: spaces are letters, and unknown letters bytes
        made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        made.normalizer = normalizers.Replace(" ", "▁")
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        initial, extra = [], [f"<0x{number:02X}>" for number in range(256)]
    else:
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        made.decoder = decoders.ByteLevel()
        made.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
        initial, extra = sorted(pre_tokenizers.ByteLevel.alphabet()), []
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=[*family.specials, *extra], initial_alphabet=initial, show_progress=False, min_frequency=2
    )
    made.train_from_iterator([_TEXT], trainer)
    if name == "gemma":  # the trainer made the bytes special, and in the model they are ordinary
        content = json.loads(made.to_str())
        content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in family.specials]
        made = Tokenizer.from_str(json.dumps(content))
    if family.starts_with:
        token = family.starts_with
        made.post_processor = processors.TemplateProcessing(
            single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, made.token_to_id(token))]
        )
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096, **family.config}
    wanted = family.template if template is None else template
    if in_config:
        config["chat_template"] = wanted
    else:
        (folder / "chat_template.jinja").write_text(wanted, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=3, ensure_ascii=False), encoding="utf-8")
    return folder


def conversations(count: int, *, has_system: bool = True, seed: int = 0) -> list[list[dict[str, str]]]:
    """Conversations of up to four exchanges, some with a system message, with letters of several scripts and unusual white space."""
    draw = random.Random(seed)
    words = ["the", "quick", "fox", "answers", "12", "3.5", "naïve", "語", "😀", "don't", "{}", "<b>", "", "line\nbreak", "\t", "é́"]

    def text() -> str:
        return " ".join(draw.choices(words, k=draw.randint(1, 12))) + draw.choice(["", ".", "?", "\n", "  "])

    found = []
    for _ in range(count):
        messages = [{"role": "system", "content": text()}] if has_system and draw.random() < 0.4 else []
        for _ in range(draw.randint(1, 4)):
            messages += [{"role": "user", "content": text()}, {"role": "assistant", "content": text()}]
        found.append(messages)
    return found
