"""The real drafter's proposals against the transcription, step by step."""

from typing import Any

import pytest
from torch import Tensor

from finwhale import LLM
from finwhale.bench.engine import draft_on_device
from finwhale.checkpoint.config_files import read_config
from finwhale.config import DraftTokens
from finwhale.demo import DEMO_PATH

from .drafts import STORY, Known, RandomDrafts, Watch, compare, demo_weights, generate
from .oracle import single_threaded

# Two float32 implementations of the model agree to 1e-5 of the largest logit.
NEAR_TIE = 1e-4


@pytest.fixture(scope="module")
def demo() -> tuple[dict[str, Tensor], dict[str, Any]]:
    config = read_config(DEMO_PATH)
    return demo_weights(config), config


@pytest.fixture(scope="module")
def known() -> Known:
    """The transcription's results: the cases below mostly choose the same tokens and drafts."""
    return {}


@pytest.mark.parametrize(
    "draft_tokens, ahead",
    [
        pytest.param(3, False, id="3-over-the-host"),
        pytest.param("auto", True, id="auto-on-the-device"),
        pytest.param(3, True, id="3-on-the-device", marks=pytest.mark.long),
        *[
            pytest.param(count, ahead, id=f"{count}-{where}", marks=pytest.mark.long)
            for ahead, where in ((False, "over-the-host"), (True, "on-the-device"))
            for count in (1, 2)
        ],
    ],
)
def test_every_proposal(
    demo: tuple[dict[str, Tensor], dict[str, Any]],
    known: Known,
    draft_tokens: DraftTokens,
    ahead: bool,
) -> None:
    """Prompts of many lengths, read in chunks; after drafts that were right and that were wrong.

    "auto" stands for different numbers of drafts in each step and for each sequence.
    "on-the-device" runs what a GPU captures (draft_decode.py), a step ahead of the host.
    """
    with single_threaded():
        llm = LLM(
            device="cpu",
            dtype="float32",
            activations="exact",
            draft_tokens=draft_tokens,
            max_num_seqs=4,
            max_num_batched_tokens=100,
            max_model_len=300,
        )
        engine = llm._engine
        if ahead:
            draft_on_device(engine.executor, engine.config)
            engine.steps_ahead = 1
        if draft_tokens == "auto":
            engine.scheduler.drafting.chooser = RandomDrafts(3, 1)
        watch = Watch(engine)
        texts = generate(engine, llm.get_tokenizer().encode(STORY), max_tokens=12)
        metrics = engine.metrics()
        assert 0.2 < metrics.drafts_accepted[0] / metrics.drafts_proposed[0] < 0.95
        found = compare(*demo, texts, watch.proposals, near_tie=NEAR_TIE, known=known)
        for k, agreement in enumerate(found):
            assert agreement.compared >= (20 if draft_tokens == "auto" else 40), (k, agreement)
            assert agreement.ties <= 0.02 * agreement.compared, (k, agreement)
            assert agreement.equal == agreement.compared, (k, agreement)
            assert agreement.worst < NEAR_TIE, (k, agreement)
