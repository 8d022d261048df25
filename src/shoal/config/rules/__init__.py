"""Rules between settings, by subject; importing this package registers all of them."""

from shoal.config.rules import alerts, cluster, data, feedback, models, optimizers, training, unused_settings, updates
from shoal.config.rules.rule import RULES, apply

__all__ = ["RULES", "alerts", "apply", "cluster", "data", "feedback", "models", "optimizers", "training", "unused_settings", "updates"]
