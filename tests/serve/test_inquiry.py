"""The server's judgement of stages from what it saw itself."""

from __future__ import annotations

import torch

from shoal.serve.nodes.inquiry import Inquiry, StageEvidence
from shoal.serve.nodes.layer_host import LayerRange
from shoal.serve.nodes.output_checks import agrees, output_problem, rows_not_finite
from shoal.serve.nodes.placement import RouteStage

X = torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(1))
NAN = torch.full_like(X, float("nan"))


def inquiry() -> Inquiry:
    """The last of three stages gave no finite numbers."""
    stages = [RouteStage(name, LayerRange(i, i + 1), i) for i, name in enumerate(("a", "b", "c"))]
    evidence = [StageEvidence(stages[2], X, None), StageEvidence(stages[1], X, X), StageEvidence(stages[0], X, X)]
    return Inquiry(1, 7, tuple(range(8)), "its output is not finite", evidence)


def test_a_machine_is_at_fault_where_the_servers_own_output_is_finite() -> None:
    one = inquiry()
    assert one.judge(X) == "machine"
    assert (one.current.stage.name, one.fault) == ("c", "its output is not finite")


def test_a_machine_whose_input_was_wrong_is_not_at_fault() -> None:
    one = inquiry()
    assert one.judge(NAN) == "next"
    assert one.judge(2 * X) == "machine"
    assert one.current.stage.name == "b"
    assert "the layers 1–1" in one.fault


def test_the_text_is_at_fault_where_all_stages_are_as_the_server_computes_them() -> None:
    one = inquiry()
    assert [one.judge(NAN), one.judge(X), one.judge(X)] == ["next", "next", "text"]


def test_where_the_server_cannot_compute_the_machine_that_failed_is_removed() -> None:
    assert inquiry().judge(None) == "machine"


def test_outputs_agree_within_the_rounding_of_machines_and_not_beyond() -> None:
    assert agrees(X, X.bfloat16().float())
    assert agrees(X, X + 0.01 * X.abs().amax())
    assert not agrees(X, 1.2 * X)
    assert not agrees(X, NAN)
    assert not agrees(NAN, NAN)
    one_large, one_other = X.clone(), X.clone()
    one_large[0, 3] *= 1e6
    one_other[0, 3] = X[0, 3].flip(0)
    assert not agrees(X, one_large)
    assert agrees(X, one_other), "a token may take other experts"


def test_an_output_has_the_expected_shape_and_type_and_is_finite() -> None:
    assert output_problem(X, (1, 8, 16), torch.float32) is None
    assert "(1, 8, 16)" in output_problem(X, (2, 8, 16), torch.float32)
    assert "float64" in output_problem(X.double(), (1, 8, 16), torch.float32)
    assert rows_not_finite(torch.cat([X, NAN, X])) == [1]
    assert rows_not_finite(X) == []
