"""The options of an engine. Frozen, self-checking; no torch.

`LLM`, the commands and docs/options.md all derive their options from `EngineConfig`.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from finwhale.errors import FinwhaleError
from finwhale.options import check_options, host_and_port, option

Activations = Literal["as-trained", "exact"]
DraftTokens = int | Literal["auto"]
DtypeName = Literal["float32", "bfloat16"]
WoAInput = Literal["fp8", "bf16"]

# The numbers of ranks that may share a model.
RANK_COUNTS = (1, 2, 4, 8)
# The largest draft_tokens of any draft head. A model's own limit is its max_draft_tokens.
MAX_DRAFT_TOKENS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The options of one engine. None means the default that the option's `unset` describes."""

    device: str | None = option(
        None,
        '"cpu", "cuda", "cuda:N", or "cuda:N,N,..." with one GPU for each rank',
        unset="the first GPUs if there are any",
        metavar="DEVICE",
    )
    tensor_parallel_size: int | None = option(
        None,
        f"number of GPUs that share the model: {', '.join(map(str, RANK_COUNTS[:-1]))} or "
        f"{RANK_COUNTS[-1]}. On a CPU, number of processes, for tests",
        unset="as many as --device names, else the fewest that hold the model; 1 on a CPU",
    )
    data_parallel_size: int = option(
        1,
        "number of ranks that each serve requests of their own, with their own attention and "
        "cache, and share the experts. On two H200s, 128 sequences at once then had more tokens "
        "per second, and a single stream fewer",
    )
    whole_attention: bool | None = option(
        None,
        "in large steps, divide attention among the ranks by tokens instead of heads: prefill is "
        "faster, and each rank keeps all of attention's weights, which takes memory from the "
        "cache. Not with --batch-invariant",
        unset="if they take at most a 24th of the GPU's memory",
    )
    distributed_executor: Literal["spawn", "ray"] = option(
        "spawn",
        "how the processes of several ranks start: spawn starts them on this host; ray starts one "
        "actor of a Ray cluster for each GPU. Under torchrun, its processes are the ranks",
    )
    dtype: DtypeName | None = option(
        None, "dtype of activations and cache", unset="bfloat16 on a GPU, float32 on a CPU"
    )
    activations: Activations = option(
        "as-trained",
        "as-trained rounds activations and cached KV to FP8, and the indexer's queries and keys to "
        "FP4, as in training; exact rounds none of them",
    )
    # The authors' inference code does not round this input; docs/numerics.md compares both.
    wo_a_input: WoAInput = option(
        "fp8",
        "round the input of attention's wo_a to FP8 like the input of every FP8 projection, or do "
        "not round it, as in the authors' code; bf16 needs as-trained activations",
    )
    load_format: Literal["auto", "dummy"] = option(
        "auto",
        "auto reads the checkpoint; dummy reads only config.json and generates random weights on "
        "the device, to measure speed and memory",
    )
    generation_config: Literal["auto", "none"] = option(
        "auto",
        "auto takes the sampling parameters of the checkpoint's generation_config.json where a "
        "request leaves them out; none ignores these values. Its end tokens always apply",
    )
    reference: bool = option(
        False, "run the plain torch definitions of the operators instead of the platform's kernels"
    )
    batch_invariant: bool = option(
        False,
        "give a request the same output bits whatever else is in the batch and however its prompt "
        "is chunked; slower on a GPU. On a CPU, float32 is always batch-invariant; other dtypes "
        "and --reference are refused",
    )
    enforce_eager: bool = option(
        False, "launch every kernel from the host instead of replaying captured CUDA graphs"
    )
    graph_sizes: tuple[int, ...] | None = option(
        None,
        "batch sizes for which a decode step is captured as a CUDA graph",
        unset="increasing sizes up to --max-num-seqs",
        metavar="N,N,...",
    )
    max_model_len: int | None = option(
        None,
        "maximum number of tokens of one sequence, prompt and output together",
        unset="the checkpoint's limit, or less if the cache is too small",
        least=2,
    )
    max_num_seqs: int | None = option(
        None,
        "maximum number of sequences that run at once",
        unset="64 for each GPU, at most 256; 64 on a CPU, if weights leave a GPU less than "
        "24 GiB, or with --cache-memory-bytes below 4 GiB",
        least=1,
    )
    max_num_batched_tokens: int | None = option(
        None,
        "maximum number of tokens in one forward pass, prefill chunks and decodes together; three "
        "quarters of it if sequences decode. With more, prompts are read faster, and running "
        "requests wait longer for their next tokens",
        unset="8192, and 2560 if sequences decode; 4096 and 1536 for each data-parallel rank; 2048 "
        "and 1536 on a CPU, if weights leave a GPU less than 24 GiB, or with --cache-memory-bytes "
        "below 4 GiB",
        least=1,
    )
    target_interval: float | None = option(
        None,
        "milliseconds between a request's tokens that steps aim at while prompts are read: a step "
        "reads as much of the prompts as fits into this time",
        unset="steps are as large as --max-num-batched-tokens says, for throughput",
        metavar="MS",
        above=0,
    )
    gpu_memory_utilization: float = option(
        0.9,
        "fraction of GPU memory to use for weights, workspace and cache; memory that other "
        "processes hold counts too",
        metavar="FRACTION",
        above=0,
        most=1,
    )
    cache_memory_bytes: int | None = option(
        None,
        "memory for the paged cache, in bytes",
        unset="on a GPU what --gpu-memory-utilization leaves, on a CPU at most 1 GiB",
        least=1,
    )
    enable_prefix_caching: bool = option(
        True,
        "do not reuse cached prefixes between requests; reuse does not change the output, except "
        "that of DeepSeek-V4.1 without --exact-prefill",
        flag="--no-prefix-caching",
    )
    exact_prefill: bool = option(
        False,
        "DeepSeek-V4.1 only: run all layers on all tokens of a prompt, and keep the windows of "
        "cached prefixes, so that reuse does not change the output. Without it, as in the authors' "
        "scheme, the second half of the layers runs on a prompt's last 128 tokens, and the windows "
        "of a cached prefix are computed again from its last 128 tokens",
    )
    prefix_salt: str | None = option(
        None,
        "secret in the hashes of cached prefixes; processes with the same secret have the same "
        "hashes",
        unset="random",
        metavar="SECRET",
    )
    prefix_store: str | None = option(
        None,
        "keep cached prefixes in a directory, so that they survive restarts and evictions, and "
        "serve other servers; the oldest go when all have more than SIZE bytes (such as 500GB)",
        unset="prefixes are kept in the cache alone",
        metavar="DIR[:SIZE]",
    )
    prefix_store_saves: Literal["all", "shared"] = option(
        "all",
        "which blocks of 256 tokens the store keeps: all, or those that a second request shares, "
        "and the rest of such a request when it ends. `shared` writes little if most prompts come "
        "only once",
    )
    prefix_peers: str | None = option(
        None,
        "servers of other hosts (their --prefix-peer-port) that are asked for prefixes which the "
        "store lacks; needs --prefix-salt, the same on all",
        unset="none",
        metavar="HOST:PORT,...",
    )
    prefix_peer_port: str | None = option(
        None,
        "port, of 127.0.0.1 or of HOST, at which other servers may ask for the store's prefixes; "
        "needs --prefix-salt. Nothing is encrypted: only for a trusted network",
        unset="nobody may",
        metavar="[HOST:]PORT",
    )
    role: Literal["both", "prefill"] = option(
        "both",
        "prefill: save the prompt of every request before its answer is sent, for the decode "
        "server that continues it, and capture no decode steps; needs --prefix-store. A decode "
        "server is an ordinary server with the same store",
    )
    kv_events: str | None = option(
        None,
        "publish over ZMQ which blocks of 256 tokens are in the cache, in vLLM's format, for "
        "routers; on a loopback address unless HOST is another one (* for all). The events have "
        "the token ids of all prompts; needs the extra events",
        unset="nothing is published",
        metavar="[HOST:]PORT[/TOPIC]",
    )
    enable_sleep_mode: bool = option(
        False,
        "allocate weights and cache so that `sleep` can free their memory and `wake` can allocate "
        "it again at the same addresses, for example between rollouts",
    )
    enable_return_routed_experts: bool = option(
        False,
        "let requests ask for the experts that each layer chose for their tokens "
        "(return_routed_experts); trainers replay this routing",
    )
    compile: bool = option(
        False,
        "compile the decoder layers ahead of time; the first start takes a minute or two longer, "
        "later starts load the compiled layers from --cache-dir",
    )
    cache_dir: Path | str | None = option(
        None,
        "directory that keeps compiled kernels for the next start",
        unset="finwhale in $XDG_CACHE_HOME or ~/.cache",
        metavar="DIR",
    )
    draft_tokens: DraftTokens = option(
        0,
        "number of tokens that the draft head drafts in each step: at most 3 with MTP; with "
        "DSpark, at most the block size (usually 5); auto chooses it from the acceptance rate and "
        "the step times. Drafts do not change the distribution of the output",
        metavar="N|auto",
        least=0,
        most=MAX_DRAFT_TOKENS,
    )
    tool_grammar: Literal["off", "auto"] = option(
        "off",
        "hold tool calls of the server and of LLM.chat to their tools' schemas, even if the "
        "request does not ask for that: auto uses a grammar that leaves text free until a call "
        "begins",
    )
    watchdog_seconds: float | None = option(
        None,
        "write the stacks of all threads to stderr when a step takes longer than this",
        unset="never",
        metavar="SECONDS",
        above=0,
        most=1e9,
    )

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("tensor_parallel_size", "data_parallel_size"):
            if (size := getattr(self, name)) not in (None, *RANK_COUNTS):
                counts = ", ".join(map(str, RANK_COUNTS))
                raise FinwhaleError(f"{name} must be one of {counts}, got {size}")
        if self.data_parallel_size != 1:
            self._check_data_parallel()
        if self.whole_attention and self.batch_invariant:
            raise FinwhaleError(
                "with whole_attention, the bits of a token depend on the size of its step: leave "
                "out whole_attention, or batch_invariant"
            )
        if self.wo_a_input == "bf16" and self.activations == "exact":
            raise FinwhaleError(
                'wo_a_input "bf16" means nothing with activations "exact", which round no input: '
                "leave one of them out"
            )
        if self.compile and self.enable_return_routed_experts:
            raise FinwhaleError(
                "the compiled mode cannot return routed experts: leave out compile, or "
                "enable_return_routed_experts"
            )
        most = self.max_num_seqs or sys.maxsize
        if not all(0 < size <= most for size in self.graph_sizes or ()):
            given = f" ({self.max_num_seqs})" if self.max_num_seqs else ""
            raise FinwhaleError(
                f"graph_sizes must lie in 1..max_num_seqs{given}, got {self.graph_sizes}"
            )
        salt = self.prefix_salt
        peers = ("prefix_peers", "prefix_peer_port")
        for name in ("prefix_salt", "prefix_store", "kv_events", *peers):
            if (given := getattr(self, name)) is not None and type(given) is not str:
                raise FinwhaleError(f"{name} must be a string, got {type(given).__name__}")
        if self.prefix_store is None and self.prefix_store_saves != "all":
            raise FinwhaleError("prefix_store_saves needs prefix_store")
        if self.kv_events is not None:
            host_and_port("kv_events", self.kv_events.partition("/")[0], least=0)
            if not self.enable_prefix_caching:
                raise FinwhaleError("kv_events needs enable_prefix_caching: leave out one of them")
        if self.prefix_store is None and self.role == "prefill":
            raise FinwhaleError('role "prefill" needs prefix_store')
        if self.prefix_store is not None and not self.enable_prefix_caching:
            raise FinwhaleError("prefix_store needs enable_prefix_caching: leave out one of them")
        for name in peers:
            if (given := getattr(self, name)) is None:
                continue
            if self.prefix_store is None or not salt:
                raise FinwhaleError(f"{name} needs prefix_store and prefix_salt")
            for one in given.split(",") if name == "prefix_peers" else [given]:
                host_and_port(name, one)
        if salt == "":
            raise FinwhaleError("prefix_salt must not be empty: leave it out for a random one")

    @property
    def size_option(self) -> str:
        """The name of the option with the number of ranks."""
        return f"{'data' if self.data_parallel_size > 1 else 'tensor'}_parallel_size"

    @property
    def num_ranks(self) -> int | None:
        """Number of ranks; None: as many as the model needs."""
        return self.data_parallel_size if self.data_parallel_size > 1 else self.tensor_parallel_size

    def of_lane(self) -> "EngineConfig":
        """The options of one of data_parallel_size lanes, which divide the sizes of steps."""

        def divided(size: int | None) -> int | None:
            return None if size is None else -(-size // self.data_parallel_size)

        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        return replace(self, max_num_seqs=divided(seqs), max_num_batched_tokens=divided(tokens))

    def _check_data_parallel(self) -> None:
        """Raise FinwhaleError if another option contradicts data_parallel_size."""
        refused = {
            "tensor_parallel_size": self.tensor_parallel_size not in (None, 1),
            "whole_attention": self.whole_attention,
            "kv_events": self.kv_events,
        }
        for name, given in refused.items():
            if given:
                raise FinwhaleError(f"data_parallel_size does not work with {name}: leave one out")
