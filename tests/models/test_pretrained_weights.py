"""Real pretrained weights give the text and the likelihood on record."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from benchmarks.story_models import load_story_model
from shoal.config.schema.serving import Decoding
from shoal.models import generate


@pytest.mark.parametrize("name", ["stories260K", "stories15M"])
def test_reference_outputs(lm_folder, name):
    model, config = load_story_model(lm_folder, name)
    reference = config["reference"]
    prompt = torch.tensor([reference["prompt_ids"]])
    written = [int(token) for token in generate(model, prompt, max_new_tokens=64, decoding=Decoding(active="greedy"))]
    assert written == reference["greedy_ids"]
    text = torch.tensor(reference["text_ids"])
    with torch.no_grad():
        loss = F.cross_entropy(model(text[None, :-1])[0], text[1:])
    assert loss.item() == pytest.approx(reference["text_mean_nll"], abs=2e-5)


@pytest.mark.whole
def test_a_story_goes_on_past_the_longest_sequence(lm_folder):
    model, config = load_story_model(lm_folder, "stories260K")
    prompt = torch.tensor([config["reference"]["prompt_ids"]])
    written = [int(token) for token in generate(model, prompt, max_new_tokens=700, decoding=Decoding(active="greedy"))]
    assert len(written) == 700 > config["max_seq_len"]
    # Still language and not noise: the model finds its own text likely
    last = torch.tensor([written[-200:]])
    with torch.no_grad():
        assert F.cross_entropy(model(last[:, :-1])[0], last[0, 1:]) < 1.0
