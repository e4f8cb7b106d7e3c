"""Conversations as tokens: chat templates, and weights of the assistant's tokens."""

import itertools
import json
import operator
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from spmdtrain.data.examples import read_examples
from spmdtrain.data.text import (
    ByteTokenizer,
    FromRecords,
    JsonTokenizer,
    WeightedTokens,
    check_source,
    load_tokenizer,
)
from spmdtrain.errors import BadRecordError, UserError, did_you_mean, import_extra, printable
from spmdtrain.record.storage import one_line

Messages = Sequence[Mapping[str, Any]]
"""The messages of a conversation: dictionaries with "role" and "content"."""

# -- Templates: the text of a conversation, and which of its characters are the assistant's --------

_FILES = ("chat_template.jinja", "tokenizer_config.json")
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
# They mark the parts within {% generation %}, and no text contains them.
_BEGIN, _END = (f"<{uuid.uuid4()}>" for _ in range(2))


class ChatTemplate:
    """A jinja template as Hugging Face stores them, in jinja's sandbox.

    Raises:
      UserError: If it is not a template, or jinja2 is not installed.
    """

    def __init__(self, text: str, variables: Mapping[str, Any]) -> None:
        self.text, self.variables = text, dict(variables)
        self._library = import_extra("jinja2", "chat", "chat templates")
        sandbox = import_extra("jinja2.sandbox", "chat", "chat templates")
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_generation_tag(), "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = self._refuse
        try:
            self._template = environment.from_string(text)
        except self._library.TemplateError as error:
            line = getattr(error, "lineno", None)
            where = f", line {line}" if line else ""
            raise UserError(f"the chat template{where}: {one_line(error)}") from error
        self._marks = "generation" in {
            token[2] for token in environment.lex(text) if token[1] == "name"
        }

    def __reduce__(self) -> Any:
        return type(self), (self.text, self.variables)

    def _refuse(self, message: str) -> None:
        raise self._library.TemplateError(message)

    def render(self, messages: Messages, *, prompt: bool = False, **more: Any) -> str:
        """Returns the text of messages. With `prompt` it ends where the assistant begins to write.

        Raises:
          BadRecordError: If the template refuses the messages.
        """
        return _without_marks(self._marked(messages, prompt=prompt, **more))[0]

    def _marked(self, messages: Messages, *, prompt: bool = False, **more: Any) -> str:
        """Returns the text of messages, with the marks of the parts within {% generation %}."""
        given = {**self.variables, **more, "add_generation_prompt": prompt}
        try:
            text: str = self._template.render(messages=list(messages), **given)
        except Exception as error:  # of any class, because the template is a program
            raise BadRecordError(f"the chat template fails: {one_line(error)}") from error
        return text

    def parts(self, messages: Messages, **more: Any) -> tuple[str, list[tuple[int, int]]]:
        """Returns the text of a conversation, and the first and last + 1 character of completions.

        Raises:
          BadRecordError: If the template refuses the messages, or does not show the completions.
        """
        if self._marks:
            return _without_marks(self._marked(messages, **more))
        text = self._marked(messages, **more)
        spans = []
        for index, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before = self._marked(messages[:index], prompt=True, **more)
            after = self._marked(messages[: index + 1], **more)
            if not (text.startswith(after) and after.startswith(before)):
                raise BadRecordError(
                    f"message {index}: the chat template writes the conversation up to this "
                    "message in another way than the whole one, so its completion cannot be "
                    "found: mark it in the template by {% generation %} ... {% endgeneration %}"
                )
            spans.append((len(before), len(after)))
        return text, spans


def _to_json(value: Any, indent: int | None = None) -> str:
    # Without the escapes for HTML of jinja's own filter.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _generation_tag() -> Any:
    """Returns the jinja extension of `{% generation %}`, which marks completions."""
    extension = import_extra("jinja2.ext", "chat", "chat templates").Extension
    nodes = import_extra("jinja2.nodes", "chat", "chat templates")

    class Generation(extension):  # type: ignore[misc, valid-type]
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            call = self.call_method("_render")
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _render(self, caller: Any) -> str:
            return f"{_BEGIN}{caller()}{_END}"

    return Generation


def _without_marks(marked: str) -> tuple[str, list[tuple[int, int]]]:
    text, spans = "", []
    for part in marked.split(_BEGIN):
        inside, end, after = part.partition(_END)
        if end:
            spans.append((len(text), len(text) + len(inside)))
        text += inside + after
    return text, spans


def load_template(
    template: str | os.PathLike[str] | None, tokenizer: str, variables: Mapping[str, Any]
) -> ChatTemplate:
    """Returns a template from its text, its file, or the files beside the tokenizer's.

    Raises:
      UserError: If there is none, it is not a template, or jinja2 is not installed.
    """
    if tokenizer == "bytes":
        given, paths = {**variables}, []
    else:
        folder = Path(tokenizer).expanduser().parent
        given = {**_special_tokens(folder), **variables}
        paths = [folder / name for name in _FILES]
    if isinstance(template, str) and ("{%" in template or "{{" in template):
        return ChatTemplate(template, given)
    if template is not None:
        paths = [Path(template).expanduser()]
        given |= {**_special_tokens(paths[0].parent), **variables}
    elif not paths:
        raise UserError(
            "template is missing, and the tokenizer 'bytes' has none: give a jinja template, as "
            "text or as a file"
        )
    for path in paths:
        if path.suffix == ".json" and (text := _template_of(_read_config(path))) is not None:
            return ChatTemplate(text, given)
        if path.suffix != ".json" and path.is_file():
            return ChatTemplate(path.read_text("utf-8"), given)
    names = " or ".join(printable(path) for path in paths)
    raise UserError(
        f"there is no chat template in {names}: give one, as text or as a file: template=..."
    )


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise UserError(f"{printable(path)}: not JSON: {one_line(error)}") from error
    return config if isinstance(config, dict) else {}


def _special_tokens(folder: Path) -> dict[str, Any]:
    config = _read_config(folder / "tokenizer_config.json")
    found = {name: config[name] for name in _SPECIAL if config.get(name)}
    return {
        name: each["content"] if isinstance(each, dict) else each for name, each in found.items()
    }


def _template_of(config: dict[str, Any]) -> str | None:
    """Returns the template of a tokenizer_config.json; of several, the one named default."""
    found = config.get("chat_template")
    if isinstance(found, list):
        found = {each["name"]: each["template"] for each in found}.get("default")
    return found


# -- A source of conversations as a source of documents --------------------------------------------


class Chat(FromRecords):
    """The conversations of a source's records as tokens, one document for each record.

    `Packed` makes rows of fixed length of them, whose `weights` are 1 for the tokens that the
    assistant wrote, and 0 for those of templates, system and users: the completion mask. A token
    with a character of the assistant's and one of another part is the assistant's.

    If the template marks the assistant's parts by `{% generation %}`, these are the completions.
    Otherwise the completion of a message is what the template adds to the earlier messages with
    `add_generation_prompt`, which includes the token that ends the turn.

    Args:
      source: An object with `__len__` and `__getitem__(int)`, and optionally `__getitems__`,
        `blocks`, `fingerprint()` and `describe(int)`. A record is a list of messages, or a
        dictionary with one in `field`. A message is a dictionary with "role" ("system", "user",
        "assistant" or another that the template knows) and "content".
      tokenizer: "bytes", or a file of Hugging Face's tokenizers (`.json`).
      template: A jinja template as text, or its file: `chat_template.jinja`, or
        `tokenizer_config.json` with the entry `chat_template`. By default one of these files
        beside the tokenizer's. The special tokens of a `tokenizer_config.json` beside the tokenizer
        or the template are variables of the template.
      field: The field with the messages, for records that are dictionaries. Their field `tools`, if
        there is one, is passed to the template.
      length: The most tokens of a conversation; None for any number. `Packed` splits conversations
        that are longer than a row, and the later pieces do not see the earlier ones.
      too_long: What becomes of conversations with more tokens: "cut" leaves out the tokens after
        `length`, "drop" the conversation, "error" refuses it. With "cut", a conversation whose
        tokens of the assistant are all cut off is left out too. `Packed` counts those that are left
        out as `empty`.
      variables: More variables of the template, such as `{"enable_thinking": False}`. A template
        has no clock (`strftime_now`), because the data would change from day to day.

    Attributes:
      source: The records.
      field: The field with the messages.
      vocabulary_size: Tokens are from 0 to `vocabulary_size` - 1.

    Raises:
      UserError: If an argument is invalid, or the tokenizer or template cannot be loaded.
    """

    def __init__(
        self,
        source: Any,
        tokenizer: str | os.PathLike[str],
        template: str | os.PathLike[str] | None = None,
        *,
        field: str = "messages",
        length: int | None = None,
        too_long: Literal["cut", "drop", "error"] = "cut",
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        check_source(source, "a Chat")
        if length is not None and (
            isinstance(length, bool) or not isinstance(length, (int, np.integer)) or length < 1
        ):
            raise UserError(f"length is {length!r}: it must be a number of at least 1")
        if too_long not in ("cut", "drop", "error"):
            raise UserError(
                f"too_long is {too_long!r}: it must be 'cut', 'drop' or 'error'."
                f"{did_you_mean(str(too_long), ['cut', 'drop', 'error'])}"
            )
        self.source, self.field, self._length, self._too_long = source, field, length, too_long
        loaded = load_tokenizer(tokenizer)
        if not isinstance(loaded, ByteTokenizer | JsonTokenizer):
            raise UserError(
                f"tokenizer is {printable(os.fspath(tokenizer))}: a SentencePiece model reads the "
                "special tokens of a template, such as <s>, as text. Give the tokenizer.json of "
                "the same model"
            )
        self._tokenizer = loaded
        self._template = load_template(template, os.fspath(tokenizer), variables or {})
        self.vocabulary_size = self._tokenizer.vocabulary_size

    def __getitem__(self, index: int) -> WeightedTokens:
        return self.__getitems__([operator.index(index)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[WeightedTokens]:
        """Returns several conversations by their numbers.

        Raises:
          BadRecordError: If a record cannot be read, is not a conversation, the template refuses
            it, or it is too long and `too_long` is "error".
        """
        indices = list(indices)
        records = read_examples(self.source, indices)
        parts = [self._parts(record, i) for i, record in zip(indices, records, strict=True)]
        encoded = self._tokenizer.encode_with_spans([text for text, _ in parts])
        return [
            self._fitted(WeightedTokens(tokens, token_weights(spans, completions)), index)
            for (tokens, spans), (_, completions), index in zip(
                encoded, parts, indices, strict=True
            )
        ]

    def fingerprint(self) -> str:
        """Returns a hash of tokenizer, template, options, and the source's fingerprint if any."""
        made_by = (self._tokenizer.fingerprint, self._template.text, self._template.variables)
        return self._hash(*made_by, self.field, self._length, self._too_long)

    def prompt(self, messages: Messages, **more: Any) -> np.ndarray:
        """Returns the tokens after which the assistant writes its answer, for `generate`.

        Args:
          messages: The messages so far.
          **more: More variables of the template.

        Returns:
          int32 (n,).
        """
        return self._tokenizer.encode([self._template.render(messages, prompt=True, **more)])[0]

    def token(self, name: str) -> int:
        """Returns the number of a token, such as `<|im_end|>` as a stop token of `generate`.

        Args:
          name: The name of the token; with "bytes", a character.

        Raises:
          UserError: If there is no such token.
        """
        if (token := self._tokenizer.token(name)) is None:
            raise UserError(f"the tokenizer has no token {printable(name)!r}")
        return token

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Returns the text of tokens.

        Args:
          tokens: Integers (n,).
        """
        return self._tokenizer.decode([int(token) for token in tokens])

    def _parts(self, record: Any, index: int) -> tuple[str, list[tuple[int, int]]]:
        """Returns the text and the completions of a record; names it in errors."""
        messages, more = record, {}
        if isinstance(record, Mapping):
            if self.field not in record:
                names = [printable(name) for name in record]
                raise BadRecordError(
                    f"{self.describe(index)}: there is no field {printable(self.field)!r} with "
                    f"messages.{did_you_mean(self.field, names)} Give its name: "
                    "Chat(source, tokenizer, field=...)"
                )
            messages = record[self.field]
            if record.get("tools"):
                more["tools"] = record["tools"]
        known = isinstance(messages, Sequence) and not isinstance(messages, (str, bytes))
        if not (known and messages and all(_is_message(each) for each in messages)):
            raise BadRecordError(
                f"{self.describe(index)}: not a conversation: it must be a list of messages, "
                'dictionaries with "role" and "content"'
            )
        if not any(message["role"] == "assistant" for message in messages):
            raise BadRecordError(
                f"{self.describe(index)}: no message has the role assistant, so there is nothing "
                "to learn"
            )
        try:
            return self._template.parts(messages, **more)
        except BadRecordError as error:
            raise BadRecordError(f"{self.describe(index)}: {error}") from error

    def _fitted(self, document: WeightedTokens, index: int) -> WeightedTokens:
        """Returns a conversation of at most `length` tokens, without tokens if it is left out."""
        count, limit = len(document), self._length
        if limit is None or count <= limit:
            return document
        if self._too_long == "error":
            raise BadRecordError(
                f"{self.describe(index)}: the conversation has {count} tokens, and length is "
                f"{limit}: give too_long='cut' or 'drop', or a larger length"
            )
        kept = limit if self._too_long == "cut" and document.weights[1:limit].any() else 0
        return WeightedTokens(document.tokens[:kept], document.weights[:kept])


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("role"), str)


def token_weights(spans: np.ndarray, completions: Sequence[tuple[int, int]]) -> np.ndarray:
    """Returns 1 for each token with a character of a completion, else 0: f32 (n,).

    `spans` is int32 (n, 2), the first and last + 1 character of each token. The completions have
    the same form; they are ascending and do not overlap.
    """
    completions = [(start, end) for start, end in completions if start < end]
    bounds = np.array([*itertools.chain.from_iterable(completions)], np.int64)
    # A token is within a completion if an odd number of bounds is at or before a character of it.
    first = np.searchsorted(bounds, spans[:, 0], side="right")
    last = np.searchsorted(bounds, spans[:, 1] - 1, side="right")
    is_written = (spans[:, 1] > spans[:, 0]) & ((first % 2 == 1) | (last != first))
    return is_written.astype(np.float32)
