"""A mixture of experts against a dense model with as many active parameters, on equal tokens; routers and features side by side.

Each token visits two of eight experts, each half as wide as the dense feed-forward: the router's weights are all that a token uses beside.
Every row is the mean of three seeds, with the smallest and the largest ratio beside it.
`BENCH=moe` begins afresh, `BENCH=moe:on` goes on where an earlier one was cut off, also within a run, `BENCH=moe:next` does one run more:
losses are kept in results/moe.json.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from run import Row

from shoal.cli.main import main

SHARED = Path(__file__).parents[2] / "shared" / "data"
SPEECHES, SHAKESPEARE, PAIRS = SHARED / "text" / "sotu_1900_2021.txt.gz", SHARED / "text" / "tinyshakespeare.txt", SHARED / "snli"
KEPT = Path(__file__).parents[1] / "results" / "moe.json"
STEPS, WIDTH, ACTIVE_WIDTH, PER_TOKEN, SEEDS = 1500, 32, 128, 2, (1, 2, 3)
"""With 300 steps each expert has seen a quarter of few tokens, and the two are alike. The rate is the best of both: 0.0015, 0.003, 0.006
and 0.01 were tried for the dense model and for the mixture. After a warm-up of only 50 steps, rates from 0.006 on keep a mixture at the
mere frequencies of characters for a while; for how long is chance, and says nothing of mixtures."""
CONFIG = f"""\
dialect: shoal
model: {{kind: gpt, hidden_size: {WIDTH}, num_layers: 2, num_heads: 4, max_seq_len: 64, intermediate_size: {ACTIVE_WIDTH}, dropout: 0.0,
        positions: rotary, feed_forward: swiglu, norm: rms, bias: false}}
data: {{source: {{kind: text, path: texts}}, tokenizer: characters}}
training:
  batch_size: 16
  max_steps: {STEPS}
  device: cpu
  clipping: {{max_norm: 1.0}}
  optimizer: {{name: AdamW, learning_rate: 0.01, beta2: 0.99, weight_decay: 0.1}}
  schedule: {{kind: cosine, warmup_steps: 200, end_learning_rate: 0.0002}}
evaluation: {{strategy: steps, every_steps: {STEPS}, batches: 40}}
checkpoint: {{strategy: steps, every_steps: 150, keep_last: 1}}
"""
MIXTURE = CONFIG.replace("kind: gpt", f"kind: moe, experts: {{count: 8, per_token: {PER_TOKEN}, capacity_factor: null}}").replace(
    f"intermediate_size: {ACTIVE_WIDTH}", f"intermediate_size: {ACTIVE_WIDTH // PER_TOKEN}"
)


class Case(NamedTuple):
    """A run, and the one that it is compared with."""

    name: str
    settings: Sequence[str] = ()
    against: str = "switch"
    text: str = "speeches"
    config: str = MIXTURE
    target: str = "–"


BY_WORDS = [
    *("data.tokenizer=bpe", "data.batching=padded", "model.max_seq_len=64", "model.hidden_size=64", "training.batch_size=32"),
    *("training.optimizer.learning_rate=0.004", "training.max_steps=3000", "evaluation.every_steps=3000"),
]
"""Sentences, each a sample of its own, in pieces of words: whoever reads something beside a text looks for its words. A model of this size
that reads single characters does not learn within these steps to find one of them elsewhere: its gate for what it reads stays shut."""
FOUND = [f"model.retrieval.{one}" for one in ("enabled=true", "encoder=words", "chunk_size=8", "passage_tokens=48", "top_k=2")]
REMEMBERED = ["model.episodic_memory.enabled=true", "model.episodic_memory.chunk_size=8"]
CASES = (
    Case("dense", config=CONFIG, against=""),
    Case("switch", against="dense", target="< 1"),
    *(Case(name, [f"model.experts.router={name}"]) for name in ("gshard", "hash", "stochastic")),
    Case("sigmoid-bias", ["model.experts.router=sigmoid-bias", "model.experts.aux_loss_weight=0"]),
    Case("mixture of heads", ["model.mixture_of_heads.enabled=true"]),
    Case("mixture of activations", ["model.mixture_of_activations.enabled=true"]),
    Case("no balance loss", ["model.experts.aux_loss_weight=0"]),
    Case("z-loss", ["model.experts.z_loss_weight=0.001"]),
    Case("capacity factor 1.25", ["model.experts.capacity_factor=1.25"]),
    Case("dense, Shakespeare", config=CONFIG, against="", text="shakespeare"),
    Case("switch, Shakespeare", against="dense, Shakespeare", text="shakespeare", target="< 1"),
    Case("no context", BY_WORDS, against="", text="hypotheses"),
    Case("cross-attention", [*BY_WORDS, "model.cross_attention.enabled=true"], against="no context", text="pairs", target="< 1"),
    Case("nothing to find", BY_WORDS, against="", text="stories"),
    Case("retrieval", [*BY_WORDS, *FOUND], "nothing to find", "stories", target="< 1"),
    Case("memory", [*BY_WORDS, *REMEMBERED], "nothing to find", "stories"),
    Case("memory, nothing replayed", [*BY_WORDS, *REMEMBERED, "model.episodic_memory.replay_rate=0"], "nothing to find", "stories"),
    Case("cross-attention, contexts of other sentences", [*BY_WORDS, "model.cross_attention.enabled=true"], "no context", "shuffled"),
    Case("premises once", BY_WORDS, against="", text="singles"),
    Case("retrieval, premises once", [*BY_WORDS, *FOUND], "premises once", "singles"),
    Case("memory, premises once", [*BY_WORDS, *REMEMBERED], "premises once", "singles"),
    Case("bf16", ["training.precision.kind=bf16"]),
    Case("fp8, emulated", ["training.precision.kind=fp8", "training.allow_emulation=true"]),
    Case("nvfp4, emulated", ["training.precision.kind=nvfp4", "training.allow_emulation=true"]),
)


def write(text: str, folder: Path) -> None:
    """The text that a case learns from, as files."""
    folder.mkdir()
    if text == "shakespeare":
        (folder / "all.txt").write_bytes(SHAKESPEARE.read_bytes())
    elif text != "speeches":
        files = [gzip.decompress(file.read_bytes()).decode() for file in sorted(PAIRS.glob("*.gz"))]
        rows = [(premise, hypothesis) for file in files for premise, hypothesis, *_ in (line.split("\t") for line in file.splitlines())]
        (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in _sentences(text, rows)))
    else:
        (folder / "all.txt").write_bytes(gzip.decompress(SPEECHES.read_bytes()))


def _sentences(text: str, rows: list[tuple[str, str]]) -> Iterator[dict[str, str]]:
    """Lines of SNLI, where three hypotheses follow each premise: who finds another line with the same premise knows how it goes on."""
    for number, (premise, hypothesis) in enumerate(rows):
        if text == "stories" or (text == "singles" and (not number or rows[number - 1][0] != premise)):
            yield {"text": f"{premise}. {hypothesis}"}
        elif text == "hypotheses":
            yield {"text": hypothesis}
        elif text in ("pairs", "shuffled"):
            yield {"text": hypothesis, "context": premise if text == "pairs" else rows[number - len(rows) // 2][0]}


def trained(case: Case, seed: int) -> dict[str, dict[str, float]]:
    """The last figures of a run, which goes on where it was cut off."""
    folder = KEPT.parent / "moe" / f"{case.name}, seed {seed}".replace(" ", "-")
    begun = (folder / "run" / "checkpoints").is_dir()
    if not begun:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write(case.text, folder / "texts")
        (folder / "config.yaml").write_text(case.config)
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        chosen = [word for setting in (f"seed={seed}", *case.settings) for word in ("--set", setting)]
        assert main(["train", "config.yaml", "--run-dir", "run", *chosen, *(["--resume"] if begun else [])]) == 0
    metrics: dict[str, dict[str, float]] = json.loads((folder / "run" / "summary.json").read_text())["metrics"]
    shutil.rmtree(folder)
    return metrics


def row(case: Case, known: dict[str, Any]) -> Row | None:
    """The mean loss of the seeds that are known of both sides, and how far the seeds lie apart; None: there are none."""
    both = [(one, known.get(f"{case.against}, seed {seed}")) for seed in SEEDS if (one := known.get(f"{case.name}, seed {seed}"))]
    pairs = [(ours["eval"], peer["eval"], ours["train"]) for ours, peer in both if peer]
    if not pairs:
        return None
    ours, peers = ([figures["loss"] for figures in side] for side in list(zip(*pairs, strict=True))[:2])
    ratios = [one / other for one, other in zip(ours, peers, strict=True)]
    excess = [value for *_, train in pairs for name, value in train.items() if name.endswith("/load_excess")]
    hidden = sorted({name for one, *_ in pairs for name in one if name.startswith("loss_without")})
    notes = [f"{len(pairs)} seeds, ratios {min(ratios):.3f} to {max(ratios):.3f}"]
    notes += [f"the fullest expert has {1 + fmean(excess):.2f} × an even share"] if excess else []
    notes += [f"{name} {fmean(one[name] for one, *_ in pairs):.4f}" for name in hidden]
    title = f"moe, {case.name}, against {case.against}: validation loss"
    return Row(title, fmean(ours), fmean(peers), "nats/character", fmean(ratios), case.target, "; ".join(notes))


def measure(part: str = "") -> Iterator[Row]:
    if not SPEECHES.exists():
        print("moe: skipped, there is no text in ../shared/data")
        return
    known: dict[str, Any] = json.loads(KEPT.read_text()) if part and KEPT.exists() else {}
    KEPT.parent.mkdir(exist_ok=True)
    if not part:
        shutil.rmtree(KEPT.parent / "moe", ignore_errors=True)
    order = [(case, seed) for case in CASES[:2] for seed in SEEDS] + [(case, seed) for seed in SEEDS for case in CASES[2:]]
    missing = [(case, seed) for case, seed in order if f"{case.name}, seed {seed}" not in known]
    for case, seed in missing[:1] if part == "next" else missing:
        known[f"{case.name}, seed {seed}"] = trained(case, seed)
        KEPT.write_text(json.dumps(known))
    yield from (found for case in CASES if case.against and (found := row(case, known)) is not None)
