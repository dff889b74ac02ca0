"""The DSpark head against its transcription."""

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.stepping import Stepper
from tests.support.tiny import random_weights, tiny_config, with_dspark, write_plain_checkpoint
from torch import Tensor

from finwhale import LLM
from finwhale.engine.plan.sequences import Chunk
from finwhale.models.deepseek_v4.dspark import DsparkHead
from finwhale.models.protocol import Drafts
from finwhale.models.step_inputs import DraftStart
from finwhale.ops.paging import Tokens

from .dspark_transcription import context_rows, draft, main_feature
from .oracle import assert_texts_agree, in_float64, relative_error, single_threaded

TOLERANCE = 1e-5
# Beside the defaults: a smaller block, other experts, no anchor, other target layers.
VARIANTS: dict[int, dict[str, Any]] = {
    0: {},
    1: {"dspark_block_size": 7, "dspark_target_layer_ids": [0, 2], "sample_from_anchor": False},
    3: {"dspark_n_routed_experts": 3, "dspark_num_experts_per_tok": 2},
    7: {"dspark_block_size": 1, "confidence_head_with_markov": False},
    14: {"enable_confidence_head": False, "dspark_target_layer_ids": [1]},
}


class Drafting:
    """Drafts of one model after texts that are prefilled in chunks, one or several at a time."""

    def __init__(self, llm: LLM) -> None:
        self.stepper = Stepper(llm._engine)
        head = self.stepper.runner.model.draft_head
        assert isinstance(head, DsparkHead)
        self.head = head

    @torch.inference_mode()
    def draft(
        self, texts: Sequence[list[int]], count: int, cuts: Sequence[int] = ()
    ) -> tuple[list[Tensor], Drafts]:
        """Draft after each text's last token. Returns the logits [B,V] of each draft."""
        stepper = self.stepper
        sequences = [stepper.sequence(text) for text in texts]
        for begin, end in pairwise(sorted({0, *cuts, max(map(len, texts)) - 1})):
            parts = [
                (sequence, min(end, len(text) - 1) - begin)
                for sequence, text in zip(sequences, texts, strict=True)
                if len(text) - 1 > begin
            ]
            stepper.step(parts)
        for sequence, text in zip(sequences, texts, strict=True):
            end = len(text) - 1
            stepper.pages.grow(sequence.tables, end, end + self.head.sizes.num_rows)
        newest = [Chunk(s, len(s.token_ids) - 1, len(s.token_ids)) for s in sequences]
        plan = stepper.plan(newest)
        batch = stepper.runner.batch(plan)
        ordinal = torch.arange(len(texts) + 1, dtype=torch.int32)
        start = DraftStart(
            hidden=torch.empty(len(texts), 0),
            newest_ids=batch.inputs.token_ids,
            tokens=Tokens(
                positions=batch.inputs.tokens.positions - 1,
                sequence=ordinal[:-1],
                query_start=ordinal,
                max_len=max(map(len, texts)),
                max_query=1,
            ),
            tables=batch.inputs.tables,
        )
        seen: list[Tensor] = []

        def choose(logits: Tensor, k: int) -> Tensor:
            assert k == len(seen)
            seen.append(logits)
            return logits.argmax(1)

        runner = stepper.runner
        drafts = self.head.draft(start, count, runner.cache, runner.segments, choose)
        assert len(drafts.ids) == count
        for logits, ids in zip(seen, drafts.ids, strict=True):
            assert torch.equal(ids, logits.argmax(1))
        for sequence in sequences:
            stepper.release(sequence)
        return seen, drafts


def new_llm(path: Path, **options: Any) -> LLM:
    return LLM(path, device="cpu", dtype="float32", draft_tokens=1, **options)


def written(tmp_path: Path, seed: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = with_dspark(tiny_config(seed), **VARIANTS.get(seed, {}))
    weights = random_weights(config, seed)
    write_plain_checkpoint(tmp_path, config, weights)
    return config, weights


@pytest.mark.parametrize(
    ("seed", "reference"),
    [
        *((seed, False) for seed in VARIANTS if seed),
        (1, True),
        *(pytest.param(0, reference, marks=pytest.mark.long) for reference in (False, True)),
    ],
)
def test_proposals_and_confidences(tmp_path: Path, seed: int, reference: bool) -> None:
    """Texts shorter and longer than the window, whole, in chunks and in one batch."""
    config, weights = written(tmp_path, seed)
    size, draw = config["dspark_block_size"], random.Random(seed)
    # A block that goes over the end of a page, and one whose first row is the last of a page.
    lengths = (2, 7, 127, config["sliding_window"] + 64)
    texts = [[draw.randrange(config["vocab_size"]) for _ in range(n)] for n in lengths]
    with single_threaded():
        drafting = Drafting(new_llm(tmp_path, activations="exact", reference=reference))
        batch, together = drafting.draft(texts, size)
        fewer, _ = drafting.draft(texts, (size + 1) // 2)
        for few, many in zip(fewer, batch, strict=False):
            assert relative_error(few, many) < TOLERANCE if reference else torch.equal(few, many)
        for row, text in enumerate(texts):
            main = main_feature(weights, config, text[:-1])
            seen, found = drafting.draft([text], size, range(1, len(text), 9))
            ids = [int(i) for i in found.ids]
            wanted = draft(weights, config, context_rows(weights, config, main), text[-1], ids)
            logits = torch.cat(seen)
            assert relative_error(logits, wanted.logits) < TOLERANCE
            for k, (each, chosen) in enumerate(zip(batch, together.ids, strict=True)):
                assert int(chosen[row]) == ids[k]
                assert relative_error(each[row], logits[k]) < TOLERANCE
            if config.get("enable_confidence_head", True):
                assert found.confidences is not None and together.confidences is not None
                each_k = zip(found.confidences, together.confidences, strict=True)
                for k, (alone, beside) in enumerate(each_k):
                    assert float(alone) == pytest.approx(float(wanted.confidences[k]), abs=1e-5)
                    assert float(beside[row]) == pytest.approx(float(alone), abs=1e-5)
            else:
                assert found.confidences is None


def test_rounds_as_trained(tmp_path: Path) -> None:
    """Why not every draft agrees: see test_as_trained.py."""
    config, weights = written(tmp_path, 0)
    trained, draw = config | {"as_trained": True}, random.Random(0)
    wide, size, errors = in_float64(weights), config["dspark_block_size"], list[float]()
    with single_threaded():
        drafting = Drafting(new_llm(tmp_path, activations="as-trained"))
        for _ in range(16):
            text = [draw.randrange(config["vocab_size"]) for _ in range(6)]
            seen, found = drafting.draft([text], size)
            ids, logits = [int(i) for i in found.ids], torch.cat(seen)
            wanted, exact = (
                draft(wide, c, context_rows(wide, c, main), text[-1], ids).logits
                for c in (trained, config)
                for main in [main_feature(wide, c, text[:-1])]
            )
            errors += ((logits - wanted).norm(dim=1) / wanted.norm(dim=1)).tolist()
            assert relative_error(logits, exact) > 1e-2
    assert_texts_agree(errors, size)
