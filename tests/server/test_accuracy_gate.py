"""The accuracy gate: lm-evaluation-harness gives a server one score with drafts and without."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from finwhale import LLM

from .running import MODEL, RunningServer

TASK = Path(__file__).parent / "accuracy"
KINDS = ("local-chat-completions", "local-completions")


def score(
    url: str, model: str, kind: str, folder: Path, limit: int | None = None
) -> tuple[float, list[str]]:
    """The part of the answers that are right, and the answers, in the task's order.

    Args:
        url: of the server.
        kind: which of the harness's models: "local-chat-completions" or "local-completions".
        folder: for what it keeps.
        limit: how many of the task's questions to ask; None: all.
    """
    # Nothing is fetched: the data lie here. Read when the library is imported.
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    os.environ["HF_DATASETS_CACHE"] = str(folder)
    lm_eval = pytest.importorskip("lm_eval", reason="needs lm-eval, of the `eval` extra")
    tasks = pytest.importorskip("lm_eval.tasks")
    chat = kind == "local-chat-completions"
    path = "chat/completions" if chat else "completions"
    found: dict[str, Any] = lm_eval.simple_evaluate(
        model=kind,
        model_args={
            "model": model,
            "base_url": f"{url}/v1/{path}",
            "tokenizer_backend": None,
            "tokenized_requests": False,
            "num_concurrent": 4,
            "max_retries": 1,
        },
        tasks=["demo_answers"],
        task_manager=tasks.TaskManager(include_path=str(TASK), include_defaults=False),
        apply_chat_template=chat,
        log_samples=True,
        limit=limit,
        bootstrap_iters=0,
    )
    samples = sorted(found["samples"]["demo_answers"], key=lambda sample: sample["doc_id"])
    right = found["results"]["demo_answers"]["exact_match,last-word"]
    return right, [sample["resps"][0][0] for sample in samples]


def scores(
    folder: Path, limit: int | None = None, **options: Any
) -> dict[str, tuple[float, list[str]]]:
    """By the harness's kind of model; and the drafts were of use."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    engine = LLM(max_num_seqs=4, max_model_len=256, **options)._engine
    server = RunningServer(engine)
    try:
        found = {kind: score(server.url, MODEL, kind, folder, limit) for kind in KINDS}
    finally:
        server.close()
        torch.set_num_threads(threads)
    accepted = engine.metrics().drafts_accepted[0]
    assert (accepted > 15) == bool(options["draft_tokens"])
    return found


def test_drafting_changes_no_score(tmp_path: Path) -> None:
    plain = scores(tmp_path, 5, device="cpu", draft_tokens=0)
    for right, answers in plain.values():
        assert len(answers) == 5 and right > 0.7
    assert scores(tmp_path, 5, device="cpu", draft_tokens=2) == plain


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and torch sees none"
)
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["captured", "eager"])
def test_drafting_changes_no_score_on_a_gpu(tmp_path: Path, enforce_eager: bool) -> None:
    options = {"device": "cuda", "batch_invariant": True, "enforce_eager": enforce_eager}
    plain = scores(tmp_path, draft_tokens=0, **options)
    assert all(right > 0.8 for right, _ in plain.values())
    assert scores(tmp_path, draft_tokens=2, **options) == plain
