"""What torch's compiler leaves alone."""

from __future__ import annotations

import torch

from shoal.models.compile_rules import exclude_from_compilation, not_compiled
from shoal.models.routers.base import top_experts


def test_what_is_left_alone_runs_as_it_is_written_within_what_is_compiled() -> None:
    graphs: list[str] = []

    def keep(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph.code)
        return graph

    @not_compiled
    def alone(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    def whole(x: torch.Tensor) -> torch.Tensor:
        return alone(x.cos()).exp()

    exclude_from_compilation()
    x = torch.linspace(0, 1, 5)
    assert torch.equal(torch.compile(whole, backend=keep)(x), x.cos().sin().exp())
    assert [name in "".join(graphs) for name in ("cos", "sin()", "exp")] == [True, False, True]


def test_the_best_experts_are_the_same_where_the_compiler_finds_them() -> None:
    scores_TE = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    for count in (1, 2, 3, 5):
        found = torch.compile(top_experts, backend="eager", dynamic=False, fullgraph=True)(scores_TE, count)
        assert torch.equal(found, scores_TE.topk(count, dim=1).indices)
