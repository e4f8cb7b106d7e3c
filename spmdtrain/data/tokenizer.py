"""Tokenizers: text to tokens and back, from a file or byte by byte."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from spmdtrain.errors import UserError, printable
from spmdtrain.optional import import_extra
from spmdtrain.record.storage import one_line

_BYTES = 256


class Tokenizer(Protocol):
    """Text to tokens and back.

    Attributes:
      vocabulary_size: Tokens are from 0 to `vocabulary_size` - 1.
      fingerprint: A text that differs for tokenizers with different tokens.
    """

    vocabulary_size: int
    fingerprint: str

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the tokens of each text, int32 (n,)."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens."""
        ...

    def token(self, name: str) -> int | None:
        """Returns the token with this name, such as `</s>`; None if there is none."""
        ...


def load_tokenizer(tokenizer: str | os.PathLike[str]) -> Tokenizer:
    """Returns a tokenizer.

    It is "bytes"; a file of Hugging Face's tokenizers, `.json`; or a SentencePiece model, `.model`.
    Nothing is downloaded.

    Raises:
      UserError: If there is no such file, it is not a tokenizer, or its library is not installed.
    """
    name = os.fspath(tokenizer)
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name).expanduser()
    if path.suffix not in (".json", ".model"):
        raise UserError(
            f"tokenizer is {printable(name)!r}: give 'bytes', a file of Hugging Face's tokenizers "
            "(tokenizer.json), or a SentencePiece model (.model). Nothing is downloaded"
        )
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"tokenizer: {one_line(error)}") from error
    if path.suffix == ".json":
        return JsonTokenizer(path, content)
    return SentencePieceTokenizer(path, content)


class ByteTokenizer:
    """UTF-8 bytes as tokens."""

    vocabulary_size = _BYTES
    fingerprint = "bytes"

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        contents = [text.encode("utf-8", "surrogateescape") for text in texts]
        return [np.frombuffer(content, np.uint8).astype(np.int32) for content in contents]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < _BYTES).decode("utf-8", "replace")

    def token(self, name: str) -> int | None:
        content = name.encode()
        return content[0] if len(content) == 1 else None


class JsonTokenizer:
    """A tokenizer of Hugging Face's library `tokenizers`.

    Special tokens are not added, and texts are neither cut nor padded, whatever the file says:
    packing and the end-of-document token are the dataset's.

    Raises:
      UserError: If it is not a tokenizer, or the library is not installed.
    """

    def __init__(self, path: Path, content: bytes) -> None:
        library = import_extra("tokenizers", "tokenizers", "tokenizer files")
        try:
            self._tokenizer = library.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises no class of its own
            raise UserError(
                f"tokenizer: {printable(path)}: not a file of Hugging Face's tokenizers: "
                f"{one_line(error)}"
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocabulary_size = _size(self._tokenizer)
        self.fingerprint = hashlib.sha256(content).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in found]

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def token(self, name: str) -> int | None:
        token: int | None = self._tokenizer.token_to_id(name)
        return token


def _size(tokenizer: Any) -> int:
    # Not `get_vocab_size`, which counts the tokens: their numbers may have gaps.
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


class SentencePieceTokenizer:
    """A SentencePiece model.

    Raises:
      UserError: If it is not a SentencePiece model, or the library is not installed.
    """

    def __init__(self, path: Path, content: bytes) -> None:
        library = import_extra("sentencepiece", "sentencepiece", "SentencePiece models")
        try:
            self._model = library.SentencePieceProcessor(model_proto=content)
        except Exception as error:  # the library raises no class of its own
            raise UserError(
                f"tokenizer: {printable(path)}: not a SentencePiece model: {one_line(error)}"
            ) from error
        self.vocabulary_size = int(self._model.get_piece_size())
        self.fingerprint = hashlib.sha256(content).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(tokens, np.int32) for tokens in self._model.encode(list(texts))]

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._model.decode(list(tokens))
        return text

    def token(self, name: str) -> int | None:
        token = int(self._model.piece_to_id(name))
        return token if self._model.id_to_piece(token) == name else None
