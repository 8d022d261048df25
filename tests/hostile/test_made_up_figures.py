"""Names of figures are free, and whoever makes up ever new ones neither fills memory nor takes the loss out of everybody's records."""

from __future__ import annotations

from shoal.config.schema.strategy import Async
from tests.support.small_cluster import Cluster, strategy_of


def test_metrics_with_invented_names_do_not_crowd_out_those_of_other_workers() -> None:
    cluster = Cluster(strategy_of(Async(contributions_per_update=1)))
    for number in range(20):
        eve = cluster.join(f"eve{number}")
        for part in range(4):
            cluster.ask(eve.protocol.heartbeat("computing", {f"beat{number}/{part}/{n}": 1.0 for n in range(16)}))
            made_up = {f"made up {number}/{part}/{n}": 1.0 for n in range(300)}
            assert cluster.step(eve, metrics=made_up) == "accepted"
    assert cluster.coordinator.refused["figures"] > 20 * 4 * (300 - 256)
    assert len({name for published in cluster.published for name in published.metrics}) <= 4096
    ada = cluster.join("ada")
    assert cluster.step(ada) == "accepted"
    assert cluster.published[-1].metrics == {"loss": 1.0}


def test_one_worker_takes_no_room_from_the_figures_of_another() -> None:
    cluster = Cluster(strategy_of(Async(contributions_per_update=1)))
    eve, ada = cluster.join("eve"), cluster.join("ada")
    for part in range(20):
        cluster.step(eve, metrics={f"{part}/{n}": 1.0 for n in range(300)})
    cluster.step(ada, metrics={"loss": 2.0, "perplexity": 7.0})
    assert cluster.published[-1].metrics == {"loss": 2.0, "perplexity": 7.0}
