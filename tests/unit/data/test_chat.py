"""Conversations: templates, completion masks and truncation against plain NumPy references."""

import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spmdtrain import Chat, Packed, UserError

PLAIN = (
    "{% for message in messages %}<{{ message.role[0] }}>{{ message.content }}{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
CHATML = """\
{%- for message in messages %}
    {%- if message.role not in ["system", "user", "assistant"] %}
        {{- raise_exception("unknown role " + message.role) }}
    {%- endif %}
    {{- "<|im_start|>" + message.role + "\\n" + message.content | trim + eos_token + "\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\\n" }}
{%- endif %}"""
MARKED = CHATML.replace(
    '{{- "<|im_start|>" + message.role + "\\n" + message.content | trim + eos_token + "\\n" }}',
    '{{- "<|im_start|>" + message.role + "\\n" }}{% if message.role == "assistant" %}'
    "{% generation %}{{ message.content | trim }}{% endgeneration %}{% else %}"
    '{{ message.content | trim }}{% endif %}{{ eos_token + "\\n" }}',
)


def talk(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    turns = [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)
    ]
    return [{"role": "system", "content": system}, *turns] if system else turns


TALKS = [
    talk("3+4?", "7", "1+1?", "It is 2.", system="Be kind."),
    talk("Grüße", "ça va 🐦"),
    talk("a", "b", "c"),
    talk("a very long question, " * 3, "yes"),
    talk("hm", "a very long answer, " * 3),
    *[talk(f"{i}", f"{i}" * (i % 7 + 1)) for i in range(40)],
]


def reference(messages: list[dict[str, str]], length: int | None) -> tuple[list[int], list[int]]:
    """The bytes of a conversation in the plain template, and which of them are completions."""
    tokens: list[int] = []
    weights: list[int] = []
    for message in messages:
        header, body = f"<{message['role'][0]}>".encode(), f"{message['content']}\n".encode()
        tokens += [*header, *body]
        weights += [0] * len(header) + [int(message["role"] == "assistant")] * len(body)
    tokens, weights = tokens[:length], weights[:length]
    return (tokens, weights) if any(weights) else ([], [])


@pytest.mark.parametrize("length", [None, 24])
def test_rows_of_conversations_have_the_masks_of_a_plain_reference(length: int | None) -> None:
    chat = Chat([{"messages": each} for each in TALKS], "bytes", PLAIN, length=length)
    packed = Packed(chat, 96)
    rows = packed.rows(np.arange(len(packed)))
    expected = [reference(each, length) for each in TALKS]
    found = []
    for tokens, segments, positions, weights in zip(*rows.values(), strict=True):
        assert not weights[segments == 0].any() and not tokens[segments == 0].any()
        for number in range(1, segments.max() + 1):
            inside = segments == number
            assert positions[inside].tolist() == list(range(inside.sum()))
            found.append((tokens[inside].tolist(), weights[inside].astype(int).tolist()))
    assert sorted(found) == sorted(each for each in expected if each[0])
    assert packed.empty == (0 if length is None else 1)  # the long question
    assert rows["weights"].dtype == np.float32
    again = pickle.loads(pickle.dumps(chat))  # as a worker process gets it
    np.testing.assert_array_equal(again[0].weights, chat[0].weights)
    assert again.fingerprint() == chat.fingerprint()
    assert Chat(TALKS, "bytes", PLAIN, length=7).fingerprint() != chat.fingerprint()


def test_a_conversation_that_is_longer_than_a_row_keeps_the_masks_of_its_pieces() -> None:
    packed = Packed(Chat(TALKS[4:5], "bytes", PLAIN), 16)
    rows = packed.rows(np.arange(len(packed)))
    tokens, weights = reference(TALKS[4], None)
    starts = {bytes(tokens[i : i + 16]): weights[i : i + 16] for i in range(0, len(tokens), 16)}
    for row, segments, found in zip(rows["tokens"], rows["segments"], rows["weights"], strict=True):
        expected = starts[bytes(row[segments > 0].tolist())]
        assert found[segments > 0].tolist() == [0, *expected[1:]]


# -- templates of files ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and its chat template as Hugging Face stores them."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [message["content"] for each in TALKS for message in each]
    tokenizer.train_from_iterator([*texts, "system\n", "user\n", "assistant\n"] * 3, trainer)
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    path = tmp_path_factory.mktemp("model")
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"eos_token": {"content": "<|im_end|>"}, "chat_template": CHATML}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_a_template_beside_the_tokenizer_masks_whole_turns(folder: Path) -> None:
    chat = Chat(TALKS, folder / "tokenizer.json")
    start, end = chat.token("<|im_start|>"), chat.token("<|im_end|>")
    for index, messages in enumerate(TALKS[:5]):
        tokens, weights = chat[index].tokens, chat[index].weights
        text = "".join(
            f"<|im_start|>{each['role']}\n{each['content'].strip()}<|im_end|>\n"
            for each in messages
        )
        assert chat.decode(tokens) == text
        turns = np.cumsum(tokens == start) - 1
        for number, message in enumerate(messages):
            turn, own = tokens[turns == number], weights[turns == number]
            if message["role"] != "assistant":
                assert not own.any()
                continue
            written = chat.decode(turn[own > 0])
            assert written == f"{message['content'].strip()}<|im_end|>\n"
            assert chat.decode(turn[own == 0]) == "<|im_start|>assistant\n"
            assert end in turn[own > 0]
    prompt = chat.prompt(TALKS[1][:1])
    np.testing.assert_array_equal(prompt, chat[1].tokens[: len(prompt)])
    assert not chat[1].weights[: len(prompt)].any() and chat[1].weights[len(prompt) :].all()


def test_a_generation_tag_masks_what_it_encloses(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(MARKED)
    for template in (MARKED, tmp_path / "chat_template.jinja"):
        chat = Chat(TALKS, folder / "tokenizer.json", template)
        plain = Chat(TALKS, folder / "tokenizer.json")
        # Of a prompt with an earlier answer, whose marks are no text of it.
        np.testing.assert_array_equal(chat.prompt(TALKS[0][:4]), plain.prompt(TALKS[0][:4]))
        for index in range(5):
            np.testing.assert_array_equal(chat[index].tokens, plain[index].tokens)
            own = chat[index].tokens[chat[index].weights > 0]
            answers = [each["content"] for each in TALKS[index] if each["role"] == "assistant"]
            assert chat.decode(own) == "".join(each.strip() for each in answers)


def test_the_default_of_several_templates_and_variables_are_used(tmp_path: Path) -> None:
    config = {
        "chat_template": [
            {"name": "tools", "template": "{{ never }}"},
            {"name": "default", "template": "{{ mood }}{{ tools | tojson }}" + PLAIN},
        ]
    }
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(config))
    tools = [{"name": "<é>"}]
    source = [{"messages": talk("a", "b"), "tools": tools}]
    chat = Chat(source, "bytes", path, variables={"mood": "!"})
    assert chat.decode(chat[0].tokens) == '![{"name": "<é>"}]<u>a\n<a>b\n'


def test_a_template_that_changes_earlier_messages_is_refused() -> None:
    template = PLAIN.replace("{{ message.content }}", "{{ message.content if loop.last else '' }}")
    assert Chat([talk("a", "b")], "bytes", PLAIN)[0].weights.tolist() == [0] * 8 + [1, 1]
    with pytest.raises(UserError, match=r"message 1: .* in another way than the whole one"):
        Chat([talk("a", "b", "c", "d")], "bytes", template)[0]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"message": talk("a", "b")}, "no field 'messages' with messages. Did you mean 'message'"),
        ({"messages": "a"}, "not a conversation"),
        ([{"content": "a"}], "not a conversation"),
        (talk("a"), "no message has the role assistant"),
        ([*talk("a", "b"), {"role": "critic", "content": ""}], "fails: unknown role critic"),
    ],
)
def test_a_record_that_is_no_conversation_is_named(record: Any, message: str, folder: Path) -> None:
    with pytest.raises(UserError, match=f"^record 1: .*{re.escape(message)}"):
        Chat([TALKS[0], record], folder / "tokenizer.json").__getitems__([0, 1])


def test_long_conversations_are_cut_dropped_or_refused() -> None:
    tokens, weights = reference(TALKS[4], None)
    cut = Chat(TALKS[4:5], "bytes", PLAIN, length=20)[0]
    assert (cut.tokens.tolist(), cut.weights.tolist()) == (tokens[:20], weights[:20])
    assert len(Chat(TALKS[4:5], "bytes", PLAIN, length=20, too_long="drop")[0]) == 0
    whole = Chat(TALKS[4:5], "bytes", PLAIN, length=len(tokens), too_long="error")[0]
    assert whole.tokens.tolist() == tokens
    with pytest.raises(
        UserError, match=rf"record 0: .* has {len(tokens)} tokens, and length is 20"
    ):
        Chat(TALKS[4:5], "bytes", PLAIN, length=20, too_long="error")[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "template is missing, and the tokenizer 'bytes' has none"),
        ({"template": "{% if %}"}, r"the chat template, line 1: "),
        ({"template": "no/such.jinja"}, "there is no chat template in no/such.jinja"),
        ({"template": PLAIN, "length": 0}, "length is 0"),
        ({"template": PLAIN, "too_long": "dorp"}, "Did you mean 'drop'"),
    ],
)
def test_wrong_arguments_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Chat(TALKS, "bytes", **arguments)


def test_a_template_cannot_leave_the_sandbox() -> None:
    attack = "{{ ''.__class__.__mro__ }}{{ messages.append(1) }}" + PLAIN
    with pytest.raises(UserError, match="record 0: the chat template fails"):
        Chat(TALKS, "bytes", attack)[0]
