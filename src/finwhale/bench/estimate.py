"""Calculates the time of steps on GPUs, from their bytes and operations and from the records.

Reading takes its floor, and arithmetic twice its floor. A layer also takes a fixed time, and some
for each different expert that it uses and for each token. The constants are fitted to the records
of whole models on two to eight H200s in bench/results since 2026-11-26T10;
tests/unit/test_estimate.py compares them with these and with other records. Tokens choose their
experts evenly.
"""

from dataclasses import dataclass

from finwhale.bench.floors import DecodeBytes, PrefillOperations, expected_experts, read_ms
from finwhale.distributed.rank import Rank
from finwhale.models.deepseek_v4.config import DeepseekV4Config
from finwhale.models.protocol import ModelConfig

# Milliseconds. With a larger hidden size, a layer and a token take more in proportion.
LAYER_MS, EXPERT_MS, TOKEN_MS, HIDDEN_SIZE = 0.0397, 0.35e-3, 0.11e-3, 4096
INDEX_MS = 0.0157  # of a C4 layer in a decode, if the indexer selects entries
ARITHMETIC = 1.97  # the time of a step's operations, as a multiple of its floor


@dataclass(frozen=True, slots=True)
class Gpu:
    """A kind of GPU.

    Attributes:
        num_bytes: memory that torch sees.
        speed: how fast it reads its memory, of an H200; by the data sheets.
    """

    num_bytes: int
    speed: float = 1.0


GPUS = {
    "H100 80 GB": Gpu(85_000_000_000, 3.35 / 4.8),
    "H200 141 GB": Gpu(150_000_000_000),
}


class StepTimes:
    """Milliseconds of steps of one tensor-parallel rank of num_ranks."""

    def __init__(self, config: ModelConfig, num_ranks: int, gpu: Gpu) -> None:
        assert isinstance(config, DeepseekV4Config)
        self.config, self.gpu, rank = config, gpu, Rank(0, num_ranks)
        self._bytes, self._operations = DecodeBytes(config, rank), PrefillOperations(config, rank)

    def decode(self, context: int, sequences: int, drafts: int = 0) -> float:
        """A step in which each sequence gets one token, or has `drafts` verified and drafted."""
        c = self.config
        tokens = sequences * (1 + drafts)
        experts = expected_experts(c, tokens)
        num_bytes = self._bytes.step(context, sequences, experts)
        num_bytes += self._bytes.drafts(drafts, sequences)
        layers = c.num_hidden_layers
        if drafts:
            layers += c.num_draft_layers if c.draft_head == "dspark" else drafts
        ms = self._step(1, tokens, num_bytes, experts, layers)
        if context // 4 > c.index_topk:
            ms += INDEX_MS * c.layer_ratios.count(4)
        return ms

    def prefill(self, tokens: int, step_tokens: int) -> float:
        """All steps of one prompt, of up to step_tokens each."""
        steps = -(-tokens // step_tokens)
        experts = expected_experts(self.config, min(tokens, step_tokens))
        num_bytes = steps * self._bytes.step(0, 0, experts)
        return self._step(steps, tokens, num_bytes, experts, self.config.num_hidden_layers)

    def tokens_per_s(self, prompt: int, output: int, sequences: int, mixed_tokens: int) -> float:
        """Output tokens per second of requests, of which `sequences` always run.

        Prompts are read in steps of mixed_tokens in which the others decode. If there are more such
        steps than decodes, the rest reads only prompts.
        """
        c = self.config
        rest = max(0.0, sequences * prompt / mixed_tokens - output)
        experts, layers = c.n_routed_experts, c.num_hidden_layers
        reading = self._step(1, 0, self._bytes.step(0, 0, experts), experts, layers)
        ms = rest * reading + sequences * self._step(0, prompt, 0.0, 0.0, layers)
        ms += output * self.decode(prompt + output // 2, sequences)
        return 1e3 * sequences * output / ms

    def _step(
        self, steps: int, tokens: int, num_bytes: float, experts: float, layers: int
    ) -> float:
        width = max(1.0, self.config.hidden_size / HIDDEN_SIZE)
        fixed = steps * (LAYER_MS * width + EXPERT_MS * experts) + tokens * TOKEN_MS * width
        arithmetic = ARITHMETIC * self._operations.ms(tokens)
        return read_ms(num_bytes) / self.gpu.speed + arithmetic + layers * fixed
