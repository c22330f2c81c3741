"""``marlinq generate``: several prompts, sampling options, interrupts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from marlinq.cli import main
from tests.testing.runnable_folders import save_plain, save_tokenizer
from tests.testing.tiny_models import tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> str:
    save_plain(tmp_path, tiny_model("llama", seed=3, vocab_size=320))
    save_tokenizer(tmp_path)
    return str(tmp_path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as ended:
        main(["generate", *arguments, "--device", "cpu", "--max-new-tokens", "6"])
    output = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, output.out, output.err


def test_several_prompts_are_those_prompts_alone(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, folder, "--greedy", "--prompt", "abc", "--prompt", "z", "--json")
    assert code == 0
    rows = json.loads(out)["generations"]
    assert [row["prompt_tokens"] for row in rows] == [3, 1]
    for prompt, row in zip(("abc", "z"), rows, strict=True):
        code, out, _ = run(capsys, folder, "--greedy", "--prompt", prompt, "--json")
        assert json.loads(out)["tokens"] == row["tokens"]
    code, out, _ = run(capsys, folder, "--greedy", "--prompt", "abc", "--prompt", "z")
    assert code == 0
    assert out.index("[1] ") < out.index("[2] ") < out.index("prompt 2")


def test_options_reach_the_sampler(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    greedy = run(capsys, folder, "--greedy", "--prompt", "abc", "--json")[1]
    first = run(capsys, folder, "--top-k", "1", "--temperature", "3", "--prompt", "abc", "--json")[1]
    assert json.loads(first)["tokens"] == json.loads(greedy)["tokens"]
    drawn = [
        run(capsys, folder, "--temperature", "5", "--seed", seed, "--prompt", "abc", "--json")[1]
        for seed in ("1", "1", "2")
    ]
    tokens = [json.loads(out)["tokens"] for out in drawn]
    assert tokens[0] == tokens[1] != tokens[2]
    penalised = run(capsys, folder, "--greedy", "--repetition-penalty", "3", "--prompt", "abc", "--json")[1]
    # The most likely token comes again and again, but under a penalty none does.
    said = json.loads(greedy)["tokens"], json.loads(penalised)["tokens"]
    assert len(set(said[0])) < len(said[0])
    assert len(set(said[1])) == len(said[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--greedy", "--top-p", "0.5"), "--top-p: no effect with --greedy; keep one"),
        (("--temperature", "1e-9"), "'--temperature': 1e-09 is not in the range 0.001<=x<=1000"),
        (("--top-p", "1.5"), "'--top-p': 1.5 is not in the range"),
    ],
)
def test_wrong_options_are_named(
    folder: str, options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, folder, *options, "--prompt", "abc")
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize("prompts", [("abc",), ("abc", "z")])
def test_an_interrupt_shows_the_text_so_far(
    folder: str,
    prompts: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from marlinq.runtime.decoding import Decoder

    right, calls = Decoder.advance, [0]

    def interrupted(self: Decoder, steps: int = 1) -> None:
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt
        right(self, steps)

    monkeypatch.setattr(Decoder, "advance", interrupted)
    options = [option for prompt in prompts for option in ("--prompt", prompt)]
    code, out, err = run(capsys, folder, "--greedy", *options)
    assert code == 130
    assert "3 tokens, stopped by an interrupt" in out
    assert err.strip().endswith("interrupted")
