"""Cached summaries of compiled programs: read again, or computed again if corrupted."""

import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from plan_helpers import FOUND

from spmdtrain.plan.summary import CompiledSummary, read_summary, sealed, summarize_compiled


def keep(folder: Path, name: str = "a") -> Path:
    path = folder / f"{name}.json"
    path.write_bytes(sealed(name, json.dumps(dataclasses.asdict(FOUND)).encode()))
    return path


def test_a_summary_is_read_as_it_was_kept(tmp_path: Path) -> None:
    assert read_summary(keep(tmp_path)) == FOUND


def test_a_summary_with_one_other_digit_is_not_used(tmp_path: Path) -> None:
    path = keep(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"123456", b"123457"))
    assert read_summary(path) is None


def test_a_summary_of_another_program_is_not_used(tmp_path: Path) -> None:
    assert read_summary(keep(tmp_path).rename(tmp_path / "b.json")) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[" * 100_000,
        b"\xff\n{}",
        sealed("x", b"[" * 100_000),
        sealed("x", b"null"),
        sealed("x", b"{}"),
        sealed("x", b'{"collectives": 1}'),
    ],
)
def test_what_is_no_summary_is_not_used(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(content)
    assert read_summary(tmp_path / "x.json") is None


@pytest.mark.timeout(20)
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    assert read_summary(tmp_path / "pipe.json") is None


class WithoutGpu:
    """A step that XLA compiles only without Triton."""

    def __init__(self, error: str) -> None:
        self._lowered = jax.jit(lambda x: x @ x).lower(jnp.ones((8, 8)))
        self._error = error

    def as_text(self, **options: Any) -> str:
        return str(self._lowered.as_text(**options))

    def compile(self, compiler_options: dict[str, Any]) -> Any:
        if compiler_options.get("xla_gpu_enable_triton_gemm", True):
            raise jax.errors.JaxRuntimeError(self._error)
        return self._lowered.compile(compiler_options)


def test_what_needs_a_gpu_to_be_compiled_with_triton_is_compiled_without() -> None:
    def summary(error: str) -> CompiledSummary:
        traced: Any = SimpleNamespace(lower=lambda: WithoutGpu(error))
        return summarize_compiled(traced, None, {}, [], keep=False)

    for error in (
        "INTERNAL: No supported config found for HLO: %gemm_fusion_dot.3 = bf16[8,8]",
        "INTERNAL: Couldn't find output tile sizes that satisfy hlo: %dot.297 = f32[768,160]",
    ):
        found = summary(error)
        assert (found.has_triton, found.products) == (False, 2 * 8**3)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL: other"):
        summary("INTERNAL: other")
