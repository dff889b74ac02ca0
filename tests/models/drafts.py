"""Every draft that a real engine made, beside the logits that it should have been chosen from."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tests.support.integrity import check_engine
from torch import Tensor

from finwhale import RequestOutput, SamplingParams
from finwhale.checkpoint.reader import Checkpoint
from finwhale.demo import DEMO_PATH
from finwhale.engine.loop.engine import Engine
from finwhale.engine.plan.draft_policy import DraftChooser, step_kinds
from finwhale.engine.plan.sequences import Chunk
from finwhale.models.deepseek_v4.config_json import config_of
from finwhale.models.deepseek_v4.weights import weight_specs
from finwhale.ops.sampling.noise import gumbel
from finwhale.weights.source import WeightSource

from . import transcription

# Lengths that put drafts across the ends of C4 windows (4 tokens), of the attention window and of
# C128 windows (128), and of blocks and C128 windows (256).
PROMPT_LENGTHS = (2, 3, 5, 118, 121, 127, 128, 129, 243, 250)
STORY = (
    "Once upon a time, in a small village by the sea, there lived a brave rabbit named Sam. One "
    "day he wanted to see the old bridge, so he packed some apples and left. On the way he met a "
    "fox named Lily. "
) * 12


def demo_weights(config: dict[str, Any]) -> dict[str, Tensor]:
    """The embedded model's tensors by official name, as float32 numbers."""
    source = WeightSource(Checkpoint.open(DEMO_PATH), weight_specs(config_of(config)))
    return {spec.name: stored.dequantise(torch.float32) for spec, stored in source}


@dataclass(frozen=True)
class Proposal:
    """What the engine drafted after a text."""

    key: str
    length: int
    drafts: list[int]


class RandomDrafts(DraftChooser):
    """Any kind of step, and any numbers of drafts that fit into it.

    Args:
        block: the head's pass makes all drafts at once.
    """

    def __init__(self, most: int, seed: int, *, block: bool = False) -> None:
        super().__init__(0)
        self.kinds = step_kinds(most, block=block)
        self.draw = random.Random(seed)
        self.seen: set[tuple[int, ...]] = set()

    def choose(
        self, sequences: Sequence[Any], limits: Sequence[int], *, unresolved: bool
    ) -> list[int]:
        self.kind = self.draw.choice(self.kinds)
        left, counts = len(sequences) * (self.kind.width - 1), []
        for limit in limits:
            counts.append(self.draw.randint(0, min(limit, left, self.kind.drafts)))
            left -= counts[-1]
        self.seen.add(tuple(counts))
        return counts


class Watch:
    """Notes the drafts of a drafting engine when they reach its sequences."""

    def __init__(self, engine: Engine) -> None:
        self.proposals: list[Proposal] = []
        self._verified = engine.scheduler.record_verified
        engine.scheduler.record_verified = self._note  # type: ignore[method-assign]

    def _note(self, chunk: Chunk, num_accepted: int) -> None:
        sequence = chunk.sequence
        # A sequence that ends may drop chosen tokens; the drafts after its last one are unused.
        if sequence.drafts and len(sequence.token_ids) < sequence.max_len:
            found = Proposal(sequence.key, len(sequence.token_ids), list(sequence.drafts))
            self.proposals.append(found)
        self._verified(chunk, num_accepted)


def params_of(prompt_index: int) -> SamplingParams:
    """The sampling of the prompt of PROMPT_LENGTHS[prompt_index]: every second one draws."""
    return SamplingParams(
        temperature=0.8 * (prompt_index % 2),
        seed=prompt_index,
        n=1 + (prompt_index == 5),
        ignore_eos=True,
    )


def generate(engine: Engine, encoded: list[int], max_tokens: int) -> dict[str, list[int]]:
    """Run prompts of all lengths, greedy and drawn; each sequence's whole text by its key."""
    results: list[RequestOutput] = []
    for prompt_index, length in enumerate(PROMPT_LENGTHS):
        params = replace(params_of(prompt_index), max_tokens=max_tokens)
        prompt = encoded[prompt_index : prompt_index + length]
        results.append(engine.add_request(str(prompt_index), prompt, params))
    while engine.has_work:
        engine.step()
        check_engine(engine)
    return {
        f"{result.request_id}/{output.index}": [*result.prompt_token_ids, *output.token_ids]
        for result in results
        for output in result.outputs
    }


@dataclass
class Agreement:
    """How the drafts at one index (first, second, third) compare with the transcription.

    Attributes:
        compared: drafts where the transcription's choice is no near tie.
        equal: of these, those that are the transcription's choice.
        ties: drafts that were left out.
        worst: how far any draft's value lies below the largest, over the largest logit's magnitude.
            A value is a logit and, where the request draws, temperature * noise.
    """

    compared: int = 0
    equal: int = 0
    ties: int = 0
    worst: float = 0.0

    def add(self, logits: Tensor, noise: Tensor, draft: int, near_tie: float) -> None:
        largest, values = logits.abs().max(), logits + noise
        first, second = values.topk(2).values
        self.worst = max(self.worst, float((first - values[draft]) / largest))
        if first - second < near_tie * largest:
            self.ties += 1
        else:
            self.compared += 1
            self.equal += int(values.argmax() == draft)


def noise_of(key: str, position: int, num_tokens: int) -> Tensor:
    """temperature * noise of the model's draw of the token at `position` of a sequence's text."""
    prompt_index, index = map(int, key.split("/"))
    params = params_of(prompt_index)
    output = torch.tensor([position - PROMPT_LENGTHS[prompt_index]])
    seed = torch.tensor([params.seed])
    return params.temperature * gumbel(seed, torch.tensor([index]), output, num_tokens)[0]


Streams = Callable[[list[int]], Tensor]
# Streams by text, and logits of drafts by the text, -1 and the drafts.
Known = dict[tuple[int, ...], Tensor]


@torch.inference_mode()
def compare(
    weights: dict[str, Tensor],
    config: dict[str, Any],
    texts: dict[str, list[int]],
    proposals: Sequence[Proposal],
    *,
    near_tie: float,
    streams_of: Streams | None = None,
    known: Known | None = None,
) -> list[Agreement]:
    """Compare each draft with the transcription, which gets the drafts before it.

    The draft of a request that draws is chosen with the noise of the model's draw at its position.

    Args:
        near_tie: leave out choices whose two best logits differ by less than this share of the
            largest magnitude.
        streams_of: the model's streams [T,H,D] of a text, float32, which the MTP layer begins
            from; None: the transcription's.
        known: the transcription's results for this model. They are looked up here, and added.
    """
    known = {} if known is None else known
    agreements = [Agreement() for _ in range(max(len(p.drafts) for p in proposals))]
    for key, text in texts.items():
        if streams_of is not None:
            known.clear()  # Logits depend on these streams too.
            known[tuple(text)] = streams_of(text)
        elif tuple(text) not in known:
            known[tuple(text)] = transcription.forward(weights, config, text)[1]
        streams = known[tuple(text)]
        for proposal in proposals:
            if proposal.key != key:
                continue
            ids = text[: proposal.length]
            both = *ids, -1, *proposal.drafts
            if both not in known:
                before = streams[: len(ids) - 1]
                known[both] = transcription.draft_logits(
                    weights, config, before, ids, proposal.drafts
                )
            logits = known[both]
            for k, (row, draft) in enumerate(zip(logits, proposal.drafts, strict=True)):
                noise = noise_of(key, proposal.length + k, len(row))
                agreements[k].add(row, noise, draft, near_tie)
    return agreements
