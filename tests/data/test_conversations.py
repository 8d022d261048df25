"""Conversations become the ids that transformers gives them, and the model learns the assistant's turns of them alone."""

from __future__ import annotations

import copy
import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.data import Data, load, load_tokenizer
from shoal.data.interfaces import IGNORED
from shoal.data.text.chat_template import ChatTemplate, RenderRequest, read_template, template_of
from shoal.data.text.conversations import reader_of
from shoal.data.text.documents import Conversation
from shoal.data.text.encoding import Encoding, Tokens, encode
from shoal.data.text.samples import text_samples
from shoal.errors import ShoalError
from tests.data.conftest import MakeRun
from tests.support.chat_folders import FAMILIES, QWEN3, conversations, write_tokenizer

Message = dict[str, Any]
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}
]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln <b>"}}}
WITH_TOOLS: list[Message] = [
    {"role": "user", "content": "How is it in Köln?"},
    {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"sky": "blue"}'},
    {"role": "assistant", "content": "Fine."},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokenizers")
    for name, family in FAMILIES.items():
        write_tokenizer(root / name, name)
        write_tokenizer(root / f"{name}-marked", name, template=family.marked)
    write_tokenizer(root / "qwen3", "qwen25", template=QWEN3)
    return root


def theirs(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


def encoding_of(folder: Path, **more: Any) -> Encoding:
    tokenizer = load_tokenizer(str(folder))
    return Encoding(tokenizer, 4096, "dynamic", template=template_of(tokenizer, "2026-11-19T10:00:00"), **more)


def tokens_of(chats: list[list[Message]], encoding: Encoding, prompt: int | None = None, tools: Any = None) -> list[list[Tokens]]:
    documents = [Conversation(chat, tools, prompt, where=f"row {number}").document() for number, chat in enumerate(chats)]
    return encode(documents, encoding, [(7, 7)] * len(chats))


def learned_text(tokens: Tokens, tokenizer: Any) -> str:
    return str(tokenizer.decode(tokens.ids[tokens.learned].tolist(), skip_special_tokens=False))


@pytest.mark.parametrize("name", FAMILIES)
def test_200_conversations_have_the_ids_and_the_mask_of_transformers(name: str, folders: Path) -> None:
    """The mask is that of a copy of the template with generation marks by hand, whether Shoal reads the marks or finds the turns."""
    reference = theirs(folders / f"{name}-marked")
    original = theirs(folders / name)
    chats: Any = conversations(200, has_system=FAMILIES[name].has_system)
    found = {place: tokens_of(chats, encoding_of(folders / place)) for place in (name, f"{name}-marked")}
    for number, chat in enumerate(chats):
        expected = reference.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        assert expected["input_ids"] == original.apply_chat_template(chat)["input_ids"]
        for tokens in (found[name][number], found[f"{name}-marked"][number]):
            (one,) = tokens
            assert one.ids.tolist() == expected["input_ids"]
            assert one.learned.astype(int).tolist() == expected["assistant_masks"], learned_text(one, reference)


def test_a_turn_that_begins_with_a_space_is_learned_whole(tmp_path: Path) -> None:
    """transformers loses this turn and all that follow where the places of tokens leave out white space."""
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": " fox\n"}] * 2
    folder = write_tokenizer(tmp_path, "chatml", trim_offsets=True)
    ((tokens,),) = tokens_of([chat], encoding_of(folder))
    assert learned_text(tokens, theirs(folder)) == " fox\n<|im_end|>" * 2


def test_a_tokenizer_without_places_marks_the_same_tokens(folders: Path) -> None:
    from shoal.data.text.tokenizers.interface import Tokenizer

    chats: Any = conversations(20, seed=1)
    encoding = encoding_of(folders / "chatml")
    expected = tokens_of(chats, encoding)
    for chat, (one,) in zip(chats, expected, strict=True):
        text = encoding.template.render([RenderRequest(chat)])[0].text  # type: ignore[union-attr]
        ends = [at + len("<|im_end|>") for at in range(len(text)) if text.startswith("<|im_end|>", at)]
        starts = [at + len("assistant\n") for at in range(len(text)) if text.startswith("assistant\n", at)]
        spans = [(start, next(end for end in ends if end > start)) for start in starts]
        ((ids, learned),) = Tokenizer.encode_learned(encoding.tokenizer, [(text, spans)])
        assert ids.tolist() == one.ids.tolist()
        assert learned.tolist() == one.learned.tolist()


def test_tools_and_their_answers_are_rendered_as_transformers_renders_them(folders: Path) -> None:
    reference = theirs(folders / "qwen25-marked")
    expected = reference.apply_chat_template(WITH_TOOLS, tools=TOOLS, return_dict=True, return_assistant_tokens_mask=True)
    as_text: Any = copy.deepcopy(WITH_TOOLS)
    as_text[1]["tool_calls"][0]["function"]["arguments"] = json.dumps(CALL["function"]["arguments"])  # type: ignore[index]
    for row in ({"messages": WITH_TOOLS, "tools": TOOLS}, {"messages": as_text, "tools": json.dumps(TOOLS)}):
        reader = reader_of(row)
        assert reader is not None
        ((tokens,),) = encode([reader(row, "here").document()], encoding_of(folders / "qwen25"), [()])
        assert tokens.ids.tolist() == expected["input_ids"]
        assert tokens.learned.astype(int).tolist() == expected["assistant_masks"]
    assert "Köln <b>" in reference.decode(expected["input_ids"]), "letters are not escaped, as they are in HTML"


def test_a_template_that_rewrites_earlier_turns_gives_a_text_for_each(folders: Path) -> None:
    chat = [
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n1"},
        {"role": "user", "content": "two?"},
        {"role": "assistant", "content": "<think>\nso\n</think>\n\n2"},
    ]
    reference = theirs(folders / "qwen3")
    (texts,) = tokens_of([chat], encoding_of(folders / "qwen3"))
    assert [one.ids.tolist() for one in texts] == [reference.apply_chat_template(chat[:count])["input_ids"] for count in (2, 4)]
    assert [learned_text(one, reference) for one in texts] == [
        f"<think>\n{word}\n</think>\n\n{n}<|im_end|>" for n, word in ((1, "hm"), (2, "so"))
    ]
    single, (last,) = tokens_of([chat], encoding_of(folders / "qwen3", learn_from="completion"))[0], texts[1:]
    assert [one.ids.tolist() for one in single] == [last.ids.tolist()]
    assert np.array_equal(single[0].learned, last.learned)


def test_a_turn_that_does_not_begin_as_the_generation_prompt_is_refused(tmp_path: Path) -> None:
    template = FAMILIES["chatml"].template.replace("<|im_start|>assistant\n' }}", "<|im_start|>assistant\n<think>\n' }}")
    folder = write_tokenizer(tmp_path, "chatml", template=template)
    with pytest.raises(ShoalError, match="row 0: with this chat template the assistant's turn does not begin as the generation prompt"):
        tokens_of(conversations(1), encoding_of(folder))
    assert tokens_of(conversations(1), encoding_of(folder, learn_from="all"))[0][0].learned.all()


CHAT = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
    {"role": "tool", "content": "e"},
    {"role": "assistant", "content": "f"},
]


@pytest.mark.parametrize("marked", ["", "-marked"])
@pytest.mark.parametrize(
    ("learn_from", "prompt", "expected"),
    [
        ("assistant", None, "b<|im_end|>d<|im_end|>f<|im_end|>"),
        ("completion", None, "f<|im_end|>"),
        ("assistant", 3, "d<|im_end|>f<|im_end|>"),
        ("completion", 3, "d<|im_end|>\n<|im_start|>tool\ne<|im_end|>\n<|im_start|>assistant\nf<|im_end|>"),
    ],
)
def test_what_is_learned(learn_from: Any, prompt: int | None, expected: str, marked: str, folders: Path) -> None:
    folder = folders / f"chatml{marked}"
    ((tokens,),) = tokens_of([CHAT], encoding_of(folder, learn_from=learn_from), prompt)
    assert learned_text(tokens, theirs(folder)) == expected


ROWS: dict[str, tuple[Message, list[Message], int | None]] = {
    "messages": ({"messages": CHAT[:2], "id": 1}, CHAT[:2], None),
    "null fields": ({"messages": [one | {"tool_calls": None, "name": None} for one in CHAT[:2]]}, CHAT[:2], None),
    "parts": ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, CHAT[1]]}, CHAT[:2], None),
    "pair": ({"prompt": CHAT[:1], "completion": CHAT[1:2]}, CHAT[:2], 1),
    "sharegpt": ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, CHAT[:2], None),
    "alpaca": ({"instruction": "a", "input": "", "output": "b"}, CHAT[:2], 1),
    "alpaca with input": (
        {"instruction": "x", "input": "y", "output": "b", "text": "?"},
        [{"role": "user", "content": "x\n\ny"}, CHAT[1]],
        1,
    ),
}


@pytest.mark.parametrize("form", ROWS)
def test_the_columns_say_that_rows_are_conversations(form: str) -> None:
    row, messages, prompt = ROWS[form]
    reader = reader_of(row)
    assert reader is not None
    found = reader(row, "here")
    assert (found.messages, found.prompt_messages) == (messages, prompt)


def test_rows_of_texts_are_no_conversations() -> None:
    for row in ({"text": "a"}, {"prompt": "a", "completion": "b"}, {"messages": "a"}, {"messages": []}, {"instruction": "a"}):
        assert reader_of(row) is None


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "wizard", "content": "a"}], "must have a `role`.*'wizard'"),
        ([{"role": "user"}], "`content` that is a text, and one has NoneType"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "a part that is no text"),
        ([{"role": "user", "content": "a"}, "b"], "must be an object, and one is str"),
        ([{"from": "alien", "value": "a"}], "'alien'"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], "are not JSON"),
        ([{"role": "assistant", "tool_calls": ["f"]}], "a function with a `name`"),
        ([{"role": "user", "content": "a"}] * 10_001, "at most 10,000"),
    ],
)
def test_messages_are_claims(messages: list[Any], reason: str) -> None:
    reader = reader_of({"messages": [{"role": "user", "content": "a"}]})
    assert reader is not None
    with pytest.raises(ShoalError, match=f"file:3: .*{reason}"):
        reader({"messages": messages}, "file:3")


# --- in a run -------------------------------------------------------------------------------------------------------------


def data_of(make_run: MakeRun, folder: Path, tmp_path: Path, chats: list[Any], **settings: Any) -> Data:
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(row if isinstance(row, dict) else {"messages": row}) + "\n" for row in chats))
    given = {"data__source": {"kind": "text", "path": str(file)}, "data__tokenizer": str(folder), "data__sequence_length": 64}
    return load(make_run(model={"kind": "gpt", "max_seq_len": 1024}, **{**given, **settings}))


def test_conversations_are_packed_whole_and_only_their_turns_are_learned(make_run: MakeRun, folders: Path, tmp_path: Path) -> None:
    """TRL lost the mask of the assistant's turns where conversations were packed (its issue 3728)."""
    chats: Any = conversations(60)
    data = data_of(make_run, folders / "chatml", tmp_path, chats, data__sequence_length=512)
    turns = sum(message["role"] == "assistant" for chat in chats for message in chat)
    assert "rows are conversations: " in data.info.name
    assert "sequences of whole documents" in data.info.name
    packed: Any = data.train
    batch = packed.batch(range(len(packed)))
    single = text_samples([Conversation(chat).document() for chat in chats], encoding_of(folders / "chatml"))
    alone = [single.batch([number]) for number in range(len(single))]
    expected = {tuple(one["input_ids"][0].tolist()): tuple(one["labels"][0].tolist()) for one in alone}
    rows, learned = 0, 0
    for row, (inputs, labels) in enumerate(zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True)):
        start = 0
        for length in filter(None, batch["document_lengths"][row].tolist()):
            assert expected[tuple(inputs[start : start + length])] == tuple(labels[start : start + length])
            rows, learned, start = rows + 1, learned + labels[start : start + length].count(2), start + length
    assert rows == 57, "of 60 conversations three are held out"
    assert learned == (batch["labels"] == 2).sum()  # <|im_end|> ends each turn that is learned
    assert 0 < learned < turns
    assert (batch["labels"] == IGNORED).any()


@pytest.mark.parametrize("batching", ["packed", "dynamic"])
def test_a_stream_of_conversations_goes_on_where_it_stopped(batching: str, make_run: MakeRun, folders: Path, tmp_path: Path) -> None:
    settings = {"data__streaming": True, "data__shuffle_buffer": 4, "data__batching": batching}
    stream: Any = data_of(make_run, folders / "llama3", tmp_path, conversations(40), **settings).train
    stream = pickle.loads(pickle.dumps(stream))  # as it is sent to a process that loads ahead
    reader = stream.read(shard=(0, 1), seed=0, epoch=0)
    for _ in range(5):
        next(reader)
    state = json.loads(json.dumps(reader.state_dict()))
    rest = [sample.inputs.tolist() for sample in reader]
    assert [sample.inputs.tolist() for sample in stream.read(shard=(0, 1), seed=0, epoch=0, state=state)] == rest
    assert rest


@pytest.mark.parametrize("template", ["chatml", "llama3", "qwen", "plain"])
def test_a_named_template_serves_a_tokenizer_without_one(template: str, make_run: MakeRun, tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "s"}, *CHAT[:4]]
    data = data_of(
        make_run, Path("bytes"), tmp_path, [chat] * 3, data__chat_template=template, data__batching="dynamic", data__sequence_length=512
    )
    samples: Any = data.train
    batch = samples.batch([0])
    labels = batch["labels"][0]
    text = bytes(labels[labels != IGNORED].tolist()).decode()
    assert (
        text
        == {"chatml": "b<|im_end|>d<|im_end|>", "qwen": "b<|im_end|>d<|im_end|>", "llama3": "b<|eot_id|>d<|eot_id|>", "plain": " b\n d\n"}[
            template
        ]
    )
    assert data.info.tokenizer is not None
    data.info.tokenizer.save_for_run(tmp_path / "saved")
    again = load_tokenizer(str(tmp_path / "saved"))
    assert again.chat_templates == {"default": read_template(template)}
    assert again.chat_time == data.info.tokenizer.chat_time


def test_prompt_and_completion_are_one_text_and_begin_as_the_tokenizer_says(make_run: MakeRun, folders: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "the qui", "completion": "ck brown fox"}] * 3
    data = data_of(make_run, folders / "llama3", tmp_path, rows, data__batching="dynamic")
    samples: Any = data.train
    batch = samples.batch([0])
    reference = theirs(folders / "llama3")
    ids = [*reference("the quick brown fox")["input_ids"], reference.eos_token_id]
    assert batch["input_ids"][0].tolist() == ids[:-1]
    labels = batch["labels"][0]
    assert reference.decode(labels[labels != IGNORED].tolist()) == " quick brown fox<|eot_id|>", "the token that both share is learned"
    assert reference.convert_ids_to_tokens(ids[:1]) == ["<|begin_of_text|>"]


def test_a_model_without_a_template_is_refused(make_run: MakeRun, tmp_path: Path) -> None:
    with pytest.raises(ShoalError, match="rows are conversations, and the tokenizer bytes has no chat template: set it to chatml, llama3"):
        data_of(make_run, Path("bytes"), tmp_path, [CHAT] * 3)


QUESTION: list[Message] = [{"role": "user", "content": "Who are you?"}]


def test_conversations_of_which_nothing_is_learned_are_named(make_run: MakeRun, folders: Path, tmp_path: Path) -> None:
    data = data_of(make_run, folders / "chatml", tmp_path, [*conversations(30), *[QUESTION] * 30], data__sequence_length=512)
    assert re.search(r"assistant turns \(\d+ rows without one are left out\); ", data.info.name)
    with pytest.raises(ShoalError, match=r"conversations without a turn of the assistant: add its answers, or set data.learn_from to all"):
        data_of(make_run, folders / "chatml", tmp_path, [QUESTION] * 3)
    assert data_of(make_run, folders / "chatml", tmp_path, [QUESTION] * 3, data__learn_from="all").train is not None
    with pytest.raises(ShoalError, match=r"texts are longer than data.sequence_length \(4\), and all that .* set it higher"):
        data_of(make_run, folders / "chatml", tmp_path, conversations(3), data__sequence_length=4)
    with pytest.raises(ShoalError, match="a conversation belongs in `messages`, not in `message`"):
        data_of(make_run, folders / "chatml", tmp_path, [{"message": QUESTION}])


@pytest.mark.parametrize(("loss", "found"), [("sigmoid", "2 pairs of answers"), ("kto", "4 answers, 2 of them good"), ("orpo", "2 pairs")])
def test_preferences_say_that_they_are_conversations_and_what_they_lose(
    loss: str, found: str, make_run: MakeRun, folders: Path, tmp_path: Path
) -> None:
    file = tmp_path / "pairs.jsonl"
    answers = [[{"role": "assistant", "content": text}] for text in ("A ship's cook. " * 30, "No.")]
    file.write_text((json.dumps({"prompt": QUESTION, "chosen": answers[0], "rejected": answers[1]}) + "\n") * 3)
    given: dict[str, Any] = {"data__source": {"kind": "preferences", "path": str(file)}, "data__tokenizer": str(folders / "chatml")}
    given |= {"task": {"kind": "dpo", "loss": loss}, "model": {"kind": "gpt", "max_seq_len": 1024}}
    name = load(make_run(**given, data__sequence_length=64)).info.name
    assert name.startswith(f"pairs.jsonl: rows are conversations: {found}")
    lost = "; 2 prompts lose their beginning and 2 answers lose their end, since prompt and answer are longer than data.sequence_length"
    assert name.endswith(lost), "one row is held out"
    assert "lose" not in load(make_run(**given, data__sequence_length=1024)).info.name


def test_the_time_of_a_template_is_that_of_the_run(make_run: MakeRun, tmp_path: Path) -> None:
    template = "{{ strftime_now('%d %b %Y') }}" + FAMILIES["chatml"].template
    folder = write_tokenizer(tmp_path / "tokenizer", "chatml", template=template)
    first = data_of(make_run, folder, tmp_path, conversations(9), data__chat_time="2024-07-26", data__sequence_length=512)
    assert first.info.tokenizer is not None
    first.info.tokenizer.save_for_run(tmp_path / "run")
    again = data_of(make_run, tmp_path / "run", tmp_path, conversations(9), data__sequence_length=512)
    batches: list[Any] = [data.train.batch(range(2)) for data in (first, again)]  # type: ignore[union-attr]
    assert torch.equal(batches[0]["input_ids"], batches[1]["input_ids"])
    assert first.info.tokenizer.decode(batches[0]["input_ids"][0].tolist()).startswith("26 Jul 2024")
    first.info.tokenizer.save(tmp_path / "export")
    assert load_tokenizer(str(tmp_path / "export")).chat_time is None, "an exported model reads the clock"
    (tmp_path / "run" / "shoal_chat_time.json").write_text('{"format": 1, "time": "yesterday"}')
    with pytest.raises(ShoalError, match="'yesterday' is no time"):
        load_tokenizer(str(tmp_path / "run"))


def test_templates_are_rendered_as_transformers_renders_them() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    sources = [
        "{{ {'b': '<é>', 'a': [1, none]} | tojson(indent=2) }}{{ messages | tojson(sort_keys=true) }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{% if loop.first %}{% continue %}{% endif %}{{ ns.n }}{% endfor %}",
        "{{ dict(a=1) }}{{ dict.fromkeys(['x']) }}{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}",
        "  {%- generation %} a {% endgeneration -%}  {{ messages[1].reasoning_content }}{{ messages[1].thinking }}",
        "{% for m in messages %}\n   {% if true %}\nx\n  {% endif %}\n{% endfor %}\n",
    ]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "thinking": "hm"}]
    for source in sources:
        ((expected,), (marks,)) = render_jinja_template([messages], chat_template=source, return_assistant_tokens_mask=True)
        (found,) = ChatTemplate({"default": source}, {}).render([RenderRequest(messages)])
        assert (found.text, list(found.marks)) == (expected, marks)
