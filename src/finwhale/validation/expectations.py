"""What to expect of a checkpoint: measured for the embedded model, estimates for published ones."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from finwhale.validation.report import Expectation
from finwhale.validation.texts import PROSE

_PUBLISHED = "stated, not measured: trained models predict such text well, broken ones far above"
_MEASURED = "measured on a CPU; options of the engine change it by up to 4%"
_DRAFTS = "stated, not measured: a draft head that is wired wrongly agrees with the model rarely"


@dataclass(frozen=True, slots=True)
class Expectations:
    """The expectations of one model.

    Attributes:
        model: its name.
        perplexity: of each built-in text; a text without an entry is not measured.
        first_draft: the share of first drafts that are accepted.
        chats: whether the model was trained to chat.
        recalls: whether the model was trained enough to recall a hidden word.
    """

    model: str
    perplexity: Mapping[str, Expectation]
    first_draft: Expectation
    chats: bool = True
    recalls: bool = True


def expectations_of(config: Mapping[str, Any]) -> Expectations:
    """The expectations of a checkpoint, from the contents of its config.json."""
    text = config.get("text_config", config)
    sizes = tuple(text.get(n) for n in ("hidden_size", "num_hidden_layers", "vocab_size"))
    if sizes == (256, 6, 4096):
        return _DEMO
    names: dict[tuple[Any, ...], str] = {
        (4096, 43, 129280): "V4-Flash",
        (7168, 61, 129280): "V4-Pro",
        (5120, 40, 129280): "V4.1-Flash",
        (64, 8, 1024): "demo-v41, random weights",
    }
    name = names.get(sizes, "unknown sizes")
    # Of the published checkpoints, only those that were not trained to chat have FP8 experts.
    is_base = config.get("expert_dtype") == "fp8"
    return Expectations(
        model=f"{name}, base" if is_base else name,
        perplexity={
            **dict.fromkeys(PROSE, Expectation.below(12, 40, _PUBLISHED)),
            "Confucius": Expectation.below(15, 60, _PUBLISHED),
            "Python": Expectation.below(6, 20, _PUBLISHED),
        },
        first_draft=Expectation.above(0.5, 0.25, _DRAFTS),
        chats=not is_base,
    )


_DEMO = Expectations(
    model="demo",
    perplexity={
        "Austen": Expectation.measured(61.6, _MEASURED),
        "Lincoln": Expectation.measured(45.8, _MEASURED),
        "Genesis": Expectation.measured(9.53, _MEASURED),
    },
    first_draft=Expectation.above(0.78, 0.6, "measured on a CPU: 0.90"),
    recalls=False,
)
