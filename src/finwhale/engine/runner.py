"""The model on one device, and one forward over a batch of chunks."""

import logging
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from finwhale.config import EngineConfig
from finwhale.engine.batch import Batch, BatchBuilder
from finwhale.engine.graphs import PREFILL_SIZES, Graphs, decode_sizes
from finwhale.engine.kv_cache import CachePlan, allocate_cache, plan_cache
from finwhale.engine.scheduler import Chunk
from finwhale.engine.static_inputs import StaticInputs
from finwhale.engine.transfer import send
from finwhale.errors import FinwhaleError, ResourceError
from finwhale.models.deepseek_v4.build import WeightStream, load_weights
from finwhale.models.deepseek_v4.cache_spec import cache_spec
from finwhale.models.deepseek_v4.config import ModelConfig
from finwhale.models.deepseek_v4.model import DeepseekV4
from finwhale.models.deepseek_v4.step import Inline, Segments, StepInputs
from finwhale.ops import load_ops
from finwhale.platform import Platform

logger = logging.getLogger(__name__)

CPU_CACHE_BYTES = 2**30
GPU_CACHE_SHARE = 0.6


class ModelRunner:
    """Owns the weights, the paged cache and the operators of one device.

    Args:
        stream: the weights as they are read, in any order.

    Attributes:
        sampled: [max_num_seqs] int64 on the device: ids for the tokens of the next step that are
            pending (Sequence.sampled_row).

    Raises:
        ResourceError: no such device, or model and cache do not fit it.
        CheckpointError: the weights are not those of the configuration.
    """

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, stream: WeightStream
    ) -> None:
        self.platform, self.device = choose_device(config.device)
        self.dtype = _choose_dtype(config.dtype, self.platform)
        serves = _table_serves(self.platform, self.dtype, config, model_config, stream)
        self.ops = load_ops(self.platform, reference=not serves)
        longest = _longest(config, model_config)
        self.groups = cache_spec(model_config)
        self.segments = Inline()
        try:
            weights = load_weights(
                model_config,
                stream,
                dtype=self.dtype,
                device=self.device,
                round_activations=config.activations == "as-trained",
                ops=self.ops,
            )
            self.plan = self._plan(config, longest)
            self.max_model_len = min(longest, self.plan.capacity_tokens)
            if config.max_model_len is not None and self.max_model_len < config.max_model_len:
                raise ResourceError(
                    f"max_model_len {config.max_model_len} was asked for, but the cache's memory "
                    f"({self.plan.total_bytes:,} bytes) holds {self.plan.capacity_tokens} tokens: "
                    "raise cache_memory_bytes"
                )
            self.model = DeepseekV4(
                model_config,
                self.ops,
                weights,
                round_activations=config.activations == "as-trained",
                max_positions=self.max_model_len,
            )
            self.cache = allocate_cache(
                self.groups, self.plan, self.dtype, self.device, self.ops.packed
            )
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            raise ResourceError(
                f"the model does not fit {self.device}: {str(error).splitlines()[0]}"
            ) from error
        self.graphs: Graphs | None = None
        self.prefill_graphs: Graphs | None = None
        if self.ops.packed and not config.enforce_eager:
            self.sampled = self._capture(config)
        else:
            self.sampled = torch.zeros(config.max_num_seqs, dtype=torch.int64, device=self.device)
        self.batches = BatchBuilder(self.groups, self.device, self.sampled)

    @torch.inference_mode()
    def _capture(self, config: EngineConfig) -> Tensor:
        """Record decodes whole, logits included, and steps of few tokens up to the streams.

        Returns:
            `sampled` of the inputs that they read.
        """

        def streams(inputs: StepInputs, segments: Segments) -> Tensor:
            result: Tensor = self.model(inputs, self.cache, segments)
            return result

        def logits(inputs: StepInputs, segments: Segments) -> Tensor:
            result: Tensor = self.model.compute_logits(streams(inputs, segments))
            return result

        pool = torch.cuda.graph_pool_handle()
        most = config.max_num_batched_tokens
        decodes = sorted(set(config.graph_sizes or decode_sizes(config.max_num_seqs)))
        prefills: list[int] = []
        if config.graph_sizes is None:
            prefills = [size for size in PREFILL_SIZES if size < most] or [most]
        static = StaticInputs(
            max(decodes[-1], *prefills, 0),
            config.max_num_seqs,
            self.groups,
            self.max_model_len,
            self.device,
        )
        if prefills:
            self.prefill_graphs = Graphs(
                streams, static, sizes=prefills, decode=False, device=self.device, pool=pool
            )
        self.graphs = Graphs(
            logits, static, sizes=decodes, decode=True, device=self.device, pool=pool
        )
        return static.sampled

    def _plan(self, config: EngineConfig, longest: int) -> CachePlan:
        budget = config.cache_memory_bytes
        if budget is None:
            budget = CPU_CACHE_BYTES
            if self.device.type == "cuda":
                budget = int(torch.cuda.mem_get_info(self.device)[0] * GPU_CACHE_SHARE)
        page = max((g.tokens_per_page for g in self.groups if g.keep is None), default=1)
        return plan_cache(
            self.groups,
            itemsize=self.dtype.itemsize,
            packed=self.ops.packed,
            budget_bytes=budget,
            max_num_seqs=config.max_num_seqs,
            max_step_tokens=config.max_num_batched_tokens,
            wanted_tokens=-(-longest // page) * page * config.max_num_seqs,
        )

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk]) -> tuple[Batch, Tensor]:
        """Read the chunks' tokens; returns the batch and the streams [N,H,D] of its tokens."""
        batch = self.batches.build(chunks)
        return batch, self.model(batch.inputs, self.cache, self.segments)

    @torch.inference_mode()
    def logits(self, chunks: Sequence[Chunk]) -> Tensor:
        """Logits [M,V] float32 after each chunk that completes its sequence."""
        if self.graphs is not None and self.graphs.fits(chunks):
            return self.graphs.run(chunks)
        if self.prefill_graphs is not None and self.prefill_graphs.fits(chunks):
            streams, rows = self.prefill_graphs.run(chunks), self.batches.logits_rows(chunks)
        else:
            batch, streams = self.forward(chunks)
            rows = batch.logits_rows
        if rows.shape[0] == 0:
            return streams.new_empty(0, self.model.config.vocab_size, dtype=torch.float32)
        logits: Tensor = self.model.compute_logits(streams.index_select(0, rows))
        return logits

    @torch.inference_mode()
    def rows(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """Some rows of a step's logits."""
        return logits.index_select(0, send(self.device, np.array(rows, np.int64))[0])

    @torch.inference_mode()
    def feed(self, ids: Tensor) -> None:
        """Keep the ids [M] int64 that were sampled from a step's logits for the next step."""
        self.sampled[: len(ids)].copy_(ids)


def _table_serves(
    platform: Platform,
    dtype: torch.dtype,
    config: EngineConfig,
    model_config: ModelConfig,
    stream: WeightStream,
) -> bool:
    """Whether the platform's own table computes what is asked for; else the references do."""
    if config.reference:
        return False
    if platform.vendor == "cpu":
        return dtype == torch.float32
    reasons = []
    if dtype != torch.bfloat16:
        reasons.append("dtype is not bfloat16")
    if config.activations != "as-trained":
        reasons.append("activations are not as trained")
    if any(s != "fp4" for name, s in stream.storages.items() if ".ffn.experts." in name):
        reasons.append("experts are not FP4")
    if not _kernels_fit(model_config):
        reasons.append("its sizes are not multiples of 128")
    if reasons and (platform.vendor, platform.arch) == ("nvidia", "sm90"):
        logger.warning("the slow references run, because %s", " and ".join(reasons))
    return not reasons


def _kernels_fit(c: ModelConfig) -> bool:
    """Whether the packed kernels take a model's sizes: whole groups of activations and rows."""
    group_width = c.num_attention_heads * c.head_dim // c.o_groups
    grouped = (c.hidden_size, c.q_lora_rank, c.o_lora_rank, group_width, c.moe_intermediate_size)
    nope = c.head_dim - c.qk_rope_head_dim
    return (
        all(width % 128 == 0 for width in grouped)
        and c.index_head_dim == 128
        and nope % 16 == 0
        and c.qk_rope_head_dim % 8 == 0
    )


def _longest(config: EngineConfig, model_config: ModelConfig) -> int:
    """Tokens of one sequence at most, as asked for or as the model allows."""
    limit = model_config.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise FinwhaleError(
            f"max_model_len is {config.max_model_len}, but the model's context is {limit} tokens"
        )
    return config.max_model_len or limit


def _is_out_of_memory(error: Exception) -> bool:
    """A CPU allocation that fails is a plain RuntimeError to torch, a MemoryError to numpy."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate" in str(error)


def choose_device(name: str | None) -> tuple[Platform, torch.device]:
    """The device asked for, or a GPU where there is one. Raises FinwhaleError, ResourceError."""
    if name is None:
        platform = Platform.detect()
        return platform, torch.device(platform.device_type)
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise FinwhaleError(f'device must be "cpu", "cuda" or "cuda:N", got {name!r}') from error
    if device.type == "cpu" and device.index is None:
        return Platform.cpu(), device
    if device.type != "cuda":
        raise FinwhaleError(f'device must be "cpu", "cuda" or "cuda:N", got {name!r}')
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise ResourceError(f"device {name!r} asked for, but torch sees {count} GPUs")
    return Platform.detect(device.index or 0), device


def _choose_dtype(name: str | None, platform: Platform) -> torch.dtype:
    if name is None:
        return torch.float32 if platform.vendor == "cpu" else torch.bfloat16
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
