"""A small model that answers over HTTP, and the service around it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shoal.config.schema import model as schema
from shoal.config.schema.serving import Serving
from shoal.data import Tokenizer
from shoal.data.text.chat_template import plain_template, template_of
from shoal.data.text.tokenizers.own import ByteTokenizer
from shoal.models.gpt import Gpt
from shoal.serve.load_model import PLAIN_STOP_WORDS, ServedModel
from shoal.serve.model_pool import ModelPool
from shoal.serve.server import ModelServer
from shoal.serve.tool_formats import tool_format


def small_model(longest: int = 256) -> Gpt:
    """A GPT over bytes that writes letters, and has no end of text."""
    torch.manual_seed(3)
    model = Gpt(schema.Gpt(hidden_size=32, num_layers=2, num_heads=4, max_seq_len=longest, tied_embeddings=False), 257)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
        model.output.weight[:32] = 0
        model.output.weight[127:] = 0
    return model.eval()


def small_served(model: Gpt | None = None, **settings) -> ServedModel:
    tokenizer = ByteTokenizer()
    served = ServedModel("tiny", model or small_model(), tokenizer, plain_template(tokenizer), Serving(**settings), (), frozenset())
    return served._replace(stop_words=PLAIN_STOP_WORDS)


def small_served_with_tools(tokenizer: Tokenizer, longest: int) -> ServedModel:
    """A random GPT with a tokenizer whose chat template has tools."""
    torch.manual_seed(3)
    model = Gpt(schema.Gpt(hidden_size=32, num_layers=2, num_heads=4, max_seq_len=longest), tokenizer.vocab_size).eval()
    template, form = template_of(tokenizer), tool_format(tokenizer)
    assert template is not None
    assert form is not None
    return ServedModel("tiny", model, tokenizer, template, Serving(), (), frozenset({tokenizer.eos_id}), tool_format=form)


@contextmanager
def running(served: ServedModel, ports: int = 1) -> Iterator[ModelServer]:
    """The service on ports of this machine that the system chose; it ends with the block."""
    with running_pool(ModelPool.of_one(served, lambda text: None), ports) as service:
        yield service


@contextmanager
def running_pool(models: ModelPool, ports: int = 1) -> Iterator[ModelServer]:
    """The same with several models."""
    service = ModelServer(models, "127.0.0.1", [0] * ports)
    thread = threading.Thread(target=service.run)
    thread.start()
    try:
        yield service
    finally:
        service.stop()
        thread.join()
