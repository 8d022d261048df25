"""The parts of a model that only the server has: the embedding of tokens, and the output after the last layer.

Shapes: B batch, L tokens, D width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.models.generation.kv_cache import mask_of_rows
from shoal.models.split_model import ModelEnds
from shoal.serve.batching.generation_job import PromptOutput
from shoal.serve.nodes.layer_host import TokenBatch


class ServerEnds:
    """Embeds batches of tokens, and computes what the engine asks for from hidden states."""

    def __init__(self, modules: ModelEnds) -> None:
        self.modules = modules.eval()
        self.device = next(modules.parameters()).device
        embedded_11D = modules.embed(torch.zeros(1, 1, dtype=torch.long, device=self.device))
        self.width, self.dtype = embedded_11D.shape[-1], embedded_11D.dtype

    def embed(self, token_batch: TokenBatch) -> Tensor:
        ids_BL = torch.tensor(token_batch.ids, device=self.device)
        if len(set(token_batch.positions)) == 1:
            return self.modules.embed(ids_BL, token_batch.positions[0])
        length = ids_BL.shape[1]
        lengths = [position + length for position in token_batch.positions]
        return self.modules.embed(ids_BL, max(lengths) - length, mask_of_rows(lengths, self.device))

    @torch.inference_mode()
    def result(self, y_BLD: Tensor, output: PromptOutput | None) -> Tensor:
        """The logits [B, V] of the next tokens, or the output at all tokens [B, L, …], from the residual stream after the last layer."""
        if output is None:
            return self.modules.logits(y_BLD[:, -1:].to(self.device))[:, 0]
        compute = self.modules.logits if output == "logits" else self.modules.last_hidden
        return compute(y_BLD.to(self.device))
