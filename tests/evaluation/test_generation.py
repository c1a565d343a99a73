"""Reading and writing token by token."""

from __future__ import annotations

import pytest
import torch
from helpers import tiny
from torch import Tensor

from fpexp.evaluation.generation import continue_greedily, tag
from fpexp.models import DecodingState, LanguageModel, ModelOutput

MODELS = ["lstm", "mamba", "transformer", "fp_mamba_h"]


class Counter(LanguageModel):
    """Writes the last token read plus one, modulo ten; its state counts what it has read."""

    def __init__(self) -> None:
        super(LanguageModel, self).__init__()
        self.read: list[int] = []

    def decode(self, tokens: Tensor, state: DecodingState | None = None) -> tuple[ModelOutput, DecodingState]:
        seen = tokens if state is None else torch.cat([state.layers[0], tokens], dim=1)
        self.read.append(tokens.shape[1])
        logits = torch.nn.functional.one_hot((tokens + 1) % 10, 10).float()
        return ModelOutput(logits), DecodingState(len(tokens), (seen,))


def test_the_prompt_is_read_at_once_and_what_is_written_one_by_one() -> None:
    model = Counter()
    read = continue_greedily(model, torch.tensor([[7, 3]]), None, 4)
    assert read.tokens.tolist() == [[4, 5, 6, 7]]
    assert model.read == [2, 1, 1, 1]
    assert read.state_bytes == (2 * 8, 5 * 8)


def test_each_sequence_ends_at_its_stop_token() -> None:
    model = Counter()
    read = continue_greedily(model, torch.tensor([[1], [4], [5]]), 6, 10)
    assert read.tokens.tolist() == [[2, 3, 4, 5, 6], [5, 6, 6, 6, 6], [6, 6, 6, 6, 6]]
    assert continue_greedily(Counter(), torch.tensor([[1], [4]]), 6, 2).tokens.tolist() == [[2, 3], [5, 6]]
    with pytest.raises(ValueError, match="at least 1, not 0"):
        continue_greedily(Counter(), torch.tensor([[1]]), 6, 0)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_is_the_argmax_of_the_whole_pass(name: str) -> None:
    """Each written token is the likeliest one after all before it."""
    model = tiny(f"model={name}", "precision=float64").model.eval()
    prompt = torch.randint(12, (3, 5), generator=torch.Generator().manual_seed(0))
    written = continue_greedily(model, prompt, None, 6).tokens
    whole = torch.cat([prompt, written], dim=1)
    assert torch.equal(written, model(whole[:, :-1]).logits.argmax(-1)[:, 4:])
    assert torch.equal(tag(model, prompt).tokens, model(prompt).logits.argmax(-1))


@pytest.mark.parametrize("name", MODELS)
def test_only_attention_carries_more_after_more_tokens(name: str) -> None:
    model = tiny(f"model={name}").model.eval()
    first, last = tag(model, torch.zeros(1, 9, dtype=torch.long)).state_bytes
    assert first > 0
    assert last == (9 * first if name == "transformer" else first)
