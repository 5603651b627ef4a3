"""Our decoder against transformers', in float32, on tiny checkpoints of every family."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from adaflash.engine.models.weights import load_decoder
from tests.engine.models.families import CPU, FAMILIES, VOCAB, PagedRun, save

TOLERANCE = 1e-4  # absolute and relative; logits are about 10 in size


def tokens(seed: int, length: int) -> Tensor:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_chunks_and_decode_give_transformers_logits(family: str, tmp_path: Path) -> None:
    model = save(family, tmp_path)
    run = PagedRun(load_decoder(tmp_path, torch.float32, CPU), num_sequences=2)
    texts = [tokens(1, 40), tokens(2, 23)]
    with torch.inference_mode():
        expected = [model(text[None]).logits[0] for text in texts]
    # A whole prefill beside a short one, then chunks of uneven size, then one token at a time.
    cuts = [(11, 13), (20, 14), (33, 20), *((33 + n, 20 + n) for n in range(1, 4)), (40, 23)]
    done = (0, 0)
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    for cut in cuts:
        pieces = [text[start:end] for text, start, end in zip(texts, done, cut, strict=True)]
        for logits, piece in zip(found, run.feed(pieces), strict=True):
            logits.append(piece)
        done = cut
    for logits, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.cat(logits), reference, atol=TOLERANCE, rtol=TOLERANCE)


def test_every_part_of_the_model_matters(tmp_path: Path) -> None:
    """The comparison above can fail: it does for a model with one weight changed."""
    model = save("qwen3", tmp_path)
    decoder = load_decoder(tmp_path, torch.float32, CPU)
    text = tokens(1, 10)
    text[0] = 0  # so that the embedding row changed below is in the text
    with torch.inference_mode():
        expected = model(text[None]).logits[0]
    for name, parameter in decoder.named_parameters():
        before = parameter.detach().clone()
        parameter.data[0] += 0.5
        (changed,) = PagedRun(decoder, num_sequences=1).feed([text])
        assert (changed - expected).abs().max() > 10 * TOLERANCE, name
        parameter.data.copy_(before)
