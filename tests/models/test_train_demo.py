"""The scripts that train the embedded model and its DSpark head: examples/train_demo."""

import json
import lzma
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.models import transcription as t
from torch import Tensor

from finwhale import LLM, SamplingParams
from finwhale.checkpoint.reader import Checkpoint
from finwhale.demo import DEMO_PATH

EXAMPLE = Path(__file__).parents[2] / "examples/train_demo"
sys.path.append(str(EXAMPLE))

import dspark  # noqa: E402
import evaluate_dspark  # noqa: E402
import export_dspark  # noqa: E402
import train  # noqa: E402
import train_dspark  # noqa: E402
from corpus import PAD  # noqa: E402
from export import dequantised, join, load_shipped  # noqa: E402
from generate import hidden_of  # noqa: E402
from layout import official_tensors  # noqa: E402
from model import Batch, DemoConfig, DemoModel, Switches  # noqa: E402
from rounding import rounded_fp4_weight, rounded_fp8_weight  # noqa: E402

# The weights that a checkpoint stores in FP8.
FP8_NAMES = re.compile(
    r"(attn\.w(q_a|q_b|kv|o_a|o_b)|indexer\.wq_b|shared_experts\.w[123]|[eh]_proj|main_proj)\.weight$"
)
TINY = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "head_dim": 128,
    "q_lora_rank": 128,
    "o_lora_rank": 64,
    "o_groups": 2,
    "index_n_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "num_hash_layers": 1,
    "compress_ratios": [0, 4, 128, 0, 0],
    "max_position_embeddings": 512,
}
TOLERANCE = 1e-4  # of the norm: float32 beside float64
ROUNDED_TOLERANCE = 0.01  # of most blocks; a missing rounding makes more than 0.05


def tiny_config(**changes: object) -> dict[str, object]:
    config: dict[str, object] = json.loads((EXAMPLE / "config.json").read_text())
    return config | TINY | changes


# --- The head's forward ---------------------------------------------------------------------------


def randomise(module: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, p in [*module.named_parameters(), *module.named_buffers()]:
        if name.endswith("tid2eid"):
            p.data.copy_(torch.rand(p.shape[0], 4, generator=generator).topk(2, -1).indices)
        elif p.dim() == 1 or name.endswith("ape"):
            p.data.add_(torch.randn(p.shape, generator=generator) * 0.3)
        elif name.endswith(".fn") or "markov" in name or "confidence" in name:
            p.data.copy_(torch.randn(p.shape, generator=generator) * 0.1)


def doubles(module: torch.nn.Module) -> dict[str, Tensor]:
    return {
        name: value if value.dtype == torch.int64 else value.double()
        for name, value in official_tensors(dict(module.state_dict()))
    }


def context_features(weights: t.Weights, config: t.Config, ids: list[int]) -> Tensor:
    """m [T,D] of MODEL: the normed projection of the target layers' mean residual streams."""
    tokens, means = torch.tensor(ids), []
    streams = weights["embed.weight"][tokens][:, None].expand(-1, config["hc_mult"], -1)
    for i in range(config["num_hidden_layers"]):
        hashed = i < config["num_hash_layers"]
        layer = t.Part(weights, f"layers.{i}.")
        ratio = config["compress_ratios"][i]
        streams = t.decoder_layer(layer, config, ratio, hashed, streams, tokens, None)
        if i in config["dspark_target_layer_ids"]:
            means.append(streams.mean(1))
    first = t.Part(weights, "mtp.0.")
    projected = t.linear(first, "main_proj", config, torch.cat(means, -1))
    return t.rms_norm(projected, first["main_norm.weight"], config["rms_norm_eps"])


def kv_rows(w: t.Part, config: t.Config, x: Tensor, positions: Tensor) -> Tensor:
    row = t.rms_norm(t.linear(w, "wkv", config, x), w["kv_norm.weight"], config["rms_norm_eps"])
    return t.stored(t.rope(row, positions, config, 0), config)


def stage_attention(w: t.Part, config: t.Config, x: Tensor, m: Tensor, first: int) -> Tensor:
    """Every row of the block x [G,D] at positions first.. sees the last rows of m and all of x."""
    heads, dim, eps = config["num_attention_heads"], config["head_dim"], config["rms_norm_eps"]
    begin = max(0, first - config["sliding_window"])
    positions = torch.arange(first, first + len(x))
    before = kv_rows(w, config, m[begin:first], torch.arange(begin, first))
    keys = torch.cat([before, kv_rows(w, config, x, positions)])
    q_lora = t.rms_norm(t.linear(w, "wq_a", config, x), w["q_norm.weight"], eps)
    q = t.rms_norm(t.linear(w, "wq_b", config, q_lora).view(len(x), heads, dim), None, eps)
    logits = torch.einsum("gac,kc->gak", t.rope(q, positions, config, 0), keys) / dim**0.5
    sink = w["attn_sink"].expand(len(x), -1)[:, :, None]
    shares = torch.cat([logits, sink], 2).softmax(2)[:, :, :-1]
    out = t.rope(torch.einsum("gak,kc->gac", shares, keys), -positions, config, 0)
    groups = config["o_groups"]
    wo_a = w["wo_a.weight"].view(groups, config["o_lora_rank"], -1)
    out = t.rounded(out.flatten(1).unflatten(1, (groups, -1)), config)
    return t.linear(w, "wo_b", config, torch.einsum("tgi,goi->tgo", out, wo_a).flatten(1))


def draft_block(
    weights: t.Weights, config: t.Config, m: Tensor, newest: int, first: int
) -> tuple[Tensor, list[int], Tensor]:
    """The last hidden rows [G,D], greedy drafts and confidences after token `newest` at `first`."""
    block, eps = config["dspark_block_size"], config["rms_norm_eps"]
    tokens = torch.tensor([newest] + [config["dspark_noise_token_id"]] * (block - 1))
    streams = weights["embed.weight"][tokens][:, None].expand(-1, config["hc_mult"], -1)
    for stage in range(3):
        w = t.Part(weights, f"mtp.{stage}.")
        x, post, comb = t.mhc_pre(w, "hc_attn_", config, streams)
        x = t.rms_norm(x, w["attn_norm.weight"], eps)
        out = stage_attention(w.under("attn."), config, x, m, first)
        streams = t.mhc_post(out, streams, post, comb)
        x, post, comb = t.mhc_pre(w, "hc_ffn_", config, streams)
        x = t.rms_norm(x, w["ffn_norm.weight"], eps)
        out = t.moe(w.under("ffn."), config, False, x, tokens, None)
        streams = t.mhc_post(out, streams, post, comb)
    w = t.Part(weights, "mtp.2.")
    mixes = t.rms_norm(streams.flatten(1), None, eps) @ w["hc_head_fn"].T
    pre = torch.sigmoid(mixes * w["hc_head_scale"] + w["hc_head_base"]) + config["hc_eps"]
    hidden = torch.einsum("th,thd->td", pre, streams)
    logits = t.rms_norm(hidden, w["norm.weight"], eps) @ weights["head.weight"].T
    drafts, confidences, before = [], [], newest
    for k in range(block):
        row = w["markov_head.markov_w1.weight"][before]
        score = torch.cat([hidden[k], row]) @ w["confidence_head.proj.weight"][0]
        confidences.append(score)
        before = int((logits[k] + w["markov_head.markov_w2.weight"] @ row).argmax())
        drafts.append(before)
    return hidden, drafts, torch.stack(confidences)


def round_weights(module: torch.nn.Module) -> None:
    """To the values that an exported checkpoint holds."""
    for name, p in module.named_parameters():
        if re.search(r"\.experts\.w[123]\.weight$", name):
            p.data.copy_(rounded_fp4_weight(p.data))
        elif FP8_NAMES.search(name):
            p.data.copy_(rounded_fp8_weight(p.data))


@pytest.mark.parametrize("as_trained", [False, True])
@torch.inference_mode()
def test_head_drafts_as_its_formulas_say(tmp_path: Path, as_trained: bool) -> None:
    """Two documents in a row; blocks at their first tokens, inside and beyond the window.

    As trained, a last bit of float32 may become a step of E4M3, in few of the blocks.
    """
    raw = dspark.dspark_json(tiny_config(sliding_window=16, vocab_size=320))
    raw["as_trained"] = as_trained
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = DemoConfig.load(tmp_path / "config.json")
    torch.manual_seed(0)
    model = DemoModel(config)
    head = dspark.DSparkHead(config, dspark.DSparkConfig.of(raw))
    randomise(model)
    randomise(head)
    for module in (model, head) if as_trained else ():
        round_weights(module)
    switches = Switches(torch.tensor(as_trained), torch.tensor(True))
    tokens = torch.randint(20, 320, (1, 256))
    doc = torch.arange(2, dtype=torch.int32).repeat_interleave(128)[None]
    batch = Batch(tokens, doc)
    columns = torch.tensor([[0, 3, 15, 16, 90, 128, 133, 200, 250]])
    labels = train.labels_of(tokens, doc, 1)
    anchors = dspark.anchors_at(batch, labels, columns, 16, 5)
    features = dspark.features_of(model, head.head_config, batch, switches)
    drafted = head(features, batch, anchors, model.embed.weight, model.head.weight, switches)
    newest = tokens.flatten()[anchors.at]
    drafts, confidences = head.propose(drafted, newest, 0.0, None)
    base = {k: v for k, v in doubles(model).items() if not k.startswith("mtp.")}
    weights = base | doubles(head)
    aparts: list[float] = []
    for number in range(2):
        ids = tokens[0, number * 128 : number * 128 + 128].tolist()
        m = context_features(weights, raw, ids)
        for j, column in enumerate(columns[0].tolist()):
            if column // 128 != number:
                continue
            first = column - number * 128
            hidden, wanted, scores = draft_block(weights, raw, m, ids[first], first)
            aparts.append(((drafted.hidden[j].double() - hidden).norm() / hidden.norm()).item())
            if not as_trained:
                assert aparts[-1] < TOLERANCE
                assert drafts[j].tolist() == wanted
                torch.testing.assert_close(confidences[j].double(), scores, rtol=1e-3, atol=1e-3)
    assert np.median(aparts) < ROUNDED_TOLERANCE


def test_anchors_have_a_next_token_and_stay_in_their_document() -> None:
    tokens = torch.arange(20, 276)[None].clone()
    tokens[0, 125:128] = PAD
    doc = torch.arange(2, dtype=torch.int32).repeat_interleave(128)[None]
    labels = train.labels_of(tokens, doc, 1)
    generator = torch.Generator().manual_seed(0)
    chosen = dspark.choose_anchors(Batch(tokens, doc), labels, 200, 16, 5, generator)
    assert len(set(chosen.at.tolist())) == 200
    for at, context, visible, after in zip(*chosen, strict=True):
        begin, end = (0, 125) if at < 128 else (128, 256)
        assert begin <= at < end - 1
        wanted = [i for i in range(int(at) - 16, int(at)) if i >= begin]
        assert context[visible].tolist() == wanted
        following = [20 + i if i < end else -100 for i in range(int(at) + 1, int(at) + 6)]
        assert after.tolist() == following


def test_loss_is_the_published_one() -> None:
    """Two positions with equal and with disjoint distributions, in closed form."""
    logits = torch.tensor([[[0.0, 0.0], [50.0, -50.0]]])
    target = torch.tensor([[[0.0, 0.0], [-50.0, 50.0]]])
    distance = (logits.softmax(-1) - target.softmax(-1)).abs().sum(-1)
    labels, confidence = torch.tensor([[1, 0]]), torch.zeros(1, 2)
    judged = train_dspark.Judged(logits, target, confidence, labels, distance)
    losses = train_dspark.losses_of(judged)
    share = 1 / (1 + np.exp(-0.25))  # of the first position
    assert losses.l1.item() == pytest.approx(2 * (1 - share))
    assert losses.cross_entropy.item() == pytest.approx(np.log(2) * share)
    assert losses.confidence.item() == pytest.approx(np.log(2))
    wanted = 0.1 * losses.cross_entropy + 0.9 * losses.l1 + losses.confidence
    assert losses.total.item() == pytest.approx(wanted.item())
    sampled, greedy = judged.accepted_lengths()
    assert sampled.tolist() == [2.0] and greedy.tolist() == [2]


# --- The scripts ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus.xz of 200 documents, whose tokens count upwards."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    lengths = rng.integers(40, 200, 200).astype(np.uint32)
    starts = rng.integers(20, 3800, 200)
    tokens = [start + np.arange(length) for start, length in zip(starts, lengths, strict=True)]
    header = {"sources": ["closed", "moby"], "documents": 200, "tokens": int(lengths.sum())}
    with lzma.open(folder / "corpus.xz", "wb") as file:
        file.write(json.dumps(header).encode() + b"\n")
        file.write(lengths.tobytes())
        file.write((np.arange(200) % 2).astype(np.uint8).tobytes())
        file.write((np.arange(200) % 7 == 6).astype(np.uint8).tobytes())
        file.write(np.concatenate(tokens).astype(np.uint16).tobytes())
    return folder


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The scripts' changes to the process do not outlive the test."""
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda _: None)
    before = signal.getsignal(signal.SIGTERM)
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)
    signal.signal(signal.SIGTERM, before)


def run(monkeypatch: pytest.MonkeyPatch, main: object, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["script", *map(str, arguments)])
    assert callable(main)
    main()


def short(corpus: Path, folder: Path, steps: int) -> tuple[object, ...]:
    return (
        *("--data", corpus, "--out", folder, "--state", folder.with_suffix(".state")),
        *("--device", "cpu", "--eager", "--max-steps", steps, "--log-steps", 1),
        *("--row-tokens", 128, "--batch-tokens", 128),
    )


@pytest.mark.usefixtures("quiet")
def test_scripts_train_and_export_what_finwhale_loads(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, base, head, both = (tmp_path / name for name in ("c.json", "base", "head", "both"))
    config.write_text(json.dumps(tiny_config()))
    arguments = short(corpus, base, 2)
    run(monkeypatch, train.main, *arguments, "--config", config, "--long-tokens", 0)
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    for file in DEMO_PATH.glob("tokenizer*.json"):
        (base / file.name).write_bytes(file.read_bytes())
        (shipped / file.name).write_bytes(file.read_bytes())
    join(base, shipped)
    assert Checkpoint.open(shipped).tensors.keys() == Checkpoint.open(base).tensors.keys()
    tokenizer = json.loads((shipped / "tokenizer_config.json").read_text())
    assert tokenizer["model_max_length"] == tiny_config()["max_position_embeddings"]
    options = ("--base", base, "--row-anchors", 16, "--measure-steps", 2)
    run(monkeypatch, train_dspark.main, *short(corpus, head, 1), *options)
    run(monkeypatch, train_dspark.main, *short(corpus, head, 2), *options)  # resumes
    records = [json.loads(line) for line in (head / "train_dspark.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if "total" in r] == [1, 2]
    assert {"prose_accepted_t1", "conversations_accepted_t0"} <= records[-1]["held_out"].keys()
    export_dspark.join(base, head, tmp_path / "alone")
    export_dspark.share(base, head, both)
    assert Checkpoint.open(base).tensors.keys() >= {"head.weight", "mtp.0.enorm.weight"}
    alone = Checkpoint.open(tmp_path / "alone").tensors
    assert Checkpoint.open(both).tensors.keys() == alone.keys()
    trained = export_dspark.load_head(both, torch.float32).state_dict()
    exported = {k: v for k, v in dequantised(both).items() if k.startswith("mtp.")}
    assert trained.keys() == exported.keys()
    # The tiny model's logits are small beside the noise: another noise gives other tokens. A last
    # bit of the logits may decide between two.
    llm = LLM(both, device="cpu", max_model_len=256)
    draws = SamplingParams(temperature=1, seed=7, max_tokens=8, ignore_eos=True)
    prompt = list(range(30, 40))
    found = llm.generate([prompt], draws)[0].outputs[0].token_ids
    text = torch.tensor([[*prompt, *found, *[PAD] * 110]])
    on = Switches(torch.tensor(True), torch.tensor(True))
    model = load_shipped(base, torch.float32)
    logits = model.logits(hidden_of(model, text, on))[0, len(prompt) - 1 :][: len(found)]
    noise = evaluate_dspark.noise_of(torch.arange(len(found)), 7, model.config.vocab_size)
    assert ((logits + noise).argmax(-1) == torch.tensor(found)).sum() >= 6
