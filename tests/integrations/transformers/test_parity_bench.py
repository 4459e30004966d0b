"""The parity bench's first and last step, on tokens that the reference itself generated."""

import json
from pathlib import Path

import pytest
import torch

from beam_moe.testing import load_script

transformers = pytest.importorskip("transformers", minversion="5.22")
pytest.importorskip("safetensors")

BENCH = Path(__file__).parents[3] / "bench" / "vllm_parity.py"


@pytest.fixture(scope="module")
def bench():
    module = load_script(BENCH)
    module.PROMPTS, module.PROMPT, module.NEW = 2, 20, 6
    return module


@pytest.fixture(autouse=True)
def poisoned_empty():
    """transformers builds its models with torch.empty."""


@pytest.fixture(scope="module")
def generated(bench, tmp_path_factory):
    """A made folder, and what an engine that computes as the reference does would have written."""
    folder = tmp_path_factory.mktemp("parity")
    bench.make(folder)
    model, routes = bench.reference(folder), {}
    for index in range(bench.DENSE, bench.LAYERS):
        gate = model.model.layers[index].mlp.gate
        gate.register_forward_hook(lambda m, i, out, index=index: routes.__setitem__(index, out[2]))
    rows = []
    with torch.no_grad():
        for prompt in bench.prompts():
            tokens: list[int] = []
            for _ in range(bench.NEW):
                log = model(torch.tensor([prompt + tokens])).logits[0, -1].float().log_softmax(-1)
                tokens.append(int(log.argmax()))
            logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :].float().log_softmax(-1)
            ids = torch.zeros(len(prompt) + len(tokens) - 1, bench.LAYERS, bench.TOP_K, dtype=torch.int32)
            for index, chosen in routes.items():
                ids[:, index] = chosen.int()
            rows.append(
                {
                    "tokens": tokens,
                    "best": tokens,
                    "logprobs": logits.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist(),
                    "routes": ids.tolist(),
                }
            )
    result = {"tp": 1, "pp": 1, "adapter": True, "rows": rows, "device": "none", "versions": {}}
    return folder, {**result, "weights": bench.digest(folder), "commit": "test", "date": "2026-01-01"}


def score(bench, generated, tmp_path, **changes):
    folder, result = generated
    path = tmp_path / "generated_x.json"
    path.write_text(json.dumps({**result, **changes}))
    return bench.score(folder, path)


def test_the_reference_agrees_with_itself(bench, generated, tmp_path):
    row = score(bench, generated, tmp_path)
    assert row["ok"] and row["replayed"]["max"] < 1e-3 and row["own_routes"]["max"] < 1e-3
    assert row["own_routes"]["flips"].startswith("0 of") and row["replayed"]["argmax_disagreements"] == 0


def test_other_routes_are_replayed_and_counted(bench, generated, tmp_path):
    """One expert exchanged in every row of one layer: replay follows it, the reference's own choice is a flip."""
    rows = json.loads(json.dumps(generated[1]["rows"]))
    for row in rows:
        for token in row["routes"]:
            token[bench.DENSE][0] = next(e for e in range(bench.E) if e not in token[bench.DENSE])
    row = score(bench, generated, tmp_path, rows=rows)
    assert row["replayed"]["max"] > 10 * row["own_routes"]["max"]
    assert not row["own_routes"]["flips"].startswith("0 of")


def test_other_weights_and_shapes_are_refused(bench, generated, tmp_path):
    with pytest.raises(SystemExit, match="other weights"):
        score(bench, generated, tmp_path, weights="0")
    rows = [{**r, "routes": r["routes"][:-1]} for r in generated[1]["rows"]]
    with pytest.raises(SystemExit, match="routes"):
        score(bench, generated, tmp_path, rows=rows)


def test_a_missing_adapter_shows(bench, generated, tmp_path):
    """Log-probabilities of the bare model lie far outside the limits."""
    folder, result = generated
    bare, rows = bench.reference(folder, merged=False), []
    with torch.no_grad():
        for prompt, row in zip(bench.prompts(), result["rows"]):
            log = bare(torch.tensor([prompt + row["tokens"][:-1]])).logits[0, len(prompt) - 1 :].float().log_softmax(-1)
            rows.append({**row, "logprobs": log.gather(1, torch.tensor(row["tokens"])[:, None])[:, 0].tolist()})
    assert not score(bench, generated, tmp_path, rows=rows)["ok"]
