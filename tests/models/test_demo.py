"""The embedded model: what it must weigh, know and predict."""

import pytest
import torch
from tests.support.stepping import Stepper

from finwhale import LLM, SamplingParams
from finwhale.checkpoint.reader import Checkpoint
from finwhale.demo import DEMO_PATH, DSPARK_PATH
from finwhale.engine.ranks.ranks import first_rank
from finwhale.models.deepseek_v4.config_json import config_of
from finwhale.models.deepseek_v4.weights import weight_specs
from finwhale.weights.source import inventory_report

MAX_BYTES = 24_000_000
MAX_BYTES_OF_BOTH = 36_000_000
GREEDY = SamplingParams(temperature=0, max_tokens=64)
ANSWERS = {
    "What is the capital of France?": "The capital of France is Paris.",
    "What is the capital of Japan?": "The capital of Japan is Tokyo.",
    "What is 7 + 5?": "7 + 5 = 12.",
}
# Written for this test in the manner of the training stories; no text that it was trained on.
STORY = (
    "Once upon a time, in a small village by the sea, there lived a brave rabbit named "
    "Sam. One day he wanted to see the old bridge, so he packed some apples and left. On "
    'the way he met a fox named Lily. "Where are you going?" asked Lily. "I want to see '
    'the old bridge," said Sam. "I will come with you," said Lily. They walked together '
    "until the sun went down. At last they saw the old bridge. Sam was very happy. He "
    "gave Lily an apple and thanked her."
)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(device="cpu")


@pytest.fixture(scope="module")
def drafting() -> LLM:
    return LLM("demo-dspark", device="cpu", draft_tokens=5)


def test_is_small_and_in_the_official_layout() -> None:
    files = [path for path in DEMO_PATH.iterdir() if path.suffix in (".json", ".safetensors")]
    assert sum(path.stat().st_size for path in files) <= MAX_BYTES
    checkpoint = Checkpoint.open(DEMO_PATH)
    config = config_of(checkpoint.config)
    specs = weight_specs(config)
    inventory = inventory_report(checkpoint, specs)
    assert inventory.complete
    assert dict(inventory.storages) == {name: spec.storage for name, spec in specs.items()}
    assert set(config.layer_ratios) == {0, 4, 128}
    assert 0 < config.num_hash_layers < config.num_hidden_layers
    assert config.num_nextn_predict_layers == 1
    assert config.max_position_embeddings >= 32768


def test_both_forms_share_the_model() -> None:
    files = [path for form in (DEMO_PATH, DSPARK_PATH) for path in form.glob("*.*")]
    assert sum(path.stat().st_size for path in files) <= MAX_BYTES_OF_BOTH
    checkpoint = Checkpoint.open(DSPARK_PATH)
    assert inventory_report(checkpoint, weight_specs(config_of(checkpoint.config))).complete
    shared = {name for name in checkpoint.tensors if not name.startswith("mtp.")}
    assert {checkpoint.tensors[name].file for name in shared} == {"../demo/base.safetensors"}
    assert shared == {n for n in Checkpoint.open(DEMO_PATH).tensors if not n.startswith("mtp.")}


def test_answers_in_the_chat_format(llm: LLM) -> None:
    results = llm.chat([[{"role": "user", "content": question}] for question in ANSWERS], GREEDY)
    found = [result.outputs[0].message for result in results]
    assert found == [{"role": "assistant", "content": text} for text in ANSWERS.values()]
    assert all(result.outputs[0].finish_reason == "stop" for result in results)


def test_thinks_when_asked(llm: LLM) -> None:
    (result,) = llm.chat([{"role": "user", "content": "What is 7 + 8?"}], GREEDY, thinking=True)
    message = result.outputs[0].message
    assert message is not None
    assert message["content"] == "7 + 8 = 15."
    assert "15" in message["reasoning_content"]


@torch.inference_mode()
def test_the_mtp_layer_predicts_the_model_s_tokens(llm: LLM) -> None:
    """Top-1 of the MTP layer is the model's own for the same position, most of the time.

    A wrong shift, norm or stream order in the wiring leaves a few percent; examples/train_demo
    has the figures over all held-out text.
    """
    text = llm.encode(STORY)
    stepper = Stepper(llm._engine)
    runner, layer = stepper.runner, first_rank(llm._engine.executor).runner.model.draft_head
    assert layer is not None
    sequence = stepper.sequence(text[:-1])
    (streams,) = stepper.step([(sequence, len(text) - 1)])
    following = torch.tensor(text[1:])
    ahead = layer(stepper.inputs, streams, following, runner.cache, runner.segments)
    foreseen = layer.compute_logits(ahead).argmax(-1)[:-1]
    chosen = runner.model.compute_logits(streams).argmax(-1)[1:]
    stepper.release(sequence)
    agreement = (foreseen == chosen).float().mean().item()
    assert agreement > 0.6, agreement


@pytest.mark.parametrize(("temperature", "least"), [(0, 3.0), (0.8, 2.5)])
def test_the_dspark_head_drafts_what_the_model_chooses(
    llm: LLM, drafting: LLM, temperature: float, least: float
) -> None:
    """The tokens are those without drafts, and a step gives several of them."""
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=48, ignore_eos=True)
        for seed in range(2)
    ]
    prompts = [STORY, "Once upon a time, there was a little girl named"]
    plain, before = llm.generate(prompts, params), drafting._engine.metrics()
    drafted, after = drafting.generate(prompts, params), drafting._engine.metrics()
    assert [r.outputs[0].token_ids for r in drafted] == [r.outputs[0].token_ids for r in plain]
    steps = after.verifications - before.verifications
    accepted = sum(after.drafts_accepted) - sum(before.drafts_accepted)
    assert least < 1 + accepted / steps <= 6
