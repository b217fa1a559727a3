"""What the main process and the process that hosts Ray say to each other."""

from __future__ import annotations

from deploy.ray_messages import RayAnswer, RayOrder
from specwire.rpc.model_service import ModelServiceOptions


def test_an_order_survives_the_way() -> None:
    services = {"verifier": ModelServiceOptions("m", threads=2), "drafter": ModelServiceOptions("d", context=9)}
    order = RayOrder("/somewhere", services, 3.5)
    assert RayOrder.from_json(order.to_json()) == order


def test_answers_survive_the_way() -> None:
    for answer in (RayAnswer(progress="x"), RayAnswer(addresses={"verifier": "h:1"}), RayAnswer(error="no\nway")):
        line = answer.to_json()
        assert "\n" not in line
        assert RayAnswer.from_json(line) == answer
