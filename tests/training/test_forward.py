"""Training's dense blocks are serving's paged blocks: the same hidden states, the same drafts."""

from pathlib import Path

import pytest
import torch

from adaflash.engine.batch_inputs import Paging, VerifyRow
from adaflash.engine.kv_cache import KVCache
from adaflash.engine.models.decoder import Decoder
from adaflash.engine.models.drafter import Drafter
from adaflash.engine.models.weights import load_drafter
from adaflash.engine.sampler import Sampler
from adaflash.engine.speculation.block_drafter import BlockDrafter
from adaflash.engine.target import TargetModel
from adaflash.engine.types import Request, Row, RowKind, SamplingParams, Sequence
from adaflash.kernels.reference_attention import ReferenceAttention
from adaflash.training.batches import make_batch
from adaflash.training.config import DrafterShape
from adaflash.training.features import Text
from adaflash.training.forward import chain_states
from adaflash.training.new_drafter import new_drafter, save_drafter
from adaflash.training.objective import TargetEnds, draft
from tests.tiny_model import VOCAB
from tests.training.tiny_training import TAPS, random_texts, store_of, tiny_decoder

CPU = torch.device("cpu")
PAGE_SIZE = 4


def drafter_on_disk(tmp_path: Path, chain_size: int | None) -> Drafter:
    """Made by training, saved, loaded by serving."""
    decoder = tiny_decoder(tmp_path)
    shape = DrafterShape(
        taps=TAPS, widths=(3, 8), vocab_size=VOCAB, head_size=8, chain_size=chain_size
    )
    made = new_drafter(decoder.config, shape, torch.arange(100, VOCAB), seed=1)
    if made.chain_head is not None:
        made.chain_head.out.weight.data.normal_(generator=torch.Generator().manual_seed(5))
    save_drafter(made, tmp_path / "drafter", torch.float32)
    loaded = load_drafter(tmp_path / "drafter", decoder.config, torch.float32, CPU)
    for (name, one), (_, other) in zip(
        made.named_parameters(), loaded.named_parameters(), strict=True
    ):
        assert torch.equal(one, other), name
    return loaded


@pytest.mark.parametrize("chain_size", [None, 24])
@pytest.mark.parametrize("width", [3, 8])
def test_dense_blocks_are_paged_blocks(tmp_path: Path, width: int, chain_size: int | None) -> None:
    drafter = drafter_on_disk(tmp_path, chain_size)
    decoder = tiny_decoder(tmp_path)
    store = store_of(tmp_path / "texts", decoder, random_texts(3))
    texts = [store.text(index) for index in range(3)]
    anchors = [[5, 9, 12], [7, 8, 17], [6, 20, 22]]
    ends = TargetEnds.of(decoder, torch.arange(100, VOCAB))
    batch = make_batch(texts, anchors, width, 1000)
    with torch.inference_mode():
        blocks = draft(drafter, ends, batch)
    number = 0
    for text, own in zip(texts, anchors, strict=True):
        for anchor in own:
            hidden, drafts = paged(drafter, decoder, text, anchor, width)
            torch.testing.assert_close(blocks.hidden[number], hidden, atol=1e-4, rtol=1e-4)
            known = [*text.trajectory.token_ids[anchor : anchor + 1], *drafts]
            tokens = ends.embedding[torch.tensor(known[:-1])][None]
            with torch.inference_mode():
                states = chain_states(drafter, hidden[None], tokens)
                logits = states[0] @ ends.head.T
            assert (logits.argmax(-1) + 100).tolist() == list(drafts)
            number += 1


def paged(
    drafter: Drafter, decoder: Decoder, text: Text, anchor: int, width: int
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Hidden states and drafts of one block, as the server makes them."""
    paging = Paging(ReferenceAttention(), PAGE_SIZE, CPU)
    caches = [
        KVCache(layers, num_pages=16, page_size=PAGE_SIZE, dtype=torch.float32, device=CPU)
        for layers in (decoder.config, drafter.config.layers)
    ]
    target = TargetModel(decoder, caches[0], paging, TAPS)
    assert drafter.token_ids is not None
    source = BlockDrafter(
        drafter, decoder, caches[1], Sampler(VOCAB, frozenset(), drafter.token_ids), paging
    )
    known = list(text.trajectory.token_ids[: anchor + 1])
    sampling = SamplingParams(seed=0, max_tokens=9, temperature=0)
    sequence = Sequence(Request(request_id="a", prompt_ids=known, sampling=sampling), order=0)
    sequence.pages = list(range(15, -1, -1))
    source.observe(target.verify([VerifyRow(Row(sequence, 0, anchor, RowKind.PREFILL))]))
    sequence.num_committed = anchor
    block = source.denoise([Row(sequence, anchor, 1, RowKind.VERIFY, 15)], width)
    return block.hidden[0], source.propose(block, [width - 1])[0]
